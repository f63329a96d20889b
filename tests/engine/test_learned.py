"""Knowledge of a drafter serves the next start: kept whole or not at all, believed only if it can be, and never in a text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_rig import DEMO
from plans import choose

from pyspec.engine.api import Engine
from pyspec.engine.load import learned
from pyspec.engine.load.learned import LEAST, MOST_BYTES, LearnedDrafting
from pyspec.engine.policy.controller import Controller


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(learned, "cache_root", lambda: tmp_path)
    return tmp_path / "learned"


def taught(**key: object) -> LearnedDrafting:
    """Times of two sizes, and drafts that are never right, to be kept."""
    kept = LearnedDrafting(c := Controller(4, 3, chained=True), key)
    for _ in range(LEAST):
        choose(c, [(slot, 3) for slot in range(4)])
        for slot in range(4):
            c.record(slot, 2, 0)
        c.timed(4, 10.0, 0, 0, 0.0)
        c.timed(12, 14.0, 4, 2, 3.0)
    return kept


def state(c: Controller) -> list[Any]:
    return [c.texts.known(), c.costs.verify.known(), c.costs.draft.known()]


def test_a_start_goes_on_from_the_one_before() -> None:
    first = taught(of="this")
    first.keep()
    c = Controller(4, 3, chained=True)
    bare = c.texts.survive([0])[0, 0]
    LearnedDrafting(c, {"of": "this"}).recall()
    assert c.costs.verify(12) == 14.0 and c.costs.verify(4) == 10.0 and c.costs.draft(4) == 1.5
    known = first.controller.texts.free.common @ first.controller.texts.free.survive[:, 1]
    assert known < c.texts.survive([0])[0, 0] < 0.8 * bare, "it counts beside the first assumptions"
    other = Controller(4, 3, chained=True)
    LearnedDrafting(other, {"of": "another"}).recall()
    assert state(other) == state(Controller(4, 3, chained=True))


def test_the_order_of_a_set_is_no_other_start() -> None:
    """Python orders words anew in each process."""
    blocks = frozenset(f"blk.{i}" for i in range(9))
    assert LearnedDrafting(Controller(1, 3), {"dense": blocks}).key == {"dense": sorted(blocks)}


def test_a_few_rounds_and_nothing_new_are_not_kept(folder: Path) -> None:
    kept = LearnedDrafting(c := Controller(1, 3), {})
    for n in range(LEAST):
        assert not folder.exists(), n
        choose(c, [(0, 3)])
        kept.keep()
    (path,) = folder.iterdir()
    path.unlink()
    kept.keep()
    assert not list(folder.iterdir())


def change(**values: object) -> Callable[[dict[str, Any]], object]:
    """A file with other values; of the acceptance, if they are named so."""

    def do(content: dict[str, Any]) -> object:
        for name, value in values.items():
            (content["acceptance"] if name in content["acceptance"] else content)[name] = value
        return content

    return do


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: None,
        lambda content: [content],
        lambda content: {"key": content["key"]},
        change(key={"of": "another"}),
        change(verify_ms={"12": -1.0}),
        change(verify_ms={"12": "x"}),
        change(verify_ms={"12": float("nan")}),
        change(verify_ms={"0": 1.0}),
        change(verify_ms=[1.0]),
        change(draft_ms={"4": 1e9}),
        change(draft_ms={"99999999999": 1.0}),
        change(acceptance={}),
        change(weights=[1.0]),
        change(weights=[float("inf")] * 15),
        change(weights=[-1.0] * 15),
        change(weights="none"),
        change(right=[9.0] * 3),
        change(meant=[9.0] * 3),
        change(seen=[[0.0]] * 3),
        change(alike=[5.0] * 15),
        change(note="x" * MOST_BYTES),
    ],
)
def test_what_can_not_be_is_not_believed(damage: Callable[[dict[str, Any]], object]) -> None:
    kept = taught(of="this")
    kept.keep()
    kept.path.write_text(json.dumps(damage(json.loads(kept.path.read_text()))))
    c, bare = Controller(4, 3, chained=True), Controller(4, 3, chained=True)
    LearnedDrafting(c, {"of": "this"}).recall()
    assert state(c) == state(bare) and np.array_equal(c.texts.beliefs, bare.texts.beliefs)
    assert choose(c, [(i, 3) for i in range(4)]) == choose(bare, [(i, 3) for i in range(4)])


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\0", b"[" * 100_000, b"0"])
def test_a_damaged_file_is_not_read_and_the_next_takes_its_place(content: bytes) -> None:
    kept = taught()
    kept.path.parent.mkdir()
    kept.path.write_bytes(content)
    LearnedDrafting(Controller(4, 3, chained=True), {}).recall()
    kept.keep()
    LearnedDrafting(c := Controller(4, 3, chained=True), {}).recall()
    assert c.costs.verify(12) == 14.0


def test_the_folder_is_bounded_and_need_not_be_writable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned, "MOST_FILES", 3)
    for i in range(6):
        taught(of=i).keep()
    assert len(list(folder.iterdir())) == 3
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("a file")
    kept = taught()
    kept.keep()
    kept.recall()


def test_engines_of_one_pair_share_it_and_others_do_not(folder: Path) -> None:
    """The texts are equal; made-up acceptance, other settings and a start without a warm-up neither read nor write this file."""
    settings: dict[str, Any] = {"np": 2, "ctx": 256, "device": "cpu", "threads": 1}
    texts, known = [], []
    for _ in range(2):
        with Engine.load(DEMO, "mtp", **settings) as engine:
            known.append(engine.core.loop.controller.texts.free.weights.sum())
            texts.append(
                [engine.generate(f"Story {i}", max_tokens=60, temperature=0.0).text for i in range(4)]
            )
    assert texts[0] == texts[1] and known[0] == 0.0 < known[1]
    (path,) = folder.iterdir()
    before = path.read_bytes()
    for more in ({"synth_len": 1.5}, {"warm_up": False}, {"np": 3}):
        with Engine.load(DEMO, "mtp", **settings | more) as engine:
            assert not engine.core.loop.controller.texts.free.weights.any()
    assert path.read_bytes() == before
