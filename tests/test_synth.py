"""Random models: complete by the format's rules, deterministic, with values of the right size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pyspec import synth
from pyspec.cuda.ops.linear.dequant import dequantize
from pyspec.errors import ConfigError
from pyspec.gguf import GGMLType, GGUFFile, open_gguf
from pyspec.synth import layout, vocab
from pyspec.synth.dims import find, widened
from pyspec.synth.drafters import drafter_of, eagle_of, made_for
from pyspec.synth.fill import Filler, Pool, values
from pyspec.synth.layout import Parts, Spec


def tensor(file: GGUFFile, name: str) -> torch.Tensor:
    info = file.tensors[name]
    return dequantize(torch.from_numpy(file.raw(name).copy()), info.type, info.shape)


def count(name: str, parts: Parts) -> int:
    return len(list(layout.tensors(find(name), parts)))


def n_params(name: str, parts: Parts) -> float:
    return sum(np.prod(s.shape, dtype=float) for s in layout.tensors(find(name), parts)) / 1e9


def test_real_models_have_the_published_tensor_and_parameter_counts() -> None:
    with_mtp, sidecar = Parts(mtp=True), Parts(trunk=False, mtp=True)
    assert [count("qwen3.6-27b", p) for p in (Parts(), with_mtp, sidecar)] == [851, 866, 18]
    assert count("qwen3.5-4b", Parts()) == 426
    assert n_params("qwen3.6-27b", Parts()) == pytest.approx(26.896, abs=1e-3)
    assert n_params("qwen3.6-27b", with_mtp) - n_params("qwen3.6-27b", Parts()) == pytest.approx(
        0.425, abs=1e-3
    )
    assert [round(n_params(f"qwen3.5-{x}", Parts()), 2) for x in ("9b", "4b", "2b", "0.8b")] == [8.95, 4.21, 1.88, 0.75]  # fmt: skip
    assert count("qwen3.6-35b-a3b", with_mtp) == 753
    for name, trunk, block in (("qwen3.5-122b-a10b", 122.11, 2.52), ("qwen3.6-35b-a3b", 34.66, 0.845)):
        assert n_params(name, Parts()) == pytest.approx(trunk, abs=0.005)
        assert n_params(name, with_mtp) - n_params(name, Parts()) == pytest.approx(block, abs=0.005)
    for name, trunk, block in (("nemotron-3-super", 120.67, 2.94), ("nemotron-3-nano", 31.58, 0.0)):
        mtp = Parts(mtp=find(name).mtp)
        assert n_params(name, Parts()) == pytest.approx(trunk, abs=0.005)
        assert n_params(name, mtp) - n_params(name, Parts()) == pytest.approx(block, abs=0.005)
    assert count("nemotron-3-super", sidecar) == 21
    for name, trunk, block in (("deepseek-v4-flash", 284.33, 6.61), ("deepseek-v4-pro", 1573, 25.84)):
        # The block's file has the embedding once more
        ends = 2 * find(name).n_vocab * find(name).n_embd / 1e9
        assert n_params(name, Parts()) == pytest.approx(trunk, rel=1e-3)
        assert n_params(name, sidecar) - ends == pytest.approx(block, abs=0.01)
    assert n_params("qwen3-4b", Parts()) == pytest.approx(4.02, abs=0.01)
    assert n_params("llama-3-8b", Parts()) == pytest.approx(8.03, abs=0.01)
    assert n_params("gemma-4-31b", Parts()) == pytest.approx(30.7, abs=0.01)
    assert n_params("gemma-4-26b-a4b", Parts()) == pytest.approx(25.2, abs=0.05)
    for name, size in (
        ("gpt-oss-20b", 20.91),
        ("gpt-oss-120b", 116.83),
        ("qwen3-30b-a3b", 30.53),
        ("qwen3-next-80b-a3b", 79.67),
        ("gemma-3-27b", 27.01),
        ("gemma-3-270m", 0.268),
        ("qwen2.5-7b", 7.616),
        ("granite-3.3-8b", 8.171),
        ("ministral-3-8b", 8.49),
        ("glm-4.5-air", 106.85),
        ("minimax-m2", 228.69),
        ("lfm2-1.2b", 1.17),
        ("lfm2-8b-a1b", 8.34),
        ("deepseek-v3", 671.026),
        ("kimi-k2", 1026.41),
    ):
        assert n_params(name, Parts()) == pytest.approx(size, abs=0.005)


def test_the_27b_drafter_is_the_published_one() -> None:
    dims = drafter_of(find("qwen3.6-27b"))
    assert dims.taps == (1, 16, 31, 46, 61)
    assert (dims.mask_id, dims.block, dims.window) == (248_070, 16, 2048)
    assert sum(np.prod(s.shape, dtype=float) for s in layout.tensors(dims, Parts())) == pytest.approx(
        1.73e9, rel=5e-3
    )
    assert drafter_of(find("qwen3-8b")).taps == (1, 9, 17, 25, 33)


def test_other_drafters_of_27b_have_their_parts() -> None:
    size = lambda dims: sum(np.prod(s.shape, dtype=float) for s in layout.tensors(dims, Parts()))  # noqa: E731
    flash2, spark = (drafter_of(find("qwen3.6-27b"), kind=kind) for kind in ("dflash2", "dspark"))
    assert (flash2.taps, flash2.block, flash2.window) == ((5, 19, 33, 47, 61), 8, 2048)
    assert size(flash2) == pytest.approx(1.92e9, rel=5e-3) and size(spark) == pytest.approx(
        1.85e9, rel=5e-3
    )
    with pytest.raises(
        ConfigError, match="no drafter 'dflash3'; known are dflash, dflash2, dspark, eagle3"
    ):
        made_for(find("qwen3.6-27b"), "dflash3", fork=False)
    with pytest.raises(ConfigError, match="no drafter 'dspark' of forks"):
        made_for(find("qwen3.6-27b"), "dspark", fork=True)


@pytest.mark.parametrize(
    ("name", "size", "ff", "heads", "inputs"),
    [
        ("qwen3.6-27b", 6.26e8, 17_408, (24, 4, 256), (2, 32, 61)),
        ("qwen3.5-4b", 2.143e8, 9216, (16, 4, 256), (2, 16, 29)),
        ("qwen3-8b", 3.995e8, 12_288, (32, 8, 128), (2, 18, 33)),
        ("llama-3-8b", 4.247e8, 14_336, (32, 8, 128), (2, 16, 29)),
        ("qwen3.6-35b-a3b", 1.452e8, 6144, (16, 2, 256), (2, 20, 37)),
        ("gpt-oss-20b", 3.07e8, 17_280, (64, 8, 64), (2, 12, 21)),
        ("nemotron-3-nano", 2.168e8, 8064, (32, 8, 128), (2, 26, 49)),
    ],
)
def test_eagle_drafters_have_published_sizes(
    name: str, size: float, ff: int, heads: tuple[int, int, int], inputs: tuple[int, ...]
) -> None:
    """The published one of 27B has "0.6 B trainable" weights and a head of 32,000 tokens (Ex0bit/Qwen3.6-27B-PRISM-EAGLE3), that of
    Llama 3.1 8B is a file of 0.85 GB in f16."""
    dims = eagle_of(find(name))
    assert (dims.n_ff, dims.n_head, dims.n_head_kv, dims.head_dim) == (ff, *heads)
    assert (dims.n_layer, dims.n_drafts, dims.taps) == (1, 32_000, inputs)
    specs = {s.name: s for s in layout.tensors(dims, Parts()) if s.kind != "choice"}
    assert sum(np.prod(s.shape, dtype=float) for s in specs.values()) == pytest.approx(size, rel=5e-3)
    assert specs["output.weight"].shape[0] == 32_000 and "token_embd.weight" not in specs


def test_the_dspark_drafter_of_deepseek_v4_has_its_layers() -> None:
    """Three stages, blocks of five, and taps of the last three layers, each of a block's size."""
    dims = made_for(find("deepseek-v4-flash"), "dspark", fork=False)
    assert (dims.taps, dims.block, dims.window, dims.ratios) == ((40, 41, 42), 5, 128, (0, 0, 0))
    size = sum(np.prod(s.shape, dtype=float) for s in layout.tensors(dims, Parts()))
    assert size == pytest.approx(3 * 6.58e9 + 0.12e9, rel=5e-3)


