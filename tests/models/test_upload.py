"""A file's bytes arrive whole, whatever the size of the pieces they are read in."""

import numpy as np
import pytest
import torch

from pyspec.models.upload import Upload


@pytest.mark.parametrize("n", [1, 7, 4096, 4097, 50_000])
def test_pieces_are_put_together_in_order(n: int) -> None:
    upload = Upload(torch.device("cpu"), piece=4096)
    for seed in range(3):  # buffers are used again
        raw = np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)

        def read(to: np.ndarray, first: int, raw: np.ndarray = raw) -> None:
            to[:] = raw[first : first + to.size]

        out = torch.zeros(n, dtype=torch.uint8)
        upload.pieces(read, out)
        assert np.array_equal(out.numpy(), raw) and torch.equal(upload(n, read), out)
