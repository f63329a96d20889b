"""Which experts in the host's memory a forward used: `moe` writes them into a log on the card, which is copied in the order of the stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertUse:
    """Pairs of layer and expert that a forward used, of layers whose experts are in the host's memory; each counts once, however many rows use it.

    hits, misses          of the target: with a place on the card, and computed by the host
    row_hits, row_misses  by sequence of the batch and row in it: the target's, without those that an earlier row of the sequence used
    keys, is_miss         of rows that decode, the drafter's too: numbers of pairs, layer by layer, and whether the host computed them
    prompts               numbers of the pairs that rows of prompts used
    """

    hits: int
    misses: int
    row_hits: tuple[tuple[int, ...], ...]
    row_misses: tuple[tuple[int, ...], ...]
    keys: NDArray[np.int64] = field(repr=False)
    is_miss: NDArray[np.bool_] = field(repr=False)
    prompts: NDArray[np.int64] = field(repr=False)


Layer = Any
"""A `HostExperts` of `moe`: named so, because a loop need not know kernels."""


class ExpertLog:
    """The log of a model's layers and of its drafter's, in this order.

    firsts  [layer + 1] int64: the number of each layer's first expert; the last one is the number of all
    """

    def __init__(self, layers: Sequence[Layer], n_own: int) -> None:
        """n_own: layers of the target."""
        self.layers, widths = list(layers), [layer.spec.n_used for layer in layers]
        self.device, self._most = layers[0].device, layers[0].most_rows
        self.firsts = np.cumsum([0, *(layer.n_expert for layer in layers)], dtype=np.int64)
        self._n_own, self._n_own_pair, ends = (
            sum(widths[:n_own]),
            int(self.firsts[n_own]),
            np.cumsum(widths),
        )
        self._marks = np.zeros(int(self.firsts[-1]), np.int8)
        self._first_of = np.repeat(self.firsts[:-1], widths)
        with torch.inference_mode(False):
            self.log = torch.full((self._most, sum(widths)), -1, dtype=torch.int16, device=self.device)
        for layer, width, end in zip(layers, widths, ends.tolist(), strict=True):
            layer.used = self.log[:, end - width : end]

    @classmethod
    def of(cls, own: Sequence[Layer], drafters: Sequence[Layer]) -> ExpertLog | None:
        """None: no expert is in the host's memory. A feed-forward that all rows take is none."""
        own, drafters = ([layer for layer in of if layer.n_expert > 1] for of in (own, drafters))
        return cls([*own, *drafters], len(own)) if own or drafters else None

    def copy(self, n_row: int, n_run: int) -> Tensor | None:
        """Start the copy of a forward's rows, [n_row, n_wide] int16 on the host, and forget them on the card. None for more than are logged.

        n_run: its rows with those that fill it up. Of several passes of a drafter the last one is there."""
        own = self.log[:n_row]
        if n_run > self._most:
            self.log.fill_(-1)
            return None
        here = torch.empty(own.shape, dtype=own.dtype, pin_memory=own.is_cuda)
        here.copy_(own, non_blocking=True)
        self.log.fill_(-1)
        return here

    def used(self, log: Tensor | None, starts: Sequence[int], n_decoding: int) -> ExpertUse | None:
        """Of a forward that is over. starts: first rows of its sequences, and the number of rows; n_decoding: the first sequences, which read
        no prompts."""
        if log is None:
            return None
        found, first = log.numpy(), np.asarray(starts)
        miss, is_any = found < -1, found != -1
        keys = self._first_of + np.where(miss, -2 - found, found)
        own, widths = slice(0, self._n_own), np.diff(first)
        seen = np.zeros((len(widths), self._n_own_pair), np.bool_)
        counts = np.zeros((2, len(found)), np.int64)
        for j in range(
            int(widths.max(initial=0))
        ):  # a row of each sequence at a time: its experts differ
            seqs = np.flatnonzero(widths > j)
            rows = first[seqs] + j
            is_new = is_any[rows, own].copy()
            seq, column = np.nonzero(is_new)
            at = seqs[seq], keys[rows[seq], column]
            is_new[seq, column] = ~seen[at]
            seen[at] = True
            counts[1, rows] = (is_new & miss[rows, own]).sum(-1)
            counts[0, rows] = is_new.sum(-1) - counts[1, rows]
        pairs, is_miss = self._distinct(keys[:, own][is_any[:, own]], miss[:, own][is_any[:, own]])
        n_miss = int(is_miss.sum())
        hits, misses = (tuple(tuple(of[a:b].tolist()) for a, b in pairwise(starts)) for of in counts)
        decodes = np.zeros(found.shape, np.bool_)
        decodes[: first[n_decoding], own] = True
        decodes[:, self._n_own :] = n_decoding == len(widths)
        decoding = self._distinct(keys[is_any & decodes], miss[is_any & decodes])
        prompts, _ = self._distinct(keys[is_any & ~decodes], miss[is_any & ~decodes])
        return ExpertUse(len(pairs) - n_miss, n_miss, hits, misses, *decoding, prompts)

    def _distinct(
        self, keys: NDArray[np.int64], is_miss: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Each key once, and whether it is missed, in order."""
        self._marks[keys] = 1 + is_miss
        found = np.flatnonzero(self._marks)
        marks = self._marks[found] > 1
        self._marks[found] = 0
        return found, marks
