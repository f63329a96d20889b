"""The record of an operation and its implementations, and the ops there are. The first implementation that is not refused runs; the torch
reference is the last.

An implementation states its limits as data: a range of compute capabilities, and `limits(spec)`, which returns the reason for a
refusal. It looks only at the spec (shapes, dtypes, device), so a planner can call it before anything is allocated. Within the limits
the op's check compares the implementation with the reference, on a GPU in a child process (checker.py). If it differs, fails,
crashes or hangs, it is refused and the next one is tried.

The ops are found in the folders of `pyspec.cuda.ops`: each with an `op.py`, which holds `OPS` or an op of the folder's name. `--kernels`
names them.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, Protocol, TypeVar

import torch

from pyspec.cpu import kernels as cpu_kernels
from pyspec.cuda import jit, tri, verdicts
from pyspec.cuda.checker import sentence
from pyspec.cuda.guard import FaultPlace as FaultPlace
from pyspec.cuda.guard import Guard
from pyspec.cuda.jit import GpuKind, Program
from pyspec.cuda.kernel_context import TIERS, KernelContext, current, within
from pyspec.cuda.verdicts import Candidate
from pyspec.errors import ConfigError

log = logging.getLogger(__name__)

FOLDER = "pyspec.cuda.ops"
MAX_LISTED = 3  # ops in one warning
OPTIONAL = ("limits", "programs", "tune", "capturable")  # of a record, beside `bind`
# Refusals that say nothing but that this is a CPU
NOT_HERE = "runs on NVIDIA GPUs only", "runs on GPUs only"

Spec = TypeVar("Spec")
Read = TypeVar("Read", contravariant=True)
Made = TypeVar("Made", covariant=True)
Launch = TypeVar("Launch")  # the result of `bind`: a function, or an object with several
Capability = tuple[int, int]
Ask = tuple["Op[Any, Any]", Any]
"""An op, and a spec that it is bound with."""


def _no_shapes(device: torch.device) -> list[Spec]:
    return []


@dataclass(frozen=True)
class Impl(Generic[Spec, Launch]):
    """One way to run an op. `bind(spec)` checks, compiles and returns the launch; it may be slow, the launch may not.

    tune      times the choices there are; the child runs it after the check, and the result is kept with the verdict for `bind`
    programs  the programs that NVRTC compiles for a spec, so that they can be compiled before `bind`. The list may miss a program
              (`bind` compiles it) or have one that no batch needs
    """

    name: str
    bind: Callable[[Spec], Launch]
    limits: Callable[[Spec], str | None] = lambda spec: None
    capturable: bool = False  # reads all varying values from device memory, so a CUDA graph may hold it
    # First and last it is made for, on GPUs
    capabilities: tuple[Capability, Capability] = ((8, 0), (12, 1))
    tune: Callable[[Spec], str] | None = None
    native: bool = False  # can crash or hang the process without a GPU, too: never checked inside it
    programs: Callable[[Spec, GpuKind], Iterable[Program]] | None = None

    def programs_for(self, spec: Spec, target: GpuKind) -> list[Program]:
        """Each program once; none for implementations that NVRTC does not compile."""
        return [] if self.programs is None else list(dict.fromkeys(self.programs(spec, target)))


class Tier(Protocol[Read, Made]):
    """A file of an op's folder that is an implementation. It may have what else there is of its record (`OPTIONAL`)."""

    def bind(self, spec: Read, /) -> Made: ...


def implemented(*files: Tier[Spec, Launch]) -> list[Impl[Spec, Launch]]:
    """The implementations in these files, by whose names they go; capturable unless they say no.

    One with a `FILE` has its programs, if the file lists no others.
    """
    found = []
    for file in files:
        own = vars(file)
        record = {"capturable": True} | {name: own[name] for name in ("bind", *OPTIONAL) if name in own}
        if "FILE" in own:
            record.setdefault("programs", own["FILE"].programs)
        record["limits"] = limits_of(file)
        found.append(Impl(_names(file)[-1], **record))
    return found


