"""A matrix as the Triton kernel streams it: rows are prepared and rounded, then multiplied with tiles of packed weights, in one call.

The counterpart of streamed.py, which uses the CUDA kernels. Many rows go to the library over a copy in f16, if there is one.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import Tensor

from pyspec.cuda.checker import sentence
from pyspec.cuda.context import per_device
from pyspec.cuda.kernel_context import current
from pyspec.cuda.ops.linear import triton as linear_triton
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.cuda.ops.linear.tiles import TiledMatrix
from pyspec.cuda.ops.moe.ref import gated_halves
from pyspec.cuda.ops.rows.ref import Prep

log = logging.getLogger(__name__)
MANY_ROWS = 64  # of the largest builds, which larger products go through several times
FEW_ROWS = 24  # up to here a product is bound by its weights' bytes; the copy has twice as many


@per_device
def sums_in_f32(device: torch.device) -> bool:
    """Whether the library sums f16 products in f32. It does on NVIDIA GPUs; others are tried once."""
    if torch.version.hip is None:
        return True
    some = torch.ones(16, 16, dtype=torch.float16, device=device)
    try:
        return bool((torch.mm(some, some, out_dtype=torch.float32) == 16.0).all())
    except (RuntimeError, TypeError) as e:
        log.info("prompts run through tiles as rounds do: %s", sentence(e))
        return False


class StreamedTiles:
    """A weight in tiles; in a gated one the gates come before the ups. wide [out, in] f16: a copy for many rows, or None. limit: see Streamed."""

    def __init__(
        self,
        matrix: TiledMatrix,
        device: torch.device,
        gated: bool,
        wide: Tensor | None,
        limit: float = 0.0,
    ) -> None:
        if current().is_exact or (wide is not None and not sums_in_f32(device)):
            wide = None
        self.matrix, self.gated, self.wide, self.limit = matrix, gated, wide, limit
        self.n_out = matrix.n_out // 2 if gated else matrix.n_out
        epilogue = Epilogue.GATED if gated else Epilogue.PLAIN
        spec = LinearSpec(device, matrix.type, self.n_out, matrix.n_in, epilogue, limit)
        adding = replace(spec, epilogue=Epilogue.RESIDUAL)
        self.plain = linear_triton.bind(spec)
        self.added = self.plain if gated else linear_triton.bind(adding)
        # A product that narrows adds to the residual stream
        likely = self.added if matrix.n_out < matrix.n_in else self.plain
        likely.compile_ahead(matrix, MANY_ROWS if self.wide is None else FEW_ROWS)

    def __call__(self, x: Tensor, prep: Prep | None = None, residual: Tensor | None = None) -> Tensor:
        half, powers = self.plain.rows(x, prep)
        if self.wide is not None and len(x) > FEW_ROWS:
            y = torch.mm(half, self.wide.T, out_dtype=torch.float32)
            y = y if powers is None else y.mul_(powers[:, None])
            y = gated_halves(y, self.limit) if self.gated else y
            return y if residual is None else y.add_(residual)
        adds = residual is not None and not self.gated
        out = torch.empty(len(x), self.n_out, dtype=torch.float32, device=x.device)
        launch, add = (self.added, residual) if adds else (self.plain, None)
        launch.multiply(half, powers, self.matrix, out, None if add is None else add.contiguous())
        return out if residual is None or adds else out.add_(residual)
