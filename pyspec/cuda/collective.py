"""Sums and gathers of tensors over ranks, the processes that run one model together.

Each rank sums in the order of the ranks. So all ranks get the same bits, and a row's bits do not depend on the rows beside it, as they
would in a ring, which adds each part of a tensor in another order. Tensors above the limit of `PeerSum`, or above SMALL without a
`PeerSum` (prompts), go to NCCL, which shares the work.
"""

from __future__ import annotations

import datetime
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyspec.cuda.kernel_context import current
from pyspec.cuda.rank import Rank
from pyspec.errors import RankLost

if TYPE_CHECKING:
    from pyspec.cuda.ops.peer_sum.cuda import PeerSum

log = logging.getLogger(__name__)

SMALL = 1 << 20  # bytes up to which each rank sums gathered tensors itself
LEAVE_S = 10.0  # for the library to leave the group: it waits for the device
WATCHDOG_S = 0.3  # NCCL's watchdog looks every tenth of a second
JOIN_S = 120.0  # for all ranks to meet


def sums_by(device: torch.device) -> str:
    """How ranks on such devices sum, for messages."""
    if device.type != "cuda":
        return "gloo, gathered and summed in the order of ranks"
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return "not at all: this torch has no NCCL"
    return "one launch in each other's memory where its check passes, else NCCL, which sums prompts"


SHARE_GPU = "PYSPEC_SHARE_GPU"
"""Environment variable: several ranks may share one GPU, to test them on one card. NCCL refuses that, so tensors are gathered through the
host, and forwards are not captured."""


def may_share_gpu() -> bool:
    """Whether the environment asks for several ranks on one GPU."""
    return os.environ.get(SHARE_GPU, "") not in ("", "0")


