"""`rows` in Triton: one launch (triton_kernels.py), to f16 over a power of two or, with `full`, to f32. Same contract as rows_ref."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda import tri
from pyspec.cuda.ops.rows.ref import GroupNorm, HeadGate, HeadNorm, Norm, Prep, PrepKind, RowsSpec

MAX_COLUMNS = 32768
BY_PARTS = (PrepKind.HEADS, PrepKind.GROUPS)  # kinds whose power does not depend on the rows


def limits(spec: RowsSpec) -> str | None:
    if spec.n_in > MAX_COLUMNS:
        return f"{spec.n_in} columns; the kernel takes up to {MAX_COLUMNS}"
    if spec.kind in BY_PARTS and (not spec.dim or spec.n_in % spec.dim):
        return f"parts of {spec.dim} in {spec.n_in} columns; the kernel takes whole parts"
    return None


def warps_for(wide: int) -> int:
    """At most 64 columns a lane."""
    return max(1, min(16, wide // 512))


class RowsTriton:
    """The kernel for rows of n_in columns, for any preparation."""

    def __init__(self, spec: RowsSpec) -> None:
        self.n_in, self.none = spec.n_in, torch.empty(4, dtype=torch.float32, device=spec.device)

    def __call__(self, x: Tensor, prep: Prep | None = None) -> tuple[Tensor, Tensor | None]:
        """(rows [row, n_in] f16, powers [row] f32 to multiply products with, or None if they are 1)."""
        out = torch.empty(x.shape[0], self.n_in, dtype=torch.float16, device=x.device)
        powers = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        self._run(x, prep, out, powers)
        return out, None if isinstance(prep, Norm | GroupNorm) and prep.power == 1.0 else powers

    def full(self, x: Tensor, prep: Prep) -> Tensor:
        """prep(x)."""
        out = torch.empty(x.shape[0], self.n_in, dtype=torch.float32, device=x.device)
        self._run(x, prep, out, None)
        return out

    def _run(self, x: Tensor, prep: Prep | None, out: Tensor, powers: Tensor | None) -> None:
        from pyspec.cuda.ops.rows import triton_kernels as kernels

        kind, dim = (PrepKind.PLAIN, 0) if prep is None else (prep.kind, prep.dim)
        assert x.dtype == torch.float32 and x.stride(1) == 1
        assert x.shape[1] == self.n_in * kind.halves
        if not x.shape[0]:
            return
        weight, eps, power, gate, steps = self.none, 0.0, 1.0, self.none, (0, 0)
        if isinstance(prep, (Norm, HeadNorm, GroupNorm)):
            weight, eps, power = prep.weight, prep.eps, prep.power
        if isinstance(prep, HeadNorm | GroupNorm):
            gate, steps = prep.gate, (prep.gate.stride(0), dim)
        elif isinstance(prep, HeadGate):
            gate, steps = prep.gate, (prep.gate.stride(0), prep.gate.stride(1))
        assert gate.stride(-1) == 1
        part = dim if kind in BY_PARTS else self.n_in
        wide = 1 << (part - 1).bit_length()
        tri.launch(
            kernels.rows,
            (x.shape[0], self.n_in // part),
            (
                x,
                weight,
                gate,
                out,
                self.none if powers is None else powers,
                x.stride(0),
                *steps,
                eps,
                power,
            ),
            {
                "N_IN": self.n_in,
                "PART": part,
                "WIDE": wide,
                "DIM": max(dim, 1),
                "KIND": int(kind),
                "OWN_POWER": kind is not PrepKind.NORM and kind not in BY_PARTS,
                "HALF": powers is not None,
            },
            warps_for(wide),
        )


bind = RowsTriton
