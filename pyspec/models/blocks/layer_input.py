"""A part that lets a block's own input of each token (`per_layer.py`) into the stream: proj(gelu(gate x) * input)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from pyspec.cpu.tensors import add, gelu_times
from pyspec.models.part import Binding, LoadTypes, Pass, Place, Request
from pyspec.models.per_layer import rows_of
from pyspec.models.wants import Want
from pyspec.slots.parts import LayerParts


@dataclass(frozen=True, slots=True)
class LayerInput:
    """Of block `layer`, which has `n` numbers a token. It reads the stream as it is."""

    layer: int
    n: int
    captures_prompts = True
    attends = scratch = None

    def tensors(self, at: Place) -> dict[str, Want]:
        return {
            at.name("inp_gate.weight"): Want((self.n, at.n_embd)),
            at.name("proj.weight"): Want((at.n_embd, self.n)),
        }

    def memory(self) -> LayerParts:
        return {}

    def share(self, n: int) -> LayerInput:
        """All of it: it is small."""
        return self

    def requests(self, at: Place, on: LoadTypes) -> Iterator[Request]:
        yield from ()

    def bind(self, at: Binding) -> BoundLayerInput:
        return BoundLayerInput(self.layer, at)


class BoundLayerInput:
    """Bound to its matrices."""

    capturable = captures_prompts = True
    reads = gives = fold = None

    def __init__(self, layer: int, at: Binding) -> None:
        self.layer = layer
        self.gate, self.proj = (at.weights.matrix(at.name(f"{x}.weight")) for x in ("inp_gate", "proj"))

    def __call__(self, x: Tensor, residual: Tensor | None, run: Pass) -> Tensor:
        y = self.proj(gelu_times(self.gate(x), rows_of(run.inputs, self.layer)))
        return y if residual is None else add(residual, y)
