"""The kernels of `embed` and `angles` compile for every architecture, without a GPU and without spills."""

import pytest
import torch
from machines import compiled

from pyspec.cuda.jit import ARCHS
from pyspec.cuda.ops.angles import cuda as angles_cuda
from pyspec.cuda.ops.angles.ref import AnglesSpec
from pyspec.cuda.ops.embed import cuda as embed_cuda
from pyspec.cuda.ops.embed.ref import EmbedSpec
from pyspec.gguf import GGMLType

pytest.importorskip("cuda.core")

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", ARCHS)
def test_embeddings_compile_for_every_architecture(arch: str) -> None:
    for type in embed_cuda.TYPES:
        found = compiled("embed", arch, embed_cuda.defines(type))["embed"]
        assert found.registers <= 64, (type, found)
    compiled("angles", arch)


def test_what_they_can_not_do_is_refused() -> None:
    assert angles_cuda.limits(AnglesSpec(CPU)) == "runs on NVIDIA GPUs only"
    assert embed_cuda.limits(EmbedSpec(CPU, GGMLType.Q8_0, 64)) == "runs on NVIDIA GPUs only"
    assert angles_cuda.limits(AnglesSpec(GPU)) is None
    for type in embed_cuda.TYPES:
        assert embed_cuda.limits(EmbedSpec(GPU, type, 512)) is None
    assert "IQ4_XS" in (embed_cuda.limits(EmbedSpec(GPU, GGMLType.IQ4_XS, 512)) or "")
    assert "6 columns" in (embed_cuda.limits(EmbedSpec(GPU, GGMLType.F16, 6)) or "")
