"""The benchmark on the packaged pair: it runs, reports its setup, and fails on a regression."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pyspec.bench.prompts import make_prompts
from pyspec.cli import main
from pyspec.engine.api import Engine
from pyspec.errors import ConfigError


def bench(*args: str) -> Result:
    length = () if "-n" in args else ("-n", "12")  # given twice it is two lengths
    return CliRunner().invoke(
        main, ["bench", "demo", "-c", "256", "-r", "1", *length, "--no-warmup", *args]
    )


@pytest.mark.slow
def test_a_regression_is_exit_code_1_after_the_report(tmp_path: Path):
    rates = {"prompt": 1.0, "plain": 1e9, "spec": 1.0}
    base = tmp_path / "base.json"
    base.write_text(json.dumps({"schema": 1, "rows": [{"np": 2, **rates}]}))
    result = bench(
        "-npl",
        "1,2",
        "-n",
        "40",
        "-o",
        "json",
        "--spec-draft-n-max",
        "3",
        "--spec-fixed",  # whether drafts pay is a matter of times, and of other work
        "--baseline",
        str(base),
    )
    assert result.exit_code == 1, result.stderr
    assert "np 2 plain" in result.stderr and result.stderr.count("REGRESSION") == 1
    report = json.loads(result.stdout)
    assert [row["np"] for row in report["rows"]] == [1, 2]
    assert [(r["np"], r["mode"]) for r in report["runs"]] == [
        (1, "plain"),
        (1, "spec"),
        (2, "plain"),
        (2, "spec"),
    ]
    for run in report["runs"]:
        assert run["total_rate"] > 0 and run["prompt_rate"] > 0
        assert (sum(run["drafted"]) > 0) == (run["mode"] == "spec")
    plain = [r for r in report["runs"] if r["mode"] == "plain"]
    assert all(r["rate"] > 0 and r["round_ms"] > 0 and r["ms"]["verify"] > 0 for r in plain)


@pytest.mark.slow
def test_synthetic_acceptance_is_marked_and_held():
    result = bench(
        "-npl",
        "1",
        "-o",
        "json",
        "--spec-synth-len",
        "3",
        "--spec-fixed",
        "--random-prompts",
        "-n",
        "60",
    )
    report = json.loads(result.stdout)
    assert report["synthetic"] and report["about"]["synthetic_len"] == 3
    assert (
        1.8 < report["rows"][0]["mean_len"] < 4.2
    )  # 20 rounds: the mean of a draw, not the exact value
    assert "Error" not in result.stderr


def test_a_model_without_a_drafter_is_measured_plain():
    result = bench("-npl", "1", "--spec-type", "none", "-p", "40", "--parts")
    assert result.exit_code == 0
    assert "--parts: no GPU" in result.stderr and "linear ms" not in result.stdout
    assert " spec | " not in result.stdout and "drafter none" in result.stdout


@pytest.mark.slow
def test_each_turn_is_run_through_http_too():
    result = bench("-npl", "2", "-n", "40", "-o", "json", "--http", "--spec-draft-n-max", "3")
    report = json.loads(result.stdout)
    assert [(r["mode"], r["via"]) for r in report["runs"]] == [
        ("plain", "engine"),
        ("plain", "http"),
        ("spec", "engine"),
        ("spec", "http"),
    ]
    for direct, through in zip(report["runs"][::2], report["runs"][1::2], strict=True):
        assert through["n_predicted"] == direct["n_predicted"]
        assert through["rate"] > 0 and through["prompt_rate"] > 0
        assert (sum(through["drafted"]) > 0) == (through["mode"] == "spec")
    assert report["rows"][0]["plain_http_share"] > 0.3
    assert "turn 1 through HTTP" in result.stderr


def test_prompts_have_the_length_asked_for_or_are_refused():
    with Engine.load("demo", None, ctx=128, warm_up=False) as engine:
        assert {len(p) for p in make_prompts(engine, 4, 100, False)} == {100}
        assert {len(p) for p in make_prompts(engine, 4, 50, True)} == {50}
        with pytest.raises(ConfigError, match="do not fit -c 128"):
            make_prompts(engine, 1, 128, False)