def test_an_eagle_drafters_tokens_are_different_ones_of_the_target(tmp_path: Path) -> None:
    path = synth.write("qwen35", tmp_path / "e.gguf", tiny=True, drafter=True, kind="eagle3")
    with open_gguf(path) as file:
        ids, dims = np.array(file.raw("d2t")).view("<i8"), eagle_of(find("qwen35", tiny=True))
        assert file.tensors["d2t"].type is GGMLType.I64 and len(ids) == dims.n_drafts == 160
        assert ids[0] >= 0 and ids[-1] < dims.n_vocab and (np.diff(ids) > 0).all()
        assert {k: t.shape for k, t in file.tensors.items()} == {
            s.name: s.shape for s in layout.tensors(dims, Parts())
        }


def test_real_vocabularies_have_the_right_size_unique_texts_and_special_ids() -> None:
    for name, end, n in (("qwen3.6-27b", 248_046, 248_320), ("qwen3-4b", 151_645, 151_936)):
        made = vocab.make(find(name))
        assert len(made.tokens) == len(set(made.tokens)) == len(made.types) == n
        assert made.tokens[end] == "<|im_end|>"
        assert made.eos == end
    assert vocab.make(find("qwen3.6-27b")).mask == 248_070


@pytest.mark.parametrize("name", synth.TINY)
@pytest.mark.parametrize("quant", ["f32", "q8_0"])
def test_a_tiny_model_holds_every_tensor(name: str, quant: str, tmp_path: Path) -> None:
    with open_gguf(synth.write(name, tmp_path / "m.gguf", quant=quant, tiny=True)) as file:
        dims = synth.TINY[name]
        parts = layout.parts_of(dims)
        assert {k: t.shape for k, t in file.tensors.items()} == {
            s.name: s.shape for s in layout.tensors(dims, parts)
        }
        assert file.architecture == dims.arch
        assert file.hparams.integer("block_count") == dims.n_layer + parts.mtp
        assert len(set(file.fields.strings("tokenizer.ggml.tokens"))) == dims.n_vocab
        up = next(n for n in file.tensors if n.endswith((".ffn_up.weight", ".ffn_up_exps.weight")))
        assert file.tensors[up].type.name == quant.upper()
        for name in file.tensors:
            values = tensor(file, name)
            assert values.isfinite().all()
            assert values.numel() == 1 or values.std() > 0
        assert file.n_bytes < 1 << 21


