"""`qwen35moe`: logits and MTP block against llama.cpp, whichever way the rows came in; files of all kinds of writers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from harness import FIXTURES, Bench
from llama_cases import (
    bench_of,
    check_chained_steps,
    check_chunks,
    check_hidden,
    check_mtp_rows,
    check_ragged_slots,
    check_refused_rows,
    check_rounding,
    check_verifies,
)

from pyspec.draft.chain import Chain
from pyspec.errors import BadTensors, ModelError
from pyspec.gguf import ValueType, open_gguf
from pyspec.gguf.write import GGUFWriter
from pyspec.models import read_config
from pyspec.models.blocks.moe import Experts
from pyspec.models.checks import check_tensors

MODELS = ["qwen35moe", "qwen35moe_fused_tied", "qwen35moe_mixed_q8_0"]
WITH_MTP = ["qwen35moe", "qwen35moe_mixed_q8_0"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def mtp_of(name: str, n_slot: int = 1) -> tuple[Bench, Chain]:
    bench = bench_of(name, n_slot=n_slot)
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
    check_chunks(name, chunk, dense)


@pytest.mark.sampled(1, most=3)
@pytest.mark.parametrize("width", range(1, 10))
@pytest.mark.parametrize("name", MODELS)
def test_verify_of_any_width_gives_the_same_logits(name: str, width: int) -> None:
    check_verifies(name, width)


def test_hidden_states_are_after_the_final_norm() -> None:
    check_hidden("qwen35moe")


def test_rounding_to_eight_bits_explains_llama_cpps_own_logits() -> None:
    check_rounding("qwen35moe_mixed_q8_0")


@pytest.mark.parametrize("name", WITH_MTP)
def test_mtp_rows_are_llama_cpps(name: str) -> None:
    check_mtp_rows(*mtp_of(name), name)


@pytest.mark.parametrize("name", WITH_MTP)
def test_chained_mtp_steps_are_llama_cpps(name: str) -> None:
    check_chained_steps(*mtp_of(name), name)


@pytest.mark.parametrize("width", [1, 2, 5, 9])
def test_refused_rows_leave_no_trace(width: int) -> None:
    """None to all of a verify's rows kept."""
    for kept in range(1, width + 1):
        check_refused_rows("qwen35moe", width, kept, 3)


def test_ragged_slots_do_not_touch_each_other() -> None:
    """Slots meet at experts, and nowhere else."""
    check_ragged_slots(bench_of("qwen35moe", n_slot=8), "qwen35moe")


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
