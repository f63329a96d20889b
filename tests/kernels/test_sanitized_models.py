"""`tools/sanitize.py` runs, and on a GPU its models run with our kernels: a sanitizer says nothing about refused ones."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pyspec.cuda import survey
from pyspec.cuda.op import listed_ops
from pyspec.cuda.ops.linear.op import linear, linear_tall
from pyspec.cuda.ops.linear.ref import LinearSpec
from pyspec.cuda.ops.rows.op import rows
from pyspec.cuda.ops.rows.ref import PrepKind, RowsSpec
from pyspec.gguf import GGMLType

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import sanitize

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for op in listed_ops():
        monkeypatch.setattr(op, "_decided", {})


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(("model", "draft", "mean"), sanitize.MODELS)
def test_what_a_run_asks_for_our_kernels_take(
    model: str, draft: str, mean: float, tmp_path: Path
) -> None:
    line = sanitize.run(model, draft, mean, "q8_0", tmp_path, device="cpu", weights="packed")
    assert "68 tokens" in line and " 0 tokens from the cache" not in line
    asked = {op.name: (op, spec) for op, spec in survey.asked()}
    assert asked.keys() >= {"attend", "rope_kv"} | ({"gdn"} if "qwen" in model else set())
    for op, spec in survey.asked():
        if op.name not in ("best", "linear_cpu"):  # CPUs have others
            assert op.impls[0].limits(replace(spec, device=CUDA)) is None, op.name


@pytest.mark.parametrize("model", sorted({m for m, _, _ in sanitize.MODELS}))
def test_products_take_the_rows_that_layers_give_them(model: str) -> None:
    """Asked for on GPUs alone."""
    dims = sanitize.dims_of(model)
    asks = [RowsSpec(CUDA, dims.n_embd, PrepKind.NORM), RowsSpec(CUDA, dims.n_ff, PrepKind.GLU)]
    asks.append(RowsSpec(CUDA, dims.n_head * dims.head_dim, PrepKind.GATE, dims.head_dim))
    if dims.arch.startswith("qwen35"):
        asks.append(RowsSpec(CUDA, dims.n_v_head * dims.state, PrepKind.HEADS, dims.state))
    if dims.arch == "nemotron_h_moe":
        inner = dims.mamba_heads * dims.mamba_dim
        asks.append(RowsSpec(CUDA, inner, PrepKind.GROUPS, inner // dims.n_group))
    assert [rows.impls[0].limits(ask) for ask in asks] == [None] * len(asks)
    for op in (linear, linear_tall):
        for kind in (GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.NVFP4):
            assert op.impls[0].limits(LinearSpec(CUDA, kind, 272, dims.n_embd)) is None
