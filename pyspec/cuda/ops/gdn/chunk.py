"""Launches of gdn_chunk.cu: `gdn` over long kept sequences, 64 rows at a time. Part of gdn_cuda, which decides which are long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.cuda import jit
from pyspec.cuda.context import per_device
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.cuda.ops.recurrent.launch import Division

DIM, CHUNK, VALUES, THREADS = 128, 64, 64, 128  # VALUES of a block of gdn_chunk_state
RECORD = 3 * 2 * CHUNK * CHUNK + 2 * 4 * CHUNK  # bytes gdn_chunk_solve leaves for a chunk and value head
KEYS = 2 * CHUNK * DIM  # bytes of a chunk of f16 keys
COUNTS = "pppp" + "iiiii"
CONV_ARGS = "plplplppp" + "ppp" + "pp" + "pppppp" + COUNTS + "fp"
SOLVE_ARGS = "ppp" + "pp" + "p" + COUNTS + "p"
STATE_ARGS = "p" + "ppp" + "p" + "pp" + COUNTS + "ip"


def key_stages(arch: str) -> int:
    """Two where a block may have more than 99 KiB of shared memory."""
    return 1 if arch.startswith(("sm_86", "sm_89", "sm_12")) else 2


def defines(shape: GdnShape, arch: str) -> jit.Macros:
    macros: jit.Macros = {"N_K": shape.n_k_head, "N_V": shape.n_v_head}
    return macros | {"KEY_STAGES": key_stages(arch)} | shape.macros()


@dataclass(frozen=True)
class GdnChunks:
    """Kernels for one shape. `prepare` goes before gdn_rows, which may have records to fold, and `run` after it."""

    shape: GdnShape
    conv: jit.Kernel
    solve: jit.Kernel
    state: jit.Kernel
    shared: int  # bytes of gdn_chunk_state

    def prepare(
        self,
        inputs: Sequence[jit.Arg],
        records: Sequence[Tensor],
        old: Sequence[Tensor],
        rows: Sequence[Tensor],
        batch: Division,
        eps: float,
    ) -> Tensor:
        """The convolution; rows are v, g, b. Returns the f16 queries and keys (high halves, low halves)."""
        (conv, _, _, g, beta), (_, _, e, b), v = records, old, rows[0]
        n_row = v.numel() // (self.shape.n_v_head * DIM)
        qk = torch.empty(3, n_row, self.shape.n_k_head * DIM, dtype=torch.float16, device=v.device)
        grid = (2 * self.shape.n_k_head + self.shape.n_v_head, batch.n_chunk)
        args = [*inputs, conv, g, beta, e, b, *qk, *rows, *batch.chunk_counts, eps, batch.fault]
        self.conv.launch(grid, THREADS, args)
        return qk

    def run(
        self,
        qk: Tensor,
        rows: Sequence[Tensor],
        state: Tensor,
        out: Tensor,
        batch: Division,
    ) -> None:
        """The triangular systems of all chunks, then the states and the results, chunk by chunk."""
        v, g, b = rows
        n_v, n_chunk = self.shape.n_v_head, batch.n_chunk
        solved = torch.empty(n_chunk * n_v * RECORD, dtype=torch.uint8, device=v.device)
        args = [*qk, g, b, solved, *batch.chunk_counts, batch.fault]
        self.solve.launch((n_v, n_chunk), THREADS, args, 3 * KEYS, overlap=not batch.runs_rows)
        args = [state, *qk, v, solved, out, *batch.chunk_counts, n_chunk, batch.fault]
        self.state.launch((n_v, DIM // VALUES, batch.n_seq), THREADS, args, self.shared, overlap=True)


@per_device
def kernels(device: torch.device, shape: GdnShape) -> GdnChunks:
    arch = jit.arch_of(torch.cuda.get_device_capability(device))
    code = jit.compile_cubin("gdn_chunk", arch, defines(shape, arch))
    shared = (2 * key_stages(arch) + 1) * KEYS + RECORD
    return GdnChunks(
        shape,
        code.kernel("gdn_chunk_conv", CONV_ARGS),
        code.kernel("gdn_chunk_solve", SOLVE_ARGS).allow_shared(3 * KEYS),
        code.kernel("gdn_chunk_state", STATE_ARGS).allow_shared(shared),
        shared,
    )
