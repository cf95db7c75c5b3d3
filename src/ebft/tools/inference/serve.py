"""A web page for sampling from a trained model, served by the standard library on this machine."""

from __future__ import annotations

import json
import select
import socket
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from threading import Lock
from typing import Any

from transformers import TextStreamer

from ebft.data.messages import Message
from ebft.errors import ConfigError, EBFTError, cause
from ebft.serving.keys import base_url, check_free, host_in, is_loopback
from ebft.tools.inference.sampling import Sampler, SamplingOptions, Scorer

MAX_BODY = 2**20  # bytes
_PATIENCE = 60.0  # seconds that a client may take to send or to read
_MOST_TOKENS = 2**20  # per reply; a model with fewer positions generates fewer
# Sampling options with their type, least and greatest value. 0 is allowed for the temperature as well.
_OPTIONS = {
    "max_new_tokens": (int, 1, _MOST_TOKENS),
    "temperature": (float, 1e-3, 1e3),  # logits are divided by it
    "top_p": (float, 0, 1),
    "top_k": (int, 0, 2**31 - 1),
    "seed": (int, 0, 2**32 - 1),
}
_PROMPT_FIELDS = ("messages", "text", "base", *_OPTIONS)
_FIELDS = {"/reply": _PROMPT_FIELDS, "/score": (*_PROMPT_FIELDS, "reference", "samples")}


