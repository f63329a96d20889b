"""A part that lets a block's own input of each token (`per_layer.py`) into the stream: proj(gelu(gate x) * input)."""

from __future__ import annotations

from dataclasses import dataclass

from pyspec.forward.call import RunInput, Value
from pyspec.forward.trace import Forward
from pyspec.models.part import Place, Plain
from pyspec.models.wants import Want
from pyspec.slots.parts import LayerParts


@dataclass(frozen=True, slots=True)
class LayerInput(Plain):
    """Of block `layer`, which has `n` numbers a token. It reads the stream as it is."""

    layer: int
    n: int

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

    def forward(self, f: Forward, x: Value, stream: Value | None) -> Value:
        gate = f.product(x, "inp_gate.weight", n_out=self.n)
        y = f.gate_times(gate, RunInput("inputs", self.layer), "gelu", self.n)
        return f.add(stream, f.product(y, "proj.weight", n_out=x.width))
