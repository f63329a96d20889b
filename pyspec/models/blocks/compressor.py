"""Compressed rows of an attention or of its indexer: one for every `ratio` tokens, made by the last of them (op `compress`)."""

from __future__ import annotations

from dataclasses import dataclass

from pyspec.cuda.ops.compress.ref import CompressSpec
from pyspec.forward.call import Value, Weight
from pyspec.forward.trace import Forward
from pyspec.models.part import Place
from pyspec.models.wants import Want
from pyspec.slots.parts import LayerParts, Paged, Ring

# Tokens of a row: overlapping blocks, of which an indexer chooses, or plain ones, of which all count
CSA, HCA = 4, 128


@dataclass(frozen=True, slots=True)
class Compressor:
    """A compressor as data.

    name, rows, partial  its tensors, and its memory: rows, and values of tokens whose row is not complete
    ratio, dim           tokens and width of a row
    """

    name: str
    rows: str
    partial: str
    ratio: int
    dim: int

    @property
    def overlaps(self) -> bool:
        return self.ratio == CSA

    @property
    def width(self) -> int:
        """Values of a token, and as many scores."""
        return self.dim * (1 + self.overlaps)

    @property
    def products(self) -> tuple[str, str]:
        """The matrices of values and scores."""
        return f"{self.name}_kv.weight", f"{self.name}_gate.weight"

    def tensors(self, at: Place) -> dict[str, Want]:
        return {
            **{at.name(name): Want((self.width, at.n_embd)) for name in self.products},
            at.name(f"{self.name}_ape.weight"): Want((self.ratio, self.width)),
            at.name(f"{self.name}_norm.weight"): Want((self.dim,)),
        }

    def memory(self) -> LayerParts:
        ring = Ring((1 + self.overlaps) * self.ratio, {"values": (self.width,), "scores": (self.width,)})
        rows = Paged(1, self.dim, tokens_per_row=self.ratio, keys_only=True)
        return {self.rows: rows, self.partial: ring}

    def forward(self, f: Forward, products: Value, freq: Weight, n_rot: int) -> None:
        """Rows of products [row, 2 * width]: values, and scores without the bias of a token's place in its block. freq: angles of one position."""
        values, scores = f.split(products, (self.width, self.width))
        places, norm = (f.vector(f"{self.name}_{x}.weight") for x in ("ape", "norm"))
        spec = CompressSpec(f.device, self.ratio, self.dim, self.overlaps, n_rot, f.eps, f.kv.k.dtype)
        memory = f.kept(self.partial), f.kept(self.rows)
        f.op("compress", spec, values, scores, places, norm, freq, *memory, f.batch, shape=())
