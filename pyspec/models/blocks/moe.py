"""A feed-forward of experts, a few of which run for each row, and one shared expert that runs for all; tensors have llama.cpp's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from pyspec.cuda import fuse
from pyspec.cuda.ops.moe import cpu as moe_cpu
from pyspec.cuda.ops.moe.op import moe
from pyspec.cuda.ops.moe.ref import Act, Added, MoeSpec, Router, RouteSpec, Stack, Stacks
from pyspec.cuda.ops.moe_route.op import moe_route
from pyspec.cuda.ops.rows.op import rows
from pyspec.cuda.ops.rows.ref import RELU2, Norm, Prep, PrepKind, RowsSpec
from pyspec.cuda.temporary import temporary
from pyspec.errors import ModelError
from pyspec.gguf import GGMLType, TensorInfo
from pyspec.models.binding import Binding, BoundPart, Pass
from pyspec.models.cuts import Cut, Units, each_of
from pyspec.models.part import ForwardSize, LoadTypes, OneCall, Place, PlannedSite, Request, column_block
from pyspec.models.target import Matrix
from pyspec.models.wants import Want, scale_of
from pyspec.models.weights import Weights
from pyspec.slots.parts import LayerParts

LATENT = "ffn_latent_down.weight"  # to the width in which experts work, where that is not the model's


@dataclass(frozen=True, slots=True)
class Experts(OneCall):
    """A feed-forward of experts as data.

    n_ff         width of an expert; n_ff_shared that of the shared one, 0 for none
    renorm       weights of a row are divided by their sum, then multiplied with `scale`
    latent       experts work in this width instead of n_embd, between two plain matrices; 0 for n_embd
    shared_gate  the shared expert is multiplied with sigmoid(ffn_gate_inp_shexp . x)
    biased       the choice has a bias; otherwise it has one if the file does
    groups       (all, used): the choice is among the experts of the best groups
    shifted      scores of the router and products of experts have biases
    limit        gates are cut at this, ups at plus and minus this; 0: they are not
    block        columns of `ffn_down_exps` that stand together in the file; block_shared: of the shared expert's
    router_norm  the router reads rows behind a norm of its own, whose weights are this tensor's over sqrt(n_embd); "": behind the experts'
    """

    n_expert: int
    n_used: int
    n_ff: int
    n_ff_shared: int = 0
    router: Router = "softmax"
    renorm: bool = True
    scale: float = 1.0
    act: Act = "swiglu"
    latent: int = 0
    shared_gate: bool = False
    biased: bool = False
    groups: tuple[int, int] = (1, 1)
    shifted: bool = False
    limit: float = 0.0
    router_norm: str = ""
    block: int = 1
    block_shared: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.n_used <= self.n_expert:
            raise ModelError(f"{self.n_used} of {self.n_expert} experts can not be used")
        if self.n_ff < 1:
            raise ModelError(f"experts of width {self.n_ff}")
        n_group, n_kept = self.groups
        if not 0 < n_kept <= n_group or self.n_expert % n_group:
            raise ModelError(f"{n_kept} of {n_group} groups of {self.n_expert} experts can not be used")
        if self.n_used > self.n_expert // n_group * n_kept:
            raise ModelError(
                f"{self.n_used} experts of {n_kept} groups can not be used: they have fewer"
            )

    @property
    def inner(self) -> tuple[str, ...]:
        """The matrices before the activation."""
        return ("up",) if self.act == "relu2" else ("gate", "up")

    @property
    def n_inner(self) -> int:
        """Inner values of a row, of all experts that it uses."""
        return self.n_used * self.n_ff + self.n_ff_shared

    def tensors(self, at: Place) -> dict[str, Want]:
        n, f, e = self.latent or at.n_embd, self.n_ff, self.n_expert
        inner = (Units(f, "columns of an expert", block=self.block),)
        wants = {
            at.name("ffn_gate_inp.weight"): Want((e, at.n_embd)),
            at.name("exp_probs_b.bias"): Want((e,), optional=not self.biased),
        }
        if at.has("ffn_gate_up_exps.weight") and self.act != "relu2":
            wants[at.name("ffn_gate_up_exps.weight")] = Want((e, 2 * f, n), cut=Cut(1, inner * 2))
        else:
            wants |= {
                at.name(f"ffn_{x}_exps.weight"): Want((e, f, n), cut=Cut(1, inner)) for x in self.inner
            }
        wants[at.name("ffn_down_exps.weight")] = Want((e, n, f), cut=Cut(2, inner))
        if self.shifted:
            wants |= {at.name(f"ffn_{x}_exps.bias"): Want((e, f), cut=Cut(1, inner)) for x in self.inner}
            wants[at.name("ffn_down_exps.bias")] = Want((e, n))
            wants[at.name("ffn_gate_inp.bias")] = Want((e,))
        if self.router_norm:
            wants[at.name(self.router_norm)] = Want((at.n_embd,))
        if self.latent:
            wants[at.name("ffn_latent_down.weight")] = Want((n, at.n_embd))
            wants[at.name("ffn_latent_up.weight")] = Want((at.n_embd, n))
        return wants | self._shared_tensors(at)

    def _shared_tensors(self, at: Place) -> dict[str, Want]:
        f, n = self.n_ff_shared, at.n_embd
        if not f:
            return {}
        columns = (Units(f, "columns of the shared expert", block=self.block_shared),)
        up = Want((f, n), cut=Cut(0, columns), gated=self.act == "swiglu")
        wants = {at.name(f"ffn_{x}_shexp.weight"): up for x in self.inner}
        wants[at.name("ffn_down_shexp.weight")] = Want((n, f), cut=Cut(1, columns))
        if self.shared_gate:
            wants[at.name("ffn_gate_inp_shexp.weight")] = Want((n,), also=((1, n),))
        return wants

    def memory(self) -> LayerParts:
        return {}

    def scratch(self, size: ForwardSize) -> int:
        """Values between the loops of a CPU's kernel."""
        width = self.latent or size.n_embd
        return (
            moe_cpu.buffer_bytes(size.n_row, self.n_used, width, self.n_ff)
            if size.device.type == "cpu"
            else 0
        )

    def share(self, n: int) -> Self:
        """All experts, and of each one as many columns."""
        shared = each_of(self.n_ff_shared, n, self.block_shared)
        return replace(self, n_ff=each_of(self.n_ff, n, self.block), n_ff_shared=shared)

    def of_file(self, at: Place) -> Self:
        """See `PartSpec.of_file`."""
        own, shared = (column_block(at, f"ffn_down_{x}.weight") for x in ("exps", "shexp"))
        return replace(self, block=own, block_shared=shared)

    def kernels(self, at: PlannedSite, on: LoadTypes) -> Iterator[Request]:
        has_bias = at.has("exp_probs_b.bias")
        yield moe_route, self.route_spec(on.device, at.n_embd, at.eps, has_bias=has_bias)
        if on.streams:
            yield rows, RowsSpec(on.device, at.n_embd, PrepKind.NORM)
        down, up = (at.file.tensors.get(at.name(f"ffn_{x}_exps.weight")) for x in ("down", "up"))
        up = up or at.file.tensors.get(at.name("ffn_gate_up_exps.weight"))
        if down is None or up is None:
            return
        names = [at.name(f"ffn_{x}_exps.weight") for x in ("gate", "up", "down", "gate_up")]
        scaled = any(scale_of(name) in at.file.tensors for name in names)
        of_up, of_down = (up.type, down.type) if on.dense is None else (None, None)
        gate, width = at.file.tensors.get(names[0], up), self.latent or at.n_embd
        spec = MoeSpec(
            on.device,
            self.n_used,
            width,
            self.n_ff,
            self.act,
            of_up,
            of_down,
            scaled,
            n_expert=self.n_expert,
            limit=self.limit,
            biased=self.shifted,
        )
        spec = replace(spec, gate=None if on.dense is not None or gate.type is up.type else gate.type)
        yield moe, replace(spec, pieces=self._pieces(at, up, down) if on.streams else 0)
        if self.n_ff_shared and self.act == "relu2" and on.streams:
            yield rows, RowsSpec(on.device, self.n_ff_shared, PrepKind.RELU2)

    def route_spec(self, device: torch.device, n_in: int, eps: float, *, has_bias: bool) -> RouteSpec:
        return RouteSpec(
            device,
            n_in,
            self.n_expert,
            self.n_used,
            self.router,
            self.renorm,
            self.scale,
            biased=has_bias,
            gated=self.shared_gate,
            eps=eps,
            n_group=self.groups[0],
            n_group_used=self.groups[1],
            shifted=self.shifted,
        )

    def joins_shared(self, block_size: int | None) -> bool:
        """Whether one launch may take the shared expert as further experts: of their input, and as wide as a number of them, in whole
        blocks of the type of `down`."""
        if not self.n_ff_shared or self.latent or block_size is None or self.n_ff_shared % self.n_ff:
            return False
        return self.n_ff_shared == self.n_ff or self.n_ff % block_size == 0

    def _pieces(self, at: Place, up: TensorInfo, down: TensorInfo) -> int:
        """Of the shared expert as further experts of a launch, which have its types, too."""
        if not self.joins_shared(down.type.block_size):
            return 0
        wanted: dict[str, GGMLType] = dict.fromkeys(self.inner, up.type) | {"down": down.type}
        own = {x: at.file.tensors.get(at.name(f"ffn_{x}_shexp.weight")) for x in wanted}
        fits = all(t is not None and t.type is wanted[x] for x, t in own.items())
        return self.n_ff_shared // self.n_ff if fits else 0

    def bind(self, at: Binding) -> BoundPart:
        return BoundExperts(self, at)


