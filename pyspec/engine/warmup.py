"""Before the first request: run rounds of every kind once, so that nothing is compiled or measured on a user's time.

It fills the controller's cost tables, touches all memory paths, and leaves no trace in slots, statistics or estimates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pyspec.draft.drafter import CheckedDrafter, GraphedDrafter
from pyspec.engine.job import Job
from pyspec.engine.loop import Loop
from pyspec.engine.memory_plan import size
from pyspec.errors import RequestError
from pyspec.request import Delta, Event, Request, SamplingParams
from pyspec.sample.sampler import SlotSampler
from pyspec.slots.arena import BUCKETS
from pyspec.slots.batch import Seq, lay_out
from pyspec.text.stream import TextStream
from pyspec.text.template import ChatTemplate
from pyspec.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

BUDGET_S = 2.0
N_PROMPT, N_ROUND = 12, 4
N_SMALL = 32  # pieces of half a megabyte, for tensors below that
PROBE_TOKENS = 48  # of text that a drafter is checked with
PROBE_PROMPT = "Write a short story about a small dog who finds a key."


@contextmanager
def _quiet() -> Iterator[None]:
    """No line per request for requests that nobody made."""
    loop_log = logging.getLogger("pyspec.engine.loop")
    level = loop_log.level
    loop_log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        loop_log.setLevel(level)


def _ignore(event: Event) -> None:
    pass


def _run(loop: Loop, tokenizer: Tokenizer, n_busy: int, n_draft: int, n_overhang: int, seed: int) -> None:
    """`n_busy` slots decode N_ROUND rounds with exactly `n_draft` drafted tokens."""
    gen = torch.Generator().manual_seed(seed)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    n_vocab, n_tokens = loop.target.n_vocab, (n_draft + 1) * N_ROUND + 1
    loop.controller.force = n_draft
    limit, loop.queue.limit = loop.queue.limit, n_busy
    for i in range(n_busy):
        prompt = tuple(torch.randint(n_vocab, (N_PROMPT,), generator=gen).tolist())
        request = Request(prompt=prompt, params=params, max_tokens=n_tokens, cache_prompt=False)
        sampler, n_rows = SlotSampler(params, n_vocab, (), prompt), N_PROMPT + n_tokens + n_overhang
        stream = TextStream(tokenizer, ())
        loop.submit(Job(f"warm-up {i}", request, _ignore, stream, sampler, frozenset(), n_rows, n_rows))
    loop.queue.limit = limit
    for _ in range(N_ROUND + 1):
        loop.step()
    for job in list(loop.jobs.values()):
        loop.cancel(job)
    loop.step()
    for slot in loop.table.slots:
        loop.table.drop(slot)


def graph_shapes(n_slot: int, width: int, late: bool) -> list[tuple[int, int]]:
    """Rows and sequences of a batch for each graph of a verify; `width`: most rows of a sequence.

    late  batches of one row a sequence have graphs of their own (`Needs.late`), so others have two rows somewhere
    """
    sizes = [b for b in BUCKETS if b <= n_slot * width]
    if not late:
        return [(n, min(n_slot, n)) for n in sizes]
    singles = sorted({n_slot, *(b for b in BUCKETS if b < n_slot)})  # the last one may need padding
    return [(n, n) for n in singles] + [(n, min(n_slot, -(-n // 2))) for n in sizes if n > 1]


def hold(device: torch.device, n_bytes: int) -> None:
    """Have the GPU's allocator own so many bytes in one piece, free for whoever asks, and a few small pieces.

    Forwards of prompts allocate as they are cut, each time a little differently; from one large piece they all get what
    they need, without it the allocator would sooner or later go back to the driver for a size it has not kept.
    """
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()  # pieces of other sizes, of forwards before
    try:
        pieces = [torch.empty(512 << 10, dtype=torch.uint8, device=device) for _ in range(N_SMALL)]
        pieces.append(torch.empty(n_bytes, dtype=torch.uint8, device=device))
        del pieces
    except torch.OutOfMemoryError:  # of a card that is shared, say: then they are had when they are needed
        log.info("the GPU has no %s in one piece", size(n_bytes))


@torch.inference_mode()
def capture(loop: Loop, n_bytes: int = 0) -> None:
    """Capture the graphs of every batch size now. Forwards on empty slots change nothing that anybody reads.

    A graph is captured at the second call, and its kernels are picked for the widths it is captured with: rows are
    shared out evenly.
    """
    slots, device, width = (
        loop.table.slots,
        loop.target.device,
        max(loop.controller.n_max + 1, loop.worker.needs.overhang),
    )
    if loop.worker.arena is None or loop.table.n_page < len(slots) * loop.table.pages_for(width):
        return  # no graphs, or a pool too small to try them all: they are captured as they come
    for n_row, n_seq in graph_shapes(len(slots), loop.controller.n_max + 1, loop.worker.needs.late):
        shares = [n_row // n_seq + (i < n_row % n_seq) for i in range(n_seq)]
        seqs = [Seq(i, 0, [0] * n, n_out=n) for i, n in enumerate(shares)]
        for _ in range(2):
            loop.worker.forward(lay_out(loop.table, seqs, device, arena=loop.worker.arena))
    if isinstance(loop.drafter, GraphedDrafter):
        loop.drafter.capture()
    loop.worker.forward.seal()
    # prompts: what they need is allocated, and libraries have loaded what they multiply with, before the first user comes
    hold(device, n_bytes)
    n_row = min(loop.limits.prompts, loop.table.n_row // len(slots))
    while n_row > BUCKETS[-1]:
        loop.worker.forward(lay_out(loop.table, [Seq(0, 0, [0] * n_row, keep=True, n_out=1)], device))
        n_row //= 2
    loop.memory.reset(0)
    for slot in slots:
        loop.table.drop(slot)


def warm_up(loop: Loop, tokenizer: Tokenizer, n_overhang: int, n_bytes: int) -> None:
    """Rounds with one and with all slots, plain and drafted, as long as the time budget lasts.

    n_bytes  what forwards and checkpoints may take of the device's memory: it is taken before the first of them comes
    """
    capture(loop, n_bytes)
    began, controller = time.perf_counter(), loop.controller
    per_slot = loop.table.n_row // len(loop.table.slots)
    if per_slot < N_PROMPT + (controller.n_max + 1) * N_ROUND + 1 + n_overhang:
        return
    with _quiet():
        for n_busy in sorted({1, len(loop.table.slots)}):
            for n_draft in sorted({0, controller.n_max // 2, controller.n_max}):
                if time.perf_counter() - began < BUDGET_S:
                    _run(loop, tokenizer, n_busy, n_draft, n_overhang, seed=n_draft)
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
    for late in list(loop.jobs.values()):
        loop.cancel(late)
    loop.step()
    for slot in loop.table.slots:
        loop.table.drop(slot)
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
    with _quiet():
        tokens = greedy_text(loop, tokenizer, ids, PROBE_TOKENS, n_overhang)
    slot = loop.table.slots[0]
    loop.table.acquire(slot, n_rows)
    warning = drafter.check(loop.target, slot, tokens)
    loop.table.release(slot)
    loop.table.drop(slot)
    loop.memory.reset(slot.index)
    if warning is not None:
        log.warning("%s", warning)
