"""Products on the GPU against float64: every type, ragged rows, sizes that fill no tile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from machines import off
from torch import Tensor

from pyspec.cuda.ops.linear import cuda as linear_cuda
from pyspec.cuda.ops.linear import pair as linear_pair
from pyspec.cuda.ops.linear import ref as linear_ref
from pyspec.cuda.ops.linear.cuda import LinearLaunch, Tiling, random_matrix, step
from pyspec.cuda.ops.linear.formats import CHUNKS
from pyspec.cuda.ops.linear.op import linear
from pyspec.cuda.ops.linear.pack import Packed, unpack
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.cuda.ops.rows.cuda import RowsLaunch, values_of
from pyspec.gguf import GGMLType

CUDA = torch.device("cuda", 0)
N_ROWS = (1, 2, 7, 8, 9, 16, 17, 24, 32, 33, 48, 64, 65, 96, 100, 128)


def matrix(type: GGMLType, n_out: int, n_in: int) -> Packed:
    return random_matrix(type, n_out, n_in, torch.Generator().manual_seed(n_out + n_in), CUDA)


def product(spec: LinearSpec, packed: Packed, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """The op's result, its output poisoned before and the memory around it checked after."""
    guarded = torch.full((x.shape[0] + 2, spec.n_out), torch.nan, device=CUDA)
    linear_cuda.bind(spec)(x, packed, guarded[1:-1], residual)
    torch.cuda.synchronize()
    assert guarded[[0, -1]].isnan().all(), "wrote outside its rows"
    return guarded[1:-1].clone()


@pytest.mark.parametrize("type", CHUNKS)
@pytest.mark.parametrize(
    ("n_out", "n_in"), [(96, 5120), (48, 1024), (300, 6144), (5120, 17408), (1030, 256)]
)
def test_products_equal_exact_sums_of_rounded_rows(type: GGMLType, n_out: int, n_in: int) -> None:
    packed, spec = matrix(type, n_out, n_in), LinearSpec(CUDA, type, n_out, n_in)
    weights = unpack(packed).double()
    for n_row in N_ROWS:
        x = torch.randn(n_row, n_in, device=CUDA) * torch.logspace(-3, 3, n_row, device=CUDA)[:, None]
        got = product(spec, packed, x)
        assert off(got, linear_ref.rounded(x) @ weights.T) < 3e-6
        assert off(got, x.double() @ weights.T) < 2e-3


@pytest.mark.parametrize("type", [GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.Q6_K])
@pytest.mark.parametrize(("parts", "n_own", "n_in"), [(8, 1024, 4096), (2, 256, 256), (5, 512, 1280)])
def test_parts_have_their_own_columns(type: GGMLType, parts: int, n_own: int, n_in: int) -> None:
    packed = matrix(type, parts * n_own, n_in)
    spec = LinearSpec(CUDA, type, parts * n_own, n_in, parts=parts)
    weights = unpack(packed).double().chunk(parts)
    for n_row in (1, 4, 9, 33, 128):
        x = (
            torch.randn(n_row, parts * n_in, device=CUDA)
            * torch.logspace(-3, 3, n_row, device=CUDA)[:, None]
        )
        rows = zip(weights, linear_ref.rounded(x).chunk(parts, -1), strict=True)
        got = product(spec, packed, x)
        assert off(got, torch.cat([part @ own.T for own, part in rows], -1)) < 3e-6
        assert torch.equal(product(spec, packed, x[:1]), got[:1])


