"""Drafts as a round asks for them, as a drafter gives them, and as they go on to the target's verdict.

Tokens are ids of the target's vocabulary. A drafter with a vocabulary of its own maps them, and `q`, before they leave it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from pyspec.slots.table import Slot


@dataclass(frozen=True, slots=True)
class DraftDraw:
    """How the drafts of one slot are drawn from the drafter's distribution.

    top_k    0: all tokens
    noise    number in [0, 1) of the race of each draft (`slots.race`)
    keeps_q  the verdict needs the probabilities that they were drawn by
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    noise: Sequence[float]
    keeps_q: bool = False


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Draft at most `n_draft` tokens after `anchor`, the slot's last sampled token (position slot.n_past).

    tells  with the probability of each, where the drafter can
    draw   None: the most likely tokens
    """

    slot: Slot
    anchor: int
    n_draft: int
    tells: bool = False
    draw: DraftDraw | None = None


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of one slot in a round.

    tokens  ids of the target's vocabulary, on the host
    q       [n, n_vocab] f32 probabilities that the first n tokens were drawn by, on the drafter's device and never
            overwritten; tokens behind them were not drawn. None: each token is the drafter's most likely one
    source  "" for the drafter, "grammar" or "suffix"
    sure    the drafter's probability of each of the first tokens, on the host; None: it does not tell
    """

    tokens: Sequence[int] = ()
    q: Tensor | None = None
    source: str = ""
    sure: Sequence[float] | None = None

    def first(self, n: int) -> Drafts:
        """The first n tokens."""
        q, sure = None if self.q is None else self.q[:n], None if self.sure is None else self.sure[:n]
        return Drafts(self.tokens[:n], q, self.source, sure)

    def then(self, tokens: Iterable[int]) -> Drafts:
        """These, and behind them tokens that were not drawn."""
        return Drafts([*self.tokens, *tokens], self.q, self.source, self.sure)


@dataclass(frozen=True, slots=True)
class DraftsAhead:
    """Drafts for every sequence of a verify, on the device: tokens [seq, n_draft] int64, q [seq, n_draft, n_vocab] f32 as in Drafts."""

    tokens: Tensor
    q: Tensor | None = None


NO_DRAFTS = Drafts()
