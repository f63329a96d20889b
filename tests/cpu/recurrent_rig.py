"""A recurrent op for tests: its launches, layers with random records, rows, and ragged rounds. gdn, mamba2 and short_conv by the same name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyspec.cpu import build, kernels
from pyspec.cuda.ops.gdn import cpu as gdn_cpu
from pyspec.cuda.ops.gdn import ref as gdn_ref
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.cuda.ops.mamba2 import cpu as mamba2_cpu
from pyspec.cuda.ops.mamba2 import ref as mamba2_ref
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.cuda.ops.short_conv import cpu as short_conv_cpu
from pyspec.cuda.ops.short_conv import ref as short_conv_ref
from pyspec.cuda.ops.short_conv.shape import ShortConvShape
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Batch, Seq, SeqMode, lay_out
from pyspec.slots.recurrent import StateLayer
from pyspec.slots.table import SlotTable

CPU = torch.device("cpu")
N_SLOT, WIDTH = 5, 20
KEEP, VERIFY, LATE = SeqMode.KEEP, SeqMode.VERIFY, SeqMode.LATE
SOURCES = "pool", "run", "gdn", "mamba2", "short_conv"

Launch = Callable[..., Tensor]


def gdn_shape(n_k: int, n_v: int, dim: int, taps: int, **more: Any) -> GdnShape:
    return GdnShape(n_k, n_v, dim, taps, (2 * n_k + n_v) * dim, **more)


@dataclass(frozen=True)
class Rig:
    """An op with a shape. inputs(n, seed) gives the arguments before the layer, of n rows that are slices of wider ones."""

    name: str
    shape: Any

    @property
    def spec(self) -> Any:
        if self.name == "gdn":
            return gdn_ref.GdnSpec(CPU, self.shape, 1e-6)
        if self.name == "short_conv":
            return short_conv_ref.ShortConvSpec(CPU, self.shape)
        return mamba2_ref.Mamba2Spec(CPU, self.shape)

    @property
    def ref(self) -> Any:
        return {"gdn": gdn_ref, "mamba2": mamba2_ref, "short_conv": short_conv_ref}[self.name]

    @property
    def cpu(self) -> Any:
        return {"gdn": gdn_cpu, "mamba2": mamba2_cpu, "short_conv": short_conv_cpu}[self.name]

    def inputs(self, n: int, seed: int = 0) -> tuple[Any, ...]:
        gen, s = torch.Generator().manual_seed(seed), self.shape
        fixed = torch.Generator().manual_seed(99)
        if self.name == "short_conv":
            w = torch.randn(s.n_channel, s.n_conv, generator=fixed)
            return torch.randn(n, 3 * s.n_channel + 5, generator=gen)[:, 5:], w
        of_row = [s.n_v_head * s.n_decay, s.n_v_head] if self.name == "gdn" else [s.n_head]
        wide = torch.randn(n, 3 + s.n_channel + sum(of_row), generator=gen)
        m, gates = wide[:, 3 : 3 + s.n_channel], wide[:, 3 + s.n_channel :]
        if self.name == "mamba2":
            return m, gates, mamba2_ref.make_params(s, fixed, CPU)
        a, dt_bias = -torch.rand(s.n_v_head, generator=fixed), torch.randn(of_row[0], generator=fixed)
        conv_w = torch.randn(s.n_channel, s.n_conv, generator=fixed)
        return m, *gates.split(of_row, 1), a, dt_bias, conv_w

    def part(self, whole: tuple[Any, ...], at: int, n: int) -> tuple[Any, ...]:
        """The same arguments of n rows from `at` on."""
        n_raw = {"gdn": 3, "mamba2": 2, "short_conv": 1}[self.name]
        return *(t[at : at + n] for t in whole[:n_raw]), *whole[n_raw:]

    def layer(self, seed: int | None = None) -> StateLayer:
        """seed: states and records are random."""
        layer = StateLayer(self.shape, N_SLOT, WIDTH, CPU)
        gen = torch.Generator().manual_seed(seed or 0)
        for t in layer.tensors() if seed is not None else ():
            t.copy_(torch.rand(t.shape, generator=gen) - 0.5)
        return layer


SHAPES = {
    "gdn-odd": Rig("gdn", gdn_shape(3, 9, 24, 3)),
    "gdn-least": Rig("gdn", gdn_shape(1, 1, 8, 2)),
    "gdn-usual": Rig("gdn", gdn_shape(2, 4, 128, 4)),
    "gdn-parts": Rig("gdn", gdn_shape(1, 2, 104, 4)),
    "gdn-by-key": Rig("gdn", gdn_shape(3, 3, 24, 4, by_key=True, floor=-5.0)),
    "gdn-by-key-least": Rig("gdn", gdn_shape(1, 2, 8, 2, by_key=True)),
    "gdn-by-key-usual": Rig("gdn", gdn_shape(2, 2, 128, 4, by_key=True)),
    "mamba2-odd": Rig("mamba2", Mamba2Shape(6, 40, 3, 24, 3)),
    "mamba2-least": Rig("mamba2", Mamba2Shape(1, 8, 1, 8, 2)),
    "short_conv-odd": Rig("short_conv", ShortConvShape(264, 3)),
    "short_conv-least": Rig("short_conv", ShortConvShape(8, 2)),
    "short_conv-usual": Rig("short_conv", ShortConvShape(2048, 4)),
    "mamba2-usual": Rig("mamba2", Mamba2Shape(8, 64, 2, 128, 4)),
}


def batch_of(seqs: Sequence[Seq], arena: Arena | None = None) -> Batch:
    return lay_out(SlotTable(N_SLOT, 400, 16), seqs, CPU, arena=arena)


def call(rig: Rig, launch: Launch, layer: StateLayer, seqs: Sequence[Seq], seed: int = 0) -> Tensor:
    return launch(*rig.inputs(sum(s.width for s in seqs), seed), layer, batch_of(seqs))


def rounds(seed: int, n_round: int) -> Iterator[list[Seq]]:
    """Ragged rounds of some slots in any order and mode. Every fold is of records that the slot has."""
    gen = torch.Generator().manual_seed(seed)

    def draw(n: int) -> int:
        return int(torch.randint(n, (1,), generator=gen))

    recorded = [0] * N_SLOT
    for _ in range(n_round):
        seqs = []
        for slot in torch.randperm(N_SLOT, generator=gen)[: 1 + draw(N_SLOT)].tolist():
            fold, mode = draw(recorded[slot] + 1), (KEEP, VERIFY, LATE)[draw(3)]
            room = {KEEP: (1, 5, 17, 130, 300)[draw(5)], VERIFY: WIDTH, LATE: min(WIDTH - fold, 3)}[mode]
            if room == 0:
                mode, room = KEEP, 1
            seq = Seq(slot, 0, [0] * (1 + draw(min(room, 17)) if room < 100 else room), mode, 0, fold)
            recorded[slot] = seq.n_recorded(seq.width)
            seqs.append(seq)
        yield seqs


@pytest.fixture(scope="session")
def plain_library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled(tmp_path_factory.mktemp("plain"), "plain")


def compiled(folder: Path, isa: str, extra: tuple[str, ...] = ()) -> Any:
    """A library of the sources that the recurrent ops need."""
    native = folder / "native"
    native.mkdir()
    for source in (*build.SOURCES.glob("*.h"), *(build.SOURCES / f"{name}.cpp" for name in SOURCES)):
        shutil.copy(source, native / source.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCES", native)
        return kernels._opened(str(build.build(isa, folder, extra)))


@contextmanager
def using(library: Any) -> Iterator[None]:
    """The ops' kernels are this library's."""
    bound = gdn_cpu.GDN, mamba2_cpu.MAMBA2

    def forget() -> None:
        for kernel in bound:
            kernel.__dict__.pop("address", None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "compiled", lambda: library)
        forget()
        yield
    forget()