@pytest.mark.parametrize(
    ("epilogue", "parts", "n_out", "n_in"),
    [(Epilogue.PLAIN, 8, 8192, 4096), (Epilogue.GATED, 1, 2048, 4096), (Epilogue.PLAIN, 1, 8192, 4096)],
)
def test_products_that_go_to_the_next_ones_rows_are_those_of_a_call(
    epilogue: Epilogue, parts: int, n_out: int, n_in: int
) -> None:
    limit, power = 10.0 * (epilogue is Epilogue.GATED), 2.0**-4
    spec = LinearSpec(CUDA, GGMLType.Q8_0, n_out, n_in, epilogue, limit, parts)
    packed = matrix(spec.type, spec.n_weight_row, n_in)
    launch = linear_cuda.bind(replace(spec, hands=power))
    into = linear_cuda.bind_rows(CUDA, GGMLType.Q8_0, n_out)
    for n_row in (1, 2, 8, 9, 17, 32):
        x = torch.randn(n_row, parts * n_in, device=CUDA) / 16
        got = launch.hand(launch.rows(x), packed, into)
        want = (product(spec, packed, x) / power).half().float() * power
        assert torch.equal(values_of(got, n_out)[0], want)


@pytest.mark.parametrize("n_in", [32, 64, 96, 2688])
def test_columns_that_fill_no_chunk_add_nothing(n_in: int) -> None:
    for type in (t for t in CHUNKS if n_in % t.block_size == 0):
        packed, spec = matrix(type, 300, n_in), LinearSpec(CUDA, type, 300, n_in)
        x = torch.randn(5, n_in, device=CUDA)
        assert off(product(spec, packed, x), linear_ref.rounded(x) @ unpack(packed).double().T) < 3e-6


