"""A file that becomes shorter during a read is an error with a message. (Through a mapping it was SIGBUS, without one.)"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from pyspec.errors import BadGGUF, ModelError
from pyspec.gguf import GGMLType, ValueType, open_gguf
from pyspec.gguf.cursor import STEP
from pyspec.gguf.source import OpenFile
from pyspec.gguf.write import GGUFWriter
from pyspec.models.weights import Weights


def written(path: Path, n: int = 1 << 16) -> Path:
    writer = GGUFWriter(path, "llama")
    for name in ("a", "b"):
        writer.add_tensor_info(name, GGMLType.F32, (4, n // 4))
    writer.write(lambda info: [np.full(4 * n, ord(info.name), np.uint8)])
    return path


def test_weights_of_a_file_that_was_cut_short_after_it_was_opened_say_so(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf")
    with open_gguf(path) as file:
        size, weights = file.n_bytes, Weights(file, torch.device("cpu"), torch.float32)
        os.truncate(path, size - 100_000)
        assert weights.vector("a").numel() == 1 << 16  # all of it is still there
        with pytest.raises(
            BadGGUF,
            match=f"was cut short while it was read: it had {size} bytes, now it ends at {size - 100_000}",
        ):
            weights.matrix("b")
        os.truncate(path, 0)
        with pytest.raises(BadGGUF, match="now it ends at 0"):
            file.raw("a")


def test_a_header_that_is_cut_short_while_it_is_parsed_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "v.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add("tokenizer.ggml.tokens", [f"{i:0200}" for i in range(STEP // 150)], ValueType.STRING)
    writer.write(lambda info: [])
    read = OpenFile.read

    def cut_after_the_first(self: OpenFile, at: int, n: int) -> bytes:
        found = read(self, at, n)
        os.truncate(path, at + n)
        return found

    monkeypatch.setattr(OpenFile, "read", cut_after_the_first)
    with pytest.raises(BadGGUF, match=f"was cut short while it was read: .* now it ends at {STEP}"):
        open_gguf(path)


def test_a_file_that_is_replaced_under_its_name_goes_on_from_the_old_one(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf")
    with open_gguf(path) as file:
        os.replace(written(tmp_path / "other.gguf", 64), path)
        assert set(file.raw("b").tolist()) == {ord("b")}


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelError, match="cannot open"):
        open_gguf(tmp_path / "pipe.gguf")
