"""Models with experts on a CPU: files stay packed, experts run in C++, and logits are those of unpacked weights."""

from __future__ import annotations

from pathlib import Path

import harness
import numpy as np
import pytest
import torch
from harness import FIXTURES, Bench

from pyspec import synth
from pyspec.config import EngineSettings
from pyspec.cpu import build
from pyspec.cpu.tape import Recorded, TapeMemory
from pyspec.cuda.kernel_context import KernelContext, within
from pyspec.cuda.ops.moe import cpu as moe_cpu
from pyspec.cuda.packed_cpu import CpuGroups
from pyspec.engine.plan.describe import describe
from pyspec.engine.plan.planned_bytes import plan_memory
from pyspec.gguf import GGMLType, open_gguf
from pyspec.models.binding import bound_at
from pyspec.models.blocks.moe import Experts
from pyspec.models.bound import BoundForward
from pyspec.models.decoder import Decoder
from pyspec.models.weights import Weights

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")
QUANTISED = ["qwen35moe_mixed_q8_0", "nemotron_latent_q8_0"]
MODELS = ["qwen35moe", "qwen35moe_fused_tied", "nemotron_moe", "nemotron_latent", "qwen3moe", *QUANTISED]
STREAMS = ["deepseek4", "deepseek4_pro"]
N = 72


@pytest.fixture(autouse=True)
def _two_threads_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the other tests run."""
    torch.set_num_threads(2)
    monkeypatch.setattr(harness, "DEVICE", torch.device("cpu"))


def divergence(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Mean KL(theirs || ours) in nats."""
    p, q = theirs.double().log_softmax(-1), ours.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def tokens_of(name: str) -> list[int]:
    found: list[int] = np.load(FIXTURES / f"{name}.npz")["tokens"].tolist()
    return found[:N]


@pytest.mark.sampled(1, most=2)
@pytest.mark.parametrize("name", [*MODELS, *STREAMS])
def test_packed_logits_are_those_of_unpacked_weights_and_of_a_row_alone(name: str) -> None:
    """deepseek4's other ops are torch's, whose rows differ beside others."""
    path, tokens = FIXTURES / f"{name}.gguf", tokens_of(name)
    want, got = (Bench(path, dense=dense).feed(0, tokens) for dense in (torch.float32, None))
    assert divergence(got, want) < 1e-5
    alone = Bench(path, dense=None)
    rows = torch.cat([alone.feed(0, [t]) for t in tokens[:12]])
    assert torch.equal(rows, got[:12]) if name in MODELS else divergence(rows, got[:12]) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_a_feed_forward_of_experts_is_one_recording(name: str) -> None:
    """Its experts are chosen anew in each replay."""
    bench = Bench(FIXTURES / f"{name}.gguf", dense=None)
    assert isinstance(bench.target, Decoder)
    loaded = [run for block in bench.target.blocks for run in block.sources.loads.values()]
    assert loaded and all(isinstance(own.run, moe_cpu.CpuExperts) for own in loaded)
    config = bench.target.config
    part, layer = next(
        (part, i)
        for i, block in enumerate(config.blocks)
        for part in block.parts
        if isinstance(part.spec, Experts)
    )
    w = Weights(bench.file, torch.device("cpu"), None)
    kv, ropes = bench.memory.kv_format, bench.target.ropes
    at = bound_at(w, f"blk.{layer}", layer, config.n_embd, config.eps, kv, ropes)
    feed = BoundForward(part.alone, at, config.n_embd)
    x = torch.randn(5, config.n_embd)
    recorded = Recorded(lambda: feed.run(x, None), TapeMemory())
    for _ in range(3):
        x.normal_()
        assert torch.equal(recorded.replay(), feed.run(x, None))


@pytest.mark.parametrize("name", [*MODELS, *STREAMS])
def test_files_with_experts_stay_packed_on_a_cpu(name: str) -> None:
    settings = EngineSettings(np=1, ctx=64, device="cpu")
    assert describe(FIXTURES / f"{name}.gguf", settings).dense is None
    with within(KernelContext(tiers=(("moe", "reference"),))):
        assert describe(FIXTURES / f"{name}.gguf", settings).dense is torch.float32


def test_the_plan_counts_the_bytes_of_the_file_and_the_experts_scratch() -> None:
    path = FIXTURES / "qwen35moe_mixed_q8_0.gguf"
    of_file = sum(t.n_bytes for t in open_gguf(path).tensors.values())
    assert (
        plan_memory(describe(path, EngineSettings(np=1, ctx=64, device="cpu"))).weights < 1.02 * of_file
    )
    few, many = (moe_cpu.buffer_bytes(n, 8, 2048, 512) for n in (1, 1 << 20))
    assert 8 * 4 * (2048 + 512) < few < 200_000 and 40 << 20 < many < 64 << 20


@pytest.mark.parametrize("quant", ["q8_0", "f16", "mxfp4"])
def test_deepseek4_is_read_from_the_bytes_of_its_file(quant: str, tmp_path: Path) -> None:
    path = synth.write("deepseek4", tmp_path / "m.gguf", quant=quant, tiny=True)
    assert describe(path, EngineSettings(np=1, ctx=64, device="cpu")).dense is None
    tokens = [(7 * i) % 200 for i in range(60)]
    want, got = (Bench(path, dense=dense).feed(0, tokens) for dense in (torch.float32, None))
    assert divergence(got, want) < 1e-5


def test_groups_of_a_matrix_have_the_bits_of_a_row_alone() -> None:
    raw = torch.randn(6, 40).view(torch.uint8)
    product, x = CpuGroups(raw, GGMLType.F32, 0.5, 3), torch.randn(19, 120)
    got = product(x)
    want = (
        torch.einsum("rgi,goi->rgo", x.view(19, 3, 40), raw.view(torch.float32).view(3, 2, 40)).flatten(
            1
        )
        * 0.5
    )
    assert torch.allclose(got, want, atol=1e-5) and torch.equal(
        torch.cat([product(row[None]) for row in x]), got
    )
