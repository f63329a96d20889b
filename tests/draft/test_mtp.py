"""MTP: rows and chains against llama.cpp, and a cache that is exact after any drafts."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
from draft_fakes import Fickle
from engine_rig import FIXTURES, Heard, Rig, rig
from harness import Bench
from known_texts import continuation, known_texts
from llama_cases import check_chained_steps

from pyspec.draft.chain import Chain
from pyspec.slots.batch import Batch, Seq, SeqMode, lay_out
from pyspec.slots.drafts import DraftRequest, Drafts

CPU = torch.device("cpu")
MODELS = ["qwen35", "qwen35_q8_0", "qwen35_full_heads_q8_0"]
QWEN35 = FIXTURES / "qwen35.gguf"


def load(name: str, n_slot: int = 1) -> tuple[Bench, Chain]:
    bench = Bench(FIXTURES / f"{name}.gguf", n_slot=n_slot)
    drafter = bench.drafter("mtp", n_draft=4)
    assert isinstance(drafter, Chain)
    return bench, drafter


def one_shot(bench: Bench, drafter: Chain, slot: int, tokens: list[int]) -> torch.Tensor:
    """All rows of the block at once, with the target's hidden states; returns its post-norm output."""
    hidden = bench.forward(Seq(slot, 0, tokens, mode=SeqMode.KEEP)).hidden
    before = torch.cat([torch.zeros_like(hidden[:1]), hidden[:-1]])
    return drafter.block.forward(lay_out(bench.table, [Seq(slot, 0, tokens)], CPU), before)


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_llama_cpps(name: str) -> None:
    data = np.load(FIXTURES / f"{name}.npz")
    bench, drafter = load(name)
    got = one_shot(bench, drafter, 0, data["tokens"].tolist())
    assert (got - torch.from_numpy(data["mtp_hidden"])).abs().max() < 1e-3
    assert (drafter.block.head(got) - torch.from_numpy(data["mtp_logits"])).abs().max() < 1e-3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [1, 37, 120])
def test_chained_steps_are_llama_cpps(name: str, chunk: int) -> None:
    check_chained_steps(*load(name), name, chunk, 1e-3)


