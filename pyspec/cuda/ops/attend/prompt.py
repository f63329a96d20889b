"""`attend_prompt`: causal attention of a prompt's many rows, by the library's kernel over keys gathered from their pages.

Our own kernel reads keys once for few rows; with hundreds of rows attention is arithmetic, where the library is near the tensor
cores' peak and a copy of the keys costs little. Which of the two a sequence takes depends on its own rows and keys alone, so
its bits do not depend on its neighbours.

    q     [row, head, dim]  f32
    k, v  [key, kv, dim]    f16 or bf16, both the same, for any types of the pool; the rows are those of the last keys
    out   [row, head, dim]  f32
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.context import per_device
from pyspec.cuda.kernel_context import current
from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.attend import prompt_blocks
from pyspec.cuda.ops.attend.cases import usual
from pyspec.cuda.ops.attend.cuda import FEW, MANY, SPLIT
from pyspec.cuda.ops.attend.ref import Attend, AttendSpec, first_seen, key_rows
from pyspec.slots.batch import Batch, Seq
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.kv_types import type_of

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}

Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def reference(spec: AttendSpec) -> Run:
    """With the mask written out, in f32."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, n_key = len(q), len(k)
        seen = torch.ones(n, n_key, dtype=torch.bool, device=q.device).tril(n_key - n)
        k, v = (
            t.float().repeat_interleave(spec.n_head // spec.n_kv_head, 1).transpose(0, 1) for t in (k, v)
        )
        o = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=seen, scale=spec.scale)
        return o.transpose(0, 1)

    return run


