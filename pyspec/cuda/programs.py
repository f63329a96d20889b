"""Which programs an op's own kernels are, in one shape: so that they can be compiled before somebody waits for them, on any machine.

A list may leave something out (that is compiled when it is asked for) or have something that no batch needs; tests hold it against what
launchers compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from pyspec.cuda.jit import GpuKind, Program
from pyspec.cuda.ops.attend import cuda as attend_cuda
from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.cuda.ops.best import cuda as best_cuda
from pyspec.cuda.ops.compress import cuda as compress_cuda
from pyspec.cuda.ops.embed import cuda as embed_cuda
from pyspec.cuda.ops.gdn import chunk as gdn_chunk
from pyspec.cuda.ops.gdn import cuda as gdn_cuda
from pyspec.cuda.ops.gdn.ref import GdnSpec
from pyspec.cuda.ops.index_rows import cuda as index_cuda
from pyspec.cuda.ops.index_rows.ref import IndexSpec
from pyspec.cuda.ops.linear import cuda as linear_cuda
from pyspec.cuda.ops.linear import pair as linear_pair
from pyspec.cuda.ops.linear import wgmma as linear_wgmma
from pyspec.cuda.ops.linear.pack import CHUNKS
from pyspec.cuda.ops.linear.ref import LinearSpec
from pyspec.cuda.ops.mamba2 import chunk as mamba2_chunk
from pyspec.cuda.ops.mamba2 import cuda as mamba2_cuda
from pyspec.cuda.ops.mamba2.ref import Mamba2Spec
from pyspec.cuda.ops.moe.builds import (
    ACTS,
    ADDING,
    BUILDS,
    MANY_PAIRS,
    NONE,
    MoeBuild,
    layout_of,
    n_stages,
    residents,
    splits,
)
from pyspec.cuda.ops.moe.ref import MoeSpec
from pyspec.cuda.ops.moe_route import cuda as route_cuda
from pyspec.cuda.ops.norms import cuda as norms_cuda
from pyspec.cuda.ops.rope_kv import cuda as rope_kv_cuda
from pyspec.cuda.ops.rope_kv.ref import RopeKvSpec
from pyspec.cuda.ops.rope_tail import cuda as tail_cuda
from pyspec.cuda.ops.rows import cuda as rows_cuda
from pyspec.cuda.ops.rows.ref import PrepKind, RowsSpec
from pyspec.cuda.ops.sparse_attend import cuda as sparse_cuda
from pyspec.cuda.ops.streams import cuda as streams_cuda

Programs = Iterable[Program]
HOPPER = (9, 0)


def programs(op: str, impl: str, spec: Any, target: GpuKind, kv: torch.dtype = torch.float16) -> list[Program]:
    """What `impl` of `op` compiles for `spec`; none for implementations that NVRTC has no part in. kv: the type of keys, where a spec does not say."""
    if impl not in ("cuda", "wgmma"):
        return []
    if op == "rope_kv":
        return list(dict.fromkeys(_rope_kv(spec, target, kv)))
    make = _MAKERS.get(op)
    return [] if make is None else list(dict.fromkeys(make(spec, target)))


def _one(stem: str, defines: Callable[[Any], dict[str, int | str]]) -> Callable[[Any, GpuKind], Programs]:
    return lambda spec, target: [target.program(stem, defines(spec))]


def _nothing(spec: object) -> dict[str, int | str]:
    return {}


def _rows_of(n_in: int, kind: PrepKind, dim: int, layout: int, target: GpuKind) -> Program:
    return target.program("rows", rows_cuda.defines(n_in, kind, dim, layout))


def _rows(spec: RowsSpec, target: GpuKind) -> Programs:
    """As a library's rows, which is how it is checked, and as our products read them."""
    layouts = [rows_cuda.ROW_MAJOR, rows_cuda.BLOCKED]
    layouts += [rows_cuda.TALL] if target.capability == HOPPER else []
    for kind, dim in ((PrepKind.PLAIN, 0), (spec.kind, spec.dim)):
        yield from (_rows_of(spec.n_in, kind, dim, layout, target) for layout in layouts)
    yield target.program("rows_finish")


def _linear(spec: LinearSpec, target: GpuKind) -> Programs:
    type, capability, stem = spec.type, target.capability, linear_cuda.stem(target.capability)
    shared, shapes = linear_cuda.n_shared(capability), linear_cuda.fitting(type, capability)
    for shape in shapes:
        if spec.parts == 1 and linear_pair.takes(spec, shape.rows, shared):
            yield target.program(
                "linear_pair", linear_pair.defines(type, shape.rows, spec.epilogue, spec.limit, spec.hands)
            )
        stages = linear_cuda.n_stages(type, shape, capability)
        yield target.program(stem, linear_cuda.defines(type, shape, stages, linear_cuda.build_of(spec)))
    if shapes:
        yield _rows_of(spec.n_in, PrepKind.PLAIN, 0, rows_cuda.BLOCKED, target)


def _linear_tall(spec: LinearSpec, target: GpuKind) -> Programs:
    if target.capability != HOPPER:
        return
    for pad in linear_wgmma.PADS:
        macros = linear_wgmma.defines(spec.type, pad, spec.epilogue, limit=spec.limit)
        yield Program.of("linear_wgmma", "sm_90a", macros)
    yield _rows_of(spec.n_in, PrepKind.PLAIN, 0, rows_cuda.TALL, target)


