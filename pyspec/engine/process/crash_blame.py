"""Requests that may have crashed engines. They run one at a time, so that the next crash has one suspect."""

from __future__ import annotations

from collections.abc import Iterable

from pyspec.engine.process.supervised_request import SupervisedRequest

N_CRASH = 3  # crashes after which a request fails


class CrashBlame:
    """Changed under the supervisor's lock.

    trial  the suspect that runs
    held   suspects that wait for their turn
    """

    def __init__(self) -> None:
        self.trial: SupervisedRequest | None = None
        self.held: list[SupervisedRequest] = []

    def begin(self, records: Iterable[SupervisedRequest]) -> list[SupervisedRequest]:
        """Select the requests that a new engine gets."""
        records = list(records)
        suspects = [r for r in records if len(r.crashes) >= N_CRASH - 1]
        self.trial, self.held = (suspects[0] if suspects else None), suspects[1:]
        return [r for r in records if r not in self.held]

    def acquit(self) -> SupervisedRequest | None:
        """The suspect ran past the point of its crash, or has ended. Returns the next suspect."""
        if self.trial is not None:
            self.trial.crashes.clear()
        self.trial = self.held.pop(0) if self.held else None
        return self.trial

    @staticmethod
    def accuse(running: Iterable[SupervisedRequest], *, from_outside: bool) -> list[SupervisedRequest]:
        """Blame a crash on the requests in the engine's slots. Returns those with too many crashes."""
        guilty = []
        for record in running:
            record.blame(from_outside=from_outside)
            if len(record.crashes) >= N_CRASH:
                guilty.append(record)
        return guilty
