"""The packaged pair in an engine process that dies under eight streams: every text is that of an engine that never did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engine_rig import DEMO, DEMO_DRAFT, GREEDY, ROOT
from known_texts import demo_prompts

from pyspec.config import EngineSettings
from pyspec.engine.api import Engine, Result, collect
from pyspec.engine.process import process as watchdog
from pyspec.engine.process.supervisor import Supervisor
from pyspec.request import Delta, Done, Event, Failed, Metrics, Request, SamplingParams

SETTINGS = EngineSettings(
    np=8, ctx=256, draft_path=DEMO_DRAFT, warm_up=False, device="cpu", kv_type="f32"
)
HANG_S = 6.0  # of rounds that take milliseconds, on a machine with other work
CHILD = ROOT / "tests" / "long_runs" / "chaos_engine.py"


def requests() -> list[Request]:
    """Greedy and sampled, with penalties, a stop string that never comes, and logprobs; long enough that none ends before the last begins."""
    sampled, greedy = (
        SamplingParams(temperature=0.8, seed=3, ignore_eos=True),
        replace(GREEDY, ignore_eos=True),
    )
    kinds = [
        greedy,
        sampled,
        replace(sampled, repeat_penalty=1.2, dry_multiplier=0.8),
        replace(greedy, logprobs=1),
    ]
    prompts = [prompt for prompt, _ in demo_prompts()[:8]]
    return [
        Request(
            prompt=prompt, params=kinds[i % 4], max_tokens=120, stop=("never said",) if i % 3 else ()
        )
        for i, prompt in enumerate(prompts)
    ]


class Stream:
    """One request's listener."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.events: list[Delta | Done] = []
        self.error: Exception | None = None
        self.over = threading.Event()
        self.n = 0
        self.last, self.gap = 0.0, 0.0
        engine.submit(request, self.hear)

    def hear(self, event: Event) -> None:
        now = time.perf_counter()
        if isinstance(event, Delta):
            self.gap, self.last = max(self.gap, now - self.last if self.last else 0.0), now
            self.n += len(event.tokens)
        if isinstance(event, Delta | Done):
            self.events.append(event)
        if isinstance(event, Failed):
            self.error = event.error
        if isinstance(event, Done | Failed):
            self.over.set()

    def result(self) -> Result:
        assert self.over.wait(240), "it never ended"
        assert self.error is None, self.error
        return collect(self.events)


def in_their_middle(engine: Engine) -> tuple[list[Stream], Metrics]:
    """Streams that have all begun and not ended, and the counts before. On a busy machine the first may end before the last begins; then they
    are submitted again, and begin together, because their prompts are cached."""
    for _ in range(6):
        before = engine.metrics()
        streams = [Stream(engine, r) for r in requests()]
        while not (all(s.n > 5 for s in streams) or any(s.over.is_set() for s in streams)):
            time.sleep(0.001)
        if not any(s.over.is_set() for s in streams):
            return streams, before
        for stream in streams:
            stream.result()
    raise AssertionError("always too late to mean anything")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plants")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    supervisor = Supervisor(
        DEMO, replace(SETTINGS, hang_timeout=HANG_S), command=(sys.executable, str(CHILD), str(folder))
    )
    try:
        supervisor.wait()
        yield Engine(supervisor, supervisor.tokenizer, supervisor.template)
    finally:
        supervisor.close()


@pytest.fixture(scope="module")
def undisturbed() -> list[Result]:
    with Engine.from_settings(DEMO, SETTINGS) as e:
        streams = [Stream(e, r) for r in requests()]
        return [s.result() for s in streams]


@pytest.mark.slow  # quick: tests/engine/test_replaced.py without a model, test_resumed.py without a process
@pytest.mark.parametrize("disaster", ["SIGKILL", "SIGSTOP", "abort", "illegal", "endless"])
def test_no_token_is_lost_or_repeated_when_the_engine_suffers(
    engine: Engine,
    undisturbed: list[Result],
    folder: Path,
    disaster: str,
    record_property: Callable[[str, object], None],
) -> None:
    streams, before = in_their_middle(engine)
    if disaster.startswith("SIG"):
        os.kill(int((folder / "pid").read_text()), signal.Signals[disaster])
    else:
        (folder / "new").write_text(disaster)
        (folder / "new").rename(folder / "round")
    for stream, expected in zip(streams, undisturbed, strict=True):
        got = stream.result()
        assert got.tokens == expected.tokens and got.text == expected.text
        assert (got.finish, got.n_prompt, got.n_predicted) == (
            expected.finish,
            expected.n_prompt,
            expected.n_predicted,
        )
        assert [p.token for p in got.logprobs] == [p.token for p in expected.logprobs]
        assert got.timings.predicted_n == expected.timings.predicted_n
        assert got.timings.n_rounds == sum(got.timings.n_draft_used)
    after = engine.metrics()
    assert after.restarts == before.restarts + 1 and after.requests_failed == before.requests_failed == 0
    assert after.tokens_replayed > before.tokens_replayed
    record_property("pause_s", max(s.gap for s in streams))


@pytest.mark.slow
def test_the_parent_of_an_isolated_engine_has_no_torch() -> None:
    code = f"""
import sys
from pathlib import Path
from pyspec.engine.api import Engine
with Engine.load(Path({str(DEMO)!r}), None, isolated=True, warm_up=False, ctx=256) as engine:
    assert engine.chat([{{"role": "user", "content": "Hello"}}], temperature=0, max_tokens=3).n_predicted == 3
    assert engine.slots()[0].n_ctx == 256 and engine.metrics().requests_done == 1
    heavy = [name for name in ("torch",) if name in sys.modules]
print(heavy)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert told.stdout == "[]\n", told.stderr
    assert watchdog.HANG_S["gpu"][0] <= 5.0, "the goal for a pause is 5 s and loading"
