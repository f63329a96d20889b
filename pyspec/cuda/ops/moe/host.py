"""`moe` with experts in the host's memory, some of which also have a slot on the card; one more way that graphs may hold.

Few rows: `moe_lane.cu` sends each row's missing experts to the lane's thread (lane.py), the card computes those of its slots meanwhile, and
whatever else does not depend on them (`begin`), and the last kernel waits for the host and adds. Nothing waits where nothing is missing.

Many rows (`streams_from`): the missing experts come to the card in groups, and their kernels are those of experts on the card. While a group
computes, the copy engine brings the next one, and behind a layer's last group the first ones of the layer behind it.

Bound by the bytes of the missing experts: over the host's memory, or over the link.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyspec.cpu import kernels
from pyspec.cuda import faults, jit
from pyspec.cuda.context import context_of, per_device
from pyspec.cuda.jit import GpuKind, Program
from pyspec.cuda.kernel_context import current
from pyspec.cuda.ops.moe import builds as moe_builds
from pyspec.cuda.ops.moe import cpu as moe_cpu
from pyspec.cuda.ops.moe import cuda as moe_cuda
from pyspec.cuda.ops.moe.cpu import CpuExperts
from pyspec.cuda.ops.moe.cuda import MAX_USED, ExpertsLaunch, PackedStack, pack, pack_inner
from pyspec.cuda.ops.moe.lane import JOB_ROWS, Split, gate, lane_kernels, lane_of
from pyspec.cuda.ops.moe.ref import NOTHING, Added, ExpertsRun, MoeSpec, Stack, Stacks
from pyspec.cuda.ops.repack.op import repack
from pyspec.cuda.ops.repack.ref import Repack, RepackSpec
from pyspec.cuda.ops.rows.ref import Norm
from pyspec.cuda.temporary import release, temporary
from pyspec.gguf import GGMLType

GROUP = (
    64 << 20
)  # bytes of experts that come to the card together: two such buffers, and about four times as much while they are packed
PRODUCTS, LINK = (
    0.3e12,
    24e9,
)  # of a usual host: products of weights a second, where rows are many, and bytes a second to the card
CPU = torch.device("cpu")
_SERIALS = itertools.count()


def limits(spec: MoeSpec) -> str | None:
    if spec.device.type != "cuda":
        return "runs on NVIDIA GPUs only"
    if spec.slots is None:
        return "experts in the host's memory only"
    if spec.n_in % 4 or spec.n_used > MAX_USED:
        return f"{spec.n_used} experts for rows of {spec.n_in} columns"
    if (why := kernels.missing() or moe_cpu.limits(_on_host(spec))) is not None:
        return why
    return moe_cuda.limits(_on_card(spec)) if spec.slots else None


def _may_stream(spec: MoeSpec) -> bool:
    return jit.missing(spec.device) is None and moe_cuda.limits(_on_card(spec)) is None


def _on_host(spec: MoeSpec) -> MoeSpec:
    return replace(spec, device=CPU, slots=None)


def _on_card(spec: MoeSpec) -> MoeSpec:
    return replace(spec, slots=None)


def streams_from(spec: MoeSpec, n_missing: int, n_byte: int) -> int:
    """Rows from which on it is faster to bring `n_missing` experts of `n_byte` each to the card than to compute them on the host."""
    n_weight = spec.n_in * spec.n_ff * (3 if spec.has_gates else 2)
    of_row = spec.n_used * n_weight / PRODUCTS
    return max(JOB_ROWS, int(n_missing * n_byte / LINK / of_row))


def expert_bytes(stacks: Stacks) -> int:
    """Of one expert, as in the file."""
    return sum(s.data.shape[1] for s in _stacks(stacks))


def _stacks(stacks: Stacks) -> Iterator[Stack]:
    yield from (s for s in (stacks.gate, stacks.up, stacks.down) if s is not None)


def _mapped(stacks: Stacks, f: Callable[[Stack], Stack]) -> Stacks:
    of_gate = None if stacks.gate is None else f(stacks.gate)
    return Stacks(of_gate, f(stacks.up), f(stacks.down))


Runs = tuple[slice, ...]
"""Experts of a group in order, neighbours together."""


def _beside(stack: Stack, data: Tensor, experts: Runs) -> Stack:
    """Some experts whose bytes are at `data`, with what belongs to them on its device."""

    def few(own: Tensor | None) -> Tensor | None:
        if own is None:
            return None
        some = torch.cat([own[run] for run in experts])
        # from pages that are not locked a copy would wait for the stream
        return (some.pin_memory() if data.is_cuda else some).to(data.device, non_blocking=True)

    return Stack(data, stack.type, stack.n_out, stack.n_in, few(stack.scale), few(stack.bias))


def _brought(stacks: Stacks, experts: slice, device: torch.device) -> Stacks:
    """Copied in the order of the stream, where the host's memory is locked."""
    return _mapped(
        stacks, lambda s: _beside(s, s.data[experts].to(device, non_blocking=True), (experts,))
    )


