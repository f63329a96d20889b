"""From the socket to plain data: read a body within limits of size and time, parse it within a limit of depth."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from math import isinf
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pyspec.errors import RequestError
from pyspec.ranges import no_number, shown
from pyspec.server.http.envelope import Refused
from pyspec.server.settings import Limits

# a too large body is read to its end before the answer, up to this multiple of the limit
DROPPED = 16
FIELDS, CONTAINERS = 1024, 200_000  # of a body itself; objects and arrays anywhere in it
STRINGS, NUMBERS = 300_000, 1 << 20  # of one body, names of fields included; and its other values
SMALL = 64 << 10  # bytes that hold too few values to count
_SIGN = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[,\[{]', re.DOTALL)
CLIENT_GONE = 499  # nginx's code; appears only in logs


class ClientGone(Exception):
    """The client closed the connection, so there is no answer to send."""


async def on_gone(request: Request, error: Exception) -> Response:
    """End a request whose client has left; nothing is sent."""
    return Response(status_code=CLIENT_GONE)


class Reading:
    """Memory of bodies that are still arriving, in all and by client. No client may use the last quarter."""

    def __init__(self, most: int) -> None:
        self.most, self.n_byte = most, 0
        self._of_client: Counter[str] = Counter()

    def grow(self, n: int, client: str = "") -> None:
        """Add received bytes. Raises Refused 429 if there is no room."""
        own = self._of_client[client] + n if client else 0
        if self.n_byte + n > self.most or own > self.most - self.most // 4:
            raise Refused(
                429,
                f"bodies of {self.n_byte} bytes are on their way; try again in a second",
            )
        self.n_byte += n
        self._of_client[client] += n

    def shrink(self, n: int, client: str = "") -> None:
        """Remove the bytes of a body that is complete or was given up."""
        self.n_byte -= n
        self._of_client[client] -= n
        if not self._of_client[client]:
            del self._of_client[client]


async def read_body(
    request: Request,
    limits: Limits,
    reading: Reading | None = None,
    client: str = "",
) -> bytes:
    """The whole body. Raises Refused 413 beyond `limits.body`, 408 after `limits.body_read_s`, 400 if it is compressed; ClientGone.

    The rest of a too large body is read and dropped, up to a limit, because a client that is still sending does not read an answer.
    """
    stated, refusal = request.headers.get("content-length", ""), None
    if stated.isdecimal() and len(stated) < 20 and int(stated) > limits.body:
        refusal = Refused(413, f"the body has {stated} bytes; at most {limits.body} are taken")
    elif (packed := request.headers.get("content-encoding", "identity").lower()) != "identity":
        refusal = Refused(400, f"the body's Content-Encoding is {shown(packed)}; send it as it is")
    parts: list[bytes] = []
    size = kept = 0
    reading = reading or Reading(limits.reading)
    try:
        async with asyncio.timeout(limits.body_read_s):
            async for chunk in request.stream():
                size += len(chunk)
                if refusal is None and size > limits.body:
                    refusal = Refused(413, f"the body has more than {limits.body} bytes")
                if refusal is None:
                    reading.grow(len(chunk), client)
                    kept += len(chunk)
                    parts.append(chunk)
                elif size > DROPPED * limits.body:
                    break
    except ClientDisconnect:
        raise ClientGone from None
    except TimeoutError:
        if refusal is None:
            raise Refused(408, f"the body did not arrive within {limits.body_read_s:g} s") from None
    finally:
        reading.shrink(kept, client)
    if refusal is not None:
        raise refusal
    return b"".join(parts)


def parse_object(raw: bytes, limits: Limits) -> dict[str, Any]:
    """A JSON object of finite numbers, valid text and bounded depth and size, or RequestError."""
    if len(raw) > SMALL:
        _check_size(raw)
    try:
        text = raw.decode("utf-8-sig")  # some clients send a byte order mark
        value = json.loads(text, parse_constant=no_number, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise RequestError(f"the body is nested deeper than {limits.json_depth} levels") from None
    except json.JSONDecodeError as error:
        raise RequestError(
            f"the body is not JSON: {error.msg.lower()} at character {error.pos}",
        ) from None
    except ValueError as error:  # NaN, infinity, or a number of thousands of digits
        raise RequestError(
            f"the body holds a number that cannot be used: {str(error).lower()}",
        ) from None
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, not {_kind(value)}")
    if len(value) > FIELDS:
        raise RequestError(f"the body has {len(value)} fields; at most {FIELDS} are taken")
    _check_tree(value, limits.json_depth, check_text=b"\\u" in raw)
    return value


def _check_size(raw: bytes) -> None:
    """Bound the number of values that the parser has to make, because it is one call in which no other thread runs."""
    n_string = n_container = n_comma = 0
    for found in _SIGN.finditer(raw):
        sign = raw[found.start()]
        n_string += sign == ord('"')
        n_comma += sign == ord(",")
        n_container += sign in b"[{"
        if n_string > STRINGS or n_container > CONTAINERS or n_comma > NUMBERS + STRINGS:
            raise RequestError(
                f"the body has more than {CONTAINERS} objects and arrays, {STRINGS} strings, or {NUMBERS} numbers"
            )


def _finite(text: str) -> float:
    """Parse a float. Refuses 1e400, which is JSON but cannot be repeated in an answer."""
    value = float(text)
    if isinf(value):
        raise ValueError(f"{text[:20]} is too large")
    return value


def _check_tree(root: dict[str, Any], max_depth: int, check_text: bool) -> None:
    """Bound the depth and refuse lone surrogates, which no encoder takes. Iterative, so depth uses no stack."""
    level: list[Any] = [root]
    depth = 0
    while level:
        depth += 1
        if depth > max_depth:
            raise RequestError(f"the body is nested deeper than {max_depth} levels")
        deeper: list[Any] = []
        for node in level:
            keys = node.keys() if isinstance(node, dict) else ()
            items = node.values() if isinstance(node, dict) else node
            deeper += [item for item in items if type(item) in (dict, list)]
            if check_text:
                _check_text([text for text in (*keys, *items) if type(text) is str])
        level = deeper


def _check_text(texts: list[str]) -> None:
    try:
        for text in texts:
            text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError("the body holds half a surrogate pair; send whole characters") from None


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
