"""Before the first request: a GPU runs rounds of every kind once, so that nothing is compiled or measured on a user's time.

They fill the controller's cost tables, touch all memory paths, and leave no trace in slots, statistics or estimates. A CPU compiles
nothing and times its rounds as they serve. A drafter checks its file on both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from pyspec.device.worker import Worker
from pyspec.engine.loop.loop import Loop
from pyspec.engine.loop.rehearsal import Rehearsal
from pyspec.errors import RequestError
from pyspec.request import SamplingParams
from pyspec.sample.choose import top
from pyspec.slots.arena import BUCKETS, WIDE
from pyspec.slots.batch import Seq, SeqMode
from pyspec.slots.round import LogitsNeed, plan_round
from pyspec.slots.table import Slot
from pyspec.text.template import ChatTemplate
from pyspec.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

BUDGET_S = 2.5
N_PROMPT, N_ROUND, MOST_PROMPT_STEPS = 12, 4, 64
SIZES, EVEN = (*BUCKETS, *WIDE), 256  # rows of graphs; beyond EVEN rows only the largest size is timed
PROBE_TOKENS = 48  # of text for the check of a drafter
PROBE_PROMPT = "Write a short story about a small dog who finds a key."


def _begin(rehearsal: Rehearsal, n_busy: int, n_tokens: int) -> None:
    """Have `n_busy` slots decode, up to `n_tokens` tokens each."""
    gen = torch.Generator().manual_seed(n_busy)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    rehearsal.force((0, 0))
    for i in range(n_busy):
        prompt = torch.randint(rehearsal.n_vocab, (N_PROMPT,), generator=gen).tolist()
        rehearsal.submit(f"warm-up {i}", prompt, n_tokens, params)
    for _ in range(MOST_PROMPT_STEPS):
        rehearsal.step()
        if not rehearsal.is_reading:
            break


def rehearsed(n_slot: int, n_max: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """The rounds to rehearse: for all slots, for one and for some numbers between, (drafting slots, tokens each) that fill each graph.

    A number of slots continues where the drafts of the last one ended. The size where they meet is timed with both; the difference is the
    cost of a slot. Most important first.
    """
    steps = [1]
    while steps[-1] < n_slot:
        steps.append(min(steps[-1] * (n_max + 1), n_slot) if n_max else n_slot)
    ends = [*steps[1:], n_slot * (n_max + 1)]
    found = [(busy, [(0, 0), *_drafts(busy, end, n_max)]) for busy, end in zip(steps, ends, strict=True)]
    return [found[-1], *found[:-1]]


def _drafts(busy: int, end: int, n_max: int) -> list[tuple[int, int]]:
    """Drafts that give `busy` to `end` rows, the largest first. Beyond EVEN rows the time grows evenly, so the largest suffices."""
    most = busy * (n_max + 1)
    sizes = [
        (before, n)
        for before, n in zip((0, *SIZES), SIZES, strict=False)
        if busy < n and before < min(end, most)
    ]
    sizes = [(max(before, busy), min(n, most)) for before, n in sizes if n <= EVEN or n == sizes[-1][1]]
    # without drafts, all slots may have fewer rows than their graph
    sizes = [(before, n) for before, n in sizes if before < n]
    return [_shared(busy, n - busy, before - busy, n_max) for before, n in [*sizes[-1:], *sizes[:-1]]]


def _shared(busy: int, most: int, beyond: int, n_max: int) -> tuple[int, int]:
    """The number of drafting slots and their tokens each, for more than `beyond` and at most `most` drafted tokens. Takes the shortest
    drafts that fit, else the nearest."""
    ways = [(min(busy, most // each), each) for each in range(-(-most // busy), min(most, n_max) + 1)]
    return next(
        (way for way in ways if way[0] * way[1] > beyond), max(ways, key=lambda way: way[0] * way[1])
    )


def warm_up(loop: Loop, tokenizer: Tokenizer, n_overhang: int, n_bytes: int) -> None:
    """Run rounds of all sizes that have graphs, within the time budget.

    n_bytes  device memory of forwards and checkpoints, reserved before the first of them
    """
    rehearsal = Rehearsal(loop, tokenizer, n_overhang)
    rehearsal.capture(n_bytes)
    began, n_slot, n_max = time.perf_counter(), rehearsal.n_slot, rehearsal.n_draft
    n_tokens = rehearsal.n_row // n_slot - N_PROMPT - n_overhang
    if n_tokens < (n_max + 1) * N_ROUND + 1:
        return
    with rehearsal.running():
        for n_busy, drafts in rehearsed(n_slot, n_max):
            needed = (N_ROUND + 1) * sum(1 + n for _, n in drafts)
            _begin(rehearsal, n_busy, min(needed, n_tokens))
            for each in drafts:
                rehearsal.force(each)
                if time.perf_counter() - began >= BUDGET_S:
                    break
                rehearsal.step(N_ROUND)
            rehearsal.clear()
    log.debug("warm-up took %.0f ms", 1e3 * (time.perf_counter() - began))


def greedy_text(
    worker: Worker, slot: Slot, n_rows: int, prompt: Sequence[int], eog: frozenset[int]
) -> list[int]:
    """Prompt and up to PROBE_TOKENS tokens of the target's own greedy text, without drafts; fewer if time runs out. An idle slot is seated for
    `n_rows`, and stays seated."""
    worker.table.acquire(slot, n_rows)
    worker.memory.reset(slot.index)
    text, rows = list(prompt), list(prompt)
    deadline = time.perf_counter() + BUDGET_S
    while len(text) < len(prompt) + PROBE_TOKENS and time.perf_counter() < deadline:
        seq = Seq(slot.index, len(text) - len(rows), rows, SeqMode.KEEP, n_out=1)
        launched = worker.launch(plan_round(worker.table, [seq], reads=LogitsNeed(False)))
        launched.wait()
        has_fault = worker.faults.take() is not None
        worker.forget_round()
        found = top(launched.out.logits) if launched.found is None else launched.found
        rows = [int(found[0, 0])]
        if has_fault or rows[0] in eog:
            break
        text += rows
    return text


def check_drafter(
    worker: Worker, round_ms: float, tokenizer: Tokenizer, template: ChatTemplate | None, n_overhang: int
) -> None:
    """Have a drafter check its own file, if it can. Skipped if forwards are too slow for the budget: round_ms, of one row."""
    drafter, table, n_rows = worker.drafter, worker.table, PROBE_TOKENS + 64 + n_overhang
    is_slow = PROBE_TOKENS * round_ms / 1e3 > BUDGET_S
    if drafter is None or not drafter.checks or is_slow or table.n_row < n_rows:
        return
    if 0 < table.n_chunk < n_rows:  # rings have no room for the text in one forward
        return
    prompt = PROBE_PROMPT
    if template is not None:
        try:
            prompt = template.render([{"role": "user", "content": PROBE_PROMPT}])
        except RequestError as e:  # costs the chats that it refuses, not the load
            log.debug("the drafter is checked without the chat template: %s", e)
    slot, given = table.slots[0], tokenizer.encode(prompt)[:64]
    tokens = greedy_text(worker, slot, n_rows, given, tokenizer.eog)
    worker.memory.reset(slot.index)
    warning = drafter.check(worker.target, slot, tokens)
    table.release(slot)
    worker.memory.reset(slot.index)
    if warning is not None:
        log.warning("%s", warning)
