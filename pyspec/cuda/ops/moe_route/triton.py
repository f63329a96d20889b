"""`moe_route` in Triton: scores in f32 by splits of the columns, then each row's choice (triton_kernels.py).

Splits depend on the number of columns only, and a program always has sixteen rows, so a row's choice does not depend on other rows.
The norm's factor belongs to a row: scores are multiplied with it when they are summed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda import tri
from pyspec.cuda.ops.linear.tile_launch import nothing
from pyspec.cuda.ops.moe.ref import LEAST_SUM, Routes, RouteSpec

MAX_EXPERT, MAX_USED = 1024, 64
ROUTERS = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2, "chosen": 0}
COLUMNS, STEP, ROWS, SCORES = 256, 64, 16, 32  # of a split and of a turn; rows and scores of a program


def limits(spec: RouteSpec) -> str | None:
    if spec.n_expert > MAX_EXPERT or spec.n_used > MAX_USED:
        return f"{spec.n_used} of {spec.n_expert} experts; the kernel takes up to {MAX_USED} of {MAX_EXPERT}"
    return spec.other_limit


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


class RouteTriton:
    """The kernels of one spec; called as ref's."""

    def __init__(self, spec: RouteSpec) -> None:
        self.spec, self.none, self.n_split = spec, nothing(spec.device), -(-spec.n_in // COLUMNS)

    def __call__(
        self,
        x: Tensor,
        norm: Tensor,
        matrix: Tensor,
        bias: Tensor | None = None,
        given: Tensor | None = None,
        shift: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> Routes:
        from pyspec.cuda.ops.moe_route import triton_kernels as kernels

        s, n_row, n_split, device = self.spec, x.shape[0], self.n_split, x.device
        n_score = s.n_expert + s.gated
        assert matrix.shape == (n_score, s.n_in) and matrix.is_contiguous()
        assert norm.shape == (s.n_in,) and norm.is_contiguous() and x.shape[1] == s.n_in
        s.check_beside(bias, given, shift, factors)
        bias = bias if shift is None else shift
        ids = torch.empty(n_row, s.n_used, dtype=torch.int32, device=device)
        weights = torch.empty(n_row, s.n_used, dtype=torch.float32, device=device)
        gate = torch.empty(n_row, 1, dtype=torch.float32, device=device) if s.gated else None
        if not n_row:
            return Routes(ids, weights, gate)
        part = torch.empty(n_split * n_row * n_score, dtype=torch.float32, device=device)
        squares = torch.empty(n_split * n_row, dtype=torch.float32, device=device)
        tri.launch(
            kernels.scores,
            (-(-n_score // SCORES), n_split, -(-n_row // ROWS)),
            (x.contiguous(), norm, matrix, part, squares, n_row),
            {"N_IN": s.n_in, "N_SCORE": n_score, "PER": COLUMNS, "BK": STEP, "BM": ROWS, "BN": SCORES},
            4,
        )
        own = self.none if bias is None else bias, ids if given is None else given.int().contiguous()
        likely, wide = torch.empty_like(part[: n_row * s.n_expert]), _power_of_two(s.n_expert)
        by_group, of_group = s.n_group > 1 and not s.given, s.n_expert // s.n_group
        groups = torch.empty_like(likely) if by_group else self.none
        more = *(self.none if t is None else t for t in (gate, factors)), likely, groups
        tri.launch(
            kernels.choose,
            (n_row,),
            (part, squares, *own, ids, weights, *more, n_row, s.eps, s.scale),
            {
                "N_IN": s.n_in,
                "N_EXPERT": s.n_expert,
                "WIDE": wide,
                "N_USED": s.n_used,
                "USED": _power_of_two(s.n_used),
                "SPLITS": n_split,
                "ROUTER": ROUTERS[s.router],
                "RENORM": s.renorms,
                "BIASED": s.biased,
                "SHIFTED": s.shifted,
                "GATED": int(s.gated),
                "GIVEN": s.given,
                "FACTORED": s.factored,
                "LEAST": LEAST_SUM,
                "N_GROUP": s.n_group if by_group else 1,
                "GROUPS": _power_of_two(s.n_group),
                "OF_GROUP": of_group,
                "MANY": _power_of_two(of_group),
                "N_KEPT": s.n_group_used,
            },
            1 if wide <= 256 else 2,
        )
        return Routes(ids, weights, gate)


bind = RouteTriton