def limits_of(file: Tier[Any, Any]) -> Callable[[Any], str | None]:
    """What must be there for the implementation in a file, then the limits that it states."""
    tier, own = _names(file)[-1], vars(file).get("limits", lambda spec: None)

    def limits(spec: Any) -> str | None:
        why: str | None = missing(tier, spec.device)
        return own(spec) if why is None else why

    return limits


def missing(tier: str, device: torch.device) -> str | None:
    """Why no kernel of a file of this name runs on the device; None if one may."""
    if tier == "cpu":
        return cpu_kernels.missing() if device.type == "cpu" else "runs on CPUs only"
    return tri.missing(device) if tier == "triton" else jit.missing(device)


def _names(file: Tier[Any, Any]) -> list[str]:
    name: str = vars(file)["__name__"]
    return name.split(".")


@dataclass
class Op(Generic[Spec, Launch]):
    """The record of an op. To add an op, add its folder.

    check        returns a sentence when an implementation differs from the reference: check(launch, reference_launch, spec)
    home         "module:name" where a child process finds this op; empty: pyspec.cuda.ops.<name>.op:<name>
    guard        number and meaning of its fault records, if its kernels have guards
    shapes       specs of usual models, for `pyspec doctor`; an op without any is a part of another op and not listed
    more_shapes  further specs that a package's cubins are compiled for
    named        the op whose name selects this one, too, in `--kernels`
    beside       joins a bound launch with those of other ops, which take some rows in its place
    also         further ops that this one is bound with
    in_prompts   some implementation may stand in the graph of a prompt that stands alone
    holds_prompts  whether the one of a spec may
    scratch      bytes that a launch of so many rows, in contexts of up to so many tokens, takes beside its inputs and outputs, where a load's
                 plan counts them
    loaded       of an op whose launch is loaded with weights: what calls run as, made of its spec and the loaded launch
    decided      the implementation chosen for each spec so far under this thread's context
    """

    name: str
    reference: Impl[Spec, Launch]
    impls: Sequence[Impl[Spec, Launch]] = ()
    check: Callable[[Launch, Launch, Spec], str | None] | None = None
    home: str = ""
    guard: Guard | None = None
    shapes: Callable[[torch.device], list[Spec]] = _no_shapes
    more_shapes: Callable[[torch.device], list[Spec]] = _no_shapes
    named: str = ""
    beside: Callable[[Launch, Spec], Launch] = lambda launch, spec: launch
    also: Callable[[Spec], Iterable[Ask]] = lambda spec: ()
    in_prompts: bool = True
    scratch: Callable[[Spec, int, int], int] = lambda spec, n_row, n_token: 0
    loaded: Callable[[Spec, Any], Any] | None = None
    holds_prompts: Callable[[Spec], bool] = lambda spec: True
    verdicts: dict[tuple[str, object], str | None] = field(default_factory=dict)
    said: set[str] = field(default_factory=set)
    _decided: dict[KernelContext, dict[Spec, Impl[Spec, Launch]]] = field(default_factory=dict)

    @property
    def decided(self) -> dict[Spec, Impl[Spec, Launch]]:
        return self._decided.setdefault(current(), {})

    def __post_init__(self) -> None:
        self.home = self.home or f"pyspec.cuda.ops.{self.name}.op:{self.name}"

    @property
    def is_listed(self) -> bool:
        return self.shapes is not _no_shapes

    def out_of_question(self, impl: Impl[Spec, Launch], spec: Spec) -> str | None:
        """Why `impl` can not run `spec`, without a check."""
        if (why := impl.limits(spec)) is not None or (why := _outside(impl, spec)) is not None:
            return why
        if (why := current().left_out(self.name, impl.name, self.named)) is not None:
            return why
        if impl.bind.__module__ in current().demoted:
            return "it failed while it ran, and is not used again before the next start"
        return None

    def refusal(self, impl: Impl[Spec, Launch], spec: Spec) -> str | None:
        """Why `impl` can not run `spec`; None if it can."""
        if (why := self.out_of_question(impl, spec)) is not None:
            return why
        key = (impl.name, spec)
        if key not in self.verdicts:
            self.verdicts[key] = self._verdict(impl, spec)
        return self.verdicts[key]

    def candidate(self, impl: Impl[Spec, Launch], spec: Spec) -> Candidate:
        return Candidate(self.name, self.home, impl.name, impl.bind.__module__, spec)

    def _verdict(self, impl: Impl[Spec, Launch], spec: Spec) -> str | None:
        if self.check is None:
            return None
        candidate = self.candidate(impl, spec)
        if impl.native or device_of(spec).type == "cuda":
            return verdicts.refusal(candidate)
        keeps = current().keeps_checks and impl.name == "cpu"
        if keeps and verdicts.has_passed(candidate):
            return None
        try:
            found = self.check(impl.bind(spec), self.reference.bind(spec), spec)
        except Exception as e:  # noqa: BLE001 - any error of a foreign compiler means "do not use it"
            return f"failed its check: {sentence(e)}"
        if keeps and found is None:
            verdicts.keep_passed(candidate)
        return found

    def chosen(self, spec: Spec) -> Impl[Spec, Launch]:
        """The implementation `spec` runs with. Falling back is logged once per reason."""
        decided = self.decided
        if (impl := decided.get(spec)) is None:
            impl = decided[spec] = self._choose(spec)
        return impl

    def has_own(self, spec: Spec, checked_as: Spec | None = None) -> bool:
        """Whether `spec` runs as more than the reference.

        checked_as: a smaller spec that is checked in its place; then only the limits of `spec` are asked.
        """
        impl = self.chosen(spec if checked_as is None else checked_as)
        return impl is not self.reference and impl.limits(spec) is None

    def runs_as(self, name: str, spec: Spec) -> bool:
        """Whether `spec` runs with this implementation, so that other launches may rely on it."""
        return self.chosen(spec).name == name

    def _choose(self, spec: Spec) -> Impl[Spec, Launch]:
        refused, chosen = [], self.reference
        for impl in self.impls:
            if (why := self.refusal(impl, spec)) is None:
                chosen = impl
                break
            refused.append(f"{impl.name}: {why}")
        text = f"{self.name} runs as {chosen.name} ({'; '.join(refused)})"
        is_lower = chosen is self.reference or chosen.name == "triton"  # a CPU's own is not
        if refused and is_lower and text not in self.said:
            self.said.add(text)
            is_news = not all(why.endswith(NOT_HERE) for why in refused)
            log.log(logging.INFO if is_news else logging.DEBUG, "%s", text)
        return chosen

    def bind(self, spec: Spec, context: KernelContext | None = None) -> Launch:
        """Choose now; the returned callable only runs. An implementation that passed its check but fails to bind is refused, too.

        context  None: that of this thread
        """
        if context is not None:
            with within(context):
                return self.bind(spec)
        while (impl := self.chosen(spec)) is not self.reference:
            try:
                return impl.bind(spec)
            except Exception as e:  # noqa: BLE001 - as in a check
                self.verdicts[impl.name, spec] = f"can not be bound: {sentence(e)}"
                del self.decided[spec]
        return impl.bind(spec)

    def choices(self, spec: Spec) -> Iterable[tuple[str, str | None]]:
        """(implementation, why it is refused or None) in order of preference, for `pyspec doctor`."""
        for impl in self.impls:
            yield impl.name, self.refusal(impl, spec)
        yield self.reference.name, None


