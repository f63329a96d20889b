"""Short-lived tensors of a load leave no holes between the lasting ones."""

import pytest
import torch

from pyspec.cuda.temporary import release, temporary

MB = 1 << 20


def test_without_a_gpu_it_is_nothing() -> None:
    with temporary(torch.device("cpu")):
        x = torch.ones(3)
    release(torch.device("cpu"))
    assert x.sum() == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_stays_is_all_that_is_kept() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    before, stays = torch.cuda.memory_reserved(device), []
    for mb in (300, 200, 40, 500, 1):
        stays.append(
            torch.full((3 * MB,), mb % 100, dtype=torch.uint8, device=device)
        )  # cut out of free pieces
        with temporary(device):
            half = torch.ones(mb * MB, dtype=torch.uint8, device=device)
            both = torch.cat((half, half))
        del half, both
    torch.cuda.synchronize(device)
    assert torch.cuda.memory_reserved(device) - before > 1000 * MB
    release(device)
    assert torch.cuda.memory_reserved(device) - before <= 20 * MB  # a piece holds several of 3 MB
    assert [int(s[-1]) for s in stays] == [0, 0, 40, 0, 1]