@pytest.mark.parametrize(
    "quant", [q for q in synth.QUANTS if q not in ("f32", "q8_0") and not q.endswith("_moe")]
)
def test_every_quantisation_gives_its_type_and_the_same_spread(quant: str, tmp_path: Path) -> None:
    with open_gguf(synth.write("qwen35", tmp_path / "m.gguf", quant=quant, tiny=True)) as file:
        name = "blk.0.ffn_down.weight"
        assert file.tensors[name].type.name == quant.upper()
        values = tensor(file, name)
        if quant == "nvfp4":
            values = values * tensor(file, "blk.0.ffn_down.scale")
        want = file.tensors[name].shape[-1] ** -0.5
        assert values.std() == pytest.approx(
            want, rel=0.5 if quant == "mxfp4" else 0.15
        )  # mxfp4: powers of two
        assert abs(values.mean()) < 0.1 * want


@pytest.mark.parametrize("quant", ["q8_0", "q4_k", "nvfp4"])
def test_experts_differ_and_have_a_scale_each(quant: str, tmp_path: Path) -> None:
    with open_gguf(synth.write("qwen35moe", tmp_path / "m.gguf", quant=quant, tiny=True)) as file:
        values = tensor(file, "blk.0.ffn_down_exps.weight")
        if quant == "nvfp4":
            assert file.tensors["blk.0.ffn_down_exps.scale"].shape == values.shape[:1]
            values = values * tensor(file, "blk.0.ffn_down_exps.scale")[:, None, None]
        assert len({tuple(expert.flatten().tolist()) for expert in values}) == values.shape[0] >= 4
        assert values.std() == pytest.approx(2 * values.shape[-1] ** -0.5, rel=0.15)
        assert file.tensors["blk.0.ffn_gate_inp.weight"].type is GGMLType.F32


@pytest.mark.parametrize("model", ["qwen35moe", "nemotron_h_moe"])
@pytest.mark.parametrize("quant", ["mxfp4", "nvfp4"])
def test_four_bits_for_experts_alone(model: str, quant: str, tmp_path: Path) -> None:
    with open_gguf(synth.write(model, tmp_path / "m.gguf", quant=f"{quant}_moe", tiny=True)) as file:
        kinds = {len(t.shape): set() for t in file.tensors.values()}
        for t in file.tensors.values():
            kinds[len(t.shape)].add(t.type.name)
    assert quant.upper() in kinds[3] and "Q8_0" in kinds[2] and quant.upper() not in kinds[2]


