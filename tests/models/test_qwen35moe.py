"""`qwen35moe`: logits and MTP block against llama.cpp, whichever way the rows came in; files of all kinds of writers."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import DEVICE, FIXTURES, Bench, near

from pyspec.draft.chain import Chain
from pyspec.errors import BadTensors, ModelError
from pyspec.gguf import GGUFWriter, ValueType, open_gguf
from pyspec.models import read_config
from pyspec.models.blocks.moe import Experts
from pyspec.models.checks import check_tensors
from pyspec.slots.batch import Batch, Seq, lay_out
from pyspec.slots.drafts import DraftRequest

MODELS = ["qwen35moe", "qwen35moe_fused_tied", "qwen35moe_mixed_q8_0"]
WITH_MTP = ["qwen35moe", "qwen35moe_mixed_q8_0"]
ATOL = 3e-4  # CPUs round products of few rows differently: 1.0e-4 has been seen


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def expected(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURES / f"{name}.npz"))


def mtp_of(name: str, n_slot: int = 1) -> tuple[Bench, Chain]:
    bench = Bench(FIXTURES / f"{name}.gguf", n_slot=n_slot)
    drafter = bench.drafter("mtp", n_draft=4)
    assert isinstance(drafter, Chain)
    return bench, drafter


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dense", [torch.float32, None], ids=["unpacked", "packed"])
@pytest.mark.parametrize("chunk", [1, 3, 16, 100])
@pytest.mark.parametrize("name", MODELS)
def test_prefill_in_any_chunks_gives_llama_cpp_logits(
    name: str, chunk: int, dense: torch.dtype | None
) -> None:
    data = expected(name)
    tokens, want = data["tokens"].tolist(), torch.from_numpy(data["logits"])
    bench = Bench(FIXTURES / f"{name}.gguf", dense=dense)
    got = torch.cat([bench.feed(0, tokens[i : i + chunk]) for i in range(0, len(tokens), chunk)])
    assert near(got, want, dense, ATOL)


@pytest.mark.sampled(1, most=3)
@pytest.mark.parametrize("width", range(1, 10))
@pytest.mark.parametrize("name", MODELS)
def test_verify_of_any_width_gives_the_same_logits(name: str, width: int) -> None:
    data = expected(name)
    tokens, want = data["tokens"].tolist(), torch.from_numpy(data["logits"])
    bench = Bench(FIXTURES / f"{name}.gguf")
    got = torch.cat(
        [bench.feed(0, tokens[i : i + width], keep=False) for i in range(0, len(tokens), width)]
    )
    assert (got - want).abs().max() < ATOL


def test_hidden_states_are_after_the_final_norm() -> None:
    data = expected("qwen35moe")
    bench = Bench(FIXTURES / "qwen35moe.gguf")
    out = bench.forward(bench.seq(0, data["tokens"].tolist()))
    assert (out.hidden.cpu() - torch.from_numpy(data["hidden"])).abs().max() < ATOL


def test_rounding_to_eight_bits_explains_llama_cpps_own_logits() -> None:
    """llama.cpp rounds activations, which flips near ties of the router; we may not be farther from it than that."""
    data = expected("qwen35moe_mixed_q8_0")
    exact, rounded = (
        torch.from_numpy(data[k]).double().log_softmax(-1) for k in ("logits", "quantised_logits")
    )
    got = (
        Bench(FIXTURES / "qwen35moe_mixed_q8_0.gguf")
        .feed(0, data["tokens"].tolist())
        .double()
        .log_softmax(-1)
    )
    ours, theirs = (float((rounded.exp() * (rounded - q)).sum(-1).mean()) for q in (got, exact))
    assert ours < 1.1 * theirs + 1e-4


@pytest.mark.parametrize("name", WITH_MTP)
def test_mtp_rows_are_llama_cpps(name: str) -> None:
    """The block alone: it is given llama.cpp's hidden states."""
    data = expected(name)
    bench, drafter = mtp_of(name)
    tokens, hidden = data["tokens"].tolist(), torch.from_numpy(data["hidden"]).to(DEVICE)
    before = torch.cat([torch.zeros_like(hidden[:1]), hidden[:-1]])
    got = drafter.block.forward(lay_out(bench.table, [Seq(0, 0, tokens)], DEVICE), before)
    assert (got.cpu() - torch.from_numpy(data["mtp_hidden"])).abs().max() < ATOL
    assert (drafter.block.head(got).cpu() - torch.from_numpy(data["mtp_logits"])).abs().max() < ATOL


