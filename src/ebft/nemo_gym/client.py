"""The servers of NeMo Gym: starting them, which there are, and many requests at once with retries."""

from __future__ import annotations

import asyncio
import json
import time
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from ruamel.yaml import YAML

from ebft import errors, machine, printed
from ebft.config.keys.data import NemoGymKeys
from ebft.config.keys.serving import base_url
from ebft.serving.server import ServerLog, end_supervisor, start_supervisor
from ebft.structured.rollouts.client import CONNECT_TIMEOUT, BackgroundLoop, HTTPClient

HOST = "127.0.0.1"
CONFIG_PATH = "/global_config_dict_yaml"  # of the head server: the config of all servers
ATTEMPTS = 4  # for a request that fails with a lost connection or a server error (5xx)
BACKOFF = 0.5  # seconds before the second attempt, doubled for each further one
RESOURCES, AGENTS, MODELS = "resources_servers", "responses_api_agents", "responses_api_models"


@dataclass(frozen=True)
class Server:
    """A server of NeMo Gym: its name and kind in the config, its URL, and its settings there."""

    name: str
    kind: str
    url: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class Servers:
    """The servers that a head server lists, by name."""

    head: str
    by_name: dict[str, Server]

    @classmethod
    def parse(cls, head: str, text: str) -> Servers:
        """Parse the response of the head server: YAML in which each server is `name: {kind: {type: settings}}`."""
        found = {}
        with errors.doing(f"reading {head}{CONFIG_PATH}, the config of NeMo Gym's servers (nemo_gym_head_port)"):
            for name, kinds in YAML(typ="safe", pure=True).load(text).items():
                for kind in (RESOURCES, AGENTS, MODELS):
                    settings = next(iter(_dict(_dict(kinds).get(kind)).values()), None)
                    if isinstance(settings, dict) and settings.get("port") is not None:
                        url = base_url(settings.get("host") or HOST, int(settings["port"]))
                        found[str(name)] = Server(str(name), kind, url, settings)
        return cls(head, found)

    def resources(self, name: str) -> Server:
        """The resources server `name`, or behind the agent server `name`. Raises ConfigError if there is none."""
        server = self._find(name, (RESOURCES, AGENTS))
        if server.kind == RESOURCES:
            return server
        return self._find(_dict(server.settings.get("resources_server")).get("name"), (RESOURCES,), f" of agent {name}")

    def agent(self, name: str) -> Server:
        """The agent server `name`, or the only one for the resources server `name`. Raises ConfigError otherwise."""
        server = self._find(name, (RESOURCES, AGENTS))
        if server.kind == AGENTS:
            return server
        agents = [a for a in self._of(AGENTS) if _dict(a.settings.get("resources_server")).get("name") == name]
        if len(agents) == 1:
            return agents[0]
        raise errors.ConfigError(
            f"nemo_gym_multi_turn needs one agent for the resources server {name}, but NeMo Gym has "
            f"{', '.join(agent.name for agent in agents) or 'none'}. Name an agent in agent_ref or server_name."
        )

    @property
    def has_agents(self) -> bool:
        return bool(self._of(AGENTS))

    def model(self, agent: Server) -> Server | None:
        """The model server of an agent, None if the config does not name one."""
        return self.by_name.get(_dict(agent.settings.get("model_server")).get("name"))

    def _find(self, name: Any, kinds: tuple[str, ...], of: str = "") -> Server:
        server = self.by_name.get(name)
        if server is None or server.kind not in kinds:
            known = ", ".join(server.name for kind in kinds for server in self._of(kind)) or "none"
            raise errors.ConfigError(f"NeMo Gym has no server {name!r}{of} (agent_ref, server_name). Servers: {known}.")
        return server

    def _of(self, kind: str) -> list[Server]:
        return [server for server in self.by_name.values() if server.kind == kind]


@dataclass(frozen=True)
class Failure:
    """A request that failed for good, and why."""

    reason: str


