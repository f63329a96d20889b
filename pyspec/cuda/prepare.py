"""Compile and check ahead: while a load reads files and weights, all cores work on the kernels that it will bind.

Threads of this process compile programs into the cache that every process reads (NVRTC releases the GIL and works on many programs at
once). Then children check the kernels (checker.py). An op that is bound meanwhile waits for its own verdict only. A load that leaves a child
no memory begins when all verdicts are known and the child is gone.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from pyspec.cache import n_cores
from pyspec.cuda import checker, jit, kernel_context, tri, verdicts
from pyspec.cuda.checker import EXAMINATION, MOST, Checker, Verdict, sentence
from pyspec.cuda.jit import Compiled, GpuKind, Program
from pyspec.cuda.kernel_context import KernelContext, current
from pyspec.cuda.machine import CUDA_PACKAGES
from pyspec.cuda.op import Ask, Impl, Op, device_of
from pyspec.cuda.verdicts import Candidate
from pyspec.errors import ConfigError, DeviceError
from pyspec.ranges import quoted

log = logging.getLogger(__name__)

KNOWN = (8, 0), (12, 1)  # compute capabilities that there are kernels for, the first and the last
CHILD_BYTES = 3 << 30  # GPU memory that a child may take: context, libraries, the tensors it compares


def target_of(device: torch.device) -> GpuKind:
    about = torch.cuda.get_device_properties(device)
    return GpuKind(torch.cuda.get_device_capability(device), about.multi_processor_count)


@dataclass(frozen=True)
class Wanted:
    """An implementation that will be bound, and its programs."""

    candidate: Candidate
    programs: list[Program]


def wanted_of(asks: Iterable[Ask], target: GpuKind) -> list[Wanted]:
    """For each ask the first implementation within its limits, if a child has to check it."""
    return [
        Wanted(op.candidate(impl, spec), impl.programs_for(spec, target))
        for op, spec in asks
        if (impl := _first(op, spec)) is not None and op.check is not None
    ]


def _first(op: Op[Any, Any], spec: Any) -> Impl[Any, Any] | None:
    if device_of(spec).type != "cuda":
        return None
    return next((impl for impl in op.impls if op.out_of_question(impl, spec) is None), None)


class Preparation:
    """Under way until `close`. n_child: children that check at once."""

    def __init__(self, wanted: Sequence[Wanted], n_thread: int, n_child: int) -> None:
        self.began, self._is_closed = time.perf_counter(), False
        if any(w.programs for w in wanted):
            import cuda.core  # noqa: F401 - before threads import it, each a part of it

        self._compilers = ThreadPoolExecutor(max(1, n_thread), "pyspec-compile")
        self._checkers = ThreadPoolExecutor(max(1, n_child), "pyspec-checks")
        self._compiling: dict[Program, Future[object]] = {}
        self._idle: queue.SimpleQueue[Checker] = queue.SimpleQueue()
        self._extra = [Checker(checker.LIMITS_S) for _ in range(n_child - 1)]
        self._names: list[str] = []
        self._leaving: list[threading.Thread] = []
        keys = [verdicts.key_of(w.candidate) for w in wanted]
        unknown = [verdicts.load(key) is None for key in keys]
        for one in [checker.shared(), *self._extra]:
            self._idle.put(one)
        if any(unknown):
            for one in [checker.shared(), *self._extra][: sum(unknown)]:
                one.start()
        for w in wanted:
            for program in w.programs:
                if program not in self._compiling:
                    self._compiling[program] = self._compilers.submit(_compiled, program)
        for w, key, is_new in zip(wanted, keys, unknown, strict=True):
            if is_new:
                name = verdicts.name_of(key)
                self._names.append(name)
                verdicts.promised[name] = self._checkers.submit(self._check, w, key)

    def _check(self, w: Wanted, key: verdicts.Key) -> Verdict:
        wait([self._compiling[program] for program in w.programs])
        by = self._idle.get()
        try:
            return verdicts.checked(w.candidate, key, by)
        except Exception as e:  # noqa: BLE001 - `bind` asks again and reports it
            return Verdict(f"could not be checked: {sentence(e)}", lasting=False)
        finally:
            self._idle.put(by)

    def finish_first(self, asks: Iterable[Ask]) -> None:
        """Decide all asks, then end the children: the memory that they take is the load's."""
        for op, spec in asks:
            op.chosen(spec)
        self._end()
        checker.shared().stays = False

    def _end(self) -> None:
        self._checkers.shutdown(wait=True)
        self.close()
        checker.close()
        for thread in self._leaving:
            thread.join()

    def finish(self, late: Sequence[Ask], then: Callable[[], None] = lambda: None) -> None:
        """Close in another thread once all verdicts are known, and decide `late`. Then end the children, which frees their GPU memory, and
        call `then`."""
        args = (late, then, replace(current(), n_thread=0))
        threading.Thread(target=self._finish, args=args, name="pyspec-checks-end", daemon=True).start()

    def _finish(self, late: Sequence[Ask], then: Callable[[], None], context: KernelContext) -> None:
        kernel_context.use(context)
        for op, spec in late:
            op.chosen(spec)
        self._end()
        then()

    def close(self) -> None:
        """Cancel work that has not begun. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        for pool in (self._compilers, self._checkers):
            pool.shutdown(wait=False, cancel_futures=True)
        for one in self._extra:  # in other threads, because each waits for its current check
            self._leaving.append(
                threading.Thread(target=one.close, name="pyspec-checks-end", daemon=True)
            )
            self._leaving[-1].start()
        for name in self._names:
            verdicts.promised.pop(name, None)
        n = sum(f.done() for f in self._compiling.values())
        log.info(
            "kernels prepared ahead: %d of %d programs, %d checks, %.1f s",
            n,
            len(self._compiling),
            len(self._names),
            time.perf_counter() - self.began,
        )


def _compiled(program: Program) -> object:
    """None if it fails: the child's check of the kernel that needs the program reports the failure."""
    try:
        return jit.compiled(program)
    except Exception as e:  # noqa: BLE001 - any kind: it is compiled again where it counts
        log.debug("%s", e)
        return None


