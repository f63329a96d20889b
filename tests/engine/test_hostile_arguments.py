"""For any argument of a public method, a program gets a PyspecError or an answer, and the engine serves on."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyspec.engine.api import Engine
from pyspec.errors import PyspecError
from pyspec.request import Request, SamplingParams
from pyspec.slot_action import SlotAction


def _ignore(*_: object) -> None:
    pass


class Unwritable:
    """An object with a broken repr."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def nested(kind: type[list[Any]] | type[dict[str, Any]]) -> Any:
    """Nested deeper than repr supports."""
    value: Any = kind()
    for _ in range(5000):
        value = [value] if kind is list else {"a": value}
    return value


LOOP: list[Any] = []
LOOP.append(LOOP)

VALUES: tuple[Any, ...] = (
    1.5, "x", None, -1, 2**70, 10**5000, [], {}, object(), math.nan, -math.inf, "\udc80", "\0", b"\xff", True, [1.5], ["x"], [None], [[]],
    [-1], [2**70], [{}], {"role": "user"}, [{"role": "user", "content": object()}], [{"role": "user", "content": "\udc80"}],
    [{"role": "user", "content": [b"x"]}], {1: 2}, {"a": object()}, {"a": "\udc80"}, range(3), _ignore, "a" * 5000, set(), Path("/"),
    Unwritable(), nested(list), nested(dict), LOOP, {"a": LOOP},
)  # fmt: skip
LIMIT_S = 120.0  # for one call; a hang is a failure

Call = Callable[[Engine, Any], object]
SHORT: dict[str, Any] = {"max_tokens": 2, "temperature": 0.0}
SAMPLED = (
    "temperature",
    "top_k",
    "seed",
    "logit_bias",
    "logprobs",
    "samplers",
    "dry_sequence_breakers",
    "ignore_eos",
    "min_tokens",
)
RUN = ("max_tokens", "stop", "cache_prompt", "n_draft_max", "slot", "max_predict_ms")
HELD = ("json_schema", "grammar", "regex", "choices", "params")


CHAT = [{"role": "user", "content": "Hi"}]


def _tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, **function}}


def _with(name: str) -> Call:
    return lambda engine, x: engine.generate("Once", **{**SHORT, name: x})


async def _streamed(engine: Engine, prompt: Any) -> int:
    return len([event async for event in engine.astream(prompt, **SHORT)])


