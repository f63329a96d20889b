"""Files that announce an MTP block and do not have it: the trunk is whole, whether or not the block is counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pyspec import synth
from pyspec.gguf import ValueType, open_gguf
from pyspec.models import read_config
from pyspec.models.checks import check_tensors
from pyspec.synth import layout
from pyspec.synth.dims import TINY, Dims
from pyspec.synth.layout import Key, Parts

HYBRIDS = ("qwen35", "qwen35moe", "nemotron_h_moe", "deepseek4")


@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize("arch", HYBRIDS)
def test_the_trunk_is_whole(
    arch: str, is_counted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says, holds = layout.metadata, layout.tensors

    def announced(dims: Dims, parts: Parts) -> Iterator[Key]:
        yield from says(dims, Parts(mtp=is_counted))
        if not is_counted:
            yield f"{arch}.nextn_predict_layers", 1, ValueType.UINT32

    specs = list(holds(TINY[arch], Parts()))
    monkeypatch.setattr(layout, "metadata", announced)
    monkeypatch.setattr(layout, "tensors", lambda dims, parts: iter(specs))
    file = open_gguf(synth.write(arch, tmp_path / "m.gguf", quant="f32", tiny=True))
    config = read_config(file)
    check_tensors(file, config.tensors(file))
    assert config.n_layer == TINY[arch].n_layer
