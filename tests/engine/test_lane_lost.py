"""Engine processes with experts in host memory whose lane dies, throws or comes late under streams: every text is that of a lane that never did.

The lane is a thread of the process, as beside a GPU; the kernels on both sides of it are emulated.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engine_rig import DEVICE, GREEDY
from test_replaced_model import Stream

from pyspec import synth
from pyspec.config import EngineSettings
from pyspec.cpu import build
from pyspec.engine.api import Engine, Result
from pyspec.engine.process.supervisor import Supervisor
from pyspec.request import Request, SamplingParams
from pyspec.synth.dims import find, widened

sys.path.append(str(Path(__file__).parents[1] / "kernels"))

from emulated.machine import needs_compiler

pytestmark = [
    pytest.mark.slow,  # quick: test_home_texts_emulated.py, without a process and a thread
    needs_compiler,
    pytest.mark.skipif(DEVICE != "cpu", reason="kernels run thread by thread on the CPU here"),
    pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler"),
]
CHILD = Path(__file__).with_name("lane_engine.py")
SETTINGS = EngineSettings(
    np=2,
    ctx=128,
    spec_type="mtp",
    n_draft_max=3,
    weights="packed",
    kv_type="f32",
    warm_up=False,
    device="cpu",
)
SAMPLED = SamplingParams(temperature=0.8, seed=3, ignore_eos=True)
REQUESTS = [
    Request(
        prompt=tuple((11 * i * i + 5 * i + k) % 250 for i in range(9 + k)), params=params, max_tokens=24
    )
    for k, params in enumerate((GREEDY, SAMPLED, replace(GREEDY, logprobs=1)))
]
"""More than slots, so that one waits."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lane")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    dims = replace(widened(find("qwen35moe", tiny=True)), n_layer=2)
    supervisor = Supervisor(
        synth.write(dims, folder / "m.gguf", quant="q8_0"),
        SETTINGS,
        command=(sys.executable, str(CHILD), str(folder)),
    )
    try:
        supervisor.wait()
        yield Engine(supervisor, supervisor.tokenizer, supervisor.template)
    finally:
        supervisor.close()


@pytest.fixture(scope="module")
def undisturbed(engine: Engine) -> list[Result]:
    return [stream.result() for stream in [Stream(engine, r) for r in REQUESTS]]


DISASTERS = {
    "dead": "did not compute a layer's experts within two seconds",
    "late": "did not compute a layer's experts within two seconds",
    "raises": "signal 6",
}


@pytest.mark.parametrize("disaster", DISASTERS)
def test_no_token_is_lost_or_repeated_when_the_lane_is_lost(
    engine: Engine,
    undisturbed: list[Result],
    folder: Path,
    disaster: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = engine.metrics()
    streams = [Stream(engine, r) for r in REQUESTS]
    while not all(s.n > 2 for s in streams[:2]):
        time.sleep(0.001)
    (folder / "new").write_text(disaster)
    (folder / "new").rename(folder / "lane")
    with caplog.at_level(logging.WARNING):
        found = [s.result() for s in streams]
    for got, expected in zip(found, undisturbed, strict=True):
        assert (got.tokens, got.text) == (expected.tokens, expected.text)
        assert (got.finish, got.n_predicted) == (expected.finish, expected.n_predicted)
        assert [p.token for p in got.logprobs] == [p.token for p in expected.logprobs]
    assert not (folder / "lane").exists(), "it was planted too late"
    after = engine.metrics()
    assert after.restarts == before.restarts + 1 and after.requests_failed == 0
    assert after.tokens_replayed > before.tokens_replayed
    assert DISASTERS[disaster] in caplog.text
    assert "failed twice" not in caplog.text, "no kernel did it"
