"""HTTP client of vLLM's OpenAI server: sends token ids, receives token ids and their sampling log-probabilities."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import groupby
from typing import Any, TypeVar

import httpx2

from ebft.config.keys.serving import base_url
from ebft.errors import RolloutError, doing, shortened, told
from ebft.printed import say
from ebft.structured.rollouts.turns import Completion, Sampling

_ATTEMPTS = 5  # for a request that fails with a server error (5xx)
_BACKOFF = 0.5  # seconds before the second attempt, doubled for each further one
CONNECT_TIMEOUT = 5.0
_CONCURRENT = 256  # requests at the same time
_POLL = 0.5  # seconds between health checks of a server that is not running


class ModelNotServed(RolloutError):
    """The server does not have the requested model or adapter, usually because it was restarted."""


class VLLMClient:
    """Client of a single server. Methods block and are thread-safe; `cancel` aborts all pending requests.

    `timeout` is the maximum time in seconds to wait for a server that is not running, and for each response. `failure`
    is called while waiting and returns why the server failed permanently, or None if it has not.
    """

    def __init__(
        self, host: str, port: int, timeout: float, *, failure: Callable[[], str | None] = lambda: None
    ) -> None:
        url = base_url(host, port)
        self.address: str = url.removeprefix("http://")
        self.timeout = timeout
        self._failure = failure
        closed = f"The connection to the vLLM server at {self.address} is closed."
        self._http = HTTPClient(url)
        loop = BackgroundLoop("ebft-vllm-client", closed, self._http)
        self._run, self.cancel, self.close = loop.run, loop.cancel, loop.close

    def wait_until_up(self) -> None:
        """Block until the server responds; raises RolloutError if it does not respond within the timeout."""
        self._run(self._wait_until_up())

    def models(self) -> list[dict[str, Any]]:
        """Return the server's models and adapters, as listed by /v1/models."""
        return self._run(self._list("data", "GET", "/v1/models"))

    def base_model(self) -> dict[str, Any]:
        """Return the entry of the base model: `id`, `root` (the name or path it was loaded from), `max_model_len`."""
        return next(entry for entry in self.models() if entry.get("parent") is None)

    def tokenize(self, model: str, text: str) -> list[int]:
        """Return the token ids of a text from the server's tokenizer, without special tokens."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return self._run(self._list("tokens", "POST", "/tokenize", body))

    def load_adapter(self, name: str, path: str) -> None:
        """Load the adapter in folder `path` as `name`; does nothing if that name is already loaded."""
        try:
            self._run(self._request("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}))
        except RolloutError:
            if not any(entry["id"] == name for entry in self.models()):
                raise

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter, in a single attempt: a server that is not running or was restarted does not have it."""
        body = {"lora_name": name}
        with suppress(httpx2.RequestError):
            self._run(self._http.whole("POST", "/v1/unload_lora_adapter", CONNECT_TIMEOUT, body))

    def complete(
        self, model: str, prompts: list[list[int]], max_tokens: list[int], sampling: Sampling
    ) -> list[Completion]:
        """Return one completion per prompt; adjacent entries with equal prompt and limit form a single request.

        Raises ModelNotServed if the server does not have `model`, and RolloutError if the request fails.
        """
        requests = [(key, len(list(same))) for key, same in groupby(zip(map(tuple, prompts), max_tokens))]
        bodies = [_body(model, list(prompt), limit, count, sampling) for (prompt, limit), count in requests]
        answers = self._run(self._all(bodies))
        return [completion for answer in answers for completion in answer]

    async def _all(self, bodies: list[dict[str, Any]]) -> list[list[Completion]]:
        tasks = [asyncio.ensure_future(self._complete(body)) for body in bodies]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:  # the first failure cancels all requests, and vLLM aborts requests of closed connections
                task.cancel()
            raise

    async def _complete(self, body: dict[str, Any]) -> list[Completion]:
        for _ in range(2):  # an aborted request returns no tokens, so it is repeated once
            choices = await self._list("choices", "POST", "/v1/completions", body)
            completions = []
            for choice in choices:
                ids, logps = choice.get("token_ids") or [], (choice.get("logprobs") or {}).get("token_logprobs") or []
                with doing("reading the log-probabilities of the tokens that the vLLM server returned"):
                    logps = [float("nan") if logp is None else logp for logp, _ in zip(logps, ids, strict=True)]
                completions.append(Completion(ids, logps))
            if len(completions) == body["n"] and all(completion.ids for completion in completions):
                return completions
        raise RolloutError(f"The vLLM server at {self.address} returned no tokens in two attempts. See its log.")

    async def _list(self, name: str, method: str, path: str, body: dict[str, Any] | None = None) -> list[Any]:
        """Return the list `name` in the JSON response."""
        with doing(f"reading {name} in what the server at {self.address} responds to {path}"):
            return (await self._request(method, path, body))[name]

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON response; waits for a server that is not running and retries 5xx up to `_ATTEMPTS` times."""
        last = "none (connection lost)"
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                response = await self._http.whole(method, path, self.timeout, body)
            except httpx2.ReadTimeout as error:
                raise RolloutError(
                    f"The vLLM server at {self.address} did not respond to {path} within {self.timeout:g} s. Increase "
                    "trl.vllm_server_timeout if the server is slow, and see its log."
                ) from error
            except httpx2.TransportError:  # refused, reset or closed: the server is not running or still starting
                await self._wait_until_up(last)
                continue
            if response.status_code == 200:
                return response.json() if "json" in response.headers.get("content-type", "") else response.text
            if response.status_code == 404 and body is not None and "model" in body:
                raise ModelNotServed(f"The vLLM server at {self.address} does not serve {body['model']!r}.")
            last = f"{response.status_code}: {shortened(response.text)}"
            if response.status_code < 500:
                how = "rejected"
                break
            if attempt < _ATTEMPTS:
                await asyncio.sleep(_BACKOFF * 2 ** (attempt - 1))
        else:
            how = f"failed {_ATTEMPTS} times on"
        raise RolloutError(f"The vLLM server at {self.address} {how} {path}; see its log. Last response: {last}")

    async def _wait_until_up(self, last: str | None = None) -> None:
        """Wait until the server responds; `last` is its last response before the connection was lost."""
        before = f"Last response: {last}. " if last is not None else ""
        hint = "Start it with `ebft vllm-serve CONFIG`, or set trl.vllm_mode: managed. To wait longer, increase "
        hint = f"{before}{hint}trl.vllm_server_timeout."
        what = f"the vLLM server at {self.address}"
        await self._http.until_up("/health", self.timeout, what, hint, failure=self._failure)


def _body(model: str, prompt: list[int], max_tokens: int, n: int, sampling: Sampling) -> dict[str, Any]:
    """Return the body of a request. Every sampling parameter is set, since vLLM takes missing ones from the model's
    generation config. There is no seed, so that vLLM's noise is independent between requests; its CPU engine also
    crashes on long batches with a seed."""
    body = {
        "model": model,
        "prompt": prompt,
        "n": n,
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": sorted(sampling.end_ids),
        "logprobs": 0,  # of the sampled tokens only
        "return_token_ids": True,
        "skip_special_tokens": False,
    }
    if sampling.unknown:
        body["logit_bias"] = {str(token): -100 for token in sampling.unknown}  # the lowest value
    if sampling.regex is not None:
        body["structured_outputs"] = {"regex": sampling.regex}
    return {**body, **sampling.extra}


class HTTPClient(httpx2.AsyncClient):
    """Sends JSON and receives whole responses, within a limit of time."""

    def __init__(self, base_url: str = "") -> None:
        super().__init__(
            base_url=base_url,
            timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT),
            limits=httpx2.Limits(max_connections=_CONCURRENT, max_keepalive_connections=32),
            trust_env=False,  # ignore proxy settings
        )
        self._free = asyncio.Semaphore(_CONCURRENT)  # the time limit does not include the wait for a connection

    async def whole(self, method: str, url: str, timeout: float, body: Any = None) -> httpx2.Response:
        """The response. Raises ReadTimeout if it does not end within `timeout` seconds."""
        async with self._free:
            try:
                async with asyncio.timeout(timeout):
                    return await self.request(method, url, json=body)
            except TimeoutError:
                raise httpx2.ReadTimeout(f"no complete response within {timeout:g} s") from None

    async def why_not_up(self, url: str, any_status: bool = False) -> str | None:
        """Why a server does not respond, with status 200 unless `any_status`; None if it does."""
        try:
            response = await self.whole("GET", url, CONNECT_TIMEOUT)
        except httpx2.RequestError as error:
            return told(error)
        is_fine = any_status or response.status_code == 200
        return None if is_fine else f"{url} returns status {response.status_code}"

    async def until_up(
        self,
        url: str,
        timeout: float,
        what: str,
        hint: str,
        any_status: bool = False,
        failure: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Wait until a server is up. Raises RolloutError with the hint after `timeout` seconds, or with `failure()`."""
        deadline, has_reported = time.monotonic() + timeout, False
        while (reason := await self.why_not_up(url, any_status)) is not None:
            given_up = failure()
            if given_up is None and time.monotonic() > deadline:
                given_up = f"{what[0].upper()}{what[1:]} is not ready after {timeout:g} s ({reason}). {hint}"
            if given_up is not None:
                raise RolloutError(given_up)
            if not has_reported:
                has_reported = True
                say(f"Waiting up to {timeout:g} s for {what}.", err=True)
            await asyncio.sleep(_POLL)


T = TypeVar("T")


class BackgroundLoop:
    """Runs coroutines of `http` for other threads. Methods are thread-safe; `closed` is the error after `close`."""

    def __init__(self, name: str, closed: str, http: HTTPClient) -> None:
        self._closed_error, self._closed, self._http = closed, False, http
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
        """Cancel all running coroutines; the threads that wait for them raise CancelledError."""
        for future in list(self._pending):
            future.cancel()

    def close(self) -> None:
        """Cancel everything, close the connections and stop the thread; can be called repeatedly."""
        if self._closed:
            return
        self._closed = True
        self.cancel()
        asyncio.run_coroutine_threadsafe(self._http.aclose(), self._loop).result(timeout=CONNECT_TIMEOUT)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=CONNECT_TIMEOUT)
        if not self._thread.is_alive():
            self._loop.close()
