"""`compress` on CPUs (cpu/native/compress.cpp)."""

from __future__ import annotations

from pyspec.cpu.kernels import CpuKernel
from pyspec.cuda.ops.compress.ref import GUARD, SCORES, VALUES, Compress, CompressSpec, Given
from pyspec.cuda.ops.tokens import POOL, TOKENS, plane, pool_args, tokens_args, width_limit

MOST_SOURCES = 512
_RUN = CpuKernel("pyspec_compress", "7q" + TOKENS + POOL + "6qd")


def limits(spec: CompressSpec) -> str | None:
    if (1 + spec.overlaps) * spec.ratio > MOST_SOURCES:
        return f"rows of {spec.ratio} tokens; the kernel sums {MOST_SOURCES}"
    return width_limit(spec.dim)


def bind(spec: CompressSpec) -> Compress:
    width = (1 + spec.overlaps) * spec.dim

    def compress(*given: *Given) -> None:
        values, scores, places, norm, freq, ring, pool, batch = given
        if not spec.weighed:
            scores = places = None
        norm = norm if spec.normed else None
        assert pool.tokens_per_row == spec.ratio
        assert all(x is None or (x.shape[1] == width and x.stride(1) == 1) for x in (values, scores))
        assert places is None or places.is_contiguous()
        kept = plane(ring, VALUES, width), plane(ring, SCORES, width) if spec.weighed else None
        steps = values.stride(0), 0 if scores is None else scores.stride(0)
        read = values, scores, places, norm, freq, *kept, *tokens_args(batch, GUARD)
        sizes = *steps, ring.n_row, len(kept[0]), int(spec.overlaps), spec.n_rot
        _RUN(*read, *pool_args(pool, batch.page_size), *sizes, spec.eps)

    return compress