def by_torch(spec: AttendSpec) -> Run:
    """torch's flash attention, called by its own name: torch's choice between libraries takes longer than the kernel on short prompts,
    and the mask's module imports all of torch's compiler, a second or more (docs/log.md). Its mask is that of the last rows."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [t.transpose(0, 1)[None] for t in (q.to(k.dtype), k, v)]
        return flash(*parts, 0.0, True, scale=spec.scale)[0][0].transpose(0, 1).float()

    return run


def by_cudnn(spec: AttendSpec) -> Run:
    """The library, and cuDNN for whole blocks of the keys before the rows."""
    own, block = prompt_blocks.own_part(spec), prompt_blocks.block_part(spec)
    return prompt_blocks.by_blocks(spec, by_torch(spec), own, block)


Case = tuple[int, int, torch.dtype]  # rows, keys


def check(launch: Run, other: Run, spec: AttendSpec) -> str | None:
    """As many keys as rows, and more."""
    return _compared(launch, other, spec, ((MANY, MANY, torch.float16), (300, 1500, torch.bfloat16)))


def check_blocks(launch: Run, other: Run, spec: AttendSpec) -> str | None:
    """Behind blocks of three sizes, and without any."""
    behind = sum(prompt_blocks.BLOCKS[-3:])
    n = prompt_blocks.LEAST
    return _compared(launch, other, spec, ((n, n, torch.bfloat16), (n, behind + n + 7, torch.float16)))


def _compared(launch: Run, other: Run, spec: AttendSpec, cases: Sequence[Case]) -> str | None:
    gen = torch.Generator().manual_seed(0)
    for n, n_key, dtype in cases:
        q = torch.randn(n, spec.n_head, spec.head_dim, generator=gen).to(spec.device)
        q *= usual(spec.scale, spec.head_dim)
        k, v = (
            torch.randn(n_key, spec.n_kv_head, spec.head_dim, generator=gen).to(spec.device, dtype)
            for _ in "kv"
        )
        got, want = launch(q, k, v), other(q, k, v)
        if not (off := float(((got - want).norm(dim=-1) / want.norm(dim=-1)).amax())) < TOLERANCE[dtype]:
            return f"a row differs from the reference by {off:.2g} of its norm"
    return None


def shapes(device: torch.device) -> list[AttendSpec]:
    """27B."""
    return [AttendSpec(device, 24, 4, 256, 0.0625)]


attend_prompt: Op[AttendSpec, Run] = Op(  # without the library, `attend` takes prompts, too
    "attend_prompt",
    Impl("attend", reference),
    [Impl("library", by_torch, prompt_blocks.of_libraries)],
    check,
    home="pyspec.cuda.ops.attend.prompt:attend_prompt",
    named="attend",
    shapes=shapes,
)
# The same behind many keys; without it the library takes those, too
attend_blocks: Op[AttendSpec, Run] = Op(
    "attend_blocks",
    Impl("attend", reference),
    [Impl("cudnn", by_cudnn, prompt_blocks.limits)],
    check_blocks,
    home="pyspec.cuda.ops.attend.prompt:attend_blocks",
    named="attend",
    shapes=shapes,
)


def prompts(spec: AttendSpec) -> Run:
    """The library, and cuDNN behind many keys, where it is faster, once its check has passed. The check takes seconds because it loads cuDNN,
    so neither a load nor a round waits for it: until then the library takes these prompts, too."""
    short, blocks = attend_prompt.bind(spec), by_cudnn(spec)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not prompt_blocks.takes(len(q), len(k)):
            return short(q, k, v)
        is_right = spec in attend_blocks.decided and attend_blocks.runs_as("cudnn", spec)
        return (blocks if is_right else short)(q, k, v)

    return run


def with_prompts(own: Attend, spec: AttendSpec) -> Attend:
    """`own` for all but the long sequences of a causal batch. Those go to the library; or, where it does not run, with sinks, with capped
    scores, with a window and with `--exact`, to `own` as few rows at a time as its partial sums have room for."""
    if spec.device.type != "cuda":
        return own
    return beside(own, prompts(spec)) if takes_prompts(spec) else in_pieces(own)


def takes_prompts(spec: AttendSpec) -> bool:
    """Whether the library attends for prompts of such heads, windows apart."""
    if current().is_exact or spec.device.type != "cuda" or spec.has_sinks or spec.cap:
        return False
    return attend_prompt.chosen(spec) is not attend_prompt.reference


def is_long(seq: Seq, n_key: int) -> bool:
    """Whether the library takes the sequence: it has many rows, which a graph never holds of one sequence, or it is a piece of a prompt
    after many keys, for which our own kernel's partial sums would take more memory than planned."""
    return seq.width >= MANY or (seq.keep and seq.width > FEW and seq.width * -(-n_key // SPLIT) > MANY)


def _long(batch: Batch) -> list[int]:
    return [i for i, seq in enumerate(batch.seqs) if is_long(seq, batch.max_hi[i])]


def in_pieces(own: Attend) -> Attend:
    def attend(
        q: Tensor,
        pool: KVPool,
        batch: Batch,
        window: int = 0,
        sinks: Tensor | None = None,
        **more: Tensor | None,
    ) -> Tensor:
        is_cut = batch.bucket is None and (batch.causal or batch.ahead > 0)
        long = _long(batch) if is_cut else []
        if not long:
            return own(q, pool, batch, window, sinks, **more)
        out = _of_others(own, q, pool, batch, long, window, sinks)
        for i in long:
            for part, few in _pieces(q.device).of(batch, i, window):
                out[part] = own(q[part], pool, few, window, sinks)
        return out

    return attend


def _of_others(
    own: Attend,
    q: Tensor,
    pool: KVPool,
    batch: Batch,
    long: Sequence[int],
    window: int,
    sinks: Tensor | None,
) -> Tensor:
    """Outputs of all rows, those of long sequences still empty."""
    out = torch.empty_like(q)
    if (others := _others(q.device).of(batch, long)) is not None:
        out[others.rows] = own(q[others.rows], pool, others.batch, window, sinks)
    return out


class _Pieces:
    """Sequences of a batch cut so that our own kernel has room for the sums; kept for the other layers of a forward."""

    def __init__(self, device: torch.device) -> None:
        self.whole: Batch | None = None
        self.found: dict[tuple[int, int], list[tuple[slice, Batch]]] = {}

    def of(self, batch: Batch, i: int, window: int = 0) -> list[tuple[slice, Batch]]:
        """(rows of the whole, batch of them alone)."""
        if self.whole is not batch:
            self.whole, self.found = batch, {}
        if (i, window) not in self.found:
            width, start = batch.seqs[i].width, batch.starts[i]
            step = piece_rows(batch.max_hi[i], window, batch.page_size, batch.ahead)
            cuts = [(first, min(step, width - first)) for first in range(0, width, step)]
            self.found[i, window] = [
                (slice(start + first, start + first + n), piece(batch, i, first, n, window))
                for first, n in cuts
            ]
        return self.found[i, window]


_pieces = per_device(_Pieces)


def piece_rows(n_key: int, window: int, page_size: int, ahead: int = 0) -> int:
    """Rows of a piece whose partial sums have room, of a sequence of `n_key` keys. ahead: as of the batch."""
    if window and not current().is_exact:  # what such a piece sees, from the first of its pages on
        n_key = min(n_key, abs(window) + _step(window, page_size) + MANY + ahead)
    return max(FEW, MANY // -(-n_key // SPLIT))


def _step(window: int, page_size: int) -> int:
    """Positions that may be left out at once: whole pages, and whole chunks."""
    return math.lcm(page_size, -window) if window < 0 else page_size


def piece(batch: Batch, i: int, first: int, n: int, window: int = 0) -> Batch:
    """`n` rows of sequence i alone, from its row `first` on. Pages that a window hides from all of them are left out, but with `--exact`,
    where keys are summed from the first one on as they are for few rows."""
    seq, start = batch.seqs[i], batch.starts[i] + first
    rows, device, at = slice(start, start + n), batch.positions.device, seq.n_past + first
    past, step = 0, _step(window, batch.page_size)
    if window and not current().is_exact:
        past = max(0, first_seen(at, window)) // step * step
    own = replace(seq, n_past=at - past, tokens=seq.tokens[first : first + n], n_out=0)
    return replace(
        batch,
        seqs=[own],
        starts=[0, n],
        positions=batch.positions[rows] - past,
        lo=(batch.lo[rows] - past).clamp_(min=0),
        hi=batch.hi[rows] - past,
        page_table=batch.page_table[i : i + 1, past // batch.page_size :],
        seq_start=torch.tensor([0, n], dtype=torch.int32, device=device),
        row_seq=torch.zeros(n, dtype=torch.int32, device=device),
        max_hi=[min(at + n + seq.slack + batch.ahead, batch.max_hi[i]) - past],
    )


def beside(own: Attend, prompt: Run) -> Attend:
    cut = in_pieces(own)

    def attend(
        q: Tensor,
        pool: KVPool,
        batch: Batch,
        window: int = 0,
        sinks: Tensor | None = None,
        **more: Tensor | None,
    ) -> Tensor:
        if batch.prompt:
            assert window == 0, "a model with windows has no graphs of prompts"
            return prompt(q, *own_keys(pool, batch)).contiguous()
        if window or sinks is not None or batch.ahead:
            return cut(q, pool, batch, window, sinks, **more)
        takes = batch.causal and batch.bucket is None
        long = _long(batch) if takes and not pool.kv.has_f32 else []
        if not long:
            return own(q, pool, batch, window, sinks, **more)
        if len(batch.seqs) == 1:
            return prompt(q, *keys_of(pool, batch, 0)).contiguous()
        out = _of_others(own, q, pool, batch, long, window, None)
        for i in long:
            rows = slice(batch.starts[i], batch.starts[i + 1])
            out[rows] = prompt(q[rows], *keys_of(pool, batch, i))
        return out

    return attend


def own_keys(pool: KVPool, batch: Batch) -> tuple[Tensor, Tensor]:
    """Keys and values of a prompt that runs alone, padded to the rows of its graph. Masked values must be numbers, so the padding repeats the
    first token's."""
    rows = torch.where(batch.row_seq >= 0, batch.kv_rows, batch.kv_rows[0])
    return pool.read(rows, pool.kv.half)


def keys_of(pool: KVPool, batch: Batch, i: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a sequence in a type that the library takes. They are not copied if its pages follow each other in the pool."""
    half = pool.kv.half
    n, size, at = batch.max_hi[i], batch.page_size, _run_of(batch, i)
    if at is None or pool.kv != KvFormat.both(type_of(half)):
        return pool.read(key_rows(batch, i), half)
    rows = slice(at * size, at * size + n)
    return pool.k[rows], pool.v[rows]


def _run_of(batch: Batch, i: int) -> int | None:
    """The first page of a sequence whose pages follow each other; None of others."""
    n = -(-batch.max_hi[i] // batch.page_size)
    pages = batch.pages[i][:n].tolist() if i < len(batch.pages) else []
    return pages[0] if len(pages) == n and pages == list(range(pages[0], pages[0] + n)) else None


@dataclass(frozen=True, slots=True)
class _Part:
    whole: Batch
    rows: Tensor  # [row] of the whole
    batch: Batch


class _Others:
    """The batch without its long sequences; kept for the other layers of a forward."""

    def __init__(self, device: torch.device) -> None:
        self.last: _Part | None = None

    def of(self, batch: Batch, long: Sequence[int]) -> _Part | None:
        """None where all are long."""
        if len(long) == len(batch.seqs):
            return None
        last = self.last
        if last is None or last.whole is not batch:
            last = self.last = _without(batch, set(long))
        return last


_others = per_device(_Others)


def _without(batch: Batch, long: set[int]) -> _Part:
    which = [i for i in range(len(batch.seqs)) if i not in long]
    starts, rows = [0], list[int]()
    for i in which:
        rows += range(batch.starts[i], batch.starts[i + 1])
        starts.append(len(rows))
    device = batch.positions.device
    at = torch.tensor(rows, device=device)
    part = replace(
        batch,
        seqs=[batch.seqs[i] for i in which],
        starts=starts,
        positions=batch.positions[at],
        lo=batch.lo[at],
        hi=batch.hi[at],
        page_table=batch.page_table[torch.tensor(which, device=device)],
        seq_start=torch.tensor(starts, dtype=torch.int32, device=device),
        row_seq=torch.tensor(
            [k for k, i in enumerate(which) for _ in batch.seqs[i].tokens],
            dtype=torch.int32,
            device=device,
        ),
        max_hi=[batch.max_hi[i] for i in which],
    )
    return _Part(batch, at, part)
