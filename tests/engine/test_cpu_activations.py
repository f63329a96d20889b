"""`--cpu-activations`: each engine's own, and drafts that change no bit in either mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyspec import synth
from pyspec.cpu import build
from pyspec.engine.api import Engine

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")
PROMPTS = ("one two one two one two one", "a b c a b c a b c a", "the same the same the same the")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth.write("qwen35", tmp_path_factory.mktemp("q4") / "m.gguf", quant="q4_0", tiny=True)


def loaded(model: Path, mode: str, spec_type: str) -> Engine:
    more = {"n_draft_fixed": True, "n_draft_max": 3} if spec_type == "mtp" else {}
    return Engine.load(
        model,
        np=3,
        ctx=256,
        threads=2,
        device="cpu",
        cpu_activations=mode,
        spec_type=spec_type,
        warm_up=False,
        **more,
    )


def bits(engine: Engine) -> list[tuple[float, ...]]:
    results = [
        engine.generate(p, max_tokens=24, temperature=0.0, logprobs=3, ignore_eos=True) for p in PROMPTS
    ]
    assert engine.info.drafter == "none" or any(r.timings.draft_n for r in results)
    return [(p.logprob, *(x for _, x in p.top)) for result in results for p in result.logprobs]


def test_two_engines_have_each_their_own_and_drafts_change_no_bit(model: Path) -> None:
    with loaded(model, "q16", "none") as exact, loaded(model, "q8", "none") as rough:
        a, b = bits(exact), bits(rough)
        assert a != b and bits(exact) == a
        assert (exact.info.cpu_activations, rough.info.cpu_activations) == ("q16", "q8")
    assert all(abs(x[0] - y[0]) < 0.5 for x, y in zip(a[:1], b[:1], strict=True))
    for mode, want in (("q16", a), ("q8", b)):
        with loaded(model, mode, "mtp") as engine:
            assert bits(engine) == want
