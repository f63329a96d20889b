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
from pyspec.models.blocks.mla import Mla
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


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    with open_gguf(path) as file:
        return {n: file.raw(n).view("<f4").reshape(t.shape) for n, t in file.tensors.items()}


def same_as_fixture(
    name: str, path: Path, new: Mapping[str, np.ndarray], keys: Mapping[str, object]
) -> bool:
    """Whether the fixture with these tensors and keys has the logits that it has without."""
    data, source = np.load(FIXTURES / f"{name}.npz"), FIXTURES / f"{name}.gguf"
    with open_gguf(source) as file:
        own = {f"{file.architecture}.{key}": value for key, value in keys.items()}
    got = logits_of(
        rewrite(source, path, change=own, drop=new.__contains__, add=new), data["tokens"].tolist()
    )
    want = torch.from_numpy(data["exact" if "exact" in data else "logits"])
    return bool((got - want).abs().max() < (ATOL if name not in WIDER else 1e-3))


WIDER = ("kimi-k3", "exaone4-32b")  # as in test_added_architectures.py


@pytest.mark.parametrize("name", ["kimi-linear", "kimi-k3", "bailingmoe3"])
def test_convolutions_may_have_four_dimensions(name: str, tmp_path: Path) -> None:
    """As llama.cpp's converters write them; its quantizer leaves the first one out."""
    found = tensors_of(FIXTURES / f"{name}.gguf")
    new = {n: x[None] for n, x in found.items() if ".ssm_conv1d_" in n}
    if name == "kimi-linear":
        new |= {n: x[None, None] for n, x in found.items() if n.endswith("ssm_a")}
    assert all(x.ndim == 4 for x in new.values()) and same_as_fixture(name, tmp_path / "m.gguf", new, {})


def halves(rows: np.ndarray, n_head: int, first: int, n_rot: int) -> np.ndarray:
    """Rows of heads, the `n_rot` behind `first` of each not by pairs but the pairs' first halves before the others."""
    x = rows.reshape(n_head, -1, rows.shape[-1]).copy()
    turned = x[:, first : first + n_rot]
    x[:, first : first + n_rot] = np.concatenate((turned[:, ::2], turned[:, 1::2]), 1)
    return x.reshape(rows.shape)


