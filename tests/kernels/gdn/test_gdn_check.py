"""gdn's self-check on launches that are right, rounded or wrong. Needs no GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyspec.cuda.ops.gdn import ref as gdn_ref
from pyspec.cuda.ops.gdn.shape import GdnShape

SPEC = gdn_ref.GdnSpec(torch.device("cpu"), GdnShape(2, 6, 32, 4, 10 * 32), 1e-6)


def checked(change: Callable[[Tensor, int], Tensor]) -> str | None:
    """The check's answer on the reference with `change(outputs, rows of the longest sequence)`."""
    reference = gdn_ref.bind(SPEC)

    def launch(*args: object) -> Tensor:
        return change(reference(*args), max(s.width for s in args[-1].seqs))  # type: ignore[arg-type,attr-defined]

    return gdn_ref.check(launch, reference, SPEC)


def noise(size: float, *, prompts: bool) -> Callable[[Tensor, int], Tensor]:
    """Errors of `size` of a row's length, as sums of rounded products have them."""

    def change(out: Tensor, width: int) -> Tensor:
        if (width > 6) != prompts:
            return out
        return out + size * torch.randn(out.shape) * out.square().mean(-1, keepdim=True).sqrt()

    return change


def test_a_prompt_may_be_rounded_to_f16_in_its_outputs_but_a_verify_may_not() -> None:
    assert checked(lambda out, width: out) is None
    assert checked(noise(4e-4, prompts=True)) is None
    assert "outputs differ" in (checked(noise(3e-3, prompts=True)) or "")
    assert "outputs differ" in (checked(noise(3e-2, prompts=False)) or "")


@pytest.mark.parametrize("bad", [float("nan"), 1e4])
@pytest.mark.parametrize("prompts", [True, False])
def test_one_wild_output_is_enough(bad: float, prompts: bool) -> None:
    def change(out: Tensor, width: int) -> Tensor:
        if (width > 6) == prompts:
            out[-1, -1, -1] = bad
        return out

    assert "outputs differ" in (checked(change) or "")
