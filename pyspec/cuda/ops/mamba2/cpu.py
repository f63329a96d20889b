"""`mamba2` for CPUs in C++ (pyspec/cpu/native/mamba2.cpp): a part of a head's state stays in L1 while all tokens run over it.

Same contract as mamba2_ref. Tokens always come one by one, prompts too, so the bits of a row depend neither on the cut of
its text into forwards nor on neighbours.

Bound by: products, 3 of 8 lanes for each 8 values of the state and token; the memory of the states where tokens are single.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cuda.ops.mamba2.ref import GUARD, Mamba2Spec, Params
from pyspec.cuda.ops.recurrent import cpu as recurrent
from pyspec.cuda.ops.recurrent.launch import Fold
from pyspec.cuda.ops.recurrent.ref import check_seqs
from pyspec.slots.batch import Batch
from pyspec.slots.recurrent import StateLayer

MAMBA2 = CpuKernel(
    "pyspec_mamba2", recurrent.CONV + recurrent.BATCH + "qq" + "qqq" + "qqqqq" + "q" + "qqqq"
)


def limits(spec: Mamba2Spec) -> str | None:
    return recurrent.limits([spec.shape.head_dim, spec.shape.n_state], spec.shape.n_conv)


class CpuMamba2:
    """Called as mamba2_ref's."""

    def __init__(self, spec: Mamba2Spec) -> None:
        self.spec, self.taps = spec, recurrent.Taps()
        shape = spec.shape
        self.sizes = shape.n_head, shape.head_dim, shape.n_group, shape.n_state

    def __call__(self, m: Tensor, dt: Tensor, p: Params, layer: StateLayer, batch: Batch) -> Tensor:
        check_seqs(batch, layer)
        assert m.dtype == dt.dtype == torch.float32 and dt.stride(1) == 1, "mamba2 takes float32"
        assert all(t.is_contiguous() for t in (p.a, p.dt_bias, p.d, p.conv_b)), (
            "mamba2 takes contiguous parameters"
        )
        n_row, shape = len(m), self.spec.shape
        out = empty(n_row, shape.n_head, shape.head_dim)
        conv = recurrent.conv_args(m, self.taps(p.conv_w), p.conv_b, layer)
        gates = dt, dt.stride(0), p.a, p.dt_bias, p.d
        seqs = recurrent.batch_args(batch, layer, n_row, GUARD)
        MAMBA2(*conv, *seqs, *gates, layer.state, *layer.records(), out, *self.sizes)
        return out

    def folder(self) -> Fold:
        """Like mamba2_ref.flush, to the bits of this launch."""
        return recurrent.folder(MAMBA2, GUARD, 5, *self.sizes)


bind = CpuMamba2
