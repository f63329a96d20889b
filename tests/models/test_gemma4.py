"""gemma4: which block has which heads, ropes, windows and keys; what a file may leave out, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_rig import rig
from harness import DEVICE, FIXTURES, Bench
from rewrite import rewrite

from pyspec.cuda import survey
from pyspec.cuda.op import Op, limits_of, listed_ops
from pyspec.cuda.ops.rope_kv import cpu as rope_kv_cpu
from pyspec.cuda.ops.rope_kv import ref as rope_kv_ref
from pyspec.cuda.ops.rope_kv.op import check, rope_kv
from pyspec.cuda.ops.rope_kv.ref import RopeKvSpec
from pyspec.engine.api import Engine
from pyspec.errors import BadGGUF, BadTensors, ModelError
from pyspec.gguf import open_gguf
from pyspec.models import read_config
from pyspec.models.blocks.attention import Attention
from pyspec.models.checks import check_tensors
from pyspec.models.model import ModelSpec
from pyspec.slots.memory import KV

DENSE, MOE, E = (FIXTURES / f"gemma4-{kind}.gguf" for kind in ("dense", "moe", "e"))
KINDS = ("dense", "moe", "e")


def spec_of(path: Path) -> ModelSpec:
    with open_gguf(path) as file:
        config = read_config(file)
        check_tensors(file, config.tensors(file))
    return config


def mixers(path: Path) -> list[Attention]:
    found = [block.parts[0].spec for block in spec_of(path).blocks]
    assert all(isinstance(each, Attention) for each in found)
    return found  # type: ignore[return-value]


def test_blocks_with_a_window_have_other_heads_and_another_rope() -> None:
    found = [(a.window, a.shape.head_dim, a.shape.n_kv_head, a.rope.base) for a in mixers(DENSE)]
    assert found == [(8, 16, 3, 1e4), (0, 24, 1, 1e6), (8, 16, 3, 1e4)]
    assert [bool(a.rope.divisors) for a in mixers(DENSE)] == [False, True, False]


def test_the_last_blocks_of_e_models_read_earlier_keys_and_have_none() -> None:
    config = spec_of(E)
    assert [a.reads for a in mixers(E)] == [None, None, None, 1, 1, 2]
    assert [KV in parts for parts in config.parts()] == [True] * 3 + [False] * 3


def test_parts_know_what_reads_the_stream_behind_them() -> None:
    blocks = Bench(DENSE).target.blocks
    sums = [(block, *found) for block in blocks for found in block.normed_sums]
    inner = [block.first_read(stream) for block, _, stream in sums[::2]]
    outer = [block.first_read(block.program.inputs[0]) for block in blocks[1:]]
    assert len(sums) == 6 and [added.next for _, added, _ in sums[::2]] == inner
    assert [added.next for _, added, _ in sums[1::2]] == [*outer, None]
    assert all(read is not None for read in (*inner, *outer))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the tier of CPUs")
@pytest.mark.parametrize("kind", KINDS)
def test_a_cpu_runs_every_op_and_records_the_forward(kind: str) -> None:
    for op in listed_ops():  # forget what other models of this process asked for
        op.decided.clear()
    r = rig(FIXTURES / f"gemma4-{kind}.gguf")
    r.generate([3, 4, 5], 8)
    chosen = {op.name: op.chosen(spec).name for op, spec in survey.asked() if isinstance(op, Op)}
    assert set(chosen.values()) == {"cpu"}, chosen
    forward = r.loop.worker.forward
    assert not forward._cannot and forward._tapes


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_blocks_and_caps_may_be_left_out(kind: str, tmp_path: Path) -> None:
    """Without them they are 1 and none."""
    path, tokens = FIXTURES / f"gemma4-{kind}.gguf", [5, 6, 7, 8]
    n = spec_of(path).n_layer
    ones = {f"blk.{i}.layer_output_scale.weight": np.ones(1, np.float32) for i in range(n)}
    bare = rewrite(path, tmp_path / "a.gguf", drop=ones.__contains__)
    named = rewrite(path, tmp_path / "b.gguf", drop=ones.__contains__, add=ones)
    got, want = (Bench(each).feed(0, tokens) for each in (bare, named))
    assert torch.equal(got, want) and not torch.equal(got, Bench(path).feed(0, tokens))
    flat = Bench(rewrite(path, tmp_path / "c.gguf", change={"gemma4.final_logit_softcapping": 0.0}))
    assert (30 * (flat.feed(0, tokens) / 30).tanh() - Bench(path).feed(0, tokens)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("path", "change", "says"),
    [
        (E, {"attention.shared_kv_layers": 5}, "shared_kv_layers is 5 of 6 blocks; want at most 4"),
        (E, {"attention.shared_kv_layers": 2}, "blocks 2 and 3, whose keys the others read"),
        (E, {"attention.head_count_kv": [1, 1, 1, 3, 1, 1]}, "block 3 has 3 key heads, and block 1"),
        (DENSE, {"attention.head_count": 4}, "4 heads do not divide into 3 key heads"),
        (DENSE, {"attention.value_length": 16}, "keys of 24 and values of 16 dimensions"),
        (DENSE, {"rope.dimension_count_swa": 18}, "can not turn 18 dimensions of heads of 16"),
        (DENSE, {"attention.sliding_window_pattern": [True, False]}, "has 2 entries; want 3"),
        (DENSE, {"attention.sliding_window_pattern": None}, "sliding_window_pattern"),
        (DENSE, {"attention.head_count_kv": [3, 1]}, "has 2 entries; want one for each of 3 blocks"),
        (DENSE, {"feed_forward_length": [32, 32]}, "has 2 entries"),
        (DENSE, {"attention.key_length_swa": None}, "has no gemma4.attention.key_length_swa"),
        (MOE, {"expert_used_count": 9}, "9 of 5 experts can not be used"),
        (E, {"embedding_length_per_layer_input": 5}, "want"),
        (E, {"embedding_length_per_layer_input": 1 << 20}, "embedding_length_per_layer_input is"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(
    path: Path, change: dict[str, object], says: str, tmp_path: Path
) -> None:
    keys = {f"gemma4.{key}": value for key, value in change.items()}
    with pytest.raises((ModelError, BadGGUF), match=says):
        spec_of(rewrite(path, tmp_path / "m.gguf", change=keys))


@pytest.mark.parametrize(
    ("path", "tensor"),
    [
        (DENSE, "blk.0.attn_k.weight"),
        (DENSE, "blk.1.attn_q_norm.weight"),
        (MOE, "blk.1.ffn_gate_inp.scale"),
        (MOE, "blk.2.post_ffw_norm_1.weight"),
        (MOE, "blk.0.pre_ffw_norm_2.weight"),
        (E, "per_layer_token_embd.weight"),
        (E, "per_layer_proj_norm.weight"),
        (E, "blk.4.inp_gate.weight"),
        (E, "blk.4.post_norm.weight"),
        (E, "blk.2.attn_k_norm.weight"),
    ],
)
def test_a_missing_tensor_is_named(path: Path, tensor: str, tmp_path: Path) -> None:
    with pytest.raises(BadTensors, match=f"{tensor}: missing"):
        spec_of(rewrite(path, tmp_path / "m.gguf", drop=lambda name: name == tensor))


HEADS = RopeKvSpec(torch.device("cpu"), 4, 2, 48, 32, neox=True, gated=False, has_norm=True, eps=1e-6)


@pytest.mark.parametrize(
    "spec",
    [
        replace(HEADS, norms_v=True),
        replace(HEADS, norms_v=True, keys_are_values=True),
        replace(HEADS, keys_are_values=True, has_norm=False),
        replace(HEADS, n_q=0, norms_v=True, keys_are_values=True),
        replace(HEADS, n_kv=0),
        replace(HEADS, norm_behind=True),
        replace(HEADS, norm_behind=True, has_norm=False, neox=False),
    ],
)
def test_values_normed_or_shared_queries_alone_and_late_norms(spec: RopeKvSpec) -> None:
    assert rope_kv.chosen(spec).name in ("cpu", "torch")
    if limits_of(rope_kv_cpu)(spec) is None:
        assert check(rope_kv_cpu.bind(spec), rope_kv_ref.bind(spec), spec) is None
        wrong = replace(spec, keys_are_values=not spec.keys_are_values, norms_v=not spec.norms_v)
        if spec.n_kv and spec.n_column == wrong.n_column:
            assert check(rope_kv_cpu.bind(wrong), rope_kv_ref.bind(spec), spec) is not None


def test_tokens_that_a_file_suppresses_are_never_generated(tmp_path: Path) -> None:
    """Ids outside the vocabulary mean nothing."""

    def text(path: Path) -> list[int]:
        with Engine.load(path, device="cpu", np=1, ctx=64, check_tap_shift=False) as engine:
            return list(
                engine.generate([5, 6, 7], max_tokens=12, temperature=0.0, ignore_eos=True).tokens
            )

    free = text(DENSE)
    keys = {"tokenizer.ggml.suppress_tokens": [free[0], free[3], 1 << 30]}
    held = text(rewrite(DENSE, tmp_path / "m.gguf", change=keys))
    assert not {free[0], free[3]} & set(held) and held != free
