"""Every flag of every command against hostile values: accepted, or refused in one line that names the flag; never a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch
from _pytest.mark import ParameterSet
from click.testing import CliRunner, Result

from pyspec.cli import COMMANDS, main
from pyspec.config import EngineSettings, settings_from
from pyspec.engine.load.load import load
from pyspec.errors import ConfigError, DownloadError, PyspecError
from pyspec.ranges import OneOf, Real, Rule, Whole, rules_of

FIXTURE = Path(__file__).parents[1] / "fixtures" / "qwen3.gguf"
BASE = {
    "server": ["demo"],
    "run": ["demo", "--chat", "hello"],
    "demo": [],
    "bench": ["demo"],
    "models": [],
    "inspect": [str(FIXTURE)],
    "tokenize": [str(FIXTURE), "--text", "hello"],
    "logits": [str(FIXTURE), "--ids", "1", "--out", "out.npz"],
    "perplexity": [str(FIXTURE), "-f", str(Path(__file__))],
    "synth": ["qwen3", "out.gguf", "--tiny"],
    "doctor": ["demo"],
    "pull": ["demo"],
    "ps": ["127.0.0.1:9"],
    "fit": ["demo"],
    "verify": ["demo"],
}
"""Other flags that each command needs to run."""
NEVER = (
    "nan",
    "inf",
    "-inf",
    "1e99",
    "-99999999999",
    "99999999999999999999999",
    "",
    "x",
)  # no number means these
PERHAPS = ("-5", "-1", "0", "1.5", "100000", "meta", "cuda:999999")
ACCEPTED = 99


class Accepted(PyspecError):
    """Raised where a load would begin."""

    exit_code = ACCEPTED


def options() -> Iterator[tuple[str, click.Option]]:
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        for param in command.params:
            if (
                isinstance(param, click.Option)
                and not param.is_flag
                and not param.hidden
                and param.expose_value
            ):
                yield name, param


OPTIONS = [
    # `doctor` looks at the machine each time
    pytest.param(c, p, id=f"{c} {p.opts[-1]}", marks=[pytest.mark.slow] * (c == "doctor"))
    for c, p in options()
]
NUMBERS = [
    pytest.param(c, p, id=f"{c} {p.opts[-1]}")
    for c, p in options()
    if isinstance(p.type, click.types.IntParamType | click.types.FloatParamType)
]


@pytest.fixture(autouse=True)
def no_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Settings are checked as ever; then nothing is loaded, served or downloaded."""

    def accept(settings: EngineSettings) -> None:
        raise Accepted("accepted")

    def offline(*args: object) -> None:
        raise DownloadError("no network here")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "pyspec.engine.api.Engine.open",
        lambda target, draft, values, isolated=False: accept(settings_from(values)),
    )
    monkeypatch.setattr("pyspec.engine.plan.fit.fit", lambda path, settings, vram, ram: accept(settings))
    monkeypatch.setattr("pyspec.server.http.listen.listen", lambda settings: [])
    monkeypatch.setattr("pyspec.server.http.serve.run", lambda *args: accept(EngineSettings()))
    monkeypatch.setattr("pyspec.logits.load", lambda path, settings: accept(settings))
    monkeypatch.setattr("pyspec.engine.load.load.load", lambda path, settings: accept(settings))
    monkeypatch.setattr("pyspec.hub.from_hub", offline)


def call(command: str, option: click.Option, value: str) -> Result:
    return CliRunner().invoke(main, [command, *BASE[command], option.opts[-1], value])


def error_of(result: Result) -> str:
    """The line of the error. There was no traceback."""
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return result.stderr.rstrip("\n").rpartition("Error: ")[2]


@pytest.mark.sampled(most=8)
@pytest.mark.parametrize(("command", "option"), NUMBERS)
def test_what_is_no_number_or_far_off_is_refused(command: str, option: click.Option) -> None:
    for value in NEVER:
        result = call(command, option, value)
        error = error_of(result)
        assert result.exit_code == 2, f"{value!r}: exit code {result.exit_code}, {error}"
        assert any(flag in error for flag in option.opts) and "\n" not in error, f"{value!r}: {error}"


@pytest.mark.sampled(most=8)
@pytest.mark.parametrize(("command", "option"), OPTIONS)
def test_a_strange_value_is_accepted_or_refused_in_one_line(command: str, option: click.Option) -> None:
    for value in (*NEVER, *PERHAPS):
        result = call(command, option, value)
        error = error_of(result)
        assert result.exit_code in (0, 1, 2, 3, DownloadError.exit_code, ACCEPTED), f"{value!r}: {error}"
        assert "\n" not in error, f"{value!r}: {error!r}"


def test_the_issues_examples_are_refused_with_flag_value_and_range() -> None:
    for args, said in (
        (["-c", "99999999999"], "-c is 99999999999; want a whole number from 0 to 16777216"),
        (["-t", "-2"], "-t is -2; want a whole number from -1 to 1024"),
        (["-t", "100000"], "-t is 100000; want a whole number from -1 to 1024"),
        (["-dev", "meta"], "-dev is 'meta'; want auto, cpu, cuda, cuda:1"),
        (["--queue", "-5"], "--queue is -5; want a whole number from 0 to 1000000"),
        (["--top-p", "nan"], "--top-p is nan; want a number from 0 to 1"),
        (
            ["-np", "256", "-c", "16777216"],
            "-np 256 times -c 16777216 is 4294967296 tokens; want at most",
        ),
    ):
        result = CliRunner().invoke(main, ["server", "demo", *args])
        assert result.exit_code == 2 and said in error_of(result), result.output


HOSTILE = (-1, 0, 2.5, 10**30, float("nan"), float("inf"), "", "x", None, True, b"x", [], {})


@pytest.mark.parametrize("rule", rules_of(EngineSettings), ids=lambda rule: rule.name)
def test_settings_from_python_are_held_against_the_same_ranges(rule: Rule) -> None:
    for value in HOSTILE:
        try:
            settings_from({rule.name: value})
        except ConfigError as e:
            assert str(e).startswith((rule.spelt, "-b is", "-np"))
            assert "want" in str(e)
            assert "\n" not in str(e)
        else:
            assert not rule.flaw(value)


def ends() -> Iterator[tuple[str, object] | ParameterSet]:
    for rule in rules_of(EngineSettings):
        kind = rule.kind
        if rule.name == "ctx":  # pages for sixteen million tokens take half a minute
            yield from (
                (rule.name, kind.low),
                pytest.param(rule.name, kind.high, marks=pytest.mark.slow),
            )
        elif isinstance(kind, Whole | Real):
            yield from ((rule.name, kind.low), (rule.name, kind.high))
        elif isinstance(kind, OneOf) and rule.name != "draft_head":  # no head here
            yield from ((rule.name, value) for value in kind.values)


@pytest.mark.sampled(most=4)
@pytest.mark.parametrize(("name", "value"), ends())
def test_the_ends_of_every_range_load_or_are_refused(name: str, value: object) -> None:
    """A range is right only if none of its values ends in a traceback later."""
    values = {"np": 2, "ctx": 64, "spec_type": "ngram", "warm_up": False, "device": "cpu", name: value}
    n_thread = torch.get_num_threads()
    try:
        load(FIXTURE, settings_from(values))
    except PyspecError as e:
        assert str(e)
    finally:
        torch.set_num_threads(n_thread)
