"""Tensors of a file as callables on a device: matrices, embeddings, vectors; and the check that they are all there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from pyspec import progress
from pyspec.cuda.collective import Collective
from pyspec.cuda.context import context_of
from pyspec.cuda.ops.heads.op import heads
from pyspec.cuda.ops.heads.op import ways as heads_ways
from pyspec.cuda.ops.heads.ref import HeadsRun, HeadsSpec
from pyspec.cuda.ops.linear.dequant import dequantize
from pyspec.cuda.ops.linear.formats import FORMATS
from pyspec.cuda.ops.linear.op import linear, linear_tall
from pyspec.cuda.ops.linear.pack import interleave, packed_bytes, repack
from pyspec.cuda.ops.linear.ref import PROBE_ROWS, Epilogue, LinearSpec
from pyspec.cuda.ops.linear.tiles import TiledMatrix, tile
from pyspec.cuda.ops.moe.ref import Stack
from pyspec.cuda.ops.rows.ref import GATES
from pyspec.cuda.packed_cpu import CpuGates, CpuGroups, CpuMatrix, runs_packed
from pyspec.cuda.rank import Rank
from pyspec.cuda.streamed import Streamed, in_parts
from pyspec.cuda.streamed_tiles import StreamedTiles, sums_in_f32
from pyspec.cuda.temporary import temporary
from pyspec.errors import BadTensors, ModelError
from pyspec.gguf import GGMLType, GGUFFile, TensorInfo
from pyspec.models.cuts import Cut, Share, share_of
from pyspec.models.gathered import Gathered, RankNorms
from pyspec.models.grouped import Grouped
from pyspec.models.host import HostBytes
from pyspec.models.matrices import (
    CutGates,
    Dense,
    Embedding,
    GateAct,
    GeluGates,
    Halves,
    Joined,
    Unpacked,
)
from pyspec.models.placement import ON_CARD, Placement
from pyspec.models.rope import NO_FLAGS, RopeFlags
from pyspec.models.slice_norms import SliceNorms
from pyspec.models.target import Matrix
from pyspec.models.upload import Upload
from pyspec.models.wants import EMBEDDING, HEAD, Want, scale_of
from pyspec.slots.mapped import of_pages

PLAIN = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
OF_DTYPE = dict(zip((torch.float32, torch.float16, torch.bfloat16), PLAIN, strict=True))
UNPACK = 1 << 24  # weights unpacked at once
HEADS = (HEAD, EMBEDDING)  # few rows go through them: one for each token that may be kept
OF_HEADS = (".attn_k_b.weight", ".attn_v_b.weight")  # a matrix for each head (`Weights.heads`)
GROUPED = ".attn_output_a.weight"
"""Each group of its rows takes a part of the input: GPUs keep it once more in bf16, for many rows."""


def tier_of(spec: LinearSpec, epilogues: Sequence[Epilogue] = tuple(Epilogue)) -> str | None:
    """The implementation that runs products with such a matrix, with any of the epilogues; it decides the layout of the weights. None: none does.

    The question is put for a small matrix, because the check would unpack a large one.
    """
    smalls = [replace(spec, n_out=PROBE_ROWS, epilogue=e) for e in epilogues]
    found = {linear.chosen(small).name for small in smalls}
    for impl in linear.impls:
        if impl.name not in found:
            continue
        fits = all(impl.limits(replace(spec, epilogue=e)) is None for e in epilogues)
        if fits and (len(found) == 1 or all(linear.refusal(impl, small) is None for small in smalls)):
            return impl.name
    return None


class Weights:
    """A file's tensors, brought to a device.

    `dense`: the dtype matrices are unpacked to at load; None keeps them packed, for the kernels on a GPU, or
    unpacked at each use on a CPU (less memory, slow). `wide`: keep f16 copies beside the packed matrices of kernels.
    `ranks`: the tensors in `cuts` are divided over them, and only this rank's share is read.
    `rope`: what flags change of the model's ropes.
    `placement`: what stays in the host's memory.
    """

    def __init__(
        self,
        file: GGUFFile,
        device: torch.device,
        dense: torch.dtype | None,
        alias: Mapping[str, str] | None = None,
        wide: bool = False,
        ranks: Collective | None = None,
        cuts: Mapping[str, Cut] | None = None,
        rope: RopeFlags = NO_FLAGS,
        placement: Placement = ON_CARD,
    ) -> None:
        self.file, self.rope, self.placement = file, rope, placement
        self.device = device
        self.dense = dense
        self.alias = alias or {}
        self.wide = wide
        self.ranks, self.cuts = ranks, (cuts or {}) if ranks is not None else {}
        self._shares: dict[str, Share] = {}
        self.context = context_of(device)  # the device's work while the file is loaded
        self._shared: dict[tuple[str, ...], Matrix] = {}
        self._tables: dict[str, Tensor] = {}
        self._orders: dict[str, Tensor] = {}
        self._upload, self._in_host = Upload(device), HostBytes(device)
        self._n_byte, self._n_read = max(sum(t.n_bytes for t in file.tensors.values()), 1), 0

    def _info(self, name: str) -> TensorInfo:
        share = self._share(name)
        return self.file.tensors[self._own(name)] if share is None else share.info

    def _share(self, name: str) -> Share | None:
        """This rank's share of a tensor; None: all of it."""
        if self.ranks is None or name not in self.cuts:
            return None
        if name not in self._shares:
            info = self.file.tensors[self._own(name)]
            self._shares[name] = share_of(info, self.cuts[name], self.ranks.rank)
        return self._shares[name]

    @property
    def n_rank(self) -> int:
        return 1 if self.ranks is None else self.ranks.rank.n

    def type_of(self, name: str) -> GGMLType:
        return self._info(name).type

    def has(self, name: str) -> bool:
        return self._own(name) in self.file.tensors

    def reorder(self, name: str, order: Tensor) -> None:
        """From now on row i of the matrix is its row order[i] in the file; of a rank's share, if ranks divide it. order [row] int64"""
        self._orders[name] = order

    def _raw(self, name: str) -> Tensor:
        raw = self._read(name)
        if (order := self._orders.get(name)) is None:
            return raw
        return raw.view(len(order), -1)[order.to(raw.device)].view(-1)

    def _read(self, name: str) -> Tensor:
        own, share = self._own(name), self._share(name)
        n_byte = self._info(name).n_bytes
        self._count(n_byte)
        if share is not None:
            return self._upload(n_byte, partial(share.read_into, self.file))
        if self.device.type != "cpu" or own not in HEADS:
            return self._whole(own, n_byte)
        if own not in self._tables:  # on a CPU the embedding and a tied head read the same bytes
            self._tables[own] = self._whole(own, n_byte)
        return self._tables[own]

    def _count(self, n_byte: int) -> None:
        """Report so many more as read."""
        progress.report(progress.part.get(), self._n_read / self._n_byte)
        self._n_read = min(self._n_read + n_byte, self._n_byte)  # a tied head is read twice

    def _own(self, name: str) -> str:
        """Its name in the file."""
        return self.alias.get(name, name)

    def _whole(self, own: str, n_byte: int) -> Tensor:
        """A tensor by its name in the file."""
        if self.device.type == "cpu" and (pages := self.file.read_ahead(own)) is not None:
            return of_pages(pages)
        return self._upload(n_byte, partial(self.file.read_into, own))

    def _scale(self, name: str) -> float:
        """NVFP4's second-level scale, a sidecar tensor that multiplies the product."""
        scale = self.factors(name, 1)
        return 1.0 if scale is None else float(scale.item())

    def factors(self, name: str, n: int) -> Tensor | None:
        """Those of a matrix's products [n] f32, one for each expert or one for all; None: it has none. n: -1 for as many as the file has"""
        if not self.has(side := scale_of(name)):
            return None
        scale = self.vector(side).expand(n).contiguous()
        if not scale.isfinite().all():
            raise ModelError(f"{side} has a number that is not finite")
        return scale

    def matrix(self, *names: str) -> Matrix:
        """One matrix, or several with the same input side by side along their outputs."""
        if names not in self._shared:
            self._shared[names] = self._load(names, gated=False)
        return self._shared[names]

    def rank_norms(self, q: str, k: str, widths: tuple[int, int], eps: float) -> RankNorms:
        """Norms of queries and keys over all heads of a row, which ranks divide."""
        assert self.ranks is not None, "one rank norms its rows by an op"
        files = (self.file.tensors[self._own(name)] for name in (q, k))  # of all ranks
        n_q, n_k = (info.shape[-1] for info in files)
        return RankNorms(self.ranks, (self.vector(q), self.vector(k)), (n_q, n_k), widths, eps)

    def slice_norms(self, *names: str, dim: int, eps: float) -> Callable[[Tensor], Tensor]:
        """Norms of slices of `dim` columns, with the vectors behind one another as weights."""
        weight = torch.cat([self.vector(name) for name in names])
        return partial(SliceNorms(self.device, dim, eps), weight=weight)

    def head(self) -> Matrix:
        """From the stream to logits; the embedding, where the file has no head."""
        tied = EMBEDDING
        if self.ranks is None:
            return self.matrix(HEAD if self.has(HEAD) else tied)
        if not self.has(HEAD):
            self.alias = {**self.alias, HEAD: self.alias.get(tied, tied)}
        info, n = self.file.tensors[self.alias.get(HEAD, HEAD)], self.ranks.rank.n
        widths = [share_of(info, self.cuts[HEAD], Rank(i, n)).info.shape[0] for i in range(n)]
        return Gathered(self.matrix(HEAD), self.ranks, widths)

    def gated(self, gate: str, up: str, limit: float = 0.0, act: GateAct = "silu") -> Matrix:
        """act(gate x) * up x, as one product where that has `act`. A limit other than 0 cuts silu's gates there, and the ups at plus and
        minus it."""
        if self._on_cpu((gate, up)):
            return self._packed((gate, up), CpuGates(act == "gelu", limit))
        if act not in GATES:
            return GeluGates(self.matrix(gate, up))
        if not limit:
            return self._load((gate, up), gated=True)
        infos = self._info(gate), self._info(up)
        if (
            self.dense is None
            and self.device.type == "cuda"
            and self._streams(gate)
            and self._streams(up)
        ):
            n_out, n_in = infos[0].shape
            spec = LinearSpec(self.device, infos[0].type, n_out, n_in, Epilogue.GATED, limit)
            tier = tier_of(spec, (Epilogue.GATED,))
            if tier is not None and infos[0].type is infos[1].type and n_out % 8 == 0:
                return self._stream((gate, up), True, limit=limit, tier=tier)
        return CutGates(self.matrix(gate, up), limit)

    def _load(self, names: Sequence[str], gated: bool) -> Matrix:
        if self.dense is not None:
            return Dense(self._dense(names, self.dense), gated)
        if self._on_cpu(names):
            return self._packed(names, CpuGates() if gated else None)
        if self.device.type != "cuda":
            return Unpacked([(self._raw(n), self._info(n), self._scale(n)) for n in names], gated)
        runs = groupby(
            names, key=lambda n: (self._streams(n), self._info(n).type if self._streams(n) else None)
        )
        groups = [(kernel, list(run)) for (kernel, _), run in runs]
        if len(groups) == 1:
            kernel, all_names = groups[0]
            return self._stream(all_names, gated) if kernel else self._exact(all_names, gated)
        return Joined(
            [self._stream(n, False) if kernel else self._exact(n, False) for kernel, n in groups], gated
        )

    def _on_cpu(self, names: Sequence[str]) -> bool:
        """Whether C++ kernels multiply with these tensors as they are."""
        return (
            self.dense is None
            and self.device.type == "cpu"
            and all(runs_packed(self._info(n).type) for n in names)
        )

    def _packed(self, names: Sequence[str], after: CpuGates | None) -> CpuMatrix:
        infos = [self._info(n) for n in names]
        raws = [self._raw(n).view(i.shape[0], -1) for n, i in zip(names, infos, strict=True)]
        return CpuMatrix(
            [(raw, i.type, self._scale(n)) for raw, i, n in zip(raws, infos, names, strict=True)], after
        )

    def _streams(self, name: str) -> bool:
        """Whether the kernel takes this tensor; asked of a small matrix, since the check would unpack a large one.

        f16 and bf16 stay with the library where many rows would be slow: they have no copy for these.
        """
        info = self._info(name)
        if len(info.shape) != 2 or info.type not in FORMATS:
            return False
        if self._scale(name) != 1.0 and not FORMATS[info.type].scaled:
            return False
        spec = LinearSpec(self.device, info.type, *info.shape)
        if tier_of(spec) is None:
            return False
        ways = [replace(spec, epilogue=e) for e in Epilogue] if info.type in PLAIN else []
        return all(linear_tall.has_own(way, checked_as=replace(way, n_out=PROBE_ROWS)) for way in ways)

    def _stream(
        self,
        names: Sequence[str],
        gated: bool,
        *,
        has_copy: bool = True,
        limit: float = 0.0,
        tier: str | None = None,
    ) -> Matrix:
        """tier: the implementation of the product; None: that of `linear` as a whole."""
        infos = [self._info(n) for n in names]
        n_out = sum(i.shape[0] for i in infos)
        n_in = infos[0].shape[1]
        kind = infos[0].type
        if gated and infos[0].shape[0] % 8:
            return Joined([self._stream([n], False) for n in names], gated=True)
        is_wide = has_copy and self.wide and kind not in PLAIN and names[0] not in HEADS
        wide = torch.empty(n_out, n_in, dtype=torch.float16, device=self.device) if is_wide else None
        tier = tier or tier_of(LinearSpec(self.device, kind, n_out, n_in))
        if tier == "triton":
            return StreamedTiles(self._tiled(names, wide), self.device, gated, wide, limit)
        data = torch.empty(packed_bytes(kind, n_out, n_in), dtype=torch.uint8, device=self.device)
        with temporary(self.device):
            raws = [self._raw(n).view(i.shape[0], -1) for n, i in zip(names, infos, strict=True)]
            raw = interleave(*raws) if gated else _joined(raws)
            if wide is not None:
                self._unpack(names, raws, wide)
            scales = self._row_scales(names, gated) if FORMATS[kind].scaled else None
            packed = repack(raw.contiguous(), kind, (n_out, n_in), scales, data)
        return Streamed(packed, self.device, gated, wide, limit)

    def _tiled(self, names: Sequence[str], wide: Tensor | None) -> TiledMatrix:
        """For the Triton kernel; also unpacked into `wide`."""
        infos = [self._info(n) for n in names]
        scaled = FORMATS[infos[0].type].scaled and any(self._scale(n) != 1.0 for n in names)
        shape = sum(i.shape[0] for i in infos), infos[0].shape[1]
        with temporary(self.device):
            raws = [self._raw(n).view(i.shape[0], -1) for n, i in zip(names, infos, strict=True)]
            if wide is not None:
                self._unpack(names, raws, wide)
            scales = self._row_scales(names, gated=False) if scaled else None
            made = tile(_joined(raws), infos[0].type, shape, scales)
        return made.copied()

    def _row_scales(self, names: Sequence[str], gated: bool) -> Tensor:
        """[row] f32: each tensor's second scale for each of its rows, in their order."""
        parts = [
            torch.full((self._info(n).shape[0], 1), self._scale(n), device=self.device) for n in names
        ]
        return (interleave(*parts) if gated else torch.cat(parts)).view(-1)

    def _exact(self, names: Sequence[str], gated: bool) -> Matrix:
        """Without a kernel: f32 and bf16 as they are, the rest as f16, or as bf16 where that is too small or the library has no sums for it."""
        types = {self._info(n).type for n in names}
        if types.isdisjoint((GGMLType.F32, GGMLType.BF16)) and sums_in_f32(self.device):
            halves = self._dense(names, torch.float16)
            if halves.isfinite().all():
                return Halves(halves, gated)
        return Dense(
            self._dense(names, torch.float32 if types == {GGMLType.F32} else torch.bfloat16), gated
        )

    def _dense(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        n_out, n_in = sum(self._info(n).shape[0] for n in names), self._info(names[0]).shape[-1]
        whole = torch.empty(n_out, n_in, dtype=dtype, device=self.device)
        with temporary(self.device):
            self._unpack(names, [self._raw(n) for n in names], whole)
        return whole

    def _unpack(self, names: Sequence[str], raws: Sequence[Tensor], whole: Tensor) -> None:
        """Into whole [rows of all, columns]."""
        at = 0
        for n, raw in zip(names, raws, strict=True):
            i = self._info(n)
            scale, rows = self._scale(n), raw.view(i.shape[0], -1)
            for piece in rows.split(max(1, UNPACK // i.shape[-1])):
                part = dequantize(piece.reshape(-1), i.type, (piece.shape[0], i.shape[-1]))
                whole[at : at + piece.shape[0]] = part if scale == 1.0 else part * scale
                at += piece.shape[0]

    def stack(self, name: str, *, on_host: bool = False) -> Stack:
        """One matrix of every expert [expert, out, in]: as in the file, or unpacked where matrices are. A matrix [out, in] is one expert.
        on_host: as in the file, in the host's memory."""
        info = self._info(name)
        if len(info.shape) == 2:
            info = replace(info, shape=(1, *info.shape))
        scale = self.factors(name, info.shape[0])
        n_out, n_in = info.shape[1:]
        if on_host:
            scale = None if scale is None else scale.cpu()
            return Stack(self._host(name).view(info.shape[0], -1), info.type, n_out, n_in, scale)
        with temporary(self.device):  # kernels have a layout of their own
            raw = self._raw(name)
        if self.dense is None:
            return Stack(raw.view(info.shape[0], -1), info.type, n_out, n_in, scale)
        return Stack(dequantize(raw, info.type, info.shape, self.dense), None, n_out, n_in, scale)

    def _host(self, name: str) -> Tensor:
        """A tensor's bytes in the host's memory."""
        assert self.ranks is None, "ranks divide what is on their devices"
        n_byte = self._info(name).n_bytes
        self._count(n_byte)
        return self._in_host.of(n_byte, partial(self.file.read_into, self._own(name)))

    def embedding(self, name: str, factor: float = 1.0) -> Embedding:
        """factor: the model's own, which its rows are multiplied with."""
        info = self._info(name)
        if self._own(name) in self.placement.tables:
            raw = self._in_host.on_device(self._host(name), name).view(info.shape[0], -1)
        else:
            raw, _, _ = self.packed(name)
        return Embedding(raw, info.type, self._scale(name) * factor)

    def packed(self, name: str) -> tuple[Tensor, GGMLType, float]:
        """A matrix as it lies in the file: bytes by row [row, bytes of a row], their type, the tensor's second scale."""
        info = self._info(name)
        return self._raw(name).view(info.shape[0], -1), info.type, self._scale(name)

    def vector(self, name: str) -> Tensor:
        """A small tensor in f32, shape as in the file."""
        info = self._info(name)
        return dequantize(self._raw(name), info.type, info.shape).float()

    def table(self, name: str) -> Tensor:
        """A table of whole numbers, shape as in the file. int32"""
        info = self._info(name)
        if info.type is not GGMLType.I32:
            raise BadTensors(f"{name}: a table of I32 is wanted, the file has {info.type.name}")
        return self._raw(name).view(torch.int32).view(info.shape).clone()

    def grouped(self, name: str, n_group: int) -> Grouped | CpuGroups:
        """A matrix whose rows are `n_group` matrices one after the other, each for a part of the input."""
        info = self._info(name)
        if self._on_cpu((name,)):
            return CpuGroups(*self.packed(name), n_group)
        if self.dense is None and self.device.type != "cuda":
            packed = Unpacked([(self._raw(name), info, self._scale(name))])
            return Grouped(lambda: packed.whole().unflatten(0, (n_group, -1)))
        dtype = self.dense or (torch.float32 if info.type is GGMLType.F32 else torch.bfloat16)
        weight = self._dense([name], dtype).view(n_group, info.shape[0] // n_group, -1)
        if self.dense is not None or not self._streams(name):
            return Grouped(weight)
        few = self._stream([name], False, has_copy=False)
        own = in_parts(few, n_group) if isinstance(few, Streamed) else None
        return Grouped(weight, few if own is None else own)

    def heads(self, name: str) -> tuple[HeadsRun, bool]:
        """The product of each head's part of rows with a matrix of its own [head, out, in]: as in the file where a kernel reads that, or
        else as f16, or as bf16 where that is too small. And whether graphs and recordings may hold it."""
        info, by = self._info(name), self.factors(name, -1)
        by = None if by is None or bool((by == 1).all()) else by[:, None, None]
        spec = HeadsSpec(self.device, info.type, *info.shape)
        if self.dense is not None or by is not None:
            spec = replace(spec, type=OF_DTYPE[self.dense or torch.float32])
        else:
            found = heads_ways(spec)
            spec = next((way for way in found if heads.has_own(way)), found[-1])
        if spec.type is info.type and by is None:
            data = self._raw(name)
        else:
            with temporary(self.device):
                unpacked = dequantize(self._raw(name), info.type, info.shape).float()
                unpacked = unpacked if by is None else unpacked * by
            if spec.type is GGMLType.F16 and not unpacked.half().isfinite().all():
                spec = replace(spec, type=GGMLType.BF16)
            data = unpacked.to(next(t for t, of in OF_DTYPE.items() if of is spec.type), copy=True)
        # on GPUs torch multiplies with plain types only, which graphs hold
        return heads.bind(spec)(data), heads.chosen(spec).capturable or self.device.type == "cuda"

    def optional(self, name: str) -> Tensor | None:
        return self.vector(name) if self.has(name) else None


def cuts_of(wants: Mapping[str, Want]) -> dict[str, Cut]:
    """The tensors of a manifest that ranks divide."""
    return {name: want.cut for name, want in wants.items() if want.cut is not None}


def _joined(raws: Sequence[Tensor]) -> Tensor:
    """Rows one below the other. A matrix alone is not copied: it may be a head, for which a full card has room once."""
    return raws[0] if len(raws) == 1 else torch.cat(list(raws))
