"""The same cases of an op on every machine that runs it: here stands which machines there are, and why one is left out.

A test takes `machine` and runs what it says within `machine.started()`. `cases` gives it its machines, each with the cases that are made for it:

    @cases("heads, columns", emulated=[((1, 1), 2)], card=[((16, 48), 4)])
    def test_rounds_are_the_references(machine: Machine, heads: tuple[int, int], columns: int) -> None:

Emulated, kernels run thread by thread on the CPU (`emulated`), in an order of threads and blocks that the seed draws; that needs a C++
compiler. Cases of a card have the mark `card`, are collected only where torch finds a GPU (so none is reported as skipped), and are never
slow. PYSPEC_TEST_CARD=emulated collects them anywhere and runs them emulated, as far as patience goes: for those who change them without a GPU.
Triton's kernels have files of their own, test_*_triton.py, because a process imports Triton either to interpret or to compile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyspec.cuda import faults, jit

HAS_GPU = torch.cuda.is_available()
CARDS_ARE_EMULATED = not HAS_GPU and os.environ.get("PYSPEC_TEST_CARD") == "emulated"
HAS_CARD = HAS_GPU or CARDS_ARE_EMULATED
GPU = CPU if CARDS_ARE_EMULATED else torch.device("cuda", 0)
NO_FAULT = [0] * 5


@dataclass(frozen=True)
class Machine:
    """Where launches run: `name` "emulated" (the order drawn from `seed`), "interpreted" or "card"; tensors lie on `device`."""

    name: str
    device: torch.device
    seed: int = 0

    @property
    def is_emulated(self) -> bool:
        """Its tensors lie on the CPU: a card of CARDS_ARE_EMULATED and Triton's interpreter are so, too."""
        return self.device.type == "cpu"

    def started(
        self, capability: tuple[int, int] = (9, 0), **settings: int
    ) -> AbstractContextManager[None]:
        """Launchers bound within run here. `capability` and `settings` (see emulated_gpu) are those of an emulated GPU; a card has its own."""
        if self.name != "emulated":
            return nullcontext()
        return emulated_gpu(capability, **{"seed": self.seed, **settings})

    def faults(self) -> Tensor:
        """The record of faults, which a test that provokes one sets to zero again."""
        return faults.record(self.device)

    def poison(self) -> None:
        """Tensors of torch.empty hold NaN; emulated, they do always."""
        if not self.is_emulated:
            torch.full((1 << 22,), torch.nan, device=self.device)

    def captured(
        self, run: Callable[[], Any], warm: Callable[[], Any] | None = None
    ) -> tuple[Callable[[], None], Any]:
        """(replay, outputs) of a graph of `run`; `warm` is the call before it, which a graph needs (`run` unless given).

        Emulated, where there are no graphs, a replay is a call whose outputs go to where those of `warm` were.
        """
        first = (warm or run)()
        if self.is_emulated:

            def replay() -> None:
                for old, new in zip(tree_leaves(first), tree_leaves(run()), strict=True):
                    if isinstance(old, Tensor):
                        old.copy_(new)

            return replay, first
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        return graph.replay, out

    def waited(self) -> None:
        """All launches have ended."""
        if not self.is_emulated:
            torch.cuda.synchronize()


EMULATED, CARD = Machine("emulated", CPU), Machine("card", GPU)
INTERPRETED = Machine(
    "interpreted", CPU
)  # Triton's interpreter, in a file that imports triton_interpreter


def _values(case: Any, n_name: int) -> ParameterSet:
    """A case as pytest knows it: a value, a tuple of them, or pytest.param of either."""
    if isinstance(case, ParameterSet):
        return case
    return pytest.param(*(case if n_name > 1 else (case,)))


def cases(
    names: str = "",
    both: Iterable[Any] | None = None,
    *,
    emulated: Iterable[Any] = (),
    card: Iterable[Any] = (),
    seeds: Sequence[int] = (0,),
    slow: bool = False,
) -> pytest.MarkDecorator:
    """`machine` and `names` of a test: the cases `both` on each machine that is here, the others on theirs.

    Without names and cases a test runs once on each machine. `seeds` are orders of an emulated machine's threads and blocks, of which
    each runs every case; `slow` marks the emulated cases so.
    """
    own = [name.strip() for name in names.split(",") if name.strip()]
    if both is None and not (emulated or card):
        both = [()] if len(own) != 1 else []
    both = list(both or ())
    marks = [needs_compiler, *([pytest.mark.slow] if slow else [])]
    found = [
        (Machine("emulated", CPU, seed), marks, case) for case in (*both, *emulated) for seed in seeds
    ]
    found += [(CARD, [pytest.mark.card], case) for case in (*both, *card)]
    made = []
    for machine, its_marks, case in found:
        values = _values(case, len(own)) if own else pytest.param()
        kept = [m for m in values.marks if m.name != "slow" or machine.name == "emulated"]
        made.append(pytest.param(machine, *values.values, marks=[*its_marks, *kept], id=values.id))
    return pytest.mark.parametrize(("machine", *own), made, ids=_name)


def _name(value: object) -> str | None:
    if not isinstance(value, Machine):
        return getattr(value, "label", None)
    return value.name if not value.seed else f"{value.name}-{value.seed}"


ON_CARD = cases(card=[()])
"""A test that needs a card."""


# -- comparisons ----------------------------------------------------------------------------------------------------


def same(*found: Any) -> bool:
    """All have the same bits (where one holds NaN, all do): tensors, or tuples and lists of them."""
    first, *others = ([t for t in tree_leaves(x) if isinstance(t, Tensor)] for x in found)
    return bool(first) and all(
        len(first) == len(other)
        and all(
            a.shape == b.shape and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))
            for a, b in zip(first, other, strict=True)
        )
        for other in others
    )  # fmt: skip


def off(got: Tensor, want: Tensor) -> float:
    """Error relative to the norm of what is wanted, in float64."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def filled(value: float, *tensors: Tensor) -> None:
    """Memory that a launch has to write, or must not."""
    for t in tensors:
        t.fill_(value)


# -- kernels for every architecture ---------------------------------------------------------------------------------


def compiled(
    stem: str,
    arch: str,
    defines: Mapping[str, int | str] | None = None,
    *,
    registers: Mapping[str, int] | int | None = None,
) -> Mapping[str, jit.Resources]:
    """Resources of a file's kernels, by name, compiled anew for `arch`: none spills, none has more registers than given (all, or by name)."""
    pytest.importorskip("cuda.core")
    found = jit.compile_cubin(stem, arch, defines or {}, use_cache=False).resources
    for name, of in found.items():
        most = registers.get(name) if isinstance(registers, Mapping) else registers
        assert of.spill_bytes == 0 and (most is None or of.registers <= most), (name, defines, of)
    return found


def refused(
    limits: Callable[[Any], str | None], spec: Any, says: str, capability: tuple[int, int] = (9, 0)
) -> bool:
    """The limits of kernels refuse `spec` on a GPU of that capability with a sentence in which `says` stands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        return says in (limits(spec) or "")
