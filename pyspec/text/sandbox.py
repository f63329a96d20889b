"""The process that renders chat templates: jinja2's sandbox under limits of memory and time.

Templates come from untrusted files. jinja2 keeps them away from Python, but has no hook that bounds the memory of one expression.
So rendering happens in a process of its own, with an address-space limit, and the parent kills it when its time is over. Started as
`python -m pyspec.text.sandbox`; speaks JSON lines: the template first, then one render per line.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment, modifies_known_mutable

from pyspec.text.sandbox_process import serve

MEMORY_BYTES = 512 << 20  # of address space, including the interpreter
OUTPUT_CHARS = 4 << 20
REFUSAL_CHARS = 1000


class Refusal(Exception):
    """The template called raise_exception."""


class Generation(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's part for training. Here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's interface

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


class Sandbox(SandboxedEnvironment):
    """A template may change the lists that it makes, not the values that it is given."""

    given: tuple[object, ...] = ()

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        is_given = any(obj is each for each in self.given)
        may = not (is_given and modifies_known_mutable(obj, attr))
        return may and super().is_safe_attribute(obj, attr, value)


def environment() -> Sandbox:
    """The environment that Hugging Face templates expect."""
    env = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", Generation],
        autoescape=False,
    )
    env.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    env.filters["tojson"] = _tojson
    env.filters["from_json"] = env.filters["fromjson"] = json.loads
    return env


def _refuse(message: object) -> None:
    raise Refusal(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(value, Iterator):  # the result of a filter such as map
        value = list(value)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def render(template: jinja2.Template, values: Mapping[str, object]) -> dict[str, str]:
    """{"text": ...}; {"refused": ...} if the template called raise_exception; else {"failed": ...}."""
    out, n = [], 0
    if isinstance(template.environment, Sandbox):
        template.environment.given = tuple(values.values())
    try:
        for piece in template.generate(**values):
            n += len(piece)
            if n > OUTPUT_CHARS:
                return {"failed": f"renders to more than {OUTPUT_CHARS} characters"}
            out.append(piece)
    except Refusal as e:
        return {"refused": str(e)[:REFUSAL_CHARS]}
    except MemoryError:
        out.clear()
        return {"failed": f"needs more than {MEMORY_BYTES >> 20} MiB"}
    except Exception as e:  # noqa: BLE001 - any exception of a foreign program is its failure
        return {"failed": f"fails on these messages: its line {_line_of(e)} can not be rendered"}
    return {"text": "".join(out)}


def _line_of(error: Exception) -> int:
    """The line of the template in which it failed."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno or 0 for f in reversed(frames) if f.filename == "<template>"), 0)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def answers(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    """One answer per line: to the template the result of compiling it, then one to each render."""
    try:
        template = environment().from_string(json.loads(next(lines)))
    except Exception as e:  # noqa: BLE001 - as above
        yield {"failed": f"does not compile: {_one_line(e)}"}
        return
    yield {"text": ""}
    for line in lines:
        yield render(template, json.loads(line))


if __name__ == "__main__":
    serve(answers, MEMORY_BYTES)
