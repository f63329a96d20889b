"""`heads` in Triton against the reference, in the interpreter."""

from __future__ import annotations

import pytest
import torch
import triton_interpreter  # noqa: F401
from heads_cases import SIZES, spec_of
from sampling import few

from pyspec.cuda.ops.heads import ref as heads_ref
from pyspec.cuda.ops.heads import triton as heads_triton
from pyspec.gguf import GGMLType

PLAIN = [name for name, of in SIZES.items() if of[0] in heads_triton.DTYPES]


@pytest.mark.parametrize("name", few(PLAIN, "tiny keys", "outputs of no whole tile", "one head"))
def test_products_are_the_references(name: str) -> None:
    spec = spec_of(name)
    assert heads_ref.check(heads_triton.bind(spec), heads_ref.bind(spec), spec) is None


def test_what_it_does_not_take_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert heads_triton.limits(spec_of("tiny keys")) is None
    assert "Q8_0" in (heads_triton.limits(spec_of("DeepSeek-V3's keys")) or "")
    run = heads_triton.bind(heads_ref.HeadsSpec(torch.device("cpu"), GGMLType.F16, 3, 16, 32))
    data = torch.zeros(3, 16, 32, dtype=torch.float16)
    assert run(data)(torch.zeros(0, 3, 32)).shape == (0, 3, 16)
