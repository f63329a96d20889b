"""`best` on a GPU against torch.argmax: hostile rows, all sizes, as replayed by graphs, and after other launches."""

import pytest
import torch

from pyspec.cuda.ops.best import cuda as best_cuda
from pyspec.cuda.ops.best.op import best
from pyspec.cuda.ops.best.ref import BestSpec, TorchBest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda", 0)
SPEC = BestSpec(CUDA)


def test_best_tokens_are_the_references() -> None:
    assert best_cuda.limits(SPEC) is None
    assert best_cuda.check(best_cuda.bind(SPEC), best.reference.bind(SPEC), SPEC) is None


@pytest.mark.parametrize("n_row", [1, 2, 8, 33, 128, 300, 1500])
@pytest.mark.parametrize("n_vocab", [1, 7, 2049, 32_000, 50_257])
def test_hostile_rows_of_all_sizes(n_row: int, n_vocab: int) -> None:
    sizes = ((n_row, n_vocab),)
    assert best_cuda.check(best_cuda.bind(SPEC), TorchBest(), SPEC, sizes) is None


def test_what_is_found_is_what_a_cpu_finds() -> None:
    logits = best_cuda.hostile(24, 151_936, torch.Generator().manual_seed(1))
    assert torch.equal(best_cuda.bind(SPEC).tokens(logits.to(CUDA)).cpu(), TorchBest().tokens(logits))


def test_graphs_replay_it_on_new_logits_and_tickets_are_back_at_zero() -> None:
    own, logits = best_cuda.bind(SPEC), torch.randn(5, 248_320, device=CUDA)
    place = torch.zeros(8, dtype=torch.int64, device=CUDA)
    own.pairs(logits)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        pairs = own.pairs(logits)
        own.tokens(logits, place[:5])
    for seed in range(50):
        new = torch.randint(0, 3, logits.shape, generator=torch.Generator().manual_seed(seed)).float()
        new[:, : 4000 * seed] = 0.0
        logits.copy_(new)
        graph.replay()
        want = TorchBest().pairs(new)
        assert torch.equal(pairs.cpu(), want)
        assert (
            torch.equal(place[:5].cpu(), want[0].long())
            and not place[5:].any()
            and not own.tickets.any()
        )


def test_launches_behind_each_other_do_not_mix() -> None:
    """Rows of other numbers and sizes, nothing waited for in between."""
    gen = torch.Generator().manual_seed(4)
    own, sizes = best_cuda.bind(SPEC), [(1, 248_320), (8, 32_003), (3, 151_936), (100, 4097), (1, 5)]
    all_logits = [torch.randn(n_row, n_vocab, generator=gen).to(CUDA) for n_row, n_vocab in sizes]
    found = [(i, own.tokens(logits)) for _ in range(40) for i, logits in enumerate(all_logits)]
    want = [logits.argmax(-1) for logits in all_logits]
    assert all(torch.equal(tokens, want[i]) for i, tokens in found)
