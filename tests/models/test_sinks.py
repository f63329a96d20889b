"""A target whose layers have attention sinks (blk.N.attn_sinks.weight)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_rig import FIXTURES
from rewrite import rewrite

from pyspec.errors import BadTensors
from pyspec.gguf import open_gguf
from pyspec.logits import compute_logits

LLAMA = FIXTURES / "llama.gguf"  # 4 heads, all layers attend
IDS = [1, 5, 9, 100, 20, 30, 7, 8] * 3


def logits(path: Path) -> torch.Tensor:
    return torch.as_tensor(compute_logits(path, IDS, chunk=10, device="cpu"))


def with_sinks(path: Path, *layers: list[float]) -> Path:
    return rewrite(
        LLAMA, path, add={f"blk.{i}.attn_sinks.weight": np.array(x) for i, x in enumerate(layers)}
    )


def test_a_sink_that_weighs_nothing_changes_nothing(tmp_path: Path) -> None:
    assert (logits(with_sinks(tmp_path / "none.gguf", [-1e4] * 4)) - logits(LLAMA)).abs().max() < 1e-4


def test_layers_that_only_look_at_their_sink_see_no_other_token(tmp_path: Path) -> None:
    """All weight on the sinks leaves a row to itself: the same token, the same logits, wherever it stands."""
    n_layer = sum(name.endswith("attn_q.weight") for name in open_gguf(LLAMA).tensors)
    rows = logits(with_sinks(tmp_path / "all.gguf", *[[1e4] * 4] * n_layer))
    assert (
        (rows[:8] - rows[8:16]).abs().max()
        < 1e-4
        < (logits(LLAMA)[:8] - logits(LLAMA)[8:16]).abs().max()
    )
    rows = logits(with_sinks(tmp_path / "head.gguf", *[[1e4, 1e4, 1e4, 0.0]] * n_layer))
    assert (rows[:8] - rows[8:16]).abs().max() > 1e-3, "one head still looks"


def test_sinks_for_another_number_of_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTensors, match=r"blk\.0\.attn_sinks\.weight: want \[4\], file has \[3\]"):
        logits(with_sinks(tmp_path / "bad.gguf", [0.0] * 3))
