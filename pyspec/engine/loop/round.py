"""Plans a round: the rows of each request, and how requests share the rows of a forward.

The device gets `slots.round.Round`, plain integers. Planning is arithmetic: no torch here and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pyspec.engine.loop.job import Job
from pyspec.engine.policy.plan import PromptRules
from pyspec.slots.batch import Seq, SeqMode
from pyspec.slots.drafts import NO_DRAFTS, Drafts
from pyspec.slots.round import ALL, LogitsNeed
from pyspec.slots.table import Slot

OLDEST_SHARE = 4  # the oldest prompt gets this part of the prompt rows
PROMPT_SHARE = 8  # prompts get at least this part of a forward
MOST_BANS = 64  # a round carries no more banned tokens; a text has fewer ends
LAST_SHARE = 4  # a forward may be larger by this part if it finishes all prompts: without a graph, a few more rows cost the host nothing


@dataclass(frozen=True, slots=True)
class Work:
    """One request's part in a round. `seq` has its rows: the anchor or a prompt chunk, then its drafts.

    n_scored  leading rows whose logits are needed for prompt logprobs
    """

    job: Job
    slot: Slot
    seq: Seq
    drafts: Drafts = NO_DRAFTS
    n_scored: int = 0

    @property
    def draft(self) -> Sequence[int]:
        """The drafted tokens."""
        return self.drafts.tokens

    @property
    def n_choice(self) -> int:
        """Trailing rows to sample a token from."""
        return (
            self.seq.n_out
            if not self.n_scored
            else int(self.seq.n_past + self.seq.width == self.job.n_prefill)
        )

    @property
    def reads_logits(self) -> bool:
        """The host may read more of the rows than their best tokens outside `bans`. False only for plain greedy rows."""
        sampler = self.job.sampler
        # rows of a prompt may be scored, and the cache keeps the last one's logits
        if self.seq.keep and not self.job.is_decoding:
            return self.seq.n_out > 0
        is_plain = (
            sampler.params.greedy and sampler.banned is not None and sampler.params.logprobs is None
        )
        return not is_plain or self.job.constraint is not None

    @property
    def bans(self) -> frozenset[int]:
        """Tokens that its rows may not choose. Complete only where `reads_logits` is False."""
        return self.job.sampler.banned or frozenset()

    @property
    def is_prompt(self) -> bool:
        return self.seq.n_out == 0 or (self.seq.keep and self.seq.width > 1)


def logits_need(work: Iterable[Work]) -> LogitsNeed:
    """The results of a round that the host reads: only best tokens if all rows share a few bans, else all logits."""
    choosing = [w for w in work if w.seq.n_out]
    kinds = {w.bans for w in choosing}
    bans = next(iter(kinds), frozenset())
    if any(w.reads_logits for w in choosing) or len(kinds) > 1 or len(bans) > MOST_BANS:
        return ALL
    return LogitsNeed(False, tuple(sorted(bans)))


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Row limits of a forward, with and without decoding slots."""

    decoding: int
    prompts: int


def pauses(job: Job, rules: PromptRules) -> bool:
    """The prompt pauses between its chunks."""
    n_read = 0 if job.slot is None else job.slot.n_past - job.n_cached
    return rules.pauses(job.n_prefill - job.n_cached, n_read)