def biased_stacks(w: Weights, p: str, stacks: Stacks, leads: bool) -> Stacks:
    """The same with the biases of the file. Of several ranks one adds those of `down`, because their outputs are summed."""

    def biased(stack: Stack, name: str) -> Stack:
        return replace(stack, bias=w.vector(f"{p}.ffn_{name}_exps.bias"))

    gate, down = stacks.gate, biased(stacks.down, "down")
    if not leads and down.bias is not None:
        down = replace(down, bias=torch.zeros_like(down.bias))
    gate = None if gate is None else biased(gate, "gate")
    return replace(stacks, gate=gate, up=biased(stacks.up, "up"), down=down)


def stacks_of(w: Weights, p: str, act: Act) -> Stacks:
    """The experts of the feed-forward with prefix `p` (blk.N)."""
    down = w.stack(f"{p}.ffn_down_exps.weight")
    if act != "relu2" and w.has(both := f"{p}.ffn_gate_up_exps.weight"):
        return Stacks(*halves(w.stack(both)), down)
    gate = None if act == "relu2" else w.stack(f"{p}.ffn_gate_exps.weight")
    return Stacks(gate, w.stack(f"{p}.ffn_up_exps.weight"), down)


def shared_stacks(w: Weights, p: str, s: Experts, stacks: Stacks) -> Stacks | None:
    """The shared expert as packed in the file, if one launch may multiply it with the others and it has their types."""
    if not s.joins_shared(None if stacks.down.type is None else stacks.down.type.block_size):
        return None

    def stack(name: str, like: Stack) -> Stack | None:
        with temporary(w.device):
            raw, type, own_scale = w.packed(f"{p}.ffn_{name}_shexp.weight")
        if type is not like.type or (own_scale != 1.0 and like.scale is None):
            return None
        n_out, n_in = (like.n_out, s.n_ff_shared) if name == "down" else (s.n_ff_shared, like.n_in)
        scale = None if like.scale is None else torch.full((1,), own_scale, device=w.device)
        return Stack(raw.reshape(1, -1), type, n_out, n_in, scale)

    gate = None if stacks.gate is None else stack("gate", stacks.gate)
    up, down = stack("up", stacks.up), stack("down", stacks.down)
    if up is None or down is None or (gate is None and stacks.gate is not None):
        return None
    return Stacks(gate, up, down)


