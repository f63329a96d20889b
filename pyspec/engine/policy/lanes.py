"""What the controller shows of its slots."""

from __future__ import annotations

from dataclasses import dataclass

MUTE = "none: drafts are switched off for the request"
NO_CAP = "none: the request is at its last token, or past the drafter's length"
NO_OFFER = "none: the last tokens stand nowhere before"
NO_DRAFTER = "none: no drafter is loaded"
FAILED = "none: the choice of drafts failed, as the log says"
LOST_TRACK = "none: the drafter failed at the request, as the log says"
UNREAD = "none: drafts have not paid for long, so the drafter does not read this request"


@dataclass(slots=True)
class Lane:
    """One slot's last decision, and the outcome of its drafts."""

    n_draft: int = 0
    reason: str = "not started"
    drafted: float = 0.0
    kept: float = 0.0

    @property
    def acceptance(self) -> float:
        """Share of the recent drafted tokens that were right; 0.0 if none was drafted."""
        return self.kept / self.drafted if self.drafted else 0.0
