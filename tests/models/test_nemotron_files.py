"""Files of `nemotron_h`: every type of tensor that they use, the real models' dimensions, and what is wrong with bad ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import DEVICE, FIXTURES, Bench, near

from pyspec import synth
from pyspec.cuda.ops.linear.dequant import dequantize
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.errors import BadTensors, ModelError
from pyspec.gguf import GGMLType, GGUFFile, TensorInfo, ValueType, open_gguf
from pyspec.gguf.write import GGUFWriter
from pyspec.models import read_config
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.mamba2 import Mamba2
from pyspec.models.blocks.moe import Experts
from pyspec.models.checks import check_tensors
from pyspec.models.model import ModelSpec
from pyspec.models.part import PartSpec
from pyspec.slots.kv import KvFormat
from pyspec.slots.parts import CacheSizes, Recurrent
from pyspec.synth import layout, vocab

TYPES = [
    "f16",
    "bf16",
    "q8_0",
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q4_k",
    "q6_k",
    "iq4_nl",
    "iq4_xs",
    "mxfp4",
    "nvfp4",
]


def unpacked(source: GGUFFile, path: Path) -> Path:
    """The same model with every tensor as F32 and second-level scales multiplied in."""
    writer = GGUFWriter(path, source.architecture)
    for key, value in source.metadata.items():
        if key != "general.architecture":
            plain = value.tolist() if isinstance(value, np.ndarray) else value
            writer.add(key, plain, value_type(plain[0] if isinstance(plain, list) else plain))  # type: ignore[arg-type]
    names = [name for name in source.tensors if not name.endswith(".scale")]
    for name in names:
        writer.add_tensor_info(name, GGMLType.F32, source.tensors[name].shape)

    def values(name: str) -> torch.Tensor:
        info = source.tensors[name]
        return dequantize(torch.from_numpy(source.raw(name).copy()), info.type, info.shape)

    def fill(info: TensorInfo) -> list[np.ndarray]:
        whole, side = values(info.name), info.name.removesuffix(".weight") + ".scale"
        if side in source.tensors:
            whole = whole * values(side).view(-1, *[1] * (whole.dim() - 1))
        return [whole.contiguous().numpy().reshape(-1).view(np.uint8)]

    writer.write(lambda info: iter(fill(info)))
    return path


def value_type(value: object) -> ValueType:
    for kind, type_ in ((bool, ValueType.BOOL), (int, ValueType.UINT32), (float, ValueType.FLOAT32)):
        if isinstance(value, kind):
            return type_
    return ValueType.STRING


def read_spec(file: GGUFFile) -> ModelSpec:
    config = read_config(file)
    return config


def trunk(c: ModelSpec) -> list[PartSpec]:
    """The one part of each block."""
    return [block.parts[0].spec for block in c.blocks]


@pytest.mark.sampled(most=5)
@pytest.mark.parametrize("quant", TYPES)
def test_every_type_loads_and_gives_the_logits_of_its_values(quant: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    dims = replace(synth.TINY["nemotron_h_moe"], latent=64)  # whole blocks of NVFP4
    path = synth.write(dims, tmp_path / "m.gguf", quant=quant, tiny=True)
    with open_gguf(path) as source:
        kinds = {info.type.name.lower() for info in source.tensors.values()}
        assert quant in kinds
        if quant == "nvfp4":
            assert (
                source.tensors["blk.1.ffn_up_exps.scale"].shape
                == source.tensors["blk.1.ffn_up_exps.weight"].shape[:1]
            )
            assert "blk.0.ssm_in.scale" in source.tensors
            assert "blk.1.ffn_latent_down.scale" not in source.tensors
        want = Bench(unpacked(source, tmp_path / "f32.gguf")).feed(0, list(range(7, 40)))
    for dense in (torch.float32, None):
        bench = Bench(path, dense=dense)
        got = torch.cat(
            [bench.feed(0, list(range(7, 31))), bench.feed(0, list(range(31, 40)), keep=False)]
        )
        # 33 rows behind each other: what one turned choice leaves in the states is seen in the next rows, too
        assert near(got, want, dense, 1e-4 * float(want.std()), turned=0.25)


def test_the_real_models_are_read_as_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their metadata and the shapes of their tensors, without the tensors."""
    monkeypatch.setattr(layout, "tensors", lambda dims, parts: iter(()))
    shapes = {
        "nemotron-3-super": (Mamba2Shape(128, 64, 8, 128, 4), Experts(512, 22, 2688, 5376, "sigmoid", True, 5.0, "relu2", 1024)),
        "nemotron-3-nano": (Mamba2Shape(64, 64, 8, 128, 4), Experts(128, 6, 1856, 3712, "sigmoid", True, 2.5, "relu2", 0)),
    }  # fmt: skip
    attention = {"nemotron-3-super": (7, 16, 25, 36, 47, 58, 69, 78), "nemotron-3-nano": (5, 12, 19, 26, 33, 42)}  # fmt: skip
    for name, (state, moe) in shapes.items():
        dims = synth.find(name)
        writer = GGUFWriter(tmp_path / f"{name}.gguf", dims.arch)
        for key, value, kind in layout.metadata(dims, layout.Parts(mtp=dims.mtp)):
            writer.add(key, value, kind)
        writer.add_tensor_info("token_embd.weight", GGMLType.F32, (8, 1))
        for i in range(dims.n_layer + dims.mtp):  # a count of blocks is held against that of tensors
            writer.add_tensor_info(f"blk.{i}.attn_norm.weight", GGMLType.F32, (8,))
        if dims.mtp:
            writer.add_tensor_info(f"blk.{dims.n_layer}.nextn.eh_proj.weight", GGMLType.F32, (8,))
        writer.write(lambda info: iter([np.zeros(32, np.uint8)]))
        with open_gguf(writer.path) as file:
            c = read_spec(file)
        assert (c.n_layer, c.n_nextn, c.eps) == (dims.n_layer, int(dims.mtp), pytest.approx(1e-5))
        parts = trunk(c)
        attends = tuple(i for i, part in enumerate(parts) if isinstance(part, Attention))
        assert attends == attention[name] and parts[:3] == [Mamba2(state), moe, Mamba2(state)]
        (shape,) = c.attention
        assert (shape.n_head, shape.n_kv_head, shape.head_dim) == (32, 2, 128)
        full = parts[attends[0]]
        assert isinstance(full, Attention) and full.rope.n_rot == 0 and c.mtp_block is not None
        assert [(part.norm, part.spec) for part in c.mtp_block.parts] == [
            ("attn_norm", full),
            ("post_attention_norm", moe),
        ]
    part, sizes = Recurrent(Mamba2Shape(128, 64, 8, 128, 4)), CacheSizes(1, 16, 16, 0, KvFormat())
    assert part.n_bytes(sizes) == part.saved_bytes(sizes) == 4 * (1_048_576 + 30_720), (
        "as the files' makers count them"
    )


