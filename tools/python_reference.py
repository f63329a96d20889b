"""Writes docs/python.md from the docstrings: `python tools/python_reference.py`. tests/test_python_reference.py says when that is due."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

from pyspec import errors
from pyspec.config import EngineSettings
from pyspec.engine.api import Engine
from pyspec.engine.chat_tools import ChatDelta, ChatResult, ToolCall
from pyspec.engine.option_texts import help_text, options, type_text
from pyspec.engine.options import with_arguments
from pyspec.engine.result import Result
from pyspec.ranges import Rule, docs_of, rules_of
from pyspec.request import Delta, Done, EngineInfo, Metrics, ReplicaInfo, SlotInfo, Timings, TokenLogprob
from pyspec.slot_action import SlotReport

PAGE = Path(__file__).resolve().parents[1] / "docs" / "python.md"
METHODS = (
    ("Loading", ("load", "close", "info", "state", "alive", "use_template")),
    ("Generating", ("generate", "stream", "generate_many", "chat", "chat_stream")),
    ("asyncio", ("agenerate", "astream", "achat", "achat_stream")),
    ("Requests, tokens, slots and counters", ("request", "run", "run_stream", "submit", "cancel", "check_grammar", "known_grammar", "encode", "decode", "save_slot", "restore_slot", "erase_slot", "act_on_slot", "slots", "metrics", "replicas", "park", "wake")),
)  # fmt: skip
TYPES = (
    Result,
    ChatResult,
    ToolCall,
    Delta,
    ChatDelta,
    Done,
    Timings,
    TokenLogprob,
    EngineInfo,
    SlotInfo,
    SlotReport,
    ReplicaInfo,
    Metrics,
)
HEAD = """# Python

Written by `tools/python_reference.py` from the docstrings; `help(pyspec.Engine.chat)` says the same.

```python
import pyspec

with pyspec.Engine.load("demo", np=8) as engine:
    print(engine.chat([{"role": "user", "content": "Count from 1 to 10."}], temperature=0).content)
    for delta in engine.stream("Once upon a time", max_tokens=40, seed=1):
        print(delta.text, end="")
```

`import pyspec` costs nothing; torch is loaded with the first engine. An engine may be used from any thread. [Examples](../examples/README.md): a client, a
stream, JSON, tools, many at once, FastAPI, a notebook.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD, "## Engine\n"]
    for title, names in METHODS:
        parts.append(f"### {title}\n")
        parts += [_method(name) for name in names]
    parts += ["## Options of a generation\n", *_options(), "## Settings of an engine\n", _settings()]
    parts += ["## Results\n", *map(_type, TYPES), "## Errors\n", *_errors()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def _method(name: str) -> str:
    found = inspect.getattr_static(Engine, name, None)
    if found is None or isinstance(found, property):
        return f"#### `{name}`\n\nWhat is loaded, an EngineInfo.\n"
    function = found.__func__ if isinstance(found, classmethod) else found
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))
    signature = re.sub(r"\((self|cls)(, )?", "(", signature, count=1)
    text = inspect.cleandoc((function.__doc__ or "").replace(help_text(), ""))
    kind = (
        "async " if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function) else ""
    )
    more = (
        "\n[Options](#options-of-a-generation) are listed below.\n"
        if "Unpack[" in signature and name != "load"
        else ""
    )
    return f"#### `{name}`\n\n```python\n{kind}{name}{signature}\n```\n\n{_prose(text)}\n{more}"


def _prose(text: str) -> str:
    """A docstring as Markdown: lists of names and meanings, which have two spaces between them, as they are."""
    blocks = text.split("\n\n")
    return "\n\n".join(
        f"```text\n{b}\n```" if re.search(r"^\S+( *, *\S+)* {2,}\S|^ {4}", b, re.M) else b
        for b in blocks
    )


def _options() -> Iterator[str]:
    for title, group in options():
        rows = [f"| `{o.name}` | `{_cell(o.type)}` | `{o.default}` | {_cell(o.text)} |" for o in group]
        yield "\n".join(
            [
                f"{title}:\n",
                "| option | type | default | meaning |",
                "| --- | --- | --- | --- |",
                *rows,
                "",
            ]
        )


def _settings() -> str:
    """All that `load` takes beside the model and the draft."""
    rows = [
        f"| `{rule.name}` | {_cell(_words(with_arguments(rule.wanted)))} | `{rule.default!r}` | {_flag(rule)} | {_cell(with_arguments(rule.text))} |"
        for rule in rules_of(EngineSettings)
        if rule.text
    ]
    head = "`load` takes each by its name, or by the long name of its flag (`spec_fixed=True`).\n"
    return "\n".join(
        [
            head,
            "| setting | value | default | flag | meaning |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def _words(wanted: str) -> str:
    """Legal values as the page has them: "a whole number from 1 to 256" is "whole number, 1 to 256"."""
    plain = {
        "one of True, False": "True or False",
        "a Path or str or None": "path or None",
        "one of '', ": 'one of "", ',
    }
    for long, short in plain.items():
        wanted = wanted.replace(long, short)
    wanted = re.sub(r"^a (whole number|number) from ", r"\1, ", wanted)
    return re.sub(r"\b\d{5,}\b|\d+e\+\d+", lambda found: f"{float(found[0]):,.0f}", wanted)


def _flag(rule: Rule) -> str:
    return f"`{rule.spelt}`" if rule.flag.words else ""


def _type(kind: type) -> str:
    types, texts = get_type_hints(kind), docs_of(kind)
    rows = [
        f"| `{f.name}` | `{_cell(type_text(types[f.name]))}` | {_cell(texts[f.name])} |"
        for f in fields(kind)
    ]
    rows += [
        f"| `{name}` | `{_cell(type_text(get_type_hints(p.fget)['return']))}` | {_cell(inspect.getdoc(p) or '')} |"
        for name, p in inspect.getmembers(kind, lambda v: isinstance(v, property))
    ]
    text = _prose(inspect.getdoc(kind) or "")
    head = ["\n| field | type | meaning |", "| --- | --- | --- |"]
    return "\n".join([f"### `{kind.__name__}`\n", text, *head, *rows, ""])


def _errors() -> Iterator[str]:
    yield "All that pyspec raises on purpose is a `pyspec.PyspecError`; the classes are in `pyspec.errors`.\n"
    rows = ["| error | is a | HTTP status | when |", "| --- | --- | --- | --- |"]
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.PyspecError):
            above = kind.__mro__[1].__name__
            rows.append(
                f"| `{name}` | `{above}` | {kind.status} | {_cell((inspect.getdoc(kind) or '').splitlines()[0])} |"
            )
    yield "\n".join(rows)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