CALLS: dict[str, Call] = {
    "encode": lambda engine, x: engine.encode(x),
    "decode": lambda engine, x: engine.decode(x),
    "generate": lambda engine, x: engine.generate(x, **SHORT),
    "chat": lambda engine, x: engine.chat(x, **SHORT),
    "stream": lambda engine, x: list(engine.stream(x, **SHORT)),
    "request": lambda engine, x: engine.request(x),
    "run": lambda engine, x: engine.run(x),
    "run_stream": lambda engine, x: list(engine.run_stream(x)),
    "generate_many": lambda engine, x: engine.generate_many(x, **SHORT),
    "generate_many one": lambda engine, x: engine.generate_many([x, "Once"], return_exceptions=True, **SHORT),
    "generate_many progress": lambda engine, x: engine.generate_many(["Once"], progress=x, **SHORT),
    "agenerate": lambda engine, x: asyncio.run(engine.agenerate(x, **SHORT)),
    "achat": lambda engine, x: asyncio.run(engine.achat(x, **SHORT)),
    "astream": lambda engine, x: asyncio.run(_streamed(engine, x)),
    "submit": lambda engine, x: engine.submit(x, _ignore),
    "submit to": lambda engine, x: engine.submit(engine.request("Once", **SHORT), x),
    "cancel": lambda engine, x: engine.cancel(x),
    "check_grammar": lambda engine, x: engine.check_grammar(x),
    "known_grammar": lambda engine, x: engine.known_grammar(x),
    "tokenizer.encode": lambda engine, x: engine.tokenizer.encode(x),
    "tokenizer.encode_inside": lambda engine, x: engine.tokenizer.encode_inside(x),
    "tokenizer.decode": lambda engine, x: engine.tokenizer.decode(x),
    "chat tools": lambda engine, x: engine.chat(CHAT, tools=x, **SHORT),
    "chat one tool": lambda engine, x: engine.chat(CHAT, tools=[x], tool_call_parser="hermes", **SHORT),
    "chat tool's name": lambda engine, x: engine.chat(CHAT, tools=[_tool(name=x)], tool_call_parser="hermes", **SHORT),
    "chat tool's words": lambda engine, x: engine.chat(CHAT, tools=[_tool(description=x)], tool_call_parser="hermes", **SHORT),
    "chat tool's schema": lambda engine, x: engine.chat(CHAT, tools=[_tool(parameters=x)], tool_call_parser="hermes", tool_choice="required", **SHORT),
    "chat tool_choice": lambda engine, x: engine.chat(CHAT, tools=[_tool()], tool_call_parser="hermes", tool_choice=x, **SHORT),
    "chat tool_call_parser": lambda engine, x: engine.chat(CHAT, tools=[_tool()], tool_call_parser=x, **SHORT),
    "chat calls": lambda engine, x: engine.chat([*CHAT, {"role": "assistant", "content": "", "tool_calls": x}], **SHORT),
    "chat arguments": lambda engine, x: engine.chat(
        [*CHAT, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": x}}]}], **SHORT
    ),
    "act_on_slot": lambda engine, x: engine.act_on_slot(x, _ignore),
    "act_on_slot kind": lambda engine, x: engine.act_on_slot(SlotAction(x, 0), _ignore),
    "act_on_slot number": lambda engine, x: engine.act_on_slot(SlotAction("erase", x), _ignore),
    "act_on_slot path": lambda engine, x: engine.act_on_slot(SlotAction("restore", 0, x), _ignore),
    "act_on_slot told": lambda engine, x: engine.act_on_slot(SlotAction("erase", 0), x),
    "save_slot": lambda engine, x: engine.save_slot(x, "/nowhere/at/all"),
    "save_slot path": lambda engine, x: engine.save_slot(0, x),
    "restore_slot": lambda engine, x: engine.restore_slot(x, "/nowhere/at/all"),
    "restore_slot path": lambda engine, x: engine.restore_slot(0, x),
    "erase_slot": lambda engine, x: engine.erase_slot(x),
    "close": lambda engine, x: None if x is None else engine.close(x),
    "a request's prompt": lambda engine, x: engine.run(Request(prompt=x, params=SamplingParams(temperature=0.0), max_tokens=2)),
    "a request's params": lambda engine, x: engine.run(Request(prompt=(1,), params=x, max_tokens=2)),
    "a request's grammar": lambda engine, x: engine.run(Request(prompt=(1,), max_tokens=2, grammar=x)),
    "a request's client": lambda engine, x: engine.run(Request(prompt=(1,), max_tokens=2, client=x)),
    "a request's budget": lambda engine, x: engine.run(Request(prompt=(1,), max_tokens=2, think_budget=x)),
    **{f"generate {name}": _with(name) for name in (*SAMPLED, *RUN, *HELD)},
}  # fmt: skip


@pytest.fixture(scope="module", params=[False, True], ids=["in-process", "isolated"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """In a folder of its own, because some values are names of writable files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("slots"))
        with Engine.load(
            "demo", np=2, ctx=256, warm_up=False, threads=1, isolated=request.param
        ) as engine:
            yield engine


def heard(call: Call, engine: Engine, value: Any) -> BaseException | None:
    """The exception of a call; TimeoutError if it does not end."""
    found: list[BaseException | None] = []

    def run() -> None:
        try:
            call(engine, value)
            found.append(None)
        except BaseException as e:  # noqa: BLE001 - any exception is judged
            found.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return found[0] if found else TimeoutError("the call does not end")


@pytest.mark.sampled(1, most=24)
@pytest.mark.parametrize("name", [name for name in CALLS if name != "close"])
def test_a_hostile_value_is_a_pyspec_error_and_the_engine_serves_on(engine: Engine, name: str) -> None:
    wrong = []
    for value in VALUES:
        error = heard(CALLS[name], engine, value)
        if not (error is None or isinstance(error, PyspecError)):
            wrong.append(f"{type(value).__name__}: {type(error).__name__}: {str(error)[:200]}")
        elif error is not None:
            assert str(error) and str(error).isprintable(), f"{type(value).__name__}: {error!r}"
    assert not wrong, "\n".join(wrong)
    result = engine.generate("Once upon a time", max_tokens=12, temperature=0.0)
    assert result.text == plain_text()
    assert engine.alive()


_PLAIN: list[str] = []


def plain_text() -> str:
    if not _PLAIN:
        with Engine.load("demo", draft=None, np=1, ctx=256, warm_up=False, threads=1) as plain:
            _PLAIN.append(plain.generate("Once upon a time", max_tokens=12, temperature=0.0).text)
    return _PLAIN[0]
