"""Questions to the hub: their headers, and one line for whatever goes wrong."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener, getproxies, proxy_bypass

from pyspec.errors import DownloadError

# -- whether the hub can be reached ----------------------------------------------------------------------------------
# A quick check that the hub can be reached, because the client library would try for half a minute.

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


T = TypeVar("T")
TOKEN = "--hf-token or HF_TOKEN"
BUSY, SLOW = 429, 408


def headers_for(url: str, location: str) -> dict[str, str]:
    """Headers of a request for a file; the token is for the hub only, not for its storage servers."""
    from huggingface_hub.utils import build_hf_headers

    headers = build_hf_headers()
    if urlsplit(url).netloc != urlsplit(location).netloc:
        headers.pop("authorization", None)
    return headers


class _KeepToken(HTTPRedirectHandler):
    """Redirects to other hosts go without the token."""

    def redirect_request(self, req: Request, *args: Any, **more: Any) -> Request | None:
        new = super().redirect_request(req, *args, **more)
        if new is not None and urlsplit(new.full_url).netloc != urlsplit(req.full_url).netloc:
            new.remove_header("Authorization")
        return new


def opened(request: Request, patience_s: float) -> Any:
    """The answer to a request, for a `with` statement. Raises OSError."""
    return build_opener(_KeepToken).open(request, timeout=patience_s)


def answer_of(repo: str, ask: Callable[[], T]) -> T:
    """The answer; errors of the client library become a DownloadError of one line."""
    from huggingface_hub.errors import HfHubHTTPError

    # its HTTP errors derive from those of its HTTP library, which depends on the version; the rest are OSErrors
    http = (base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception))
    kinds: tuple[type[Exception], ...] = (OSError, ValueError, HTTPException, *http)
    try:
        return ask()
    except kinds as e:
        raise DownloadError(f"{repo} cannot be read: {_why(e)}") from e


def _why(e: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    status = _status(e)
    if isinstance(e, GatedRepoError) or _code(e) == "GatedRepo":
        return f"it is gated: accept its terms on its page of the hub, and give a token that may read it ({TOKEN})"
    if isinstance(e, RepositoryNotFoundError) or _code(e) == "RepoNotFound":
        return f"there is no such repository, or it is private and needs a token ({TOKEN})"
    if status in (401, 403):
        return f"the server refuses access ({status}); a token may be missing or wrong ({TOKEN})"
    if status in (SLOW, BUSY):
        return f"the server takes no more requests for now ({status}); try again later, or with a token ({TOKEN})"
    if status >= 500:
        return f"the server failed ({status}); try again later"
    lines = str(e).strip().splitlines()
    return lines[0] if lines else type(e).__name__


def _status(e: Exception) -> int:
    """HTTP status of an answer; 0 if there was none."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(e, HTTPError):
        return e.code
    return int(e.response.status_code) if isinstance(e, HfHubHTTPError) and e.response is not None else 0


def _code(e: Exception) -> str:
    """The hub's own word for an error."""
    return str(e.headers.get("X-Error-Code", "")) if isinstance(e, HTTPError) else ""
