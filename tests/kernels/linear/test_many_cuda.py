"""linear_wgmma.cu with the many rows of a prompt in one launch, thread by thread on the CPU and on Hopper; matrices unpacked for a library."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from machines import CPU, GPU, HAS_GPU, ON_CARD, Machine, cases, off
from torch import Tensor

from pyspec.cuda import streamed
from pyspec.cuda.kernel_context import KernelContext, within
from pyspec.cuda.ops.linear import ref as linear_ref
from pyspec.cuda.ops.linear import unpacked, wgmma, wgmma_many
from pyspec.cuda.ops.linear.cuda import random_matrix
from pyspec.cuda.ops.linear.formats import CHUNKS
from pyspec.cuda.ops.linear.pack import unpack
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.cuda.ops.linear.unpacked import UNSUITED, UnpackedProduct, UnpackLaunch
from pyspec.cuda.ops.linear.wgmma_many import ManyLaunch
from pyspec.cuda.ops.rows.ref import Norm
from pyspec.gguf import GGMLType

Q8_0, Q4_K, NVFP4 = GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.NVFP4


@pytest.fixture(autouse=True)
def _small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated, parts of 64 rows, and few stages, so that matrices this small go round the rings."""
    if request.node.get_closest_marker("card"):
        return
    monkeypatch.setattr(wgmma_many, "PADS", (64,))
    monkeypatch.setattr(wgmma, "stages", lambda type, pad, many=0: (2, 2))


hopper = pytest.mark.skipif(
    HAS_GPU and wgmma_many.limits(LinearSpec(GPU, Q8_0, 64, 64)) is not None,
    reason="needs compute capability 9.0",
)


def product(
    machine: Machine, spec: LinearSpec, n_row: int, n_cta: int = 0, *, spare: int = 0, seed: int = 0
) -> float:
    """Error of a product of rows of all sizes into the midst of a poisoned tensor, against one in float64; a card gives the same bits again."""
    gen, spec = torch.Generator().manual_seed(n_row), replace(spec, device=machine.device)
    packed = random_matrix(spec.type, spec.n_weight_row, spec.n_in, gen, machine.device)
    x = torch.randn(n_row, spec.n_in, generator=gen).to(machine.device)
    x *= 1 / 16 if machine.name == "card" else torch.logspace(-3, 0, n_row)[:, None]
    residual = torch.randn(n_row, spec.n_out, device=machine.device)
    residual = residual if spec.epilogue is Epilogue.RESIDUAL else None
    y = linear_ref.rounded(x) @ unpack(packed).double().T
    want, found = linear_ref.finish(y, spec.epilogue, residual), []
    with machine.started(seed=seed, n_multiprocessor=n_cta):
        launch = ManyLaunch(spec, spare=spare)
        for _ in range(2 if machine.name == "card" else 1):
            guarded = torch.full((n_row + 2, spec.n_out), torch.nan, device=machine.device)
            launch(x, packed, guarded[1:-1], residual)
            machine.waited()
            assert guarded[[0, -1]].isnan().all(), "wrote outside its rows"
            found.append(guarded[1:-1].clone())
        work = launch.workspace
    assert not work.counts.any() and not work.states.any(), "flags are left over"
    assert all(torch.equal(other, found[0]) for other in found)
    return off(found[0], want)


@hopper
@cases(
    "type, n_out, n_in, n_row, n_cta",
    emulated=[
        (Q8_0, 530, 320, 150, 6),  # six items, two each of three clusters
        (Q8_0, 530, 320, 150, 8),  # four in turn, two cut by all
    ],
    card=[(type, 1030, 2048, 300, 0) for type in CHUNKS],
)
def test_products_equal_float64(
    machine: Machine, type: GGMLType, n_out: int, n_in: int, n_row: int, n_cta: int
) -> None:
    for seed in (0, 1):
        assert product(machine, LinearSpec(CPU, type, n_out, n_in), n_row, n_cta, seed=seed) < 1e-3


