"""Lowering: a block's program becomes one plain function over its launches and weights, which every device runs.

The function is written as text, one line a call, and compiled. Blocks of one form share the compiled text. A value ends with the
line that reads it last, so its memory serves the next calls. Called on batches it runs eagerly; CUDA graphs capture it, and recordings of a CPU take its
calls (`cuda/graph.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cpu.tensors import add, capped, gate_times, scaled, side_by_side, times_rows, write_keys
from pyspec.cuda import fuse
from pyspec.cuda.ops.moe.ref import Routes
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.cuda.ops.rows.ref import RELU2, GroupNorm, HeadGate, HeadNorm, Prep, head_power, norm_power
from pyspec.forward import rewrite
from pyspec.forward.call import ForwardProgram, OpCall, RunInput, Value, Weight
from pyspec.slots.batch import Batch


def choose(choices: list[Batch], places: Batch) -> None:
    """The last choice is the only one that is kept."""
    choices[:] = [places]


def keep_row(kept: list[Tensor], x: Tensor) -> None:
    kept.append(x)


def weighed(x: Tensor, routes: Routes) -> Tensor:
    """Rows x [row, n] times the weight of each of their experts [row * n_used, n]."""
    n_used = routes.ids.shape[1]
    every = x if n_used == 1 else side_by_side((x,) * n_used)
    return times_rows(every.view(-1, 1, x.shape[1]), routes.weights)[:, 0]


def unweighed(routes: Routes) -> Routes:
    """The same experts, one for each of these rows, with a weight of one; not a number where it was none."""
    weights = routes.weights.view(-1, 1)
    one = torch.ones_like(weights) if weights.is_cuda else ONE
    return replace(routes, ids=routes.ids.view(-1, 1), weights=add(scaled(weights, 0.0), one))


def one_expert(x: Tensor) -> Routes:
    """All rows take one expert as it is."""
    return Routes(x.new_zeros((len(x), 1), dtype=torch.int32), x.new_ones((len(x), 1)))


def of_choices(y: Tensor, n_used: int) -> Tensor:
    """Sums of y [row * n_used, n], in the order of choice."""
    n, every = y.shape[1], y.view(-1, n_used * y.shape[1])
    total = every[:, :n]
    for i in range(1, n_used):
        total = add(total, every[:, i * n : (i + 1) * n])
    return total


def of_values(y: Tensor, routes: Routes) -> Tensor:
    """Sums of silu(y) [row, expert, n] of the experts that rows chose, times their weights, in the order of choice."""
    ids = routes.ids.long()[..., None].expand(-1, -1, y.shape[-1])
    own = F.silu(y.gather(1, ids)) * routes.weights[..., None]
    total = own[:, 0]
    for i in range(1, own.shape[1]):
        total = total + own[:, i]
    return total


ONE = torch.ones(1)
_OF_ROWS = add, side_by_side, times_rows, gate_times, capped, scaled, HeadNorm, HeadGate, GroupNorm
_OF_EXPERTS = weighed, unweighed, one_expert, of_choices, of_values
_JOINED = fuse.then, fuse.handed, fuse.attended, fuse.keys_room, fuse.put_keys
HELPERS: dict[str, Any] = {
    one.__name__: one for one in (*_OF_ROWS, *_OF_EXPERTS, *_JOINED, write_keys, choose, keep_row)
}


def few_biased(
    product: Callable[..., Tensor], bias: Tensor, few: Tensor, x: Tensor, prep: Prep | None
) -> Tensor:
    """product(prep(x)) + bias. few: the biases repeated for some rows."""
    if x.shape[0] <= len(few):
        return product(x, prep, few[: x.shape[0]])
    return add(product(x, prep), bias)


class ProgramText:
    """The text of a program's function, and the objects that it names."""

    def __init__(self, program: ForwardProgram, sources: rewrite.Launches) -> None:
        self.sources = sources
        self.names: dict[int, str] = {}
        self.objects: dict[str, Any] = dict(HELPERS)
        self.given: dict[RunInput, str] = {}
        self.lines: list[str] = []
        inputs = ", ".join(self._named(v) for v in program.inputs)
        last = {id(v): i for i, call in enumerate(program.calls) for v in call.reads()}
        for i, call in enumerate(program.calls):
            self._line(call)
            ends = [v for v in {id(v): v for v in call.reads()}.values() if last[id(v)] == i]
            ends += [v for v in call.outputs if id(v) not in last and v is not program.output]
            gone = [self.names[id(v)] for v in ends if v not in program.inputs]
            if gone:
                self.lines.append(f"del {', '.join(gone)}")
        self.lines.append(f"return {self.names[id(program.output)]}")
        self.text = f"def forward({inputs}, run):\n " + "\n ".join(self.lines)

    def function(self) -> Callable[..., Tensor]:
        exec(_compiled(self.text), self.objects)
        made: Callable[..., Tensor] = self.objects["forward"]
        return made

    def _named(self, value: Value) -> str:
        return self.names.setdefault(id(value), f"v{len(self.names)}")

    def _object(self, x: Any) -> str:
        name = f"c{len(self.objects)}"
        self.objects[name] = x
        return name

    def _line(self, call: OpCall) -> None:
        text = self._call(call)
        made = ", ".join(map(self._named, call.outputs))
        self.lines.append(f"{made} = {text}" if made else text)

    def _arg(self, x: Any) -> str:
        if isinstance(x, Value):
            return self.names[id(x)]
        if isinstance(x, OpCall):
            return self._prep(x) if x.op in rewrite.PREPARES else self._launch(x)
        if isinstance(x, RunInput):
            return self._given(x)
        if isinstance(x, tuple):
            return f"({''.join(f'{self._arg(one)}, ' for one in x)})"
        if x is None or isinstance(x, int | float | bool):
            return repr(x)
        return self._object(self.sources.weight(x) if isinstance(x, Weight) else x)

    def _launch(self, call: OpCall) -> str:
        """A call that its reader makes: the launch, its arguments, and those by name."""
        runs = self._object(self.sources.launch(call.op, call.spec))
        more = ", ".join(f"{name!r}: {self._arg(x)}" for name, x in call.more.items())
        return f"({runs}, {self._arg(call.inputs)}, {{{more}}})"

    def _given(self, x: RunInput) -> str:
        if x not in self.given:
            self.given[x] = f"g{len(self.given)}"
            self.lines.append(f"{self.given[x]} = {self.sources.given(x)}")
        return self.given[x]

    def _args(self, call: OpCall) -> str:
        more = [f"{name}={self._arg(x)}" for name, x in call.more.items()]
        return ", ".join([*map(self._arg, call.inputs), *more])

    def _call(self, call: OpCall) -> str:
        if call.op == "view":
            return f"{self._arg(call.inputs[0])}{call.spec}"
        if call.op in rewrite.PREPARES:
            if call.op == "norm":
                spec = NormsSpec(self.sources.device, call.output.width, call.spec.eps)
                return f"{self._object(self.sources.launch('norms', spec))}({self._args(call)})"
            return f"{self._prep(call)}({self._arg(call.inputs[0])})"
        if call.op == "biased":
            matrix, (x, prep, bias) = self.sources.weight(call.spec), call.inputs
            few = self.sources.few(bias)
            assert few is not None, "asked by the rule"
            both = partial(few_biased, matrix, self.sources.weight(bias), few)
            return f"{self._object(both)}({self._arg(x)}, {self._arg(prep)})"
        if call.op in ("product", "unfinished"):
            matrix = self._object(self.sources.weight(call.spec))
            x, prep, residual = map(self._arg, call.inputs)
            if call.op == "unfinished":
                return f"{matrix}.unfinished({x}, {prep})"
            more = [] if residual == "None" else [residual]
            more += [f"{name}={self._arg(x)}" for name, x in call.more.items()]
            return f"{matrix}({', '.join([x, prep, *more])})"
        if call.op == "then":
            launch, prep, residual = call.inputs
            runs = self._object(self.sources.launch(launch.op, launch.spec))
            given = self._arg(launch.inputs)
            matrix = self._object(self.sources.weight(call.spec))
            return f"then({runs}, {given}, {matrix}, {self._arg(prep)}, {self._arg(residual)})"
        if call.op == "handed":
            x, prep, residual, hands, next = map(self._arg, call.inputs)
            first = self._object(self.sources.weight(call.spec))
            return f"handed({hands}, {first}, {next}, {x}, {prep}, {residual})"
        if call.op == "both":
            return f"{self._object(call.spec)}({self._args(call)})"
        if call.op in HELPERS:
            return f"{call.op}({self._args(call)})"
        if isinstance(call.spec, Weight):
            return f"{self._object(self.sources.weight(call.spec))}({self._args(call)})"
        return f"{self._object(self.sources.runs(call))}({self._args(call)})"

    def _prep(self, call: OpCall) -> str:
        """The expression of a preparation of rows."""
        eps, (_, *given) = call.spec.eps, call.inputs
        if call.op == "norm":
            return self._object(self.sources.norm(given[0], eps))
        if call.op == "relu2":
            return self._object(RELU2)
        if call.op == "head_gate":
            return f"HeadGate({self._arg(given[0])})"
        weight = self.sources.weight(given[0])
        args = f"{self._object(weight)}, {eps!r}, {self._arg(given[1])}"
        if call.op == "head_norm":
            return f"HeadNorm({args}, {head_power(weight)!r})"
        return f"GroupNorm({args}, {given[2]}, {norm_power(weight)!r})"


@cache
def _compiled(text: str) -> CodeType:
    return compile(text, "<forward of a block>", "exec")
