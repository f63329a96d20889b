"""Progress without a terminal: whole lines, and an end for each begun one."""

from __future__ import annotations

import re

import click
import pytest

from pyspec import progress
from pyspec.cli import fit, meter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the meters: its last value."""
    times = [100.0]
    monkeypatch.setattr(meter.time, "monotonic", lambda: times[-1])
    return times


def test_lines_are_whole_and_the_work_they_tell_of_ends(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with meter.load_meter():
        for at, part in ((101.0, 0.1), (103.0, 0.314), (104.0, 0.5), (114.0, 0.9), (115.0, 1.0)):
            clock.append(at)
            progress.report("weights", part)
    out, err = capsys.readouterr()
    assert (out, err) == (
        "",
        "loading: weights: 31 %\nloading: weights: 90 %\nloading: done after 15.0 s\n",
    )


def test_short_work_is_not_told_of(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with meter.pull_lines():
        clock.append(101.9)
        progress.report("hash", 0.5)
        clock.append(150.0)
        progress.report("hash", 1.0)
    assert capsys.readouterr() == ("", "")


def test_work_that_fails_does_not_end_well(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OSError, match="full"), meter.meter("compiling") as tell:
        clock.append(109.0)
        tell(3, 10)
        raise OSError("full")
    assert capsys.readouterr().err == "compiling: 30 %\n"


@pytest.mark.parametrize(
    ("said", "n_bytes"),
    [
        ("24", 24 << 30), ("24G", 24 << 30), ("24 GiB", 24 << 30), ("0.5", 1 << 29), ("8192M", 8 << 30),
        ("24000000000", 24_000_000_000),
    ],
)  # fmt: skip
def test_memory_is_given_in_gib_or_with_a_unit(said: str, n_bytes: int) -> None:
    command = fit.fit
    option = next(p for p in command.params if p.name == "vram")
    assert fit.amount(click.Context(command), option, said) == n_bytes


@pytest.mark.parametrize("said", ["-3", "much", "24X", "1K", "99999999T", "1e3"])
def test_what_is_no_memory_is_refused(said: str) -> None:
    option = next(p for p in fit.fit.params if p.name == "vram")
    with pytest.raises(click.BadParameter, match=re.escape(repr(said))):
        fit.amount(click.Context(fit.fit), option, said)
