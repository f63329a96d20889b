"""linear_unpack.cu on the emulated machine: to the bit what torch makes of the file's bytes."""

from __future__ import annotations

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler
from sampling import few

from pyspec.cuda.ops.linear.cuda import random_rows
from pyspec.cuda.ops.linear.dequant import dequantize
from pyspec.cuda.ops.linear.formats import CHUNKS, FORMATS
from pyspec.cuda.ops.linear.pack import repack
from pyspec.cuda.ops.linear.unpacked import UNSUITED, UnpackLaunch
from pyspec.gguf import GGMLType

pytestmark = [needs_compiler, pytest.mark.sampled(1)]
TYPES = few(
    [t for t in CHUNKS if t not in UNSUITED], *(GGMLType[name] for name in ("Q8_0", "Q4_K", "NVFP4"))
)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("type", TYPES)
def test_bits_are_those_of_the_file_rounded_once(type: GGMLType, gated: bool) -> None:
    """Rows that fill no tile, columns that fill no chunk, in cuts of a few groups."""
    n_out, n_in = (304 if gated else 297), max(192, type.block_size)
    gen = torch.Generator().manual_seed(int(type))
    raw, scales = random_rows(type, n_out, n_in, gen, CPU)
    want = dequantize(raw, type, (n_out, n_in))
    want = (want if scales is None else want * scales[:, None]).half()
    packed = repack(raw, type, (n_out, n_in), scales if FORMATS[type].scaled else None)
    with emulated_gpu():
        launch = UnpackLaunch(CPU, type, gated)
        for first, end in ((0, n_out), (0, 48), (48, 272), (272, n_out)):
            guarded = torch.full((end - first + 2, n_in), 7.0, dtype=torch.float16)
            launch(packed, first, end, guarded[1:-1])
            part, own = guarded[1:-1], want[first:end]
            if gated:
                own = own.unflatten(0, (-1, 2, 8)).transpose(0, 1).flatten(0, 2)
            assert torch.equal(part, own)
            assert (guarded[[0, -1]] == 7.0).all(), "wrote outside its rows"
