"""tools/bench_http.py: requests as public tables have them, and made-up agents, over a tiny model."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyspec.cli.chats import served
from pyspec.engine.api import Engine
from pyspec.registry import DRAFTERS
from pyspec.sample.synth import SynthAcceptance

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import bench_http  # noqa: E402  (tools/ is no package)
import golden  # noqa: E402
from agent_trace import MOST, Agents, quantile, trace  # noqa: E402

MODEL = ROOT / "tests" / "fixtures" / "qwen35.gguf"
GOLDEN = ("--golden", "qwen3.5-397b", "--drafts", "3")


def how(*args: str) -> argparse.Namespace:
    return bench_http.parser().parse_args([str(MODEL), "table", "--vocab", "250", *args])


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    drafts = {"spec_type": "mtp", "n_draft_max": 3, "n_draft_fixed": True, "synth_len": 3.39}
    engine = Engine.load(str(MODEL), np=3, ctx=900, warm_up=False, **drafts)  # type: ignore[arg-type]
    with engine, served(engine) as found:
        yield found


def cells(line: str) -> list[float]:
    return [float(cell) for cell in line.strip("|").split("|")]


def test_a_trace_is_the_same_for_a_seed_and_stays_within_its_limits() -> None:
    kind = Agents(n_header=100, n_turn=40, new=50, answer=9, pause_s=0.5, n_ctx=3000)
    assert trace(kind, 3) == trace(kind, 3) != trace(kind, 4)
    lengths, short = [], 0
    for seed in range(60):
        steps = trace(kind, seed)
        assert kind.n_header + sum(s.n_new + s.n_answer for s in steps) <= kind.n_ctx
        short += len(steps) < kind.n_turn
        lengths += [s.n_new for s in steps]
        assert all(2 <= s.n_answer <= 9 * MOST and 0 < s.pause_s <= 0.5 * MOST for s in steps)
    assert short > 30, "most conversations are full before their last turn"
    whole = [s.n_new for seed in range(60) for s in trace(Agents(new=50, n_ctx=1 << 20), seed)]
    assert 44 < quantile(whole, 0.5) < 56 and 140 < quantile(whole, 0.9) < 230
    assert trace(Agents(n_header=100, n_ctx=90), 0) == []


def test_quantiles_are_values_that_occurred() -> None:
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert [quantile(values, q) for q in (0.0, 0.1, 0.2, 0.5, 0.9, 1.0)] == [1, 1, 1, 3, 5, 5]
    assert quantile([], 0.5) == 0.0 and quantile([7.0], 0.9) == 7.0


def test_golden_acceptance_becomes_flags_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    flags = bench_http.golden_flags(how(*GOLDEN))
    assert flags == [
        *("--spec-type", "mtp", "--spec-draft-n-max", "3"),
        *("--spec-fixed", "--spec-synth-len", "3.39"),
    ]
    assert "acceptance of Qwen3.5, MTP, thinking (InferenceX" in capsys.readouterr().out
    assert bench_http.golden_flags(how()) == []
    with pytest.raises(SystemExit, match=r"2 \(2.73 tokens a round\), 3 \(3.39 .*; got 6"):
        bench_http.golden_flags(how("--golden", "qwen3.5-397b", "--drafts", "6"))


@pytest.mark.parametrize("name", golden.GOLDEN)
def test_public_tables_are_possible(name: str) -> None:
    table = golden.GOLDEN[name]
    assert table.drafter in DRAFTERS and table.of and table.source
    for n, length in table.lengths.items():
        SynthAcceptance.of_length(length, n)
        assert golden.flags(name, n)[-1] == f"{length:g}"
    short = [table.lengths[n] for n in sorted(table.lengths) if n <= 5]
    assert short == sorted(short)


def test_a_table_has_both_rates_and_the_acceptance_that_was_set(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    given = how("--prompt", "70", "--answer", "60", "--streams", "1", "3", "--each", "2")
    random.seed(2)
    bench_http.table(port, given)
    head, _, names, _, *rows = capsys.readouterr().out.splitlines()
    assert head == "requests of 70 + 60 tokens" and names.startswith("| streams | streams / TPOT |")
    found = [cells(row) for row in rows]
    assert [row[0] for row in found] == [1, 3]
    for n, by_tpot, e2e, tpot_ms, first50, first90, length in found:
        assert by_tpot == pytest.approx(1e3 * n / tpot_ms, rel=0.01 + 0.006 / tpot_ms), "as printed"
        assert 0 < first50 <= first90 and e2e > 0
        assert length == pytest.approx(3.39, abs=0.5)


def test_agents_continue_their_conversations_from_the_cache(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    given = how("--header", "90", "--turns", "4", "--result", "20", "--call", "12", "--agent-ctx", "850",
                "--streams", "2", "3")  # fmt: skip
    bench_http.agents(port, given)
    *_, few, more = capsys.readouterr().out.splitlines()
    for row, n_agent in ((few, 2), (more, 3)):
        agents, answers, p50, p90, first50, first90, pace, rate, cached, length = cells(row)
        kind = Agents(n_header=90, n_turn=4, new=20, answer=12, n_ctx=850)
        assert (agents, answers) == (n_agent, sum(len(trace(kind, i)) for i in range(n_agent)))
        assert 0 < first50 <= p50 <= p90 and first90 <= p90 and pace > 0 and rate > 0
        assert 0.5 < cached < 1, "each turn reads only what is new"
        assert length > 1.5


@pytest.mark.slow
def test_the_tool_serves_a_model_and_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        free = sock.getsockname()[1]
    given = how(*GOLDEN, "--prompt", "33", "--answer", "40", "--streams", "3", "--each", "1", "--tokens", "20",
                "--port", str(free))  # fmt: skip
    bench_http.measure(given, ["-np", "3", "-c", "300", "--no-warmup"])
    out = capsys.readouterr().out
    assert "ready after" in out and "requests of 33 + 40 tokens" in out
    assert cells(out.splitlines()[-1])[0] == 3
