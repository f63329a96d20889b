"""`/`: one page for chatting and for watching the slots. It has no build step and loads nothing from elsewhere.

Its parts are files beside this one and are sent in one answer. All text is inserted as text nodes, and the content security policy
allows exactly this script and this style by their hashes, so text of a model cannot run as code.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from html import escape
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

SCRIPTS = (
    "dom.js",
    "markdown.js",
    "settings.js",
    "chats.js",
    "pictures.js",
    "models.js",
    "chat.js",
    "slots.js",
)


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


STYLE, SCRIPT = "\n" + _read("style.css"), "\n'use strict';\n" + "\n".join(map(_read, SCRIPTS))
PAGE = _read("page.html").replace("/* style */", STYLE).replace("/* script */", SCRIPT).encode()

HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_hash(SCRIPT)}; style-src {_hash(STYLE)}; "
        "img-src data:; connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

EVERY_S = 2
LOADING_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:32rem;margin:20vh auto;"
    "padding:0 1rem;color-scheme:light dark}"
    "progress{width:100%}"
)
LOADING_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>pyspec: loading</title><meta http-equiv="refresh" content="{every}">
<meta name="viewport" content="width=device-width"><style>{style}</style></head>
<body><h1>The model is loading</h1><p>{stage}</p><progress max="1"{value}></progress>
<p>This page reloads every {every} seconds and becomes the chat when the model is ready.</p></body></html>
"""


async def page(service: object, request: Request) -> Response:
    """Answer with the page."""
    return Response(PAGE, media_type="text/html", headers=HEADERS)


def loading_page(loading: Mapping[str, object], status: int) -> Response:
    """The page at `/` while the model is downloaded and loaded: the progress, reloaded every two seconds. No script.

    loading  "stage" and "fraction" of the current work; empty before the first report
    """
    stage, fraction = str(loading.get("stage", "")), loading.get("fraction")
    text, value = "It has just begun.", ""
    if isinstance(fraction, float | int):
        text = f"{stage}: {100 * fraction:.0f} %" if stage else text
        value = f' value="{fraction}"'
    body = LOADING_PAGE.format(every=EVERY_S, style=LOADING_STYLE, stage=escape(text), value=value)
    headers = {
        "Content-Security-Policy": (
            f"default-src 'none'; style-src {_hash(LOADING_STYLE)}; frame-ancestors 'none'; base-uri 'none'"
        ),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
        "Retry-After": str(EVERY_S),
    }
    return Response(body, status, headers=headers, media_type="text/html")
