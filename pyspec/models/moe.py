"""A feed-forward of experts, a few of which run for each row, and one shared expert that runs for all.

`qwen35moe` and `nemotron_h_moe` declare theirs as a MoeShape; tensors have llama.cpp's names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pyspec.cuda import fuse
from pyspec.cuda.ops.moe.op import moe
from pyspec.cuda.ops.moe.ref import Act, Added, MoeSpec, Router, RouteSpec, Stack, Stacks
from pyspec.cuda.ops.moe_route.op import moe_route
from pyspec.cuda.ops.rows.ref import RELU2, Norm, Prep
from pyspec.cuda.temporary import temporary
from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile
from pyspec.models.cuts import Cut, Units
from pyspec.models.wants import Want
from pyspec.models.weights import Matrix, Weights

LATENT = "ffn_latent_down.weight"  # to the width in which experts work, where that is not the model's


@dataclass(frozen=True, slots=True)
class MoeShape:
    """What a file declares of its experts.

    n_ff         width of an expert; n_ff_shared that of the shared one, 0 for none
    renorm       weights of a row are divided by their sum, then multiplied with `scale`
    latent       experts work in this width instead of n_embd, between two plain matrices; 0 for n_embd
    shared_gate  the shared expert is multiplied with sigmoid(ffn_gate_inp_shexp . x)
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

    def __post_init__(self) -> None:
        if not 0 < self.n_used <= self.n_expert:
            raise ModelError(f"{self.n_used} of {self.n_expert} experts can not be used")
        if self.n_ff < 1:
            raise ModelError(f"experts of width {self.n_ff}")

    def share(self, n: int) -> MoeShape:
        """Of each of `n` ranks: all experts, and of every one as many columns."""
        return replace(self, n_ff=self.n_ff // n, n_ff_shared=self.n_ff_shared // n)


def moe_tensors(s: MoeShape, n_embd: int, file: GGUFFile, p: str) -> dict[str, Want]:
    """Wanted tensors of the feed-forward with prefix `p` (blk.N), without its norm."""
    n, f, e = s.latent or n_embd, s.n_ff, s.n_expert
    inner, shared = (Units(f, "columns of an expert"),), (Units(s.n_ff_shared, "columns of the shared expert"),)
    wants = {f"{p}.ffn_gate_inp.weight": Want((e, n_embd)), f"{p}.exp_probs_b.bias": Want((e,), optional=True)}
    if f"{p}.ffn_gate_up_exps.weight" in file.tensors and s.act == "swiglu":
        wants[f"{p}.ffn_gate_up_exps.weight"] = Want((e, 2 * f, n), cut=Cut(1, inner * 2))
    else:
        wants |= {f"{p}.ffn_{x}_exps.weight": Want((e, f, n), cut=Cut(1, inner)) for x in _inner(s)}
    wants[f"{p}.ffn_down_exps.weight"] = Want((e, n, f), cut=Cut(2, inner))
    if s.latent:
        wants |= {f"{p}.ffn_latent_down.weight": Want((n, n_embd)), f"{p}.ffn_latent_up.weight": Want((n_embd, n))}
    if s.n_ff_shared:
        wants |= {f"{p}.ffn_{x}_shexp.weight": Want((s.n_ff_shared, n_embd), cut=Cut(0, shared)) for x in _inner(s)}
        wants[f"{p}.ffn_down_shexp.weight"] = Want((n_embd, s.n_ff_shared), cut=Cut(1, shared))
        if s.shared_gate:
            wants[f"{p}.ffn_gate_inp_shexp.weight"] = Want((n_embd,), also=((1, n_embd),))
    return wants


def _inner(s: MoeShape) -> tuple[str, ...]:
    return ("gate", "up") if s.act == "swiglu" else ("up",)


def stacks_of(w: Weights, p: str, act: Act) -> Stacks:
    """The experts of the feed-forward with prefix `p` (blk.N)."""
    down = w.stack(f"{p}.ffn_down_exps.weight")
    if act == "swiglu" and w.has(both := f"{p}.ffn_gate_up_exps.weight"):
        return Stacks(*halves(w.stack(both)), down)
    gate = w.stack(f"{p}.ffn_gate_exps.weight") if act == "swiglu" else None
    return Stacks(gate, w.stack(f"{p}.ffn_up_exps.weight"), down)


def shared_stacks(w: Weights, p: str, s: MoeShape, stacks: Stacks) -> Stacks | None:
    """The shared expert as packed in the file, if one launch may multiply it with the others: of their types and input, and
    as wide as a number of them."""
    block = None if stacks.down.type is None else stacks.down.type.block_size
    if not s.n_ff_shared or s.latent or block is None or s.n_ff_shared % s.n_ff:
        return None
    if s.n_ff_shared > s.n_ff and s.n_ff % block:
        return None  # columns of a piece are no whole blocks

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


class MoeFeed:
    """x + experts(n) + shared(n) with n = norm(x). `norm_name` is the norm tensor's GGUF name."""

    captures_prompts = False  # what an expert gets of a prompt's rows decides how it is multiplied

    def __init__(self, w: Weights, prefix: str, shape: MoeShape, eps: float, norm_name: str = "ffn_norm") -> None:
        p, self.shape = prefix, shape
        self.leads, self.into = w.ranks is None or w.ranks.rank.leads, _same if w.ranks is None else w.ranks.sum
        self.gives, self.reads = None if w.ranks is None else self, None  # its router reads the stream itself
        self.norm = Norm(w.vector(f"{p}.{norm_name}.weight"), eps)
        self.router = w.vector(f"{p}.ffn_gate_inp.weight")  # f32 whatever the file has: a near tie decides what runs
        if shape.shared_gate:
            gate = w.vector(f"{p}.ffn_gate_inp_shexp.weight").view(1, -1)
            self.router = torch.cat((self.router, gate))
        self.bias = w.optional(f"{p}.exp_probs_b.bias")
        route = self._route_spec(w.device)
        self.route, self.capturable = moe_route.bind(route), moe_route.chosen(route).capturable
        stacks = stacks_of(w, p, shape.act)
        spec = self._spec(w.device, stacks)
        self.shared: _Shared | None = None
        together = shared_stacks(w, p, shape, stacks) if w.device.type == "cuda" else None
        with_shared = replace(spec, pieces=shape.n_ff_shared // shape.n_ff)
        if together is not None and moe.has_own(with_shared):
            stacks, spec = replace(stacks, shared=together), with_shared
        elif shape.n_ff_shared:
            self.shared = _Shared(w, p, shape)
        self.experts, self.capturable = moe.bind(spec)(stacks), self.capturable and moe.chosen(spec).capturable
        del stacks, together  # the file's bytes: the next layer's go to the same place
        beside = self.shared is not None and self.shared.n_beside > 0
        self.latent_down: Matrix | None = w.matrix(f"{p}.{LATENT}") if shape.latent and not beside else None
        self.latent_up: Matrix | None = w.matrix(f"{p}.ffn_latent_up.weight") if shape.latent else None
        self.prep = self.norm if fuse.norms_on_the_way(w.device, self.router.shape[1]) else None

    def _route_spec(self, device: torch.device) -> RouteSpec:
        s = self.shape
        return RouteSpec(
            device,
            self.router.shape[1],
            s.n_expert,
            s.n_used,
            s.router,
            s.renorm,
            s.scale,
            biased=self.bias is not None,
            gated=s.shared_gate,
            eps=self.norm.eps,
        )

    def _spec(self, device: torch.device, stacks: Stacks) -> MoeSpec:
        s, scaled = (
            self.shape,
            any(x is not None and x.scale is not None for x in (stacks.gate, stacks.up, stacks.down)),
        )
        up = stacks.up.type if stacks.gate is None or stacks.gate.type is stacks.up.type else None
        return MoeSpec(
            device, s.n_used, stacks.down.n_out, s.n_ff, s.act, up, stacks.down.type, scaled, n_expert=s.n_expert
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self.into(self._run(x, x if self.leads else None))

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
        parts = fuse.at_once(self.route, self.experts, len(x), prep, self.norm)
        made: Tensor = fuse.by_parts(parts, partial(self._chosen, prep), x, n, stream, shared)
        return made

    def _chosen(self, prep: Norm | None, x: Tensor, n: Tensor, stream: Tensor | None, shared: Tensor | None) -> Tensor:
        """stream + experts(n) + shared, for as many rows as experts take at once."""
        # of experts, what needs no choice comes before it
        ready, beside = fuse.before_choice(self.route, self.experts, n, prep, self.norm)
        routes = self.route(x, self.norm.weight, self.router, self.bias, **beside)
        added = Added(stream, None, routes.gate)
        if shared is not None:
            added = Added(shared) if routes.gate is None else Added(stream, shared, routes.gate)
        if self.latent_up is None:
            return self.experts(n, routes.ids, routes.weights, prep, added, ready)
        y = fuse.experts_then(self.experts, n, routes, ready, self.latent_up, added.residual)
        return y if added.shared is None or added.gate is None else torch.addcmul(y, added.shared, added.gate)


class _Shared:
    """The expert that every row takes. What the others read of a row in their own width comes out of its first product, too, if
    both matrices are of one type: a launch less. n_beside: that width; 0 if it does not."""

    def __init__(self, w: Weights, p: str, shape: MoeShape) -> None:
        up, latent = f"{p}.ffn_up_shexp.weight", f"{p}.{LATENT}"
        self.act = shape.act
        # what is behind the latent part is read four columns at once
        is_joined = (
            shape.latent > 0 and shape.latent % 4 == 0 and shape.act == "relu2" and w.type_of(latent) is w.type_of(up)
        )
        self.n_beside = shape.latent if is_joined else 0
        if shape.act == "swiglu":
            self.up = w.gated(f"{p}.ffn_gate_shexp.weight", up)
        else:
            self.up = w.matrix(latent, up) if is_joined else w.matrix(up)
        self.down = w.matrix(f"{p}.ffn_down_shexp.weight")

    def __call__(self, x: Tensor, prep: Prep | None, residual: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        """(what the others read or None, its own output)."""
        if self.act == "swiglu":
            return None, self.down(*fuse.unfinished(self.up, x, prep), residual=residual)
        y, n = self.up(x, prep), self.n_beside
        return y[:, :n] if n else None, self.down(y[:, n:], RELU2, residual=residual)
