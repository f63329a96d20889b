"""Rounds without a user's request: a warm-up runs a loop through this, and leaves no trace in it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pyspec.device.capture import capture
from pyspec.engine.loop.job import Job
from pyspec.engine.loop.loop import Loop
from pyspec.request import Event, Request, SamplingParams
from pyspec.sample.sampler import SlotSampler
from pyspec.text.stream import TextStream
from pyspec.text.tokenizer import Tokenizer


def _nowhere(event: Event) -> None:
    """Ignores a request's events."""


class Rehearsal:
    """Submits made-up requests to a loop, steps it, and clears it.

    n_overhang  rows that a slot needs beyond its tokens
    """

    def __init__(self, loop: Loop, tokenizer: Tokenizer, n_overhang: int) -> None:
        self.loop, self.tokenizer, self.n_overhang = loop, tokenizer, n_overhang
        self.n_slot = loop.n_slot
        self.n_row = loop.n_row
        self.n_draft = loop.controller.n_max
        self.n_vocab = loop.target.n_vocab

    @contextmanager
    def running(self) -> Iterator[None]:
        """Log no line per request, and raise bugs: they fail the load instead of every later request.

        Statistics and acceptance are reset afterwards; measured times stay.
        """
        loop, commit_log = self.loop, logging.getLogger("pyspec.engine.loop.commit")
        level, raised = commit_log.level, loop.raises_bugs
        commit_log.setLevel(logging.WARNING)
        loop.raises_bugs = loop.speculator.raises_bugs = True
        try:
            yield
        finally:
            commit_log.setLevel(level)
            loop.raises_bugs, loop.speculator.raises_bugs = raised, False
        loop.controller.forget_acceptance()
        loop.speculator.suffixes.forget_learned()
        loop.stats.reset()

    def capture(self, n_bytes: int) -> None:
        """Capture the graphs of every batch size, and reserve `n_bytes` of the device for forwards and checkpoints."""
        limits = self.loop.limits
        capture(self.loop.worker, limits.prompts, n_bytes, limits.decoding)

    def submit(self, name: str, prompt: Sequence[int], n_tokens: int, params: SamplingParams) -> None:
        """Queue a request of up to `n_tokens` tokens; the cache is not used, and its events go nowhere."""
        request = Request(prompt=tuple(prompt), params=params, max_tokens=n_tokens, cache_prompt=False)
        eog: frozenset[int] = frozenset()
        sampler = SlotSampler(params, self.n_vocab, eog, request.prompt)
        n_rows = len(request.prompt) + n_tokens + self.n_overhang
        self.loop.submit(
            Job(name, request, _nowhere, TextStream(self.tokenizer, ()), sampler, eog, n_rows, n_rows)
        )

    def force(self, drafts: tuple[int, int]) -> None:
        """Have this many slots draft this many tokens each, until the acceptance is forgotten."""
        self.loop.controller.force = drafts

    def step(self, n: int = 1) -> None:
        """Run `n` rounds."""
        for _ in range(n):
            self.loop.step()

    @property
    def is_reading(self) -> bool:
        """A prompt is not read to its end."""
        return not all(job.is_decoding for job in self.loop.jobs.values())

    def clear(self) -> None:
        """Cancel every request, and leave nothing in the slots."""
        for job in list(self.loop.jobs.values()):
            self.loop.cancel(job)
        self.loop.step()
        for slot in self.loop.table.slots:
            self.loop.table.drop(slot)
