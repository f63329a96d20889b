"""Matrices of all experts of a feed-forward, as ops are loaded with them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyspec.cuda.ops.moe.ref import Act, MoeSpec, Stack, Stacks
from pyspec.cuda.temporary import temporary
from pyspec.errors import ModelError

if TYPE_CHECKING:
    from pyspec.models.weights import Weights


AS_THEY_ARE = 2.0**100
"""The eps of a norm that leaves rows as they are: every mean square is nothing beside it, and its root is the norm's weight."""


def unchanged(w: Weights, *, n: int) -> Tensor:
    """Weights of a norm of `n` columns with that eps, for rows that come normed."""
    return torch.full((n,), AS_THEY_ARE**0.5, device=w.device)


def stacks_of(w: Weights, ffn: str, *, spec: MoeSpec, factored: bool) -> Stacks:
    """The experts of the feed-forward whose tensors have this prefix (blk.N.ffn), as the spec says: those with slots in the host's memory, with
    the bytes of the file, whatever the device is. Of several ranks one adds the biases of `down`, because their outputs are summed.

    factored  the routed experts' outputs have factors in the weights of rows
    """
    stack = partial(w.stack, on_host=spec.slots is not None)
    down = stack(f"{ffn}_down_exps.weight")
    down = replace(down, scale=None) if factored else down
    if spec.has_gates and w.has(both := f"{ffn}_gate_up_exps.weight"):
        stacks = Stacks(*halves(stack(both)), down)
    else:
        gate = stack(f"{ffn}_gate_exps.weight") if spec.has_gates else None
        stacks = Stacks(gate, stack(f"{ffn}_up_exps.weight"), down)
    if spec.biased:
        stacks = _biased(w, ffn, stacks)
    n_shared = spec.pieces * spec.n_ff
    return replace(stacks, shared=_shared(w, ffn, n_shared, stacks)) if n_shared else stacks


def stack_of_one(w: Weights, ffn: str, *, act: Act, biased: bool = False) -> Stacks:
    """A feed-forward without experts (blk.N.ffn) as one expert, in the host's memory with the bytes of the file."""

    def stack(name: str) -> Stack:
        one = w.stack(f"{ffn}_{name}.weight", on_host=True)
        if not biased:
            return one
        own = f"{ffn}_{name}.bias"
        bias = w.vector(own).cpu() if w.has(own) else torch.zeros(one.n_out)
        return replace(one, bias=bias.view(1, -1))

    return Stacks(None if act == "relu2" else stack("gate"), stack("up"), stack("down"))


def halves(stack: Stack) -> tuple[Stack, Stack]:
    """A fused stack as gates (the first half of an expert's rows) and ups; both are views of it."""
    half = stack.n_out // 2
    parts = stack.data.chunk(2, 1)  # rows of a matrix, or their bytes: both lie in order
    gate, up = (Stack(data, stack.type, half, stack.n_in, stack.scale) for data in parts)
    return gate, up


def _biased(w: Weights, ffn: str, stacks: Stacks) -> Stacks:
    def biased(stack: Stack, name: str) -> Stack:
        return replace(stack, bias=w.vector(f"{ffn}_{name}_exps.bias").to(stack.data.device))

    gate, down = stacks.gate, biased(stacks.down, "down")
    if w.ranks is not None and not w.ranks.rank.leads and down.bias is not None:
        down = replace(down, bias=torch.zeros_like(down.bias))
    gate = None if gate is None else biased(gate, "gate")
    return replace(stacks, gate=gate, up=biased(stacks.up, "up"), down=down)


def _shared(w: Weights, ffn: str, n_ff: int, stacks: Stacks) -> Stacks:
    """The shared expert of `n_ff` inner values as packed in the file. It has the others' types."""

    def stack(name: str, like: Stack) -> Stack:
        with temporary(w.device):
            raw, type, own_scale = w.packed(f"{ffn}_{name}_shexp.weight")
        n_out, n_in = (like.n_out, n_ff) if name == "down" else (n_ff, like.n_in)
        scale = None if own_scale == 1.0 else torch.full((1,), own_scale, device=w.device)
        return Stack(raw.reshape(1, -1), type, n_out, n_in, scale)

    gate = None if stacks.gate is None else stack("gate", stacks.gate)
    return Stacks(gate, stack("up", stacks.up), stack("down", stacks.down))


def router_of(w: Weights, scores: str, *gate: str) -> Tensor:
    """The matrix of the router, behind it the row that gates the shared expert, if there is one. f32 for every type of file: a near tie
    decides which experts run."""
    parts = [(w.vector(name), w.factors(name, -1)) for name in (scores, *gate)]
    rows = [x if by is None or len(by) > 1 else x * by for x, by in parts]  # Gemma 4's is a norm's
    return torch.cat([row.view(-1, row.shape[-1]) for row in rows]) if gate else rows[0]


def named_experts(w: Weights, name: str, *, n_expert: int) -> Tensor:
    """The table of each token's experts. ModelError if it names an expert that is not there."""
    table = w.table(name)
    if not bool(((table >= 0) & (table < n_expert)).all()):
        raise ModelError(f"{name} names an expert outside 0..{n_expert - 1}")
    return table


def norm_of_router(w: Weights, name: str) -> Tensor:
    """Weights of a norm that are this tensor's over the root of their number."""
    scale: Tensor = w.vector(name)
    made: Tensor = scale * len(scale) ** -0.5
    return made
