"""Where the time to a first token goes on an idle engine, in process: by stage, and on the device by kernel. Through HTTP: bench_http.py.

    python tools/first_token.py MODEL.gguf [--tokens 300] [--requests 10] [--profile]

Milliseconds of each part of the loop, medians over the requests; "launch" is until the device has been told of a forward, "wait"
from there until it is over, "device" what the device took. A request's forwards are added up.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pyspec.config import EngineSettings
from pyspec.engine.process.core import EngineCore
from pyspec.request import Delta, Event, Request, SamplingParams

PARTS = ("admit", "draft", "plan", "run", "wait", "choose", "commit")


class Stamps:
    """What each part of the loop took since `clear`, in milliseconds, and how many rows its forwards had."""

    def __init__(self, loop: Any) -> None:
        self.took: dict[str, float] = defaultdict(float)
        self.rows: list[int] = []
        self.loop = loop
        for name in PARTS:
            setattr(loop, name, self._timed(name, getattr(loop, name)))

    def _timed(self, name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            event = self._event() if name == "run" else None
            began = time.perf_counter()
            found = part(*args, **more)
            self.took[name] += 1e3 * (time.perf_counter() - began)
            if name == "run" and found is not None:
                self.rows.append(found.launched.batch.n_row)
                self.began = event
            if name == "wait" and self.began is not None and args[0].launched.done is not None:
                self.took["device"] += self.began.elapsed_time(args[0].launched.done)
            return found

        return run

    def _event(self) -> Any:
        if self.loop.worker.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    began: Any = None


def prompt_of(n: int, n_vocab: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(100, n_vocab - 100) for _ in range(n))


def in_process(path: Path, settings: EngineSettings, how: argparse.Namespace) -> None:
    core = EngineCore.load(path, settings)
    try:
        for cached in (False, True):
            stamps, found = Stamps(core.loop), []
            for i in range(how.requests + 2):
                stamps.took.clear()
                stamps.rows.clear()
                took = ask(core, prompt_of(how.tokens, core.info.n_vocab, 1000 * cached + i), cached)
                if i >= 2:
                    found.append({**stamps.took, "all": took, "rows": list(stamps.rows)})
            show(f"in process, cache_prompt {cached}", found)
        if how.profile:
            profile(core, how.tokens)
    finally:
        core.close()


def ask(core: EngineCore, prompt: tuple[int, ...], cached: bool) -> float:
    """Milliseconds until the first token."""
    import threading

    first, over = [0.0], threading.Event()

    def hear(event: Event) -> None:
        if isinstance(event, Delta) and event.tokens and not first[0]:
            first[0] = time.perf_counter()
        if not isinstance(event, Delta) and first[0]:
            over.set()

    params = SamplingParams(temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    core.submit(Request(prompt=prompt, params=params, max_tokens=1, cache_prompt=cached), hear)
    over.wait(60)
    time.sleep(0.02)
    return 1e3 * (first[0] - began)


def show(title: str, found: list[dict[str, Any]]) -> None:
    names = [n for n in ("all", *PARTS, "device") if any(n in f for f in found)]
    parts = ", ".join(f"{n} {median(f.get(n, 0.0) for f in found):.2f}" for n in names)
    print(f"{title}: ms {parts}; rows of forwards {found[-1]['rows']}", flush=True)


def profile(core: EngineCore, n: int) -> None:
    """Kernels of one prompt's forward, and how much of it the device was at work."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    with profiled(activities=[ProfilerActivity.CUDA]) as seen:
        ask(core, prompt_of(n, core.info.n_vocab, 77), False)
    spans, by_name = [], defaultdict(lambda: [0, 0.0])
    for e in seen.events():
        if e.device_type.name != "CUDA" or e.time_range.elapsed_us() <= 0:
            continue
        spans.append((e.time_range.start, e.time_range.end))
        by_name[e.name][0] += 1
        by_name[e.name][1] += e.time_range.elapsed_us()
    spans.sort()
    busy, until = 0.0, 0.0
    for a, b in spans:
        busy += max(0.0, b - max(a, until))
        until = max(until, b)
    whole = (spans[-1][1] - spans[0][0]) if spans else 0.0
    print(f"device: {len(spans)} launches, at work {busy / 1e3:.2f} of {whole / 1e3:.2f} ms", flush=True)
    for name, (count, us) in sorted(by_name.items(), key=lambda x: -x[1][1])[:18]:
        print(f"  {us / 1e3:7.2f} ms {count:5d}  {name[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--profile", action="store_true")
    how = parser.parse_args()
    in_process(how.model, EngineSettings(np=8, spec_type="none"), how)


if __name__ == "__main__":
    main()
