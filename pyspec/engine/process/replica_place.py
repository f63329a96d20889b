"""The place of a supervisor among several of one model (replicas.py): what makes its names and slots unique, and its lines of the log."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from pyspec import progress
from pyspec.engine.messages import LoadStage, LogLine
from pyspec.request import Done, Event, SlotInfo, Started
from pyspec.text.template import ChatTemplate
from pyspec.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ReplicaPlace:
    """Where a supervisor stands; alone, it has all defaults.

    ids           numbers of requests, which all of them share
    first_slot    number of its first slot
    label         begins lines of its log
    reports       it reports the progress of its load
    shares_queue  places to wait are counted for all together (replicas.py), not here
    texts         gives the file's tokenizer and template, which all of them share; None: it reads them itself
    on_loss       called without a lock when its engine has ended, or can not be loaded: its requests may go to others
    on_stop       called without a lock when it has failed to load for long, and requests that stay would fail: others that may still come
                  take them. Returns the subject of the sentence for those that stay
    """

    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    first_slot: int = 0
    label: str = ""
    reports: bool = True
    shares_queue: bool = False
    texts: Callable[[], tuple[Tokenizer, ChatTemplate | None]] | None = None
    on_loss: Callable[[], None] = lambda: None
    on_stop: Callable[[], str] = lambda: "the engine"

    def report(self, stage: LoadStage) -> None:
        """Report the progress of its load, if it is this one's to report."""
        if self.reports:
            progress.report(stage.stage, stage.fraction)

    def rows(self, rows: Iterable[SlotInfo]) -> list[SlotInfo]:
        """Its slots by their numbers among all."""
        return [replace(row, slot=self.first_slot + row.slot) for row in rows]

    def placed(self, event: Event) -> Event:
        """An event with its slot's number among all."""
        if isinstance(event, Started | Done) and event.slot >= 0 and self.first_slot:
            return replace(event, slot=self.first_slot + event.slot)
        return event

    def relay(self, line: LogLine) -> None:
        """Log a line of the engine here."""
        logger = logging.getLogger(line.name)
        if logger.isEnabledFor(line.level):
            text = self.label + line.text
            record = logger.makeRecord(line.name, line.level, "", 0, "%s", (text,), None)
            record.fields = line.fields or {}
            record.created = line.created
            logger.handle(record)
