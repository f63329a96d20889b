"""Rows of a table by n-grams of token ids, added to several residual streams before a block (op `ngrams`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyspec.cuda.ops.ngrams.ref import IDS, INPUTS, NgramsSpec
from pyspec.forward.call import Value, Weight
from pyspec.forward.trace import Forward
from pyspec.models.part import Place, Plain
from pyspec.models.wants import TOKEN_INPUTS, Want
from pyspec.slots.parts import LayerParts, Ring

NGRAMS = "ngrams"  # name of the ring
NORMS = tuple(f"ple_norm_{x}.weight" for x in ("key", "query", "conv"))
CPU = torch.device("cpu")  # of data


@dataclass(frozen=True, slots=True)
class NgramRows(Plain):
    """The part as data. spec: without a device and an eps; n_row: rows of the table."""

    spec: NgramsSpec
    n_row: int

    @property
    def _wide(self) -> int:
        return self.spec.n_stream * self.spec.n

    def tensors(self, at: Place) -> dict[str, Want]:
        n, wide = self.spec.n, self._wide
        return {
            at.name(TOKEN_INPUTS): Want((self.n_row, n // self.spec.n_head)),
            at.name("ple_key.weight"): Want((wide, n)),
            at.name("ple_value.weight"): Want((n, n)),
            **{at.name(name): Want((wide,)) for name in NORMS},
            at.name("ple_conv1d.weight"): Want((wide, self.spec.n_tap)),
        }

    def memory(self) -> LayerParts:
        return {NGRAMS: Ring(self.spec.window, {IDS: (1,), INPUTS: (self._wide,)})}

    def share(self, n: int) -> NgramRows:
        """All of it: streams are whole on every rank."""
        return self

    def forward(self, f: Forward, x: Value, stream: Value | None) -> Value:
        """The streams behind it."""
        s, n = replace(self.spec, device=f.device, eps=f.eps), self.spec.n
        ring, batch = f.kept(NGRAMS), f.batch
        places = f.op("ngrams.rows", s, ring, batch, shape=(2 * s.n_head,))
        e = f.op("embedding", Weight("embedding", (TOKEN_INPUTS,)), places, shape=(n,))
        e = f.view(e, f".view(-1, {n})", (n,))
        made = f.product(e, "ple_key.weight", "ple_value.weight", n_out=self._wide + n)
        norms = f.read(_vectors, *NORMS)
        taps = f.vector("ple_conv1d.weight")
        return f.op("ngrams.mixed", s, x, made, norms, taps, ring, batch, shape=x.shape)


def _vectors(w: Any, *names: str) -> tuple[Tensor, ...]:
    return tuple(w.vector(name) for name in names)
