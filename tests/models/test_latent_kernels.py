"""deepseek2 with its attention's CUDA kernels, and lfm2moe with its convolution's, which run thread by thread on the CPU: the logits of the
references, whichever way rows came in."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_rig import rig
from harness import DEVICE, FIXTURES, Bench

from pyspec import synth
from pyspec.cpu import build
from pyspec.cuda import survey
from pyspec.cuda.op import Op, listed_ops
from pyspec.cuda.ops.attend.op import attend
from pyspec.cuda.ops.heads.op import heads
from pyspec.cuda.ops.moe_route.op import moe_route
from pyspec.cuda.ops.rope_latent.op import rope_latent
from pyspec.cuda.ops.short_conv.op import short_conv
from pyspec.gguf import open_gguf
from pyspec.models.bound import Block
from pyspec.models.weights import Weights
from pyspec.synth.dims import find

sys.path.append(str(Path(__file__).parents[1] / "kernels"))

from emulated.machine import needs_compiler
from emulated.ops import only

EMULATED = pytest.mark.skipif(
    DEVICE.type != "cpu", reason="kernels run thread by thread on the CPU here"
)
CPU = torch.device("cpu")
OPS: tuple[Op[Any, Any], ...] = (attend, rope_latent, heads, short_conv)


def rounds(path: Path, kv: torch.dtype = torch.float16) -> torch.Tensor:
    """Prompts, plain rows, and verifies of which some rows are refused, of two slots side by side."""
    tokens = [(7 * i * i + 3 * i) % 251 for i in range(90)]
    bench, at = Bench(path, n_slot=2, n_ctx=160, kv=kv), 33
    out = [bench.feed(0, tokens[:33]), bench.feed(1, tokens[:5])]
    for width, kept in ((1, 1), (7, 3), (17, 17), (2, 1), (9, 9)):
        drafts = [*tokens[at : at + kept], *([11] * (width - kept))]
        seqs = bench.seq(0, drafts, keep=False), bench.seq(1, tokens[at : at + 1])
        y = bench.forward(*seqs).logits.cpu()
        out.append(torch.cat([y[:kept], y[width:]]))
        bench.commit(seqs[0], kept)
        bench.commit(seqs[1], 1)
        at += kept
    return torch.cat([*out, bench.feed(0, tokens[at:])])


def compare(path: Path, ops: tuple[Op[Any, Any], ...], kv: torch.dtype = torch.float16) -> None:
    found = []
    for name in ("torch", "cuda"):
        with only(name, ops):
            found.append(rounds(path, kv))
            assert all({impl.name for impl in op.decided.values()} == {name} for op in ops)
    want, got = found
    steps = 1 if kv is torch.float16 else 8  # of fewer bits, which keys of later layers may fall into
    off = (got - want).abs().amax(-1) / want.std() / steps
    assert float(off.median()) < 0.01, off
    assert float((off < 0.05).float().mean()) > 0.9, off  # a near tie of experts may turn
    assert short_conv in ops or not torch.equal(got, want)  # whose sums have the reference's order


@needs_compiler
@EMULATED
@pytest.mark.slow
def test_latent_attention_gives_the_references_logits() -> None:
    """Five heads of 16 + 8 dims, experts in four groups."""
    compare(FIXTURES / "deepseek2.gguf", (attend, heads, moe_route))


@needs_compiler
@EMULATED
@pytest.mark.slow
@pytest.mark.parametrize("kv", [torch.float16, torch.bfloat16, torch.int8])
def test_its_keys_too_in_any_type(kv: torch.dtype, tmp_path: Path) -> None:
    dims = find("deepseek2", tiny=True)
    path = synth.write(replace(dims, rank=48, n_rot=16, head_dim=24), tmp_path / "m.gguf", quant="f32")
    compare(path, (attend, rope_latent, heads), kv)


@needs_compiler
@EMULATED
@pytest.mark.slow
def test_gated_short_convolutions_give_the_references_logits() -> None:
    compare(FIXTURES / "lfm2moe.gguf", (short_conv,))


def bound(bench: Bench, op: str) -> list[Block]:
    """Blocks that are bound to an op, and have no experts."""
    blocks = [block for block in bench.target.blocks if not block.sources.loads]
    return [block for block in blocks if any(own.name == op for own, _ in block.ops)]


def test_graphs_and_recordings_hold_both_where_kernels_run() -> None:
    latent = bound(Bench(FIXTURES / "deepseek2.gguf"), "rope_latent")
    convolved = bound(Bench(FIXTURES / "lfm2moe.gguf"), "short_conv")
    assert latent and convolved
    if DEVICE.type == "cpu":  # a GPU's kernel takes no keys as narrow as this file's
        assert build.compiler() is None or all(p.capturable for p in latent)
    assert all(p.capturable for p in convolved)
    (prompts,) = {b.captures_prompts for b in Bench(FIXTURES / "qwen35.gguf").target.blocks[:3]}
    assert not prompts, "graphs of prompts hold Gated DeltaNet's own kernels alone"


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the file's bytes are a CPU's")
@pytest.mark.parametrize(("quant", "dense"), [("q8_0", None), ("f16", None), ("q8_0", torch.bfloat16)])
def test_matrices_of_heads_are_those_of_the_file(
    quant: str, dense: torch.dtype | None, tmp_path: Path
) -> None:
    dims = find("deepseek2", tiny=True)
    sizes = {"rank": 64, "n_rot": 16, "head_dim": 48, "n_value": 24}
    with open_gguf(synth.write(replace(dims, **sizes), tmp_path / "m.gguf", quant=quant)) as file:
        weights, x = Weights(file, CPU, dense), torch.randn(3, dims.n_head, 64)
        for name, n_in in (("blk.0.attn_k_b.weight", 32), ("blk.1.attn_v_b.weight", 64)):
            run, holds = weights.heads(name)
            want = torch.einsum("nhi,hoi->nho", x[..., :n_in], weights.vector(name))
            assert float((run(x[..., :n_in]) - want).norm() / want.norm()) < (
                1e-4 if dense is None else 5e-3
            )
            assert holds == (build.compiler() is not None)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the file's bytes are a CPU's")
def test_matrices_of_heads_have_a_factor_each(tmp_path: Path) -> None:
    """NVFP4 files have one beside each of K2-Horizon's experts of values: no such file could be loaded."""
    path = synth.write(find("k2-horizon-mova", tiny=True), tmp_path / "m.gguf", quant="nvfp4")
    with open_gguf(path) as file:
        weights, name, x = Weights(file, CPU, None), "blk.0.attn_v_exps.weight", torch.randn(3, 5, 64)
        want = weights.vector(name) * weights.vector(name.replace("weight", "scale"))[:, None, None]
        got = weights.heads(name)[0](x)
        assert torch.allclose(got, torch.einsum("nhi,hoi->nho", x, want), rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(DEVICE.type != "cpu" or build.compiler() is None, reason="the tier of CPUs")
@pytest.mark.parametrize("kv", ["f16", "q4_0"])
def test_a_cpu_runs_every_op_and_records_the_forward(kv: str, tmp_path: Path) -> None:
    """Experts in groups are chosen anew in each replay, and keys of four bits are turned: the text is that of calls one by one."""
    for op in listed_ops():  # forget what other models of this process asked for
        op.decided.clear()
    dims = find("deepseek2", tiny=True)
    path = synth.write(replace(dims, rank=48, n_rot=16, head_dim=24), tmp_path / "m.gguf", quant="f32")
    r = rig(path, kv_type=kv)
    tokens = r.generate([3, 4, 5], 12).tokens
    chosen = {op.name: op.chosen(spec).name for op, spec in survey.asked() if isinstance(op, Op)}
    assert set(chosen.values()) == {"cpu"}, chosen
    forward = r.loop.worker.forward
    assert not forward._cannot and forward._tapes
    assert rig(path, kv_type=kv, plain_loop=True).generate([3, 4, 5], 12).tokens == tokens


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_kernels_give_the_references_logits_on_a_gpu(tmp_path: Path) -> None:
    """Of deepseek2 with keys of 64 dims, and of lfm2moe; in graphs' form a layer looks at no list of the host."""
    dims = find("deepseek2", tiny=True)
    latent = synth.write(replace(dims, rank=48, n_rot=16, head_dim=24), tmp_path / "m.gguf", quant="f32")
    for path, ops in ((latent, OPS[:3]), (FIXTURES / "lfm2moe.gguf", OPS[3:])):
        for op in ops:  # forget what other models of this process asked for
            op.decided.clear()
        got = rounds(path)
        chosen = {(op.name, spec): impl.name for op in ops for spec, impl in op.decided.items()}
        assert set(chosen.values()) == {"cuda"}, chosen
        with pytest.MonkeyPatch.context() as patch:
            for op in ops:
                patch.setattr(op, "impls", [])
                patch.setattr(op, "_decided", {})
            want = rounds(path)
        off = (got - want).abs().amax(-1) / want.std()
        assert float(off.median()) < 0.02 and float((off < 0.1).float().mean()) > 0.9, off
    bench = Bench(latent, kv=torch.float16)
    assert all(block.capturable for block in bound(bench, "rope_latent"))
