"""A feed-forward of experts. Reference in plain torch.

Routing: each row, normed, scores all experts and takes the `n_used` best, of equal ones the lower index. Then every expert runs once,
over the rows that took it, and each row adds its experts' outputs in the order of its choice, best first: a row's sums do
not depend on the choices of other rows. A shared expert, if it is one of the op's, runs for all rows and is added after those.

    x        [row, n_in]    f32    normed, or as they are with the norm given
    ids      [row, n_used]  int32  the experts of a row, best first; -1 is none, and adds nothing
    weights  [row, n_used]  f32    the factor of each
    out      [row, n_in]    f32    sum of weight * down(act(...)), plus the addends
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Concatenate, Literal, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.cut import bounds, cut_gates
from pyspec.cuda.exact import by_row, linear
from pyspec.cuda.guard import Guard
from pyspec.cuda.ops.linear.dequant import dequantize
from pyspec.cuda.ops.rows.ref import Norm
from pyspec.gguf import GGMLType

GUARD = Guard(18, lost="the host did not compute a layer's experts within two seconds")
LEAST_SUM = 6.103515625e-5  # least divisor of a row's weights, 2^-14 as in llama.cpp

Act = Literal["swiglu", "relu2", "geglu", "swiglu_oai", "situ"]
ACTS = get_args(Act)  # in the order of kernels
Router = Literal["softmax", "sigmoid", "sqrtsoftplus", "chosen"]
OAI_SLOPE = 1.702  # of gates in `swiglu_oai`
Betas = tuple[float, float]
"""Of `situ`: of gates, and of ups, which stay as they are where theirs is not positive."""


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """Scores over n_expert, from rows of n_in columns. biased: a bias that takes part in the choice alone.

    eps     of the norm that rows get on the way
    renorm  the weights of a row are divided by their sum
    scale   and multiplied with this
    gated   the matrix has one more row: sigmoid of its product is the row's gate
    given   the experts of a row are given (by a table of tokens); their weights are scored all the same
    n_group  groups of as many experts each, of which `n_group_used` are kept: those whose two best scores sum to most
    shifted  scores have a bias [n_expert], which counts in weights as well
    factored  experts' outputs have factors [n_expert], with which their weights are multiplied at last
    """

    device: torch.device
    n_in: int
    n_expert: int
    n_used: int
    router: Router = "softmax"
    renorm: bool = True
    scale: float = 1.0
    biased: bool = False
    gated: bool = False
    eps: float = 1e-6
    given: bool = False
    n_group: int = 1
    n_group_used: int = 1
    shifted: bool = False
    factored: bool = False

    def check_beside(self, *beside: Tensor | None) -> None:
        """Assert that a call has what the spec says, of a bias, given experts, a shift and factors."""
        assert [x is not None for x in beside] == [self.biased, self.given, self.shifted, self.factored]

    @property
    def other_limit(self) -> str | None:
        """Why kernels of GPUs do not run: one bias a score is all that they read, and weights of the chosen alone are those of all,
        divided by their sum (`renorms`), unless a bias or a table chooses."""
        if (self.shifted or self.router == "chosen") and (self.biased or self.given):
            return "scores with a bias, or weights of the chosen scores alone, beside another choice"
        if self.router == "chosen" and self.n_group > 1:
            return "groups of experts that are ranked by scores without a softmax"
        return None

    @property
    def renorms(self) -> bool:
        """Whether weights of a softmax, a sigmoid or the like are divided by their sum."""
        return self.renorm or self.router == "chosen"


@dataclass(frozen=True, slots=True)
class Routes:
    """ids [row, n_used] int32, weights [row, n_used] f32, gate [row, 1] f32 or None."""

    ids: Tensor
    weights: Tensor
    gate: Tensor | None = None


Route = Callable[Concatenate[Tensor, Tensor, Tensor, ...], Routes]
"""route(x, norm, matrix, bias=None, given=None, shift=None, factors=None), and the last two only where the spec has them; one that writes rows takes `into` and `power`, too (fuse.py)"""


def probabilities(logits: Tensor, router: Router) -> Tensor:
    """Weights of all experts, before the choice. chosen: those are made of the chosen ones' scores, behind it."""
    if router == "chosen":
        return logits
    if router == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if router == "sigmoid" else F.softplus(logits).sqrt()


def worth_of_groups(scores: Tensor, spec: RouteSpec) -> Tensor:
    """scores [row, n_expert] f32 -> the sums of the two best of each group [row, n_group]; of groups of one expert, its own."""
    by_group = scores.unflatten(-1, (spec.n_group, -1))
    return by_group.topk(min(2, by_group.shape[-1]), -1).values.sum(-1)


