"""Keys and tensors that files of the added architectures may leave out, have otherwise, or have in some blocks alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import DEVICE, FIXTURES, Bench
from rewrite import rewrite

from pyspec.errors import BadGGUF
from pyspec.gguf import open_gguf
from pyspec.models import read_config
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.blocks.moe import Experts
from pyspec.models.model import ModelSpec

ATOL = 1e-4 if DEVICE.type == "cpu" else 2e-2


def logits_of(path: Path, tokens: list[int]) -> torch.Tensor:
    return Bench(path).feed(0, tokens)


def spec_of(path: Path) -> ModelSpec:
    with open_gguf(path) as file:
        return read_config(file)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("dots1", {"expert_shared_count": None}),
        ("glm4moe", {"expert_shared_count": None}),
        ("kimi-linear", {"expert_shared_count": None}),
        ("glm-dsa", {"expert_shared_count": None, "expert_feed_forward_length": None}),
        ("ernie4_5-moe", {"expert_shared_feed_forward_length": None}),
        ("qwen2moe", {"expert_shared_feed_forward_length": None, "expert_feed_forward_length": None}),
        ("bailingmoe2", {"expert_shared_count": 2, "expert_shared_feed_forward_length": 5}),
    ],
)
def test_experts_are_as_wide_as_their_matrices(
    name: str, keys: Mapping[str, object], tmp_path: Path
) -> None:
    """llama.cpp's widths of experts come by other keys in each architecture; without a key it loads no such file, or another width is wanted."""
    own = {f"{name}.{key}": value for key, value in keys.items()}
    path = rewrite(FIXTURES / f"{name}.gguf", tmp_path / "m.gguf", change=own)
    data = np.load(FIXTURES / f"{name}.npz")
    got = logits_of(path, data["tokens"].tolist())
    assert (got - torch.from_numpy(data["logits"])).abs().max() < ATOL


@pytest.mark.parametrize("name", ["cohere2", "muse-glimmer", "exaone-moe", "step35"])
def test_a_window_that_blocks_need_is_asked_for_by_name(name: str, tmp_path: Path) -> None:
    key = f"{name}.attention.sliding_window"
    path = rewrite(FIXTURES / f"{name}.gguf", tmp_path / "m.gguf", change={key: None})
    with pytest.raises(BadGGUF, match=r"has no .*sliding_window"):
        spec_of(path)


@pytest.mark.parametrize("name", ["step35", "bailingmoe3"])
def test_the_shared_expert_is_cut_by_its_own_key_alone(name: str, tmp_path: Path) -> None:
    with open_gguf(FIXTURES / f"{name}.gguf") as file:
        n = file.hparams.integer("block_count")
    keys = {f"{name}.swiglu_clamp_exp": [0.5] * n, f"{name}.swiglu_clamp_shexp": None}
    model = spec_of(rewrite(FIXTURES / f"{name}.gguf", tmp_path / "m.gguf", change=keys))
    feeds = [block.parts[1].spec for block in model.blocks]
    assert all(feed.limit == 0 for feed in feeds if isinstance(feed, Mlp))
    found = {(feed.limit, feed.limit_shared) for feed in feeds if isinstance(feed, Experts)}
    assert found == {(-0.5, 0.0)}


@pytest.mark.parametrize("name", ["seed_oss", "qwen2moe"])
def test_without_biases_attention_has_none(name: str, tmp_path: Path) -> None:
    """As with biases of 0."""
    source, tokens = FIXTURES / f"{name}.gguf", list(range(5, 30))
    biases = [f"attn_{x}.bias" for x in "qkv"]
    with open_gguf(source) as file:
        zeros = {n: np.zeros(t.shape) for n, t in file.tensors.items() if n.endswith(tuple(biases))}
    bare = rewrite(source, tmp_path / "bare.gguf", drop=zeros.__contains__)
    zero = rewrite(source, tmp_path / "zero.gguf", drop=zeros.__contains__, add=zeros)
    got, want = logits_of(bare, tokens), logits_of(zero, tokens)
    assert (got - want).abs().max() < 1e-5
    assert (logits_of(source, tokens) - want).abs().max() > 0.1


def test_gates_and_norms_of_k2_horizon_stand_in_the_blocks_that_have_them(tmp_path: Path) -> None:
    gone = {"blk.0.attn_gate.weight", "blk.1.attn_q_norm.weight", "blk.1.attn_k_norm.weight"}
    path = rewrite(FIXTURES / "k2-horizon.gguf", tmp_path / "m.gguf", drop=gone.__contains__)
    mixers = [block.parts[0].spec for block in spec_of(path).blocks]
    assert all(isinstance(x, Attention) for x in mixers)
    assert [(x.gate is not None, x.own_norms) for x in mixers] == [  # type: ignore[union-attr]
        (False, True),
        (True, False),
        (True, True),
    ]
    assert logits_of(path, [3, 1, 4]).isfinite().all()


@pytest.mark.parametrize("n_near", [8, 16])
def test_divisors_of_step35_are_as_many_as_its_widest_rope_turns(n_near: int, tmp_path: Path) -> None:
    """Blocks without a window turn half of 16 dimensions, by the first four numbers; those with one turn n_near, by none."""
    source, tokens = FIXTURES / "step35.gguf", list(range(40, 70))
    with open_gguf(source) as file:
        divisors = file.raw("rope_freqs.weight").view("<f4").copy()

    def made(name: str, numbers: np.ndarray) -> torch.Tensor:
        path = rewrite(
            source,
            tmp_path / name,
            change={"step35.rope.dimension_count_swa": n_near},
            drop=lambda each: each == "rope_freqs.weight",
            add={"rope_freqs.weight": numbers},
        )
        return logits_of(path, tokens)

    got = made("a.gguf", divisors[: max(n_near, 8) // 2])
    other = made("b.gguf", np.concatenate((divisors[:4], np.full(4, 7.0))))
    assert torch.equal(got, other), "what is behind the first four is not read"
    assert not torch.equal(got, made("c.gguf", 2 * divisors[: max(n_near, 8) // 2]))
