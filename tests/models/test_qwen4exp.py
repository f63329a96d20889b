"""qwen4exp: its MTP block against llama.cpp, slots beside seven others, keys and values of few bits, what is refused, and its choices of blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import DEVICE, FIXTURES, Bench
from rewrite import rewrite

from pyspec import synth
from pyspec.cuda.kernel_context import KernelContext, within
from pyspec.errors import BadTensors, ModelError, PairError
from pyspec.gguf import GGMLType, open_gguf
from pyspec.models import read_config
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.gated_part import GatedPart
from pyspec.models.blocks.indexed_attention import IndexedAttention
from pyspec.models.blocks.ngram_rows import NgramRows
from pyspec.models.checks import check_tensors
from pyspec.models.wants import TOKEN_INPUTS
from pyspec.models.weight_bytes import packed_bytes, weight_bytes
from pyspec.slots.batch import Seq, SeqMode, lay_out
from pyspec.slots.kv_types import Q4_0, Q8_0, KvType
from pyspec.synth.dims import TINY, widened

MODEL, WITH_MTP = FIXTURES / "qwen4exp.gguf", FIXTURES / "qwen4exp-mtp.gguf"
ATOL = 1e-4
WIDTHS = (1, 3, 5, 7, 9, 11, 2)  # of others beside a slot


def data_of(path: Path) -> dict[str, np.ndarray]:
    return dict(np.load(path.with_suffix(".npz")))


def test_the_second_prompt_has_llama_cpps_logits_too() -> None:
    data, bench = data_of(MODEL), Bench(MODEL)
    got = bench.feed(0, data["tokens_b"].tolist())
    assert np.abs(got.numpy() - data["logits_b"]).max() < ATOL


def test_the_mtp_block_gives_llama_cpps_rows_and_goes_on_from_itself() -> None:
    data, bench = data_of(WITH_MTP), Bench(WITH_MTP)
    block = bench.drafter("mtp", n_draft=3).block  # type: ignore[attr-defined]
    seq = bench.seq(0, data["tokens"].tolist())
    hidden = bench.forward(seq).hidden
    assert np.abs(hidden.cpu().numpy() - data["wide"]).max() < ATOL
    n = len(data["tokens"])
    with torch.inference_mode():
        for pieces in ([n], [5, 1, 11, n - 17]):  # blocks of the index that end within pieces
            at, found = 0, []
            before = torch.cat((torch.zeros_like(hidden[:1]), hidden[:-1]))
            for width in pieces:
                own = Seq(0, at, seq.tokens[at : at + width], SeqMode.VERIFY)
                found.append(block.forward(lay_out(bench.table, [own], DEVICE), before[at : at + width]))
                at += width
            rows = torch.cat(found)
            assert np.abs(rows.cpu().numpy() - data["mtp_wide"]).max() < ATOL
            assert np.abs(block.head(rows).cpu().numpy() - data["mtp_logits"]).max() < ATOL
        token, state = int(data["first"]), hidden[-1:]
        for i, (logits, wide) in enumerate(zip(data["chain_logits"], data["chain_wide"], strict=True)):
            batch = lay_out(bench.table, [Seq(0, n + i, [token], SeqMode.VERIFY, 1)], DEVICE)
            state = block.forward(batch, state)
            own = block.head(state)[0].cpu().numpy()
            assert np.abs(own - logits).max() < ATOL
            assert np.abs(state.cpu().numpy()[0] - wide).max() < ATOL
            token = int(own.argmax())


def test_the_table_is_planned_as_it_lies_in_the_file(tmp_path: Path) -> None:
    """Products read a copy in another layout, which is larger for rows of 32 numbers; nothing multiplies with the table."""
    with open_gguf(synth.write(widened(TINY["qwen4exp"]), tmp_path / "m.gguf", quant="q4_0")) as file:
        table = file.tensors[TOKEN_INPUTS]
        assert table.type is GGMLType.Q4_0 and packed_bytes(table.type, *table.shape) > table.n_bytes
        for dense in (None, torch.float32):
            given = file, dense, dense is None
            own = weight_bytes(*given) - weight_bytes(*given, without={TOKEN_INPUTS})
            assert own == table.n_bytes


@pytest.mark.parametrize("exact", [False, True])
def test_a_slot_beside_seven_others_of_odd_lengths_has_its_logits(*, exact: bool) -> None:
    """Others join, verify and are refused; exact: with the bits of the slot alone, by the kernels of CPUs, which engines take."""
    data, dense = data_of(MODEL), None if exact else torch.float32
    tokens, want = data["tokens"].tolist(), torch.from_numpy(data["logits"])
    with within(KernelContext(is_exact=exact)):
        alone = Bench(MODEL, dense=dense).feed(0, tokens)
        bench, at, got = Bench(MODEL, n_slot=8, dense=dense), 0, []
        for round_, width in enumerate((3, 1, 7, 5, 1, 11, 12)):
            own = bench.seq(3, tokens[at : at + width], keep=round_ % 2 == 0)
            others = [
                bench.seq(slot, [(5 * i + slot + round_) % 90 for i in range(w)], keep=False)
                for slot, w in zip((0, 1, 2, 4, 5, 6, 7), WIDTHS, strict=True)
            ]
            out = bench.forward(*others[:3], own, *others[3:]).logits
            first = sum(WIDTHS[:3])
            got.append(out[first : first + width].cpu())
            bench.commit(own, width)
            for other in others:
                bench.commit(other, (len(other.tokens) + round_) % (len(other.tokens) + 1))
            at += width
    assert at == len(tokens) and (torch.cat(got) - want).abs().max() < ATOL
    assert not exact or torch.equal(torch.cat(got), alone)


@pytest.fixture(scope="module")
def wide_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of heads that blocks of 32 divide."""
    dims = replace(synth.TINY["qwen4exp"], head_dim=32)
    return synth.write(dims, tmp_path_factory.mktemp("wide") / "m.gguf", quant="f32")


