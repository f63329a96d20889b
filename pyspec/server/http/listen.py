"""The listening sockets: addresses and paths, bound before anything is loaded."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

from pyspec.errors import ConfigError
from pyspec.server.settings import ServerSettings, is_unix

BACKLOG = 512


def bind(settings: ServerSettings) -> socket.socket:
    """The socket of the only host. Raises ConfigError."""
    (sock,) = listen(settings)
    return sock


def listen(settings: ServerSettings) -> list[socket.socket]:
    """A listening socket per host. Raises ConfigError if an address is in use or unknown; then nothing is bound."""
    bound: list[socket.socket] = []
    port = settings.port
    try:
        for host in settings.hosts:
            if is_unix(host):
                bound.append(_unix(Path(host.removeprefix("unix:"))))
            else:
                bound.append(_tcp(host, port, settings))
                # with port 0, the other hosts use the port that the first one got
                port = bound[-1].getsockname()[1]
    except ConfigError:
        for sock in bound:
            sock.close()
        raise
    return bound


def _tcp(host: str, port: int, settings: ServerSettings) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        both = host == "::" and len(settings.hosts) == 1 and socket.has_dualstack_ipv6()
        return socket.create_server(
            (host, port),
            family=family,
            backlog=BACKLOG,
            reuse_port=settings.reuse_port,
            dualstack_ipv6=both,
        )
    except OSError as error:
        n = error.errno or 0  # getaddrinfo's codes are negative
        said = os.strerror(n) if n > 0 else error.strerror or str(error)
        why = f"cannot listen on {host} port {port}: {said}"
        raise ConfigError(f"{why}; choose another with --port") from error


def _unix(path: Path) -> socket.socket:
    """A socket at a path; removes the file of a server that has ended."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            if _answers(path):
                raise ConfigError(
                    f"cannot listen on {path}: another server does; choose another with --host",
                )
            path.unlink()
        sock.bind(str(path))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {path}: {error.strerror or error}; choose another with --host",
        ) from error
    except ConfigError:
        sock.close()
        raise
    return sock


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True


def unlink(settings: ServerSettings) -> None:
    """Remove the files of unix sockets."""
    for host in filter(is_unix, settings.hosts):
        with contextlib.suppress(OSError):
            Path(host.removeprefix("unix:")).unlink()


def url_of(sock: socket.socket, settings: ServerSettings) -> str:
    """The URL for clients; for a unix socket, its path after `unix:`."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    named = next((name for name in settings.hosts if not is_unix(name) and _is(name, host)), host)
    scheme = "https" if settings.ssl_key_file else "http"
    return f"{scheme}://{f'[{named}]' if ':' in named else named}:{port}{settings.api_prefix}"


def _is(name: str, address: str) -> bool:
    with contextlib.suppress(OSError):
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return any(found[4][0] == address for found in infos)
    return False
