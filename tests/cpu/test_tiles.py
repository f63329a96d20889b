"""AMX: its products with emulated instructions against those of vectors, and whether a process may use it."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_linear
import torch
from forced import EMULATED
from sampling import few
from test_linear import LONG, SHORT, product, table, weights

from pyspec.cache import cache_root
from pyspec.cpu import build, kernels
from pyspec.cuda.ops.linear.cpu import prepared
from pyspec.gguf import GGMLType as G

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")
needs_vectors = pytest.mark.skipif("avx512" not in build.isas(), reason="this CPU has no AVX-512")
SOURCES = ("linear", "linear_eight", "plain", "pool", "run", "tiles_ready")
REFUSED = tuple(build.TILES_REFUSED)
HERE = Path(__file__).parent
AMX_FLAGS = build.SETS["x86_64"]["amx"][1]


@cache
def emulated() -> ctypes.CDLL:
    """Products by emulated tiles from the first row on."""
    path = cache_root() / "cpu" / f"libpyspec-emulated-tiles-{build._digest()}.so"
    if not path.is_file():
        extra = (*EMULATED, "-DPYSPEC_TILES_FROM=1", "-O2")
        build._build_to(path, "avx512", extra, *(build.SOURCES / f"{name}.cpp" for name in SOURCES))
    lib = kernels._opened(str(path))
    lib.pyspec_tiles_multiplied.restype = ctypes.c_int64
    return lib


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """The build "amx" of `product` is the emulated one."""
    of_others, lib = test_linear.opened, emulated()
    monkeypatch.setattr(test_linear, "opened", lambda isa: lib if isa == "amx" else of_others(isa))
    before = lib.pyspec_tiles_multiplied()
    yield lib
    assert lib.pyspec_tiles_multiplied() > before, "no tile was multiplied"
    assert lib.pyspec_tiles_held() == 0, "a thread keeps its tiles"


@needs_vectors
@pytest.mark.slow
@pytest.mark.timeout(900)  # the first one may compile two libraries
@pytest.mark.parametrize("kind", few([*SHORT, *LONG], G.Q4_K), ids=lambda k: k.name)
def test_tiles_give_the_bits_of_vectors(tiles: ctypes.CDLL, kind: G) -> None:
    """Odd numbers of rows and outputs, the last panel that reaches back, and ends within 256 columns."""
    for n_in in (768, 768 if kind in LONG else 320):
        x = torch.randn(530, n_in, generator=torch.Generator().manual_seed(5))
        x[3], x[4], x[5] = torch.nan, 0.0, torch.where(torch.arange(n_in) % 2 == 0, 1.0, -1.0)
        for n_out, numbers in ((37, (1, 2, 3, 5, 11, 16, 17, 33, 71)), (1, (7, 70)), (72, (31, 530))):
            for n in numbers:
                got = product(kind, n_out, x[:n], isa="amx", n_thread=3)
                want = product(kind, n_out, x[:n], isa="avx512")
                assert got.allclose(want, rtol=0, atol=0, equal_nan=True), (n_out, n)


@needs_vectors
@pytest.mark.slow
@pytest.mark.timeout(900)  # the first one may compile two libraries
@pytest.mark.parametrize("kind", few([*SHORT, *LONG], G.Q6_K), ids=lambda k: k.name)
def test_tiles_of_eight_bits_give_the_bits_of_vectors(tiles: ctypes.CDLL, kind: G) -> None:
    n_in = 768 if kind in LONG else 320
    x = torch.randn(71, n_in, generator=torch.Generator().manual_seed(6))
    x[3], x[4], x[5] = torch.nan, 0.0, torch.where(torch.arange(n_in) % 2 == 0, 1.0, -1.0)
    for n_out in (37, 1, 72):
        raw, _ = weights(kind, n_out, n_in)
        for n in (1, 2, 3, 5, 11, 16, 17, 33, 71):
            rows = prepared(x[:n], None, whole=False, eight=True)
            sizes = (None, table(kind), int(kind), n, n_in, n_out, n_out, 0, 1.0)
            got, want = torch.full((2, n, n_out), torch.nan)
            for isa, y in (("amx", got), ("avx512", want)):
                given = (raw, rows.x, rows.eight, None, None, y, None, *sizes)
                test_linear.call(isa, 3, "pyspec_product_eight", "15qd", *given)
            assert got.allclose(want, rtol=0, atol=0, equal_nan=True), (n_out, n)


@needs_vectors
@pytest.mark.slow
def test_a_forked_child_multiplies_tiles(tiles: ctypes.CDLL) -> None:
    x = torch.randn(19, 512)
    want = product(G.Q4_K, 40, x, isa="amx", n_thread=3)
    child = os.fork()
    if not child:
        signal.alarm(60)
        got = product(G.Q4_K, 40, x, isa="amx", n_thread=3)
        os._exit(int(bytes(got.numpy()) != bytes(want.numpy())))
    assert os.waitpid(child, 0)[1] == 0


@needs_vectors
@pytest.mark.slow
def test_the_emulated_instructions_multiply_as_their_description_says() -> None:
    """The trial of `pyspec_tiles_ready` compares them with a plain sum, in a child."""
    assert emulated().pyspec_tiles_ready() == 0


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """A CPU that announces AMX; `code`: what its trial returns, or an error."""
    trial: dict[str, object] = {"code": 0}

    def alone(source: str, isa: str) -> Path:
        assert (source, isa) == ("tiles_ready", "amx")
        if isinstance(trial["code"], Exception):
            raise trial["code"]
        return HERE

    monkeypatch.setattr(build, "sets", lambda: build.SETS["x86_64"])
    monkeypatch.setattr(build, "_cpu_flags", lambda: {*AMX_FLAGS, "avx2", "bmi2", "avx_vnni"})
    monkeypatch.setattr(build, "find", lambda isa: None)
    monkeypatch.setattr(build, "_alone", alone)
    library = SimpleNamespace(pyspec_tiles_ready=lambda: trial["code"])
    monkeypatch.setattr(build.ctypes, "CDLL", lambda path: library)
    build.isas.cache_clear(), build.refusals.cache_clear()
    yield trial
    build.isas.cache_clear(), build.refusals.cache_clear()


def test_a_cpu_with_tiles_that_work_takes_them(announced: dict[str, object]) -> None:
    assert build.isas() == ("amx", "avx512", "avxvnni", "avx2", "plain") and not build.refusals()


@pytest.mark.parametrize("code", [*REFUSED, 9])
def test_tiles_that_are_refused_leave_the_vectors(announced: dict[str, object], code: int) -> None:
    announced["code"] = code
    assert build.isas() == ("avx512", "avxvnni", "avx2", "plain")
    assert build.refusals() == {"amx": build.TILES_REFUSED.get(code, "reason 9")}


def test_a_compiler_that_does_not_know_tiles_leaves_the_vectors(announced: dict[str, object]) -> None:
    announced["code"] = build.CannotBuild("g++ failed: error: unrecognized option '-mamx-tile'")
    assert build.isas()[0] == "avx512"
    assert "unrecognized option" in build.refusals()["amx"]


def test_the_doctor_gives_the_reason(
    announced: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    announced["code"] = 3
    library = SimpleNamespace(pyspec_isa=lambda: b"avx512")
    monkeypatch.setattr(kernels, "compiled", lambda: library)
    assert kernels.described() == f"avx512; not amx: {build.TILES_REFUSED[3]}"


@needs_vectors
def test_the_trial_of_the_instructions_says_what_the_cpu_announces() -> None:
    """Compiled for AMX, which faults on no CPU: one without it answers before the first instruction."""
    try:
        path = build._alone("tiles_ready", "amx")
    except build.CannotBuild as e:
        pytest.skip(str(e))
    code = ctypes.CDLL(str(path)).pyspec_tiles_ready()
    assert code in (0, *REFUSED) and (code == 0) == ("amx" in build.isas())
