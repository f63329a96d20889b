"""Matrices of all experts of a feed-forward, as ops are loaded with them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyspec.cuda.ops.moe.ref import Act, Stack, Stacks
from pyspec.cuda.temporary import temporary
from pyspec.errors import ModelError

if TYPE_CHECKING:
    from pyspec.models.weights import Weights


def stacks_of(w: Weights, ffn: str, *, act: Act, biased: bool = False, shared: int = 0) -> Stacks:
    """The experts of the feed-forward whose tensors have this prefix (blk.N.ffn).

    biased  with the biases of the file. Of several ranks one adds those of `down`, because their outputs are summed
    shared  width of the shared expert, if it is one of them; else 0
    """
    down = w.stack(f"{ffn}_down_exps.weight")
    if act != "relu2" and w.has(both := f"{ffn}_gate_up_exps.weight"):
        stacks = Stacks(*halves(w.stack(both)), down)
    else:
        gate = None if act == "relu2" else w.stack(f"{ffn}_gate_exps.weight")
        stacks = Stacks(gate, w.stack(f"{ffn}_up_exps.weight"), down)
    if biased:
        stacks = _biased(w, ffn, stacks)
    return replace(stacks, shared=_shared(w, ffn, shared, stacks)) if shared else stacks


def halves(stack: Stack) -> tuple[Stack, Stack]:
    """A fused stack as gates (the first half of an expert's rows) and ups; both are views of it."""
    half = stack.n_out // 2
    parts = stack.data.chunk(2, 1)  # rows of a matrix, or their bytes: both lie in order
    gate, up = (Stack(data, stack.type, half, stack.n_in, stack.scale) for data in parts)
    return gate, up


def _biased(w: Weights, ffn: str, stacks: Stacks) -> Stacks:
    def biased(stack: Stack, name: str) -> Stack:
        return replace(stack, bias=w.vector(f"{ffn}_{name}_exps.bias"))

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
        scale = None if like.scale is None else torch.full((1,), own_scale, device=w.device)
        return Stack(raw.reshape(1, -1), type, n_out, n_in, scale)

    gate = None if stacks.gate is None else stack("gate", stacks.gate)
    return Stacks(gate, stack("up", stacks.up), stack("down", stacks.down))


def router_of(w: Weights, scores: str, *gate: str) -> Tensor:
    """The matrix of the router, behind it the row that gates the shared expert, if there is one. f32 for every type of file: a near tie
    decides which experts run."""
    matrix = w.vector(scores)
    return torch.cat([matrix, *(w.vector(name).view(1, -1) for name in gate)]) if gate else matrix


def named_experts(w: Weights, name: str, *, n_expert: int) -> Tensor:
    """The table of each token's experts. ModelError if it names an expert that is not there."""
    table = w.table(name)
    if not bool(((table >= 0) & (table < n_expert)).all()):
        raise ModelError(f"{name} names an expert outside 0..{n_expert - 1}")
    return table


def norm_of_router(w: Weights, name: str) -> Tensor:
    """Weights of a norm that are this tensor's over the root of their number."""
    scale = w.vector(name)
    return scale * len(scale) ** -0.5
