"""The lane of a device: jobs of its kernels that a thread of this process computes with experts in the host's memory.

The thread is C++ (pyspec/cpu/native/moe_lane.cpp). It spins while jobs come and for ten milliseconds behind, and sleeps in between: graphs
wake it when they are launched. A job's memory is pinned, so that kernels write and read it where it lies.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from typing import Any

import torch
from torch import Tensor

from pyspec.cache import n_cores
from pyspec.cpu import kernels
from pyspec.cuda.context import context_of, per_device
from pyspec.cuda.jit import Arg, Kernel, arch_of, compile_cubin
from pyspec.cuda.ops.moe.cpu import CpuExperts
from pyspec.cuda.ops.moe.ref import Added
from pyspec.cuda.ops.rows.cuda import is_aligned
from pyspec.cuda.ops.rows.ref import Norm

JOB_ROWS = 128  # of a job at most: those of the largest usual graph. More rows go in pieces
HEAD, N_STATE = 32, 8  # numbers of moe_lane.cu's head and state
LIMIT = 4_000_000_000  # of a GPU's clock: two seconds, about, that a kernel waits for the host
THREADS = 256
_JOB = struct.Struct("<8q")


def library() -> ctypes.CDLL:
    """The C++ kernels, with what the lane calls."""
    found = kernels.compiled()
    assert isinstance(found, ctypes.CDLL), found
    for name in ("start", "add", "serve", "busy"):
        getattr(found, f"pyspec_lane_{name}").restype = ctypes.c_int64
    return found


class HostLane:
    """The thread of a device. n_thread: that share the products of each layer, itself among them; 0: as many as kernels take that are bound now
    (`-t`), but one of the processors is the engine's.

    has_thread: False where `serve` is called in its place.
    """

    def __init__(self, device: torch.device, n_thread: int = 0, *, has_thread: bool = True) -> None:
        self.device, self.native, self.has_thread = device, library(), has_thread
        self.n_thread = n_thread
        handle = self.native.pyspec_lane_start(ctypes.c_int64(has_thread))
        self.handle = ctypes.c_void_p(handle)
        self.stop = weakref.finalize(self, self.native.pyspec_lane_stop, self.handle)
        self._jobs: dict[tuple[int, int], LaneJob] = {}

    def wake(self) -> None:
        """Jobs are about to come."""
        self.native.pyspec_lane_wake(self.handle)

    def serve(self) -> int:
        """Compute the jobs that have come, on this thread. Their number."""
        n: int = self.native.pyspec_lane_serve(self.handle)
        return n

    @property
    def busy_ns(self) -> int:
        """Nanoseconds that jobs have taken so far."""
        n: int = self.native.pyspec_lane_busy(self.handle)
        return n

    def job(self, n_in: int, n_used: int) -> LaneJob:
        """The memory of jobs of layers of this shape, which take turns."""
        if (n_in, n_used) not in self._jobs:
            self._jobs[n_in, n_used] = LaneJob(self, n_in, n_used)
        return self._jobs[n_in, n_used]

    def add(self, experts: CpuExperts, n_used: int, counts: Tensor) -> LaneLayer:
        """A layer's experts. counts [2] int64 on the host: misses and jobs from now on."""
        return LaneLayer(self, experts, n_used, counts)


class LaneLayer:
    """Experts that the lane computes with, until this is gone."""

    def __init__(self, lane: HostLane, experts: CpuExperts, n_used: int, counts: Tensor) -> None:
        assert counts.dtype == torch.int64 and counts.shape == (2,) and counts.is_contiguous()
        given, at = experts.described(n_used), ctypes.c_void_p(counts.data_ptr())
        self.n_thread = lane.n_thread or max(1, min(kernels.n_thread(), n_cores() - 1))
        n = ctypes.c_int64(self.n_thread)
        self.number: int = lane.native.pyspec_lane_add(lane.handle, given, at, n)
        self.kept = experts, counts, lane
        weakref.finalize(self, _drop, lane.stop, lane.native, lane.handle, self.number)


def _drop(stop: Any, native: ctypes.CDLL, handle: ctypes.c_void_p, layer: int) -> None:
    if stop.alive:
        native.pyspec_lane_drop(handle, ctypes.c_int64(layer))