def declared(
    plain: Tier[Any, Any],
    *files: Tier[Any, Any],
    check: Callable[..., str | None] | None = None,
    capturable: bool = False,
    **more: Any,
) -> Op[Any, Any]:
    """The op of a folder. plain: its reference, whose `GUARD` the op has; files: its implementations; more: fields of `Op`.

    check       None: that of the first of these files with one
    capturable  a graph may hold the reference, too
    """
    check = check or next(vars(file)["check"] for file in (*files, plain) if "check" in vars(file))
    reference, guard = Impl("torch", plain.bind, capturable=capturable), vars(plain).get("GUARD")
    return Op(_names(plain)[-2], reference, implemented(*files), check, guard=guard, **more)


def device_of(spec: object) -> torch.device:
    """Where a spec runs; a spec without a device is the CPU's."""
    device = getattr(spec, "device", None)
    return device if isinstance(device, torch.device) else torch.device("cpu")


def _outside(impl: Impl[Spec, Launch], spec: Spec) -> str | None:
    device = device_of(spec)
    if device.type != "cuda" or torch.version.hip is not None:  # AMD's numbers say something else
        return None
    capability, (first, last) = torch.cuda.get_device_capability(device), impl.capabilities
    if first <= capability <= last:
        return None
    have, low, high = (f"{major}.{minor}" for major, minor in (capability, first, last))
    return f"made for compute capability {low} to {high}, this GPU has {have}"


