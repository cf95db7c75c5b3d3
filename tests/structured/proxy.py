"""A reverse proxy in front of a real server, which slows its answers down or changes what it is asked."""

import time
from collections.abc import Callable
from typing import Any

import httpx2

from tests.nemo_gym.servers import Endpoint

COMPLETIONS = "/v1/completions"


class Proxy(Endpoint):
    """Passes all on to `port`, completions after `delay` seconds; `change_request(path, content)` may edit requests."""

    def __init__(self, port: int) -> None:
        self.delay, self.target = 0.0, f"http://127.0.0.1:{port}"
        self.change_request: Callable[[str, dict[str, Any]], object] = lambda path, content: None
        super().__init__(self.pass_on)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def pass_on(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        if body is not None:
            self.change_request(path, body)
        method = "GET" if body is None else "POST"
        response = httpx2.request(method, self.target + path, json=body, timeout=600)
        time.sleep(self.delay if path == COMPLETIONS else 0)
        is_json = "json" in response.headers.get("Content-Type", "")
        return response.status_code, response.json() if is_json else response.text
