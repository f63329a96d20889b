"""`pyspec bench --golden`: made-up acceptance as a public benchmark fixes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pyspec.bench.golden import GOLDEN, SOURCE, golden
from pyspec.cli import main
from pyspec.errors import ConfigError

MODEL = Path(__file__).parents[1] / "fixtures" / "qwen35.gguf"


def bench(*args: str) -> Result:
    command = [
        "bench",
        str(MODEL),
        "-c",
        "512",
        "-r",
        "1",
        "-npl",
        "2",
        "-n",
        "200",
        "--no-warmup",
        "--random-prompts",
    ]
    return CliRunner().invoke(main, [*command, "--ignore-eos", *args])


@pytest.mark.parametrize("n", GOLDEN)
def test_drafts_are_as_many_as_there_and_kept_as_often(n: int) -> None:
    found = golden({"n_draft_max": n, "spec_type": "auto", "threads": 2})
    assert found == {
        "n_draft_max": n, "spec_type": "mtp", "threads": 2, "synth_len": GOLDEN[n], "n_draft_fixed": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"n_draft_max": 4}, r"2 \(2.73 tokens a round\), 3 \(3.39 .*\), 5 \(4.41 .*\); got 4"),
        ({"n_draft_max": 0}, "got none"),
        ({"n_draft_max": 3, "synth_len": 2.0}, "leave out --spec-synth-len"),
        ({"n_draft_max": 3, "synth_rates": "0.9,0.8,0.7"}, "leave out"),
        ({"n_draft_max": 3, "spec_type": "dflash"}, "is for MTP drafts; --spec-type is dflash"),
    ],
)
def test_what_says_something_else_is_refused(settings: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        golden(settings)


@pytest.mark.slow
def test_the_report_says_whose_acceptance_it_is_and_rounds_yield_it() -> None:
    told = json.loads(bench("--golden", "--spec-draft-n-max", "3", "-o", "json").stdout)
    assert told["about"]["golden"] == SOURCE and told["about"]["synthetic_len"] == GOLDEN[3]
    (row,) = told["rows"]
    assert abs(row["mean_len"] - GOLDEN[3]) < 0.5
    shown = bench("--golden", "--spec-draft-n-max", "2")
    assert "2.73 tokens a round, as in a public benchmark of Qwen3.5" in shown.stdout


def test_the_command_refuses_other_lengths_before_it_loads() -> None:
    refused = bench("--golden", "--spec-draft-n-max", "4")
    assert refused.exit_code == 2 and "--golden needs --spec-draft-n-max 2" in refused.output
