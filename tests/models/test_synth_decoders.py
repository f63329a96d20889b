"""Synthetic files of decoders: llama.cpp decodes the same tokens, drafts change none, and a block that is announced may be missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pyspec import synth
from pyspec.engine.api import Engine, Result
from pyspec.gguf import ValueType, open_gguf
from pyspec.models import read_config
from pyspec.models.checks import check_tensors
from pyspec.synth import layout
from pyspec.synth.dims import TINY, Dims
from pyspec.synth.layout import Key, Parts

PROMPT = [5, 70, 33, 120, 44, 61, 9, 200, 15, 88, 31, 47]
GREEDY = {
    "gemma3": [119, 119, 147, 63, 177, 180, 56, 79, 289, 313, 246, 207, 79, 79, 316, 316],
    "qwen2": [317, 284, 189, 232, 1, 29, 67, 67, 258, 258, 136, 65, 284, 54, 232, 284],
    "granite": [47, 119, 119, 119, 226, 85, 221, 184, 221, 96, 96, 103, 85, 119, 280, 55],
    "mistral3": [29, 170, 277, 258, 181, 34, 163, 163, 29, 216, 13, 47, 253, 184, 271, 274],
    "glm4moe": [67, 216, 2, 1, 163, 24, 29, 281, 158, 18, 102, 118, 269, 67, 130, 257],
    "minimax-m2": [291, 294, 98, 127, 135, 297, 278, 47, 227, 180, 247, 55, 284, 223, 16, 261],
    "lfm2": [237, 254, 1, 219, 310, 273, 269, 17, 119, 251, 287, 278, 132, 155, 123, 243],
    "lfm2moe": [237, 254, 123, 48, 74, 319, 252, 11, 234, 274, 181, 216, 176, 234, 73, 19],
    "deepseek2": [265, 44, 271, 41, 79, 76, 52, 130, 259, 2, 89, 291, 95, 271, 9, 155],
}
"""llama.cpp's greedy continuations of PROMPT by the tiny files in f32, seed 0, on a CPU (October 2026)."""


NEAR = 0.02  # of two log probabilities, which rows of f16 on a GPU may turn: deepseek2's 15th tokens are 0.0056 apart


def answer(path: Path, n: int, **settings: object) -> tuple[Result, str]:
    """With the two likeliest tokens of each place, and where it was made."""
    with Engine.load(str(path), np=3, ctx=512, warm_up=False, **settings) as engine:
        plain = {"max_tokens": n, "temperature": 0, "ignore_eos": True, "logprobs": 2}
        return engine.generate(PROMPT, **plain), engine.info.device


def tokens_of(path: Path, n: int, **settings: object) -> list[int]:
    return list(answer(path, n, **settings)[0].tokens)


@pytest.mark.sampled(1, most=2)
@pytest.mark.parametrize("arch", GREEDY)
def test_greedy_texts_are_those_of_llama_cpp(arch: str, tmp_path: Path) -> None:
    path = synth.write(arch, tmp_path / "m.gguf", quant="f32", tiny=True)
    found, device = answer(path, 16, spec_type="none")
    parts = [i for i, (a, b) in enumerate(zip(found.tokens, GREEDY[arch], strict=True)) if a != b]
    if parts and device != "cpu":
        (best, first), (other, second) = found.logprobs[parts[0]].top[:2]
        assert other == GREEDY[arch][parts[0]] and first - second < NEAR, (
            f"at token {parts[0]} {best} is {first - second:.4f} above {other}"
        )
    else:
        assert not parts, f"at token {parts[0]}"


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["q8_0", "q4_k", "iq4_xs", "mxfp4"])
@pytest.mark.parametrize("arch", GREEDY)
def test_drafts_change_no_text(arch: str, quant: str, tmp_path: Path) -> None:
    path = synth.write(arch, tmp_path / "m.gguf", quant=quant, tiny=True)
    plain = tokens_of(path, 77, spec_type="none")
    assert all(tokens_of(path, 77, spec_type=kind) == plain for kind in ("ngram", "auto"))
    assert len(set(plain)) > 4, "the text repeats itself"


HYBRIDS = ("qwen35", "qwen35moe", "nemotron_h_moe", "deepseek4")


@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize("arch", HYBRIDS)
def test_the_trunk_is_whole(
    arch: str, is_counted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says, holds = layout.metadata, layout.tensors

    def announced(dims: Dims, parts: Parts) -> Iterator[Key]:
        yield from says(dims, Parts(mtp=is_counted))
        if not is_counted:
            yield f"{arch}.nextn_predict_layers", 1, ValueType.UINT32

    specs = list(holds(TINY[arch], Parts()))
    monkeypatch.setattr(layout, "metadata", announced)
    monkeypatch.setattr(layout, "tensors", lambda dims, parts: iter(specs))
    file = open_gguf(synth.write(arch, tmp_path / "m.gguf", quant="f32", tiny=True))
    config = read_config(file)
    check_tensors(file, config.tensors(file))
    assert config.n_layer == TINY[arch].n_layer
