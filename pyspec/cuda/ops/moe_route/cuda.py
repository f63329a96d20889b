"""`moe_route` on NVIDIA GPUs: moe_route.cu's two kernels. A row's sums do not depend on the rows beside it.

Scores and the experts' input are made of the same rows, so the first kernel may norm and round them for the experts, too
(`RouteLaunch.__call__`'s `into`): a launch less before every choice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.jit import Arg, KernelFile, Macros
from pyspec.cuda.ops.moe import ref as moe_ref
from pyspec.cuda.ops.moe.ref import Route, Routes, RouteSpec
from pyspec.cuda.ops.rows.cuda import BLOCKED, PLANES, Rows, RowsLaunch, values_of

MAX_EXPERT, MAX_USED, MAX_COLUMNS = 512, 32, 16384
KEPT, WARPS, MOST_ROWS = 2, 16, 32  # scores of a warp, warps and rows of a CTA at most: moe_route.cu's
TIE = 1e-5  # between scores that rounding may turn
FEW = 16  # rows up to which CTAs are small, so that all multiprocessors have some


def limits(spec: RouteSpec) -> str | None:
    if spec.n_expert > MAX_EXPERT or spec.n_used > MAX_USED:
        return f"{spec.n_used} of {spec.n_expert} experts; the kernel takes up to {MAX_USED} of {MAX_EXPERT}"
    if spec.n_in % 4 or spec.n_in > MAX_COLUMNS:
        return f"{spec.n_in} columns; the kernel takes multiples of 4 up to {MAX_COLUMNS}"
    return spec.other_limit


def defines(spec: RouteSpec) -> Macros:
    """Macros of moe_route.cu."""
    macros: Macros = {
        "N_IN": spec.n_in,
        "N_EXPERT": spec.n_expert,
        "N_USED": spec.n_used,
        "SIGMOID": int(spec.router == "sigmoid"),
        "RENORM": int(spec.renorms),
        "BIASED": int(spec.biased),
        "GATED": int(spec.gated),
    }
    wanted = {"SQRTSOFTPLUS": spec.router == "sqrtsoftplus", "GIVEN": spec.given}
    wanted |= {"SHIFTED": spec.shifted, "FACTORED": spec.factored}
    macros |= {name: 1 for name, is_wanted in wanted.items() if is_wanted}
    if spec.n_group > 1:
        macros |= {"N_GROUP": spec.n_group, "N_KEPT": spec.n_group_used}
    return macros


ENTRIES = {"moe_scores": "ppppppp" + "iiii" + "ff", "moe_choose": "ppppppf"}
FILE = KernelFile("moe_route", ENTRIES, defines)


@dataclass(frozen=True, slots=True)
class Grid:
    """CTAs of moe_scores, their threads, and rows of each. `preparing`: columns of `ctas` beyond those that make scores."""

    ctas: tuple[int, int]
    threads: int
    per_cta: int
    preparing: int = 0

    @property
    def scoring(self) -> int:
        return self.ctas[0] - self.preparing


def grid_of(spec: RouteSpec, n_row: int, n_multiprocessor: int, prepares: bool = False) -> Grid:
    """Rows are spread over CTAs while multiprocessors have room: one has 16 of such warps at once.

    prepares: rows are normed for the experts, too, a row for each group of warps of CTAs of their own. Where there is no room for
    those a line less is taken, if that leaves others with half as many rows more at most: to wait for a multiprocessor costs
    about as much as three rows.
    """
    parts = -(-spec.n_in // 1024)
    groups = 1 if n_row <= FEW else WARPS // parts
    n = -(-(spec.n_expert + spec.gated) // (KEPT * groups))
    room = n_multiprocessor * (WARPS // (parts * groups))

    def spread(most: int) -> Grid:
        per_cta = -(-n_row // most)
        n_line = -(-n_row // per_cta)
        preparing = -(-n_row // (groups * n_line)) if prepares else 0
        return Grid((n + preparing, n_line), 32 * parts * groups, per_cta, preparing)

    least = -(-n_row // MOST_ROWS)
    grid = spread(max(min(n_row, room // n), least))
    if grid.ctas[0] * grid.ctas[1] > room and grid.ctas[1] > least:
        fewer = spread(grid.ctas[1] - 1)
        if 2 * fewer.per_cta <= 3 * grid.per_cta:
            return fewer
    return grid


class RouteLaunch:
    """The kernels of one spec; called as moe_ref's."""

    writes_rows = True  # where `into` says, see fuse.py

    def __init__(self, spec: RouteSpec) -> None:
        self.spec = spec
        self.scores, self.choose = FILE.kernels(spec.device, replace(spec, scale=1.0, eps=0.0))
        self.n_score, self.n_choose = spec.n_expert + spec.gated, -(-spec.n_expert // 32) * 32
        self.n_multiprocessor = torch.cuda.get_device_properties(spec.device).multi_processor_count

    def __call__(
        self,
        x: Tensor,
        norm: Tensor,
        matrix: Tensor,
        bias: Tensor | None = None,
        given: Tensor | None = None,
        shift: Tensor | None = None,
        factors: Tensor | None = None,
        *,
        into: Rows | None = None,
        power: float = 1.0,
    ) -> Routes:
        """`into`: where rows normed with `norm` go, over `power`, as rows.cu would put them."""
        spec, n_score = self.spec, self.n_score
        assert matrix.shape == (n_score, spec.n_in) and matrix.is_contiguous()
        assert norm.shape == (spec.n_in,) and norm.is_contiguous() and x.shape[1] == spec.n_in
        spec.check_beside(bias, given, shift, factors)
        x, n_row = x.contiguous(), x.shape[0]
        bias = bias if shift is None else shift
        if given is not None:  # nothing is chosen: they go where a bias would
            assert given.shape == (n_row, spec.n_used)
            bias = given.to(torch.int32).contiguous()
        logits, weights = x.new_empty(n_row, n_score), x.new_empty(n_row, spec.n_used)
        gate = x.new_empty(n_row, 1) if spec.gated else None
        ids = torch.empty(n_row, spec.n_used, dtype=torch.int32, device=x.device)
        if n_row:
            grid = grid_of(spec, n_row, self.n_multiprocessor, into is not None)
            to: list[Arg] = [logits] * 3 if into is None else [into.blocks, into.sums, into.powers]
            pad = 0 if into is None or into.layout == PLANES else into.pad
            sizes = n_row, grid.per_cta, grid.scoring, pad
            args = x, norm, matrix, logits, *to, *sizes, spec.eps, power
            self.scores.launch(grid.ctas, grid.threads, args, overlap=True)
            own, *last = (logits if t is None else t for t in (bias, gate, factors))
            chosen = logits, own, ids, weights, *last, spec.scale
            self.choose.launch((n_row,), self.n_choose, chosen, overlap=True)
        return Routes(ids, weights, gate)


bind = RouteLaunch


def check(launch: Route, reference: Route, spec: RouteSpec) -> str | None:
    """Random rows of all sizes, where only choices closer than rounding may differ, and rows of zeros, where all are equal."""
    gen = torch.Generator().manual_seed(0)
    matrix = 2 * torch.randn(spec.n_expert + spec.gated, spec.n_in, generator=gen) / spec.n_in**0.5
    if spec.router == "sqrtsoftplus":
        matrix[0] *= 40  # far beyond where exp overflows, and where it is nothing
    # of rows that stay as they are (stacks.AS_THEY_ARE), too, the normed ones are of usual size
    norm = max(1.0, spec.eps) ** 0.5 * (1 + 0.1 * torch.randn(spec.n_in, generator=gen))
    bias = torch.rand(spec.n_expert, generator=gen) if spec.biased else None
    has = {"shift": spec.shifted, "factors": spec.factored}
    beside = {x: torch.randn(spec.n_expert, generator=gen).to(spec.device) for x in has if has[x]}
    for n_row in (1, 7, 40):
        x = torch.logspace(-1, 2, n_row)[:, None] * torch.randn(n_row, spec.n_in, generator=gen)
        x[n_row // 2] *= n_row == 1
        named = torch.rand(n_row, spec.n_expert, generator=gen).argsort(-1)[:, : spec.n_used].int()
        rows, weight, scored = (t.to(spec.device) for t in (x, norm, matrix))
        bias_there, table = (
            None if t is None else t.to(spec.device) for t in (bias, named if spec.given else None)
        )
        given = rows, weight, scored, bias_there, table
        got, want = launch(*given, **beside), reference(*given, **beside)
        ids, want_ids = got.ids.long().cpu(), want.ids.long().cpu()
        if (
            not bool(((ids >= 0) & (ids < spec.n_expert)).all())
            or ids.sort(-1).values.diff(dim=-1).eq(0).any()
        ):
            return "rows choose experts that do not exist, or one twice"
        scores = F.linear(F.rms_norm(x, norm.shape, norm, spec.eps), matrix)[:, : spec.n_expert]
        scores = scores + beside["shift"].cpu() if spec.shifted else scores
        if bias is not None or spec.n_group > 1:
            scores = moe_ref.probabilities(scores, spec.router)
        scores = scores if bias is None else scores + bias
        is_same = ids == want_ids
        if spec.given and not bool(is_same.all()):
            return "rows have other experts than they were given"
        is_tie = (scores.gather(-1, ids) - scores.gather(-1, want_ids)).abs() < TIE
        is_tie[n_row // 2] &= n_row == 1
        is_tie |= _are_groups_close(scores, spec)[:, None]
        if not bool((is_same | is_tie).all()):
            n_bad = int((~(is_same | is_tie)).any(-1).sum())
            return f"{n_bad} of {n_row} rows choose other experts than the reference"
        by = want.weights.abs().amax(-1, keepdim=True)
        off = float((((got.weights - want.weights) / by).cpu() * is_same).abs().amax())
        if want.gate is not None and got.gate is not None:
            off = max(off, float((got.gate - want.gate).abs().amax()))
        if not off < 1e-4:
            return f"weights differ from the reference by {off:.2g}"
        if (
            isinstance(launch, RouteLaunch)
            and (why := _check_rows(launch, got, given, norm, beside)) is not None
        ):
            return why
    return None


def _are_groups_close(scores: Tensor, spec: RouteSpec) -> Tensor:
    """Rows [row] whose last kept group and first other one are closer than rounding."""
    if spec.n_group_used == spec.n_group:
        return torch.zeros(len(scores), dtype=torch.bool)
    worth = moe_ref.worth_of_groups(scores, spec).sort(-1, descending=True).values
    return worth[:, spec.n_group_used - 1] - worth[:, spec.n_group_used] < 2 * TIE


Given = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]  # arguments of a call


def _check_rows(
    launch: RouteLaunch, alone: Routes, given: Given, norm: Tensor, beside: dict[str, Tensor]
) -> str | None:
    """Check rows that are normed by the launch, in both layouts that experts read, and the choices."""
    x, spec = given[0], launch.spec
    n_row = len(x)
    want = F.rms_norm(x.cpu(), norm.shape, norm, spec.eps)
    for layout in (BLOCKED, PLANES):
        into = RowsLaunch(spec.device, spec.n_in, (8, 64), layout).room(n_row)
        routes = launch(*given, **beside, into=into, power=2.0)
        if not torch.equal(routes.ids, alone.ids) or not torch.equal(routes.weights, alone.weights):
            return "choices are others where rows are normed on the way"
        if spec.n_in % 32:
            return None  # of no use to experts
        off = (values_of(into, spec.n_in)[0].cpu() - want).abs().amax() / want.abs().amax()
        if not off < 1e-3:
            return f"rows normed on the way differ from the reference by {float(off):.2g}"
    return None
