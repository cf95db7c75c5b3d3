"""The addresses on which a server listens and to which clients connect."""

import errno
import ipaddress
import socket
from typing import Any

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


def is_loopback(host: str) -> bool:
    """Whether `host` is localhost or one of its addresses, which other machines cannot connect to."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_in(header: str) -> str:
    """The host of a Host header, without port, brackets and trailing dot, in lower case."""
    name = header.strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    return name.removesuffix(".")


def check_free(host: str, port: int, keys: tuple[str, str] = ("vllm.host", "vllm.port")) -> tuple[int, Any]:
    """Return the address family and the address to listen on for `host` and `port`.

    Raises ConfigError, with the `keys` of host and port, if a server cannot listen there, usually because the port is
    in use.
    """
    host_key, port_key = keys
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: ignore remaining connections of a stopped server. A listening socket is still detected.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        return family, address
    except UnicodeError:  # of the encoding of names
        reason, remedy = "not the name of a host", f"Set {host_key} to an address of this machine, such as 127.0.0.1."
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            trainer = " (and trl.vllm_server_port for the trainer)" if port_key == "vllm.port" else ""
            raise ConfigError(
                f"{port_key}: port {port} on {host} is already in use, possibly by an earlier server. Stop the other "
                f"program, or set {port_key} to a free port{trainer}."
            ) from None
        reason = error.strerror
        if error.errno in (errno.EACCES, errno.EPERM):
            remedy = f"Set {port_key} to a port above 1023."
        else:
            remedy = f"Set {host_key} to an address of this machine, such as 127.0.0.1."
    shown = host if len(host) <= 80 else f"{host[:80]}..."
    raise ConfigError(f"{host_key}, {port_key}: cannot listen on {shown}, port {port} ({reason}). {remedy}")
