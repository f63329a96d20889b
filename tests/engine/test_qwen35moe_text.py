"""A model of experts gives the text of plain single-slot decoding, with any drafts of its MTP block and any neighbours."""

from __future__ import annotations

from engine_rig import FIXTURES, plain_rig, rig
from known_texts import N_TEXT, known_texts

MODEL = FIXTURES / "qwen35moe.gguf"


def test_its_own_mtp_block_is_found() -> None:
    """spec_type auto, as a user starts it."""
    r = rig(MODEL, np=2)
    assert r.info.drafter == "mtp" and r.info.arch == "qwen35moe"
    prompt, text = list(known_texts(MODEL).items())[1]
    assert r.generate(prompt, N_TEXT).tokens == text
    assert plain_rig(FIXTURES / "qwen35moe_fused_tied.gguf").info.drafter == "none"