def _attend(spec: AttendSpec, target: GpuKind) -> Programs:
    if spec.kv is torch.float32 or spec.head_dim not in attend_cuda.DIMS:
        plain = {"DIM": spec.head_dim, "KV_KIND": attend_cuda.KINDS[spec.kv], "HAS_SINKS": int(spec.has_sinks)}
        yield target.program("attend_plain", plain | {"OP_ID": attend_cuda.OP_ID})
        return
    for n_tile in attend_cuda.N_TILES:
        shape = attend_cuda.shape_for(spec.head_dim, n_tile, spec.kv, target.arch, spec.has_sinks)
        yield target.program("attend", shape.defines())


def _rope_kv(spec: RopeKvSpec, target: GpuKind, kv: torch.dtype) -> Programs:
    yield target.program("rope_kv", rope_kv_cuda.defines(spec, attend_cuda.KINDS[kv]))


def _gdn(spec: GdnSpec, target: GpuKind) -> Programs:
    for columns in gdn_cuda.COLUMNS:
        yield target.program("gdn", gdn_cuda.defines(spec.shape, target.arch, columns))
    yield target.program("gdn_chunk", gdn_chunk.defines(spec.shape, target.arch))
    n_in = spec.shape.n_v_head * gdn_cuda.DIM
    yield _rows_of(n_in, PrepKind.HEADS, gdn_cuda.DIM, rows_cuda.BLOCKED, target)  # its check wants both
    yield _rows_of(n_in, PrepKind.PLAIN, 0, rows_cuda.BLOCKED, target)


def _mamba2(spec: Mamba2Spec, target: GpuKind) -> Programs:
    shape, n = spec.shape, target.n_multiprocessor
    for columns in mamba2_cuda.columns_of(shape):
        yield target.program("mamba2", mamba2_cuda.defines(shape, target.arch, columns))
    chunk, most = mamba2_chunk.cut(shape, target.arch)
    yield target.program("mamba2_chunk", mamba2_chunk.defines(shape, chunk, most))
    if most == 64 and (not n or mamba2_chunk.narrow(shape, 1, n)):
        yield target.program("mamba2_chunk", mamba2_chunk.defines(shape, chunk, 32))


def _norms(spec: Any, target: GpuKind) -> Programs:
    yield target.program("norms", norms_cuda.defines(spec.n, spec.layer))


def _moe(spec: MoeSpec, target: GpuKind) -> Programs:
    if spec.up is None or spec.down is None or not _fits(spec, target):
        return
    for type, act, next, limit in ((spec.up, ACTS[spec.act], spec.down, spec.limit), (spec.down, NONE, None, 0.0)):
        inner = next is not None
        ways = [(pairs, listed, False) for pairs, listed in BUILDS] + ([] if inner else [(*ADDING, True)])
        for pairs, listed, adds in ways:
            stages = n_stages(type, pairs, target.capability, inner)
            kinds = [(n, False) for n in residents(type, pairs, listed, inner)]
            for resident, split in kinds + [(0, True)] * splits(type, pairs, listed, inner):
                build = MoeBuild(type, pairs, stages, act, inner, listed, adds, next, resident, limit, split)
                yield target.program("moe", build.defines())
    yield target.program("moe_pairs")
    for kind in (PrepKind.PLAIN, PrepKind.NORM):
        yield _rows_of(spec.n_in, kind, 0, layout_of(spec.up), target)


def _fits(spec: MoeSpec, target: GpuKind) -> bool:
    return all(type in CHUNKS and n_stages(type, MANY_PAIRS, target.capability) for type in (spec.up, spec.down))


def _sparse(spec: Any, target: GpuKind) -> Programs:
    for build in dict.fromkeys((*sparse_cuda.builds(spec, target.arch), sparse_cuda.long_build(spec, target.arch))):
        yield target.program("sparse_attend", build.defines())


def _streams(spec: Any, target: GpuKind) -> Programs:
    for n_iter in (spec.n_iter, 0):
        yield target.program("streams", streams_cuda.defines(spec.n, n_iter))


def _index(spec: IndexSpec, target: GpuKind) -> Programs:
    yield target.program("index_rows", index_cuda.defines(spec, index_cuda.scorer_of(spec, target.capability)))


_MAKERS: dict[str, Callable[[Any, GpuKind], Programs]] = {
    "ahead": _one("ahead", _nothing),
    "angles": _one("angles", _nothing),
    "attend": _attend,
    "best": _one("best", lambda spec: best_cuda.defines()),
    "compress": _one("compress", compress_cuda.defines),
    "embed": _one("embed", lambda spec: embed_cuda.defines(spec.type)),
    "gdn": _gdn,
    "index_rows": _index,
    "linear": _linear,
    "linear_tall": _linear_tall,
    "mamba2": _mamba2,
    "moe": _moe,
    "moe_route": _one("moe_route", route_cuda.defines),
    "norms": _norms,
    "rope_tail": _one("rope_tail", tail_cuda.defines),
    "rows": _rows,
    "sparse_attend": _sparse,
    "streams": _streams,
}
