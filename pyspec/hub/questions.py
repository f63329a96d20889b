"""Questions to the hub: their headers, and one line for whatever goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from pyspec.errors import DownloadError

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
