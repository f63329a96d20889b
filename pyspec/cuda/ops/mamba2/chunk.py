"""Launches of mamba2_chunk.cu: `mamba2` over long kept sequences, in chunks. Part of mamba2_cuda, which decides which are long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.cuda import jit
from pyspec.cuda.context import per_device
from pyspec.cuda.ops.mamba2.ref import Params
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.cuda.ops.recurrent.launch import Division
from pyspec.slots.recurrent import StateLayer

TAPS, GROUP_THREADS, SCALARS = 4, 256, 6
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


def record_bytes(s: Mamba2Shape, chunk: int) -> int:
    """Bytes that mamba2_chunk_group writes for a chunk: B in two parts, C, products of pairs in blocks of 16 up to the diagonal."""
    return 3 * chunk * 2 * s.n_state + chunk * (chunk + 16)


def shared_for(s: Mamba2Shape, chunk: int, rows: int) -> int:
    """Bytes of a block of mamba2_chunk_state: B, C, pairs, raw x, operands, scalars, powers; all but raw x twice."""
    operands = rows * 4 * chunk + rows * 2 * s.n_state
    twice = record_bytes(s, chunk) + operands + 4 * SCALARS * chunk + 8 * rows
    return 2 * twice + 4 * (chunk + TAPS - 1) * (rows + 4)


def cut(s: Mamba2Shape, arch: str) -> tuple[int, int]:
    """(rows of a chunk, rows of the state in a block): the most that fit. Fewer rows of the state give the same bits."""
    choices = [(chunk, rows) for rows in (64, 32) for chunk in (64, 32) if s.head_dim % rows == 0]
    return next(c for c in choices if shared_for(s, *c) <= shared_limit(arch))


def narrow(s: Mamba2Shape, n_seq: int, n_multiprocessor: int) -> bool:
    """Whether blocks of 64 rows of the state are so few that twice as many of half the size still run at once."""
    return 2 * n_seq * s.n_head * s.head_dim // 64 <= n_multiprocessor


def defines(s: Mamba2Shape, chunk: int, rows: int) -> jit.Macros:
    return s.macros() | {"CHUNK": chunk, "SLICE": rows}


@dataclass(frozen=True)
class Mamba2Chunks:
    """Kernels for one shape. `prepare` goes before mamba2_rows, which may have records to fold, and `run` after it."""

    shape: Mamba2Shape
    chunk: int  # rows
    group: jit.Kernel
    states: Mapping[int, jit.Kernel]  # by rows of the state in a block
    n_multiprocessor: int

    def prepare(
        self, inputs: Sequence[jit.Arg], p: Params, conv: Tensor, batch: Division
    ) -> tuple[Tensor, ...]:
        """Compute the shared values of a group's heads, and their scalars; `inputs` are m and dt. Returns the argument of `run`."""
        s, m, n_chunk = self.shape, inputs[0], batch.n_chunk
        assert isinstance(m, Tensor)
        n_byte = n_chunk * s.n_group * record_bytes(s, self.chunk)
        records = torch.empty(n_byte, dtype=torch.uint8, device=m.device)
        made = records, m.new_empty(n_chunk * s.n_head * SCALARS * self.chunk)
        args = *inputs, p.a, p.dt_bias, p.conv_w, p.conv_b, conv, *made, *batch.chunk_counts, batch.fault
        grid, shared = (s.n_group, n_chunk), group_shared(s, self.chunk)
        self.group.launch(grid, GROUP_THREADS, args, shared, overlap=True)
        return made

    def run(
        self,
        made: Sequence[Tensor],
        inputs: Sequence[jit.Arg],
        p: Params,
        layer: StateLayer,
        out: Tensor,
        batch: Division,
    ) -> None:
        """The states, and the results of the sequences that are chunked."""
        s = self.shape
        args: list[jit.Arg] = [layer.state, p.d, *inputs[:2], p.conv_w, p.conv_b, layer.conv, *made, out]
        args += [*batch.chunk_counts, batch.n_chunk, batch.fault]
        rows = max(self.states)
        if len(self.states) > 1 and narrow(s, batch.n_long, self.n_multiprocessor):
            rows = min(self.states)
        grid, shared = (s.n_head, s.head_dim // rows, batch.n_seq), shared_for(s, self.chunk, rows)
        self.states[rows].launch(grid, 4 * rows, args, shared, overlap=True)


@per_device
def kernels(device: torch.device, shape: Mamba2Shape) -> Mamba2Chunks:
    arch = jit.arch_of(torch.cuda.get_device_capability(device))
    n_multiprocessor = torch.cuda.get_device_properties(device).multi_processor_count
    chunk, most = cut(shape, arch)
    codes = {most: jit.compile_cubin("mamba2_chunk", arch, defines(shape, chunk, most))}
    if most == 64 and narrow(shape, 1, n_multiprocessor):
        codes[32] = jit.compile_cubin("mamba2_chunk", arch, defines(shape, chunk, 32))
    states = {
        rows: code.kernel("mamba2_chunk_state", STATE_ARGS).allow_shared(shared_for(shape, chunk, rows))
        for rows, code in codes.items()
    }
    group = codes[most].kernel("mamba2_chunk_group", GROUP_ARGS).allow_shared(group_shared(shape, chunk))
    return Mamba2Chunks(shape, chunk, group, states, n_multiprocessor)
