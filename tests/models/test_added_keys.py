"""Keys and shapes of granite, mistral3, glm4moe, minimax-m2, lfm2, deepseek2 and llama4 that their fixtures do not have."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, FIXTURES, Bench
from rewrite import rewrite

from pyspec.cpu.tensors import query_factors
from pyspec.cuda.ops.moe.ref import MoeSpec, Routes, RouteSpec, Stack, Stacks, bind, choose
from pyspec.errors import BadGGUF, BadTensors, ModelError
from pyspec.forward.lower import of_choices, unweighed, weighed
from pyspec.gguf import open_gguf
from pyspec.models import read_config
from pyspec.models.arch import llama4
from pyspec.models.arch.glm_dsa import read_types
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.mla import Mla
from pyspec.models.blocks.mlp import Mlp
from pyspec.models.blocks.moe import Experts
from pyspec.models.blocks.short_conv import ShortConv
from pyspec.models.checks import check_tensors
from pyspec.models.model import ModelSpec
from pyspec.models.rope import NO_ROPE, QueryTemperature

CPU = torch.device("cpu")
ATOL = 1e-4 if DEVICE.type == "cpu" else 2e-2
TOKENS = [(7 * i * i + 3 * i) % 250 for i in range(40)]


def spec_of(path: Path) -> ModelSpec:
    with open_gguf(path) as file:
        config = read_config(file)
        check_tensors(file, config.tensors(file))
    return config


def changed(name: str, path: Path, **keys: object) -> ModelSpec:
    own = {f"{name}.{key.replace('__', '.')}": value for key, value in keys.items()}
    return spec_of(rewrite(FIXTURES / f"{name}.gguf", path, change=own))


def attention(spec: ModelSpec, block: int = 0) -> Attention:
    part = spec.blocks[block].parts[0].spec
    assert isinstance(part, Attention)
    return part


def test_factors_of_granite_are_one_where_the_file_has_zero(tmp_path: Path) -> None:
    spec = spec_of(FIXTURES / "granite.gguf")
    assert (spec.embed_factor, spec.logit_factor) == (12.0, 1 / 8)
    assert [part.factor for part in spec.blocks[0].parts] == pytest.approx([0.22, 0.22])
    spec = changed("granite", tmp_path / "m.gguf", embedding_scale=0.0, residual_scale=0.0)
    assert spec.embed_factor == 1.0 and {part.factor for part in spec.blocks[0].parts} == {1.0}


def test_a_rope_that_was_not_trained_is_none(tmp_path: Path) -> None:
    spec = changed("granite", tmp_path / "m.gguf", rope__scaling__finetuned=False)
    assert attention(spec).rope == NO_ROPE


@pytest.mark.parametrize("scale", [None, 0.0, -1.0])
def test_granite_without_a_scale_of_logits_is_refused(scale: float | None, tmp_path: Path) -> None:
    with pytest.raises((ModelError, BadGGUF), match="logit_scale"):
        changed("granite", tmp_path / "m.gguf", logit_scale=scale)


def test_mistral3_reads_its_ramp_and_length(tmp_path: Path) -> None:
    own = attention(spec_of(FIXTURES / "mistral3.gguf")).rope
    assert own.scaling.length == 1.0 and own.queries == QueryTemperature(pytest.approx(0.1), 16)
    keys = {"rope__scaling__yarn_beta_fast": 4.0, "rope__scaling__yarn_log_multiplier": 0.0}
    other = attention(changed("mistral3", tmp_path / "m.gguf", **keys)).rope
    assert other.scaling.turns == (4.0, 1.0)
    assert other.scaling.length == pytest.approx(1 + 0.1 * math.log(16))
    assert (
        attention(
            changed("mistral3", tmp_path / "n.gguf", attention__temperature_scale=0.0)
        ).rope.queries
        is None
    )


def test_queries_are_as_they_are_within_the_old_context() -> None:
    got = query_factors(torch.tensor([0, 15, 16, 31, 32, 1_000_000]), 0.1, 16)
    want = [1 + 0.1 * math.log(p // 16 + 1) for p in (0, 15, 16, 31, 32, 1_000_000)]
    assert got.tolist() == pytest.approx(want) and got[:2].tolist() == [1.0, 1.0]
    assert query_factors(torch.tensor([14, 15]), 0.1, 16, 1).tolist() == pytest.approx(want[1:3])


def test_llama4s_chunks_end_where_the_file_of_far_rows_says() -> None:
    """Rows at positions 8180 to 8203 without any before them, in two pieces. Angles so far out are 1e-4 off in f32."""
    found = np.load(FIXTURES / "llama4.npz")
    first, tokens = int(found["far_first"]), found["far"].tolist()
    bench = Bench(FIXTURES / "llama4.gguf", n_ctx=8448)
    bench.table.slots[0].tokens.extend([0] * first)
    for part in (slice(0, 9), slice(9, 24)):
        seq = replace(bench.seq(0, tokens[part]), first_key=first)
        want = torch.from_numpy(found["far_logits"][part])
        assert (bench.forward(seq).logits.cpu() - want).abs().max() < max(ATOL, 5e-4)
        bench.commit(seq, seq.width)


@pytest.mark.parametrize("n_used", [1, 2])
def test_llama4s_rows_in_pieces_of_any_size_behind_many_chunks(
    n_used: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = FIXTURES / "llama4.gguf"
    path = rewrite(path, tmp_path / "m.gguf", change={"llama4.expert_used_count": n_used})
    found = []
    for chunk in (8192, 8):
        monkeypatch.setattr(llama4, "CHUNK", chunk)
        for n in (40, 7, 1):
            bench = Bench(path)
            found.append(torch.cat([bench.feed(0, TOKENS[i : i + n]) for i in range(0, 40, n)]))
            assert (found[-1] - found[chunk // 8192 - 1]).abs().max() < ATOL or n == 40
    assert (found[0] - found[3])[:8].abs().max() < ATOL < (found[0] - found[3])[8:].abs().max()


def test_llama4_without_chunks_turns_and_norms_all_heads_and_the_largest_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mixers(**keys: object) -> list[Attention]:
        blocks = changed("llama4", tmp_path / "m.gguf", **keys).blocks
        return [block.parts[0].spec for block in blocks]  # type: ignore[misc]

    (own,) = set(mixers(attention__sliding_window=0))
    assert (own.window, own.norm_behind, own.rope.n_rot) == (0, True, 16)
    assert [(x.window, x.norm_behind) for x in mixers()[2:4]] == [(-8192, True), (0, False)]
    monkeypatch.setattr(llama4, "MAVERICK", 5)
    assert [(x.window, x.norm_behind) for x in mixers()[2:4]] == [(-8192, False), (0, False)]


def test_weights_before_experts_multiply_what_those_read() -> None:
    gen = torch.Generator().manual_seed(0)
    gate, up, down = (torch.randn(4, *shape, generator=gen) for shape in ((5, 6), (5, 6), (6, 5)))
    stacks = Stacks(*(Stack(x, None, *x.shape[1:]) for x in (gate, up, down)))
    x, weights = torch.randn(3, 6, generator=gen), torch.rand(3, 2, generator=gen)
    ids = torch.tensor([[0, 3], [2, 1], [3, 2]], dtype=torch.int32)
    rows, routes = weighed(x, Routes(ids, weights)), unweighed(Routes(ids, weights))
    made = bind(MoeSpec(CPU, 1, 6, 5, "swiglu", None, None))(stacks)(rows, routes.ids, routes.weights)
    want = torch.zeros(3, 6)
    for row in range(3):
        for e, by in zip(ids[row].tolist(), weights[row], strict=True):
            inner = F.silu(gate[e] @ (by * x[row])) * (up[e] @ (by * x[row]))
            want[row] += down[e] @ inner
    assert torch.allclose(of_choices(made, 2), want, atol=1e-5)


def test_mistral3_may_have_experts(tmp_path: Path) -> None:
    rng, names = np.random.default_rng(1), ("gate", "up")
    new: dict[str, np.ndarray] = {}
    for i in range(3):
        new |= {
            f"blk.{i}.ffn_{x}_exps.weight": rng.standard_normal((4, 32, 32)) for x in (*names, "down")
        }
        new[f"blk.{i}.ffn_gate_inp.weight"] = rng.standard_normal((4, 32))
    keys = {"mistral3.expert_count": 4, "mistral3.expert_used_count": 2}
    path = rewrite(FIXTURES / "mistral3.gguf", tmp_path / "m.gguf", change=keys, add=new)
    feed = spec_of(path).blocks[0].parts[1].spec
    assert feed == Experts(4, 2, 32)


def test_blocks_of_glm_are_dense_first_and_its_mtp_block_is_none_of_them(tmp_path: Path) -> None:
    name = FIXTURES / "glm4moe.gguf"
    plain = spec_of(name)
    kinds = [type(block.parts[1].spec) for block in plain.blocks]
    assert kinds == [Mlp, Experts, Experts] and plain.n_nextn == 0
    with open_gguf(name) as file:
        last = {
            tensor.replace("blk.2.", "blk.3."): file.raw(tensor).view("<f4").reshape(info.shape)
            for tensor, info in file.tensors.items()
            if tensor.startswith("blk.2.")
        }
    n = plain.n_embd
    last |= {f"blk.3.nextn.{x}.weight": np.ones(n) for x in ("enorm", "hnorm", "shared_head_norm")}
    last["blk.3.nextn.eh_proj.weight"] = np.random.default_rng(1).standard_normal((n, 2 * n)) / 8
    keys = {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    path = rewrite(name, tmp_path / "m.gguf", change=keys, add=last)
    whole = spec_of(path)
    assert whole.blocks == plain.blocks and whole.n_nextn == 1 and whole.mtp is not None
    with open_gguf(path) as file:
        check_tensors(file, whole.mtp.tensors(file, file))
    trunk = rewrite(name, tmp_path / "n.gguf", change=keys)
    assert spec_of(trunk).n_layer == 3, "a file without the block counts it all the same"


def test_an_unset_router_of_minimax_is_a_sigmoid(tmp_path: Path) -> None:
    spec = changed("minimax-m2", tmp_path / "m.gguf", expert_gating_func=None)
    assert spec == spec_of(FIXTURES / "minimax-m2.gguf")
    with pytest.raises(ModelError, match="expert_gating_func is 3"):
        changed("minimax-m2", tmp_path / "n.gguf", expert_gating_func=3)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("minimax-m2", "blk.1.exp_probs_b.bias"),
        ("minimax-m2", "output.weight"),
        ("minimax-m2", "blk.0.attn_k_norm.weight"),
        ("glm4moe", "blk.2.exp_probs_b.bias"),
        ("lfm2moe", "token_embd_norm.weight"),
        ("lfm2moe", "blk.0.shortconv.conv.weight"),
        ("deepseek2", "blk.1.attn_v_b.weight"),
        ("granite", "blk.1.ffn_norm.weight"),
    ],
)
def test_a_missing_tensor_is_named(name: str, tensor: str, tmp_path: Path) -> None:
    path = rewrite(FIXTURES / f"{name}.gguf", tmp_path / "m.gguf", drop=lambda each: each == tensor)
    with pytest.raises(BadTensors, match=f"{tensor}: missing"):
        spec_of(path)


def test_blocks_of_lfm2_without_key_heads_are_convolutions(tmp_path: Path) -> None:
    spec = spec_of(FIXTURES / "lfm2moe.gguf")
    kinds = [type(block.parts[0].spec) for block in spec.blocks]
    assert kinds == [ShortConv, ShortConv, Attention, ShortConv, Attention]
    assert [attention(spec, i).shape.n_kv_head for i in (2, 4)] == [2, 1]
    near = changed("lfm2moe", tmp_path / "m.gguf", attention__sliding_window=8)
    assert [attention(near, i).window for i in (2, 4)] == [8, 8]
    rng, dense = np.random.default_rng(1), {}
    for i in range(2, 5):
        shapes = {"gate": (32, 32), "up": (32, 32), "down": (32, 32)}
        dense |= {f"blk.{i}.ffn_{x}.weight": rng.standard_normal(shape) for x, shape in shapes.items()}
    keys = {f"lfm2.{key}": None for key in ("expert_count", "leading_dense_block_count")}
    path = rewrite(
        FIXTURES / "lfm2moe.gguf",
        tmp_path / "n.gguf",
        arch="lfm2",
        change=keys,
        drop=lambda name: "exps" in name or "gate_inp" in name or "exp_probs" in name,
        add=dense,
    )
    feeds = [block.parts[1].spec for block in spec_of(path).blocks]
    assert feeds == [Mlp(32)] * 5


def test_scores_of_deepseek2_are_multiplied_by_yarn(tmp_path: Path) -> None:
    def scale(spec: ModelSpec) -> float:
        part = spec.blocks[0].parts[0].spec
        assert isinstance(part, Mla) and part.rope.scaling.length == 1.0
        return part.scale

    assert scale(spec_of(FIXTURES / "deepseek2.gguf")) == pytest.approx(
        (1 + 0.1 * math.log(40)) ** 2 / 4
    )
    plain = changed("deepseek2", tmp_path / "m.gguf", rope__scaling__type="none")
    assert scale(plain) == pytest.approx(1 / 4)
    with pytest.raises(ModelError, match="key_length_mla"):
        changed("deepseek2", tmp_path / "n.gguf", attention__key_length_mla=None)


def test_activations_of_ling_are_cut_where_the_file_says(tmp_path: Path) -> None:
    keys = {"swiglu_clamp_exp": [1.0, 2.0, 3.0, 4.0], "swiglu_clamp_shexp": [5.0, 6.0, 7.0, 8.0]}
    feeds = [block.parts[1].spec for block in changed("bailingmoe3", tmp_path / "m.gguf", **keys).blocks]
    dense, *experts = feeds
    assert isinstance(dense, Mlp) and dense.limit == -5.0
    assert all(isinstance(x, Experts) for x in experts)
    found = [(x.limit, x.limit_shared) for x in experts]  # type: ignore[union-attr]
    assert found == [(-2.0, -6.0), (-3.0, -7.0), (-4.0, -8.0)]
    plain = [block.parts[1].spec for block in spec_of(FIXTURES / "bailingmoe3.gguf").blocks]
    assert {x.limit for x in plain} == {0.0}  # type: ignore[union-attr]


def test_indexers_stand_where_the_file_says_or_by_its_context(tmp_path: Path) -> None:
    def kinds(**keys: object) -> list[tuple[bool, bool]]:
        blocks = changed("glm-dsa", tmp_path / "m.gguf", **keys).blocks
        mixers = [block.parts[0].spec for block in blocks]
        assert all(isinstance(x, Mla) for x in mixers)
        return [(x.indexer is not None, x.follows) for x in mixers]  # type: ignore[union-attr]

    own, follows = (True, False), (False, True)
    assert kinds() == [own, own, follows, follows]
    with pytest.raises(ModelError, match="types has 3 entries"):
        kinds(attention__indexer__types=[1, 1, 0])
    with pytest.raises(ModelError, match="of which the first chooses"):
        kinds(attention__indexer__types=[0, 1, 0, 0])
    own_keys = {"glm-dsa.attention.indexer.types": None, "glm-dsa.context_length": 1 << 20}
    with open_gguf(rewrite(FIXTURES / "glm-dsa.gguf", tmp_path / "o.gguf", change=own_keys)) as file:
        assert read_types(file, 8) == [True, True, True, False, False, False, True, False]
    own_keys["glm-dsa.context_length"] = 4096
    with open_gguf(rewrite(FIXTURES / "glm-dsa.gguf", tmp_path / "p.gguf", change=own_keys)) as file:
        assert all(read_types(file, 8))


def test_experts_are_chosen_of_the_best_groups() -> None:
    """A group's score is the sum of its two best, with the bias; weights are without it."""
    spec = RouteSpec(CPU, 8, 6, 2, "sigmoid", renorm=False, biased=True, n_group=3, n_group_used=1)
    logits = torch.tensor([[9.0, -2.0, 1.0, 1.0, 0.0, 0.0]])
    ids, weights = choose(logits, spec, torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5, 0.6]))
    assert ids.tolist() == [[5, 4]], "groups score 1.12, 1.46 and 2.1"
    assert weights.tolist() == [[0.5, 0.5]]
    two = replace(spec, n_group_used=2)
    ids, _ = choose(logits, two, torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5, 0.6]))
    assert ids.tolist() == [[5, 4]]
    ids, _ = choose(logits, two, torch.zeros(6))
    assert ids.tolist() == [[0, 2]]


@pytest.mark.parametrize("name", ["deepseek2", "glm4moe", "minimax-m2", "lfm2moe"])
def test_groups_of_experts_are_read_for_every_model_that_may_have_them(
    name: str, tmp_path: Path
) -> None:
    def groups(spec: ModelSpec) -> set[tuple[int, int]]:
        feeds = [part.spec for block in spec.blocks for part in block.parts]
        return {feed.groups for feed in feeds if isinstance(feed, Experts)}

    assert groups(spec_of(FIXTURES / f"{name}.gguf")) == {(4, 2) if name == "deepseek2" else (1, 1)}
    n = 2 if name == "deepseek2" else 5
    keys = {"expert_group_count": n, "expert_group_used_count": n - 1}
    assert groups(changed(name, tmp_path / "m.gguf", **keys)) == {(n, n - 1)}


@pytest.mark.parametrize("groups", [(3, 1), (4, 0), (2, 3)])
def test_groups_that_mean_nothing_are_refused(groups: tuple[int, int]) -> None:
    with pytest.raises(ModelError, match="groups"):
        Experts(8, 2, 16, groups=groups)
    with pytest.raises(ModelError, match="have fewer"):
        Experts(8, 3, 16, groups=(4, 1))
