"""A parked engine: its weights stay, its slots' memory goes, and texts after a wake are those of before."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pyspec.config import EngineSettings
from pyspec.engine.api import Engine
from pyspec.engine.plan.need import need_of
from pyspec.errors import DoesNotFit, NotSupported, Unavailable
from pyspec.slots.memory import planes_of

FIXTURES = Path(__file__).parents[1] / "fixtures"
PROMPT = [5, 6, 7] * 30


def said(engine: Engine, **more: object) -> tuple[tuple[int, ...], int]:
    result = engine.generate(PROMPT, max_tokens=40, temperature=0, ignore_eos=True, **more)  # type: ignore[arg-type]
    return tuple(result.tokens), result.timings.cache_n


class MemoryThatGoes:
    """In place of a GPU's: while it is away, all memory of slots is overwritten, and empty after that."""

    def __init__(self, engine: Engine) -> None:
        self.worker, self.n_kept = engine.loop.worker, 0

    def keep(self, tensor: Tensor) -> Tensor:
        self.n_kept += tensor.nbytes
        return tensor.clone()

    def park(self) -> None:
        self._fill(77)

    def wake(self) -> None:
        self._fill(0)

    def _fill(self, value: int) -> None:
        for part in (*self.worker.memory.parts, *self.worker.pools()):
            for tensor in part.tensors():
                tensor.view(torch.uint8).fill_(value)


MODELS = [
    "gemma3",
    "deepseek4",
    "qwen35",
    "demo",
    "gpt-oss",
    "nemotron_moe",
    "mistral3",
    "lfm2moe",
    "qwen4exp",
    "glm5-next",
]


