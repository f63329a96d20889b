"""DeepSeek-V4: logits of tiny models whichever way the rows came in, the MTP block, and what is refused.

Expected values were made with a reference of the architecture in f64, which agrees with transformers and with llama.cpp to 1e-5
(tests/fixtures/README.md).
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from harness import DEVICE, FIXTURES, Bench

from pyspec.errors import BadTensors, ModelError, OutOfBounds, PairError
from pyspec.gguf import open_gguf
from pyspec.models import read_config
from pyspec.slots.batch import Seq, SeqMode, lay_out
from pyspec.slots.kv import KvFormat
from pyspec.slots.memory import memory_of
from pyspec.slots.parts import Ring

MODELS = ["deepseek4", "deepseek4_pro"]
ATOL = 1e-3


def expected(name: str) -> tuple[list[int], torch.Tensor, dict[str, np.ndarray]]:
    data = dict(np.load(FIXTURES / f"{name}.npz"))
    return data["tokens"].tolist(), torch.from_numpy(data["logits"]), data


def bench_of(name: str, **options: object) -> Bench:
    return Bench(FIXTURES / f"{name}.gguf", **({"n_ctx": 400} | options))  # type: ignore[arg-type]


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("chunk", [1, 3, 16, 100, 300])
@pytest.mark.parametrize("name", MODELS)
def test_prefill_in_any_chunks_gives_the_reference_logits(name: str, chunk: int) -> None:
    tokens, want, _ = expected(name)
    tokens, want = (tokens, want) if chunk > 1 else (tokens[:140], want[:140])
    bench = bench_of(name)
    got = torch.cat([bench.feed(0, tokens[i : i + chunk]) for i in range(0, len(tokens), chunk)])
    assert (got - want).abs().max() < ATOL


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("width", range(1, 18))
@pytest.mark.parametrize("name", MODELS)
def test_verify_of_any_width_gives_the_same_logits(name: str, width: int) -> None:
    tokens, want, _ = expected(name)
    bench = bench_of(name)
    got = [bench.feed(0, tokens[:100])]
    got += [bench.feed(0, tokens[i : i + width], keep=False) for i in range(100, 200, width)]
    rows = torch.cat(got)
    assert (rows - want[: len(rows)]).abs().max() < ATOL


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("n_draft", [1, 2, 3, 4, 7])
def test_refused_rows_leave_no_trace(n_draft: int) -> None:
    """Slots side by side, each at another place, past the borders of blocks of 4 and of 128."""
    tokens, want, _ = expected("deepseek4")
    bench, rng = bench_of("deepseek4", n_slot=3, width=n_draft + 1), np.random.default_rng(n_draft)
    ats = [0, 100, 110]
    for slot, at in enumerate(ats):
        if at:
            bench.feed(slot, tokens[:at])
    for _ in range(40):
        seqs, kept = [], []
        for slot, at in enumerate(ats):
            n = int(rng.integers(1, n_draft + 2))
            wrong = rng.integers(0, 300, n_draft + 1 - n).tolist()
            seqs.append(bench.seq(slot, tokens[at : at + n] + wrong, keep=False))
            kept.append(n)
        logits = bench.forward(*seqs).logits.cpu()
        for slot, (seq, n) in enumerate(zip(seqs, kept, strict=True)):
            first, at = slot * (n_draft + 1), ats[slot]
            assert (logits[first : first + n] - want[at : at + n]).abs().max() < ATOL
            bench.commit(seq, n)
            ats[slot] += n
        if max(ats) > 280:
            break
    assert min(ats) > 30


def test_rows_of_several_slots_do_not_mix() -> None:
    tokens, want, _ = expected("deepseek4")
    bench = bench_of("deepseek4", n_slot=2)
    bench.feed(0, tokens[:130])
    seqs = [bench.seq(0, tokens[130:135]), bench.seq(1, tokens[:70])]
    logits = bench.forward(*seqs).logits.cpu()
    assert (logits - torch.cat((want[130:135], want[:70]))).abs().max() < ATOL


@pytest.mark.parametrize("name", MODELS)
def test_the_mtp_block_gives_the_reference_logits_and_goes_on_from_itself(name: str) -> None:
    tokens, _, data = expected(name)
    bench = bench_of(name)
    block = bench.drafter("mtp", FIXTURES / f"{name}_mtp.gguf", n_draft=5).block  # type: ignore[attr-defined]
    hidden = bench.forward(bench.seq(0, tokens)).hidden
    assert np.abs(hidden[-1].cpu().numpy() - data["hidden_last"]).max() < ATOL
    batch = lay_out(bench.table, [bench.seq(0, tokens)], DEVICE)
    with torch.inference_mode():
        own = block.forward(batch, torch.cat((torch.zeros_like(hidden[:1]), hidden[:-1])))
        assert np.abs(block.head(own)[::3].cpu().numpy() - data["mtp_logits"]).max() < ATOL
        token, state = int(data["first"]), hidden[-1:]
        for i, want in enumerate(data["chain"]):
            state = block.forward(
                lay_out(bench.table, [Seq(0, len(tokens) + i, [token], SeqMode.KEEP, 1, 0)], DEVICE),
                state,
            )
            logits = block.head(state)[0].cpu()
            assert np.abs(logits.numpy() - want).max() < ATOL
            token = int(logits.argmax())


def test_what_the_block_s_file_has_as_the_target_is_loaded_once() -> None:
    bench = bench_of("deepseek4")
    block = bench.drafter("mtp", FIXTURES / "deepseek4_mtp.gguf", n_draft=2).block  # type: ignore[attr-defined]
    assert block.embedding is bench.target.embedding  # type: ignore[attr-defined]
    assert block.output == bench.target.head


def test_a_ring_without_slack_is_refused_before_a_row_is_lost() -> None:
    # 8 and twice 4: a row further back than that is overwritten
    ring = memory_of(Ring(8, {"rows": (2,)}), sizes_of(width=4), DEVICE)
    rows = torch.arange(40.0, device=DEVICE).view(20, 2)
    ring.write(0, 0, {"rows": rows})
    assert torch.equal(ring.read(0, 4, 20)["rows"], rows[4:])
    with pytest.raises(OutOfBounds):
        ring.read(0, 3, 20)


def sizes_of(width: int) -> object:
    from pyspec.slots.parts import CacheSizes

    return CacheSizes(1, 64, 16, width, KvFormat.named("f32"))


# -- what is refused -------------------------------------------------------------------------------------------------


def changed(tmp_path: Path, drop: str = "", **fields: object) -> Path:
    """The tiny model with other metadata, or without a tensor."""
    reader, path = gguf.GGUFReader(FIXTURES / "deepseek4.gguf"), tmp_path / "changed.gguf"
    writer = gguf.GGUFWriter(path, "deepseek4")
    for name, field in reader.fields.items():
        short = name.removeprefix("deepseek4.").replace(".", "_")
        if name.startswith(("GGUF.", "tokenizer.")) or name == "general.architecture":
            continue
        value = fields.get(short, field.contents())
        if isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            writer.add_key_value(name, value, field.types[0])
    for tensor in reader.tensors:
        if tensor.name != drop:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"attention_compress_ratios": [0, 4, 8, 4, 0]}, "want 0, 4 or 128"),
        ({"attention_compress_ratios": [0, 4]}, "2 entries"),
        ({"expert_gating_func": 1}, "sqrt"),
        ({"attention_value_length": 16}, "are the values"),
        ({"attention_output_group_count": 3}, "do not divide"),
        ({"rope_scaling_type": "longrope"}, "longrope"),
        ({"attention_head_count_kv": 2}, "key heads"),
    ],
)
def test_metadata_that_means_another_model_is_refused(tmp_path: Path, fields: dict, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        read_config(open_gguf(changed(tmp_path, **fields)))


def test_a_table_that_names_an_expert_there_is_not_is_refused(tmp_path: Path) -> None:
    path = changed(tmp_path)
    data = bytearray(path.read_bytes())
    info = open_gguf(path).tensors["blk.0.ffn_gate_tid2eid.weight"]
    data[info.offset : info.offset + 4] = np.int32(6).tobytes()
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"expert outside 0\.\.5"):
        Bench(path)


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadTensors, match=r"blk\.0\.ffn_gate_tid2eid"):
        Bench(changed(tmp_path, drop="blk.0.ffn_gate_tid2eid.weight"))


def test_an_mtp_block_of_another_model_is_refused() -> None:
    with pytest.raises(PairError, match="width 64"):
        bench_of("deepseek4").drafter("mtp", FIXTURES / "deepseek4_pro_mtp.gguf", n_draft=2)
