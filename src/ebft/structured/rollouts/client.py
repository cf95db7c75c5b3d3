"""Talking to a stock vLLM OpenAI server over HTTP: token ids in, token ids and sampling log-probabilities out."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import groupby
from typing import Any, TypeVar

import httpx2

from ebft.errors import RolloutError
from ebft.structured.rollouts.sampling import Completion, Sampling

T = TypeVar("T")

_ATTEMPTS = 5  # of one request that the server answers with an error of its own
_BACKOFF = 0.5  # seconds before the second attempt, doubled for each further one
_CONNECT_TIMEOUT = 5.0
_POLL = 0.5  # seconds between two looks at a server that is not up


class ModelNotServed(RolloutError):
    """The server does not know the model or adapter that was asked for: it was started anew, most likely."""


class VLLMClient:
    """One server. Methods block and may be called from any thread; `cancel` ends what is under way.

    `timeout` bounds, in seconds, the wait for a server that is down and for each answer. `failure` tells, while the
    client waits for the server, why waiting is in vain (None: it is not).
    """

    def __init__(
        self,
        host: str,
        port: int,
        timeout: float,
        *,
        failure: Callable[[], str | None] = lambda: None,
    ) -> None:
        # 0.0.0.0 is where a server listens (everywhere), not an address to connect to.
        self.address = f"{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
        self.timeout = timeout
        self._failure = failure
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ebft-vllm-client", daemon=True)
        self._thread.start()
        self._http = httpx2.AsyncClient(
            base_url=f"http://{self.address}",
            timeout=httpx2.Timeout(timeout, connect=_CONNECT_TIMEOUT, pool=None),
            limits=httpx2.Limits(max_connections=256, max_keepalive_connections=32),
            trust_env=False,  # a proxy has no business between trainer and server
        )
        self._pending: set[concurrent.futures.Future] = set()
        self._closed = False

    # What the server is and holds

    def wait_until_up(self) -> None:
        """Return once the server answers; RolloutError with host, port and what to do where it does not in time."""
        self._run(self._wait_until_up(announce=True))

    def models(self) -> list[dict[str, Any]]:
        """The models and adapters that the server knows, as /v1/models lists them."""
        return self._run(self._request("GET", "/v1/models"))["data"]

    def base_model(self) -> dict[str, Any]:
        """The entry of the model itself: `id`, `root` (the name or path it was loaded from), `max_model_len`."""
        entries = [entry for entry in self.models() if entry.get("parent") is None]
        if not entries:
            raise RolloutError(f"The server at {self.address} lists no base model. Is it a vLLM server?")
        return entries[0]

    def tokenize(self, model: str, text: str) -> list[int]:
        """The server's own token ids of a text, without special tokens."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return self._run(self._request("POST", "/tokenize", body))["tokens"]

    def load_adapter(self, name: str, path: str) -> None:
        """Load the adapter in folder `path` under a new `name`; loading a name that is there already is fine."""
        try:
            self._run(self._request("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}))
        except RolloutError:
            if not any(entry["id"] == name for entry in self.models()):
                raise

    def unload_adapter(self, name: str) -> None:
        """Have the server forget an adapter, in one attempt: one that is down or was restarted has forgotten it."""
        body = {"lora_name": name}
        with suppress(httpx2.TransportError):
            self._run(self._http.post("/v1/unload_lora_adapter", json=body, timeout=_CONNECT_TIMEOUT))

    # Sampling

    def complete(
        self, model: str, prompts: list[list[int]], max_tokens: list[int], sampling: Sampling
    ) -> list[Completion]:
        """One completion per prompt; neighbours with equal prompt and limit are the samples of one request.

        Raises ModelNotServed where the server does not know `model`, RolloutError where it cannot or does not answer.
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
            for task in tasks:  # the first failure ends them all, and closing the connection makes vLLM drop the work
                task.cancel()
            raise

    async def _complete(self, body: dict[str, Any]) -> list[Completion]:
        for _ in range(2):  # an aborted request comes back without tokens; a second one tells whether that lasts
            answer = await self._request("POST", "/v1/completions", body)
            completions = [_completion(choice) for choice in answer["choices"]]
            if len(completions) == body["n"] and all(completion.ids for completion in completions):
                return completions
        reasons = sorted({str(choice.get("finish_reason")) for choice in answer["choices"]})
        raise RolloutError(
            f"The vLLM server at {self.address} returned no tokens, twice, for a prompt of {len(body['prompt'])} "
            f"tokens (n {body['n']}, max_tokens {body['max_tokens']}, {len(answer['choices'])} choices, finish_reason "
            f"{', '.join(reasons) or 'none'}). Look at the server's log."
        )

    # Requests

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON answer; waits for a server that is down, repeats what it answers with 5xx, up to `_ATTEMPTS`."""
        last = "none, the connection broke"
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                response = await self._http.request(method, path, json=body)
            except httpx2.ReadTimeout as error:
                raise RolloutError(
                    f"The vLLM server at {self.address} gave no answer to {path} within {self.timeout:g} s. Raise "
                    "trl.vllm_server_timeout if it is only slow, or look at its log."
                ) from error
            except httpx2.TransportError:  # refused, reset, closed: the server is down or on its way up
                await self._wait_until_up(announce=True, last=last)
                continue
            if response.status_code == 200:
                return response.json() if "json" in response.headers.get("content-type", "") else response.text
            if response.status_code == 404 and body is not None and "model" in body:
                raise ModelNotServed(f"The vLLM server at {self.address} does not serve {body['model']!r}.")
            if response.status_code < 500:
                break
            last = f"{response.status_code}: {_shortened(response.text)}"
            if attempt < _ATTEMPTS:
                await asyncio.sleep(_BACKOFF * 2 ** (attempt - 1))
        else:
            raise RolloutError(
                f"The vLLM server at {self.address} failed {_ATTEMPTS} times on {path}; see its log. Its last answer "
                f"was {last}"
            )
        raise RolloutError(
            f"The vLLM server at {self.address} refused {path} ({response.status_code}): {_shortened(response.text)}"
        )

    async def _wait_until_up(self, announce: bool, last: str | None = None) -> None:
        """Return once the server answers; `last` is what it answered before it went away."""
        deadline = time.monotonic() + self.timeout
        while True:
            reason = await self._why_not_up()
            if reason is None:
                return
            given_up = self._failure()
            if given_up is not None:
                raise RolloutError(given_up)
            if time.monotonic() > deadline:
                before = f" Its last answer was {last}." if last is not None else ""
                raise RolloutError(
                    f"The vLLM server at {self.address} is not up after {self.timeout:g} s ({reason}).{before} "
                    "Start it with `ebft vllm-serve CONFIG`, or set trl.vllm_mode: managed. trl.vllm_server_timeout "
                    "sets how long training waits."
                )
            if announce:
                announce = False
                print(f"Waiting for the vLLM server at {self.address}, up to {self.timeout:g} s.", file=sys.stderr)
            await asyncio.sleep(_POLL)

    async def _why_not_up(self) -> str | None:
        try:
            response = await self._http.get("/health", timeout=_CONNECT_TIMEOUT)
        except httpx2.TransportError as error:
            return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if response.status_code == 404:
            raise RolloutError(
                f"What answers at {self.address} is no vLLM server: it has no /health. Set trl.vllm_server_host and "
                "trl.vllm_server_port to where one is."
            )
        return None if response.status_code == 200 else f"/health answers {response.status_code}"

    # The thread that talks

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            coroutine.close()
            raise RolloutError(f"The connection to the vLLM server at {self.address} is closed.")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._pending.add(future)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # also where the waiting thread was interrupted
            raise
        finally:
            self._pending.discard(future)

    def cancel(self) -> None:
        """End every request under way; the threads that wait for them get CancelledError."""
        for future in list(self._pending):
            future.cancel()

    def close(self) -> None:
        """Cancel everything and end the thread; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self.cancel()
        asyncio.run_coroutine_threadsafe(self._http.aclose(), self._loop).result(timeout=_CONNECT_TIMEOUT)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=_CONNECT_TIMEOUT)


def _body(model: str, prompt: list[int], max_tokens: int, n: int, sampling: Sampling) -> dict[str, Any]:
    """The request; every sampling parameter is given, or the model's own generation config would fill in.

    No seed: vLLM's noise is then independent over requests, and its CPU engine dies on long batches with one.
    """
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
        "logprobs": 0,  # of the sampled tokens alone
        "return_token_ids": True,
        "skip_special_tokens": False,
    }
    if sampling.regex is not None:
        body["structured_outputs"] = {"regex": sampling.regex}
    return {**body, **sampling.extra}


def _completion(choice: dict[str, Any]) -> Completion:
    ids = choice.get("token_ids") or []
    logps = (choice.get("logprobs") or {}).get("token_logprobs") or []
    if len(ids) != len(logps):
        raise RolloutError(f"The vLLM server returned {len(ids)} tokens with {len(logps)} log-probabilities.")
    return Completion(ids, [float("nan") if logp is None else logp for logp in logps])


def _shortened(text: str) -> str:
    return text if len(text) <= 500 else f"{text[:500]} ..."
