"""A quick check that the hub can be reached, because the client library would try for half a minute."""

from __future__ import annotations

import socket
import threading
import time
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

CONNECT_S = 1.5  # to resolve the host, and to connect to it
KEPT_S = 20.0
PORTS = {"http": 80, "https": 443}
_silent: dict[str, tuple[float, str]] = {}  # time and reason of a failed check, by address


def unreachable(url: str, patience_s: float = CONNECT_S) -> str:
    """The reason why an address, or the proxy before it, does not answer; "" if it answers. A start asks several times: failures are cached for
    KEPT_S.

    patience_s  to resolve the host, and again to connect to it
    """
    when, why = _silent.get(url, (0.0, ""))
    if why and time.monotonic() - when < KEPT_S:
        return why
    if why := _why_silent(url, patience_s):
        _silent[url] = (time.monotonic(), why)
    return why


def _why_silent(url: str, patience_s: float) -> str:
    host, port = _door(url)
    found: list[str] = []
    named = threading.Event()

    def resolve() -> None:
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            named.set()
            found.append(_refusal(host, [address[4][:2] for address in addresses], patience_s))
        except (OSError, ValueError) as e:  # ValueError for invalid names
            said = e.strerror if isinstance(e, OSError) else None
            found.append(f"{host} is not found: {(said or str(e)).lower()}")

    # A resolver may take any time
    thread = threading.Thread(target=resolve, name="pyspec-network", daemon=True)
    thread.start()
    thread.join(patience_s)
    if named.is_set() and not found:
        thread.join(patience_s)
    if found:
        return found[0]
    what = "does not answer" if named.is_set() else "is not found"
    return f"{host} {what} within {patience_s:g} s"


def _door(url: str) -> tuple[str, int]:
    """Host and port that a request for `url` connects to first."""
    parts = urlsplit(url)
    proxy = getproxies().get(parts.scheme, "")
    if proxy and not proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return parts.hostname or "", parts.port or PORTS.get(parts.scheme, 443)


def _refusal(host: str, addresses: list[tuple[object, ...]], patience_s: float) -> str:
    why = f"{host} has no address"
    for address in addresses[:4]:
        try:
            number, port = str(address[0]), int(str(address[1]))
            socket.create_connection((number, port), timeout=patience_s).close()
        except TimeoutError:
            return f"{host} does not answer"
        except OSError as e:
            why = f"{host}: {(e.strerror or str(e)).lower()}"
        else:
            return ""
    return why
