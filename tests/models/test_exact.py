"""What `--exact` changes where a library multiplies, and in the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pyspec.config import EngineSettings
from pyspec.cuda.exact import PASS, in_passes
from pyspec.cuda.kernel_context import KernelContext, use
from pyspec.cuda.ops.rows.ref import Norm
from pyspec.engine.plan import describe as describing
from pyspec.engine.plan import memory_plan, planned_bytes
from pyspec.models.grouped import Grouped
from pyspec.models.matrices import Dense, Joined
from pyspec.synth import write


def test_a_library_always_gets_as_many_rows() -> None:
    seen: list[int] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return x * 2

    for n in (1, PASS - 1, PASS, PASS + 1, 5 * PASS + 3):
        x = torch.randn(n, 8)
        assert torch.equal(in_passes(x, run), x * 2)
    assert set(seen) == {PASS} and len(seen) == 1 + 1 + 1 + 2 + 6
    assert in_passes(torch.empty(0, 8), run).shape == (0, 8)


@pytest.fixture
def _on() -> None:
    use(KernelContext(is_exact=True))


@pytest.mark.usefixtures("_on")
@pytest.mark.parametrize("n", [1, 17, 48, 49, 64, 128])
def test_products_of_a_library_have_the_same_bits_among_any_number(n: int) -> None:
    norm, x = Norm(torch.rand(96) + 0.5, 1e-6), torch.randn(300, 96)
    dense = Dense(torch.randn(40, 96))
    both = Joined([dense, Dense(torch.randn(24, 96), gated=True)])
    groups = Grouped(torch.randn(3, 8, 32))
    for whole, part in ((both(x, norm), both(x[:n], norm)), (groups(x), groups(x[:n]))):
        assert torch.equal(whole[:n], part)
    assert torch.allclose(dense(x, norm), norm(x) @ dense.weight.T, atol=1e-4)


def test_it_is_said_before_a_model_is_bound_and_its_plan_has_no_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(KernelContext(is_exact=True))
    path = write("qwen35", tmp_path / "t.gguf", quant="q8_0", tiny=True)
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 8 << 30)
    monkeypatch.setattr(describing, "pick_device", lambda wanted: torch.device("cuda"))
    plans = [
        planned_bytes.plan_memory(
            describing.describe(path, EngineSettings(ctx=256, spec_type="none", exact=on))
        )
        for on in (False, True)
    ]
    assert plans[0].wide > 0 == plans[1].wide
