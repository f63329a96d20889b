"""The place of a supervisor among several of one model (replicas.py): what makes its names and slots unique, and its lines of the log."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pyspec.engine.messages import LogLine


@dataclass(frozen=True)
class ReplicaPlace:
    """Where a supervisor stands; alone, it has all defaults.

    ids           numbers of requests, which all of them share
    first_slot    number of its first slot
    label         begins lines of its log
    reports       it reports the progress of its load
    shares_queue  places to wait are counted for all together (replicas.py), not here
    on_loss       called without a lock when its engine has ended, or can not be loaded: its requests may go to others
    """

    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    first_slot: int = 0
    label: str = ""
    reports: bool = True
    shares_queue: bool = False
    on_loss: Callable[[], None] = lambda: None

    def relay(self, line: LogLine) -> None:
        """Log a line of the engine here."""
        logger = logging.getLogger(line.name)
        if logger.isEnabledFor(line.level):
            text = self.label + line.text
            record = logger.makeRecord(line.name, line.level, "", 0, "%s", (text,), None)
            record.fields = line.fields or {}
            record.created = line.created
            logger.handle(record)
