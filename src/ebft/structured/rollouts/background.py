"""An event loop on a background thread: blocking calls of other threads run their HTTP requests on it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ebft.errors import RolloutError

T = TypeVar("T")


class BackgroundLoop:
    """Runs coroutines for other threads. Methods are thread-safe; `closed` is the error for calls after `close`."""

    def __init__(self, name: str, closed: str) -> None:
        self._closed_error, self._closed = closed, False
        self._pending: set[concurrent.futures.Future] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Block until the coroutine ends and return its result; it is cancelled if the waiting thread is interrupted.

        Raises CancelledError after `cancel`, and RolloutError after `close`.
        """
        if self._closed:
            coroutine.close()
            raise RolloutError(self._closed_error)
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._pending.add(future)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # also if the waiting thread was interrupted
            raise
        finally:
            self._pending.discard(future)

    def cancel(self) -> None:
        """Cancel all running coroutines."""
        for future in list(self._pending):
            future.cancel()

    def close(self, finish: Callable[[], Coroutine[Any, Any, None]], timeout: float) -> None:
        """Cancel everything, run `finish()` within `timeout` seconds and stop the thread; can be called repeatedly."""
        if self._closed:
            return
        self._closed = True
        self.cancel()
        asyncio.run_coroutine_threadsafe(finish(), self._loop).result(timeout=timeout)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=timeout)
        if not self._thread.is_alive():
            self._loop.close()
