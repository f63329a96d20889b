"""`norms` on a GPU against torch: all widths, as replayed by graphs, and behind other launches."""

import pytest
import torch

from pyspec.cuda.ops.norms import cuda as norms_cuda
from pyspec.cuda.ops.norms.ref import NormsSpec, TorchNorms

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("n", [64, 2048, 2688, 4096, 5120, 16384])
def test_norms_are_the_references(n: int, layer: bool) -> None:
    spec = NormsSpec(CUDA, n, 1e-6, layer)
    assert norms_cuda.limits(spec) is None
    assert norms_cuda.check(norms_cuda.bind(spec), TorchNorms(spec), spec) is None


def test_a_row_has_the_same_bits_among_any_number_of_others() -> None:
    own = norms_cuda.bind(NormsSpec(CUDA, 5120, 1e-6))
    x, weight = torch.randn(2048, 5120, device=CUDA), torch.rand(5120, device=CUDA)
    every, some = own.picked(x, weight, torch.tensor([2047, 0, 777], device=CUDA))
    assert torch.equal(some, every[[2047, 0, 777]])
    for row in (0, 1, 777, 2047):
        assert torch.equal(own(x[row : row + 1], weight)[0], every[row])


def test_graphs_replay_it_on_new_rows_and_launches_behind_each_other_wait() -> None:
    """A chain of launches that start early, each on the output of the one before."""
    own, gen = norms_cuda.bind(NormsSpec(CUDA, 5120, 1e-6)), torch.Generator().manual_seed(3)
    x, rows = torch.zeros(5, 5120, device=CUDA), torch.zeros(2, dtype=torch.int64, device=CUDA)
    weight = (0.5 + torch.rand(5120, generator=gen)).to(CUDA)
    graph = torch.cuda.CUDAGraph()

    def chain(launch: norms_cuda.NormsLaunch | TorchNorms) -> tuple[torch.Tensor, torch.Tensor]:
        y = x
        for _ in range(20):
            y = launch.paired(y, weight, x, weight)[:, :5120].contiguous()
            y = launch(launch(y, weight), weight)
        return launch.picked(y, weight, rows)

    chain(own)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        every, some = chain(own)
    for _ in range(10):
        x.copy_(torch.randn(5, 5120, generator=gen))
        rows.copy_(torch.randint(0, 5, (2,), generator=gen))
        graph.replay()
        want, picked = chain(TorchNorms(NormsSpec(CUDA, 5120, 1e-6)))
        assert torch.allclose(every, want, rtol=1e-4, atol=1e-4) and torch.equal(some, every[rows])
        assert torch.allclose(some, picked, rtol=1e-4, atol=1e-4)