@pytest.mark.parametrize("type", CHUNKS)
def test_a_row_has_the_same_bits_whatever_runs_beside_it(
    type: GGMLType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs of CTAs, where they are taken, have an order of their own, the same for all the rows they take."""
    packed, spec = matrix(type, 5000, 2048), LinearSpec(CUDA, type, 5000, 2048)
    x = torch.randn(200, 2048, device=CUDA)
    by_pairs = max(linear_cuda.bind(spec).pairs, default=0)
    room = linear_cuda.n_shared(torch.cuda.get_device_capability(CUDA)) >= linear_pair.LEAST_SHARED
    assert by_pairs >= (32 if room else 0), "a matrix this small is theirs"
    alone = torch.cat([product(spec, packed, row[None]) for row in x])
    for n_row in (n for n in N_ROWS if n <= by_pairs):
        assert torch.equal(product(spec, packed, x[:n_row]), alone[:n_row])
        assert torch.equal(product(spec, packed, x[:n_row].flip(0)).flip(0), alone[:n_row])
    at_once = linear_cuda.bind(spec).max_rows
    # Their last pass is none of theirs
    others = [n for n in (*N_ROWS, 200) if n % at_once == 0 or n % at_once > by_pairs]
    more = [product(spec, packed, x[:n_row]) for n_row in others if n_row > by_pairs]
    monkeypatch.setattr(linear_pair, "MOST_BYTES", 0)
    alone = torch.cat([product(spec, packed, row[None]) for row in x])
    for found in (*more, *(product(spec, packed, x[:n_row]) for n_row in (*N_ROWS, 200))):
        assert torch.equal(found, alone[: len(found)])
    assert torch.equal(product(spec, packed, x.flip(0)).flip(0), alone)


def test_rows_with_nan_do_not_touch_others() -> None:
    packed, spec = matrix(GGMLType.Q8_0, 300, 1024), LinearSpec(CUDA, GGMLType.Q8_0, 300, 1024)
    x = torch.randn(20, 1024, device=CUDA)
    clean = product(spec, packed, x)
    x[3], x[17, 5], x[18, 0] = torch.nan, torch.inf, -torch.inf
    got = product(spec, packed, x)
    keep = [i for i in range(20) if i not in (3, 17, 18)]
    assert torch.equal(got[keep], clean[keep])
    assert got[3].isnan().all()
    assert not got[[17, 18]].isfinite().any()
    memory = torch.full((32, 1024), torch.nan, device=CUDA)  # rows past the count hold NaN
    memory[:9] = clean_rows = torch.randn(9, 1024, device=CUDA)
    assert torch.equal(product(spec, packed, memory[:9]), product(spec, packed, clean_rows))


def test_rows_of_any_magnitude_keep_their_precision() -> None:
    packed, spec = matrix(GGMLType.Q8_0, 64, 1024), LinearSpec(CUDA, GGMLType.Q8_0, 64, 1024)
    x = (
        torch.randn(6, 1024, device=CUDA)
        * torch.tensor([1e-33, 1e-8, 1e-3, 1e4, 1e10, 1e30], device=CUDA)[:, None]
    )
    got, want = product(spec, packed, x).double(), x.double() @ unpack(packed).double().T
    assert ((got - want).norm(dim=1) / want.norm(dim=1) < 5e-4).all()
    assert not product(spec, packed, torch.zeros(2, 1024, device=CUDA)).any()


@pytest.mark.parametrize(
    ("epilogue", "limit"),
    [(Epilogue.RESIDUAL, 0.0), (Epilogue.GATED, 0.0), (Epilogue.GATED, 2.0)],
    ids=["residual", "gated", "cut"],
)
def test_epilogues_equal_the_reference(epilogue: Epilogue, limit: float) -> None:
    for n_out, n_in, type in (
        (1096, 1024, GGMLType.Q8_0),
        (96, 5120, GGMLType.Q8_0),
        (1096, 1024, GGMLType.NVFP4),
    ):
        spec = LinearSpec(CUDA, type, n_out, n_in, epilogue, limit)
        packed = matrix(type, spec.n_weight_row, n_in)
        # Its sums are in the hundreds: where they are near 0 rounding is all
        within = 2e-2 if limit and type is GGMLType.NVFP4 else 1e-3
        for n_row in (1, 12, 128):
            x = torch.randn(n_row, n_in, device=CUDA) / 16
            residual = torch.randn(n_row, n_out, device=CUDA) if epilogue is Epilogue.RESIDUAL else None
            want = torch.empty(n_row, n_out, device=CUDA)
            linear_ref.bind(spec)(x, packed, want, residual)
            assert off(product(spec, packed, x, residual), want) < within


def test_every_shape_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_pair, "MOST_BYTES", 0)
    spec = LinearSpec(CUDA, GGMLType.Q8_0, 5000, 2048)
    packed, x = matrix(GGMLType.Q8_0, 5000, 2048), torch.randn(128, 2048, device=CUDA)
    for shape in (
        Tiling(16, 1, 1, 1),
        Tiling(4, 2, 4, 1),
        Tiling(16, 1, 1, 4),
        Tiling(8, 1, 2, 4),
        Tiling(4, 2, 4, 4),
    ):
        launch = LinearLaunch(spec, (step(CUDA, spec.type, spec.epilogue, shape),))
        rows = RowsLaunch(CUDA, 2048, (shape.rows,))(x[: shape.rows])
        for _ in range(10):
            out = torch.full((shape.rows, 5000), torch.nan, device=CUDA)
            launch.multiply(rows, packed, out)
            assert torch.equal(out, product(spec, packed, x[: shape.rows]))


def test_a_captured_product_replays_with_new_rows() -> None:
    packed, spec = matrix(GGMLType.Q8_0, 5120, 1024), LinearSpec(CUDA, GGMLType.Q8_0, 5120, 1024)
    launch, x = linear_cuda.bind(spec), torch.randn(8, 1024, device=CUDA)
    out = torch.empty(8, 5120, device=CUDA)
    launch(x, packed, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(x, packed, out)
    for _ in range(20):
        x.normal_()
        graph.replay()
        assert torch.equal(out, product(spec, packed, x))


def test_the_op_takes_the_kernel_after_checking_it() -> None:
    spec = LinearSpec(CUDA, GGMLType.Q8_0, 96, 1024)
    names = dict(linear.choices(spec))  # triton stands between them where it is installed
    assert names["cuda"] is None and names["torch"] is None and next(iter(names)) == "cuda"
