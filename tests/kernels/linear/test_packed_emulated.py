"""Packed types on the emulated machine: padding, second scales, and the f16 weights of linear_wgmma."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler
from emulated.ways import WAYS, machine_of
from machines import off
from sampling import few
from torch import Tensor

from pyspec.cuda.ops.linear import cuda as linear_cuda
from pyspec.cuda.ops.linear import ref as linear_ref
from pyspec.cuda.ops.linear import wgmma as linear_wgmma
from pyspec.cuda.ops.linear.cuda import (
    SHAPES,
    LinearLaunch,
    random_matrix,
    random_packed,
    random_weights,
    step,
)
from pyspec.cuda.ops.linear.formats import CHUNKS, FORMATS, MXFP4_LARGEST
from pyspec.cuda.ops.linear.op import linear, linear_tall
from pyspec.cuda.ops.linear.pack import Packed, repack, unpack
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.cuda.ops.linear.wgmma import WgmmaLaunch
from pyspec.gguf import GGMLType, GGUFFile
from pyspec.models.weights import Weights

pytestmark = [needs_compiler, pytest.mark.sampled(1)]
EXACT_IN_F16 = (GGMLType.MXFP4, GGMLType.NVFP4, GGMLType.F16, GGMLType.BF16)
SCALED = tuple(t for t in CHUNKS if FORMATS[t].scaled)
TYPES = few(CHUNKS, *(GGMLType[name] for name in ("Q8_0", "Q4_0", "Q4_K", "Q6_K", "MXFP4", "NVFP4")))


@pytest.fixture(autouse=True)
def _only_64_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of linear_wgmma's builds: the others take the same weights."""
    monkeypatch.setattr(linear_wgmma, "PADS", (64,))


def matrix(spec: LinearSpec) -> Packed:
    return random_matrix(
        spec.type, spec.n_weight_row, spec.n_in, torch.Generator().manual_seed(spec.n_in), CPU
    )


def product(spec: LinearSpec, packed: Packed, x: Tensor, residual: Tensor | None = None) -> Tensor:
    launch = LinearLaunch(spec, (step(CPU, spec.type, spec.epilogue, SHAPES[0]),))
    launch.rows = linear_cuda.RowsLaunch(CPU, spec.n_in, (8,))
    out = torch.full((x.shape[0], spec.n_out), torch.nan)
    launch(x, packed, out, residual)
    return out


def wide_product(spec: LinearSpec, packed: Packed, x: Tensor, residual: Tensor | None = None) -> Tensor:
    out = torch.full((x.shape[0], spec.n_out), torch.nan)
    WgmmaLaunch(spec)(x, packed, out, residual)
    return out


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("type", TYPES)
def test_codes_in_the_padding_are_never_used(type: GGMLType, way: str) -> None:
    """Random bytes in all of the records: 264 rows fill half of a record, 3 blocks of columns no chunk."""
    n_in = max(3 * 32, 3 * type.block_size)
    spec, x = LinearSpec(CPU, type, 264, n_in), torch.randn(3, n_in)
    packed = random_packed(type, 264, n_in, CPU)
    with machine_of(way):
        assert off(product(spec, packed, x), linear_ref.rounded(x) @ unpack(packed).double().T) < 3e-6


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("epilogue", Epilogue)
@pytest.mark.parametrize("type", SCALED)
def test_second_scales_come_before_what_the_epilogue_does(
    type: GGMLType, epilogue: Epilogue, way: str
) -> None:
    spec, x = LinearSpec(CPU, type, 136, 256, epilogue), torch.randn(5, 256) / 16
    packed, want = matrix(spec), torch.empty(5, 136)
    residual = torch.randn(5, 136) if epilogue is Epilogue.RESIDUAL else None
    linear_ref.bind(spec)(linear_ref.rounded(x).float(), packed, want, residual)
    with machine_of(way):
        assert off(product(spec, packed, x, residual), want) < 3e-6