def of_best_groups(scores: Tensor, spec: RouteSpec) -> Tensor:
    """scores [row, n_expert] f32 with -inf for the experts of other groups; of equal groups the first are kept."""
    worth = worth_of_groups(scores, spec)
    kept = worth.sort(dim=-1, descending=True, stable=True).indices[:, : spec.n_group_used]
    is_kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(-1, kept, True)
    by_group = scores.unflatten(-1, (spec.n_group, -1))
    return by_group.masked_fill(~is_kept[..., None], -torch.inf).flatten(-2)


def choose(
    logits: Tensor, spec: RouteSpec, bias: Tensor | None, given: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits [row, n_expert] f32 -> ids, weights. Without a bias the logits rank as their probabilities do."""
    (p,) = by_row(lambda own: (probabilities(own, spec.router),), logits)
    if given is None:
        scores = logits if bias is None else p + bias
        if spec.n_group > 1:
            scores = of_best_groups(p if bias is None else scores, spec)
        ids = scores.sort(dim=-1, descending=True, stable=True).indices[:, : spec.n_used]
    else:
        ids = given.long()
    weights = p.gather(-1, ids)
    if spec.router == "chosen":
        (weights,) = by_row(lambda own: (own.softmax(-1),), weights)
    if spec.renorm:
        total = weights[:, :1]
        for i in range(1, spec.n_used):
            total = total + weights[:, i : i + 1]
        weights = weights / total.clamp(min=LEAST_SUM)
    return ids.int(), weights if spec.scale == 1.0 else weights * spec.scale


def bind_route(spec: RouteSpec) -> Route:
    def route(
        x: Tensor,
        norm: Tensor,
        matrix: Tensor,
        bias: Tensor | None = None,
        given: Tensor | None = None,
        shift: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> Routes:
        """x [row, n_in] as they are, norm [n_in], matrix [n_expert (+ 1), n_in], bias, shift and factors [n_expert], all f32; given [row, n_used]."""
        spec.check_beside(bias, given, shift, factors)
        assert matrix.shape == (spec.n_expert + spec.gated, spec.n_in)
        y = linear(F.rms_norm(x, (spec.n_in,), norm, spec.eps), matrix)
        gate = y[:, spec.n_expert :].sigmoid() if spec.gated else None
        scores = y[:, : spec.n_expert] if shift is None else y[:, : spec.n_expert] + shift
        ids, weights = choose(scores, spec, bias, given)
        return Routes(ids, weights if factors is None else weights * factors[ids.long()], gate)

    return route


@dataclass(frozen=True, slots=True)
class Stack:
    """One matrix [n_out, n_in] of every expert.

    data   as in the file: [expert, bytes] uint8 of `type`; or unpacked, [expert, n_out, n_in], and `type` is None
    scale  [expert] f32, multiplies products (NVFP4's second level), or None
    bias   [expert, n_out] f32, is added to them, or None
    """

    data: Tensor
    type: GGMLType | None
    n_out: int
    n_in: int
    scale: Tensor | None = None
    bias: Tensor | None = None

    def product(self, x: Tensor, expert: int) -> Tensor:
        """Of rows x [row, n_in] with an expert's matrix, and its bias. [row, n_out] f32"""
        y = product(x, self.matrix(expert).to(x.device))
        return y if self.bias is None else y + self.bias[expert].to(x.device)

    def matrix(self, expert: int) -> Tensor:
        """[n_out, n_in], unpacked now if it is not yet."""
        data = self.data[expert]
        if self.type is not None:
            data = dequantize(data.contiguous(), self.type, (self.n_out, self.n_in))
        return data if self.scale is None else data * self.scale[expert].to(data.dtype)

    def unpacked(self) -> Stack:
        """The same matrices in f32, for a reference that runs several times."""
        matrices = torch.stack([self.matrix(e) for e in range(self.data.shape[0])])
        return Stack(matrices, None, self.n_out, self.n_in, bias=self.bias)


@dataclass(frozen=True, slots=True)
class Stacks:
    """Matrices of all experts of a layer; no gate for relu2. shared: one more expert, of `pieces` times their width."""

    gate: Stack | None
    up: Stack
    down: Stack
    shared: Stacks | None = None

    @property
    def n_expert(self) -> int:
        return self.up.data.shape[0]

    def unpacked(self) -> Stacks:
        gate, shared = self.gate, self.shared
        return Stacks(
            None if gate is None else gate.unpacked(),
            self.up.unpacked(),
            self.down.unpacked(),
            None if shared is None else shared.unpacked(),
        )


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Experts n_in -> n_ff -> n_in; a row uses n_used of them. Types are None if matrices are unpacked.

    gate      type of gates where ups have another; else None
    pieces    there is a shared expert of the same types, as wide as that many others; 0 for none
    n_expert  for limits alone: a check of a few experts holds for any number that an implementation takes
    limit     of gates and ups (`cuda/cut.py`)
    biased    every product has a bias
    slots     None: matrices are on the device. Else they are in the host's memory, and so many experts have a copy on the device, too
    betas     of `situ`
    """

    device: torch.device
    n_used: int
    n_in: int
    n_ff: int
    act: Act
    up: GGMLType | None
    down: GGMLType | None
    scaled: bool = False
    pieces: int = 0
    n_expert: int = field(default=0, repr=False)
    limit: float = 0.0
    gate: GGMLType | None = None
    biased: bool = False
    slots: int | None = None
    betas: Betas = (0.0, 0.0)

    @property
    def cut(self) -> float | Betas:
        """The numbers of the activation: betas, or the limit."""
        return self.betas if self.act == "situ" else self.limit

    @property
    def numbers(self) -> Betas:
        """The same as two: bounds of a limit."""
        return self.betas if self.act == "situ" else bounds(self.limit)

    @property
    def has_gates(self) -> bool:
        return self.act != "relu2"


@dataclass(frozen=True, slots=True)
class Added:
    """Addends of a row's sum: shared [row, n_in] times gate [row, 1], then residual [row, n_in].

    If the op runs the shared expert, only its gate is given; without a gate its weight is 1.
    """

    residual: Tensor | None = None
    shared: Tensor | None = None
    gate: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.shared is None or self.gate is not None

    def part(self, rows: slice) -> Added:
        return Added(*(None if t is None else t[rows] for t in (self.residual, self.shared, self.gate)))


NOTHING = Added()


class ExpertsRun(Protocol):
    """Rows x [row, n_in], normed first if a norm is given -> out. ready: rows that an implementation made of x and norm before."""

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        norm: Norm | None = None,
        added: Added = NOTHING,
        ready: object = None,
    ) -> Tensor: ...


Moe = Callable[[Stacks], ExpertsRun]  # the launch that the op binds: experts are loaded once


def activate(gate: Tensor | None, up: Tensor, cut: float | Betas = 0.0, act: Act = "swiglu") -> Tensor:
    """silu(gate) * up, its like by `act`, or relu(up)^2 without a gate. cut: as of `MoeSpec`"""
    if gate is None:
        return F.relu(up).square()
    if isinstance(cut, tuple):
        beta, linear = cut
        up = linear * (up / linear).tanh() if linear > 0 else up
        return beta * (gate / beta).tanh() * gate.sigmoid() * up
    gate, up = cut_gates(gate, up, cut)
    if act == "geglu":
        return F.gelu(gate, approximate="tanh") * up
    if act == "swiglu_oai":
        return gate * (OAI_SLOPE * gate).sigmoid() * (up + 1)
    return F.silu(gate) * up


def gated_halves(y: Tensor, limit: float) -> Tensor:
    """silu(gate) * up of gates and ups side by side, cut as in `activate`."""
    gate, up = y.chunk(2, -1)
    return activate(gate, up, limit)


def combine(y: Tensor, weights: Tensor, added: Added = NOTHING) -> Tensor:
    """y [row, n_used, n] and weights [row, n_used] -> [row, n], added in order; residual + (sum + shared * gate)."""
    out = y[:, 0] * weights[:, :1]
    for i in range(1, y.shape[1]):
        out = out + y[:, i] * weights[:, i : i + 1]
    if added.shared is not None and added.gate is not None:
        out = out + added.shared * added.gate
    return out if added.residual is None else added.residual + out


def bind(spec: MoeSpec) -> Moe:
    """Experts that no row took are neither unpacked nor read. Looks at `ids` on the host: no graph may hold it."""

    def load(stacks: Stacks) -> ExpertsRun:
        assert (stacks.gate is not None) == spec.has_gates
        n_in = stacks.down.n_out
        assert (stacks.shared is None) == (spec.pieces == 0)

        def expert(of: Stacks, e: int, x: Tensor) -> Tensor:
            gate = None if of.gate is None else of.gate.product(x, e)
            return of.down.product(activate(gate, of.up.product(x, e), spec.cut, spec.act), e)

        def moe(
            x: Tensor,
            ids: Tensor,
            weights: Tensor,
            norm: Norm | None = None,
            added: Added = NOTHING,
            ready: object = None,
        ) -> Tensor:
            x = x if norm is None else norm(x)
            n_row, n_used = ids.shape
            chosen = ids.flatten().long()
            order = chosen.sort(dim=0, stable=True).indices
            at = int((chosen == -1).sum())  # these are none: they add nothing
            counts = chosen[order[at:]].bincount(minlength=stacks.n_expert).tolist()
            y = torch.zeros(n_row * n_used, n_in, dtype=torch.float32, device=x.device)
            for e, n in enumerate(counts):
                if n:
                    places = order[at : at + n]
                    y[places] = expert(stacks, e, x[places // n_used])
                    at += n
            if stacks.shared is not None:
                assert added.shared is None
                gate = weights.new_ones(n_row, 1) if added.gate is None else added.gate
                added = Added(added.residual, expert(stacks.shared, 0, x), gate)
            return combine(y.view(n_row, n_used, n_in), weights, added)

        return moe

    return load


def product(x: Tensor, weight: Tensor) -> Tensor:
    return linear(x.to(weight.dtype), weight).float()