@pytest.mark.parametrize("name", WITH_MTP)
def test_chained_mtp_steps_are_llama_cpps(name: str) -> None:
    """Behind the whole model, whose rounding the block adds its own to."""
    data = expected(name)
    tokens, chain = data["tokens"].tolist(), data["chain_tokens"].tolist()
    bench, drafter = mtp_of(name)
    slot = bench.table.slots[0]
    drafter.begin(slot, None)
    for i in range(0, len(tokens), 37):
        seq = bench.seq(0, tokens[i : i + 37])
        batch = lay_out(bench.table, [seq], DEVICE)
        drafter.observe(batch, [seq.width], bench.target.forward(batch))
        bench.commit(seq, seq.width)
    states: list[torch.Tensor] = []
    forward = drafter.block.forward

    def watch(batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        out = forward(batch, hidden)
        states.append(out[-1])
        return out

    drafter.block.forward = watch  # type: ignore[method-assign]
    assert drafter.draft([DraftRequest(slot, chain[0], 4)])[0].tokens[:3] == chain[1:]
    assert (torch.stack(states).cpu() - torch.from_numpy(data["chain_hidden"])).abs().max() < 5 * ATOL
    logits = drafter.block.head(torch.stack(states)).cpu()
    assert (logits - torch.from_numpy(data["chain_logits"])).abs().max() < 5 * ATOL


@pytest.mark.parametrize("width", [1, 2, 5, 9])
def test_refused_rows_leave_no_trace(width: int) -> None:
    """None to all of a verify's rows kept, then plain decoding: the logits are llama.cpp's of the kept text."""
    data = expected("qwen35moe")
    tokens, want = data["tokens"].tolist(), torch.from_numpy(data["logits"])
    for kept in range(1, width + 1):
        bench = Bench(FIXTURES / "qwen35moe.gguf")
        bench.feed(0, tokens[:20])
        wrong = [(t + 7) % 300 for t in tokens[20 + kept : 20 + width]]
        seq = bench.seq(0, tokens[20 : 20 + kept] + wrong, keep=False)
        bench.forward(seq)
        bench.commit(seq, kept)
        for at in range(20 + kept, 23 + kept):
            assert (bench.feed(0, [tokens[at]]) - want[at]).abs().max() < ATOL


def test_ragged_slots_do_not_touch_each_other() -> None:
    """Eight slots, five busy with widths from 1 to 9 in changing order; slots meet at experts, and nowhere else."""
    data = expected("qwen35moe")
    tokens, want = data["tokens"].tolist(), torch.from_numpy(data["logits"])
    bench, at = Bench(FIXTURES / "qwen35moe.gguf", n_slot=8), [0] * 5
    for rnd, order in enumerate(itertools.islice(itertools.permutations(range(5)), 0, 120, 13)):
        seqs = [bench.seq(s, tokens[at[s] : at[s] + 1 + (2 * s + rnd) % 9], keep=s == 0) for s in order]
        logits, row = bench.forward(*seqs).logits.cpu(), 0
        for seq in seqs:
            first = at[seq.slot]
            assert (logits[row : row + seq.width] - want[first : first + seq.width]).abs().max() < ATOL
            row += seq.width
            kept = seq.width if seq.keep else 1 + rnd % seq.width
            bench.commit(seq, kept)
            at[seq.slot] += kept


def rewritten(path: Path, change: dict[str, object], drop: str = "") -> Path:
    """The fixture's metadata with changes (None drops a key) and its tensors without `drop`."""
    with open_gguf(FIXTURES / "qwen35moe.gguf") as source:
        writer = GGUFWriter(path, "qwen35moe")
        for key, value in {
            k: v for k, v in source.metadata.items() if k.startswith("qwen35moe.")
        }.items():
            value = change.get(key.removeprefix("qwen35moe."), value)
            if isinstance(value, np.ndarray | list):
                kind = (
                    ValueType.FLOAT32
                    if isinstance(value, np.ndarray) and value.dtype.kind == "f"
                    else ValueType.INT32
                )
                writer.add(key, [int(x) for x in value], kind)
            elif value is not None:
                writer.add(
                    key, value, ValueType.FLOAT32 if isinstance(value, float) else ValueType.UINT32
                )
        for name, info in source.tensors.items():
            if name != drop:
                writer.add_tensor_info(name, info.type, info.shape)
        writer.write(lambda info: iter([source.raw(info.name).reshape(-1)]))
    return path


def test_widths_may_stand_once_for_all_blocks_or_once_for_each(tmp_path: Path) -> None:
    same = {
        "expert_used_count": [3] * 5,
        "expert_feed_forward_length": [32] * 5,
        "feed_forward_length": None,
    }
    with open_gguf(rewritten(tmp_path / "arrays.gguf", same)) as file:
        config = read_config(file)
        moe = config.blocks[0].parts[1].spec
        assert isinstance(moe, Experts) and (moe.n_expert, moe.n_used, moe.n_ff, moe.n_ff_shared) == (
            8,
            3,
            32,
            48,
        )
    says, mixed = (
        r"expert_used_count has blocks of different sizes: \[2, 3\]",
        {"expert_used_count": [3, 3, 2, 3, 3]},
    )
    with (
        open_gguf(rewritten(tmp_path / "mixed.gguf", mixed)) as file,
        pytest.raises(ModelError, match=says),
    ):
        read_config(file)


@pytest.mark.parametrize(
    ("change", "says"),
    [({"expert_used_count": 9}, "9 of 8 experts"), ({"expert_used_count": 0}, "0 of 8"), ({"expert_count": None}, "expert_count")],
)  # fmt: skip
def test_impossible_experts_are_refused(change: dict[str, object], says: str, tmp_path: Path) -> None:
    with (
        open_gguf(rewritten(tmp_path / "m.gguf", change)) as file,
        pytest.raises(ModelError, match=says),
    ):
        read_config(file)


@pytest.mark.parametrize("name", ["ffn_gate_inp", "ffn_down_exps", "ffn_up_shexp", "ffn_gate_inp_shexp"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    with open_gguf(rewritten(tmp_path / "m.gguf", {}, drop=f"blk.2.{name}.weight")) as file:
        config = read_config(file)
        with pytest.raises(BadTensors, match=rf"blk\.2\.{name}\.weight: missing"):
            check_tensors(file, config.tensors(file))


def test_a_misshaped_stack_is_named(tmp_path: Path) -> None:
    says = r"ffn_up_exps\.weight: want \[16, 32, 32\], file has \[8, 32, 32\]"
    with open_gguf(rewritten(tmp_path / "m.gguf", {"expert_count": 16})) as file:
        config = read_config(file)
        with pytest.raises(BadTensors, match=says):
            check_tensors(file, config.tensors(file))