def settle(asks: Iterable[Ask]) -> None:
    """Decide all asks except those under way."""
    for op, spec in asks:
        impl = _first(op, spec)
        if impl is None or not verdicts.is_awaited(op.candidate(impl, spec)):
            op.chosen(spec)


def n_children(free: int, planned: int, cores: int) -> int:
    """Children that fit cores and the memory beside the planned bytes; at least one, as without preparation."""
    return max(1, min(MOST, cores // 2, (free - planned) // CHILD_BYTES))


def begin(asks: Sequence[Ask], device: torch.device, planned: int) -> Preparation | None:
    """Start, if kernels of ours run on `device`, in either tier. planned: bytes of its memory that the load will take."""
    if EXAMINATION.is_on or (jit.missing(device) is not None and tri.missing(device) is not None):
        return None
    wanted = wanted_of(asks, target_of(device))
    cores, free = n_cores(), torch.cuda.mem_get_info(device)[0]
    checker.shared().stays = True  # an earlier load of this process may have had no room
    preparation = Preparation(wanted, cores, n_children(free, planned, cores))
    if free - planned < CHILD_BYTES:
        with closing(preparation):  # also if an op has no implementation: the load says so itself
            preparation.finish_first(asks)
    return preparation


# -- for GPUs that need not be here -----------------------------------------------------------------------------------


def targets_of(archs: str) -> list[GpuKind]:
    """The named targets, as in "sm_90,sm_120", or this machine's GPUs. DeviceError without a compiler, or without either."""
    if not jit.is_installed():
        raise DeviceError(f"cuda-core is not installed (pip install {CUDA_PACKAGES})")
    if archs:
        return [target_named(name) for name in archs.split(",")]
    if not torch.cuda.is_available():
        raise DeviceError("no NVIDIA GPU here; name architectures (--arch sm_90,sm_120)")
    return [target_of(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]


def target_named(name: str) -> GpuKind:
    """The target that "sm_90", "sm_90a" or "9.0" names. ConfigError if there are no kernels for it."""
    digits = name.strip().lower().removeprefix("sm_").rstrip("af")
    whole = digits.replace(".", "")
    if not whole.isdigit() or len(whole) < 2:
        raise ConfigError(f"{quoted(name)} is no architecture; name them as sm_80,sm_90,sm_120")
    capability = int(whole[:-1]), int(whole[-1])
    first, last = KNOWN
    if not first <= capability <= last:
        raise ConfigError(
            f"there are kernels for sm_{first[0]}{first[1]} to sm_{last[0]}{last[1]}, none for {name}"
        )
    return GpuKind(capability)


@contextmanager
def as_if(target: GpuKind) -> Iterator[None]:
    """Limits are asked as if the GPU were of this kind. For a program that does nothing else meanwhile."""
    was = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda device=None: target.capability
    try:
        yield
    finally:
        torch.cuda.get_device_capability = was


def programs_of(asks: Iterable[Ask], target: GpuKind) -> list[Program]:
    """Everything that is compiled for these asks on such a GPU, each once."""
    with as_if(target):
        found = [program for w in wanted_of(asks, target) for program in w.programs]
    return list(dict.fromkeys(found))


def compile_all(
    programs: Sequence[Program], tell: Callable[[int, str], None]
) -> list[tuple[Program, Compiled | str]]:
    """Compile on all cores, into the cache. Each program with its code, or the reason why it has none.

    tell  callback with the number of programs done and the name of the last
    """
    done = count(1)

    def run(program: Program) -> Compiled | str:
        try:
            return jit.compiled(program)
        except DeviceError as e:
            return str(e)
        finally:
            tell(next(done), f"{program.stem} for {program.arch}")

    with ThreadPoolExecutor(n_cores(), "pyspec-compile") as pool:
        return list(zip(programs, pool.map(run, programs), strict=True))
