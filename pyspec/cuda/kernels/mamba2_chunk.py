"""Launches of mamba2_chunk.cu: `mamba2` over long kept sequences, in chunks. Part of mamba2_cuda, which decides who is long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from pyspec.cuda import jit
from pyspec.cuda.kernels.mamba2_ref import Params
from pyspec.slots.memory import Mamba2Shape

TAPS, GROUP_THREADS, SCALARS = 4, 256, 6
FEW_HEADS = 96  # up to here, blocks of 64 rows of the state of each leave too many multiprocessors idle
COUNTS = "pppp" + "iiiii"
GROUP_ARGS = "plpl" + "pppp" + "p" + "pp" + COUNTS + "p"
STATE_ARGS = "pp" + "pl" + "ppp" + "pp" + "p" + COUNTS + "ip"


def shared_limit(arch: str) -> int:
    """Bytes of shared memory a block may have."""
    if arch.startswith(("sm_86", "sm_89", "sm_12")):
        return 99 * 1024
    return 163 * 1024 if arch.startswith("sm_8") else 227 * 1024


def group_shared(s: Mamba2Shape, chunk: int) -> int:
    """Bytes of a block of mamba2_chunk_group: B in two parts and C."""
    return 3 * chunk * (2 * s.n_state + 16)


def pairs_bytes(chunk: int) -> int:
    return chunk * (2 * chunk + 16)


def shared_for(s: Mamba2Shape, chunk: int, rows: int) -> int:
    """Bytes of a block of mamba2_chunk_state: B, C, pairs, raw x, operands, scalars, powers; all but raw x twice."""
    operands = rows * 4 * chunk + rows * 2 * s.n_state
    twice = group_shared(s, chunk) + pairs_bytes(chunk) + operands + 4 * SCALARS * chunk + 8 * rows
    return 2 * twice + 4 * (chunk + TAPS - 1) * (rows + 4)


def cut(s: Mamba2Shape, arch: str) -> tuple[int, int]:
    """(rows of a chunk, rows of the state in a block): the largest that fit, narrow blocks where heads are few."""
    few = s.n_head * s.head_dim <= FEW_HEADS * 64
    rows = [n for n in ((32, 64) if few else (64, 32)) if s.head_dim % n == 0]
    choices = [(chunk, n) for chunk in (64, 32) for n in rows] + [(32, 32)]
    return next(c for c in choices if shared_for(s, *c) <= shared_limit(arch))


def shared_bytes(s: Mamba2Shape, arch: str) -> int:
    return shared_for(s, *cut(s, arch))


def defines(s: Mamba2Shape, arch: str) -> dict[str, int | str]:
    chunk, rows = cut(s, arch)
    sizes: dict[str, int | str] = {"HEADS": s.n_head, "DIM": s.head_dim, "GROUPS": s.n_group, "N_STATE": s.n_state}
    return sizes | {"CHUNK": chunk, "SLICE": rows}


@dataclass(frozen=True)
class Chunks:
    """Kernels for one shape. `prepare` goes before mamba2_rows, which may have records to fold, and `run` after it."""

    shape: Mamba2Shape
    chunk: int  # rows
    rows: int  # of the state in a block of mamba2_chunk_state
    group: jit.Kernel
    state: jit.Kernel

    def prepare(
        self, inputs: Sequence[jit.Arg], p: Params, conv: Tensor, counts: Sequence[jit.Arg], n_chunk: int, fault: Tensor
    ) -> tuple[Tensor, ...]:
        """What heads of a group share, and their scalars; `inputs` are m and dt. Returns what `run` takes."""
        s, m = self.shape, inputs[0]
        assert isinstance(m, Tensor)
        record = group_shared(s, self.chunk) + pairs_bytes(self.chunk)
        records = torch.empty(n_chunk * s.n_group * record, dtype=torch.uint8, device=m.device)
        made = records, m.new_empty(n_chunk * s.n_head * SCALARS * self.chunk)
        args = [*inputs, p.a, p.dt_bias, p.conv_w, p.conv_b, conv, *made, *counts, fault]
        self.group.launch((s.n_group, n_chunk), GROUP_THREADS, args, group_shared(s, self.chunk))
        return made

    def run(
        self,
        made: Sequence[Tensor],
        inputs: Sequence[jit.Arg],
        p: Params,
        state: Tensor,
        conv: Tensor,
        out: Tensor,
        counts: Sequence[jit.Arg],
        n_seq: int,
        n_chunk: int,
        fault: Tensor,
        *,
        overlap: bool,
    ) -> None:
        s = self.shape
        args = [state, p.d, *inputs[:2], p.conv_w, p.conv_b, conv, *made, out, *counts, np.int32(n_chunk), fault]
        grid, shared = (s.n_head, s.head_dim // self.rows, n_seq), shared_for(s, self.chunk, self.rows)
        self.state.launch(grid, 4 * self.rows, args, shared, overlap=overlap)


@cache
def kernels(shape: Mamba2Shape, arch: str) -> Chunks:
    code = jit.compile_cubin("mamba2_chunk", arch, defines(shape, arch))
    chunk, rows = cut(shape, arch)
    return Chunks(
        shape,
        chunk,
        rows,
        code.kernel("mamba2_chunk_group", GROUP_ARGS).allow_shared(group_shared(shape, chunk)),
        code.kernel("mamba2_chunk_state", STATE_ARGS).allow_shared(shared_for(shape, chunk, rows)),
    )
