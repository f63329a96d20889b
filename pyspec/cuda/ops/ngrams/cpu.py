"""`ngrams` on CPUs (cpu/native/ngrams.cpp). Ids go into the ring with what is convolved."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cuda.ops.ngrams.ref import GUARD, IDS, INPUTS, Ngrams, NgramsSpec, Norms, signed
from pyspec.cuda.ops.recurrent.cpu import Taps
from pyspec.cuda.ops.tokens import TOKENS, plane, tokens_args
from pyspec.slots.batch import Batch
from pyspec.slots.ring import RingRows

_ROWS = CpuKernel("pyspec_ngrams_rows", "6q" + TOKENS + "5q")
_MIXED = CpuKernel("pyspec_ngrams_mixed", "11q" + TOKENS + "7qd")


class CpuNgrams(Ngrams):
    """Of one spec."""

    def __init__(self, spec: NgramsSpec) -> None:
        super().__init__(spec)
        self.wide, self.taps = spec.n_stream * spec.n, Taps()
        self.tables = [
            torch.tensor([signed(x) for x in of]) for of in (spec.multipliers, spec.sizes, spec.offsets)
        ]

    def rows(self, ring: RingRows, batch: Batch) -> Tensor:
        s, ids = self.spec, self._plane(ring, IDS, 1)
        places = empty(len(batch.tokens) * s.n_head, dtype=torch.int64)
        sizes = ring.n_row, len(ids), s.n_gram, s.n_head, s.end
        _ROWS(batch.tokens, *self.tables, ids, places, *tokens_args(batch, GUARD), *sizes)
        return places

    def mixed(
        self, x: Tensor, made: Tensor, norms: Norms, taps: Tensor, ring: RingRows, batch: Batch
    ) -> Tensor:
        s, n_row, wide = self.spec, len(x), self.wide
        assert x.shape == (n_row, wide) and x.is_contiguous() and x.dtype == torch.float32
        assert made.shape == (n_row, wide + s.n) and made.stride(1) == 1 and made.dtype == x.dtype
        assert all(w.shape == (wide,) and w.is_contiguous() and w.dtype == x.dtype for w in norms)
        ids, inputs = self._plane(ring, IDS, 1), self._plane(ring, INPUTS, wide)
        own, out = empty(n_row, wide), empty(n_row, wide)
        given = x, made, *norms, self.taps(taps), batch.tokens, ids, inputs, own, out
        sizes = ring.n_row, len(ids), s.n_gram, s.n_stream, s.n, s.n_tap
        _MIXED(*given, *tokens_args(batch, GUARD), made.stride(0), *sizes, s.eps)
        return out

    def _plane(self, ring: RingRows, name: str, width: int) -> Tensor:
        assert ring.window >= self.spec.window
        return plane(ring, name, width)


bind = CpuNgrams
