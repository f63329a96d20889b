"""The contract of a block's parts: frozen data that says everything about itself, and the part bound to weights.

A part is a mixer (attention, a recurrence) or a feed-forward. Its data gives its tensors, the memory of a slot, a rank's share, the
kernels that binding will ask for, and the bound part. Plans and drafters are folds over this; none of them knows which parts exist.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch

from pyspec.forward.call import Folding, Value
from pyspec.forward.trace import Forward, Site
from pyspec.forward.trace import Place as Place
from pyspec.models.cuts import KeyGroups
from pyspec.models.placement import ON_CARD, Placement
from pyspec.models.rope import NO_FLAGS, RopeFlags
from pyspec.models.wants import Want
from pyspec.slots.kv_types import KvFormat
from pyspec.slots.parts import LayerParts

Request = tuple[Any, Any]
"""An op and the spec that it is bound with."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of an attention.

    gated  the q projection emits [query | gate] per head; the output is multiplied by sigmoid(gate)
    scale  of scores; None: 1/sqrt(head_dim)
    n_value  keys are the values, too: that many of their first dims; 0: values stand apart
    """

    n_head: int
    n_kv_head: int
    head_dim: int
    gated: bool = False
    scale: float | None = None
    n_value: int = 0

    def share(self, n: int) -> AttentionShape:
        """Of each of `n` ranks (`KeyGroups`): several have the same key head where there are fewer than ranks, and heads of zeros where
        they do not divide."""
        n_key, n_reader = self.groups.places(n)
        return replace(self, n_head=n_key * n_reader, n_kv_head=n_key)

    @property
    def groups(self) -> KeyGroups:
        """Its key heads and their queries."""
        return KeyGroups(self.n_kv_head, self.n_head // self.n_kv_head)


@dataclass(frozen=True, slots=True)
class LoadTypes:
    """Choices of a load that kernels depend on.

    kv     types of keys and values
    dense  dtype that matrices are unpacked to; None: they stay packed
    flags  what changes the model's ropes
    placement  the feed-forwards that are not on the card alone
    """

    device: torch.device
    kv: KvFormat
    dense: torch.dtype | None
    flags: RopeFlags = NO_FLAGS
    n_rank: int = 1
    placement: Placement = ON_CARD

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def streams(self) -> bool:
        """True if kernels read packed matrices, and prepare rows for them."""
        return self.is_cuda and self.dense is None

    def site(self, at: Place, norm: str = "") -> Site:
        """A place of the load, before weights are read."""
        given = at.file, at.prefix, at.n_embd, at.eps, self.device, self.kv, self.flags, self.n_rank
        return Site(*given, self.dense, self.placement, norm=norm)


class PartSpec(Protocol):
    """A mixer or a feed-forward as data.

    attends  shape of its attention, whose partial sums need room; None: it has none
    folds    the op that keeps records of slots, and the reference of folding them; None: it has no recurrence
    """

    @property
    def attends(self) -> AttentionShape | None: ...
    @property
    def folds(self) -> Folding | None: ...

    def tensors(self, at: Place) -> dict[str, Want]:
        """The tensors it needs, without its norms."""
        ...

    def memory(self) -> LayerParts:
        """Its memory for the slots."""
        ...

    def share(self, n: int) -> Self:
        """The part of each of `n` ranks."""
        ...

    def of_file(self, at: Place) -> Self:
        """The part with the sizes of blocks in this file, if its shares depend on them: numbers of quantised types stand in blocks along rows."""
        ...

    def forward(self, f: Forward, x: Value, stream: Value | None) -> Value:
        """stream + part(norm(x)) of x [row, n_embd]; without a stream part(norm(x)) alone."""
        ...


class Plain:
    """What most parts say: they have no recurrence, no attention and no memory, and shares do not depend on types."""

    __slots__ = ()

    @property
    def attends(self) -> AttentionShape | None:
        return None

    @property
    def folds(self) -> Folding | None:
        return None

    def memory(self) -> LayerParts:
        return {}

    def of_file(self, at: Place) -> Self:
        return self


def column_block(at: Place, tensor: str) -> int:
    """Columns of a block of a tensor's type; 1: it has no blocks, or the file has no such tensor."""
    info = at.file.tensors.get(at.name(tensor))
    return 1 if info is None else info.type.block_size
