"""`gdn` for CPUs in C++ (pyspec/cpu/native/gdn.cpp): a part of a head's state stays in L1 while all tokens run over it.

Same contract as gdn_ref. Tokens always come one by one, prompts too, so the bits of a row depend neither on the cut of its
text into forwards nor on neighbours. The chunked form would not be faster: it has as many products per token of a head of
128 (82,000 to 65,000), and one pass over the state a token is all that the plain form needs.

Bound by: products, 4 of 8 lanes for each 8 values of the state and token (about 2 us a head of 128 and token on a core);
the memory of the states where tokens are single.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cuda.ops.gdn.ref import GUARD, GdnSpec, Given
from pyspec.cuda.ops.recurrent import cpu as recurrent
from pyspec.cuda.ops.recurrent.launch import Fold
from pyspec.cuda.ops.recurrent.ref import check_seqs

GDN = CpuKernel("pyspec_gdn", recurrent.CONV + recurrent.BATCH + "qqqqqq" + "qqqqqq" + "5q" + "dd")


def limits(spec: GdnSpec) -> str | None:
    shape = spec.shape
    if shape.n_v_head % shape.n_k_head:
        return f"{shape.n_v_head} value heads are no multiple of {shape.n_k_head} key heads"
    return recurrent.limits([shape.dim], shape.n_conv)


class CpuGdn:
    """Called as gdn_ref's."""

    def __init__(self, spec: GdnSpec) -> None:
        self.spec, self.taps = spec, recurrent.Taps()
        shape = spec.shape
        heads = shape.n_k_head, shape.n_v_head, shape.dim
        self.sizes = *heads, shape.grouped, shape.by_key, shape.floor, spec.eps

    def __call__(self, *given: *Given) -> Tensor:
        m, alpha, beta, a, dt_bias, conv_w, layer, batch = given
        check_seqs(batch, layer)
        assert m.dtype == alpha.dtype == beta.dtype == torch.float32, "gdn takes float32"
        assert alpha.stride(1) == beta.stride(1) == 1 and a.is_contiguous() and dt_bias.is_contiguous()
        n_row, shape = len(m), self.spec.shape
        out = empty(n_row, shape.n_v_head, shape.dim)
        conv = recurrent.conv_args(m, self.taps(conv_w), None, layer)
        gates = alpha, beta, a, dt_bias, alpha.stride(0), beta.stride(0)
        seqs = recurrent.batch_args(batch, layer, n_row, GUARD)
        GDN(*conv, *seqs, *gates, layer.state, *layer.records(), out, *self.sizes)
        return out

    def folder(self) -> Fold:
        """Like gdn_ref.flush, to the bits of this launch."""
        return recurrent.folder(GDN, GUARD, 6, *self.sizes)


bind = CpuGdn
