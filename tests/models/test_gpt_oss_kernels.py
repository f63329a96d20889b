"""gpt-oss with its experts' and routers' CUDA kernels, which run thread by thread on the CPU: the logits of the references."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from harness import DEVICE, Bench

from pyspec import synth
from pyspec.cuda.ops.moe.op import moe
from pyspec.cuda.ops.moe_route.op import moe_route
from pyspec.models.bound import Sources
from pyspec.synth.dims import find, widened

sys.path.append(str(Path(__file__).parents[1] / "kernels"))

from emulated.machine import needs_compiler
from emulated.ops import only

OPS = (moe, moe_route)
EMULATED = pytest.mark.skipif(
    DEVICE.type != "cpu", reason="kernels run thread by thread on the CPU here"
)


@needs_compiler
@EMULATED
@pytest.mark.slow
def test_logits_are_the_references_in_chunks_and_verifies(tmp_path: Path) -> None:
    """Beyond the window of 16 and with two slots: rows of one, of few and of many pairs an expert."""
    path = synth.write("gpt-oss", tmp_path / "m.gguf", tiny=True, quant="mxfp4_moe")
    tokens = [(7 * i * i + 3 * i) % 300 for i in range(50)]

    def run() -> torch.Tensor:
        bench = Bench(path, n_slot=2, n_ctx=64, dense=None)
        out = [bench.feed(0, tokens[:33]), bench.feed(1, tokens[:5])]
        for at in (33, 34, 41):
            width = {33: 1, 34: 7, 41: 9}[at]
            seqs = bench.seq(0, tokens[at : at + width], keep=False), bench.seq(1, tokens[at : at + 1])
            out.append(bench.forward(*seqs).logits)
            bench.commit(seqs[0], width)
            bench.commit(seqs[1], 1)
        return torch.cat(out)

    with only("torch", OPS):
        want = run()
        assert all(impl.name == "torch" for op in OPS for impl in op.decided.values())
    with only("cuda", OPS):
        got = run()
        assert all(impl.name == "cuda" for op in OPS for impl in op.decided.values())
    off = (got - want).abs().amax(-1) / want.std()
    assert float(off.median()) < 0.01, off
    assert float((off < 0.05).float().mean()) > 0.9, off  # a near tie of experts may turn


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_packed_files_give_the_logits_of_unpacked_ones_on_a_gpu(tmp_path: Path) -> None:
    """All kernels of a layer, with heads that they take: few rows, whose biases go with their products, and many."""
    path = synth.write(widened(find("gpt-oss", tiny=True)), tmp_path / "m.gguf", quant="mxfp4_moe")
    tokens = [(7 * i * i + 3 * i) % 300 for i in range(230)]

    def run(dense: torch.dtype | None) -> torch.Tensor:
        bench = Bench(path, n_slot=2, dense=dense)
        out = [bench.feed(0, tokens[:100])]
        out += [bench.feed(0, tokens[at : at + 10], keep=False) for at in range(100, 230, 10)]
        return torch.cat([*out, bench.feed(1, tokens[:1])])

    got, want = run(None), run(torch.float32)
    off = (got - want).abs().amax(-1) / want.std()
    assert float(off.median()) < 0.02 and float((off < 0.1).float().mean()) > 0.9, off


def test_biases_of_few_rows_go_with_their_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a residual: the same sums, also where there are more rows than biases are ready for."""
    path = synth.write("gpt-oss", tmp_path / "m.gguf", tiny=True, quant="f32")

    def run() -> tuple[list[str], list[torch.Tensor]]:
        bench = Bench(path)
        made = [bench.forward(bench.seq(0, rows, keep=False)).logits for rows in ([5, 6, 7], [5, 6])]
        return [call.op for block in bench.target.blocks for call in block.program.calls], made

    ops, want = run()
    assert ("biased" in ops) == (DEVICE.type == "cuda")
    monkeypatch.setattr(Sources, "few", lambda self, bias: self.weight(bias).repeat(2, 1))
    ops, got = run()
    assert "biased" in ops and all(map(torch.equal, got, want))