def exact_rows_of(r: Rig, h: Heard) -> tuple[list[int], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Left in the cache by a finished request: its tokens, and the K and V that the drafter holds to be exact."""
    drafter = r.loop.drafter
    assert isinstance(drafter, Chain)
    tokens = [*h.request.prompt, *h.tokens][:-1]  # the last one has no row
    rows = torch.tensor(r.filed(tokens))
    assert len(rows) == len(tokens)
    return tokens, [(p.k[rows], p.v[rows]) for p in drafter.block.memory.kv.values()]


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("n_draft", [1, 3, 5])
@pytest.mark.parametrize("ubatch", [16, 512])
def test_after_any_drafts_the_cache_is_that_of_one_shot(n_draft: int, ubatch: int) -> None:
    """Three ragged slots with caps from 0 up, refused chains all the time."""
    r = rig(QWEN35, np=3, spec_type="mtp", n_draft_max=n_draft, n_draft_fixed=True, ubatch=ubatch)
    rng = random.Random(2)
    prompts = [rng.choices(range(290), k=n) for n in (5, 90, 33)]
    heard = [
        r.submit(p, 70, n_draft_max=(n_draft, 1, n_draft)[i], slot=i) for i, p in enumerate(prompts)
    ]
    r.run()
    for i, h in enumerate(heard):
        tokens, got = exact_rows_of(r, h)
        assert len(tokens) == len(prompts[i]) + 69
        bench, reference = load("qwen35")
        one_shot(bench, reference, 0, tokens)
        at = torch.tensor(bench.table.rows(bench.table.slots[0], 0, len(tokens)))
        for (k, v), pool in zip(got, reference.block.memory.kv.values(), strict=True):
            assert (k - pool.k[at]).abs().max() < 1e-3 and (v - pool.v[at]).abs().max() < 1e-3
        assert h.timings.draft_n > 0


def test_silent_slots_stay_caught_up() -> None:
    """A request that does not draft keeps at most `most_waiting` hidden states, and its rows are exact."""
    r = rig(QWEN35, spec_type="mtp", n_draft_max=3)
    drafter = r.loop.drafter
    assert isinstance(drafter, Chain)
    h, most = r.submit([1, 2, 3, 4], 150, n_draft_max=0), 0
    while not h.over:
        r.loop.step()
        if (state := drafter.states[0]) is not None:
            most = max(most, state.hidden.shape[0])
            assert state.n_row + state.hidden.shape[0] - 1 == r.loop.table.slots[0].n_past
    assert drafter.most_waiting // 2 < most <= drafter.most_waiting + 1
    tokens, got = exact_rows_of(r, h)
    bench, reference = load("qwen35")
    one_shot(bench, reference, 0, tokens)
    at = torch.tensor(bench.table.rows(bench.table.slots[0], 0, len(tokens)))
    assert (got[0][0] - next(iter(reference.block.memory.kv.values())).k[at]).abs().max() < 1e-3


def test_silent_slots_catch_up_together() -> None:
    """Requests that began at different times soon bring up their rows in one forward, and no more than `most_waiting` wait."""
    r = rig(QWEN35, np=4, spec_type="mtp", n_draft_max=3)
    drafter = r.loop.drafter
    assert isinstance(drafter, Chain) and drafter.most_waiting == 16
    bring_up, calls = drafter._bring_up, []
    drafter._bring_up = lambda late: (calls.append(len(late)), bring_up(late))[1]  # type: ignore[assignment,func-returns-value]
    heard = []
    for _ in range(4):
        heard.append(r.submit([1, 2, 3, 4], 120, n_draft_max=0))
        r.steps(5)
    for _ in range(20):  # slots with half of them waiting come along
        r.loop.step()
    calls.clear()
    for _ in range(48):
        r.loop.step()
        waiting = [state.n_hidden for state in drafter.states if state is not None]
        assert len(waiting) == 4 and max(waiting) <= 17
    assert calls == [4, 4, 4] or calls == [4, 4]
    r.run()
    assert all(h.over for h in heard)


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("most_waiting", [1, 2, 3])
def test_rows_that_come_along_right_after_a_draft_are_exact(most_waiting: int) -> None:
    """The anchor's row is there already when what was drafted behind it is accepted; beside slots that are silent."""
    r = rig(QWEN35, np=3, spec_type="mtp", n_draft_max=5, n_draft_fixed=True)
    drafter = r.loop.drafter
    assert isinstance(drafter, Chain)
    drafter.most_waiting = most_waiting
    bring_up, widths = drafter._bring_up, []
    drafter._bring_up = lambda late: (widths.extend(seq.width for _, seq in late), bring_up(late))[1]  # type: ignore[assignment,func-returns-value]
    silent = r.submit([1, 2, 3, 4], 60, n_draft_max=0)
    heard = r.all(list(known_texts(QWEN35))[:2], 40)
    assert silent.over and sum(h.timings.draft_n_accepted for h in heard) > 0 and min(widths) >= 1
    for h in heard:
        tokens, got = exact_rows_of(r, h)
        bench, reference = load("qwen35")
        one_shot(bench, reference, 0, tokens)
        at = torch.tensor(bench.table.rows(bench.table.slots[0], 0, len(tokens)))
        assert (got[0][0] - next(iter(reference.block.memory.kv.values())).k[at]).abs().max() < 1e-3


@pytest.mark.parametrize(("n_slot", "rows"), [(1, 16), (8, 16), (12, 10), (16, 8), (64, 8)])
def test_what_waits_of_all_slots_fits_a_graph_where_that_leaves_a_few(n_slot: int, rows: int) -> None:
    r = rig(QWEN35, np=n_slot, spec_type="mtp", n_draft_max=3)
    assert isinstance(r.loop.drafter, Chain) and r.loop.drafter.most_waiting == rows


def test_drafts_do_not_depend_on_the_neighbours() -> None:
    """The same request drafts and accepts the same alone and beside seven others."""
    alone = rig(QWEN35, spec_type="mtp", n_draft_max=4, n_draft_fixed=True)
    together = rig(QWEN35, np=8, spec_type="mtp", n_draft_max=4, n_draft_fixed=True)
    prompts = list(known_texts(QWEN35))[:8]
    want = [alone.generate(p, 30).timings.accepted_per_pos for p in prompts]
    heard = together.all(prompts, 30)
    assert [h.timings.accepted_per_pos for h in heard] == want


def test_a_draft_made_twice_is_the_same() -> None:
    """A forward may fail between draft and verdict; the second draft starts from the same hidden state."""
    bench, drafter = load("qwen35")
    slot = bench.table.slots[0]
    drafter.begin(slot, None)
    seq = bench.seq(0, [3, 1, 4, 1, 5, 9, 2, 6])
    batch = lay_out(bench.table, [seq], CPU)
    drafter.observe(batch, [8], bench.target.forward(batch))
    bench.commit(seq, 8)
    seen: list[tuple[list[int], torch.Tensor]] = []
    forward = drafter.block.forward

    def watch(batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        out = forward(batch, hidden)
        seen.append((batch.positions.tolist(), out[-1]))
        return out

    drafter.block.forward = watch  # type: ignore[method-assign]
    first = drafter.draft([DraftRequest(slot, 7, 4)])
    assert drafter.draft([DraftRequest(slot, 7, 4)]) == first
    assert [p for p, _ in seen] == [[0, 1, 2, 3, 4, 5, 6, 7, 8], [9], [10], [11], [8], [9], [10], [11]]
    for (_, a), (_, b) in zip(seen[:4], seen[4:], strict=True):
        assert (a - b).abs().max() < 1e-5


def test_accepted_chains_keep_the_pairing() -> None:
    """Long accepted runs by an oracle beside a drafter that only watches: its rows stay exact."""
    r = rig(QWEN35, spec_type="mtp", n_draft_max=5, n_draft_fixed=True)
    watcher = r.loop.drafter
    assert isinstance(watcher, Chain)
    oracle = Fickle(5, text=partial(continuation, QWEN35))
    watcher.draft = lambda asks: [Drafts(oracle.guess(ask)[: ask.n_draft]) for ask in asks]  # type: ignore[method-assign]
    watcher.most_waiting = 4
    prompt, text = list(known_texts(QWEN35).items())[2]
    h = r.generate(prompt, 30)
    assert h.tokens == text and h.timings.draft_n_accepted > 5
    tokens, got = exact_rows_of(r, h)
    bench, reference = load("qwen35")
    one_shot(bench, reference, 0, tokens)
    at = torch.tensor(bench.table.rows(bench.table.slots[0], 0, len(tokens)))
    assert (got[0][0] - next(iter(reference.block.memory.kv.values())).k[at]).abs().max() < 1e-3
