"""Before the first request: run rounds of every kind once, so that nothing is compiled or measured on a user's time.

It fills the controller's cost tables, touches all memory paths, and leaves no trace in slots, statistics or estimates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pyspec.device.capture import capture
from pyspec.draft.drafter import CheckedDrafter
from pyspec.engine.loop.job import Job
from pyspec.engine.loop.loop import Loop
from pyspec.errors import RequestError
from pyspec.request import Delta, Event, Request, SamplingParams
from pyspec.sample.sampler import SlotSampler
from pyspec.slots.arena import BUCKETS, WIDE
from pyspec.text.stream import TextStream
from pyspec.text.template import ChatTemplate
from pyspec.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

BUDGET_S = 2.5
N_PROMPT, N_ROUND, MOST_PROMPT_STEPS = 12, 4, 64
SIZES, EVEN = (*BUCKETS, *WIDE), 256  # rows of graphs; beyond so many only the largest is timed
PROBE_TOKENS = 48  # of text that a drafter is checked with
PROBE_PROMPT = "Write a short story about a small dog who finds a key."


@contextmanager
def _rehearsing(loop: Loop) -> Iterator[None]:
    """No line per request for requests that nobody made; and what fails by a bug fails the load, instead of every request after it."""
    commit_log = logging.getLogger("pyspec.engine.loop.commit")
    level = commit_log.level
    commit_log.setLevel(logging.WARNING)
    was = loop.raises_bugs
    loop.raises_bugs = loop.speculator.raises_bugs = True
    try:
        yield
    finally:
        commit_log.setLevel(level)
        loop.raises_bugs, loop.speculator.raises_bugs = was, False


def _ignore(event: Event) -> None:
    pass


def _clear(loop: Loop) -> None:
    """Cancel what runs, and leave nothing in the slots."""
    for job in list(loop.jobs.values()):
        loop.cancel(job)
    loop.step()
    for slot in loop.table.slots:
        loop.table.drop(slot)


def _begin(loop: Loop, tokenizer: Tokenizer, n_busy: int, n_tokens: int, n_overhang: int) -> None:
    """`n_busy` slots decode, up to `n_tokens` tokens each."""
    gen = torch.Generator().manual_seed(n_busy)
    params, n_vocab = SamplingParams(temperature=0.0, ignore_eos=True), loop.target.n_vocab
    loop.controller.force = 0, 0
    for i in range(n_busy):
        prompt = tuple(torch.randint(n_vocab, (N_PROMPT,), generator=gen).tolist())
        request = Request(prompt=prompt, params=params, max_tokens=n_tokens, cache_prompt=False)
        sampler, n_rows = SlotSampler(params, n_vocab, (), prompt), N_PROMPT + n_tokens + n_overhang
        stream = TextStream(tokenizer, ())
        loop.submit(Job(f"warm-up {i}", request, _ignore, stream, sampler, frozenset(), n_rows, n_rows))
    for _ in range(MOST_PROMPT_STEPS):
        loop.step()
        if all(job.is_decoding for job in loop.jobs.values()):
            break


def rehearsed(n_slot: int, n_max: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """Of all slots, of one and of some numbers between: how many of them draft, and how many tokens each, in rounds of as many rows as
    each graph holds. A number of slots goes on where the drafts of the last one ended; the size where they meet is timed with both, and
    the difference is what a slot costs by itself. Most important first.
    """
    steps = [1]
    while steps[-1] < n_slot:
        steps.append(min(steps[-1] * (n_max + 1), n_slot) if n_max else n_slot)
    ends = [*steps[1:], n_slot * (n_max + 1)]
    found = [(busy, [(0, 0), *_drafts(busy, end, n_max)]) for busy, end in zip(steps, ends, strict=True)]
    return [found[-1], *found[:-1]]


def _drafts(busy: int, end: int, n_max: int) -> list[tuple[int, int]]:
    """From `busy` rows up to `end`, the largest first; beyond some hundred rows a round's time grows evenly, and the largest tells."""
    most = busy * (n_max + 1)
    sizes = [(before, n) for before, n in zip((0, *SIZES), SIZES, strict=False) if busy < n and before < min(end, most)]
    sizes = [(max(before, busy), min(n, most)) for before, n in sizes if n <= EVEN or n == sizes[-1][1]]
    # without drafts all slots may have fewer rows than their graph
    sizes = [(before, n) for before, n in sizes if before < n]
    return [_shared(busy, n - busy, before - busy, n_max) for before, n in [*sizes[-1:], *sizes[:-1]]]


