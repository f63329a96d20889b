"""A request on the supervisor's side: its delivered tokens, with which another engine can continue it, and its crashes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from pyspec.engine.loop.job import at_least
from pyspec.engine.messages import Submit
from pyspec.engine.process.metrics_sum import sums
from pyspec.errors import QueueFull
from pyspec.request import (
    Delta,
    Done,
    Event,
    Failed,
    Progress,
    PromptLogprobs,
    Request,
    Started,
    Timings,
)
from pyspec.text.stream import TextStream
from pyspec.text.tokenizer import Tokenizer

Sink = Callable[[Event], None]

WINDOW_S = 600.0  # older crashes are forgotten
PROGRESS = 64  # tokens after which a crash counts as a new one: more than rounds in flight can hide


@dataclass
class Attempt:
    """Timings and counts of an engine that did not finish the request."""

    began: float = 0.0  # when it was seated; 0: never
    first: float = 0.0  # when its first and last tokens came
    last: float = 0.0
    used: list[int] = field(default_factory=list)  # rounds by n_draft
    right: list[int] = field(default_factory=list)  # rounds by n_accepted

    def count(self, event: Delta) -> None:
        """Count the tokens of a round."""
        self.last = time.perf_counter()
        if not self.first:
            self.first = self.last
            return  # the token of the prompt's forward is not a round
        for rounds, n in ((self.used, event.n_draft), (self.right, event.n_accepted)):
            rounds.extend([0] * (n + 1 - len(rounds)))
            rounds[n] += 1


@dataclass(frozen=True)
class Crash:
    """An engine ended while this request ran: when, and after how many tokens."""

    at: float
    n_token: int  # delivered before


class SupervisedRequest:
    """One request from submit to its last event, across engines. Its sink sees one continuous story.

    in_slot    it sits in a slot of the current engine
    has_begun  it was seated at least once
    """

    def __init__(self, name: str, request: Request, seed: int, sink: Sink) -> None:
        self.name, self.request, self.seed, self.sink = name, request, seed, sink
        self.cancelled = self.in_slot = self.has_begun = False
        self.is_logged = False  # a failure of its sink
        self.key: int | None = None  # of its prompt's last whole block (affinity.chain)
        self.ousted: QueueFull | None = None  # it lost its place to another client's request
        self.tokens: list[int] = []
        self.n_text = 0  # characters delivered
        self.crashes: list[Crash] = []
        self._skip = 0  # characters that the engine will send again
        self._n_progress = -1
        self._n_scored = 0  # prompt tokens whose log probabilities were delivered
        self._n_cached = 0
        self._lives: list[Attempt] = []  # engines that ended after they had generated tokens for it
        self._life = Attempt()
        self._n_before = 0  # tokens of those attempts
        self._lost_ms = 0.0  # milliseconds of generating in those attempts

    @property
    def number(self) -> int:
        """Grows with each request, over all replicas."""
        return int(self.name[1:])

    @property
    def client(self) -> str:
        return self.request.client

    @property
    def wanted_slot(self) -> int:
        return self.request.slot

    @property
    def cost(self) -> int:
        """Tokens to read before its first one."""
        return len(self.request.prompt) + len(self.request.resumed)

    # -- to the engine --------------------------------------------------------------------------------------------

    def submit(self) -> Submit:
        """The message for the first engine, or for the next."""
        if not self.tokens:
            return Submit(self.name, self.request, self.seed)
        limit = self.request.max_predict_ms
        left = max(limit - self._lost_ms, 1e-3) if limit > 0 else 0.0
        resumed = (*self.request.resumed, *self.tokens)
        return Submit(self.name, replace(self.request, resumed=resumed, max_predict_ms=left), self.seed)

    # -- from the engine ------------------------------------------------------------------------------------------

    def on_event(self, event: Event) -> Event | None:
        """The event for the listener; None if it was delivered before."""
        if isinstance(event, Delta):
            return self._delta(event)
        if isinstance(event, Done):
            return replace(event, timings=self.timings(event.timings)) if self._lives else event
        if isinstance(event, Failed):
            return event
        if isinstance(event, PromptLogprobs):
            return self._scored(event)
        return self._prompt(event)

    def _scored(self, event: PromptLogprobs) -> PromptLogprobs | None:
        """The part that was not delivered before: a second engine reads the prompt again, perhaps in other chunks."""
        old = max(0, self._n_scored - event.first)
        self._n_scored = max(self._n_scored, event.first + len(event.entries))
        if old >= len(event.entries):
            return None
        return replace(
            event, first=event.first + old, entries=event.entries[old:], ranks=event.ranks[old:]
        )

    def _prompt(self, event: Started | Progress) -> Event | None:
        """Deliver each step of the prompt once: a second engine starts it again, or further on."""
        if isinstance(event, Started):
            self.in_slot, self._life.began = True, time.perf_counter()
            if self.has_begun:
                return None
            self.has_begun, self._n_cached = True, event.n_cached
            return event
        if self.tokens or event.n_processed <= self._n_progress:
            return None
        self._n_progress = event.n_processed
        return event

    def _delta(self, event: Delta) -> Delta | None:
        self._life.count(event)
        self.tokens += event.tokens
        text, self._skip = event.text[self._skip :], max(0, self._skip - len(event.text))
        self.n_text += len(text)
        if not self._lives:
            return event
        timings = None if event.timings is None else self.timings(event.timings)
        return replace(event, text=text, timings=timings) if event.tokens or text else None

    def timings(self, last: Timings) -> Timings:
        """Timings over all attempts: the first reading of the prompt, and generation from first to last token, pauses included."""
        if not self._lives:
            return last
        first, n_prompt = self._lives[0], len(self.request.prompt)
        used = sums([*(life.used for life in self._lives), last.n_draft_used])
        end = self._life.last or self._lives[-1].last
        return replace(
            last,
            cache_n=self._n_cached,
            disk_n=min(last.disk_n, self._n_cached),
            prompt_n=n_prompt + len(self.request.resumed) - self._n_cached,
            prompt_ms=1e3 * (first.first - first.began),
            predicted_n=self._n_before + last.predicted_n,
            predicted_ms=1e3 * (end - first.first),
            draft_n=sum(at_least(used)),
            draft_n_accepted=last.draft_n_accepted
            + sum(sum(at_least(life.right)) for life in self._lives),
            n_rounds=sum(used),
            drafted_per_pos=tuple(at_least(used)),
            accepted_per_pos=sums(
                [*(at_least(life.right) for life in self._lives), last.accepted_per_pos]
            ),
            n_draft_used=used,
        )

    # -- engines that end ------------------------------------------------------------------------------------------

    def lose_engine(self, tokenizer: Tokenizer) -> None:
        """The engine is gone. Do not deliver its text again."""
        self.in_slot = False
        life, self._life = self._life, Attempt()
        self._n_before = len(self.tokens)
        if life.first:
            self._lives.append(life)
            self._lost_ms += 1e3 * (life.last - life.first)
        if self.tokens:
            # The next engine releases text as if it had generated these tokens; the last event may have released more.
            def released_by(tokens: Sequence[int]) -> int:
                stream = TextStream(tokenizer, self.request.stop, shown=self.request.shown)
                return len(stream.push(tokens).text)

            before = released_by(self.request.resumed)
            released = released_by([*self.request.resumed, *self.tokens])
            self._skip = max(0, self.n_text - (released - before))

    def blame(self, *, from_outside: bool) -> None:
        """An engine crashed with this request in a slot.

        from_outside  the process was killed or stopped: blame the request only if it makes no progress
        """
        now, n = time.monotonic(), len(self.tokens)
        if self.crashes and n > self.crashes[-1].n_token + (0 if from_outside else PROGRESS):
            self.crashes.clear()  # it ran past its last crash
        self.crashes = [c for c in self.crashes if now - c.at < WINDOW_S]
        self.crashes.append(Crash(now, n))

    @property
    def is_past_its_crash(self) -> bool:
        return not self.crashes or len(self.tokens) > self.crashes[-1].n_token + PROGRESS

    def cancelled_event(self) -> Done:
        """The last event of a request that was cancelled while no engine had it."""
        n = len(self.request.resumed) + len(self.tokens)
        timings = self.timings(Timings(predicted_n=len(self.tokens) - self._n_before))
        return Done(self.name, "cancelled", len(self.request.prompt), n, timings, seed=self.seed)


# -- requests that may have crashed engines --------------------------------------------------------------------------
# Requests that may have crashed engines. They run one at a time, so that the next crash has one suspect.

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
