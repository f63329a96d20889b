"""Which experts stay on the card, by recent use: decayed counts, and the swaps that pay. Arithmetic only: no torch, and no clock.

A key is the number of a pair of layer and expert, layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pyspec.models.placement import Swap

HALF_LIFE = 32.0  # rounds until a use counts half
OF_PROMPTS = 1 / 16  # of a use by rows of a prompt
MOST_UNIT = 1e30  # then counts are put in proportion again

Keys = NDArray[np.int64]


class UseCounts:
    """Uses of each pair, of which older ones count less. A round costs as much as the pairs that it used."""

    def __init__(self, n_pair: int, half_life: float = HALF_LIFE) -> None:
        self._counts, self._unit = np.zeros(n_pair), 1.0
        self._growth = 2.0 ** (1.0 / half_life)

    def add(self, keys: Keys, of_prompts: Keys | None = None) -> None:
        """A round has used these pairs, each key once."""
        self._unit *= self._growth
        if self._unit > MOST_UNIT:
            self._counts /= self._unit
            self._unit = 1.0
        self._counts[keys] += self._unit
        if of_prompts is not None:
            self._counts[of_prompts] += OF_PROMPTS * self._unit

    def __getitem__(self, keys: Keys) -> NDArray[np.float64]:
        """Of these pairs, in rounds of full weight."""
        found: NDArray[np.float64] = self._counts[keys] / self._unit
        return found

    def known(self) -> list[float]:
        return [round(count, 2) for count in (self._counts / self._unit).tolist()]

    def recall(self, counts: Sequence[float]) -> None:
        """Begin with these. Raises ValueError if they are not of these pairs, or can not be."""
        found = np.array(counts, np.float64)
        most = 1.0 / (1.0 - 1.0 / self._growth)
        if found.shape != self._counts.shape or not ((found >= 0) & (found <= 2 * most)).all():
            raise ValueError("counts of experts can not be")
        self._counts, self._unit = found, 1.0


@dataclass(slots=True)
class Residents:
    """The pairs on the card.

    firsts  [layer + 1] int64: the first key of each layer; the last one is the number of all
    slots   by layer [slot] int64: the key in each slot
    bytes   of an expert's way to the card, by layer
    """

    firsts: Keys
    slots: list[Keys]
    bytes: Sequence[int]
    there: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.there = np.zeros(int(self.firsts[-1]), np.bool_)
        for own in self.slots:
            self.there[own] = True

    def layers_of(self, keys: Keys) -> Keys:
        return np.searchsorted(self.firsts, keys, "right") - 1

    def put(self, swap: Swap) -> None:
        """The slot has its new expert."""
        self.slots[swap.layer][swap.slot] = swap.key
        self.there[swap.leaves], self.there[swap.key] = False, True


def swaps(residents: Residents, counts: UseCounts, missed: Keys, room: int, pays: float) -> list[Swap]:
    """The best exchanges of missed pairs, each for the resident of its layer that is used least.

    missed  keys, each once
    room    bytes that may come to the card now
    pays    uses more than the one that leaves, from which on an exchange saves more time than it takes
    """
    layers, wanted, found = residents.layers_of(missed), counts[missed], list[Swap]()
    ordered: dict[int, list[int]] = {}  # by layer, its slots, those that are used least first
    gone: dict[int, int] = {}
    if room < min(residents.bytes, default=room + 1):
        return found
    for at in np.argsort(-wanted, kind="stable").tolist():
        if wanted[at] <= pays:
            break
        key, layer = int(missed[at]), int(layers[at])
        own, n_byte = residents.slots[layer], residents.bytes[layer]
        if residents.there[key] or n_byte > room or not len(own):
            continue
        if layer not in ordered:
            ordered[layer] = np.argsort(counts[own], kind="stable").tolist()
        if (n := gone.get(layer, 0)) == len(own):
            continue
        slot = ordered[layer][n]
        leaves = int(own[slot])
        if wanted[at] - float(counts[own[slot : slot + 1]][0]) <= pays:
            continue
        gone[layer], room = n + 1, room - n_byte
        found.append(Swap(layer, slot, key, leaves))
    return found