def plan_work(
    jobs: Iterable[Job], drafts: Mapping[int, Drafts], limits: RowLimits, n_late: int = 0
) -> list[Work]:
    """Plan [anchor, drafts...] for decoding slots, then prompt chunks in the remaining rows. drafts: by slot. n_late: as in Memory"""
    jobs = list(jobs)
    work = [_verify(job, drafts, n_late) for job in jobs if job.is_decoding]
    prompts = [job for job in jobs if not job.is_decoding]
    n_row = limits.decoding if work else limits.prompts
    n_verify, n_left = sum(w.seq.width for w in work), sum(job.todo[0] for job in prompts)
    free = max(n_row - n_verify, -(-n_row // PROMPT_SHARE))
    if n_verify + n_left <= min(n_row + n_row // LAST_SHARE, limits.prompts):
        free = max(free, n_left)
    given = share_rows(free, [job.todo for job in prompts])
    if any(job.are_whole for job in prompts):
        given = _uncut(prompts, given, limits.prompts - n_verify)
    chunks = zip(prompts, given, strict=True)
    return work + _one_scored([_chunk(job, n) for job, n in chunks if n])


def _uncut(prompts: Sequence[Job], given: Sequence[int], most: int) -> list[int]:
    """Rows for each prompt where no picture may be cut: fewer than given, or more where the next token is a picture's. `most` for all, which
    one picture does not exceed; where several do, the first prompt has its picture and the others wait."""
    fewer, more = zip(*(job.whole_rows(n) for job, n in zip(prompts, given, strict=True)), strict=True)
    found, has_picture = list(fewer), False
    for i in [i for i, n in enumerate(given) if n and not fewer[i]]:
        if sum(found) + more[i] > most:
            if has_picture:
                continue
            found = [0] * len(found)
        found[i], has_picture = more[i], True
    return found


def _one_scored(chunks: list[Work]) -> list[Work]:
    """Keep only the first scored chunk: memory holds the logits of one."""
    scored = [w for w in chunks if w.n_scored]
    return chunks if len(scored) < 2 else [w for w in chunks if not w.n_scored or w is scored[0]]


def waits(slot: Slot, position: int, n_fold: int, n_late: int) -> bool:
    """Record the slot's single row at `position` behind `n_fold` others, and fold it later.

    Slots write their states in turn, so that rounds take the same time.
    """
    return n_fold < n_late and (position + slot.index) % (n_late + 1) > 0


def _verify(job: Job, drafts: Mapping[int, Drafts], n_late: int) -> Work:
    slot = job.slot
    assert slot is not None and job.anchor is not None
    own = drafts.get(slot.index, NO_DRAFTS)
    draft = job.sampler.usable(own.tokens)  # an invalid id is never embedded
    if job.constraint is not None and draft:
        draft = job.constraint.draftable(draft)  # a token that the grammar refuses gets no row
    tokens = [job.anchor, *draft]
    mode = SeqMode.VERIFY
    if not draft:
        mode = SeqMode.LATE if waits(slot, slot.n_past, slot.n_fold, n_late) else SeqMode.KEEP
    seq = Seq(slot.index, slot.n_past, tokens, mode, len(tokens), slot.n_fold, shift=slot.shift)
    return Work(job, slot, seq, own.first(len(draft)))


def _chunk(job: Job, n: int) -> Work:
    slot = job.slot
    assert slot is not None
    end = slot.n_past + n
    n_scored = min(n, job.n_to_score)
    n_out = n if n_scored else int(end == job.n_prefill)
    seq = Seq(
        slot.index,
        slot.n_past,
        job.prefill[slot.n_past : end],
        SeqMode.KEEP,
        n_out,
        slot.n_fold,
        shift=slot.shift,
        images=slot.images_in(slot.n_past, end),
    )
    return Work(job, slot, seq, n_scored=n_scored)


def share_rows(n_free: int, todo: Sequence[tuple[int, int]]) -> list[int]:
    """Rows for each prompt in this forward. todo: (tokens left, tokens to the next cut; 0 if none), oldest first.

    The prompt with the fewest tokens left goes first, so that short prompts do not wait for long ones. The oldest always gets a part.
    """
    given = [0] * len(todo)
    n_free = max(n_free, 0)

    def give(i: int, most: int) -> int:
        left, cut = todo[i]
        n = min(min(left, cut or left) - given[i], most)
        given[i] += n
        return n

    if todo:
        n_free -= give(0, -(-n_free // OLDEST_SHARE))
    for i in sorted(range(len(todo)), key=lambda i: todo[i][0]):
        n_free -= give(i, n_free)
    return given
