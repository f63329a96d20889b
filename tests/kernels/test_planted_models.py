"""A model in which one op's CUDA tier is wrong, crashes or hangs starts with that op in Triton, says so, and gives the reference's text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import planted_models
import pytest
import triton_interpreter  # noqa: F401

from pyspec.cuda import checker
from pyspec.cuda.checker import Checker
from pyspec.synth import write

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def children() -> Iterator[Checker]:
    own = planted_models.own_checker()
    yield own
    own.close()


@pytest.mark.parametrize(
    "model, name, kind",
    [("qwen35", "gdn", "crashing"), ("qwen35", "attend", "hanging"), ("nemotron_h", "mamba2", "wrong")],
)
def test_it_starts_a_tier_down(
    model: str, name: str, kind: str, children: Checker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(model, tmp_path / "m.gguf", quant="f32", tiny=True)
    want = planted_models.text(path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(checker, "shared", lambda: children)
    try:
        assert planted_models.complaint(path, name, kind, want) == ""
    finally:
        planted_models.forget()