def loaded(name: str, **more: object) -> Engine:
    file = name if name == "demo" else str(FIXTURES / f"{name}.gguf")
    return Engine.load(file, np=7, ctx=517, device="cpu", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_conversation_goes_on_after_a_wake(name: str, copies: bool) -> None:
    """The pages, the states of recurrent layers, the windows in rings and the drafter's share are where they were, and nothing is read again."""
    turns, texts = [3, 9, 8], []
    with loaded(name, prefix_cache=False) as plain:
        text = list(PROMPT)
        for turn in turns:
            answer = plain.generate(text, max_tokens=37, temperature=0, ignore_eos=True).tokens
            texts.append(answer)
            text += [*answer, turn, 11]
    with loaded(name) as engine:
        if copies:
            engine.loop.movable = MemoryThatGoes(engine)
        text = list(PROMPT)
        for i, turn in enumerate(turns):
            result = engine.generate(text, max_tokens=37, temperature=0, ignore_eos=True)
            assert result.tokens == texts[i]
            assert result.timings.cache_n == (len(text) - 3 if i else 0), "all but the last token said"
            text += [*result.tokens, turn, 11]
            engine.park()
            cache = engine.loop.cache
            assert not cache.states.n_bytes[0] and not cache.states.starts
            with pytest.raises(Unavailable, match="parked"):
                said(engine)
            with pytest.raises(Unavailable):
                engine.park()
            engine.wake()
            engine.wake()  # it is awake: nothing happens
            cache.check(now=True)
        many = engine.generate_many([PROMPT] * 9, max_tokens=37, temperature=0, ignore_eos=True)
        assert {tuple(one.tokens) for one in many} == {tuple(texts[0])}


@pytest.mark.parametrize("name", ["gemma3", "qwen35"])
def test_a_park_gives_the_memory_of_other_texts_back(name: str) -> None:
    with loaded(name) as engine:
        said(engine)
        kept = engine.loop.table.n_page_cached
        prompts = [[i, 5, 6, 7] * 40 for i in range(20, 26)]
        engine.generate_many(prompts, max_tokens=3, temperature=0, ignore_eos=True)
        engine.loop.table.tree.prune(
            next(n for n in engine.loop.table.tree.nodes() if n.tokens[0] >= 20)
        )
        engine.park()
        pages = {node.page for node in engine.loop.table.tree.nodes()}
        assert len(pages) == engine.loop.table.n_page_cached > kept
        planes = planes_of(engine.loop.worker.pools(), engine.loop.table.page_size)
        assert planes
        for plane in planes:
            assert {i for i in range(len(plane)) if plane[i].view(torch.uint8).any()} <= pages
        own = [part for part in engine.loop.worker.memory.parts if not part.paged]
        assert not any(t.any() for part in own for t in part.tensors())


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("name", ["gemma3", "qwen35", "gpt-oss"])
def test_what_a_parked_model_keeps_is_bounded(name: str, copies: bool) -> None:
    """The texts that were used last stay; a text of which a part is gone is read again from there, and is the same."""
    prompts = [[i, 5, 6, 7] * 40 for i in range(20, 27)]
    with loaded(name) as engine:
        gone = MemoryThatGoes(engine)
        if copies:
            engine.loop.movable = gone
        texts = [
            engine.generate(p, max_tokens=9, temperature=0, ignore_eos=True).tokens for p in prompts
        ]
        cache = engine.loop.cache
        planes = planes_of(engine.loop.worker.pools(), engine.loop.table.page_size)
        page = sum(plane[0].nbytes for plane in planes)
        held = engine.loop.table.n_page_cached * page + sum(cache.states.n_bytes)
        limit = held * 5 // 11
        cache.states.limits = cache.states.limits[0], limit
        engine.park()
        assert 0 < engine.loop.table.n_page_cached * page + cache.states.n_bytes[1] <= limit
        assert gone.n_kept == (engine.loop.table.n_page_cached * page if copies else 0)
        engine.wake()
        cached = []
        for prompt, text in zip(reversed(prompts), reversed(texts), strict=True):
            result = engine.generate(prompt, max_tokens=9, temperature=0, ignore_eos=True)
            assert result.tokens == text
            cached.append(result.timings.cache_n)
        assert cached[0] > 100 and not cached[-1], cached
        cache.check(now=True)
        cache.states.limits = cache.states.limits[0], 0
        engine.park()
        assert not engine.loop.table.n_page_cached and not len(cache.states)
        engine.wake()
        assert engine.generate(prompts[2], max_tokens=9, temperature=0).timings.cache_n == 0


def test_texts_that_the_host_can_not_keep_are_forgotten() -> None:
    with loaded("qwen35") as engine:
        engine.loop.movable = gone = MemoryThatGoes(engine)
        first = said(engine)

        def none(tensor: Tensor) -> Tensor:
            raise OSError("no more mappings")

        gone.keep = none  # type: ignore[method-assign]
        engine.park()
        engine.wake()
        assert said(engine) == first, "it is read anew"
        engine.loop.cache.check(now=True)


def test_a_wake_without_memory_keeps_texts_for_the_next_one() -> None:
    with loaded("qwen35") as engine:
        engine.loop.movable = gone = MemoryThatGoes(engine)
        first = said(engine)[0]
        engine.park()
        wake = gone.wake

        def full() -> None:
            raise DoesNotFit("the device is full")

        gone.wake = full  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(DoesNotFit):
                engine.wake()
        gone.wake = wake  # type: ignore[method-assign]
        engine.wake()
        again = said(engine)
        assert again[0] == first and again[1] > 50


def test_texts_on_disk_survive_a_park(tmp_path: Path) -> None:
    with Engine.load(
        str(FIXTURES / "gemma3.gguf"),
        np=2,
        ctx=517,
        device="cpu",
        prefix_cache=True,
        cache_ram=0,
        cache_disk=str(tmp_path),
    ) as engine:
        prompt = [5 + i % 50 for i in range(400)]
        first = engine.generate(prompt, max_tokens=9, temperature=0)
        engine.park()
        engine.wake()
        again = engine.generate(prompt, max_tokens=9, temperature=0)
        assert again.tokens == first.tokens and again.timings.disk_n >= 256


@pytest.mark.parametrize("isolated", [False, True])
def test_an_engine_that_serves_is_not_parked(isolated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspec.engine.process.supervisor.CLOSE_S", 0.3)
    with Engine.load(
        str(FIXTURES / "gemma3.gguf"), np=2, ctx=4096, device="cpu", isolated=isolated
    ) as engine:
        has_begun, results = threading.Event(), []

        def read() -> None:
            for delta in engine.stream(PROMPT, max_tokens=3900, temperature=0, ignore_eos=True):
                has_begun.set()
                results.append(delta)
                if len(results) > 2500:
                    break

        reader = threading.Thread(target=read)
        reader.start()
        assert has_begun.wait(60)
        with pytest.raises(Unavailable, match="serves"):
            engine.park()
        reader.join(60)
        assert len(results) > 2500, "it went on"
        assert said(engine)[0]


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_an_engine_that_ends_while_it_is_parked_is_not_replaced() -> None:
    with Engine.load(
        str(FIXTURES / "gemma3.gguf"), np=2, ctx=217, device="cpu", isolated=True
    ) as engine:
        first = said(engine)[0]
        engine.park()
        engine.wake()
        again = said(engine)
        assert again[0] == first and again[1] > 50
        engine.park()
        supervisor = engine.core
        os.kill(supervisor._child.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        supervisor._thread.join(30)  # type: ignore[attr-defined]
        assert engine.state() == "stopped" and supervisor.n_restart == 1  # type: ignore[attr-defined]
        with pytest.raises(Unavailable):
            said(engine)


def test_replicas_are_not_parked() -> None:
    with (
        Engine.load(
            str(FIXTURES / "gemma3.gguf"), np=1, ctx=64, device="cpu", isolated=True, replicas=2
        ) as engine,
        pytest.raises(NotSupported),
    ):
        engine.park()


def test_the_plan_of_a_parked_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card graphs and the process keep memory; the weights are in host memory, beside the prefix cache's part of it. Slots are nowhere."""
    path, budget = FIXTURES / "qwen35.gguf", {"host": 64 << 30, "cuda:0": 24 << 30}
    settings = EngineSettings(np=7, ctx=511, device="cuda", parks=True, cache_ram=100)
    need = need_of(path, settings, budget)
    assert need.rest is not None
    assert need_of(path, EngineSettings(np=7, device="cuda"), budget).rest is None
    moved = need.rest["host"] - need.bytes["host"]
    slots = need.bytes["cuda:0"] - need.rest["cuda:0"] - moved
    assert moved > path.stat().st_size // 2 and slots > 0
    wider = need_of(
        path, EngineSettings(np=7, ctx=1022, device="cuda", parks=True, cache_ram=100), budget
    )
    assert wider.bytes["cuda:0"] > need.bytes["cuda:0"] and wider.rest["host"] == need.rest["host"]  # type: ignore[index]
    on_host = need_of(path, EngineSettings(np=7, ctx=511, device="cpu", parks=True), {"host": 64 << 30})
    assert on_host.rest is not None and on_host.rest.keys() == {"host"}
    several = EngineSettings(np=7, ctx=511, device="cpu", parks=True, replicas=2)
    assert need_of(path, several, {"host": 64 << 30}).rest is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    both = need_of(path, replace(settings, tp=0), budget)
    assert both.bytes.keys() == {"host", "cuda:0", "cuda:1"} and both.rest is None, "--tp 0 is all"