# -- all of them ---------------------------------------------------------------------------------------------------------


def all_ops() -> list[Op[Any, Any]]:
    """All ops by their folders' names, and those that are parts of others."""
    folders = sorted(
        found.name for found in pkgutil.iter_modules(import_module(FOLDER).__path__) if found.ispkg
    )
    return [op for name in folders if find_spec(f"{FOLDER}.{name}.op") for op in _ops_in(name)]


def op_named(name: str) -> Op[Any, Any]:
    """The op of that folder."""
    found: Op[Any, Any] = vars(import_module(f"{FOLDER}.{name}.op"))[name]
    return found


def _ops_in(folder: str) -> tuple[Op[Any, Any], ...]:
    module = import_module(f"{FOLDER}.{folder}.op")
    found: tuple[Op[Any, Any], ...] = vars(module).get("OPS") or (vars(module)[folder],)
    return found


def listed_ops() -> list[Op[Any, Any]]:
    """Those that are listed: doctor shows them, and `--kernels` takes their names."""
    return [op for op in all_ops() if op.is_listed]


def op_names() -> list[str]:
    return [op.name for op in listed_ops()]


def guarded_ops() -> dict[int, Op[Any, Any]]:
    """Ops whose kernels have guards, by the number in a fault record."""
    return {op.guard.number: op for op in all_ops() if op.guard is not None}


def tiers_of(text: str) -> tuple[tuple[str, str], ...]:
    """Tiers by op, as in KernelContext, of "triton" or "linear=triton,attend=reference". ConfigError for an unknown op."""
    if "=" not in text:
        return () if text == "auto" else (("", text),)
    wanted = dict(part.split("=") for part in text.split(","))
    known = op_names()
    for name in wanted:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"--kernels: there is no op {name}{hint} (there are {', '.join(known)})")
    return tuple(sorted(wanted.items()))


def run_by_torch() -> str:
    """The ops that this thread's context has bound to references which no CUDA graph may hold, with each implementation's reason."""
    found = [
        f"{op.name} ({'; '.join(f'{name}: {why}' for name, why in op.choices(spec) if why is not None)})"
        for op in all_ops()
        for spec, impl in op.decided.items()
        if impl is op.reference and op.impls and not impl.capturable and device_of(spec).type == "cuda"
    ]
    return "; ".join(dict.fromkeys(found)) or "the sums of ranks"


def unmet_tiers(device: torch.device) -> str:
    """The wishes of `--kernels` that are not met, as a message; "" if there are none. Call it once everything is bound."""
    asked = [name for name, tier in current().tiers if tier in TIERS]
    if device.type != "cuda" and not tri.interprets():
        return (
            "these kernels run on GPUs only, and this runs on the CPU, as without them" if asked else ""
        )
    found = [line for op in listed_ops() if (line := _unmet(op))]
    more = f"; and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
    return "; ".join(found[:MAX_LISTED]) + more


def _unmet(op: Op[Any, Any]) -> str:
    wanted = [
        impl for impl in op.impls if impl.name in TIERS.get(current().wanted(op.name, op.named), ())
    ]
    for spec, impl in op.decided.items():
        if wanted and impl not in wanted:
            return f"{op.name} runs as {impl.name} ({wanted[0].name}: {op.refusal(wanted[0], spec)})"
    return ""