@hopper
@pytest.mark.parametrize("epilogue", Epilogue)
@cases(
    "n_out, n_in, n_row, n_cta",
    emulated=[(n_out, 192, 300, n_cta) for n_cta in (2, 6, 10) for n_out in (264, 392)],
    card=[
        (*size, n_row, 0) for size in ((5120, 6144), (1096, 1024), (96, 5120)) for n_row in (257, 2048)
    ],
    slow=True,
)
def test_wide_parts_with_half_a_tile_of_weights(
    machine: Machine,
    n_out: int,
    n_in: int,
    n_row: int,
    n_cta: int,
    epilogue: Epilogue,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """256 rows by 128 weight rows; the last tile is half of one that is lower."""
    monkeypatch.setattr(wgmma_many, "PADS", (256,))
    assert (
        product(machine, LinearSpec(CPU, Q8_0, n_out, n_in, epilogue), n_row, n_cta, seed=n_cta) < 1e-3
    )


@hopper
@pytest.mark.parametrize("epilogue", Epilogue)
@cases(
    "type, n_row, sizes",
    emulated=[(type, 200, [(264, 512)]) for type in (Q8_0, Q4_K, NVFP4)],
    card=[
        (type, n_row, [(5120, 6144), (17408, 1024), (96, 5120)])
        for type in (Q8_0, Q4_K, GGMLType.Q6_K, GGMLType.MXFP4)
        for n_row in (129, 300, 513, 2048, 4500)
    ],
    slow=True,
)
def test_types_and_epilogues(
    machine: Machine, type: GGMLType, n_row: int, sizes: list[tuple[int, int]], epilogue: Epilogue
) -> None:
    for n_out, n_in in sizes:
        for spare in (0, 1) if machine.name == "card" else (0,):
            assert (
                product(machine, LinearSpec(CPU, type, n_out, n_in, epilogue), n_row, 6, spare=spare)
                < 1e-3
            )


@cases(
    "n_row, n_cta, spare",
    emulated=[
        (n, n_cta, spare)
        for spare in (0, 1)
        for n in (64, 65, 129, 300)
        for n_cta in (2, 4, 6, 10, 18, 34)
    ],
    slow=True,
)
def test_any_number_of_clusters_and_parts(machine: Machine, n_row: int, n_cta: int, spare: int) -> None:
    spec = LinearSpec(CPU, Q8_0, 530, 192)
    assert product(machine, spec, n_row, n_cta, spare=spare, seed=n_cta) < 1e-3


def test_parts_leave_the_fewest_rows_over(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma_many, "PADS", (96, 112, 128))
    of = {129: 96, 200: 112, 256: 128, 288: 96, 300: 112, 2048: 128}
    assert {n: wgmma_many.part_of(n) for n in of} == of


@pytest.fixture
def a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's product with f32 sums, which a CPU has not."""

    def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        y = (a.float() @ b.float()).to(out_dtype)
        return y if out is None else out.copy_(y)

    monkeypatch.setattr(torch, "mm", mm)


@pytest.mark.usefixtures("a_library")
@pytest.mark.parametrize(
    ("epilogue", "limit"),
    [(Epilogue.PLAIN, 0.0), (Epilogue.RESIDUAL, 0.0), (Epilogue.GATED, 0.0), (Epilogue.GATED, 0.5)],
    ids=["plain", "residual", "gated", "cut"],
)
def test_slices_of_unpacked_rows(
    machine: Machine, epilogue: Epilogue, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three slices, the last of them lower; a residual that is the output."""
    monkeypatch.setattr(unpacked, "SCRATCH_BYTES", 256 * 2 * 192)
    spec = LinearSpec(CPU, Q8_0, 305 if epilogue is Epilogue.RESIDUAL else 304, 192, epilogue, limit)
    packed = random_matrix(Q8_0, spec.n_weight_row, 192, torch.Generator().manual_seed(1), CPU)
    x, out = torch.randn(35, 192) / 16, torch.randn(35, spec.n_out)
    residual = out if epilogue is Epilogue.RESIDUAL else None
    y = linear_ref.rounded(x) @ unpack(packed).double().T
    want = linear_ref.finish(y, epilogue, None if residual is None else residual.double(), limit)
    with machine.started((8, 0)):
        UnpackedProduct(spec)(x, packed, out, residual)
    assert off(out, want) < 1e-3


@pytest.mark.slow
@pytest.mark.usefixtures("a_library")
@pytest.mark.parametrize("bind", [ManyLaunch, UnpackedProduct], ids=["wgmma", "unpacked"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_matrix_takes_prompts_with_it(
    machine: Machine, bind: type[ManyLaunch], gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From so many rows on, rows that are normed on the way, and a residual; a matrix of `--exact` does not."""
    taken: list[int] = []

    class Seen(bind):  # type: ignore[misc, valid-type]
        least = 67

        def __call__(self, x: Tensor, *given: object, **named: object) -> None:
            taken.append(len(x))
            super().__call__(x, *given, **named)

    monkeypatch.setattr(streamed, "_tall", lambda spec: None)
    monkeypatch.setattr(streamed, "_many", lambda spec: Seen(spec))
    monkeypatch.setattr(type(streamed.rows), "runs_as", lambda self, name, spec: True)  # as on a GPU
    packed = random_matrix(Q8_0, 48, 96, torch.Generator().manual_seed(1), CPU)
    x, norm, n_out = torch.randn(67, 96), Norm(1 + 0.1 * torch.randn(96), 1e-6), 24 if gated else 48
    residual = torch.randn(67, n_out)
    y = linear_ref.rounded(norm(x)) @ unpack(packed).double().T
    want = residual + linear_ref.finish(y, Epilogue.GATED if gated else Epilogue.PLAIN, None)
    with machine.started():
        product = streamed.Streamed(packed, CPU, gated, None)
        assert off(product(x, norm, residual), want) < 1e-3 and taken == [67]
        assert off(product(x[:66], norm, residual[:66]), want[:66]) < 1e-3 and taken == [67]


def test_exact_products_have_passes_only(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(streamed.linear_many), "has_own", lambda *asked, **how: True)
    spec = LinearSpec(CPU, Q8_0, 48, 96)
    with within(KernelContext(is_exact=True)):
        assert streamed._many(spec) is None


@ON_CARD
@hopper
def test_a_graph_replays_with_new_rows(machine: Machine) -> None:
    """Rows are normed on the way, into memory of the graph."""
    spec, gen = LinearSpec(machine.device, GGMLType.Q8_0, 5120, 1024), torch.Generator().manual_seed(1)
    packed, launch = random_matrix(spec.type, 5120, 1024, gen, machine.device), ManyLaunch(spec)
    norm = Norm(torch.rand(1024, device=machine.device) + 0.5, 1e-6)
    x, out = torch.randn(300, 1024, device=machine.device), torch.empty(300, 5120, device=machine.device)
    replay, _ = machine.captured(lambda: [launch(x, packed, out, prep=norm) for _ in range(3)])
    weights = unpack(packed).double()
    for _ in range(5):
        x.copy_(torch.randn(300, 1024, device=machine.device))
        replay()
        assert off(out, norm(x).double() @ weights.T) < 1e-3


@ON_CARD
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("type", [t for t in CHUNKS if t not in UNSUITED])
def test_unpacked_rows_are_the_files_rounded_once(machine: Machine, type: GGMLType, gated: bool) -> None:
    n_out, n_in = (1040 if gated else 1033), 5120
    packed = random_matrix(type, n_out, n_in, torch.Generator().manual_seed(1), machine.device)
    launch, want = UnpackLaunch(machine.device, type, gated), unpack(packed).half()
    for first, end in ((0, n_out), (272, 1024), (1024, n_out)):
        out = torch.empty(end - first, n_in, dtype=torch.float16, device=machine.device)
        own = want[first:end]
        launch(packed, first, end, out)
        if gated:
            own = own.unflatten(0, (-1, 2, 8)).transpose(0, 1).flatten(0, 2)
        assert torch.equal(out, own)
