"""Every rank makes the same collectives in the same order, inside of graphs and outside, whatever its clock says and however slow it is.

On cards a rank whose order differs waits for ever. NCCL also wants that an operation is in a graph on every rank, or on none.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import pytest
from engine_rig import DEMO, DEMO_DRAFT
from known_texts import demo_prompts, joined
from rank_threads import RankRig, is_first

from pyspec.cuda.collective import Collective
from pyspec.cuda.graph import Graphed, Key
from pyspec.device import capture as capturing
from pyspec.device.follow import Call, Follower
from pyspec.draft import dflash
from pyspec.engine.load.warmup import check_drafter, warm_up
from pyspec.slots.batch import Batch

DRAFTERS: dict[str, dict[str, object]] = {
    "divided": {"draft_path": DEMO_DRAFT, "n_draft_fixed": True},
    "whole": {"draft_path": DEMO_DRAFT, "n_draft_fixed": True},
    "mtp": {"spec_type": "mtp", "n_draft_max": 3},
    "none": {"spec_type": "none"},
}
Step = tuple[object, ...]


class Orders:
    """What each rank does with the others, in its order, with graphs as on a card: captured at the second call of a shape, until they are sealed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: dict[int, list[Step]] = defaultdict(list)
        self._rank = threading.local()
        self._held: dict[tuple[int, Key], list[Step]] = {}
        for name in ("sum", "stacked", "spread"):
            monkeypatch.setattr(Collective, name, self._noted(name, getattr(Collective, name)))
        orders = self

        def call(graphs: Graphed[Any], batch: Batch) -> Any:
            return orders.run(graphs, batch)

        monkeypatch.setattr(Graphed, "__call__", call)

    def _noted(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def noted(ranks: Collective, x: Any) -> Any:
            self._rank.log = log = self.of[ranks.rank.index]
            log.append((name, tuple(x.shape), x.dtype))
            return inner(ranks, x)

        return noted

    def run(self, graphs: Graphed[Any], batch: Batch) -> Any:
        """As of Graphed on a GPU; a replay runs the function, too."""
        if batch.bucket is None:
            return graphs.fn(batch)
        key = batch.bucket, batch.n_place, graphs.by_single and batch.single, batch.prompt
        place, log = (id(graphs), key), getattr(self._rank, "log", [])
        how, first = "replayed", len(log)
        if place not in self._held:
            is_new = graphs._sealed or key not in graphs._seen
            graphs._seen.add(key)
            how = "one by one" if is_new else "captured"
        out = graphs.fn(batch)
        made = log[first:]
        if how == "captured":
            self._held[place] = made
        elif how == "replayed":
            assert made == self._held[place], (
                f"the graph {key} holds other collectives than its batch has"
            )
        if made:
            log.append((how, key))
        return out

    def flaw(self) -> str:
        """Where another rank leaves the order of the first one; "" if none does."""
        first = self.of[0]
        for rank in sorted(set(self.of) - {0}):
            for i, (a, b) in enumerate(zip_longest(first, self.of[rank])):
                if a != b:
                    return f"step {i} of {len(first)}: rank 0 {a}, rank {rank} {b}, behind {first[max(0, i - 3) : i]}"
        return ""


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> Orders:
    """Every other rank is slow, now and then, and its clock runs five times as fast, with leaps."""
    clock, obey, rng = time.perf_counter, Follower.obey, random.Random(3)

    def leaps() -> float:
        return clock() if is_first() else 5 * clock() + rng.random()

    def dawdle(follower: Follower, call: Call) -> None:
        time.sleep(rng.choice((0.0, 0.0, 0.0, 0.004)))
        obey(follower, call)

    monkeypatch.setattr(time, "perf_counter", leaps)
    monkeypatch.setattr(Follower, "obey", dawdle)
    return Orders(monkeypatch)


def live(r: RankRig) -> list[list[int]]:
    """From the first graph to the last text: captures, a warm-up, a drafter's check, prompts, drafts, joins and cancels. Returns the texts."""
    worker = r.loop.worker
    assert worker.arena is not None
    capturing._capture_prompts(worker, worker.arena, 256)
    worker.memory.reset(0)
    warm_up(r.loop, r.tokenizer, worker.plan.overhang, 0)
    check_drafter(worker, 0.1, r.tokenizer, None, worker.plan.overhang)
    heard = joined(r, [prompt for prompt, _ in demo_prompts()[:5]], 16, cancels=True)
    r.ranks.settle()
    return [h.tokens for h in heard]


@pytest.mark.parametrize("kind", DRAFTERS)
def test_all_ranks_do_the_same_in_the_same_order(
    kind: str, orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "whole":
        monkeypatch.setattr(dflash, "MOST_RANKS", 1)
    with RankRig(DEMO, 2, np=2, ctx=1024, padded=True, **DRAFTERS[kind]) as r:
        texts = live(r)
        assert not orders.flaw()
        held = [step[1] for step in orders.of[1] if step[0] == "captured"]
        assert any(key[3] for key in held) and not all(key[3] for key in held)  # type: ignore[index]
        assert {step[0] for step in orders.of[1]} >= {"one by one", "replayed", "sum", "stacked"}
    for tokens, (_, text) in zip(texts, demo_prompts(), strict=False):
        assert tokens[: len(text)] == text[: len(tokens)]


@pytest.mark.parametrize(
    ("flaw", "said"),
    [
        ("graphs of other shapes", r"rank 0 \('one by one', \(2, 2, True, .*, rank 1 \('one by one', \(2, 2, False,"),
        ("no graphs", r"rank 0 \('captured', .*, rank 1 \('one by one'"),
    ],
    ids=["graphs of other shapes", "no graphs"],
)  # fmt: skip
def test_a_rank_that_captures_something_else_is_found(flaw: str, said: str, orders: Orders) -> None:
    with RankRig(DEMO, 2, np=2, padded=True, **DRAFTERS["divided"]) as r:
        graphs = r.ranks.followers[1].forward
        if flaw == "no graphs":
            graphs.seal()
        else:
            graphs.by_single = False
        warm_up(r.loop, r.tokenizer, r.loop.worker.plan.overhang, 0)
        r.ranks.settle()
        assert re.search(said, orders.flaw())
