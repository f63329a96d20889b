"""Lists of numbers as in llama-bench: 512,1024 and ranges: 1-8, 0-512+128, 1-64*2."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import click

PART = re.compile(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?")
MOST = 64  # numbers in one list
FORM = "want numbers between commas, or ranges: 512,1024 or 1-8 or 0-512+128 or 1-64*2"


def numbers(text: str) -> list[int]:
    """The numbers of a list. Raises ValueError."""
    found: list[int] = []
    for part in text.split(","):
        match = PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{FORM}; got {text!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        by, multiplies = int(match[4] or 1), match[3] == "*"
        if last < first or by < 1 + multiplies or (multiplies and not first):
            raise ValueError(f"the range {part.strip()!r} does not end; {FORM}")
        while first <= last:
            found.append(first)
            if len(found) > MOST:
                raise ValueError(f"{text!r} has more than {MOST} numbers")
            first = first * by if multiplies else first + by
    return found


def in_list(low: int, high: int, what: str) -> Callable[..., tuple[int, ...]]:
    """A callback for an option that may be repeated or hold a list: its numbers in order, without duplicates."""

    def read(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> tuple[int, ...]:
        try:
            found = [number for text in texts for number in numbers(text)]
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from None
        wrong = next((number for number in found if not low <= number <= high), None)
        if wrong is not None:
            raise click.BadParameter(f"want {low} to {high} {what}, got {wrong}", ctx, param)
        return tuple(dict.fromkeys(found))

    return read


def pairs(
    ctx: click.Context,
    param: click.Parameter,
    texts: Sequence[str],
) -> tuple[tuple[int, int], ...]:
    """Callback of -pg: prompt tokens and answer tokens, PROMPT,ANSWER."""
    found = []
    for text in texts:
        match = re.fullmatch(r"(\d{1,8}),(\d{1,8})", text.strip())
        if match is None or int(match[2]) < 4:
            raise click.BadParameter(
                f"want tokens of a prompt and of an answer, such as 512,128; got {text!r}", ctx, param
            )
        found.append((int(match[1]), int(match[2])))
    return tuple(found)
