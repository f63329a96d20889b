"""`pyspec bench --golden`: made-up acceptance as a public benchmark fixes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pyspec.bench.golden import GOLDEN, USUAL, golden
from pyspec.cli import main
from pyspec.errors import ConfigError
from pyspec.registry import DRAFTERS
from pyspec.sample.synth import SynthAcceptance

LENGTHS = GOLDEN[USUAL].lengths
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


@pytest.mark.parametrize("n", LENGTHS)
def test_drafts_are_as_many_as_there_and_kept_as_often(n: int) -> None:
    found = golden({"n_draft_max": n, "spec_type": "auto", "threads": 2})
    assert found == {
        "n_draft_max": n, "spec_type": "mtp", "threads": 2, "synth_len": LENGTHS[n], "n_draft_fixed": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"n_draft_max": 6}, r"2 \(2.73 tokens a round\), 3 \(3.39 .*\), .*5 \(4.41 .*\), .*; got 6"),
        ({"n_draft_max": 0}, "got none"),
        ({"n_draft_max": 3, "synth_len": 2.0}, "leave out --spec-synth-len"),
        ({"n_draft_max": 3, "synth_rates": "0.9,0.8,0.7"}, "leave out"),
        ({"n_draft_max": 3, "spec_type": "dflash"}, "is for mtp drafts; --spec-type is dflash"),
    ],
)
def test_what_says_something_else_is_refused(settings: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        golden(settings)


@pytest.mark.slow
def test_the_report_says_whose_acceptance_it_is_and_rounds_yield_it() -> None:
    told = json.loads(bench("--golden", "--spec-draft-n-max", "3", "-o", "json").stdout)
    assert told["about"]["golden"] == GOLDEN[USUAL].of and told["about"]["synthetic_len"] == LENGTHS[3]
    (row,) = told["rows"]
    assert abs(row["mean_len"] - LENGTHS[3]) < 0.5
    shown = bench("--golden", "--spec-draft-n-max", "2")
    assert "2.73 tokens a round, as in a public benchmark of Qwen3.5" in shown.stdout


def test_the_command_refuses_other_lengths_before_it_loads() -> None:
    refused = bench("--golden", "--spec-draft-n-max", "6")
    assert (
        refused.exit_code == 2 and "--golden qwen3.5-397b needs --spec-draft-n-max 1" in refused.output
    )
    unknown = bench("--golden", "qwen9")
    assert (
        unknown.exit_code == 2
        and "--golden qwen9: no such table; there are qwen3.5-397b," in unknown.output
    )
    other = bench("--golden=qwen3.8-27b", "--spec-type", "dflash")
    assert other.exit_code == 2 and "is for mtp drafts; --spec-type is dflash" in other.output


@pytest.mark.parametrize("name", GOLDEN)
def test_tables_are_possible_and_a_single_number_of_drafts_needs_no_flag(name: str) -> None:
    table = GOLDEN[name]
    assert table.drafter in DRAFTERS and table.of and table.source
    for n, length in table.lengths.items():
        SynthAcceptance.of_length(length, n)
        assert golden({"n_draft_max": n}, name)["synth_len"] == length
    if len(table.lengths) == 1:
        assert golden({}, name) == golden({"n_draft_max": n}, name)
    short = [table.lengths[n] for n in sorted(table.lengths) if n <= 5]
    assert short == sorted(short)