@pytest.mark.parametrize("name", ["glm4", "bailingmoe3"])
def test_a_rope_with_sections_pairs_halves(name: str, tmp_path: Path) -> None:
    """Texts of GLM-4.1V, GLM-OCR and Ling 3 VL, whose converters order the rows of queries and keys so."""
    with open_gguf(FIXTURES / f"{name}.gguf") as file:
        h = file.hparams
        n_head, n_rot = h.integer("attention.head_count"), h.integer("rope.dimension_count")
        n_kv = h.integer("attention.head_count_kv") if name == "glm4" else 1
    found, new = tensors_of(FIXTURES / f"{name}.gguf"), {}
    for n, x in found.items():
        block = n[: n.find(".attn_") + 1]
        is_latent = f"{block}attn_kv_a_mqa.weight" in found
        if n.endswith(("attn_q.weight", "attn_q_b.weight")) and (is_latent or name == "glm4"):
            new[n] = halves(x, n_head, is_latent * (len(x) // n_head - n_rot), n_rot)
        elif n.endswith("attn_kv_a_mqa.weight") or (name == "glm4" and n.endswith("attn_k.weight")):
            new[n] = halves(x, n_kv, is_latent * (len(x) - n_rot), n_rot)
    sections = {"rope.dimension_sections": [n_rot // 2 - 2, 1, 1, 0]}
    assert same_as_fixture(name, tmp_path / "m.gguf", new, sections)
    assert not same_as_fixture(name, tmp_path / "n.gguf", {}, sections)


def test_mtp_blocks_behind_exaone4_are_none_of_the_trunks(tmp_path: Path) -> None:
    """EXAONE 4.5 33B has 64 blocks, which windows follow from, and one that drafts. llama.cpp keeps it and does not run it."""
    found = tensors_of(FIXTURES / "exaone4-32b.gguf")
    new = {n.replace("blk.63.", "blk.64."): x + 1 for n, x in found.items() if n.startswith("blk.63.")}
    n = found["output_norm.weight"].shape[0]
    new |= {f"blk.64.nextn.{x}.weight": np.ones(n) for x in ("enorm", "hnorm", "shared_head_norm")}
    new["blk.64.nextn.eh_proj.weight"] = np.ones((n, 2 * n))
    keys = {"block_count": 65, "nextn_predict_layers": 1}
    assert same_as_fixture("exaone4-32b", tmp_path / "m.gguf", new, keys)


def test_an_index_is_as_long_as_the_rope_says(tmp_path: Path) -> None:
    """A length of cos and sin multiplies what turns of queries and keys, of the indexer's, too, and scores of attention once more."""
    source, by, tokens = FIXTURES / "glm-dsa.gguf", 1.5**2, list(range(30, 70))
    with open_gguf(source) as file:
        h = file.hparams
        n_head, n_rot = h.integer("attention.head_count"), h.integer("rope.dimension_count")
        n_index = h.integer("attention.indexer.head_count")
    new = {n: x.copy() for n, x in tensors_of(source).items() if n.endswith("attn_q_b.weight")}
    for n, x in new.items():
        rows = x.reshape(n_index if ".indexer." in n else n_head, -1, x.shape[-1])  # a view
        if ".indexer." in n:
            rows[:, :n_rot] *= by
        else:
            rows *= by
            rows[:, -n_rot:] *= by
    want = logits_of(rewrite(source, tmp_path / "a.gguf", drop=new.__contains__, add=new), tokens)
    key = {"glm-dsa.rope.scaling.attn_factor": 1.5}
    got = logits_of(rewrite(source, tmp_path / "b.gguf", change=key), tokens)
    assert (got - want).abs().max() < ATOL and (logits_of(source, tokens) - want).abs().max() > 0.1


YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
    "rope.scaling.yarn_log_multiplier": 0.1,
}


GROWN = 1 + 0.1 * np.log(4)


@pytest.mark.parametrize(
    ("name", "score", "length"),
    [("bailingmoe3", 1.0, GROWN), ("glm-dsa", GROWN**2, GROWN), ("deepseek2", GROWN**2, 1.0)],
)
def test_yarn_stretches_scores_of_latent_attention_by_the_architecture(
    name: str, score: float, length: float, tmp_path: Path
) -> None:
    """Ling's do not change; the multiplier is read for deepseek2 alone."""
    own = {f"{name}.{key}": value for key, value in YARN.items()}
    model = spec_of(rewrite(FIXTURES / f"{name}.gguf", tmp_path / "m.gguf", change=own))
    found = [x for x in (block.parts[0].spec for block in model.blocks) if isinstance(x, Mla)]
    assert found[0].scale / found[0].plain_scale == pytest.approx(score)
    assert found[0].rope.scaling.length == pytest.approx(length)


@pytest.mark.parametrize("name", ["gemma2", "llama4", "gpt-oss", "muse-glimmer", "step35", "laguna"])
def test_blocks_with_windows_may_have_a_base_of_their_own(name: str, tmp_path: Path) -> None:
    own = {f"{name}.rope.freq_base_swa": 3000.0}
    model = spec_of(rewrite(FIXTURES / f"{name}.gguf", tmp_path / "m.gguf", change=own))
    found = [x for x in (block.parts[0].spec for block in model.blocks) if isinstance(x, Attention)]
    assert {x.rope.base for x in found if x.window} == {3000.0}
    assert 3000.0 not in {x.rope.base for x in found if not x.window}


@pytest.mark.parametrize(
    "name", ["llama4", "ernie4_5-moe", "hunyuan-moe", "qwen2moe", "qwen3next", "granitemoe"]
)
def test_keys_of_routers_count_where_llama_cpp_reads_them(name: str, tmp_path: Path) -> None:
    """These architectures fix how experts are scored and weighed."""
    source = FIXTURES / f"{name}.gguf"

    def experts(path: Path) -> list[Experts]:
        parts = (block.parts[1].spec for block in spec_of(path).blocks)
        return [part for part in parts if isinstance(part, Experts)]

    (own,) = set(experts(source))
    with open_gguf(source) as file:
        arch = file.architecture
    keys = {"expert_gating_func": 1 if own.router == "sigmoid" else 2, "expert_weights_scale": 1.7}
    keys |= {"expert_weights_norm": not own.renorm}
    changed = {f"{arch}.{key}": value for key, value in keys.items()}
    assert set(experts(rewrite(source, tmp_path / "m.gguf", change=changed))) == {own}


def test_gated_feed_forwards_may_have_biases(tmp_path: Path) -> None:
    """As Granite Code's. The numbers are llama.cpp's (xllamacpp 2026.10)."""
    source, ends = FIXTURES / "granite.gguf", tuple(f"ffn_{x}.weight" for x in ("gate", "up", "down"))
    found = {n: x.shape[0] for n, x in tensors_of(source).items() if n.endswith(ends)}
    new = {n.replace("weight", "bias"): np.linspace(-0.5, 0.6, size) for n, size in found.items()}
    got = logits_of(rewrite(source, tmp_path / "m.gguf", add=new), list(range(5, 17)))[-1, :4]
    assert got.tolist() == pytest.approx([-0.0706, 0.663, -0.23855, -0.14989], abs=ATOL)
