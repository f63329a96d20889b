"""Lists as llama-bench takes them, and the cases that they make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pyspec.bench.measure import Mode, Run
from pyspec.bench.report import FORMATS
from pyspec.bench.result import Report, changes, joined, read_rates, summarise_turns, to_json
from pyspec.cli import main
from pyspec.cli.bench import BenchFlags, numbers
from pyspec.cli.choice import EngineChoice


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("512", [512]),
        ("512,1024", [512, 1024]),
        ("1-4", [1, 2, 3, 4]),
        ("0-512+128", [0, 128, 256, 384, 512]),
        ("1-64*4", [1, 4, 16, 64]),
        ("3, 8-10", [3, 8, 9, 10]),
    ],
)
def test_a_list_is_read_as_llama_bench_reads_it(text: str, wanted: list[int]):
    assert numbers(text) == wanted


@pytest.mark.parametrize(
    "text", ["", "a", "1,", "-1", "4-1", "0-8*2", "1-8*1", "1-8+0", "1-100", "1.5", "1-2-3", "1-"]
)
def test_what_is_no_list_or_does_not_end_is_refused(text: str):
    with pytest.raises(ValueError, match=r"want|more than|does not end"):
        numbers(text)


class Stopped(Exception):
    """Raised where a load would begin."""


def flags(*args: str) -> BenchFlags:
    """The parameters that the command would measure."""
    seen: list[BenchFlags] = []

    def measured(engine: EngineChoice, given: BenchFlags, case: str) -> list[Report]:
        seen.append(given)
        raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pyspec.cli.bench._measured", measured)
        result = CliRunner().invoke(main, ["bench", "demo", *args])
    assert isinstance(result.exception, Stopped), result.output
    return seen[0]


def cases(*args: str) -> list[tuple[int, int, str]]:
    return [(plan.n_prompt, plan.n_predict, plan.case) for plan in flags(*args).plans()]


def test_one_case_has_no_name_and_several_have():
    assert cases() == [(0, 128, "")]
    assert cases("-p", "64") == [(64, 128, "")]
    assert cases("-p", "64,128", "-n", "8") == [(64, 8, "p64 n8"), (128, 8, "p128 n8")]
    assert cases("-p", "64", "-p", "128", "-n", "8", "-d", "0,32") == [
        (64, 8, "p64 n8"),
        (128, 8, "p128 n8"),
        (96, 8, "d32 p64 n8"),
        (160, 8, "d32 p128 n8"),
    ]


def test_pairs_are_cases_of_their_own():
    assert cases("-pg", "256,64") == [(256, 64, "")]
    assert cases("-pg", "256,64", "-p", "8", "-n", "4") == [(8, 4, "p8 n4"), (256, 64, "p256 n64")]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-p", "512,x"], "-p"),
        (["-p", "-5"], "-p"),
        (["-n", "2"], "want 4 to"),
        (["-t", "-2"], "-t"),
        (["-t", "9999"], "want 0 to 1024 threads, got 9999"),
        (["-npl", "0"], "want 1 to 256 streams, got 0"),
        (["-pg", "5"], "tokens of a prompt and of an answer"),
        (["--temp", "-101"], "--temp"),
    ],
)
def test_what_can_not_be_measured_is_said_with_its_flag(args: list[str], said: str):
    result = CliRunner().invoke(main, ["bench", "demo", *args])
    assert result.exit_code == 2 and said in result.stderr, result.output
    assert "Traceback" not in result.output


def test_each_number_of_threads_is_a_load_with_room_for_the_longest_case(
    monkeypatch: pytest.MonkeyPatch,
):
    loads: list[tuple[object, int, int]] = []

    def load(self: EngineChoice, np: int, isolated: bool) -> object:
        loads.append((self.settings["threads"], self.ctx, np))
        raise Stopped

    monkeypatch.setattr(EngineChoice, "load", load)
    assert isinstance(
        CliRunner().invoke(main, ["bench", "demo", "-t", "2,1", "-p", "9000,8"]).exception, Stopped
    )
    assert loads == [(2, 9000 + 128 + 64, 8)]


def run(case: str, mode: Mode, rate: float) -> Run:
    parts = dict.fromkeys(("draft", "verify", "sample", "host"), 1.0)
    return Run(
        np=2, mode=mode, turn=0, n_prompt=8, n_predicted=4, prompt_rate=10.0, rate=rate, window_s=1.0, window_n=4,
        total_rate=rate, ms=parts, round_ms=4.0, rounds=1, drafted=(), accepted=(), n_draft=(), mean_len=1.0, case=case,
    )  # fmt: skip


def test_cases_are_joined_shown_and_compared_with_their_like(tmp_path: Path):
    reports = []
    for case, rate in (("p8 n4", 100.0), ("p16 n4", 50.0)):
        runs = (run(case, "plain", rate), run(case, "spec", 2 * rate))
        about = {"model": "m", "device": "cpu", "drafter": "mtp", "date": case, "n_predict": 4, "threads": len(reports)}  # fmt: skip
        reports.append(Report(about=about, rows=summarise_turns(runs), runs=runs))
    whole = joined(reports)
    assert [row.label for row in whole.rows] == ["2 p8 n4", "2 p16 n4"]
    assert (whole.about["n_predict"], whole.about["threads"]) == (4, "0, 1")
    for form in FORMATS.values():
        assert "p16 n4" in form(whole)
    path = tmp_path / "before.json"
    path.write_text(json.dumps(to_json(whole)))
    found = changes(whole.rows, read_rates(path))
    assert {(c.np, c.before) for c in found if c.what == "plain"} == {
        ("2 p8 n4", 100.0),
        ("2 p16 n4", 50.0),
    }