@pytest.mark.parametrize("kv", [Q8_0, Q4_0])
def test_keys_of_few_bits_give_nearly_the_logits_and_the_same_in_pieces(
    wide_heads: Path, kv: KvType
) -> None:
    tokens = [(7 * i * i + 3 * i) % 250 for i in range(61)]
    want = Bench(wide_heads).feed(0, tokens)
    of = {"kv": kv}
    whole, bench, at, got = Bench(wide_heads, **of).feed(0, tokens), Bench(wide_heads, **of), 0, []
    for width in (1, 13, 5, 3, 9, 30):
        got.append(bench.feed(0, tokens[at : at + width], keep=width > 5))
        at += width
    assert (whole - want).abs().amax(-1).median() < (0.1 if kv is Q8_0 else 1.0) * want.std()
    off = (torch.cat(got) - whole).abs().amax(-1)
    assert off.median() < 1e-3, "a code may turn, and with it a row"
    assert (off < 0.1 * want.std()).float().mean() > 0.9


def test_blocks_of_the_file_have_their_parts() -> None:
    with open_gguf(WITH_MTP) as file:
        config = read_config(file)
    parts = [[type(p.spec) for p in block.parts] for block in config.blocks]
    assert parts == [[GatedPart] * 2] * 2 + [[NgramRows, GatedPart, GatedPart], [GatedPart] * 2]
    mixers = [block.parts[-2].spec.part for block in config.blocks]  # type: ignore[attr-defined]
    assert [isinstance(m, IndexedAttention) for m in mixers] == [False, False, False, True]
    assert (mixers[3].ratio, mixers[3].indexer.top_k) == (4, 2)


def test_a_file_without_ratios_or_tables_has_neither(tmp_path: Path) -> None:
    keys: dict[str, object] = {"qwen4exp.attention.compress_ratios": None, "qwen4exp.ple.layers": None}
    path = rewrite(MODEL, tmp_path / "m.gguf", change=keys)
    with open_gguf(path) as file:
        config = read_config(file)
    assert isinstance(config.blocks[3].parts[0].spec.part, Attention)  # type: ignore[attr-defined]
    assert all(len(block.parts) == 2 for block in config.blocks)
    tokens = data_of(MODEL)["tokens"].tolist()
    assert (Bench(path).feed(0, tokens) - torch.from_numpy(data_of(MODEL)["logits"])).abs().max() > 0.1


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("attention.indexer.top_k", 3, "less than a block of 4"),
        ("attention.indexer.key_length", 6, "keys of the indexer have 6"),
        ("attention.compress_ratios", [0, 0, 4], "want one for each of 4"),
        ("ple.layers", [0, 2], "want one of 4 blocks"),
        ("ple.layers", [4], "want one of 4 blocks"),
        ("ple.heads_per_ngram", 1, "numbers are gathered"),
        ("hyper_connection.count", 1, "hyper_connection.count"),
    ],
)
def test_keys_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, key: str, value: object, why: str
) -> None:
    path = rewrite(MODEL, tmp_path / "m.gguf", change={f"qwen4exp.{key}": value})
    with pytest.raises(ModelError, match=why), open_gguf(path) as file:
        read_config(file)


def test_a_table_with_too_few_rows_is_refused(tmp_path: Path) -> None:
    with open_gguf(MODEL) as file:
        info = file.tensors["per_layer_token_embd.weight"]
        rows = file.raw(info.name).view("<f4").reshape(info.shape)[:-9]
    path = tmp_path / "m.gguf"
    rewrite(MODEL, path, drop=lambda name: name == info.name, add={info.name: rows})
    with pytest.raises(BadTensors, match="per_layer_token_embd"), open_gguf(path) as file:
        check_tensors(file, read_config(file).tensors(file))


def test_grafted_mtp_blocks_are_refused_by_name(tmp_path: Path) -> None:
    grafted = {"blk.4.nextn.shared_head_norm.weight": np.ones(24, "<f4")}
    path = rewrite(WITH_MTP, tmp_path / "a.gguf", add=grafted)
    with pytest.raises(PairError, match="shared_head_norm"):
        Bench(path).drafter("mtp", n_draft=2)
    path = rewrite(WITH_MTP, tmp_path / "b.gguf", drop=lambda name: name.endswith("hc_head_up.weight"))
    with pytest.raises(BadTensors, match="hc_head_up"):
        Bench(path).drafter("mtp", n_draft=2)


def test_a_file_whose_mtp_block_was_left_out_is_read(tmp_path: Path) -> None:
    data = data_of(WITH_MTP)
    for keys in ({}, {"qwen4exp.block_count": 4}):
        path = tmp_path / f"{len(keys)}.gguf"
        rewrite(WITH_MTP, path, drop=lambda name: name.startswith("blk.4."), change=keys)
        got = Bench(path).feed(0, data["tokens"].tolist())
        assert np.abs(got.numpy() - data["logits"]).max() < ATOL
