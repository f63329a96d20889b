"""rows, rows_finish and rope_kv compile for every architecture without spills."""

from dataclasses import replace

import pytest
import torch
from machines import compiled

from pyspec.cuda.jit import ARCHS
from pyspec.cuda.ops.rope_kv import cuda as rope_kv_cuda
from pyspec.cuda.ops.rope_kv.ref import RopeKvSpec
from pyspec.cuda.ops.rows import cuda as rows_cuda
from pyspec.cuda.ops.rows.ref import PrepKind, RowsSpec
from pyspec.slots.kv import KvFormat
from pyspec.slots.kv_types import TYPES

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", ARCHS)
def test_rows_compile_everywhere(arch: str) -> None:
    for kind in PrepKind:
        for n_in, layout in (
            (5120, rows_cuda.BLOCKED),
            (25600, rows_cuda.ROW_MAJOR),
            (17408, rows_cuda.TALL),
        ):
            macros = rows_cuda.defines(n_in, kind, 128, layout)
            compiled("rows", arch, macros)
    compiled("rows_finish", arch)


@pytest.mark.parametrize("layout", [rows_cuda.BLOCKED, rows_cuda.TALL])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120f"])
def test_rows_of_several_ctas_leave_room_for_a_product_beside_them(arch: str, layout: int) -> None:
    """Two of them, as 32 rows of 132 multiprocessors need, in half of the registers."""
    for n_in, kind in ((21504, PrepKind.GEGLU), (17408, PrepKind.PLAIN)):
        macros = rows_cuda.defines(n_in, kind, 0, layout, parts=rows_cuda.PARTS)
        found = compiled("rows", arch, macros)["rows"]
        assert 2 * found.registers * rows_cuda.threads_of(n_in, layout, rows_cuda.PARTS) <= 32768


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", ARCHS)
def test_rope_kv_compiles_everywhere(arch: str) -> None:
    for of in TYPES.values():
        spec = RopeKvSpec(CPU, 24, 4, 256, 64, True, True, True, 1e-6, KvFormat.both(of))
        compiled("rope_kv", arch, rope_kv_cuda.defines(spec))
        compiled("rope_kv", arch, rope_kv_cuda.defines(replace(spec, norm_behind=True)))


def test_limits_of_rows_and_rope_name_the_gpu_they_need() -> None:
    assert "NVIDIA" in (rows_cuda.limits(RowsSpec(CPU, 256)) or "")
    assert "NVIDIA" in (
        rope_kv_cuda.limits(RopeKvSpec(CPU, 1, 1, 64, 64, True, False, False, 1e-6)) or ""
    )
