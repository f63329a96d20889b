"""Models whose ops run in Triton, in the interpreter, give the text that they give with the references: plain and drafted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import triton_interpreter  # noqa: F401

from pyspec.cuda import survey
from pyspec.cuda.op import listed_ops
from pyspec.engine.api import Engine
from pyspec.synth import write

PROMPT = "the quick brown fox jumps over"
IN_TRITON = {
    "qwen35": {"attend", "rope_kv", "gdn", "norms"},
    "nemotron_h": {"attend", "rope_kv", "mamba2", "norms"},
    "gemma4": {"attend", "rope_kv", "norms"},
    "deepseek2": {"attend", "rope_latent", "heads", "moe_route", "norms"},
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def text(path: Path, spec_type: str) -> tuple[list[int], set[str]]:
    """Tokens of a greedy answer, and the ops that ran in Triton."""
    for op in listed_ops():
        op.decided.clear()
        op.verdicts.clear()
    settings = {"np": 2, "ctx": 256, "spec_type": spec_type, "n_draft_fixed": True, "warm_up": False, "kv_type": "f16"}  # fmt: skip
    with Engine.open(str(path), "auto", settings) as engine:
        tokens = engine.generate(PROMPT, max_tokens=8, temperature=0.0).tokens
        return list(tokens), {op.name for op, spec in survey.asked() if op.chosen(spec).name == "triton"}


@pytest.mark.parametrize(
    "model, spec_type",
    [
        ("qwen35", "none"),
        ("qwen35", "mtp"),
        ("nemotron_h", "none"),
        ("gemma4", "none"),
        ("deepseek2", "none"),
    ],
)
def test_a_text_is_the_references(
    model: str, spec_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(model, tmp_path / "m.gguf", quant="f32", tiny=True)
    want, ran = text(path, spec_type)
    assert not ran and "TRITON_INTERPRET" not in os.environ
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    got, ran = text(path, spec_type)
    assert ran >= IN_TRITON[model] and len(want) == 8
    assert got == want
    monkeypatch.delenv("TRITON_INTERPRET")
    for op in listed_ops():
        op.decided.clear()
        op.verdicts.clear()
