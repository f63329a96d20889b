"""Hostile calls of the CPU's kernels over tokens, rings and rows of several tokens, each against its reference. A rig is a function that returns a
sentence for a fault, or None."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pyspec.cpu.tape import Recorded, TapeMemory
from pyspec.cpu.tensors import write_keys
from pyspec.cuda import faults
from pyspec.cuda.op import Op
from pyspec.cuda.ops.compress.op import compress
from pyspec.cuda.ops.compress.ref import CompressSpec
from pyspec.cuda.ops.gated_streams.op import gated_streams
from pyspec.cuda.ops.gated_streams.ref import GatedStreamsSpec
from pyspec.cuda.ops.index_rows.op import index_rows
from pyspec.cuda.ops.index_rows.ref import IndexSpec
from pyspec.cuda.ops.ngrams.op import ngrams
from pyspec.cuda.ops.ngrams.op import shapes as shapes_of_ngrams
from pyspec.cuda.ops.ragged import Ragged, place
from pyspec.cuda.ops.rope_tail.op import rope_tail
from pyspec.cuda.ops.rope_tail.ref import RopeTailSpec
from pyspec.cuda.ops.seen_pages.op import seen_pages
from pyspec.cuda.ops.seen_pages.ref import SeenPagesSpec
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.kv_types import TYPES, KvType

CPU = torch.device("cpu")
F16, BF16, F32, F8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn
Rig = Callable[[], str | None]


def token_rigs() -> Iterator[tuple[str, Rig]]:
    """All of them by name."""
    grams = replace(shapes_of_ngrams(CPU)[0], n=52)
    large = (1 << 64) - 3, (1 << 63) + 5
    specs: list[tuple[Op[Any, Any], Any]] = [
        *((gated_streams, GatedStreamsSpec(CPU, s, n, 1e-6)) for s, n in ((4, 64), (3, 61), (2, 1001))),
        (ngrams, grams),
        (ngrams, replace(grams, n_gram=2, multipliers=large, sizes=(127, 3), offsets=(5, 300), n_tap=3)),
        *((compress, CompressSpec(CPU, 4, 64, True, 16, 1e-6, kv)) for kv in (F16, F32, F8)),
        (compress, CompressSpec(CPU, 128, 32, False, 32, 1e-6, F16)),
        (compress, CompressSpec(CPU, 4, 40, False, 8, 1e-6, BF16, weighed=False)),
        (compress, CompressSpec(CPU, 4, 40, False, 2, 1e-6, F16, normed=False)),
        (index_rows, IndexSpec(CPU, 64, 128, 70, 4, F16, 64)),
        (index_rows, IndexSpec(CPU, 2, 32, 6, 4, F32, 8)),
        (index_rows, IndexSpec(CPU, 5, 40, 11, 1, BF16, 16)),
        *((seen_pages, SeenPagesSpec(CPU, r, k)) for r, k in ((4, 7), (1, 8), (3, 5), (64, 2))),
        *((rope_tail, RopeTailSpec(CPU, 64, n, bool(n % 3), 1e-6)) for n in (64, 6)),
    ]
    for op, spec in specs:
        yield f"{op.name} {spec}", partial(_checks, op, spec)
    for name, of in TYPES.items():
        yield f"write_keys {name}", partial(_writes_as_the_pool, of)
    yield "a chosen block out of bounds", _reports_a_block


def _own(op: Op[Any, Any], spec: Any) -> Any:
    impl = next(impl for impl in op.impls if impl.name == "cpu")
    assert impl.limits(spec) is None, impl.limits(spec)
    return impl.bind(spec)


def _checks(op: Op[Any, Any], spec: Any) -> str | None:
    assert op.check is not None
    return op.check(_own(op, spec), op.reference.bind(spec), spec) or _fault()


def _fault() -> str | None:
    found = faults.record(CPU)
    text = f"a guard tripped: {found.tolist()}" if found[0] else None
    found.zero_()
    return text


def _writes_as_the_pool(of: KvType) -> str | None:
    """A recorded write of strided rows has the bytes of the pool's own."""
    pools = [KVPool(9, 2, 64, KvFormat(of, of), CPU, keys_only=True) for _ in range(2)]
    rows, room = torch.tensor([7, 0, 3, 8]), torch.randn(4, 150)
    keys = room[:, 9:137].view(4, 2, 64)
    Recorded(lambda: write_keys(pools[0], rows, keys), TapeMemory()).replay()
    pools[1].write(rows, keys, None)
    for got, want in zip(pools[0].planes, pools[1].planes, strict=True):
        if not torch.equal(got.view(torch.uint8), want.view(torch.uint8)):
            return "bytes differ from the pool's own"
    return None


def _reports_a_block() -> str | None:
    spec = SeenPagesSpec(CPU, 4, 3)
    batch = place(Ragged([(20, 1)]), CPU).plain
    _own(seen_pages, spec)(torch.tensor([[1, 1 << 20, -1]], dtype=torch.int32), batch)
    return None if _fault() else "nothing is reported"