@pytest.mark.parametrize(
    "kind", [GGMLType.Q8_0, GGMLType.F16, GGMLType.BF16, GGMLType.F32, GGMLType.IQ1_S]
)
@pytest.mark.parametrize("has_tall", [True, False])
def test_half_floats_stream_where_many_rows_of_them_do(
    kind: GGMLType, has_tall: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    infos = {"a.weight": SimpleNamespace(type=kind, shape=(64, 256), n_bytes=0)}
    found = Weights(cast(GGUFFile, SimpleNamespace(tensors=infos)), CPU, None)
    for op, runs in ((linear, True), (linear_tall, has_tall)):
        monkeypatch.setattr(op, "impls", [replace(op.impls[0], limits=lambda spec: None)])  # as on a GPU
        monkeypatch.setattr(
            op, "_choose", lambda spec, op=op, runs=runs: op.impls[0] if runs else op.reference
        )
        monkeypatch.setattr(op, "_decided", {})
    kinds = (GGMLType.Q8_0, GGMLType.F16, GGMLType.BF16) if has_tall else (GGMLType.Q8_0,)
    assert found._streams("a.weight") == (kind in kinds)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("gated", [True, False])
def test_each_tensor_of_a_matrix_keeps_its_own_second_scale(
    gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tensors of a file as one matrix, side by side or as gates and ups in turn."""
    gen, kind = torch.Generator().manual_seed(0), GGMLType.NVFP4
    raws = {f"{n}.weight": random_weights(kind, 24, 128, gen).numpy() for n in ("gate", "up")}
    scales = {"gate.scale": np.float32(0.25), "up.scale": np.float32(3.0)}
    bytes_of = raws | {name: np.array([value]).view(np.uint8) for name, value in scales.items()}
    infos = {
        n: SimpleNamespace(type=kind, shape=(24, 128), n_bytes=raw.nbytes) for n, raw in raws.items()
    }
    infos |= {name: SimpleNamespace(type=GGMLType.F32, shape=(1,), n_bytes=4) for name in scales}

    def read_into(name: str, out: np.ndarray, start: int = 0) -> None:
        out[:] = bytes_of[name].reshape(-1)[start : start + len(out)]

    file = SimpleNamespace(
        tensors=infos, raw=bytes_of.__getitem__, read_into=read_into, read_ahead=lambda _: None
    )
    weights = Weights(cast(GGUFFile, file), CPU, None)
    x = torch.randn(3, 128, generator=gen)
    want = weights._load(list(raws), gated)(x)  # on a CPU: unpacked
    monkeypatch.setattr(linear_cuda, "SHAPES", SHAPES[:1])
    with emulated_gpu():
        assert off(weights._stream(list(raws), gated)(x), want) < 1e-3


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("type", TYPES)
def test_weights_are_rounded_to_f16_at_most(type: GGMLType) -> None:
    """Floats of four bits, f16 and bf16 are not rounded at all. Three clusters cut both tiles."""
    spec, x = LinearSpec(CPU, type, 264, 512), torch.randn(50, 512)
    packed = matrix(spec)
    with emulated_gpu(n_multiprocessor=6):
        got = wide_product(spec, packed, x)
    assert off(got, linear_ref.rounded(x) @ unpack(packed).double().T) < (
        3e-6 if type in EXACT_IN_F16 else 1e-3
    )


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("epilogue", [Epilogue.RESIDUAL, Epilogue.GATED])
@pytest.mark.parametrize("type", SCALED)
def test_second_scales_of_many_rows(type: GGMLType, epilogue: Epilogue) -> None:
    spec, x = LinearSpec(CPU, type, 136, 256, epilogue), torch.randn(64, 256) / 16
    packed, want = matrix(spec), torch.empty(64, 136)
    residual = torch.randn(64, 136) if epilogue is Epilogue.RESIDUAL else None
    linear_ref.bind(spec)(linear_ref.rounded(x).float(), packed, want, residual)
    with emulated_gpu(n_multiprocessor=2):
        assert off(wide_product(spec, packed, x, residual), want) < 3e-6


@pytest.mark.parametrize("code", [110, MXFP4_LARGEST])
def test_the_smallest_and_the_largest_scale_that_f16_weights_hold(code: int) -> None:
    """2^-17 and 2^7, with every code."""
    raw = torch.full((16, 8, 17), code, dtype=torch.uint8)
    raw[..., 1:] = torch.randint(0, 256, (16, 8, 16), dtype=torch.uint8)
    packed, spec = repack(raw, GGMLType.MXFP4, (16, 256)), LinearSpec(CPU, GGMLType.MXFP4, 16, 256)
    x = torch.randn(33, 256)
    with emulated_gpu(n_multiprocessor=2):
        assert (
            off(wide_product(spec, packed, x), linear_ref.rounded(x) @ unpack(packed).double().T) < 3e-6
        )
