"""Requests that may be what ends engines: they run one at a time until they are past it, so that a crash has one to blame."""

from __future__ import annotations

from collections.abc import Iterable

from pyspec.engine.process.record import Record

N_CRASH = 3  # a request that was there so many times fails


class Suspects:
    """Changed under the supervisor's lock.

    trial  the suspect that runs
    held   those whose turn has not come
    """

    def __init__(self) -> None:
        self.trial: Record | None = None
        self.held: list[Record] = []

    def begin(self, records: Iterable[Record]) -> list[Record]:
        """An engine begins: which of the requests it gets."""
        records = list(records)
        suspects = [r for r in records if len(r.crashes) >= N_CRASH - 1]
        self.trial, self.held = (suspects[0] if suspects else None), suspects[1:]
        return [r for r in records if r not in self.held]

    def acquit(self) -> Record | None:
        """The one on trial got past where engines crashed, or has ended. Returns whose turn it is."""
        if self.trial is not None:
            self.trial.crashes.clear()
        self.trial = self.held.pop(0) if self.held else None
        return self.trial

    @staticmethod
    def accuse(running: Iterable[Record], *, from_outside: bool) -> list[Record]:
        """An engine crashed with these in its slots. Returns who is guilty."""
        guilty = []
        for record in running:
            record.blame(from_outside=from_outside)
            if len(record.crashes) >= N_CRASH:
                guilty.append(record)
        return guilty
