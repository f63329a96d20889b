"""`attend_blocks`, `attend_prompt` behind many keys: blocks of keys that every row sees go to cuDNN, the rest to torch's own kernel, and their sums are put together.

On Hopper cuDNN's kernel is more than twice as fast for heads of 256, but it builds a plan for every number of rows and keys. So keys come in
blocks of few sizes, and rows are padded: there are few plans. Each size is half of the one before, which makes few blocks. A block needs no mask, so a group's heads are rows of one head
of keys to it. Blocks lie at absolute keys: a row's bits depend on its own keys, and on the prompt's piece it came in.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.ops.attend.ref import AttendSpec

BLOCKS = (65536, 32768, 16384, 8192, 4096, 2048)  # keys
ROWS = 512  # that rows are padded to a multiple of
LEAST = 192  # rows: with fewer, padding is most of the work
LEAST_CUDNN = 90100

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
Part = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""q [1, head, row, dim], k and v [1, kv, key, dim] of one type -> out as q, and the natural logarithm of each row's sum [head, row] f32."""
OwnPart = Callable[[Tensor, int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The same for the first n rows; each row sees the keys up to its own, and the last row all."""


def cut(n_past: int) -> list[tuple[int, int]]:
    """(first, end) of the blocks in `n_past` keys, the largest first; fewer keys than the smallest block are left."""
    found, first = [], 0
    for size in BLOCKS:
        while n_past - first >= size:
            found.append((first, first + size))
            first += size
    return found


def takes(n_row: int, n_key: int) -> bool:
    """Whether it is worth it: there is a block before the rows, and they are not few."""
    return n_row >= LEAST and n_key - n_row >= BLOCKS[-1]


def of_libraries(spec: AttendSpec) -> str | None:
    """Why neither torch's kernel nor cuDNN's runs; None if they may."""
    if spec.device.type != "cuda":
        return "for GPUs"
    return f"heads of {spec.head_dim} dims" if spec.head_dim % 8 or spec.head_dim > 256 else None


def limits(spec: AttendSpec) -> str | None:
    if (why := of_libraries(spec)) is not None:
        return why
    if (capability := torch.cuda.get_device_capability(spec.device)) < (9, 0):
        return f"needs compute capability 9.0, this GPU has {capability[0]}.{capability[1]}"
    if (torch.backends.cudnn.version() or 0) < LEAST_CUDNN:
        return f"cuDNN is {torch.backends.cudnn.version()}; wants {LEAST_CUDNN}"
    return None


def own_part(spec: AttendSpec) -> OwnPart:
    """cuDNN for as many keys as rows, because then its mask is the same from either corner."""

    def run(q: Tensor, n: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if k.shape[2] == n:
            k, v = (F.pad(t, (0, 0, 0, q.shape[2] - n)) for t in (k, v))  # which no row sees
            out, logs, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, True, scale=spec.scale
            )
            return out[:, :, :n], logs.view(q.shape[1:3])[:, :n]
        rows = q[:, :, :n]
        out, logs, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            rows, k, v, 0.0, True, scale=spec.scale
        )
        return out, logs[0]

    return run


def block_part(spec: AttendSpec) -> Part:
    """Keys that every row sees."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        (_, n_head, n_row, dim), n_kv = q.shape, k.shape[1]
        heads = q.reshape(1, n_kv, n_head // n_kv * n_row, dim)
        out, logs, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            heads, k, v, None, True, scale=spec.scale
        )
        return out.reshape(q.shape), logs.reshape(n_head, n_row)

    return run


def by_blocks(spec: AttendSpec, without: Run, own: OwnPart, block: Part) -> Run:
    """without: takes the prompts for which blocks are not worth it."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not takes(len(q), len(k)):
            return without(q, k, v)
        n, blocks = len(q), cut(len(k) - len(q))
        rows = F.pad(q.to(k.dtype), (0, 0, 0, 0, 0, -n % ROWS)).transpose(0, 1).contiguous()[None]
        keys, values = (t.transpose(0, 1)[None] for t in (k, v))
        first = blocks[-1][1]
        out, logs = own(rows, n, keys[:, :, first:], values[:, :, first:])
        sums, logs = out[0].float(), logs.float()
        for start, end in blocks:
            other, of_block = block(rows, keys[:, :, start:end], values[:, :, start:end])
            of_block = of_block[:, :n].float()
            sums.lerp_(other[0, :, :n].float(), (of_block - logs).sigmoid()[..., None])
            logs = torch.logaddexp(logs, of_block)
        return sums.transpose(0, 1)

    return run


def warm(run: Run, spec: AttendSpec, n_key: int) -> None:
    """Load the library, which takes a second, before the first prompt, if a slot may hold a block. Plans belong to a thread and are made on
    demand, 40 ms each."""
    if n_key >= BLOCKS[-1] + LEAST:
        shape = BLOCKS[-1] + LEAST, spec.n_kv_head, spec.head_dim
        keys = torch.zeros(shape, dtype=spec.kv.half, device=spec.device)
        run(torch.zeros(LEAST, spec.n_head, spec.head_dim, device=spec.device), keys, keys)