def halves(stack: Stack) -> tuple[Stack, Stack]:
    """A fused stack as gates (the first half of an expert's rows) and ups; both are views of it."""
    half = stack.n_out // 2
    parts = stack.data.chunk(2, 1)  # rows of a matrix, or their bytes: both lie in order
    gate, up = (Stack(data, stack.type, half, stack.n_in, stack.scale) for data in parts)
    return gate, up


def _same(x: Tensor) -> Tensor:
    return x


class BoundExperts:
    """experts(n) + shared(n) with n = norm(x)."""

    def __init__(self, shape: Experts, at: Binding) -> None:
        w = at.weights
        p = at.prefix
        self.shape = shape
        self.leads = w.ranks is None or w.ranks.rank.leads
        self.into: Callable[[Tensor], Tensor] = _same if w.ranks is None else w.ranks.sum
        self.gives = None if w.ranks is None else self
        self.norm = self.of_router = at.bound_norm()
        if shape.router_norm:
            scale = w.vector(at.name(shape.router_norm))
            self.of_router = Norm(scale * len(scale) ** -0.5, at.eps)
        # f32 for every type of file: a near tie decides which experts run
        self.router = w.vector(f"{p}.ffn_gate_inp.weight")
        if shape.shared_gate:
            gate = w.vector(f"{p}.ffn_gate_inp_shexp.weight").view(1, -1)
            self.router = torch.cat((self.router, gate))
        self.bias = w.optional(f"{p}.exp_probs_b.bias")
        self.shift = {"shift": w.vector(f"{p}.ffn_gate_inp.bias")} if shape.shifted else {}
        route = shape.route_spec(w.device, self.router.shape[1], at.eps, has_bias=self.bias is not None)
        self.route, self.capturable = moe_route.bind(route), moe_route.chosen(route).capturable
        stacks = stacks_of(w, p, shape.act)
        stacks = biased_stacks(w, p, stacks, self.leads) if shape.shifted else stacks
        spec = self._spec(w.device, stacks)
        self.shared: _Shared | None = None
        together = shared_stacks(w, p, shape, stacks) if w.device.type == "cuda" else None
        with_shared = replace(spec, pieces=shape.n_ff_shared // shape.n_ff)
        if together is not None and moe.has_own(with_shared):
            stacks, spec = replace(stacks, shared=together), with_shared
        elif shape.n_ff_shared:
            self.shared = _Shared(w, p, shape)
        self.experts, self.capturable = (
            moe.bind(spec)(stacks),
            self.capturable and moe.chosen(spec).capturable,
        )
        del stacks, together  # the file's bytes: the next layer's go to the same place
        beside = self.shared is not None and self.shared.n_beside > 0
        self.latent_down: Matrix | None = (
            w.matrix(f"{p}.{LATENT}") if shape.latent and not beside else None
        )
        self.latent_up: Matrix | None = w.matrix(f"{p}.ffn_latent_up.weight") if shape.latent else None
        norms_itself = moe.runs_as("cpu", spec) or fuse.norms_on_the_way(w.device, self.router.shape[1])
        self.prep = self.norm if norms_itself else None

    def _spec(self, device: torch.device, stacks: Stacks) -> MoeSpec:
        s, up, down = self.shape, stacks.up.type, stacks.down
        scaled = any(
            x is not None and x.scale is not None for x in (stacks.gate, stacks.up, stacks.down)
        )
        spec = MoeSpec(
            device, s.n_used, down.n_out, s.n_ff, s.act, up, down.type, scaled, n_expert=s.n_expert
        )
        return replace(spec, gate=stacks.other_gate, limit=s.limit, biased=s.shifted)

    def __call__(self, x: Tensor, residual: Tensor | None, run: Pass) -> Tensor:
        return self.into(self._run(x, residual if self.leads else None))

    def _run(self, x: Tensor, stream: Tensor | None) -> Tensor:
        """stream + experts(n) + shared(n): with several ranks, the part of this one's columns."""
        n, prep = x if self.prep is not None else self.norm(x), self.prep
        shared = latent = None
        if self.shared is not None:  # products add to the residual stream on their way
            latent, shared = self.shared(n, prep, residual=None if self.shape.shared_gate else stream)
        if self.latent_down is not None:
            latent = self.latent_down(n, prep)
        if latent is not None:
            n, prep = latent, None
        parts = fuse.at_once(self.route, self.experts, len(x), prep, self.of_router)
        made: Tensor = fuse.by_parts(parts, partial(self._chosen, prep), x, n, stream, shared)
        return made

    def _chosen(
        self, prep: Norm | None, x: Tensor, n: Tensor, stream: Tensor | None, shared: Tensor | None
    ) -> Tensor:
        """stream + experts(n) + shared, for as many rows as experts take at once."""
        # work that needs no choice comes before it
        ready, beside = fuse.before_choice(self.route, self.experts, n, prep, self.of_router)
        routes = self.route(x, self.of_router.weight, self.router, self.bias, **self.shift, **beside)
        added = Added(stream, None, routes.gate)
        if shared is not None:
            added = Added(shared) if routes.gate is None else Added(stream, shared, routes.gate)
        if self.latent_up is None:
            return self.experts(n, routes.ids, routes.weights, prep, added, ready)
        y = fuse.experts_then(self.experts, n, routes, ready, self.latent_up, added.residual)
        return (
            y
            if added.shared is None or added.gate is None
            else torch.addcmul(y, added.shared, added.gate)
        )


class _Shared:
    """The expert that every row takes. Its first product also projects the row to the latent width of the other experts, if both
    matrices are of one type: one launch instead of two. n_beside: that width; 0 if it does not."""

    def __init__(self, w: Weights, p: str, shape: Experts) -> None:
        up, latent = f"{p}.ffn_up_shexp.weight", f"{p}.{LATENT}"
        self.act = shape.act
        # the columns behind the latent part are read four at once
        is_joined = (
            shape.latent > 0
            and shape.latent % 4 == 0
            and shape.act == "relu2"
            and w.type_of(latent) is w.type_of(up)
        )
        self.n_beside = shape.latent if is_joined else 0
        if shape.act == "swiglu":
            self.up = w.gated(f"{p}.ffn_gate_shexp.weight", up)
        else:
            self.up = w.matrix(latent, up) if is_joined else w.matrix(up)
        self.down = w.matrix(f"{p}.ffn_down_shexp.weight")

    def __call__(
        self, x: Tensor, prep: Prep | None, residual: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """(the latent row for the other experts or None, its own output)."""
        if self.act == "swiglu":
            return None, self.down(*fuse.unfinished(self.up, x, prep), residual=residual)
        y, n = self.up(x, prep), self.n_beside
        return y[:, :n] if n else None, self.down(y[:, n:], RELU2, residual=residual)