class LaneJob:
    """Memory that the card and the host share, and the card's own words about it; see moe_lane.cu."""

    def __init__(self, lane: HostLane, n_in: int, n_used: int) -> None:
        pin = lane.device.type == "cuda"

        def shared(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, pin_memory=pin)

        with torch.inference_mode(False):
            self.head = shared(HEAD, dtype=torch.int32)
            self.ids = shared(JOB_ROWS, n_used, dtype=torch.int32)
            self.weights = shared(JOB_ROWS, n_used, dtype=torch.float32)
            self.x, self.y = (shared(JOB_ROWS, n_in, dtype=torch.float32) for _ in "xy")
            self.state = torch.zeros(N_STATE, dtype=torch.int32, device=lane.device)
        tensors = self.head, self.ids, self.weights, self.x, self.y
        at = (t.data_ptr() for t in tensors)
        lane.native.pyspec_lane_job(lane.handle, _JOB.pack(*at, JOB_ROWS, n_used, n_in))


@per_device
def lane_of(device: torch.device) -> HostLane:
    """A device's lane, which all its engines share. Graphs wake it."""
    lane = HostLane(device)
    context_of(device).wakes.append(lane.wake)
    return lane


@per_device
def lane_kernels(device: torch.device) -> tuple[Kernel, Kernel]:
    """lane_split and lane_gate."""
    code = compile_cubin("moe_lane", arch_of(torch.cuda.get_device_capability(device)))
    split, gate = 14 * "p" + 6 * "i" + "f", 12 * "p" + "iil"
    return code.kernel("lane_split", split), code.kernel("lane_gate", gate)


class Split:
    """A job on its way, and what the card has of the rows. missed [row] int32; hits [row, n_used] int32, None: nothing is on the card."""

    def __init__(
        self,
        job: LaneJob,
        layer: LaneLayer,
        x: Tensor,
        norm: Norm | None,
        ids: Tensor,
        weights: Tensor,
        slots: Tensor | None,
        row_seq: Tensor | None,
        n_expert: int,
        used: Tensor | None = None,
    ) -> None:
        """x [row, n_in] f32, at most JOB_ROWS rows; slots [n_expert] int16; used [JOB_ROWS, n_used] int16. x and used may be columns of wider rows."""
        (n_row, n_in), n_used = x.shape, ids.shape[1]
        assert n_row <= JOB_ROWS and is_aligned(x) and x.dtype == torch.float32
        assert ids.dtype == torch.int32 and ids.is_contiguous() and weights.is_contiguous()
        assert row_seq is None or (row_seq.dtype == torch.int32 and len(row_seq) == n_row)
        self.job, self.weights = job, weights
        self.missed = torch.empty(n_row, dtype=torch.int32, device=x.device)
        self.hits = None if slots is None else torch.empty_like(ids)
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        args: list[Arg] = [x, weight, ids, weights, slots, row_seq, self.hits, self.missed]
        args += [job.head, job.ids, job.weights, job.x, job.state, used]
        n_wide = 0 if used is None else used.stride(0)
        args += [layer.number, n_in // 4, x.stride(0) // 4, n_used, n_expert, n_wide, eps]
        split, _ = lane_kernels(x.device)
        split.launch((n_row,), THREADS, args, overlap=True)


def gate(
    y: Tensor | None,
    hits: Tensor | None,
    weights: Tensor,
    added: Added,
    out: Tensor,
    fault: Tensor,
    split: Split | None,
) -> None:
    """out [row, n_in] = what `added` says + the hits' y [row * n_used, n_in], weighed, + the host's sums of `split`, which it waits for."""
    (n_row, n_in), n_used, job = out.shape, weights.shape[1], None if split is None else split.job
    assert (y is None) == (hits is None) and out.is_contiguous()
    given = added.shared, added.gate, added.residual
    assert all(t is None or t.is_contiguous() for t in given)
    args: list[Arg] = [y, hits, weights, *given, out]
    args += [None] * 4 if job is None or split is None else [split.missed, job.head, job.y, job.state]
    args += [fault, n_used, n_in // 4, LIMIT]
    _, kernel = lane_kernels(out.device)
    kernel.launch((n_row, -(-n_in // (4 * THREADS))), THREADS, args, overlap=True)
