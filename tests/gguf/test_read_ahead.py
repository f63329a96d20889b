"""Weights that are read before a load asks for them are the file's bytes, are given once, and count as free memory until then."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from waiting import wait_for

from pyspec.config import EngineSettings
from pyspec.cpu.kernels import n_thread, torch_alone
from pyspec.engine.process.engine_main import begun
from pyspec.errors import BadGGUF
from pyspec.gguf import GGMLType, open_gguf
from pyspec.gguf.read_ahead import LEAST, held_bytes
from pyspec.gguf.write import GGUFWriter
from pyspec.models.weights import Weights

N = 2 * LEAST


def written(path: Path) -> Path:
    writer = GGUFWriter(path, "llama")
    for name in ("a", "b"):
        writer.add_tensor_info(name, GGMLType.F32, (4, N // 16))
    writer.add_tensor_info("small", GGMLType.F32, (4, 4))
    writer.write(lambda info: [np.full(64 if info.name == "small" else N, ord(info.name[0]), np.uint8)])
    return path


def test_each_tensor_is_given_once_and_the_rest_is_freed(tmp_path: Path) -> None:
    with open_gguf(written(tmp_path / "m.gguf")) as file:
        file.begin_ahead()
        wait_for(lambda: held_bytes() == 2 * N, 30)
        pages = file.read_ahead("b")
        assert pages is not None and bytes(pages) == b"b" * N and held_bytes() == N
        assert file.read_ahead("b") is None and file.read_ahead("small") is None
        file.end_ahead()
        assert held_bytes() == 0 and file.read_ahead("a") is None


def test_weights_are_the_same_with_and_without(tmp_path: Path) -> None:
    with open_gguf(written(tmp_path / "m.gguf")) as file:
        plain = Weights(file, torch.device("cpu"), None)
        before = [plain.packed(name)[0] for name in ("a", "b", "small")]
        file.begin_ahead()
        ahead = Weights(file, torch.device("cpu"), None)
        for name, same in zip(("a", "b", "small"), before, strict=True):
            assert torch.equal(ahead.packed(name)[0], same)


def test_the_load_reports_what_could_not_be_read_ahead(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf")
    with open_gguf(path) as file:
        os.truncate(path, file.tensors["b"].offset + 10)
        file.begin_ahead()
        with pytest.raises(BadGGUF, match="was cut short"):
            Weights(file, torch.device("cpu"), None).packed("b")


def test_nothing_is_read_ahead_for_gpus_ranks_or_unpacked_weights(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf")
    assert begun(path, EngineSettings(device="auto"), is_cpu=False) is None
    assert begun(path, EngineSettings(device="cpu", tp=2), is_cpu=True) is None
    assert begun(path, EngineSettings(device="cpu", weights="dense"), is_cpu=True) is None
    file = begun(path, EngineSettings(device="cpu"), is_cpu=False)
    assert file is not None
    wait_for(lambda: held_bytes() == 2 * N, 30)
    file.close()
    assert held_bytes() == 0


def test_kernels_keep_their_threads_while_torch_runs_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with torch_alone(), torch_alone():
            assert (torch.get_num_threads(), n_thread()) == (1, 3)
        assert (torch.get_num_threads(), n_thread()) == (3, 3)
    finally:
        torch.set_num_threads(before)