def test_the_vocabulary_has_the_real_ids() -> None:
    made = vocab.make(synth.find("nemotron-3-super"))
    assert len(set(made.tokens)) == 131_072 and made.tokens[:3] == ["<unk>", "<s>", "</s>"]
    assert (made.bos, made.eos, made.tokens[11]) == (1, 11, "<|im_end|>")


# -- files that do not fit -------------------------------------------------------------------------------------------


def changed(path: Path, change: dict[str, object], *, drop: Sequence[str] = ()) -> Path:
    """The latent fixture with other metadata (None drops a key) and without some tensors."""
    with open_gguf(FIXTURES / "nemotron_latent.gguf") as source:
        a = source.architecture
        writer = GGUFWriter(path, a)
        for key, value in ({k: v for k, v in source.metadata.items() if k.startswith(f"{a}.")}).items():
            value = change.get(key.removeprefix(f"{a}."), value)
            plain = value.tolist() if isinstance(value, np.ndarray) else value
            if plain is not None:
                writer.add(key, plain, value_type(plain[0] if isinstance(plain, list) else plain))  # type: ignore[arg-type]
        for name, info in source.tensors.items():
            if name not in drop:
                writer.add_tensor_info(name, info.type, info.shape)
        writer.write(lambda info: iter([source.raw(info.name).reshape(-1)]))
    return path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attention.head_count_kv": [0, 0, 1]}, "3 entries; want one for each of 7 blocks"),
        ({"attention.head_count_kv": [0, 0, 1, 0, 0, 0, 2]}, r"blocks that differ.*head_count_kv is \[1, 2\]"),
        ({"expert_used_count": [0, 5, 0, 17, 0, 0, 5]}, "17 of 16 experts"),
        ({"expert_feed_forward_length": [0, 32, 0, 0, 0, 0, 32]}, "experts of width 0"),
        ({"ssm.inner_size": 100}, "does not give inner size 100"),
        ({"ssm.group_count": 3}, "8 heads, 3 groups"),
        ({"ssm.group_count": 0}, "group_count is 0; want a whole number from 1"),
        ({"expert_group_count": 3}, "1 of 3 groups of 16 experts can not be used"),
        ({"nextn_predict_layers": 7}, "7 MTP blocks among 7"),
        ({"expert_used_count": 17}, "17 of 16 experts"),
        ({"attention.head_count_kv": None}, "head_count_kv"),
    ],
)  # fmt: skip
def test_impossible_metadata_is_refused_with_its_numbers(
    change: dict[str, object], says: str, tmp_path: Path
) -> None:
    with open_gguf(changed(tmp_path / "m.gguf", change)) as file, pytest.raises(ModelError, match=says):
        read_config(file)


