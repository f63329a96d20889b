"""Random models whose experts are routed by a curve: forwards show it, the report says it, and models that can not have it are refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from pyspec import synth
from pyspec.bench.session import routing_of
from pyspec.cli import main
from pyspec.cuda.ops.moe import ref as moe_ref
from pyspec.cuda.ops.moe_route.op import moe_route
from pyspec.errors import ConfigError
from pyspec.models.placement import HITS
from pyspec.synth.dims import find, widened
from pyspec.synth.routing import hit_rate

sys.path.append(str(Path(__file__).parent / "models"))

from harness import DEVICE, Bench

N_EXPERT, N_USED, N_ROW = 48, 3, 260
SHARES = (0.125, 0.25, 0.5, 0.75)
ARCHS = ("qwen35moe", "gpt-oss", "glm4moe", "qwen3moe", "minimax-m2", "qwen3next")
pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="routes are watched in torch")


def picks(path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """[layer, row, used] of a text of random tokens."""
    found, choose = [], moe_ref.choose

    def watched(*given: object) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = choose(*given)  # type: ignore[arg-type]
        found.append(ids.long())
        return ids, weights

    monkeypatch.setattr(moe_ref, "choose", watched)
    monkeypatch.setattr(moe_route, "impls", [])
    monkeypatch.setattr(moe_route, "_decided", {})
    tokens = np.random.default_rng(4).integers(0, 250, N_ROW).tolist()
    Bench(path, n_ctx=2 * N_ROW).feed(0, tokens)
    return torch.stack(found)


def hits(ids: torch.Tensor, share: float) -> float:
    """Of the experts that the text's first half picks most, on the second half: in the mean of layers."""
    half, n = ids.shape[1] // 2, round(share * N_EXPERT)
    rates = []
    for own in ids:
        most = torch.bincount(own[:half].flatten(), minlength=N_EXPERT).argsort(descending=True)[:n]
        rates.append(torch.isin(own[half:], most).float().mean())
    return float(torch.stack(rates).mean())


@pytest.mark.parametrize(
    ("arch", "routing"),
    [
        pytest.param(a, r, marks=[pytest.mark.slow] * (i > 0 and (a, r) != ("gpt-oss", "uniform")))
        for i, a in enumerate(ARCHS)
        for r in HITS
    ],
)
def test_a_texts_hits_follow_the_curve(
    arch: str, routing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dims = replace(
        widened(find(arch, tiny=True)), n_expert=N_EXPERT, n_used=N_USED, n_layer=5, name="routed"
    )
    path = synth.write(dims, tmp_path / "m.gguf", quant="q8_0", routing=routing)
    ids = picks(path, monkeypatch)
    assert len(ids) >= 4 and routing_of(path) == routing
    off = {share: round(hits(ids, share) - hit_rate(routing, share), 3) for share in SHARES}
    assert max(map(abs, off.values())) < 0.1, off
    firsts = [int(torch.bincount(own.flatten(), minlength=N_EXPERT).argmax()) for own in ids]
    assert len(set(firsts)) > 1, "layers have favourites of their own"


def test_curves_are_apart_and_a_model_without_one_says_none(tmp_path: Path) -> None:
    curves = np.array([[hit_rate(routing, share) for share in SHARES] for routing in HITS])
    assert (np.diff(curves, axis=0)[:, :3] > 0.1).all() and curves[0].tolist() == list(SHARES)
    path = synth.write("qwen3moe", tmp_path / "m.gguf", tiny=True)
    assert routing_of(path) == "" and routing_of(tmp_path / "elsewhere.gguf") == ""


@pytest.mark.parametrize(
    ("name", "why"),
    [("qwen3", "no experts"), ("granitemoe", "embedding is its head"), ("deepseek2", "groups"), ("deepseek4", "table")],
)  # fmt: skip
def test_a_model_that_can_not_have_a_curve_is_refused(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        synth.write(name, tmp_path / "m.gguf", tiny=True, routing="hot")
    with pytest.raises(ConfigError, match="known are uniform, modest, hot"):
        synth.write("qwen3moe", tmp_path / "m.gguf", tiny=True, routing="warm")


@pytest.mark.slow
def test_the_report_names_the_routing(tmp_path: Path) -> None:
    made = CliRunner().invoke(
        main, ["synth", "qwen3moe", str(path := tmp_path / "m.gguf"), "--tiny", "--routing", "modest"]
    )
    assert made.exit_code == 0, made.output
    how = ["-c", "256", "-r", "1", "-n", "8", "-npl", "1", "--no-warmup", "--random-prompts", "-p", "8"]
    told = CliRunner().invoke(main, ["bench", str(path), *how])
    assert "**synthetic routing of experts**: modest" in told.stdout, told.output