def _shared(busy: int, most: int, beyond: int, n_max: int) -> tuple[int, int]:
    """How many slots draft, and how many tokens each, so that all draft more than `beyond` tokens and `most` at most: as short drafts as do, else
    those that come nearest."""
    ways = [(min(busy, most // each), each) for each in range(-(-most // busy), min(most, n_max) + 1)]
    return next((way for way in ways if way[0] * way[1] > beyond), max(ways, key=lambda way: way[0] * way[1]))


def warm_up(loop: Loop, tokenizer: Tokenizer, n_overhang: int, n_bytes: int) -> None:
    """Rounds of all sizes that have graphs, as long as the time budget lasts.

    n_bytes  what forwards and checkpoints may take of the device's memory: it is taken before the first of them comes
    """
    capture(loop.worker, loop.limits.prompts, n_bytes, loop.limits.decoding)
    began, controller = time.perf_counter(), loop.controller
    n_tokens = loop.table.n_row // len(loop.table.slots) - N_PROMPT - n_overhang
    if n_tokens < (controller.n_max + 1) * N_ROUND + 1:
        return
    with _rehearsing(loop):
        for n_busy, drafts in rehearsed(len(loop.table.slots), controller.n_max):
            needed = (N_ROUND + 1) * sum(1 + n for _, n in drafts)
            _begin(loop, tokenizer, n_busy, min(needed, n_tokens), n_overhang)
            for controller.force in drafts:
                if time.perf_counter() - began >= BUDGET_S:
                    break
                for _ in range(N_ROUND):
                    loop.step()
            _clear(loop)
    controller.forget_acceptance()
    loop.stats.reset()
    log.debug("warm-up took %.0f ms", 1e3 * (time.perf_counter() - began))


def greedy_text(loop: Loop, tokenizer: Tokenizer, prompt: tuple[int, ...], n_tokens: int, n_overhang: int) -> list[int]:
    """Prompt and up to `n_tokens` tokens of the target's own greedy text, undrafted; fewer when time runs out."""
    text = list(prompt)

    def take(event: Event) -> None:
        if isinstance(event, Delta):
            text.extend(event.tokens)

    params = SamplingParams(temperature=0.0)
    request = Request(prompt=prompt, params=params, max_tokens=n_tokens, cache_prompt=False, n_draft_max=0)
    sampler = SlotSampler(params, loop.target.n_vocab, tokenizer.eog, prompt)
    n_rows = len(prompt) + n_tokens + n_overhang
    loop.submit(Job("probe", request, take, TextStream(tokenizer, ()), sampler, tokenizer.eog, n_rows, n_rows))
    deadline = time.perf_counter() + BUDGET_S
    while not loop.is_idle and time.perf_counter() < deadline:
        loop.step()
    _clear(loop)
    loop.controller.forget_acceptance()
    loop.stats.reset()
    return text


def check_drafter(loop: Loop, tokenizer: Tokenizer, template: ChatTemplate | None, n_overhang: int) -> None:
    """Have a drafter that can look for mistakes of its file do so. Skipped where forwards are too slow for the budget."""
    drafter = loop.drafter
    n_rows = PROBE_TOKENS + 64 + n_overhang
    takes_s = PROBE_TOKENS * loop.controller.verify_ms(1) / 1e3
    if not isinstance(drafter, CheckedDrafter) or takes_s > BUDGET_S or loop.table.n_row < n_rows:
        return
    prompt = PROBE_PROMPT
    if template is not None:
        try:
            prompt = template.render([{"role": "user", "content": PROBE_PROMPT}])
        except RequestError as e:  # costs the chats that it refuses, not the load
            log.debug("the drafter is checked without the chat template: %s", e)
    ids = tuple(tokenizer.encode(prompt))[:64]
    with _rehearsing(loop):
        tokens = greedy_text(loop, tokenizer, ids, PROBE_TOKENS, n_overhang)
    slot = loop.table.slots[0]
    loop.table.acquire(slot, n_rows)
    warning = drafter.check(loop.target, slot, tokens)
    loop.table.release(slot)
    loop.table.drop(slot)
    loop.memory.reset(slot.index)
    if warning is not None:
        log.warning("%s", warning)
