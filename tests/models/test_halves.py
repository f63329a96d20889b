"""Matrices in f16 that the library multiplies: rows as precise as in kernels, of any size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pyspec import synth
from pyspec.cuda.kernel_context import KernelContext, use
from pyspec.cuda.ops.rows.ref import Norm
from pyspec.gguf import open_gguf
from pyspec.models import weights
from pyspec.models.matrices import Dense, Halves
from pyspec.models.weights import Weights


@pytest.fixture(autouse=True)
def _sums_in_f32(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library does on a GPU."""

    def mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        assert a.dtype == b.dtype == torch.float16
        return (a.float() @ b.float()).to(out_dtype)

    monkeypatch.setattr(torch, "mm", mm)


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_products_keep_eleven_bits_of_rows_of_any_size(normed: bool, exact: bool) -> None:
    use(KernelContext(is_exact=exact))
    weight, x = drawn(48, 96, seed=0).half(), drawn(7, 96, seed=1) * torch.logspace(-6, 6, 7)[:, None]
    norm = Norm(0.5 + drawn(96, seed=2).abs(), 1e-6) if normed else None
    residual = drawn(7, 48, seed=3)
    want = (x if norm is None else norm(x)).double() @ weight.double().T + residual.double()
    got = Halves(weight)(x, norm, residual)
    off = [
        ((of - want).norm(dim=-1) / want.norm(dim=-1)).amax()
        for of in (got, Dense(weight.bfloat16())(x, norm, residual))
    ]
    assert off[0] < 4e-4 < 2e-3 < off[1]


def test_a_gated_one_has_its_gates_first() -> None:
    weight, x = drawn(64, 32, seed=4).half(), drawn(3, 32, seed=5)
    gate, up = (x @ weight.float().T).chunk(2, -1)
    assert torch.allclose(
        Halves(weight, gated=True)(x), torch.nn.functional.silu(gate) * up, rtol=5e-3, atol=2e-2
    )


@pytest.mark.parametrize(
    ("quant", "kind"), [("f16", Halves), ("q8_0", Halves), ("bf16", Dense), ("f32", Dense)]
)
def test_a_gpu_without_a_kernel_for_it_keeps_as_many_bits_as_it_can(
    quant: str, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "sums_in_f32", lambda device: True)
    with open_gguf(synth.write("llama", tmp_path / "m.gguf", quant=quant, tiny=True)) as file:
        w, name = Weights(file, torch.device("cpu"), None), "blk.0.attn_output.weight"
        made = w._exact([name], gated=False)
        dtype = {"bf16": torch.bfloat16, "f32": torch.float32}.get(quant, torch.float16)
        assert type(made) is kind and made.weight.dtype is dtype
        monkeypatch.setattr(weights, "sums_in_f32", lambda device: False)
        assert type(w._exact([name], gated=False)) is Dense
        monkeypatch.setattr(weights, "sums_in_f32", lambda device: True)
        monkeypatch.setattr(Weights, "_scale", lambda self, name: 1e9)  # as NVFP4's second level may be
        assert type(w._exact([name], gated=False)) is Dense
