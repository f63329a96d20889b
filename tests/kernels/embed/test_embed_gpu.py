"""`embed` and `angles` on a GPU: torch's bits, tables of more bytes than 32 bits count, as replayed by graphs."""

import pytest
import torch

from pyspec.cuda import faults
from pyspec.cuda.ops.angles import cuda as angles_cuda
from pyspec.cuda.ops.angles.ref import AnglesSpec
from pyspec.cuda.ops.angles.ref import angles as torch_angles
from pyspec.cuda.ops.embed import cuda as embed_cuda
from pyspec.cuda.ops.embed.ref import EmbedSpec, TorchEmbed
from pyspec.gguf import GGMLType

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("type", embed_cuda.TYPES)
@pytest.mark.parametrize("n_in", [256, 2048, 5120])
def test_embeddings_are_the_references(type: GGMLType, n_in: int) -> None:
    spec = EmbedSpec(CUDA, type, n_in)
    assert embed_cuda.limits(spec) is None
    assert embed_cuda.check(embed_cuda.bind(spec), TorchEmbed(spec), spec) is None


@pytest.mark.parametrize("factor", [1.0, 4.0, 2.5])
@pytest.mark.parametrize("n", [1, 32, 64])
def test_angles_have_torch_s_bits(n: int, factor: float) -> None:
    """Stored texts hang on them."""
    spec, gen = AnglesSpec(CUDA), torch.Generator().manual_seed(n)
    assert angles_cuda.check(angles_cuda.bind(spec), torch_angles, spec) is None
    positions, freq = angles_cuda.hostile(5000, gen).to(CUDA), angles_cuda.frequencies(n, CUDA)
    for got, want in zip(
        angles_cuda.bind(spec)(positions, freq, factor),
        torch_angles(positions, freq, factor),
        strict=True,
    ):
        assert torch.equal(got, want)


def test_a_table_of_many_bytes_is_read_at_its_end() -> None:
    spec, n_token = EmbedSpec(CUDA, GGMLType.Q8_0, 8192), 300_000
    raw = torch.zeros(n_token, 8704, dtype=torch.uint8, device=CUDA)  # 2.6e9 bytes
    raw[-1] = embed_cuda.any_bytes(spec.type, 8192, 1, torch.Generator().manual_seed(1))[0].to(CUDA)
    tokens = torch.tensor([n_token - 1, 0], device=CUDA)
    got, want = (e.rows(raw, tokens) for e in (embed_cuda.bind(spec), TorchEmbed(spec)))
    assert torch.equal(embed_cuda.bits(got), embed_cuda.bits(want)) and bool(got[0].any())


def test_graphs_replay_it_on_new_tokens() -> None:
    spec, gen = EmbedSpec(CUDA, GGMLType.Q4_K, 5120), torch.Generator().manual_seed(2)
    raw, own = embed_cuda.any_bytes(spec.type, 5120, 500, gen).to(CUDA), embed_cuda.bind(spec)
    tokens, positions = (torch.zeros(6, dtype=torch.int64, device=CUDA) for _ in range(2))
    freq = angles_cuda.frequencies(32, CUDA)
    own.rows_and_angles(raw, tokens, positions, freq, 1.0)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        x, (cos, sin) = own.rows_and_angles(raw, tokens, positions, freq, 1.0)
    for _ in range(20):
        tokens.copy_(torch.randint(0, 500, (6,), generator=gen))
        positions.copy_(torch.randint(0, 1 << 17, (6,), generator=gen))
        graph.replay()
        want, (cos_want, sin_want) = TorchEmbed(spec).rows_and_angles(raw, tokens, positions, freq, 1.0)
        assert torch.equal(embed_cuda.bits(x), embed_cuda.bits(want))
        assert torch.equal(cos, cos_want) and torch.equal(sin, sin_want)


def test_a_token_that_does_not_exist_is_reported() -> None:
    spec = EmbedSpec(CUDA, GGMLType.F16, 64)
    raw = torch.ones(9, 128, dtype=torch.uint8, device=CUDA)
    embed_cuda.bind(spec).rows(raw, torch.tensor([3, 9, 8], device=CUDA))
    fault = faults.read(CUDA)
    assert fault is not None and (fault.op, fault.place, fault.index, fault.limit) == ("embed", 1, 9, 9)
    assert faults.read(CUDA) is None
