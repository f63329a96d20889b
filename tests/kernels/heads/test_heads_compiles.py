"""heads.cu for every architecture, and embed.cu, which shares its types. Needs a compiler, no GPU."""

from __future__ import annotations

import pytest
import torch
from heads_cases import SIZES, spec_of
from machines import compiled

from pyspec.cuda import jit
from pyspec.cuda.ops.embed import cuda as embed_cuda
from pyspec.cuda.ops.heads import cuda as heads_cuda
from pyspec.cuda.ops.heads.op import shapes

pytest.importorskip("cuda.core")

SPECS = [*shapes(torch.device("cuda")), *map(spec_of, SIZES)]


@pytest.mark.slow
@pytest.mark.parametrize("arch", jit.ARCHS)
def test_every_type_compiles_without_spills(arch: str) -> None:
    for spec in SPECS:
        made = compiled("heads", arch, heads_cuda.defines(spec))
        assert set(made) == {"heads_1", "heads_2", "heads_4"}
        assert all(r.registers <= 128 for r in made.values()), (spec, made)


@pytest.mark.slow
@pytest.mark.parametrize("type", embed_cuda.TYPES)
def test_embeddings_of_every_type_still_compile(type: object) -> None:
    compiled("embed", "sm_90a", embed_cuda.defines(type))  # type: ignore[arg-type]
