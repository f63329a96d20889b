"""The page at `/` while the model is downloaded and loaded: shows the progress and reloads every two seconds. No script."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from html import escape

from starlette.responses import Response

EVERY_S = 2
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:32rem;margin:20vh auto;padding:0 1rem;color-scheme:light dark}"
    "progress{width:100%}"
)
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>pyspec: loading</title><meta http-equiv="refresh" content="{every}">
<meta name="viewport" content="width=device-width"><style>{style}</style></head>
<body><h1>The model is loading</h1><p>{stage}</p><progress max="1"{value}></progress>
<p>This page reloads every {every} seconds and becomes the chat when the model is ready.</p></body></html>
"""


def loading_page(loading: Mapping[str, object], status: int) -> Response:
    """loading  "stage" and "fraction" of the current work; empty before the first report"""
    stage, fraction = str(loading.get("stage", "")), loading.get("fraction")
    said = f"{stage}: {100 * fraction:.0f} %" if isinstance(fraction, float | int) and stage else "It has just begun."
    value = f' value="{fraction}"' if isinstance(fraction, float | int) else ""
    body = PAGE.format(every=EVERY_S, style=STYLE, stage=escape(said), value=value)
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    headers = {
        "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{digest}'; frame-ancestors 'none'; base-uri 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
        "Retry-After": str(EVERY_S),
    }
    return Response(body, status, headers=headers, media_type="text/html")
