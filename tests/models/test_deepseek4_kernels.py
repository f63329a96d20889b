"""DeepSeek-V4 with its attention's kernels, which run thread by thread on the CPU: the logits of the references, whichever way rows came in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import DEVICE, FIXTURES, Bench

from pyspec.cuda import fuse, jit
from pyspec.cuda.ops.compress.op import compress
from pyspec.cuda.ops.index_rows.op import index_rows
from pyspec.cuda.ops.sparse_attend.cuda import SparseLaunch
from pyspec.cuda.ops.sparse_attend.op import sparse_attend
from pyspec.forward import lower
from pyspec.models import weights
from pyspec.models.matrices import Dense

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
import itertools

from emulated.gpu import emulated_gpu
from emulated.machine import needs_compiler

pytestmark = [
    needs_compiler,
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE.type != "cpu", reason="kernels run thread by thread on the CPU here"),
]
OPS = (compress, index_rows, sparse_attend)


@contextmanager
def kernels() -> Iterator[None]:
    """The ops bound to their kernels, without a GPU; everything else stays as it is."""
    with emulated_gpu(seed=1), pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "missing", lambda device: None)
        for op in OPS:
            patch.setattr(op, "_decided", {})
            patch.setattr(op, "verdicts", {})
        yield


@pytest.mark.parametrize("name", ["deepseek4", "deepseek4_pro"])
def test_logits_are_the_references_in_chunks_and_verifies_of_any_width(name: str) -> None:
    tokens = [(7 * i * i + 3 * i) % 300 for i in range(230)]
    cuts = [0, 100, 101, 118, 121, 140, 152, 153, 170, 203, 230]

    def run() -> torch.Tensor:
        bench = Bench(FIXTURES / f"{name}.gguf", n_slot=2, n_ctx=400, kv=torch.float16)
        bench.feed(1, tokens[:9])  # the other slot is in the batch with its own rows
        out = []
        for a, b in itertools.pairwise(cuts):
            seqs = [
                bench.seq(0, tokens[a:b], keep=b - a > 17),
                bench.seq(1, tokens[9 + a % 7 :][: 1 + a % 3], keep=False),
            ]
            out.append(bench.forward(*seqs).logits[: b - a])
            bench.commit(seqs[0], b - a)
        return torch.cat(out)

    want = run()
    with kernels():
        got = run()
        assert all(impl.name == "cuda" for op in OPS for impl in op.decided.values()) and all(
            op.decided for op in OPS
        )
    off = (got - want).abs().amax(-1) / want.std()
    assert bool((off < 0.02).float().mean() > 0.95), (
        off
    )  # rounded queries may turn a near tie of the indexer
    assert not torch.equal(got, want)


def test_keys_and_compressors_give_the_same_bits_ahead_of_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As beside a product of few rows: here it is the reference's, which can not be `late`."""
    tokens = [(7 * i * i + 3 * i) % 300 for i in range(160)]
    cuts, taken, is_late = [0, 100, 101, 105, 113, 120, 121, 132, 140, 148], [], []

    def run() -> torch.Tensor:
        bench, out = Bench(FIXTURES / "deepseek4.gguf", n_slot=1, n_ctx=400, kv=torch.float16), []
        for a, b in itertools.pairwise(cuts):
            seq = bench.seq(0, tokens[a:b], keep=False)
            out.append(bench.forward(seq).logits[: b - a])
            bench.commit(seq, b - a)
        return torch.cat(out)

    def room(
        attend: SparseLaunch, product: object, given: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor | None, bool]:
        own = attend.take_keys(len(given[0]))
        taken.append(own is not None)
        return own, own is not None

    class LateDense(Dense):
        def __call__(self, *given: Any, late: bool = False, **more: Any) -> torch.Tensor:
            is_late.append(late)
            return super().__call__(*given, **more)

    with kernels():
        want = run()
        monkeypatch.setattr(fuse, "makes_keys_beside", lambda *_: True)
        monkeypatch.setitem(lower.HELPERS, "keys_room", room)
        monkeypatch.setattr(weights, "Dense", LateDense)
        assert torch.equal(run(), want)
    assert 0 < sum(taken) < len(taken) and sum(is_late) == sum(taken)
