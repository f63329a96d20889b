"""Where a load has its feed-forwards and tables: on the card, in the host's memory, or experts in both."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """What is not on the card alone: feed-forwards by the prefix of their block (blk.N), tables by name.

    experts  (prefix, slots): all of the block's routed experts are in the host's memory, and so many have a slot on the card; 0: none has
    dense    blocks whose feed-forward without experts the host computes
    tables   those of `wants.TABLES` whose rows kernels read where they lie, in the host's memory
    """

    experts: tuple[tuple[str, int], ...] = ()
    dense: frozenset[str] = frozenset()
    tables: tuple[str, ...] = ()

    def slots(self, prefix: str) -> int | None:
        """Slots of the block's experts on the card; None: all of them stay there, and the host has no copy."""
        return dict(self.experts).get(prefix)


ON_CARD = Placement()
HITS = {"uniform": 1, "modest": 3, "hot": 6}
"""Routing -> e: with a share s of the experts on the card, 1 - (1 - s)^e of the chosen ones are there."""


@dataclass(frozen=True, slots=True)
class Swap:
    """A slot on the card gets another expert. Experts are told by keys: numbers of pairs of layer and expert, layer by layer.

    leaves  the expert that has the slot until then
    """

    layer: int
    slot: int
    key: int
    leaves: int
