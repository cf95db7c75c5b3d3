"""Where a server listens and where it is reached."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

from ebft.errors import ConfigError

if TYPE_CHECKING:
    from ebft.config.schema import RunConfig

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def server_address(config: RunConfig) -> tuple[str, int]:
    """Host and port that the trainer connects to: those of `trl:`, else those that the server is started with."""
    host, port = config.trl.vllm_server_host, config.trl.vllm_server_port
    return (config.vllm.host if host is None else host, config.vllm.port if port is None else port)


def reachable_host(host: str) -> str:
    """The host to connect to for a server that listens on `host`: one that listens everywhere is reached locally."""
    return _EVERYWHERE.get(host, host)


def base_url(host: str, port: int) -> str:
    """The address that clients on this machine use."""
    name = reachable_host(host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def check_free(host: str, port: int) -> None:
    """ConfigError when no server can listen on `host` and `port`, most often since another one does."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do, so that connections of one that just ended do not count. A listening socket still does.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"vllm.port: port {port} of {host} is in use by another program, perhaps an earlier server. Stop that "
                f"one, or choose a free port with vllm.port (trl.vllm_server_port where the trainer connects)."
            ) from None
        raise ConfigError(
            f"vllm.host, vllm.port: no server can listen on {host}, port {port} ({error.strerror}). Set vllm.host to "
            "an address of this machine, such as 127.0.0.1, and vllm.port to one above 1023."
        ) from None
