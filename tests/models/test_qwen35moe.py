"""`qwen35moe`: files of all kinds of writers (logits: test_logits_of_experts.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import FIXTURES

from pyspec.errors import BadTensors, ModelError
from pyspec.gguf import ValueType, open_gguf
from pyspec.gguf.write import GGUFWriter
from pyspec.models import read_config
from pyspec.models.blocks.moe import Experts
from pyspec.models.checks import check_tensors


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
    same = {"expert_used_count": [3] * 5, "expert_feed_forward_length": [32] * 5, "feed_forward_length": None}  # fmt: skip
    with open_gguf(rewritten(tmp_path / "arrays.gguf", same)) as file:
        config = read_config(file)
        moe = config.blocks[0].parts[1].spec
        assert isinstance(moe, Experts) and (moe.n_expert, moe.n_used, moe.n_ff, moe.n_ff_shared) == (8, 3, 32, 48)  # fmt: skip
    says = r"expert_used_count has blocks of different sizes: \[2, 3\]"
    mixed = {"expert_used_count": [3, 3, 2, 3, 3]}
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
