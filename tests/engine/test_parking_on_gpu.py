"""Parked models on a GPU: graphs and texts after a wake, memory beside its plan, switches of two models, rates.

Not run by CI, which has no GPU: `make check-gpu`.
"""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pyspec.config import EngineSettings
from pyspec.engine.api import Engine
from pyspec.engine.plan.apart import LoadNeed
from pyspec.engine.plan.need import need_of
from pyspec.synth import write

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.alone]
PROMPT = [5, 6, 7] * 30
BUDGET = {"host": 64 << 30, "cuda:0": 24 << 30}
OFF = 0.02  # most difference between a plan and a measurement, of the plan


def used(settle_s: float = 1.0) -> int:
    """Bytes that all processes have on the GPU, once they stay the same: children that checked kernels end late."""
    last, since, end = -1, time.monotonic(), time.monotonic() + 120
    while time.monotonic() - since < settle_s and time.monotonic() < end:
        free, total = torch.cuda.mem_get_info(0)
        if total - free != last:
            last, since = total - free, time.monotonic()
        time.sleep(0.05)
    return last


def said(engine: Engine, prompt: list[int], n: int = 40) -> tuple[list[int], int]:
    result = engine.generate(prompt, max_tokens=n, temperature=0, ignore_eos=True)
    return list(result.tokens), result.timings.cache_n


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model with recurrent layers and one without, of a few GB: the process's own memory is a small part then."""
    folder = tmp_path_factory.mktemp("models")
    return {
        name: write(name, folder / f"{name}.gguf", quant="q8_0") for name in ("qwen3.5-4b", "qwen3-4b")
    }


def loaded(path: Path) -> tuple[Engine, LoadNeed]:
    """As a router loads it: in a process of its own, with its plan."""
    settings = EngineSettings(np=4, ctx=8192, device="cuda:0", parks=True, cache_ram=2048)
    need = need_of(path, settings, BUDGET)
    return Engine.from_settings(path, replace(settings, ctx=need.n_ctx), isolated=True), need


def talk(file: str, *, parks: bool) -> list[tuple[list[int], int]]:
    """The answers of five turns of a conversation, and the length that each found in the prefix cache."""
    with Engine.load(file, np=7, ctx=1111, device="cuda:0", parks=True) as engine:
        text, found = list(PROMPT), []
        for turn in range(5):
            found.append(said(engine, text))
            text += [*found[-1][0], 9, 8 + turn]
            if parks:
                before = used(0.2)
                engine.park()
                assert used(0.2) < before
                engine.wake()
        engine.loop.cache.check(now=True)
    return found


@pytest.mark.parametrize("name", ["demo", "gpt-oss"])
def test_a_wake_keeps_graphs_texts_and_what_was_read(name: str) -> None:
    """In this process: a pair with recurrent layers, and a model with windows in rings."""
    tiny = Path(__file__).parents[1] / f"fixtures/{name}.gguf"
    file = str(tiny) if tiny.is_file() else name
    assert talk(file, parks=True) == talk(file, parks=False)


def test_an_engine_goes_on_while_another_of_its_process_is_parked() -> None:
    with Engine.load("demo", np=7, ctx=1111, device="cuda:0", parks=True) as first:
        want = said(first, PROMPT)[0]
        first.park()
        with Engine.load("demo", np=2, ctx=700, device="cuda:0", parks=True) as second:
            assert said(second, PROMPT)[0] == want
            second.park()
            first.wake()
            assert said(first, PROMPT)[0] == want
        first.park()  # closed like this
    with Engine.load("demo", np=3, ctx=900, device="cuda:0") as third:
        assert said(third, PROMPT)[0] == want


def test_a_closed_engine_leaves_no_memory() -> None:
    sizes = []
    for _ in range(4):
        with Engine.load("demo", np=7, ctx=1111, device="cuda:0", parks=True) as engine:
            said(engine, PROMPT)
            engine.park()
            engine.wake()
        del engine
        gc.collect()
        torch.cuda.empty_cache()
        sizes.append(used(0.5))
    assert sizes[-1] - sizes[1] < 16 << 20, sizes


def test_twenty_switches_of_two_models(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Texts stay, memory is that of the plans, and each conversation goes on. Rates of the link are printed."""
    torch.cuda.mem_get_info(0)
    base, engines, needs, texts, alone = used(), {}, {}, {}, {}
    try:
        for name, path in files.items():
            before = used()
            engines[name], needs[name] = loaded(path)
            said(engines[name], PROMPT)
            alone[name] = said(engines[name], PROMPT)[0]  # its prompt is known, as it is after a wake
            texts[name] = [*PROMPT, *alone[name], 9, 8]
            plan, rest = (needs[name].bytes["cuda:0"], needs[name].rest["cuda:0"])  # type: ignore[index]
            taken = used() - before
            assert abs(taken - plan) < OFF * plan, f"{name} takes {taken}, planned {plan}"
            engines[name].park()
            taken = used() - before
            assert abs(taken - rest) < OFF * plan, f"{name} takes {taken} parked, planned {rest}"
        resting, rates = used(), []
        for i in range(20):
            name = list(files)[i % 2]
            began = time.perf_counter()
            engines[name].wake()
            woken = time.perf_counter() - began
            answer, n_cached = said(engines[name], texts[name], 12)
            assert n_cached >= len(texts[name]) - 3, "nothing is read again"
            texts[name] += [*answer, 9, 8]
            assert said(engines[name], PROMPT)[0] == alone[name]
            began = time.perf_counter()
            engines[name].park()
            parked = time.perf_counter() - began
            n_bytes = needs[name].rest["host"] - needs[name].bytes["host"]  # type: ignore[index]
            rates.append((name, n_bytes / woken / 1e9, n_bytes / parked / 1e9))
        assert abs(used() - resting) < 16 << 20, "switches leave nothing behind"
        with capsys.disabled():
            for name in files:
                found = [rate for rate in rates if rate[0] == name]
                wake, park = (sorted(one[i] for one in found)[len(found) // 2] for i in (1, 2))
                sys.stdout.write(f"\n{name}: wakes at {wake:.1f} GB/s, parks at {park:.1f} GB/s\n")
        for name in files:
            engines[name].wake()
        assert [said(engines[name], PROMPT)[0] for name in files] == [*alone.values()]
    finally:
        for engine in engines.values():
            engine.close()
    assert used() - base < 64 << 20
