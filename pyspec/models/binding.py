"""Where a part is bound to its weights, and what a forward brings to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from pyspec.cuda.op import op_named
from pyspec.forward.trace import Site
from pyspec.gguf import GGMLType
from pyspec.models.part import LoadTypes, Place
from pyspec.models.ropes import Angles, Ropes
from pyspec.models.weights import Weights
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.memory import Memory


class Tables:
    """Tables [token, n] of one shape that parts look up in every forward. A part keeps its table's place here, and a forward looks all up at once, because each gather between
    kernels that begin before the one before them is over would cost five microseconds."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._all: Tensor | None = None

    def place(self, table: Tensor) -> int:
        """Where a forward's rows have those of `table`."""
        self._parts.append(table)
        return len(self._parts) - 1

    def close(self) -> None:
        """No more are coming."""
        self._all = torch.stack(self._parts) if self._parts else None
        self._parts = []

    def rows(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Of tokens [row]."""
        return () if self._all is None else self._all[:, tokens].unbind()


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding(Site):
    """Where a part is bound. tables: of a model whose forward looks them up"""

    weights: Weights
    ropes: Ropes
    tables: Tables

    def has(self, tensor: str) -> bool:
        return self.weights.has(self.name(tensor))

    def type_of(self, tensor: str) -> GGMLType:
        return self.weights.type_of(self.name(tensor))

    def takes(self, op: str, spec: Any) -> bool:
        return op_named(op).has_own(spec)


def bound_at(
    w: Weights,
    prefix: str,
    layer: int,
    n_embd: int,
    eps: float,
    kv: KvFormat,
    ropes: Ropes,
    tables: Tables | None = None,
    norm: str = "",
) -> Binding:
    """prefix: of its tensors; "": a part of the model itself."""
    on = LoadTypes(w.device, kv, w.dense, w.rope, w.n_rank, w.placement)
    site = on.site(Place(w.file, prefix, n_embd, eps), norm)
    own = {each.name: getattr(site, each.name) for each in fields(site)}
    own |= {"layer": layer, "leads": w.ranks is None or w.ranks.rank.leads}
    return Binding(**own, weights=w, ropes=ropes, tables=tables or Tables())


@dataclass(frozen=True, slots=True)
class Pass:
    """Arguments of every part of a forward, besides the residual stream. angles: of the model's ropes, by their places; rows: of its
    tables, likewise; queries: of ropes with a temperature, likewise (`Ropes.queries`); inputs: of each block [row, layer, n]
    (`per_layer.py`); rings: the batch as rings of each size hold it (`decoder.Ringed`); near: as blocks with a window see it; None: as all do;
    choices: the keys that an indexer chose last, as a batch; kept_rows: of the stream (`bank.Bank`)."""

    angles: tuple[Angles, ...]
    memory: Memory
    batch: Batch
    rows: tuple[Tensor, ...] = ()
    queries: tuple[Tensor | None, ...] = ()
    inputs: Tensor | None = None
    rings: Mapping[int, Batch] = field(default_factory=dict)
    near: Batch | None = None
    choices: list[Batch] = field(default_factory=list)
    kept_rows: list[Tensor] = field(default_factory=list)

    def placed(self, pool: KVPool, is_near: bool = False) -> Batch:
        """The batch with the rows and pages that it has in this pool, as a block with a window sees it or one without."""
        if pool.n_ring:
            return self.rings[pool.n_ring]
        return self.near if is_near and self.near is not None else self.batch