class PageServer(ThreadingHTTPServer):
    """Serves the page, and its requests one at a time, since there is one model.

    `GET /`: the page. `POST /reply` with `{"messages" or "text", "base", ...sampling options}`: the reply, streamed as
    plain text. `POST /score` with `"reference"` and `"samples"` besides: the rewards, as JSON.
    """

    daemon_threads = True

    def __init__(self, sampler: Sampler, chats: bool, host: str, port: int) -> None:
        self.sampler, self.chats, self.lock, self.is_stopping = sampler, chats, Lock(), False
        self.page = files("ebft.tools.inference").joinpath("page.html").read_text(encoding="utf-8")
        self.address_family, address = check_free(host, port, ("--host", "--port"))
        super().__init__(address[:2], _Handler)
        self.is_local = is_loopback(self.server_address[0])
        if not self.is_local:
            warnings.warn(
                f"--host {self.server_address[0]}: the page accepts connections from other machines without a "
                "password. Use 127.0.0.1, or a network that only you can reach.",
                stacklevel=3,
            )

    @property
    def address(self) -> str:
        """The address of the page, for this machine."""
        return base_url(*self.server_address[:2])

    def stop(self) -> None:
        """End the reply that is being generated, and answer no further requests.

        A thread that computes when the interpreter exits would abort the process.
        """
        self.is_stopping = True
        self.lock.acquire()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error, unless the client closed the connection or did not read."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def serve_page(sampler: Sampler, chats: bool, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C; `say` is given its address."""
    with PageServer(sampler, chats, host, port) as server:
        say(f"{server.address} serves {sampler.loaded.name}. Ctrl-C ends it.")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            server.stop()
            say("Stopped.")


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = _PATIENCE
    has_begun = False  # whether a reply is being streamed

    def do_GET(self) -> None:
        try:
            self._check_host()
        except ConfigError as error:
            self._send(HTTPStatus.BAD_REQUEST, "text/plain", str(error))
            return
        if self.path.partition("?")[0] != "/":
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "There is only the page /.")
            return
        about = {"name": self.server.sampler.loaded.name, "chats": self.server.chats}
        about |= asdict(self.server.sampler.options)
        text = json.dumps(about).replace("<", "\\u003c")
        self._send(HTTPStatus.OK, "text/html", self.server.page.replace("{{ABOUT}}", text))

    def do_POST(self) -> None:
        answer = {"/reply": self._reply, "/score": self._score}.get(self.path)
        if answer is None:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "There are only /reply and /score.")
            return
        try:
            self._check_host()
            request = self._request()
            _check_fields(request, self.path)
            prompt, sampler = self._prompt(request), self._sampler(request)
            with self.server.lock:
                self._check_connected()  # the request may have waited for others
                answer(request, prompt, sampler)
        except EBFTError as error:
            self._fail(HTTPStatus.BAD_REQUEST, str(error))
        except (ConnectionError, TimeoutError):  # the page was closed, or does not read
            self.close_connection = True
        except Exception as error:  # such as a lack of memory; the next request may succeed
            print(f"Error: {self.path}: {type(error).__name__}: {cause(error)}", file=sys.stderr)
            self._fail(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {cause(error)}")

    def _reply(self, request: dict[str, Any], prompt: str | list[Message], sampler: Sampler) -> None:
        sampler.prompt_ids(prompt)  # fails before the reply begins
        streamer = _ToPage(sampler.loaded.tokenizer, self)
        sampler.reply_ids(prompt, request.get("base", False), streamer=streamer, on_token=self._check_connected)

    def _score(self, request: dict[str, Any], prompt: str | list[Message], sampler: Sampler) -> None:
        reference, samples = request.get("reference"), request.get("samples", 4)
        if not isinstance(reference, str) or not reference.strip() or type(samples) is not int:
            raise ConfigError("reference must be a text, and samples an integer.")
        scored = Scorer(sampler, samples)(prompt, reference, request.get("base", False), self._check_connected)
        self._send(HTTPStatus.OK, "application/json", json.dumps(asdict(scored)))

    def _check_connected(self) -> None:
        """Raise ConnectionError if the client has closed the connection, or the server stops."""
        if self.server.is_stopping:
            raise ConnectionAbortedError("The server is stopped.")
        if select.select([self.connection], [], [], 0)[0] and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionAbortedError("The client has closed the connection.")

    def _check_host(self) -> None:
        """Raise ConfigError for requests of other sites, also through a name that resolves to this machine."""
        hosts, origin = self.headers.get_all("Host", []), self.headers.get("Origin")
        if len(hosts) != 1:
            raise ConfigError(f"The request must have one Host header, got {len(hosts)}.")
        if self.server.is_local and not is_loopback(host_in(hosts[0])):
            raise ConfigError(f"Requests to {hosts[0]:.100} are not accepted. Use {self.server.address}.")
        if origin is not None and origin.lower().partition("://")[2] != hosts[0].strip().lower():
            raise ConfigError(f"Requests from {origin:.100} are not accepted.")

    def _request(self) -> dict[str, Any]:
        """The JSON object of a request."""
        if self.headers.get_content_type() != "application/json":
            raise ConfigError("The request must be JSON (Content-Type: application/json).")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > 9 or int(length) > MAX_BODY:
            raise ConfigError(f"The request must have a Content-Length of at most {MAX_BODY} bytes.")
        try:
            body = self.rfile.read(int(length))
            if len(body) < int(length):
                raise ConfigError(f"The request has {len(body)} bytes, but its Content-Length is {length}.")
            request = json.loads(body)
            json.dumps(request, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ConfigError("The request contains half of a surrogate pair, which is not a character.") from error
        except ValueError as error:
            raise ConfigError(f"The request is not JSON: {error}") from error
        except RecursionError as error:
            raise ConfigError("The request is nested too deeply.") from error
        if not isinstance(request, dict):
            raise ConfigError("The request must be a JSON object.")
        return request

    def _prompt(self, request: dict[str, Any]) -> str | list[Message]:
        if isinstance(messages := request.get("messages"), list) and self.server.chats:
            if not all(isinstance(message, dict) and _is_text(message) for message in messages):
                raise ConfigError("messages must be objects with role and content, both texts.")
            return messages
        if isinstance(text := request.get("text"), str):
            return text
        raise ConfigError("The request needs text, or messages if the model has a chat template.")

    def _sampler(self, request: dict[str, Any]) -> Sampler:
        given = {}
        for name, (kind, least, greatest) in _OPTIONS.items():
            if (value := request.get(name)) is not None:
                zero = name == "temperature" and value == 0
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                # The comparison is false for NaN.
                if not is_number or not (zero or least <= value <= greatest) or kind(value) != value:
                    what = "an integer" if kind is int else "0 or a number" if name == "temperature" else "a number"
                    expected = f"{what} from {least} to {greatest}"
                    raise ConfigError(f"{name}: invalid value {value!r:.100}; expected {expected}.")
                given[name] = kind(value)
        options: SamplingOptions = replace(self.server.sampler.options, **given)
        return Sampler(self.server.sampler.loaded, options)

    def _fail(self, status: HTTPStatus, text: str) -> None:
        """Send an error, after the text that was sent already if there is one."""
        try:
            if self.has_begun:
                self.wfile.write(f"\n[Error: {text}]".encode())
            else:
                self._send(status, "text/plain", text)
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Requests are not logged."""


def _is_text(message: dict[str, Any]) -> bool:
    """Whether role and content of a message are texts; an assistant message that only calls tools has no content."""
    content = message.get("content", "" if message.get("tool_calls") else None)
    return isinstance(message.get("role"), str) and isinstance(content, str)


def _check_fields(request: dict[str, Any], path: str) -> None:
    unknown = [name for name in request if name not in _FIELDS[path]]
    if unknown:
        raise ConfigError(f"{unknown[0]!r:.100}: unknown field; the fields of {path} are {', '.join(_FIELDS[path])}.")
    if not isinstance(request.get("base", False), bool):
        raise ConfigError(f"base: invalid value {request['base']!r:.100}; expected true or false.")


class _ToPage(TextStreamer):
    """Writes the text of a reply to a response as it is generated; the reply ends with the connection."""

    def __init__(self, tokenizer: Any, handler: _Handler) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._handler = handler

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if not self._handler.has_begun:
            self._handler.has_begun = True
            self._handler.send_response(HTTPStatus.OK)
            self._handler.send_header("Content-Type", "text/plain; charset=utf-8")
            self._handler.send_header("Connection", "close")
            self._handler.end_headers()
        self._handler.wfile.write(text.encode())
        self._handler.wfile.flush()