@dataclass(slots=True)
class _Buffer:
    """A group's bytes on the card. key: whose they are; there: they have come; free: they have been read."""

    data: Tensor
    there: Any
    free: Any
    key: object = None


class _Staging:
    """Two buffers, and the stream that fills them."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        stream = torch.cuda.Stream(device) if self.is_cuda else None
        if stream is not None:
            context_of(device).copies.add(stream)
        self.stream: Any = stream
        event = torch.cuda.Event if self.is_cuda else object
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        self.buffers = [_Buffer(empty, event(), event()) for _ in "ab"]

    def fetch(self, key: object, stacks: Stacks, experts: Runs) -> _Buffer:
        """The buffer with the bytes of these experts, which may be on their way."""
        for buffer in self.buffers:
            if buffer.key == key:
                return buffer
        buffer = self.buffers[0]
        self.buffers.reverse()
        n_byte = sum(run.stop - run.start for run in experts) * expert_bytes(stacks)
        buffer.key = None  # until all copies are under way: memory may be short
        if len(buffer.data) < n_byte:
            buffer.data = buffer.data.new_empty(max(n_byte, GROUP))
            if self.is_cuda:  # whoever had this memory before may still read it
                buffer.data.record_stream(self.stream)
                self.taken(buffer)
        with torch.cuda.stream(self.stream) if self.is_cuda else nullcontext():
            if self.is_cuda:
                self.stream.wait_event(buffer.free)
            for own, to in self._parts(buffer, stacks, experts):
                at = 0
                for run in experts:
                    n = run.stop - run.start
                    to[at : at + n].copy_(own[run], non_blocking=True)
                    at += n
            if self.is_cuda:
                buffer.there.record(self.stream)
        buffer.key = key
        return buffer

    def _parts(self, buffer: _Buffer, stacks: Stacks, experts: Runs) -> Iterator[tuple[Tensor, Tensor]]:
        """Of which the experts are copied, and where to: gates and ups that lie together are one piece."""
        at, n = 0, sum(run.stop - run.start for run in experts)
        datas = [s.data for s in _stacks(stacks)]
        if is_fused(stacks):
            up = datas[1]
            datas[:2] = [datas[0].as_strided((len(up), 2 * up.shape[1]), (up.stride(0), 1))]
        for data in datas:
            yield data, buffer.data[at : at + n * data.shape[1]].view(n, -1)
            at += n * data.shape[1]

    def take(self, buffer: _Buffer, stacks: Stacks, experts: Runs) -> Stacks:
        """The group as stacks on the card, behind its copies. Call `taken` when all reads of it are launched."""
        if self.is_cuda:
            torch.cuda.current_stream(buffer.data.device).wait_event(buffer.there)
        datas = [to for _, to in self._parts(buffer, stacks, experts)]
        if is_fused(stacks):
            datas[:1] = datas[0].chunk(2, 1)
        own = iter(datas)
        return _mapped(stacks, lambda s: _beside(s, next(own), experts))

    def taken(self, buffer: _Buffer) -> None:
        if self.is_cuda:
            buffer.free.record(torch.cuda.current_stream(buffer.data.device))


def is_fused(stacks: Stacks) -> bool:
    """Whether an expert's ups lie behind its gates."""
    gate, up = stacks.gate, stacks.up
    if gate is None or gate.data.stride(0) != 2 * gate.data.shape[1]:
        return False
    return up.data.data_ptr() == gate.data.data_ptr() + gate.data.shape[1]


