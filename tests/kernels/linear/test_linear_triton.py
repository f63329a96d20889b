"""`linear` in Triton: tiles hold the file's weights to the bit, and products are the reference's, in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton_interpreter  # noqa: F401
from sampling import few

from pyspec.cuda import verdicts
from pyspec.cuda.ops.linear import cuda as linear_cuda
from pyspec.cuda.ops.linear import ref as linear_ref
from pyspec.cuda.ops.linear import triton as linear_triton
from pyspec.cuda.ops.linear.cuda import random_rows
from pyspec.cuda.ops.linear.op import linear
from pyspec.cuda.ops.linear.ref import PROBE_ROWS, Epilogue, LinearSpec
from pyspec.gguf import GGMLType

CPU = torch.device("cpu")
TYPES = [t for t in linear_triton.FORMATS if t in linear_cuda.CHUNKS]
KEPT = (GGMLType.Q8_0, GGMLType.Q4_K)


def columns(type: GGMLType) -> int:
    """No whole number of chunks, where the type allows it."""
    return 768 if type.block_size == 256 else 320 if type is GGMLType.NVFP4 else 288


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # an interpreted exp of large numbers
@pytest.mark.parametrize("epilogue", [Epilogue.PLAIN, *few([Epilogue.RESIDUAL, Epilogue.GATED])])
@pytest.mark.parametrize("type", few(TYPES, *KEPT), ids=lambda t: t.name)
def test_products_are_the_references(
    type: GGMLType, epilogue: Epilogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_triton, "LEAST", 1)  # so that the columns are split
    spec = LinearSpec(
        CPU,
        type,
        72,
        columns(type),
        epilogue,
        20.0 if epilogue is Epilogue.GATED and type is GGMLType.Q8_0 else 0.0,
    )
    run = linear_triton.bind(spec)
    assert run.n_split > 1
    assert linear_cuda.check(run, linear_ref.bind(spec), spec, n_rows=(1, 17, 67)) is None


@pytest.mark.parametrize("type", few(TYPES, *KEPT), ids=lambda t: t.name)
def test_a_row_has_the_same_bits_alone_and_in_any_company(type: GGMLType) -> None:
    spec, gen = LinearSpec(CPU, type, 64, columns(type)), torch.Generator().manual_seed(1)
    run = linear_triton.bind(spec)
    matrix = run.pack(*_given(spec, gen))
    x = torch.randn(70, spec.n_in, generator=gen)
    whole = torch.empty(70, 64)
    run(x, matrix, whole)
    for first, n in ((0, 1), (3, 5), (50, 17)):
        part = torch.empty(n, 64)
        run(x[first : first + n], matrix, part)
        assert torch.equal(part, whole[first : first + n])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("epilogue", [Epilogue.RESIDUAL, *few([Epilogue.GATED])])
def test_rows_by_so_many_at_a_time_are_all_of_them_to_the_bit(
    epilogue: Epilogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where partial sums of all would take more memory than a plan has for them."""
    monkeypatch.setattr(linear_triton, "LEAST", 1)
    spec, gen = LinearSpec(CPU, GGMLType.Q8_0, 64, 128, epilogue), torch.Generator().manual_seed(1)
    run = linear_triton.bind(spec)
    matrix = run.pack(*_given(spec, gen))
    x, powers = torch.randn(70, 128, generator=gen).half(), torch.rand(70, generator=gen)
    added = torch.rand(70, 64)
    residual = added if epilogue is Epilogue.RESIDUAL else None
    whole, parts, sizes = torch.empty(70, 64), torch.empty(70, 64), []
    run.multiply(x, powers, matrix, whole, residual)
    assert run.at_once > 70
    monkeypatch.setattr(linear_triton, "MOST_SUMS", 1)
    once = run._multiply
    monkeypatch.setattr(run, "_multiply", lambda x, *rest: (sizes.append(len(x)), once(x, *rest)))
    run.multiply(x, powers, matrix, parts, residual)
    assert torch.equal(parts, whole) and sizes == [64, 6]


@pytest.mark.slow
def test_a_wrong_offset_is_noticed() -> None:
    """Or the check above could not fail."""
    spec = LinearSpec(CPU, GGMLType.Q4_0, 64, 256)
    run = linear_triton.bind(spec)
    run.constants["BIAS"] = 7
    assert "differ" in (linear_cuda.check(run, linear_ref.bind(spec), spec, n_rows=(1,)) or "")


@pytest.mark.parametrize(
    "shape", [(544, 80), (80, 272), (80, 96), (258, 80), (3880, 80), (1, 8), (544, 40)]
)
def test_programs_are_even(shape: tuple[int, int]) -> None:
    n_tile, n_step, n_sm = *shape, 132
    per = linear_triton.steps_of(n_tile, n_step, 4, 12, n_sm)
    n_split = -(-n_step // per)
    assert min(4, n_step) <= per <= n_step and (n_split - 1) * per < n_step
    if n_split > 1 and n_tile > 1:
        assert 7 * n_sm < n_tile * n_split < 14 * n_sm
        steps = [min(per, n_step - first) for first in range(0, n_step, per) for _ in range(n_tile)]
        assert max(sum(steps[i::n_sm]) for i in range(n_sm)) < 1.07 * n_tile * n_step / n_sm, (
            "of what all do together"
        )


@pytest.mark.parametrize(
    "times, spoilt, wanted",
    [
        ((1.0, 0.9, 1.2), None, "2 12"),
        ((1.0, 0.98, 1.2), None, "1 16"),
        ((1.0, 0.5, 0.8), (2, 12), "1 12"),
    ],
)
def test_the_fastest_right_choice_is_kept_with_the_verdict(
    times: tuple[float, ...],
    spoilt: tuple[int, int] | None,
    wanted: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(linear_triton, "TUNED_ROWS", 64)
    monkeypatch.setattr(linear_triton, "TUNED_BYTES", 0)
    linear_triton._kept.cache_clear()
    small = LinearSpec(CPU, GGMLType.Q4_K, PROBE_ROWS, 256)
    assert linear_triton.LinearTriton(small).warps == linear_triton.CHOICES[0][0], "nobody has measured"
    left = iter([(c, t) for c, t in zip(linear_triton.CHOICES, times, strict=True) for _ in "18"])

    def fastest(launches: list[Any]) -> float:
        choice, took = next(left)
        launches[0]()
        if choice == spoilt:
            launches[0].args[-1][0, 3] += 1e6
        return took

    monkeypatch.setattr(linear_triton, "_fastest", fastest)
    choice = linear_triton.tune(small)
    assert choice == wanted and linear_triton.tune(replace(small, epilogue=Epilogue.GATED)) == ""
    candidate = linear.candidate(next(i for i in linear.impls if i.name == "triton"), small)
    verdicts.save(verdicts.key_of(candidate), None, choice)
    linear_triton._kept.cache_clear()
    large = linear_triton.LinearTriton(replace(small, n_out=64, epilogue=Epilogue.RESIDUAL))
    assert large.warps == int(wanted.split()[0]), "of all matrices with as many columns"
    linear_triton._kept.cache_clear()


def _given(
    spec: LinearSpec, gen: torch.Generator
) -> tuple[torch.Tensor, GGMLType, tuple[int, int], torch.Tensor | None]:
    shape = spec.n_weight_row, spec.n_in
    raw, scales = random_rows(spec.type, *shape, gen, CPU)
    return raw, spec.type, shape, scales
