"""The contract of a drafter without a model: it reads the tokens of slots, on the host, and proposes what may follow.

Its module has `N_DRAFT`, the tokens that it proposes a round where no number is asked for, and `host_drafter(n_draft, settings)`, which makes
a `HostDrafter` for a load's `EngineSettings`. `ngram.py` is one, and so is `examples/own_drafter`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pyspec.slots.drafts import DraftRequest, Drafts
from pyspec.slots.table import Slot


class HostDrafter(ABC):
    """Base class of drafters without a model. Any proposal is right: wrong ones cost time, but no text.

    n_draft  most tokens that it proposes per slot and round
    """

    n_draft: int

    def begin(self, slot: Slot) -> None:
        """A request starts on `slot`, which may have tokens already."""

    @abstractmethod
    def draft(self, requests: Sequence[DraftRequest]) -> Sequence[Drafts]:
        """Proposals per request, each at most its n_draft long; shorter and empty ones are allowed. `slot.tokens` has all tokens before the anchor."""

    def end(self, slot: Slot) -> None:
        """The request is over. Exactly once per `begin`."""
