"""Tensors that a drafter's file has of its own are checked when it is loaded, not in the first draft."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from engine_rig import Rig, plain_rig, rig
from known_texts import tiny
from rewrite import rewrite

from pyspec.errors import BadTensors, ModelError, PairError, PyspecError
from pyspec.gguf import open_gguf

N_VOCAB, WIDTH = 320, 64  # of the tiny target
HEAD = np.random.default_rng(0).standard_normal((32, WIDTH)) / 8


def with_tensors(
    path: Path, tensors: Mapping[str, np.ndarray], change: Mapping[str, object] | None = None
) -> Rig:
    draft = rewrite(tiny("qwen35", drafter=True), path / "d.gguf", add=tensors, change=change)
    return rig(tiny("qwen35"), draft_path=draft, n_draft_fixed=True)


def ids(*some: float) -> np.ndarray:
    return np.array(some, np.float64)


def test_a_head_of_few_tokens_drafts_those_of_the_target_that_its_d2t_names(tmp_path: Path) -> None:
    r = with_tensors(tmp_path, {"output.weight": HEAD, "d2t": 7 + 10 * np.arange(32.0)})
    done = r.generate([1, 2, 3, 4], 40)
    assert done.tokens == plain_rig(tiny("qwen35")).generate([1, 2, 3, 4], 40).tokens
    assert done.timings.draft_n > 0
    d2t = r.loop.drafter.net.best.to_target  # type: ignore[union-attr]
    assert d2t.tolist() == list(range(7, 327, 10))[:32]


OWN: dict[str, tuple[dict[str, np.ndarray], type[PyspecError], str]] = {
    "d2t with too few entries": ({"output.weight": HEAD, "d2t": np.zeros(31)}, PairError, r"d2t is \[31\] .* 32 tokens"),
    "d2t with too many": ({"output.weight": HEAD, "d2t": np.zeros(33)}, PairError, r"d2t is \[33\] of type F32"),
    "d2t without a head": ({"d2t": np.zeros(31)}, PairError, r"d2t is \[31\] .* one for each of its head's 320 tokens"),
    "d2t beyond the vocabulary": ({"output.weight": HEAD, "d2t": np.full(32, 320.0)}, PairError, r"320 to 320; .* 0\.\.319"),
    "d2t below zero": ({"output.weight": HEAD, "d2t": ids(*[0] * 31, -1)}, PairError, "goes from -1 to 0"),
    "d2t with NaN": ({"output.weight": HEAD, "d2t": ids(*[0] * 31, np.nan)}, PairError, "goes from nan"),
    "head of more tokens": ({"output.weight": np.zeros((352, WIDTH))}, PairError, "gives 352 tokens; the target has 320"),
    "head of another width": ({"output.weight": np.zeros((32, 96)), "d2t": np.zeros(32)}, BadTensors, r"output.weight: want"),
    "embedding of fewer tokens": ({"token_embd.weight": np.zeros((288, WIDTH))}, PairError, "embeds 288 tokens"),
    "embedding of another width": ({"token_embd.weight": np.zeros((320, 32))}, BadTensors, r"want \[320, 64\], file has \[320, 32\]"),
    "rope_freqs": ({"rope_freqs.weight": np.ones(5)}, BadTensors, r"rope_freqs.weight: want \[8\], file has \[5\]"),
    "a scale of two": ({"fc.scale": np.ones(2)}, BadTensors, r"fc.scale: want \[1\], file has \[2\]"),
    "a scale of NaN": ({"blk.0.attn_q.scale": ids(np.nan)}, ModelError, "blk.0.attn_q.scale has a number that is not finite"),
    "one bias of three": ({"blk.0.attn_q.bias": np.ones(64)}, BadTensors, r"blk.0.attn_k.bias: missing"),
    "a fused matrix": ({"blk.1.attn_qkv.weight": np.ones((32, 32))}, BadTensors, r"blk.1.attn_qkv.weight: want"),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_what_a_drafter_brings_of_its_own_has_to_fit(name: str, tmp_path: Path) -> None:
    tensors, error, says = OWN[name]
    with pytest.raises(error, match=says) as e:
        with_tensors(tmp_path, tensors)
    assert "\n" not in str(e.value) and len(str(e.value)) < 300


KEYS: dict[str, tuple[object, str]] = {
    "dflash.block_count": (1_000_000, r"dflash.block_count is 1000000, and the file has \d+ tensors"),
    "dflash.attention.head_count": (0, "0 heads do not divide"),
    "dflash.rope.dimension_count": (7, "rope can not turn 7 dimensions"),
    "dflash.rope.freq_base": (float("nan"), "freq_base is nan; want a number"),
    "dflash.target_layers": ([1, 2**31], "entry 1 of dflash.target_layers is 2147483648"),
    "tokenizer.ggml.tokens": (7, "tokens is 7; want an array of texts"),
}


@pytest.mark.parametrize("key", KEYS)
def test_a_drafters_metadata_is_held_to_its_ranges(key: str, tmp_path: Path) -> None:
    value, says = KEYS[key]
    with pytest.raises(ModelError, match=says):
        with_tensors(tmp_path, {}, {key: value})


@pytest.mark.parametrize(
    ("kind", "n"), [("llama", 1_000_000), ("qwen35", 1_000_000), ("nemotron_h_moe", 1_000_000)]
)
def test_blocks_are_counted_against_the_files_tensors_before_anything_is_listed(
    kind: str, n: int, tmp_path: Path
) -> None:
    """A million blocks took 40 s and 4 GB to be found missing one by one."""
    source = tiny(kind)
    path = rewrite(source, tmp_path / "m.gguf", change={f"{kind}.block_count": n})
    with (
        open_gguf(path) as file,
        pytest.raises(
            ModelError, match=rf"block_count is {n}, and the file has {len(file.tensors)} tensors"
        ),
    ):
        plain_rig(path)