class Calls:
    """What this rank runs together with the others, and waits in: its calls that are not over on its device.

    One thread begins calls; another one may watch.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._n, self._last = 0, "none"
        self._open: deque[tuple[float, list[torch.cuda.Event | None]]] = deque()

    def count(self, name: str) -> None:
        """A call in which no rank waits for another one."""
        self._n, self._last = self._n + 1, name

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """The body is a call of this name. It is over when the device has run what the body launched."""
        ends: list[torch.cuda.Event | None] = []
        self.count(name)
        self._open.append((time.monotonic(), ends))
        try:
            yield
        finally:
            event = torch.cuda.Event() if self._is_gpu else None
            if event is not None:
                with suppress(RuntimeError):  # the device may be lost: then the call is not over
                    event.record()
            ends.append(event)

    def waits(self) -> tuple[float, str]:
        """For how many seconds the oldest open call has run, and words about this rank: which call it has begun last."""
        while self._open and self._is_over(self._open[0][1]):
            self._open.popleft()
        said = f"in call {self._n} ({self._last})"
        if not self._open:
            return 0.0, f"behind {said[3:]}"
        return time.monotonic() - self._open[0][0], said

    def _is_over(self, ends: list[torch.cuda.Event | None]) -> bool:
        try:
            return bool(ends) and (ends[0] is None or ends[0].query())
        except RuntimeError:
            return False


class Collective:
    """The group of ranks, seen from one of them. `why` gives the reason why a rank is gone, if it is known.

    calls       that its owner runs together with the other ranks
    capturable  CUDA graphs may hold its operations
    peers       sums through peer memory; None: the library sums
    """

    def __init__(self, rank: Rank, device: torch.device, store: str, timeout_s: float) -> None:
        """Meet the other ranks at the file `store`, which is new. timeout_s: for one operation."""
        self.rank, self.device, self.calls = rank, device, Calls(device)
        self.why: Callable[[], str] = str
        self._is_gpu = device.type == "cuda"
        self.capturable = not (self._is_gpu and may_share_gpu())
        try:
            self._group = _join(rank, device, store, timeout_s)
        except RuntimeError as e:
            raise self._lost(e) from None
        self._leaving = _Leaving(self._group) if self._is_gpu else None
        if self._leaving is not None:
            # a group that was not left before the program ends needs no leaving
            weakref.finalize(self, self._leaving.leave).atexit = False
        self.peers: PeerSum | None = None
        self._distrusted: PeerSum | None = None
        if self._is_gpu:
            from pyspec.cuda.ops.peer_sum.cuda import make

            self.peers, why = make(
                rank.index, rank.n, device, self._all, None if self.capturable else self._meet
            )
            log.info(
                "sums of ranks: %s",
                f"NCCL ({why})" if why else "one launch in each other's memory (peer_sum)",
            )

    @property
    def most_summed(self) -> int:
        """Numbers of the largest sum that one launch in the others' memory makes, and that a CUDA graph may hold; 0: none."""
        return self.peers.layout.most if self.peers is not None and self.capturable else 0

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, the same bits on each of them."""
        if not x.numel():
            return x
        if self.peers is not None and self.peers.takes(x):
            return self.peers(x)
        if self._is_gpu and self.capturable and x.numel() * x.element_size() > SMALL:
            x = x.contiguous()
            # two numbers have one sum; for more, the library's order depends on their place in the tensor
            if current().is_exact and self.rank.n > 2:
                pieces = x.view(-1).split(SMALL // x.element_size())
                return torch.cat([self._in_order(piece) for piece in pieces]).view(x.shape)
            self._wait(lambda: self._group.allreduce([x]))
            return x
        return self._in_order(x)

    def _in_order(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in the order of the ranks."""
        parts = self._all(x)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def columns(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """x [row, widths[rank]] of every rank, side by side."""
        if not x.shape[0]:
            return x.new_empty(0, sum(widths))
        most = max(widths)
        if x.shape[1] < most:
            x = torch.nn.functional.pad(x, (0, most - x.shape[1]))
        parts = self._all(x)
        return torch.cat([part[:, :n] for part, n in zip(parts, widths, strict=True)], -1)

    def spread(self, x: Tensor) -> None:
        """Copy the first rank's x to all ranks."""
        own = x if self.capturable else x.cpu()
        self._wait(lambda: self._group.broadcast(own, 0))
        if own is not x:
            x.copy_(own)

    def gather(self, x: Tensor) -> Sequence[Tensor]:
        """Every rank's x, of any dtype, in their order."""
        if not x.numel():
            return [x] * self.rank.n
        return [
            part.view(x.dtype).view(x.shape)
            for part in self._all(x.contiguous().view(-1).view(torch.uint8))
        ]

    def deal(self, parts: Iterator[Tensor] | None, own: Tensor) -> Tensor:
        """Scatter: the first rank sends one of `parts` to each rank in order, into the contiguous `own`. parts: None on the other ranks."""
        place = own.view(-1).view(torch.uint8) if own.numel() else own.new_empty(0, dtype=torch.uint8)
        whole = torch.empty(
            self.rank.n, len(place), dtype=torch.uint8, device=own.device if self.capturable else "cpu"
        )
        if parts is not None:
            for row in whole:
                row.copy_(next(parts).contiguous().view(-1).view(torch.uint8))
        if own.numel():
            self.spread(whole)
            place.copy_(whole[self.rank.index])
        return own

    def stacked(self, x: Tensor) -> Tensor:
        """[rank, ...]: every rank's x."""
        if not x.numel():
            return x.new_empty(self.rank.n, *x.shape)
        own = x.contiguous().view(-1)
        own = own if self.capturable else own.cpu()
        parts = own.new_empty(self.rank.n * x.numel())
        self._wait(lambda: self._group._allgather_base(parts, own))
        return parts.to(x.device).view(self.rank.n, *x.shape)

    def _all(self, x: Tensor) -> Sequence[Tensor]:
        """Every rank's x, in their order."""
        return self.stacked(x).unbind()

    def _meet(self) -> None:
        """Wait until all ranks are here and the work that each launched before is done."""
        torch.cuda.current_stream(self.device).synchronize()
        own = torch.zeros(1)
        self._wait(lambda: self._group._allgather_base(own.new_empty(self.rank.n), own))

    def _wait(self, begin: Callable[[], Any]) -> None:
        try:
            begin().wait()
        except RuntimeError as e:
            raise self._lost(e) from None

    def _lost(self, error: RuntimeError) -> RankLost:
        said = self.why() or (str(error).splitlines() or ["no reason given"])[0][:300]
        return RankLost(f"rank {self.rank.index} of {self.rank.n} has lost the others: {said}")

    def distrust_peers(self) -> None:
        """From now on the library sums, on all ranks. Memory that other ranks may still write to stays."""
        self._distrusted, self.peers = self.peers, None

    def leave(self) -> None:
        """Leave the group, in bounded time. Free all graphs that hold a sum before, because NCCL waits for those."""
        if self._leaving is not None:
            # otherwise NCCL's watchdog reports work that it has not seen finish as an error
            time.sleep(WATCHDOG_S)
            self._leaving.leave()

    def abort(self) -> None:
        """Abort: no rank waits for the others any more."""
        with suppress(Exception):
            if (peers := self.peers or self._distrusted) is not None:
                peers.release()
        with suppress(Exception):
            self._group.abort()


class _Leaving:
    """Leaves a process group of NCCL in bounded time. The group's own end waits for graphs that hold its work, which may live until the program
    ends: it waited for 15 minutes there. A daemon thread that was started long before can still run then. It also keeps the group of a program
    that ends without leaving it, so that nothing waits.
    """

    def __init__(self, group: Any) -> None:
        self._now, self._left = threading.Event(), threading.Event()
        threading.Thread(target=self._run, args=(group,), name="pyspec-leave", daemon=True).start()

    def _run(self, group: Any) -> None:
        self._now.wait()
        with suppress(Exception):
            group.abort()
        self._left.set()

    def leave(self) -> None:
        """Leave the group, and log a part of it that does not end in time. Safe to call twice."""
        self._now.set()
        if not self._left.wait(LEAVE_S):
            log.warning("NCCL has not let go of the other ranks within %.0f s", LEAVE_S)


def _join(rank: Rank, device: torch.device, store: str, timeout_s: float) -> Any:
    """A process group of its own: torch's default one is the program's."""
    import torch.distributed as dist  # not needed on one device

    meeting = dist.FileStore(store, rank.n)
    meeting.set_timeout(datetime.timedelta(seconds=JOIN_S))
    limit = datetime.timedelta(seconds=timeout_s)
    if device.type == "cuda" and not may_share_gpu():
        # multicast over NVLink: not on every machine that says it has it
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        # Engine/load/ranks.py watches the ranks
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = limit
        group: Any = dist.ProcessGroupNCCL(meeting, rank.index, rank.n, nccl)
        return group
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # which torch's stubs leave out
    gloo._timeout = limit
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(meeting, rank.index, rank.n, gloo)