class GymClient:
    """Client of the servers of one head server. Methods block and are thread-safe; `cancel` aborts all requests.

    Time limits in seconds of each attempt of a request: `timeout`, and `run_timeout` for the runs of agents.
    """

    def __init__(self, head_port: int, timeout: float, run_timeout: float = 300.0) -> None:
        self.head, self.timeout, self.run_timeout = f"http://{HOST}:{head_port}", timeout, run_timeout
        self._http = HTTPClient()
        closed = f"The connection to NeMo Gym at {self.head} is closed."
        loop = BackgroundLoop("ebft-nemo-gym", closed, self._http)
        self._run, self.cancel, self.close = loop.run, loop.cancel, loop.close
        weakref.finalize(self, loop.close)

    def servers(self, timeout: float) -> Servers:
        """The servers that the head server lists. Waits up to `timeout` seconds for it; then raises RolloutError."""
        url = f"{self.head}{CONFIG_PATH}"
        self._run(self._wait(url, "NeMo Gym's head server", timeout))
        text = self._run(self._http.whole("GET", url, CONNECT_TIMEOUT)).text
        return Servers.parse(self.head, json.loads(text) if text.startswith('"') else text)  # YAML as a JSON string

    def is_up(self) -> bool:
        """Whether a head server responds now."""
        return self._run(self._http.why_not_up(f"{self.head}{CONFIG_PATH}")) is None

    def wait_for(self, server: Server, timeout: float) -> None:
        """Wait until a server responds, with whatever status. Raises RolloutError after `timeout` seconds."""
        self._run(self._wait(server.url, f"NeMo Gym's server {server.name}", timeout, any_status=True))

    def post_all(self, requests: list[tuple[str, dict[str, Any]]], are_runs: bool = False) -> list[Any]:
        """Send JSON bodies to URLs, concurrently, and return the JSON response of each, or a `Failure`.

        Lost connections and 5xx are retried up to `ATTEMPTS` times; a timeout or another status is not. `are_runs`:
        whether the URLs belong to agents.
        """
        timeout, key = (self.run_timeout, "run") if are_runs else (self.timeout, "verify")

        async def post_all() -> list[Any]:
            return await asyncio.gather(
                *(self._post(url, body, timeout, f"nemo_gym_{key}_timeout") for url, body in requests)
            )

        return self._run(post_all())

    async def _post(self, url: str, body: dict[str, Any], timeout: float, key: str) -> Any:
        reason = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(BACKOFF * 2 ** (attempt - 1))
            try:
                response = await self._http.whole("POST", url, timeout, body)
            except httpx2.ReadTimeout:
                return Failure(f"no response within {timeout:g} s ({key})")
            except httpx2.RequestError as error:
                reason = errors.told(error)
                continue
            if response.status_code == 200:
                try:
                    return response.json()
                except ValueError:
                    return Failure(f"the response is not JSON: {errors.shortened(response.text, 300)}")
            reason = f"status {response.status_code}: {errors.shortened(response.text, 300)}"
            if response.status_code < 500:
                return Failure(reason)
        return Failure(f"{reason} ({ATTEMPTS} attempts)")

    async def _wait(self, url: str, what: str, timeout: float, any_status: bool = False) -> None:
        hint = "Start NeMo Gym with ng_run, or correct nemo_gym_head_port. To wait longer, increase "
        await self._http.until_up(url, timeout, f"{what} at {url}", f"{hint}nemo_gym_server_timeout.", any_status)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


LOG = "nemo_gym.log"
DEFAULT_PORT = 11000  # of ng_run
_SERVER_POLL = 0.2


@contextmanager
def started_servers(keys: NemoGymKeys, output_dir: str) -> Iterator[None]:
    """Start the servers, wait for the head server, and stop them at the end of the block.

    Nothing is started if a head server already responds, and on all processes except rank 0. Raises ServerError, with
    the end of the log, if NeMo Gym exits, such as if it is not installed, or is not up in time.
    """
    if not (keys.nemo_gym_enabled and keys.nemo_gym_auto_start) or not machine.is_main_process():
        yield
        return
    with closing(GymClient(keys.nemo_gym_head_port, keys.nemo_gym_verify_timeout)) as client:
        if client.is_up():
            printed.say(f"Using the NeMo Gym servers that run at {client.head}.", err=True)
            yield
            return
        log, folder = ServerLog(Path(output_dir) / LOG), Path(keys.nemo_gym_dir).expanduser()
        paths = f"+config_paths=[{','.join(keys.nemo_gym_config_paths)}]"
        command = [str(folder / ".venv" / "bin" / "ng_run"), paths, "+skip_venv_if_present=true"]
        if keys.nemo_gym_head_port != DEFAULT_PORT:
            command += [f"+head_server.host={HOST}", f"+head_server.port={keys.nemo_gym_head_port}"]
        process = start_supervisor(command, log, cwd=folder)
        try:
            timeout = keys.nemo_gym_server_timeout
            deadline = time.monotonic() + timeout
            while not client.is_up():
                if (code := process.poll()) is not None or time.monotonic() > deadline:
                    how = f"did not start it within {timeout:g} s (nemo_gym_server_timeout)"
                    how = how if code is None else f"exited before it was up (exit code {code})"
                    raise errors.ServerError(f"NeMo Gym is not up at {client.head}: ng_run {how}. {log.tail()}")
                time.sleep(_SERVER_POLL)
            yield
        finally:
            end_supervisor(process)
