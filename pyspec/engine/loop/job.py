"""One request on its way through the engine: its settings, its progress, its cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from pyspec.constrain.constraint import Constraint
from pyspec.errors import PyspecError, SlotError
from pyspec.registry import SUFFIX
from pyspec.request import Delta, Done, Event, Failed, Finish, Progress, Request, Timings, TokenLogprob
from pyspec.sample.sampler import SlotSampler
from pyspec.slots.images import ImageSpan, with_ids
from pyspec.slots.prefix import Owner
from pyspec.slots.table import Slot
from pyspec.text.stream import TextStream

Sink = Callable[[Event], None]

SCORED = 64  # rows of a prompt scored in one forward: each has logits over the whole vocabulary


def at_least(rounds: Sequence[int]) -> list[int]:
    """Given rounds[n], the rounds with exactly n of something, return the rounds with at least 1, at least 2, ..."""
    return list(accumulate(reversed(rounds[1:])))[::-1]


@dataclass
class Job:
    """Lives from submit to its last event. `slot` is None while it waits; `anchor` is None until its prompt is read.

    prefill     tokens to read before it decodes: the prompt, and tokens that were generated before it was resumed or suspended
    constraint  its grammar, moved by committed tokens; None: any text
    flaw        the reason why it can not start
    start       checkpoint at its prompt's end, filed when the request ends
    images      pictures of its prompt, whose rows have their ids in `prefill`
    are_whole   a row of a picture sees the whole of it, so no forward has a part of one
    rows        of pictures that it will read: as the encoder made them, in host memory, by handle, until its slot has them
    may_sit     it has the rows of its pictures, as far as the cache had not their place when it was asked: else it waits for them
    """

    id: str
    request: Request
    sink: Sink
    stream: TextStream
    sampler: SlotSampler
    eog: frozenset[int]
    n_ctx: int
    n_rows: int  # most KV rows it will need
    slot: Slot | None = None
    anchor: int | None = None
    cuts: tuple[int, ...] = ()  # prompt positions at which checkpoints are due
    n_cached: int = 0
    n_disk: int = 0  # of these, from the disk
    cache_break_at: int = -1
    n_predicted: int = 0
    cancelled: bool = False
    n_suspended: int = 0  # times it was taken out of its slot for a short request
    started: float = field(default_factory=time.perf_counter)
    first: float = 0.0  # when the first token was chosen
    last: float = 0.0
    n_rounds: int = 0
    used: list[int] = field(default_factory=list)  # rounds by n_draft
    right: list[int] = field(default_factory=list)  # rounds by n_accepted
    suffix_n: int = 0  # tokens of suffix drafts
    suffix_n_accepted: int = 0
    synthetic: bool = False
    constraint: Constraint | None = None
    flaw: PyspecError | None = None
    start: object | None = None
    n_at_seat: int = 0  # n_predicted when it was seated last
    n_past_at_seat: int = 0  # tokens that its slot had then, from the cache
    n_before: int = 0  # `work` in earlier slots
    charged: int = 0  # tokens that count as given to its client (policy/queue.py)
    images: tuple[ImageSpan, ...] = ()
    are_whole: bool = False
    rows: dict[int, object] = field(default_factory=dict)
    may_sit: bool = True
    n_seen: int = -1  # tokens of its prefill that the cache had when it was asked; -1: not yet

    def __post_init__(self) -> None:
        resumed = self.request.resumed
        self.prefill, self.n_predicted = self.request.prompt, len(resumed)
        self.resumed_stop = ""  # the stop string in the resumed tokens, if any
        if resumed:
            self.prefill += resumed
            self.sampler.commit(resumed)
            self.resumed_stop = self.stream.push(resumed).stopped
        self.n_begin = len(self.prefill)  # tokens before the first one that this job generates
        room, most = self.n_ctx - self.n_prompt, self.request.max_tokens
        self.n_most = (
            room if most < 0 else min(room, most)
        )  # tokens it may emit, by its own limit and by the context's

    def see(self, spans: tuple[ImageSpan, ...], *, are_whole: bool) -> None:
        """The request's pictures stand here."""
        self.images, self.are_whole, self.may_sit = spans, are_whole, not spans
        self.prefill = with_ids(self.prefill, spans)

    def images_behind(self, n: int) -> list[ImageSpan]:
        """Pictures of which rows stand behind its first `n` tokens."""
        return [span for span in self.images if span.end > n]

    @property
    def wanted_slot(self) -> int:
        return self.request.slot

    @property
    def client(self) -> str:
        return self.request.client

    @property
    def owner(self) -> Owner:
        return Owner(self.request.client, self.request.cache_salt)

    @property
    def group(self) -> str:
        return self.request.group

    @property
    def waits(self) -> bool:
        """It waits for its first slot."""
        return self.slot is None and not self.n_suspended and not self.cancelled

    @property
    def cost(self) -> int:
        """Tokens to read before its first one, if none are cached."""
        return len(self.prefill)

    @property
    def reusable(self) -> Sequence[int]:
        return self.prefill if self.reuses else ()

    @property
    def reuses(self) -> bool:
        """It may start from cached pages. A scored prompt may not: every row of it has to run."""
        return self.request.cache_prompt and self.request.prompt_logprobs is None

    @property
    def n_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def n_prefill(self) -> int:
        return len(self.prefill)

    @property
    def spent(self) -> Finish | None:
        """Finish reason of a resumed request that has nothing left to generate."""
        is_over = self.constraint is not None and self.constraint.is_over
        return (
            "stop"
            if self.resumed_stop or is_over
            else "length"
            if self.request.resumed and self.n_left <= 0
            else None
        )

    @property
    def goes_on(self) -> bool:
        """It has generated tokens already, here or before it was resumed."""
        return self.n_prefill > self.n_prompt

    @property
    def n_given(self) -> int:
        """Tokens it generated since it was seated."""
        return self.n_predicted - self.n_at_seat

    @property
    def n_to_read(self) -> int:
        """Tokens of its prompt that its slot does not hold yet."""
        return 0 if self.slot is None else max(0, self.n_prefill - self.slot.n_past)

    @property
    def work(self) -> int:
        """Tokens it was given so far: prompt rows that were not cached, and those that it generated. Ask before its slot is released."""
        if self.slot is None:
            return self.n_before
        n_read = min(self.slot.n_past, self.n_prefill) - min(self.n_past_at_seat, self.n_prefill)
        return self.n_before + max(0, n_read) + self.n_given

    @property
    def is_decoding(self) -> bool:
        return self.anchor is not None

    @property
    def n_left(self) -> int:
        """Tokens it may still emit."""
        return self.n_most - self.n_predicted

    @property
    def todo(self) -> tuple[int, int]:
        """Prompt tokens left to read, and tokens to the next checkpoint (0: none is due)."""
        assert self.slot is not None
        done = self.slot.n_past
        to_cut = next((cut - done for cut in self.cuts if cut > done), 0)
        return self.n_prefill - done, min(to_cut or SCORED, SCORED) if self.n_to_score else to_cut

    def whole_rows(self, n: int) -> tuple[int, int]:
        """Rows that a forward with room for `n` of its next tokens can have where no picture may be cut: at most `n`, which may be none, and with
        the picture in which that many end, too."""
        assert self.slot is not None
        at = self.slot.n_past
        cut = (
            next((s for s in self.images if s.first < at + n < s.end), None) if self.are_whole else None
        )
        return (n, n) if cut is None else (max(0, cut.first - at), cut.end - at)

    @property
    def is_unread(self) -> bool:
        """Whether one forward may read its prompt as a whole, from the first token on."""
        assert self.slot is not None
        left, cut = self.todo
        is_new = not (self.slot.n_past or self.slot.n_fold or self.n_to_score)
        return is_new and (not cut or cut >= left)

    @property
    def n_to_score(self) -> int:
        """Prompt rows left whose logits are needed for prompt logprobs."""
        if self.request.prompt_logprobs is None or self.slot is None:
            return 0
        return max(0, self.n_prompt - 1 - self.slot.n_past)

    @property
    def drafted(self) -> list[int]:
        """Rounds that drafted each position."""
        return at_least(self.used)

    @property
    def accepted(self) -> list[int]:
        return at_least(self.right)

    def begin(self, slot: Slot, cuts: tuple[int, ...]) -> None:
        """Seat it in `slot`, which holds the cached part of its prompt. cuts: where checkpoints are due."""
        self.slot, self.cuts, self.n_at_seat = slot, cuts, self.n_predicted
        self.n_past_at_seat = slot.n_past
        if not self.n_suspended:  # else the cache holds its own earlier rows
            self.started = time.perf_counter()
            self.n_cached = min(
                slot.n_past, self.n_prefill - 1
            )  # the last token is not counted, as in other servers

    def put_off(self) -> None:
        """Leave the slot before the end, and wait for another one. Generated tokens become part of the prefill."""
        assert self.slot is not None
        self.n_before = self.work
        if self.anchor is not None:
            self.prefill, self.anchor = (*self.slot.tokens, self.anchor), None
        self.slot, self.cuts, self.n_suspended = None, (), self.n_suspended + 1
        self.may_sit, self.n_seen = not self.images, -1

    def constrain(self, constraint: Constraint) -> None:
        """Attach a grammar. Raises SlotError if the tokens generated so far do not follow it."""
        constraint.commit([t for t in self.request.resumed if t not in self.eog])
        self.constraint = constraint

    def progress(self, n_processed: int) -> None:
        """Send the prompt's progress, unless the first token was sent."""
        if self.first:
            return
        ms = 1e3 * (time.perf_counter() - self.started)
        self.sink(Progress(self.id, self.n_prompt, self.n_cached, min(n_processed, self.n_prompt), ms))

    def count(self, n_draft: int, n_accepted: int, source: str = "") -> None:
        """Count one decode round. source: of its draft, as in `Drafts`."""
        self.n_rounds += 1
        if source == SUFFIX:
            self.suffix_n += n_draft
            self.suffix_n_accepted += n_accepted
        for rounds, n in ((self.used, n_draft), (self.right, n_accepted)):
            rounds.extend([0] * (n + 1 - len(rounds)))
            rounds[n] += 1

    def take(self, tokens: Sequence[int]) -> Taken:
        """Take a round's tokens, up to the one that ends the request. `send_delta` sends them."""
        tokens = tokens[: self.n_left]
        self.last = time.perf_counter()
        if not self.first:
            self.first = self.last
        end = None
        if not (self.request.params.ignore_eos or self.eog.isdisjoint(tokens)):
            end = next(i for i, t in enumerate(tokens) if t in self.eog)
        content, is_over = tokens if end is None else tokens[:end], False
        if self.constraint is not None:
            content = content[: self.constraint.commit(content)]
            is_over = self.constraint.is_over
        released = self.stream.push(content)
        finish: Finish | None = None
        n_used = len(tokens) if end is None else end + 1
        if is_over:
            finish, n_used, end = "stop", len(content), None
        if released.stopped:
            finish = "stop"
            n_used = released.n_tokens_used
            content = content[: released.n_tokens_used]
        elif end is not None:
            finish = "eos"
        self.n_predicted += n_used
        if finish is None and (self.n_left <= 0 or self._is_late()):
            finish = "length"
        text = released.text if finish in (None, "stop") else released.text + self.stream.flush()
        return Taken(content, text, n_used, finish, released.stopped)

    def send_delta(
        self, taken: Taken, logprobs: Sequence[TokenLogprob], n_draft: int, n_accepted: int
    ) -> None:
        """Send the Delta of the tokens that were taken last."""
        if taken.content or taken.text:
            shown = tuple(logprobs[: len(taken.content)])
            timings = self.timings() if self.request.timings_per_token else None
            self.sink(
                Delta(self.id, tuple(taken.content), taken.text, shown, n_draft, n_accepted, timings)
            )

    def _is_late(self) -> bool:
        limit = self.request.max_predict_ms
        return limit > 0 and 1e3 * (self.last - self.first) >= limit

    def settle(self) -> Timings:
        """Its timings, because it ends now: of a prompt that was not read to its end only what was read counts, and no wait for a slot."""
        if not self.first:
            self.n_begin = self.n_cached + self.work
            if self.slot is None and not self.n_suspended:
                self.started = time.perf_counter()
        return self.timings()

    def timings(self) -> Timings:
        """Timings of this job. Resumed tokens are not counted."""
        first = self.first or time.perf_counter()
        drafted = self.drafted
        accepted = self.accepted
        return Timings(
            cache_n=self.n_cached,
            prompt_n=self.n_begin - self.n_cached,
            prompt_ms=1e3 * (first - self.started),
            predicted_n=self.n_predicted - len(self.request.resumed),
            predicted_ms=1e3 * (self.last - self.first),
            draft_n=sum(drafted),
            draft_n_accepted=sum(accepted),
            n_rounds=self.n_rounds,
            drafted_per_pos=tuple(drafted),
            accepted_per_pos=tuple(accepted),
            n_draft_used=tuple(self.used),
            suffix_n=self.suffix_n,
            suffix_n_accepted=self.suffix_n_accepted,
            synthetic=self.synthetic,
            cache_break_at=self.cache_break_at,
            disk_n=self.n_disk,
        )

    def done(self, finish: Finish, stop: str = "") -> None:
        """Send the last event of a request that did not fail."""
        full = finish == "length" and self.n_prompt + self.n_predicted >= self.n_ctx
        slot, n_in_stop = -1 if self.slot is None else self.slot.index, self.stream.n_in_stop
        self.sink(
            Done(
                self.id,
                finish,
                self.n_prompt,
                self.n_predicted,
                self.timings(),
                stop,
                full,
                slot,
                n_in_stop,
                self.sampler.seed,
            )
        )

    def failed(self, error: Failed) -> None:
        """Send its last event."""
        self.sink(error)


@dataclass(frozen=True, slots=True)
class Taken:
    """The content and text of a round, the tokens that the request used, and whether it is over."""

    content: Sequence[int]
    text: str
    n_used: int
    finish: Finish | None
    stop: str


@dataclass(frozen=True, slots=True)
class End:
    """How a request ends."""

    finish: Finish
    stop: str = ""
    error: PyspecError | None = None


def blamed(error: Exception) -> PyspecError:
    """The error of a request that an exception is blamed on."""
    if isinstance(error, PyspecError):
        return error
    lines = str(error).strip().splitlines()
    return SlotError(
        f"this request failed: {type(error).__name__}" + (f": {lines[0][:200]}" if lines else "")
    )
