"""Requests that may be what ends engines: they run one at a time until they are past it, so that a crash has one to blame."""

from __future__ import annotations

from collections.abc import Iterable

from pyspec.engine.process.supervised_request import SupervisedRequest

N_CRASH = 3  # a request that was there so many times fails


class CrashBlame:
    """Changed under the supervisor's lock.

    trial  the suspect that runs
    held   those whose turn has not come
    """

    def __init__(self) -> None:
        self.trial: SupervisedRequest | None = None
        self.held: list[SupervisedRequest] = []

    def begin(self, records: Iterable[SupervisedRequest]) -> list[SupervisedRequest]:
        """An engine begins: which of the requests it gets."""
        records = list(records)
        suspects = [r for r in records if len(r.crashes) >= N_CRASH - 1]
        self.trial, self.held = (suspects[0] if suspects else None), suspects[1:]
        return [r for r in records if r not in self.held]

    def acquit(self) -> SupervisedRequest | None:
        """The one on trial got past where engines crashed, or has ended. Returns whose turn it is."""
        if self.trial is not None:
            self.trial.crashes.clear()
        self.trial = self.held.pop(0) if self.held else None
        return self.trial

    @staticmethod
    def accuse(running: Iterable[SupervisedRequest], *, from_outside: bool) -> list[SupervisedRequest]:
        """An engine crashed with these in its slots. Returns who is guilty."""
        guilty = []
        for record in running:
            record.blame(from_outside=from_outside)
            if len(record.crashes) >= N_CRASH:
                guilty.append(record)
        return guilty
