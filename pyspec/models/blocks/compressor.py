"""Compressed rows of an attention or of its indexer: one for every `ratio` tokens, made by the last of them (op `compress`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor

from pyspec.cuda.ops.compress.op import compress
from pyspec.cuda.ops.compress.ref import CompressSpec
from pyspec.models.binding import Binding
from pyspec.models.part import Place
from pyspec.models.wants import Want
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KVPool
from pyspec.slots.parts import LayerParts, Paged, PartMemory, Ring
from pyspec.slots.ring import RingRows

CSA, HCA = (
    4,
    128,
)  # tokens of a row: overlapping blocks, of which an indexer chooses, or plain ones, of which all count


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


class BoundCompressor:
    """A compressor bound to its weights. freq [n_rot / 2] f64: angles of one position."""

    def __init__(self, spec: Compressor, at: Binding, freq: Tensor) -> None:
        w = at.weights
        self.spec, self.freq = spec, freq
        self.places, self.norm = (w.vector(at.name(f"{spec.name}_{x}.weight")) for x in ("ape", "norm"))
        bound = CompressSpec(
            w.device, spec.ratio, spec.dim, spec.overlaps, 2 * len(freq), at.eps, at.kv.k.dtype
        )
        self.compress, self.capturable = compress.bind(bound), compress.chosen(bound).capturable

    def __call__(
        self, products: Tensor, parts: dict[str, PartMemory], batch: Batch, beside: dict[str, bool]
    ) -> None:
        """products [row, 2 * width] f32: values, and scores without the bias of a token's place in its block. beside: further arguments
        of the op."""
        values, scores, places, norm, ring, pool = self.given(products, parts)
        self.compress(values, scores, places, norm, self.freq, ring, pool, batch, **beside)

    def given(
        self, products: Tensor, parts: dict[str, PartMemory]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, RingRows, KVPool]:
        """Arguments of the op, except angles and the batch. parts: the layer's memory."""
        values, scores = products.split(self.spec.width, -1)
        ring, pool = cast(RingRows, parts[self.spec.partial]), cast(KVPool, parts[self.spec.rows])
        return values, scores, self.places, self.norm, ring, pool
