"""Tracing: a block's function runs once on symbolic values, and its calls are the program. It needs no weights and no device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from pyspec.cuda.ops.norms.spec import NormsSpec
from pyspec.forward.call import ForwardProgram, OpCall, RunInput, Value, Weight
from pyspec.gguf import GGMLType, GGUFFile
from pyspec.slots.kv_types import KvFormat

TOKEN_INPUTS = "per_layer_token_embd.weight"  # rows by token or n-gram, which no product reads


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block stands: in a file, behind a prefix (blk.N; "": of the model itself), in a model of this width and this eps of norms."""

    file: GGUFFile
    prefix: str
    n_embd: int
    eps: float

    def name(self, tensor: str) -> str:
        """A tensor's name in the file: behind the prefix, unless there is none, or the tensor is the model's."""
        return f"{self.prefix}.{tensor}" if self.prefix and tensor != TOKEN_INPUTS else tensor

    def has(self, tensor: str) -> bool:
        return self.name(tensor) in self.file.tensors


@dataclass(frozen=True, slots=True)
class Site(Place):
    """The place of a block in a load, with everything that its function may depend on before weights are read.

    flags  llama-server's flags of rope
    dense  dtype that matrices are unpacked to; None: they stay packed
    placement  the feed-forwards that are not on the card alone (`models.placement.Placement`)
    leads  this is the first of the ranks, which alone adds the stream and the biases of sums
    norm   GGUF name of the norm before it, without prefix and ending; "": rows come normed
    layer  the number of its memory
    """

    device: torch.device
    kv: KvFormat
    flags: Any
    n_rank: int
    dense: torch.dtype | None
    placement: Any
    leads: bool = True
    norm: str = ""
    layer: int = 0

    @property
    def streams(self) -> bool:
        """Kernels of a GPU read packed matrices."""
        return self.device.type == "cuda" and self.dense is None

    @property
    def slots(self) -> int | None:
        """Experts of its feed-forward are in the host's memory, and so many have a copy on the card; None: all are on the card alone."""
        found: int | None = self.placement.slots(self.prefix) if self.streams else None
        return found

    @property
    def away(self) -> bool:
        """Its feed-forward without experts is in the host's memory."""
        return self.streams and self.prefix in self.placement.dense

    def type_of(self, tensor: str) -> GGMLType:
        return self.file.tensors[self.name(tensor)].type

    def takes(self, op: str, spec: Any) -> bool:
        """Whether a kernel runs this, as far as is known."""
        return True

    def behind(self, norm: str) -> Self:
        """The same with another norm."""
        return replace(self, norm=norm)


@dataclass(frozen=True, slots=True)
class PrepSpec:
    """A norm, gate or activation of rows: eps of norms, and columns of a head or group, 0 where it takes whole rows."""

    eps: float
    dim: int


