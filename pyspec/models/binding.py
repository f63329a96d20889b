"""Where a part is bound to its weights, and what a forward brings to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pyspec.cuda.op import op_named
from pyspec.gguf import GGMLType, GGUFFile
from pyspec.models.rope import RopeFlags
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


@dataclass(frozen=True, slots=True)
class Binding:
    """Where a part is bound.

    prefix  of its tensors; "": a part of the model itself
    layer  the number of its memory
    norm   GGUF name of the norm before it, without prefix and ending; "": rows come normed, where a part takes such
    kv     types of keys and values
    tables  of a model whose forward looks them up
    """

    weights: Weights
    prefix: str
    layer: int
    norm: str
    n_embd: int
    eps: float
    kv: KvFormat
    ropes: Ropes
    tables: Tables = field(default_factory=Tables)

    @property
    def device(self) -> torch.device:
        return self.weights.device

    @property
    def flags(self) -> RopeFlags:
        """What changes the model's ropes."""
        return self.weights.rope

    @property
    def n_rank(self) -> int:
        return self.weights.n_rank

    @property
    def file(self) -> GGUFFile:
        return self.weights.file

    @property
    def leads(self) -> bool:
        return self.weights.ranks is None or self.weights.ranks.rank.leads

    @property
    def dense(self) -> torch.dtype | None:
        return self.weights.dense

    @property
    def streams(self) -> bool:
        return self.device.type == "cuda" and self.dense is None

    def name(self, tensor: str) -> str:
        return f"{self.prefix}.{tensor}" if self.prefix else tensor

    def has(self, tensor: str) -> bool:
        return self.weights.has(self.name(tensor))

    def type_of(self, tensor: str) -> GGMLType:
        return self.weights.type_of(self.name(tensor))

    def takes(self, op: str, spec: Any) -> bool:
        return op_named(op).has_own(spec)

    def behind(self, norm: str) -> Binding:
        return replace(self, norm=norm)


@dataclass(frozen=True, slots=True)
class Pass:
    """Arguments of every part of a forward, besides the residual stream. angles: of the model's ropes, by their places; rows: of its
    tables, likewise; queries: of ropes with a temperature, likewise (`Ropes.queries`); inputs: of each block [row, layer, n]
    (`per_layer.py`); rings: the batch as rings of each size hold it (`decoder.Ringed`)."""

    angles: tuple[Angles, ...]
    memory: Memory
    batch: Batch
    rows: tuple[Tensor, ...] = ()
    queries: tuple[Tensor | None, ...] = ()
    inputs: Tensor | None = None
    rings: Mapping[int, Batch] = field(default_factory=dict)

    def placed(self, pool: KVPool) -> Batch:
        """The batch with the rows and pages that it has in this pool."""
        return self.rings[pool.n_ring] if pool.n_ring else self.batch
