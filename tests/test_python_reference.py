"""docs/python.md matches the docstrings and lists all of the API."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

import pyspec
from pyspec.engine.chat_tools import ToolOptions
from pyspec.engine.option_texts import GROUPS, TEXTS
from pyspec.engine.options import GenerateOptions
from pyspec.request import Done, Timings

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import python_reference  # noqa: E402

PUBLIC = [name for name in vars(pyspec.Engine) if not name.startswith("_")]


def test_the_page_is_current() -> None:
    written = python_reference.PAGE.read_text(encoding="utf-8")
    assert written == python_reference.page(), "run: python tools/python_reference.py"


def test_every_option_is_described_and_none_that_is_not_there() -> None:
    assert TEXTS.keys() == GenerateOptions.__annotations__.keys()
    assert {name for names in GROUPS.values() for name in names} <= TEXTS.keys()


@pytest.mark.parametrize("name", ["generate", "stream", "request", "chat"])
def test_help_names_every_option_with_type_default_and_meaning(name: str) -> None:
    text = inspect.getdoc(getattr(pyspec.Engine, name)) or ""
    for option, meaning in TEXTS.items():
        assert f"    {option}: " in text and meaning in text
    assert "temperature: float = 0.8" in text
    assert "max_tokens: int = -1" in text
    assert "stop: str | Sequence[str] = ()" in text
    if name == "chat":
        assert all(f"{option}: " in text for option in ToolOptions.__annotations__.keys() - TEXTS.keys())


@pytest.mark.parametrize("name", PUBLIC)
def test_every_method_is_on_the_page_and_has_a_sentence(name: str) -> None:
    internal = {"open", "from_settings", "loop"}
    listed = {each for _, names in python_reference.METHODS for each in names}
    assert name in listed | internal
    assert len(inspect.getdoc(getattr(pyspec.Engine, name)) or "") > 20


def test_what_is_exported_is_on_the_page() -> None:
    page = python_reference.PAGE.read_text(encoding="utf-8")
    for name in set(pyspec.__all__) - {"Engine", "Request", "SamplingParams"}:
        assert f"`{name}`" in page


def test_the_end_of_a_stream_has_the_texts_that_a_loop_reads() -> None:
    done = Done("r1", "eos", 3, 5, Timings())
    assert (done.text, done.content, done.reasoning, done.tool_calls) == ("", "", "", ())
