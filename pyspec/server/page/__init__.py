"""`/`: one page for chatting and for watching the slots. It has no build step and loads nothing from elsewhere.

Its parts are files beside this one and are sent in one answer. All text is inserted as text nodes, and the content security policy
allows exactly this script and this style by their hashes, so text of a model cannot run as code.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

SCRIPTS = ("dom.js", "markdown.js", "settings.js", "chats.js", "chat.js", "slots.js")


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


STYLE, SCRIPT = "\n" + _read("style.css"), "\n'use strict';\n" + "\n".join(map(_read, SCRIPTS))
PAGE = _read("page.html").replace("/* style */", STYLE).replace("/* script */", SCRIPT).encode()

HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_hash(SCRIPT)}; style-src {_hash(STYLE)}; connect-src 'self'; "
        "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def page(request: Request) -> Response:
    """Answer with the page."""
    return Response(PAGE, media_type="text/html", headers=HEADERS)
