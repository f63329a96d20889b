"""The kernels of `ahead` compile for every architecture, without a GPU and without spills."""

import pytest
from machines import compiled

from pyspec.cuda.jit import ARCHS


@pytest.mark.parametrize("arch", ARCHS)
def test_accept_and_move_compile_for_every_architecture(arch: str) -> None:
    found = compiled("ahead", arch)
    assert set(found) == {"ahead_accept", "ahead_move"} and not any(
        r.spill_bytes for r in found.values()
    )