_staging = per_device(_Staging)


@per_device
def _launches(device: torch.device) -> dict[MoeSpec, ExpertsLaunch]:
    """Those of groups, which layers of one shape share."""
    return {}


@per_device
def _made(device: torch.device) -> list[weakref.ref[HostExperts]]:
    """Layers in the order in which they were made, which is that of their models."""
    return []


def take_layers(device: torch.device) -> list[HostExperts]:
    """Those that were made on the device since the last call."""
    made = _made(device)
    found = [layer for ref in made if (layer := ref()) is not None and not layer.is_taken]
    del made[:-1]
    for layer in found:
        layer.is_taken = True
    return found


class HostExperts:
    """Experts of a layer in the host's memory. Implements `ExpertsRun`.

    counts        [2] int64 on the host: experts of rows that the lane has computed, and its jobs
    streams_from  rows from which on they come to the card
    n_byte        of an expert, as in the file; link: such bytes a second that usually come to the card
    most_rows     of a job
    behind        the layer behind this one
    used          [JOB_ROWS, n_used] int16 on the card, a part of wider rows: where rows of one job write their experts, as moe_lane.cu says;
                  None: nowhere
    """

    def __init__(self, spec: MoeSpec, stacks: Stacks) -> None:
        assert spec.slots is not None and all(s.data.device.type == "cpu" for s in _stacks(stacks))
        self.spec, self.stacks, self.n_expert = spec, stacks, stacks.n_expert
        self.serial = next(_SERIALS)
        self.device, n_slot = spec.device, min(spec.slots, stacks.n_expert)
        self.counts = torch.zeros(2, dtype=torch.int64)
        self.lane = lane_of(self.device)
        self.job = self.lane.job(spec.n_in, spec.n_used)
        self.layer = self.lane.add(CpuExperts(_on_host(spec), stacks), spec.n_used, self.counts)
        self.fault = faults.record(self.device)
        self.card: ExpertsLaunch | None = None
        self.slots: Tensor | None = None
        self.places = torch.full((self.n_expert,), -1, dtype=torch.int16)
        if n_slot:
            with temporary(self.device):
                first = _brought(stacks, slice(0, n_slot), self.device)
            self.card = ExpertsLaunch(_on_card(spec), first)
            del first
            release(
                self.device
            )  # what this layer's bytes took is not of the sizes that a load counts on
            self.places[:n_slot] = torch.arange(n_slot)
            self.slots = self.places.to(self.device)
        self.can_stream = n_slot > 0 or _may_stream(spec)
        n_missing = self.n_expert - n_slot
        self.n_byte, self.link, self.most_rows = expert_bytes(stacks), LINK, JOB_ROWS
        self.streams_from = streams_from(spec, n_missing, self.n_byte)
        self._groups: list[tuple[Runs, Tensor]] = []
        self.behind: weakref.ref[HostExperts] | None = None
        self.used: Tensor | None = None
        self.is_taken = False
        made = _made(self.device)
        if made and (before := made[-1]()) is not None:
            before.behind = weakref.ref(self)
        made.append(weakref.ref(self))

    # -- few rows ----------------------------------------------------------------------------------------------

    def begin(
        self, x: Tensor, norm: Norm | None, ids: Tensor, weights: Tensor, row_seq: Tensor | None = None
    ) -> Split | None:
        """Send rows to the host as soon as their experts are known; `__call__` takes it as `ready`. None for more rows than go at once.

        row_seq [row] int32: rows of a sequence below 0 are padding, for which nothing is computed
        """
        if len(x) > JOB_ROWS:
            return None
        return self._sent(x, norm, ids, weights, row_seq, self.used)

    def _sent(
        self,
        x: Tensor,
        norm: Norm | None,
        ids: Tensor,
        weights: Tensor,
        row_seq: Tensor | None,
        used: Tensor | None,
    ) -> Split:
        self.lane.wake()
        of = self.job, self.layer, x, norm, ids.contiguous(), weights.contiguous()
        return Split(*of, self.slots, row_seq, self.n_expert, used)

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        norm: Norm | None = None,
        added: Added = NOTHING,
        ready: object = None,
    ) -> Tensor:
        if self._streams(len(x)):
            return self.streamed(x, ids, weights, norm, added)
        out = torch.empty(len(x), self.spec.n_in, dtype=torch.float32, device=x.device)
        used = self.used if len(x) <= JOB_ROWS else None
        for first in range(0, len(x), JOB_ROWS):
            part = slice(first, first + JOB_ROWS)
            split = ready if isinstance(ready, Split) else None
            split = split or self._sent(x[part], norm, ids[part], weights[part], None, used)
            y = self._of_card(x[part], norm, split.hits, split.weights)
            given = y, split.hits, split.weights, added.part(part), out[part], self.fault, split
            gate(*given)
        return out

    def _of_card(
        self, x: Tensor, norm: Norm | None, hits: Tensor | None, weights: Tensor
    ) -> Tensor | None:
        if self.card is None or hits is None:
            return None
        return self.card.shares(self.card.x_rows(x, norm), hits, weights).y

    # -- many rows ---------------------------------------------------------------------------------------------

    def _streams(self, n_row: int) -> bool:
        if n_row < max(self.streams_from, JOB_ROWS + 1) or not self.can_stream or current().is_exact:
            return False
        return self.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()

    def streamed(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        norm: Norm | None = None,
        added: Added = NOTHING,
    ) -> Tensor:
        """The same, by the card alone, to which missing experts come group by group."""
        ids = torch.where(ids == -1, -1, ids.clamp(0, self.n_expert - 1)).long()
        out = torch.empty(len(x), self.spec.n_in, dtype=torch.float32, device=x.device)
        staging = _staging(self.device)
        for i in range(2):
            self._fetch(i)
        if self.card is not None and self.slots is not None:
            self._add(self.card, x, self.slots, ids, weights, norm, added, out)
            added = Added(out)
        for i, (experts, places) in enumerate(self.groups()):
            buffer = self._fetch(i)
            assert buffer is not None
            launch = self._loaded(staging.take(buffer, self.stacks, experts))
            staging.taken(buffer)
            self._fetch(i + 2)
            self._add(launch, x, places, ids, weights, norm, added, out)
            added = Added(out)
        return out

    def groups(self) -> list[tuple[Runs, Tensor]]:
        """The missing experts, and for each group [n_expert] int16: an expert's place in it, or -1."""
        if not self._groups:
            size = max(1, GROUP // expert_bytes(self.stacks))
            missing = (self.places < 0).nonzero().flatten()
            for some in missing.split(size) if len(missing) else ():
                places = torch.full((self.n_expert,), -1, dtype=torch.int16)
                places[some] = torch.arange(len(some), dtype=torch.int16)
                self._groups.append((_runs(some.tolist()), places.to(self.device)))
        return self._groups

    def _fetch(self, i: int) -> _Buffer | None:
        """Group i of this layer, or behind its last one the first ones of the next layer; None: there is no such."""
        own, n = self, len(self.groups())
        if i >= n:
            behind = None if self.behind is None else self.behind()
            if behind is None:
                return None
            own, i = behind, i - n
        if i >= len(own.groups()):
            return None
        experts, _ = own.groups()[i]
        key = own.serial, *((run.start, run.stop) for run in experts)
        return _staging(self.device).fetch(key, own.stacks, experts)

    def _loaded(self, group: Stacks) -> ExpertsLaunch:
        """The launch of groups, with these experts."""
        spec, made = _on_card(self.spec), _launches(self.device)
        if spec not in made:
            made[spec] = ExpertsLaunch(spec, group)
        else:
            made[spec].put(*self._packed(group))
        return made[spec]

    def _packed(self, some: Stacks) -> tuple[PackedStack, PackedStack]:
        """Experts on the card as its launch takes them."""
        assert some.up.type is not None and some.down.type is not None
        inner, down = (_packs(self.device, type) for type in (some.up.type, some.down.type))
        return pack_inner(some, inner), pack(some.down, kernel=down)

    def _add(
        self,
        launch: ExpertsLaunch,
        x: Tensor,
        places: Tensor,
        ids: Tensor,
        weights: Tensor,
        norm: Norm | None,
        added: Added,
        out: Tensor,
    ) -> None:
        """out = what `added` says + the sums of the experts that have a place."""
        hits = torch.where(ids == -1, -1, places[ids].int()).contiguous()
        for first in range(0, len(x), launch.most):
            part = slice(first, first + launch.most)
            rows, of = launch.x_rows(x[part], norm), (hits[part], weights[part].contiguous())
            y = launch.shares(rows, *of).y
            given = y, *of, added.part(part), out[part], self.fault, None
            gate(*given)

    # -- slots -------------------------------------------------------------------------------------------------

    def load(self, slot: int, expert: int) -> None:
        """Write an expert into a slot that no kernel reads meanwhile, on this thread's stream."""
        assert self.card is not None and 0 <= slot < self.card.n_expert
        one = _brought(self.stacks, slice(expert, expert + 1), self.device)
        for product, made in zip((self.card.inner, self.card.down), self._packed(one), strict=True):
            for name in ("records", "scales", "biases"):
                own = getattr(product.stack, name)
                if own is not None:
                    own[slot].copy_(getattr(made, name)[0])

    def place(self, expert: int, slot: int) -> None:
        """The expert has this slot, or none: -1. Kernels know it once `slots` is a copy of `places`."""
        self.places[expert] = slot
        self._groups = []


def _runs(experts: list[int]) -> Runs:
    """Of rising numbers."""
    firsts = [e for i, e in enumerate(experts) if i == 0 or experts[i - 1] != e - 1]
    ends = [e + 1 for i, e in enumerate(experts) if i + 1 == len(experts) or experts[i + 1] != e + 1]
    return tuple(map(slice, firsts, ends))


@per_device
def _packs(device: torch.device, type: GGMLType) -> Repack | None:
    """The kernel that packs matrices of a type; None: they are packed by torch, in many small steps."""
    spec = RepackSpec(device, type)
    return repack.bind(spec) if repack.runs_as("cuda", spec) else None


def also(spec: MoeSpec) -> Iterator[tuple[Any, RepackSpec]]:
    """What experts in the host's memory are packed by when they come to the card."""
    if spec.slots is not None and spec.up is not None and spec.down is not None:
        yield from ((repack, RepackSpec(spec.device, type)) for type in {spec.up, spec.down})


def staging_bytes(n_byte: int, *, may_move: bool) -> int:
    """Memory of streamed prompts on the card, of experts of `n_byte` each: two buffers, a packed group, and what packing takes; where experts may
    move, of one that is on its way to a slot meanwhile, too."""
    return 6 * max(GROUP, n_byte) + (4 * n_byte if may_move else 0)


def programs(spec: MoeSpec, target: GpuKind) -> Iterator[Program]:
    if spec.slots is None:
        return
    yield target.program("moe_lane")
    if spec.gate is None:
        yield from moe_builds.programs(_on_card(spec), target)


def bind(spec: MoeSpec) -> Callable[[Stacks], ExpertsRun]:
    """Compiles now."""
    lane_kernels(spec.device)
    if _may_stream(spec):
        moe_cuda.bind(_on_card(spec))
    return lambda stacks: HostExperts(spec, stacks)
