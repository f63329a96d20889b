"""The two steps of the loop: reasons to switch rounds in flight off and on, and rounds of many slots."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from functools import partial

import pytest
from draft_fakes import Ahead, Oracle, text_after
from engine_rig import FIXTURES, GREEDY, Rig, every_rig, fake_rig, rig, rig_for
from known_texts import N_TEXT, continuation, known_texts, tiny

from pyspec.engine.load.warmup import warm_up
from pyspec.slots.arena import BUCKETS
from pyspec.slots.batch import SeqMode
from pyspec.slots.round import Round

QWEN35 = FIXTURES / "qwen35.gguf"


@pytest.fixture
def rounds() -> Iterator[list[bool]]:
    """Of each round that is read, whether the next one was in flight; every rig runs ahead."""
    seen: list[bool] = []

    def ahead(r: Rig) -> None:
        r.run_ahead()
        r.watch_reads(seen)

    with every_rig(ahead):
        yield seen


@pytest.mark.parametrize(
    ("settings", "slot"), [({"page_size": 16, "kv_pool": 160}, -1), ({}, 0)], ids=["pages", "its slot"]
)
def test_a_request_that_waits_holds_nobody_up(
    settings: dict[str, int], slot: int, rounds: list[bool]
) -> None:
    """For pages, while a slot is idle, or for a slot that is busy: rounds stay in flight."""
    r = rig(QWEN35, spec_type="none", np=2, **settings)
    first = r.submit([1, 2, 3], 100, slot=slot)
    r.steps(4)
    waiter = r.submit([4, 5, 6], 100, slot=slot)
    rounds.clear()
    r.steps(20)
    assert 20 < len(first.tokens) < 100 and not waiter.events
    assert sum(rounds) >= 19, "rounds wait for a request that can not be seated"
    r.run()
    assert len(waiter.tokens) == 100


def test_asking_again_who_can_be_seated_looks_at_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 100,000 tokens that waits for pages is not looked up in every round."""
    r = rig(QWEN35, spec_type="none", np=2, page_size=16, kv_pool=160)
    r.submit([1, 2, 3], 100)
    r.loop.step()
    r.submit([4] * 60, 80)
    asked, admit = [], type(r.loop.table).can_admit
    monkeypatch.setattr(type(r.loop.table), "can_admit", lambda *a: asked.append(1) or admit(*a))
    for _ in range(30):
        r.loop.needs_sync()
    assert len(asked) == 1


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("kind", ["mtp", "dflash", "oracle"])
def test_sixty_four_slots_draft_in_rounds_of_more_rows_than_graphs_hold(
    kind: str, rounds: list[bool]
) -> None:
    texts = known_texts(tiny("qwen35"))
    if kind == "oracle":
        r = rig_for(tiny("qwen35"), Ahead(5, text=partial(continuation, tiny("qwen35"))), np=64, ctx=96)
    else:
        more = {"draft_path": tiny("qwen35", drafter=True)} if kind == "dflash" else {"n_draft_max": 3}
        r = rig(tiny("qwen35"), spec_type=kind, n_draft_fixed=True, np=64, ctx=96, queue=256, **more)
    r.loop.queue.limit = 256
    sizes: list[int] = []
    launch = r.loop.worker.launch
    r.loop.worker.launch = lambda round_: sizes.append(round_.n_row) or launch(round_)  # type: ignore[method-assign]
    prompts = [(p, t) for p, t in texts.items() if len(p) + N_TEXT < 96]
    heard = [
        (r.submit(prompt, N_TEXT - i % 7), text) for i, (prompt, text) in enumerate((prompts * 80)[:80])
    ]
    r.run()
    assert all(h.tokens == text[: len(h.tokens)] and h.finish == "length" for h, text in heard)
    assert max(sizes) > BUCKETS[-1]


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("kind", ["none", "mtp", "dflash"])
def test_the_plain_loop_gives_the_same_text_and_never_looks_ahead(kind: str) -> None:
    texts = list(known_texts(tiny("qwen35")).items())[:4]
    more = {"draft_path": tiny("qwen35", drafter=True)} if kind == "dflash" else {}
    r = rig(tiny("qwen35"), spec_type=kind, np=3, plain_loop=True, **more)
    assert not r.loop.lookahead.on and not r.loop.may_defer and r.loop.worker.arena is None
    heard = r.all([p for p, _ in texts], N_TEXT)
    assert [h.tokens for h in heard] == [t for _, t in texts]


def test_a_round_is_plain_integers(monkeypatch: pytest.MonkeyPatch, rounds: list[bool]) -> None:
    """It could be sent to another process: nothing in it refers to objects of this one."""
    told: list[Round] = []
    r = rig_for(QWEN35, Ahead(5, text=partial(continuation, QWEN35)), np=3)
    for name in ("launch", "launch_behind"):
        inner = getattr(r.loop.worker, name)
        monkeypatch.setattr(r.loop.worker, name, lambda *a, inner=inner: told.append(a[-1]) or inner(*a))
    for prompt in list(known_texts(QWEN35))[:4]:
        r.submit(prompt, N_TEXT)
    r.run()
    assert any(t.behind is not None and t.behind.n_draft for t in told) and any(
        t.behind is None for t in told
    )
    for round_ in told:
        again = pickle.loads(pickle.dumps(round_))
        assert again == round_ and [list(p) for p in again.pages] == [list(p) for p in round_.pages]
        assert all(isinstance(token, int) for seq in round_.seqs for token in seq.tokens)
        assert {type(v) for seq in round_.seqs for v in dataclasses.astuple(seq)} <= {
            int,
            SeqMode,
            list,
            tuple,
        }


def test_a_request_whose_sampler_breaks_ends_alone() -> None:
    r = fake_rig(3, Oracle(5))
    heard = [r.submit([i, 2, 3], 30) for i in range(3)]
    r.steps(3)
    heard[1].job.sampler.noise = None  # type: ignore[assignment]
    heard[1].job.sampler.params = dataclasses.replace(GREEDY, temperature=1.0)
    r.run()
    assert heard[1].error is not None and "TypeError" in str(heard[1].error)
    for i in (0, 2):
        assert heard[i].tokens == text_after([i, 2, 3], 30)


def test_a_request_whose_text_breaks_ends_alone() -> None:
    r = fake_rig(2, Oracle(5))
    heard = [r.submit([i, 2, 3], 30) for i in range(2)]
    r.loop.step()
    heard[0].job.stream.push = None  # type: ignore[assignment, method-assign]
    r.run()
    assert heard[0].error is not None and heard[1].tokens == text_after([1, 2, 3], 30)


@pytest.mark.parametrize("part", ["run", "draft", "observe"])
def test_a_model_that_can_not_run_a_round_does_not_load(part: str) -> None:
    """While requests run, a bug ends the round's; without a check in the warm-up, it would end every request."""
    r = fake_rig(2, drafter := Oracle(5))
    setattr(r.loop.target if part == "run" else drafter, part, lambda *a: [][7])
    with pytest.raises(IndexError):
        warm_up(r.loop, r.tokenizer, r.info.n_overhang, 0)
    assert not r.loop.raises_bugs and not r.loop.speculator.raises_bugs