def test_downs_of_experts_of_two_bits_are_finer_and_tables_name_experts_once(tmp_path: Path) -> None:
    dims = widened(find("deepseek4", tiny=True))
    with open_gguf(synth.write(dims, tmp_path / "m.gguf", quant="iq2_xxs_moe")) as file:
        kinds = {
            part: file.tensors[f"blk.1.ffn_{part}.weight"].type.name
            for part in ("gate_exps", "up_exps", "down_exps", "up_shexp")
        }
        table = np.frombuffer(file.raw("blk.0.ffn_gate_tid2eid.weight"), np.int32).reshape(-1, 2)
    assert kinds == {
        "gate_exps": "IQ2_XXS",
        "up_exps": "IQ2_XXS",
        "down_exps": "Q2_K",
        "up_shexp": "Q8_0",
    }
    assert table.min() == 0 and table.max() == dims.n_expert - 1 and (table[:, 0] != table[:, 1]).all()


@pytest.mark.parametrize("model", ["qwen35", "qwen35moe", "nemotron_h_moe"])
@pytest.mark.parametrize("quant", ["nvfp4", "nvfp4_moe"])
def test_no_scale_stands_in_an_mtp_block_and_its_weights_have_their_size_all_the_same(
    model: str, quant: str, tmp_path: Path
) -> None:
    """llama.cpp skips an MTP block unless requested, counts its scales as unused tensors, and refuses the file."""
    dims = find(model, tiny=True)
    with open_gguf(synth.write(model, tmp_path / "m.gguf", quant=quant, tiny=True)) as file:
        inside = [name for name in file.tensors if name.startswith(f"blk.{dims.n_layer}.")]
        floats = [name for name in inside if file.tensors[name].type is GGMLType.NVFP4]
        assert inside and not [name for name in inside if name.endswith(".scale")]
        assert floats or (model, quant) == ("qwen35", "nvfp4_moe")
        for name in floats:
            spec = next(s for s in layout.tensors(dims, Parts(mtp=True)) if s.name == name)
            want = spec.gain * file.tensors[name].shape[-1] ** -0.5
            assert tensor(file, name).std() == pytest.approx(want, rel=0.15), name


def test_the_real_nemotron_has_two_such_tensors() -> None:
    """Missing in llama.cpp: the products of 512 experts, for which it required the scales or none."""
    dims = find("nemotron-3-super")
    specs = [
        s for s in layout.tensors(dims, Parts(mtp=True)) if s.name.startswith(f"blk.{dims.n_layer}.")
    ]
    kinds = {s.name: synth._type_of(s, dims, "nvfp4_moe") for s in specs}
    floats = {name.split(".", 2)[2] for name, kind in kinds.items() if kind is GGMLType.NVFP4}
    assert floats == {"ffn_up_exps.weight", "ffn_down_exps.weight"}


@pytest.mark.parametrize("name", [*synth.TINY, *synth.MODELS])
def test_a_drafter_taps_no_last_layer(name: str) -> None:
    """llama.cpp reads a layer's output as the next one's input, and after the last layer there is none."""
    dims = find(name, tiny=name in synth.TINY)
    taps = drafter_of(dims).taps
    assert taps and max(taps) < dims.n_layer - 1


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    a, b, c = (
        synth.write("qwen3", tmp_path / f"{i}.gguf", tiny=True, seed=s) for i, s in enumerate((1, 1, 2))
    )
    assert a.read_bytes() == b.read_bytes()
    assert a.read_bytes() != c.read_bytes()


def test_recurrent_layers_decay_and_remember(tmp_path: Path) -> None:
    with open_gguf(synth.write("qwen35", tmp_path / "m.gguf", tiny=True)) as file:
        rate, step = tensor(file, "blk.0.ssm_a"), tensor(file, "blk.0.ssm_dt.bias")
        assert ((rate <= -1) & (rate >= -16)).all()
        taken = torch.nn.functional.softplus(step)
        assert ((taken >= 0.99e-3) & (taken <= 0.101)).all()


def test_files_without_the_mtp_block_and_the_block_alone(tmp_path: Path) -> None:
    with open_gguf(synth.write("qwen35", tmp_path / "plain.gguf", tiny=True, mtp=False)) as file:
        assert "qwen35.nextn_predict_layers" not in file.metadata
        assert not [name for name in file.tensors if "nextn" in name]
    with open_gguf(synth.write("qwen35", tmp_path / "side.gguf", tiny=True, sidecar=True)) as file:
        assert file.hparams.integer("block_count") == 5
        assert len(file.tensors) == 18
    with pytest.raises(ConfigError, match="no MTP block"):
        synth.write("llama", tmp_path / "x.gguf", tiny=True, sidecar=True)


