"""A round between its launch and its commit: its parts, what the device ran, and the results so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pyspec.cuda.faults import ALL_SLOTS, Fault
from pyspec.cuda.ops.ahead.ref import NO_TOKEN, n_kept
from pyspec.device.expert_use import ExpertUse
from pyspec.device.worker import Launched, is_device_error
from pyspec.engine.loop.job import Job, blamed
from pyspec.engine.loop.prompt_scores import send_scores
from pyspec.engine.loop.round import Work, pauses
from pyspec.engine.policy.controller import Controller
from pyspec.errors import SlotError
from pyspec.repeats import limited
from pyspec.sample.choose import Chosen, Span, choose
from pyspec.sample.mask import SpanMask
from pyspec.sample.synth import SynthAcceptance
from pyspec.slots.drafts import Drafts
from pyspec.slots.round import Continuation

log = limited(__name__)


@dataclass(slots=True)
class PendingRound:
    """A launched round.

    began    start of the time charged to this round; drafted: its drafts were ready; sent: the device had its commands;
             arrived: its results were on the host; since: start of its verify. In seconds of the loop's clock
    is_behind  it continues a round whose results were not read at its launch
    off      slots for which it ran with another token than the round before gave in the end
    spans    rows to sample from, fixed when the round is awaited
    refused  rows whose drafts, made by the device, a grammar refuses; None: not checked yet
    asked    tokens of each draft that the host asked for, if it cut them
    next     how the next round continues this one, once that is launched
    is_known  it is behind, but its rows were known: a prompt behind another one
    is_settled  its prompt is committed, but for the token behind it
    is_first  a forward of a new shape was recorded in it: others of its size take less time
    experts  what it used of those in the host's memory, once it is awaited; None: there are none, or its rows were too many to be logged
    """

    work: Sequence[Work]
    launched: Launched
    began: float
    drafted: float
    sent: float
    is_behind: bool = False
    is_known: bool = False
    is_settled: bool = False
    asked: Sequence[int] = ()
    off: set[int] = field(default_factory=set)
    spans: Sequence[Span] = ()
    refused: tuple[int, ...] | None = None
    next: Continuation | None = None
    arrived: float = 0.0
    since: float = 0.0
    is_first: bool = False
    experts: ExpertUse | None = None

    @property
    def batch_starts(self) -> Sequence[int]:
        return self.launched.batch.starts

    def count(self, controller: Controller, ms: float, *, others: bool) -> None:
        """Tell the controller how long it took, in milliseconds. Call it before it is committed. others: requests had no part in it."""
        batch, read = self.launched.batch, [w for w in self.work if w.is_prompt]
        if batch.prompt:
            controller.landed_alone(batch.bucket or batch.n_row, ms, others=others)
        else:
            n_read = 0 if self.is_first else sum(w.seq.width for w in read)
            n_long = sum(pauses(w.job, controller.rules) for w in read)
            controller.landed(batch.n_row, ms, n_read, len(self.work) - len(read), n_long)

    @property
    def is_watched(self) -> bool:
        """The drafter's guards ran since its faults were read last."""
        return not self.is_behind or self.is_known or self.launched.tokens is not None

    def still_running(self, w: Work, jobs: Mapping[int, Job]) -> bool:
        """The request has not ended since the launch, nor taken another token. jobs: by slot."""
        return jobs.get(w.slot.index) is w.job and w.slot.index not in self.off

    def running(self, jobs: Mapping[int, Job]) -> list[Work]:
        """The parts of requests that still run."""
        return [w for w in self.work if self.still_running(w, jobs)]

    # -- before its results --------------------------------------------------------------------------------------

    def refuse(self, jobs: Mapping[int, Job]) -> tuple[int, ...]:
        """Rows of device drafts that grammars refuse. Their tokens become NO_TOKEN.

        Call it first, once the round before is committed: grammars stand at its tokens then.
        """
        if self.refused is None:
            own = self.launched.drafted_tokens()
            starts = self.batch_starts
            rows = []
            if own is not None:
                for i, w in enumerate(self.work):
                    constraint = w.job.constraint
                    if constraint is None or not self.still_running(w, jobs):
                        continue
                    drafts = own[starts[i] + 1 : starts[i + 1]].tolist()
                    n = len(constraint.draftable(drafts))
                    if n < len(drafts):
                        rows.append(starts[i] + 1 + n)
                if rows:
                    own[rows] = NO_TOKEN
            self.refused = tuple(rows)
        return self.refused

    def fill_tokens(self, ended: float) -> None:
        """Fill in positions and tokens of the rows: the round before was committed at `ended`."""
        if self.is_known:
            self.began = self.drafted = ended
            return
        launched, work, drafted = self.launched, [], self.launched.drafted_tokens()
        own = None if drafted is None else drafted.tolist()
        for i, (w, start) in enumerate(zip(self.work, launched.batch.starts, strict=False)):
            tokens = [] if own is None else own[start + 1 : start + w.seq.width]
            seq = replace(w.seq, n_past=w.slot.n_past, tokens=[w.job.anchor or 0, *tokens])
            drafts = Drafts(tokens, None if launched.q is None else launched.q[i, : len(tokens)])
            work.append(replace(w, seq=seq, drafts=drafts))
        self.work, launched.batch = work, replace(launched.batch, seqs=[w.seq for w in work])
        took = 0.0
        if launched.drafting is not None:
            took = 1e-3 * launched.drafting[0].elapsed_time(launched.drafting[1])
        self.began, self.drafted = ended, ended + took

    def find_spans(self) -> None:
        """Fix the rows to sample from. Masks are filled later."""
        spans, at = [], 0
        for w in self.work:
            at += w.seq.n_out
            if n := w.n_choice:
                held = w.job.constraint
                mask = None if held is None else SpanMask(held, w.job.sampler.usable(w.draft))
                spans.append(Span(w.job.sampler, at - n, n, w.drafts, mask))
        self.spans = spans

    def land(self, now: float, landed: float) -> None:
        """The results are on the host. landed: when those of the round before were."""
        self.arrived, self.since = now, self.drafted
        if self.is_behind:
            self.since = max(self.sent, landed) + self.drafted - self.began

    # -- its verdicts --------------------------------------------------------------------------------------------

    def choose(self, jobs: Mapping[int, Job], synth: SynthAcceptance | None) -> list[Chosen | None]:
        """The target's verdict on every part that has logits. Scores of prompts are sent on the way."""
        at, flawed = 0, {}
        for i, w in enumerate(self.work):
            at += w.seq.n_out
            if w.n_scored and self.still_running(w, jobs):
                flawed[i] = send_scores(w, self.launched.out.logits[at - w.seq.n_out :])
        verdicts = iter(self._verdicts(synth))
        chosen = [next(verdicts) if w.n_choice else None for w in self.work]
        return [flawed.get(i) or c for i, c in enumerate(chosen)] if flawed else chosen

    def _verdicts(self, synth: SynthAcceptance | None) -> list[Chosen]:
        """Choose for all spans in one call. If that fails, choose for each alone, so that only the guilty one fails."""
        logits, found = self.launched.out.logits, self.launched.found
        try:
            return choose(logits, self.spans, synth=synth, best=found)
        except Exception as e:
            if is_device_error(e):
                raise
            log.exception("a round's tokens could not be chosen together")
        verdicts = []
        for span in self.spans:
            try:
                verdicts += choose(logits, [span], synth=synth, best=found)
            except Exception as e:
                if is_device_error(e):
                    raise
                error = blamed(e)
                verdicts.append(
                    Chosen([], 0, error=error if isinstance(error, SlotError) else SlotError(str(error)))
                )
        return verdicts

    def reconcile(self, chosen: Sequence[Chosen | None]) -> tuple[list[Chosen | None], set[int]]:
        """Cut verdicts to the rows that the device kept, because the next round has started behind those.

        Also returns the slots for which the next round ran with a wrong token, or not at all: the best token is an end, banned, or none.
        """
        best, starts, behind = self.launched.found, self.batch_starts, self.next
        assert behind is not None
        if behind.known == ():  # no row of the next round depends on this one
            return list(chosen), set()
        assert best is not None
        if behind.known is not None:
            return self._reconcile_prompt(chosen[0], int(best[0, 0]), behind)
        found, out, off = list(map(int, best[0, : starts[-1]].tolist())), [], set()
        for i, (w, c) in enumerate(zip(self.work, chosen, strict=True)):
            own, ends = (
                found[starts[i] : starts[i + 1]],
                frozenset() if behind.ends is None else behind.ends[i],
            )
            n = n_kept(w.draft, own, ends, None if behind.forced is None else behind.forced[i])
            if c is not None and len(c.tokens) > n:
                c = replace(c, tokens=c.tokens[:n], n_accepted=min(c.n_accepted, n - 1))
            elif c is not None and c.error is None and len(c.tokens) < n:
                c = Chosen(
                    [],
                    0,
                    error=SlotError(f"the device kept {n} rows, of which {len(c.tokens)} are right"),
                )
            if c is None or c.tokens != [*w.draft[: n - 1], own[n - 1]] or own[n - 1] in ends:
                off.add(w.slot.index)
            out.append(c)
        return out, off

    def _reconcile_prompt(
        self, c: Chosen | None, found: int, behind: Continuation
    ) -> tuple[list[Chosen | None], set[int]]:
        """The same behind a prompt: the slot's rows are wrong if its first token is another one than the device found, or may end it."""
        ends = frozenset() if behind.ends is None else behind.ends[0]
        is_off = c is None or c.tokens != [found] or found in ends
        return [c], {self.work[0].slot.index} if is_off else set()

    def fail_slot(self, fault: Fault, chosen: Sequence[Chosen | None]) -> list[Chosen | None]:
        """A guard tripped in this forward: fail the slot that it names, or all slots if it names none.

        The forward ran, and the results of other slots are right: commit them as usual.
        """
        guilty = fault.slot([w.seq.slot for w in self.work], self.batch_starts)
        return [
            Chosen([], 0, error=fault.error(w.seq.slot)) if guilty in (w.seq.slot, ALL_SLOTS) else c
            for w, c in zip(self.work, chosen, strict=True)
        ]
