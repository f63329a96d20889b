"""A dense feed-forward: gated, or of one matrix and relu^2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from pyspec.cpu.tensors import add
from pyspec.cuda import fuse
from pyspec.cuda.ops.linear.ref import GATES
from pyspec.cuda.ops.rows.op import rows
from pyspec.cuda.ops.rows.ref import RELU2, PrepKind, RowsSpec
from pyspec.models.cuts import Cut, Units, each_of
from pyspec.models.matrices import GateAct, reader_of, sum_of
from pyspec.models.part import Binding, BoundPart, LoadTypes, Pass, Place, Request, column_block
from pyspec.models.wants import Want
from pyspec.slots.parts import LayerParts

Act = Literal["silu", "gelu", "relu2"]


@dataclass(frozen=True, slots=True)
class Mlp:
    """A feed-forward of `n_ff` inner values, as data.

    silu, gelu  down(act(gate n) * up n), gelu by its tanh form
    relu2       down(relu(up n)^2), biases where the file has them
    block       columns of `ffn_down` that stand together in the file: ranks get whole ones
    """

    n_ff: int
    act: Act = "silu"
    block: int = 1
    captures_prompts = True
    attends = scratch = None

    def tensors(self, at: Place) -> dict[str, Want]:
        n, f, inner = at.n_embd, self.n_ff, (Units(self.n_ff, "inner values", block=self.block),)
        up, down = Want((f, n), cut=Cut(0, inner)), Want((n, f), cut=Cut(1, inner))
        if self.act != "relu2":
            gates = replace(up, gated=self.act in GATES)
            named = {"ffn_gate.weight": gates, "ffn_up.weight": gates, "ffn_down.weight": down}
        else:
            biases = Want((f,), optional=True, cut=Cut(0, inner)), Want((n,), optional=True)
            named = {
                "ffn_up.weight": up,
                "ffn_up.bias": biases[0],
                "ffn_down.weight": down,
                "ffn_down.bias": biases[1],
            }
        return {at.name(name): want for name, want in named.items()}

    def memory(self) -> LayerParts:
        return {}

    def share(self, n: int) -> Mlp:
        return replace(self, n_ff=each_of(self.n_ff, n, self.block))

    def of_file(self, at: Place) -> Mlp:
        """As of ReadsBlocks."""
        return replace(self, block=column_block(at, "ffn_down.weight"))

    def requests(self, at: Place, on: LoadTypes) -> Iterator[Request]:
        if not on.streams:
            return
        yield rows, RowsSpec(on.device, at.n_embd, PrepKind.NORM)
        if self.act == "relu2":
            yield rows, RowsSpec(on.device, self.n_ff, PrepKind.RELU2)
        else:
            kind = PrepKind.GLU if self.act in GATES else PrepKind.GEGLU
            yield rows, RowsSpec(on.device, self.n_ff, kind)

    def bind(self, at: Binding) -> BoundPart:
        return BoundRelu2(at) if self.act == "relu2" else BoundGated(at, self.act)


class BoundGated:
    """down(act(gate n) * up n) with n = norm(x)."""

    capturable = captures_prompts = True
    fold = None

    def __init__(self, at: Binding, act: GateAct) -> None:
        w, self.norm = at.weights, at.optional_norm()
        self.gate_up = w.gated(at.name("ffn_gate.weight"), at.name("ffn_up.weight"), act=act)
        self.down = w.summed(at.name("ffn_down.weight"))
        self.reads = None if self.norm is None else (reader_of(self.gate_up), self.norm)
        self.gives = sum_of(self.down)

    def __call__(self, x: Tensor, residual: Tensor | None, run: Pass) -> Tensor:
        return self.down(*fuse.unfinished(self.gate_up, x, self.norm), residual=residual)


class BoundRelu2:
    """down(relu(up n)^2) with n = norm(x), biases where the file has them."""

    capturable = captures_prompts = True
    fold = None

    def __init__(self, at: Binding) -> None:
        w, self.norm = at.weights, at.bound_norm()
        self.up, self.up_bias = w.matrix(at.name("ffn_up.weight")), w.optional(at.name("ffn_up.bias"))
        self.down, self.down_bias = (
            w.summed(at.name("ffn_down.weight")),
            w.optional(at.name("ffn_down.bias")),
        )
        self.reads = (self.up, self.norm)
        self.gives = None if self.down_bias is not None else sum_of(self.down)

    def __call__(self, x: Tensor, residual: Tensor | None, run: Pass) -> Tensor:
        y = self.up(x, self.norm)
        y = y if self.up_bias is None else add(y, self.up_bias)
        y = self.down(y, RELU2, residual=residual)
        return y if self.down_bias is None else add(y, self.down_bias)
