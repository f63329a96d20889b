"""The ops that a load will bind, read from its description: kernels are compiled and checked before layers wait for them.

A fold over the target's blocks and the drafter's, in the order in which a load comes to them. An op that is missing here is compiled and
checked when it is bound; one too many costs a check in a child. `tests/engine/test_asks.py` holds the list against the ops of loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from pyspec.config import EngineSettings
from pyspec.cuda.ops.ahead.op import ahead
from pyspec.cuda.ops.ahead.ref import AheadSpec
from pyspec.cuda.ops.angles.op import angles
from pyspec.cuda.ops.attend.prompt import attend_blocks, attend_prompt
from pyspec.cuda.ops.best.op import best
from pyspec.cuda.ops.best.ref import BestSpec
from pyspec.cuda.ops.embed.op import embed
from pyspec.cuda.ops.embed.ref import EmbedSpec
from pyspec.cuda.ops.linear.cpu import CpuLinearSpec, has_eight
from pyspec.cuda.ops.linear.op import linear, linear_cpu, linear_many, linear_tall
from pyspec.cuda.ops.linear.ref import PROBE_ROWS, Epilogue, LinearSpec
from pyspec.cuda.ops.ring_places.op import ring_places
from pyspec.cuda.ops.ring_places.ref import RingPlacesSpec
from pyspec.cuda.rank import Rank
from pyspec.engine.plan.describe import Description, describe, rings_of
from pyspec.engine.plan.memory_plan import AssumedGpu
from pyspec.gguf import GGUFFile, TensorInfo
from pyspec.models.cuts import share_of
from pyspec.models.kernels import is_streamed, of_model
from pyspec.models.part import LoadTypes, Request
from pyspec.models.wants import EMBEDDING, WHOLE, Want
from pyspec.models.weights import PLAIN

ORDER = {
    attend_prompt.name: -2,  # it loads a library,
    angles.name: -1,
    attend_blocks.name: 1,  # and so does this one, for which no load waits
}


def asks_of(d: Description) -> list[Request]:
    """(op, spec), each once."""
    on = d.on
    found = [*_embedding(d), *_products(d, on), *_rings(d), *of_model(d.own, d.file, on)]
    drafter = replace(on, kv=d.draft_kv, n_rank=d.draft.n_rank, placement=d.draft_placement)
    found += [*_head_copy(d), *d.draft.requests(drafter)]
    found += [(best, BestSpec(d.device)), (ahead, AheadSpec(d.device))]
    if not d.settings.exact:
        found += [(linear_many, spec) for op, spec in found if op is linear_tall]
    found.sort(key=lambda ask: ORDER.get(ask[0].name, 0))
    return list({(op.name, spec): (op, spec) for op, spec in found}.values())


def asks_of_file(path: Path, draft_path: Path | None, kv_type: str = "f16") -> list[Request]:
    """Those of a model as a server would load it on a GPU with memory enough; there need not be one. A drafter of the file's own is used."""
    settings = EngineSettings(draft_path=draft_path, kv_type=kv_type)
    return asks_of(describe(path, settings, AssumedGpu(free=1 << 50)))


def _embedding(d: Description) -> Iterator[Request]:
    if (table := d.file.tensors.get(EMBEDDING)) is not None:
        yield embed, EmbedSpec(d.device, table.type, table.shape[1])


def _rings(d: Description) -> Iterator[Request]:
    """Of a target that keeps windows in rings."""
    if rings_of(d):
        yield ring_places, RingPlacesSpec(d.device)


def _products(d: Description, on: LoadTypes) -> Iterator[Request]:
    """Of the target's matrices, then of those of a drafter's own file."""
    if not on.is_cuda and d.dense is None:
        files = [d.file] if d.draft.file is None else [d.file, d.draft.file]
        types = {
            t.type
            for file in files
            for t in file.tensors.values()
            if len(t.shape) == 2 and t.type not in WHOLE
        }
        yield from ((linear_cpu, CpuLinearSpec(d.device, type)) for type in types)
        if d.settings.cpu_activations == "q8":
            yield from (
                (linear_cpu, CpuLinearSpec(d.device, type, 8)) for type in types if has_eight(type)
            )
    if not on.streams:
        return
    wants = {**d.draft.wants, **d.config.tensors(d.file)}
    yield from _products_of(d.file, wants, d, d.settings.tp)
    if d.draft.file is not None and d.draft.file is not d.file:
        yield from _products_of(d.draft.file, d.draft.wants, d, d.draft.n_rank)


def _products_of(
    file: GGUFFile, wants: Mapping[str, Want], d: Description, n_rank: int
) -> Iterator[Request]:
    """Products that decide how matrices are packed, then those of many rows, those with gates apart, which blocks ask for. All are asked of
    small ones (`weights.tier_of`)."""
    matrices = [t for t in file.tensors.values() if is_streamed(t, file)]
    small = [LinearSpec(d.device, t.type, PROBE_ROWS, _columns(t, wants, n_rank)) for t in matrices]
    for spec in small:
        yield from ((linear, replace(spec, epilogue=e)) for e in Epilogue)
    for t, spec in zip(matrices, small, strict=True):
        ways = tuple(Epilogue) if t.type in PLAIN else (Epilogue.PLAIN, Epilogue.RESIDUAL)
        yield from ((linear_tall, replace(spec, epilogue=e)) for e in ways)


def _columns(t: TensorInfo, wants: Mapping[str, Want], n_rank: int) -> int:
    """Of a rank's share."""
    want = wants.get(t.name) if n_rank > 1 else None
    if want is None or want.cut is None or want.cut.axis != 1:
        return t.shape[1]
    return share_of(t, want.cut, Rank(0, n_rank)).info.shape[1]


def _head_copy(d: Description) -> Iterator[Request]:
    """Products of the coarse copy of the head, if drafts read one."""
    if d.head is None:
        return
    small = LinearSpec(d.device, d.head.to, PROBE_ROWS, d.head.info.shape[1])
    for way in (Epilogue.PLAIN, Epilogue.RESIDUAL):
        yield from ((op, replace(small, epilogue=way)) for op in (linear, linear_tall))