class Forward:
    """The calls of a block's function so far. Each method adds a call.

    A function has one call for each step of its maths. Rules decide which steps run as one launch (`rewrite.py`).
    """

    def __init__(self, at: Site, calls: list[OpCall] | None = None) -> None:
        self.at, self.device, self.eps, self.kv = at, at.device, at.eps, at.kv
        self.calls: list[OpCall] = [] if calls is None else calls

    def behind(self, norm: str) -> Forward:
        """The same for a part whose rows come behind this norm; "": they come normed."""
        return Forward(self.at.behind(norm), self.calls)

    def op(self, op: str, spec: Any, *inputs: Any, shape: tuple[int, ...], **more: Any) -> Value:
        """A call of an op, or of a method of its launch ("norms.paired"). shape: of a row of its result."""
        made = Value(shape)
        self.calls.append(OpCall(op, spec, inputs, (made,), more))
        return made

    # -- things that are there ---------------------------------------------------------------------------------

    def vector(self, name: str) -> Weight:
        """A small tensor, in f32."""
        return Weight("vector", (name,))

    def read(self, read: Callable[..., Any], *names: str, **how: Any) -> Weight:
        """The result of a function of the weights: read(Weights, *whole names, **how)."""
        return Weight(read, names, tuple(how.items()))

    def optional(self, name: str) -> Weight | None:
        """The same; None if the file has none."""
        return self.vector(name) if self.at.has(name) else None

    @property
    def batch(self) -> RunInput:
        return RunInput("batch")

    def choose(self, places: Value) -> Value:
        """Leave the batch of chosen keys to the blocks behind, too."""
        self.op("choose", None, RunInput("choices"), places, shape=())
        return places

    @property
    def choice(self) -> RunInput:
        """The last one that was left."""
        return RunInput("choice")

    @property
    def state(self) -> RunInput:
        """The block's recurrent memory."""
        return RunInput("state", self.at.layer)

    @property
    def positions(self) -> RunInput:
        return RunInput("positions")

    def kept(self, name: str) -> RunInput:
        """The block's memory of that name."""
        return RunInput("kept", (self.at.layer, name))

    def pool(self, layer: int | None = None) -> RunInput:
        """Keys and values of a layer, the block's own unless another is named."""
        return RunInput("pool", self.at.layer if layer is None else layer)

    def placed(self, pool: RunInput, *, is_near: bool = False) -> RunInput:
        """The batch with the rows and pages that it has in a pool, as a block with a window sees it (is_near) or one without."""
        return RunInput("placed", (pool.place, is_near))

    def kv_rows(self, pool: RunInput) -> RunInput:
        """The rows of a pool that the batch's rows have."""
        return RunInput("kv_rows", pool.place)

    def angles(self, rope: Any, *, is_near: bool = False) -> RunInput:
        return RunInput("angles", (rope, is_near))

    def queries(self, rope: Any, *, is_near: bool = False) -> RunInput:
        """The factors of a rope's queries."""
        return RunInput("queries", (rope, is_near))

    # -- rows --------------------------------------------------------------------------------------------------

    def normed(self, x: Value) -> Value:
        """x behind the block's norm, or as it is where rows come normed."""
        return self.norm(x, self.vector(f"{self.at.norm}.weight")) if self.at.norm else x

    def norm(self, x: Value, weight: Weight) -> Value:
        return self._prep("norm", x, weight)

    def norm_apart(
        self, x: Value, weight: Weight, *, eps: float = 0.0, takes_mean: bool = False
    ) -> Value:
        """A norm with a launch of its own. eps: 0.0 for the model's; takes_mean: LayerNorm without a bias"""
        spec = NormsSpec(self.device, x.width, eps or self.eps, takes_mean)
        return self.op("norms", spec, x, weight, shape=x.shape)

    def slice_norm(self, x: Value, *names: str, n_slice: int) -> Value:
        """RMSNorm of each of the equal slices of a row, times vectors, side by side. Columns behind those of the vectors stay as they are."""
        how = Weight("slice_norms", names, (("dim", x.width // n_slice), ("eps", self.eps)))
        return self.op("slice_norms", how, x, shape=x.shape)

    def relu2(self, x: Value) -> Value:
        return self._prep("relu2", x)

    def head_norm(self, x: Value, weight: Weight, gate: Value, dim: int) -> Value:
        """RMSNorm of each head of x [row, head * dim], times silu(gate)."""
        return self._prep("head_norm", x, weight, gate, dim=dim)

    def group_norm(self, x: Value, weight: Weight, gate: Value, n_group: int) -> Value:
        """RMSNorm of x * silu(gate) in groups, times weight."""
        return self._prep("group_norm", x, weight, gate, n_group, dim=x.width // n_group)

    def head_gate(self, x: Value, gate: Value) -> Value:
        """x [row, head * dim] * sigmoid(gate [row, head, dim])"""
        return self._prep("head_gate", x, gate, dim=gate.shape[-1])

    def gate_times(self, gate: Value, y: Any, act: str, n: int) -> Value:
        """act(gate) * y [row, n]; gate [row, n], or one number for as many columns each (`cpu.tensors.gate_times`)."""
        return self.op("gate_times", None, gate, y, act, shape=(n,))

    def _prep(self, op: str, x: Value, *inputs: Any, dim: int = 0) -> Value:
        return self.op(op, PrepSpec(self.eps, dim), x, *inputs, shape=(x.width,))

    def add(self, x: Value | None, y: Value) -> Value:
        """x + y; y alone if there is no x."""
        return y if x is None else self.op("add", None, x, y, shape=y.shape)

    def scaled(self, x: Value, factor: float | Weight) -> Value:
        return x if factor == 1.0 else self.op("scaled", None, x, factor, shape=x.shape)

    def side_by_side(self, *parts: Value) -> Value:
        return self.op("side_by_side", None, parts, shape=(sum(x.width for x in parts),))

    def biased(self, x: Value, bias: Weight | None, *, few: bool = False) -> Value:
        """x + a vector, if there is one. few: of few rows the product that makes x may add it (`rewrite.sums_of_few_rows`)."""
        return x if bias is None else self.op("add", "few" if few else None, x, bias, shape=x.shape)

    def split(self, x: Value, widths: Sequence[int]) -> Sequence[Value]:
        """Columns of x, side by side."""
        parts = tuple(Value((n,)) for n in widths)
        self.calls.append(OpCall("view", f".split({list(widths)}, -1)", (x,), parts))
        return parts

    def view(self, x: Value, how: str, shape: tuple[int, ...]) -> Value:
        """A view of x. how: the expression behind a tensor's name in torch."""
        return self.op("view", how, x, shape=shape)

    def flat(self, x: Value) -> Value:
        return self.view(x, ".flatten(1)", (x.width,))

    # -- products ----------------------------------------------------------------------------------------------

    def product(self, x: Value, *names: str, n_out: int) -> Value:
        """x W^T of a matrix, or of several side by side."""
        return self.product_by(Weight("matrix", names), x, n_out)

    def summed(self, x: Value, name: str, n_out: int, stream: Value | None = None) -> Value:
        """stream + x W^T of a matrix whose columns ranks divide: the sum of their products, to one of which the stream is added."""
        own = self.product(x, name, n_out=n_out)
        return self.over_ranks(self.add(stream if self.at.leads else None, own))

    def gated(self, x: Value, gate: str, up: str, act: str, n_out: int, *, limit: float = 0.0) -> Value:
        """act(x G^T) * (x U^T), the first cut at a limit and the second at plus and minus it, if there is one."""
        how = (("act", act), *([("limit", limit)] if limit else []))
        return self.product_by(Weight("gated", (gate, up), how), x, n_out)

    def situ(self, x: Value, gate: str, up: str, n_out: int, betas: tuple[float, float]) -> Value:
        """b tanh(g / b) sigmoid(g) * c tanh(u / c) of g = x G^T and u = x U^T, by betas b and c; u itself where c is not positive."""
        beta, linear = betas
        g, u = self.split(self.product(x, gate, up, n_out=2 * n_out), (n_out, n_out))
        y = self.gate_times(g, self.capped(g, beta), "sigmoid", n_out)
        return self.gate_times(y, self.capped(u, linear), "none", n_out)

    def capped(self, x: Value, cap: float) -> Value:
        """cap tanh(x / cap); x itself for a cap that is not positive."""
        return x if cap <= 0 else self.op("capped", None, x, cap, shape=x.shape)

    def over_ranks(self, x: Value) -> Value:
        """The sum of all ranks' x."""
        return x if self.at.n_rank == 1 else self.op("rank_sum", None, x, shape=x.shape)

    def heads(self, x: Value, name: str, n_out: int) -> Value:
        """x [row, head, dim] by a matrix of each head."""
        return self.op("heads", Weight("heads", (name,)), x, shape=(x.shape[0], n_out))

    def experts(self, spec: Any, x: Value, routes: Value, shared: Value | None, stacks: Weight) -> Value:
        """Rows through the experts that they chose, plus shared [row, ...] times their gates."""
        made = Value(x.shape)
        given = x, None, None, routes, shared, None  # norm, stream and prepared rows come by rules
        self.calls.append(OpCall("moe", spec, given, (made,), loads=stacks))
        return made

    def grouped(self, x: Value, name: str, n_group: int, n_out: int) -> Value:
        """Each group of a matrix's rows takes its own part of x."""
        return self.op("grouped", Weight("grouped", (name,), (("n_group", n_group),)), x, shape=(n_out,))

    def product_by(self, weight: Weight, x: Value, n_out: int) -> Value:
        return self.op("product", weight, x, None, None, shape=(n_out,))


Block = Callable[..., Value]
"""A block's function: (the calls so far, its inputs) -> its result. Those of parts take x [row, n_embd], and the stream that their output is
added to, or None."""


def traced(block: Block, at: Site, *widths: int | None) -> ForwardProgram:
    """The program of a function whose inputs have these widths; None: an input that is None."""
    f, inputs = Forward(at), [None if n is None else Value((n,)) for n in widths]
    out = block(f, *inputs)
    return ForwardProgram(tuple(x for x in inputs if x is not None), f.calls, out)