@pytest.mark.parametrize(
    "name", ["blk.0.ssm_conv1d.bias", "blk.0.ssm_a", "blk.1.ffn_latent_up.weight", "blk.2.attn_k.weight"]
)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    with open_gguf(changed(tmp_path / "m.gguf", {}, drop=[name])) as file:
        config = read_config(file)
        with pytest.raises(BadTensors, match=f"1 tensor does not fit.*{name}: missing"):
            check_tensors(file, config.tensors(file))


def test_single_numbers_and_arrays_mean_the_same(tmp_path: Path) -> None:
    """Old writers: no expert width, one epsilon; Puzzle's: arrays of used experts."""
    same = {
        "expert_used_count": [0, 5, 0, 5, 0, 0, 5],
        "expert_feed_forward_length": [0, 32, 0, 32, 0, 0, 32],
        "attention.layer_norm_rms_epsilon": None,
    }
    old = {"expert_feed_forward_length": None, "feed_forward_length": [0, 160, 0, 160, 0, 0, 160]}
    with (
        open_gguf(changed(tmp_path / "a.gguf", same)) as a,
        open_gguf(changed(tmp_path / "b.gguf", old)) as b,
    ):
        with open_gguf(FIXTURES / "nemotron_latent.gguf") as file:
            want = read_spec(file)
        assert read_spec(a) == want
        assert read_spec(b).blocks == want.blocks
    moe = trunk(want)[1]
    assert isinstance(moe, Experts) and (moe.n_ff, moe.n_used, moe.scale) == (32, 5, 2.5)


def test_blocks_of_experts_may_differ() -> None:
    with open_gguf(FIXTURES / "nemotron_differ.gguf") as file:
        found = [
            (part.n_used, part.n_ff) for part in trunk(read_spec(file)) if isinstance(part, Experts)
        ]
    assert found == [(3, 32), (1, 64), (5, 48)]


def test_rope_keys_are_there_and_change_nothing(tmp_path: Path) -> None:
    tokens = list(range(5, 60))
    want = Bench(FIXTURES / "nemotron_latent.gguf").feed(0, tokens)
    other = {"rope.freq_base": 1e6, "rope.dimension_count": 8}
    assert torch.equal(
        Bench(changed(tmp_path / "m.gguf", other)).feed(0, tokens).to(DEVICE), want.to(DEVICE)
    )
