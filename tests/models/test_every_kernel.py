"""Every architecture with all the CUDA kernels that take its shapes, which run thread by thread on the CPU: a layer gives them what they
take, and the logits are those of the references."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import DEVICE, Bench
from tiny_models import MODELS

from pyspec import synth
from pyspec.cuda.op import all_ops
from pyspec.cuda.ops.attend.op import attend
from pyspec.cuda.ops.rope_kv.op import rope_kv
from pyspec.synth.dims import Dims, widened

sys.path.append(str(Path(__file__).parents[1] / "kernels"))

from emulated.machine import needs_compiler
from emulated.ops import of_a_card, only

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(DEVICE.type != "cpu", reason="kernels run thread by thread on the CPU here"),
]
SHAPES = {"state": 128, "mamba_heads": 4, "kda": 128}
TOKENS = [(7 * i * i + 3 * i) % 250 for i in range(12)]
ALL = tuple(all_ops())


def dims_of(arch: str) -> Dims:
    """Tiny, with rows and states as wide as kernels want them."""
    dims = widened(MODELS[arch])
    return replace(dims, **{name: n for name, n in SHAPES.items() if getattr(dims, name)})


@pytest.mark.parametrize(
    "arch",
    [name if name == "minimax-m2" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_logits_are_the_references(arch: str, tmp_path: Path) -> None:
    """A prompt's piece, which is several rows, one row, and a verify, whose first rows are kept."""
    path = synth.write(dims_of(arch), tmp_path / "m.gguf", quant="q8_0")

    def run() -> torch.Tensor:
        bench = Bench(path, kv=torch.float16, dense=None)
        pieces = bench.feed(0, TOKENS[:6]), bench.feed(0, TOKENS[6:7])
        verify = bench.seq(0, [*TOKENS[7:9], 3, 4], keep=False)
        rows = bench.forward(verify).logits
        bench.commit(verify, 2)
        return torch.cat([*pieces, rows, bench.feed(0, TOKENS[9:])])

    want = run()
    with only("cuda", ALL, of_a_card):
        got = run()
        ran = {op.name for op in ALL for impl in op.decided.values() if impl.name == "cuda"}
        others = {op.name for op in ALL for impl in op.decided.values() if impl.name != "cuda"}
    assert ran and not others - {"linear_cpu"}, f"{others} ran as references"
    assert float((got - want).abs().amax()) < 0.1 * float(want.std())
    assert attend.name in ran or rope_kv.name not in ran
