"""A reverse proxy in front of a real server, which slows its answers down or breaks them.

What is measured or tested with it still comes from the real server; only delays and faults are added.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMPLETIONS = "/v1/completions"


class Proxy:
    """Listens on a free port of this machine while the `with` block lasts, and passes everything on to `port`.

    `delay` is in seconds, for each request for completions. `fail` of the next such requests are answered with status
    500. `change` may edit the JSON of their answers. `requests` counts them. `change_request(path, content)` may edit
    the JSON of any request.
    """

    def __init__(self, port: int) -> None:
        self.delay, self.fail, self.requests = 0.0, 0, 0
        self.change: Callable[[dict[str, Any]], None] | None = None
        self.change_request: Callable[[str, dict[str, Any]], None] | None = None
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler(port))
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, status: int, body: bytes) -> tuple[int, bytes]:
        """What the client gets instead of the real server's status and body."""
        if path != COMPLETIONS:
            return status, body
        with self._lock:
            self.requests += 1
            failing, self.fail = self.fail > 0, max(0, self.fail - 1)
        time.sleep(self.delay)
        if failing:
            return 500, b'{"error": {"message": "injected"}}'
        if self.change is None or status != 200:
            return status, body
        content = json.loads(body)
        self.change(content)
        return status, json.dumps(content).encode()

    def _handler(self, port: int) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._pass_on(None)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if proxy.change_request is not None:
                    content = json.loads(body)
                    proxy.change_request(self.path, content)
                    body = json.dumps(content).encode()
                self._pass_on(body)

            def _pass_on(self, body: bytes | None) -> None:
                connection = http.client.HTTPConnection("127.0.0.1", port)
                connection.request(self.command, self.path, body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                kind = response.headers.get("Content-Type")
                status, content = proxy.answer(self.path, response.status, response.read())
                connection.close()
                with suppress(ConnectionError):  # the client no longer waits
                    self.send_response(status)
                    if kind is not None:
                        self.send_header("Content-Type", kind)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        return Handler
