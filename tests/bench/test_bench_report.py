"""Rows, text forms and comparison, from recorded turns."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pyspec.bench.measure import Mode, Run
from pyspec.bench.prompts import PROMPTS, categories, demo_prompts, lengthen, random_ids
from pyspec.bench.report import FORMATS, as_csv, as_json, as_jsonl, as_markdown
from pyspec.bench.result import Report, changes, read_rates, summarise_turns
from pyspec.cli import main
from pyspec.errors import ConfigError

ABOUT: dict[str, object] = {"model": "m <1> & co", "device": "cpu", "drafter": "dflash", "date": "2026-11-21 05:00"}  # fmt: skip
LENGTHS = (3.0,) * 10 + (1.5,) * 20 + (0.0,) * 70


def turn(np: int, mode: Mode, number: int, rate: float) -> Run:
    drafts = (
        {
            "drafted": (10, 10, 8),
            "accepted": (9, 6, 2),
            "n_draft": (2, 0, 2, 6),
            "lengths": LENGTHS,
            "all_rounds": 200,
        }
        if mode == "spec"
        else {}
    )
    return Run(
        **{"drafted": (), "accepted": (), "n_draft": (), **drafts},
        np=np,
        mode=mode,
        turn=number,
        n_prompt=20 * np,
        n_predicted=64 * np,
        prompt_rate=500.0,
        rate=rate,
        window_s=1.0,
        window_n=int(rate),
        total_rate=rate * 0.9,
        ms={"draft": 1.0 if mode == "spec" else 0.0, "verify": 6.0, "sample": 0.5, "host": 0.5},
        round_ms=10.0,
        rounds=20,
        mean_len=2.7 if mode == "spec" else 1.0,
    )


RUNS = [
    turn(np, mode, i, rate * np)
    for np in (1, 8)
    for i, pair in enumerate([(100.0, 200.0), (50.0, 150.0), (100.0, 250.0)])
    for mode, rate in zip(("plain", "spec"), pair, strict=True)
]
REPORT = Report(
    about=ABOUT, rows=summarise_turns(RUNS, n_bytes=2_000_000_000, bandwidth=500.0), runs=tuple(RUNS)
)
PLAIN_ONLY = [r for r in RUNS if r.mode == "plain"]


def test_a_ratio_is_taken_between_neighbouring_turns():
    row = REPORT.rows[0]
    assert (row.ratio, row.ratio_low, row.ratio_high) == (2.5, 2.0, 3.0)
    assert (row.plain, row.spec) == (100.0, 200.0)


def test_acceptance_is_kept_by_position():
    row = REPORT.rows[0]
    assert row.per_pos == pytest.approx((0.9, 0.6, 0.25))
    assert row.acceptance == pytest.approx(17 / 28)
    assert row.n_draft == pytest.approx((0.2, 0.0, 0.2, 0.6))


def test_the_floor_is_the_time_to_read_the_weights_once():
    assert REPORT.rows[0].plain_floor == pytest.approx(0.4)  # 2 GB at 500 GB/s = 4 ms of 10
    assert summarise_turns(RUNS)[0].plain_floor == 0.0


def test_a_turn_without_a_window_does_not_count_as_a_slow_one():
    runs = [replace(r, rate=0.0) if (r.np, r.mode, r.turn) == (1, "spec", 1) else r for r in RUNS]
    row = summarise_turns(runs)[0]
    assert (row.spec_low, row.ratio_low, row.ratio_high) == (200.0, 2.0, 2.5)
    why = "3 of 4 streams had begun when the first one ended, after 7 tokens; --ignore-eos continues after an end of text"
    assert replace(runs[0], rate=0.0, note=why).result_text == f": no rate ({why})"
    assert all(r.result_text == f": {r.rate:.1f} tokens/s" for r in runs if r.rate)


def test_without_a_drafter_there_is_no_ratio():
    rows = summarise_turns(PLAIN_ONLY)
    text = as_markdown(replace(REPORT, rows=rows, runs=tuple(PLAIN_ONLY)))
    assert [r.ratio for r in rows] == [0.0, 0.0]
    assert "x0.00" not in text and "spec |" not in text


def test_markdown_columns_line_up_and_name_the_model():
    text = as_markdown(REPORT)
    assert "m <1> & co" in text and "x2.50" in text and "2.00..3.00 (3)" in text
    for block in text.split("\n\n")[1:]:
        lines = block.strip().splitlines()
        assert len({len(line) for line in lines}) == 1
        assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_made_up_acceptance_is_said_in_every_form(form: str):
    runs = tuple(replace(r, synthetic=True) for r in RUNS)
    assert "synthetic" in FORMATS[form](replace(REPORT, runs=runs))
    assert "synthetic acceptance" not in as_markdown(REPORT)


@pytest.mark.parametrize("form", FORMATS)
def test_synthetic_routing_is_named_in_every_form(form: str):
    routed = replace(REPORT, about={**REPORT.about, "routing": "modest"})
    assert "modest" in FORMATS[form](routed) and "modest" not in FORMATS[form](REPORT)


def test_csv_and_jsonl_read_back():
    rows = list(csv.DictReader(io.StringIO(as_csv(REPORT))))
    assert [(r["np"], float(r["ratio"])) for r in rows] == [("1", 2.5), ("8", 2.5)]
    assert rows[0]["spec_ms_draft"] == "1.0" and rows[0]["per_pos"] == "0.9000 0.6000 0.2500"
    lines = [json.loads(line) for line in as_jsonl(REPORT).splitlines()]
    assert len(lines) == len(RUNS) and lines[0]["model"] == ABOUT["model"]


def test_drafted_lengths_over_rounds_are_told():
    assert "███▅▅▅▅▅▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁" in as_markdown(REPORT)
    assert json.loads(as_json(REPORT))["rows"][0]["lengths"] == list(LENGTHS)


def test_a_report_is_its_own_baseline(tmp_path: Path):
    path = tmp_path / "base.json"
    path.write_text(as_json(REPORT))
    found = changes(REPORT.rows, read_rates(path))
    assert [(c.np, c.what) for c in found] == [
        (n, w) for n in (1, 8) for w in ("prompt", "plain", "spec")
    ]
    assert all(c.change == 0 for c in found)


def test_a_slower_rate_shows_as_a_negative_change(tmp_path: Path):
    path = tmp_path / "base.json"
    path.write_text(as_json(REPORT))
    slow = [replace(r, spec=r.spec * 0.9) for r in REPORT.rows]
    assert {c.what: round(c.change, 6) for c in changes(slow, read_rates(path))} == {
        "prompt": 0.0,
        "plain": 0.0,
        "spec": -0.1,
    }


def test_two_reports_are_compared_by_their_rates(tmp_path: Path):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(as_json(REPORT))
    b.write_text(
        as_json(
            replace(
                REPORT,
                rows=tuple(replace(r, spec=r.spec * 0.96, plain=r.plain * 1.5) for r in REPORT.rows),
            )
        )
    )

    def call(*args: object) -> Result:
        return CliRunner().invoke(main, ["bench", "compare", *map(str, args)])

    done = call(a, b)
    assert done.exit_code == 1 and done.stdout.count("REGRESSION beyond 3.0%") == 2
    assert "np 8 spec: 1600.0 -> 1536.0 (-4.0%)" in done.stdout
    assert "np 1 plain: 100.0 -> 150.0 (+50.0%)" in done.stdout
    assert call(a, b, "--max-regress", "5%").exit_code == 0 and call(a, a).exit_code == 0
    told = json.loads(call(a, b, "--json").stdout)["changes"]
    assert [(c["np"], c["what"]) for c in told if c["regression"]] == [(1, "spec"), (8, "spec")]
    for args, result_text in (
        ((a, tmp_path / "gone"), "cannot read"),
        ((a,), "Missing argument 'B.json'"),
        ((a, b, "--max-regress", "x"), "percentage"),
    ):
        done = call(*args)
        assert done.exit_code == 2 and result_text in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "is not a report"),
        ("{}", "is not a report"),
        ('{"schema": 9}', "schema 9"),
        ("[1]", "is not a rep"),
    ],
)
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "base.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_rates(path)


def test_nothing_to_compare_is_an_error_and_not_a_pass():
    with pytest.raises(ConfigError, match="the baseline has streams 4"):
        changes(REPORT.rows, {4: {"prompt": 1.0, "plain": 1.0, "spec": 1.0}})
    with pytest.raises(ConfigError, match="np 8: spec was not measured"):
        changes(
            [replace(r, spec=0.0) for r in REPORT.rows], {8: {"prompt": 1.0, "plain": 1.0, "spec": 1.0}}
        )
    with pytest.raises(ConfigError, match="cannot read"):
        read_rates(Path("gone.json"))


def test_categories_take_turns():
    kinds = [kind for kind, _ in categories()]
    assert sorted(kinds[: len(PROMPTS)]) == sorted(PROMPTS)
    assert len(kinds) == sum(map(len, PROMPTS.values())) >= 16


def test_demo_prompts_are_questions_with_long_answers_of_several_kinds():
    texts = demo_prompts()
    assert len(set(texts)) == 16 and texts == demo_prompts()
    assert "Implement bubble sort in Python" in texts and "Hi!" not in texts
    assert "story" not in texts[0]


def test_prompts_are_lengthened_before_the_question():
    assert lengthen([7, 8], [1, 2, 3], 9) == [1, 2, 3, 1, 2, 3, 1, 7, 8]
    assert lengthen([7, 8], [1, 2, 3], 2) == [7, 8]


def test_random_ids_repeat_with_the_seed_and_avoid_banned_ones():
    ids = random_ids(50, {3, 4}, 400, seed=1)
    assert ids == random_ids(50, {3, 4}, 400, seed=1) != random_ids(50, {3, 4}, 400, seed=2)
    assert set(ids) == set(range(50)) - {3, 4}


def http_turns(runs: list[Run], share: float) -> list[Run]:
    return [replace(r, via="http", rate=r.rate * share) for r in runs]


def test_http_is_compared_with_the_same_turn_in_process():
    runs = [*RUNS, *http_turns(RUNS[:-1], 0.98), replace(RUNS[-1], via="http", rate=0.0)]
    report = Report(about=ABOUT, rows=summarise_turns(runs), runs=tuple(runs))
    row = report.rows[1]
    assert (row.plain, row.spec, row.ratio, row.turns) == (800.0, 1600.0, 2.5, 3)
    assert (row.spec_http, row.spec_http_share) == (pytest.approx(0.98 * 1400), pytest.approx(0.98))
    assert row.plain_http_low == pytest.approx(0.98) and row.plain_http_ms["verify"] == 6.0
    text = as_markdown(report)
    assert "HTTP tok/s" in text and "0.980..0.980 (3)" in text and "spec HTTP" in text
    assert "HTTP" not in as_markdown(REPORT)
    flat = list(csv.DictReader(io.StringIO(as_csv(report))))
    assert float(flat[0]["plain_http_share"]) == pytest.approx(0.98)
    assert {json.loads(line)["via"] for line in as_jsonl(report).splitlines()} == {"engine", "http"}


def test_a_baseline_with_http_is_not_met_without_it(tmp_path: Path):
    runs = [*RUNS, *http_turns(RUNS, 0.9)]
    path = tmp_path / "base.json"
    path.write_text(as_json(Report(about=ABOUT, rows=summarise_turns(runs), runs=tuple(runs))))
    with pytest.raises(ConfigError, match="plain_http was not measured"):
        changes(REPORT.rows, read_rates(path))


def test_device_parts_are_shown_where_they_were_asked_for():
    parts = {"linear": 6.5, "attention": 0.75, "state": 0.5, "other": 0.25}
    report = replace(REPORT, rows=(replace(REPORT.rows[0], plain_parts=parts), REPORT.rows[1]))
    assert "attention ms" in as_markdown(report) and "attention ms" not in as_markdown(REPORT)
    first, second = csv.DictReader(io.StringIO(as_csv(report)))
    assert (first["plain_parts_linear"], second["plain_parts_linear"], first["spec_parts_state"]) == (
        "6.5",
        "0.0",
        "0.0",
    )