def test_drafters_in_both_namings_say_the_same(tmp_path: Path) -> None:
    ours = open_gguf(synth.write("qwen35", tmp_path / "a.gguf", tiny=True, drafter=True))
    fork = open_gguf(synth.write("qwen35", tmp_path / "b.gguf", tiny=True, drafter=True, fork=True))
    assert (ours.architecture, fork.architecture) == ("dflash", "dflash-draft")
    taps = [tap + 1 for tap in fork.hparams.integers("dflash.target_layer_ids")]
    assert ours.hparams.integers("target_layers") == taps
    assert ours.fields.integer("tokenizer.ggml.mask_token_id") == fork.hparams.integer(
        "dflash.mask_token_id"
    )
    assert ours.tensors["fc.weight"].shape == fork.tensors["dflash_fc.weight"].shape == (64, 128)
    assert "blk.0.post_attention_norm.weight" in fork.tensors
    assert ours.hparams.flags("attention.sliding_window_pattern", 2) == [True, False]
    ours.close()
    fork.close()


def test_pooled_weights_have_the_spread_and_no_equal_rows() -> None:
    spec = Spec("output.weight", (9000, 512), "head")  # large enough to come from the pool
    n = 9000 * 512 // 32
    raw = np.concatenate(list(Filler(0, {GGMLType.Q8_0: n // 10}).bytes(spec, GGMLType.Q8_0)))
    assert len(raw) == n * 34
    rows = raw.reshape(9000, -1)
    assert len(np.unique(rows, axis=0)) == 9000  # though the pool is used ten times over
    values = dequantize(torch.from_numpy(raw), GGMLType.Q8_0, (9000, 512))
    assert values.std() == pytest.approx(2 / 512**0.5, rel=0.05)


def test_a_pool_keeps_few_scaled_copies() -> None:
    pool = Pool(GGMLType.Q4_K, 101, 0)
    for std in np.linspace(0.01, 0.1, 9):
        values = dequantize(torch.from_numpy(pool.scaled(std)), GGMLType.Q4_K, (101 * 256,))
        assert values.std() == pytest.approx(std, rel=0.02)
    assert len(pool._cache) == 4


def test_a_model_may_have_its_first_layers_alone(tmp_path: Path) -> None:
    whole = open_gguf(synth.write("nemotron_h_moe", tmp_path / "w.gguf", tiny=True, quant="f32"))
    short = open_gguf(
        synth.write("nemotron_h_moe", tmp_path / "s.gguf", tiny=True, quant="f32", n_layer=2)
    )
    trunk = {name for name in whole.tensors if name.startswith(("blk.0.", "blk.1."))}
    assert {n for n in short.tensors if n.startswith(("blk.0.", "blk.1."))} == trunk
    assert short.hparams.integer("block_count") < whole.hparams.integer("block_count")
    for n_layer in (-1, 99):
        with pytest.raises(ConfigError, match="layers"):
            synth.write("qwen35", tmp_path / "x.gguf", tiny=True, n_layer=n_layer)


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    synth.write(
        "llama", tmp_path / "m.gguf", tiny=True, progress=lambda done, total: seen.append((done, total))
    )
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]


def test_an_unknown_name_or_type_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean qwen3\.6-27b"):
        synth.write("qwen3.6-27", tmp_path / "x.gguf")
    with pytest.raises(ConfigError, match="no quantisation 'q9'"):
        synth.write("llama", tmp_path / "x.gguf", tiny=True, quant="q9")


def test_a_hollow_model_has_everything_but_weights(tmp_path: Path) -> None:
    """Real dimensions, in a file that takes no room."""
    path = synth.write("qwen3-8b", tmp_path / "hollow.gguf", quant="q4_k", hollow=True)
    with open_gguf(path) as file:
        assert path.stat().st_size > 4_000_000_000 and path.stat().st_blocks * 512 < 50_000_000
        assert file.tensors["blk.35.ffn_down.weight"].shape == (4096, 12_288)
        some = np.empty(4096, np.uint8)
        file.read_into("output.weight", some, 1 << 20)
        assert not some.any()


def test_a_table_may_name_all_experts() -> None:
    table = values(Spec("blk.0.ffn_gate_tid2eid.weight", (50, 3), "ids", 3), seed=0)
    assert table.dtype == np.int32 and (np.sort(table, 1) == [0, 1, 2]).all()
