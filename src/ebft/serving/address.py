"""The addresses on which a server listens and to which clients connect."""

import errno
import socket

from ebft.errors import ConfigError

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def is_everywhere(host: str) -> bool:
    """Whether a server that listens on `host` accepts connections on all network interfaces."""
    return host in _EVERYWHERE


def reachable_host(host: str) -> str:
    """Return the host for connecting to a server that listens on `host`; all interfaces map to the local host."""
    return _EVERYWHERE.get(host, host)


def base_url(host: str, port: int) -> str:
    """Return the URL for clients on this machine."""
    name = reachable_host(host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def check_free(host: str, port: int) -> None:
    """Raise ConfigError if a server cannot listen on `host` and `port`, usually because the port is in use."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: ignore remaining connections of a stopped server. A listening socket is still detected.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"vllm.port: port {port} on {host} is already in use, possibly by an earlier server. Stop the other "
                f"program, or set vllm.port to a free port (and trl.vllm_server_port for the trainer)."
            ) from None
        raise ConfigError(
            f"vllm.host, vllm.port: cannot listen on {host}, port {port} ({error.strerror}). Set vllm.host to an "
            "address of this machine, such as 127.0.0.1, and vllm.port to a port above 1023."
        ) from None
