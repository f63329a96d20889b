"""The sum of ranks on NVIDIA GPUs that reach each other's memory: one launch (peer_sum.cu), where NCCL has two and a sum.

When the ranks meet, all of them check it together against tensors that NCCL gathers. If it is not available, late or gives other bits,
all of them go on with NCCL. Memory that peers reach comes from the driver, because torch cuts its tensors out of larger pieces.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyspec.cuda.jit import Arg, Kernel, arch_of, compile_cubin, missing
from pyspec.cuda.kernel_context import current
from pyspec.cuda.ops.peer_sum.places import CHUNK, MOST_RANKS, Places
from pyspec.errors import DeviceError

THREADS = 256
NOTHING = 0x80000000  # no rank has written here yet (peers.cuh)
HANDLE = 64  # bytes of the driver's handle of memory, for other processes
LIMIT = 400_000  # times that a thread of a check looks around: seconds
SIGNATURE = "pp" + "p" * MOST_RANKS + "piiii"
SEND, SUM, TAKE = 1, 2, 4  # steps of peer_sum.cu
# Numbers from which more than two ranks share a sum, instead of each sending all of its own to each
SHARED = 1 << 18
Place = Tensor | np.int64
Meet = Callable[[], None]
Gather = Callable[[Tensor], Sequence[Tensor]]  # a tensor -> every rank's


class PeerSum:
    """out = the ranks' x in their order. buffers: of every rank, as this one reaches them, with NOTHING in them and no call counted.

    meet: returns when all ranks have called it and their launches before that are over. For ranks that share a GPU: a kernel that waits there
    for another process holds the GPU for all of its turn (two milliseconds and more), and the other one waits for its own.
    """

    def __init__(
        self,
        whole: Kernel,
        shared: Kernel,
        rank: int,
        buffers: Sequence[Place],
        late: Tensor,
        meet: Meet | None = None,
    ) -> None:
        self.whole, self.shared, self.rank, self.n, self.late = whole, shared, rank, len(buffers), late
        self.meet = meet
        self.layout = Places(len(buffers))
        self.buffers = [*buffers, *[buffers[0]] * (MOST_RANKS - len(buffers))]

    def takes(self, x: Tensor) -> bool:
        """Whether it sums tensors like this: NCCL takes what is larger than the places."""
        aligned = x.is_contiguous() and x.data_ptr() % 16 == 0 and x.numel() % 4 == 0
        return x.dtype == torch.float32 and aligned and 0 < x.numel() <= self.layout.most

    def release(self) -> None:
        """A rank is lost: end the waits on this device. May be called on any thread; results of sums are garbage from then on."""
        from cuda.bindings import driver

        over = int(self.buffers[self.rank]) + self.layout.n_bytes - 4
        stream = torch.cuda.Stream(self.late.device)  # the other stream is behind the waiting kernel
        with torch.cuda.device(self.late.device):
            driver.cuMemsetD32Async(over, 1, 1, stream.cuda_stream)

    def __call__(self, x: Tensor, limit: int = 0) -> Tensor:
        out, n = torch.empty_like(x), x.numel()
        grid = min(-(-n // self.layout.chunk), self.layout.blocks)
        is_shared = self.n > 2 and n >= SHARED
        kernel = self.shared if is_shared else self.whole
        for steps in self.steps(is_shared):
            args: list[Arg] = [x, out, *self.buffers, self.late, n, self.rank, steps, limit]
            kernel.launch((grid,), THREADS, args, overlap=True)
        return out

    def steps(self, is_shared: bool = False) -> Iterator[int]:
        """Run the launches one after the other."""
        steps = [SEND, SUM, TAKE] if is_shared else [SEND, SUM]
        if self.meet is None:
            yield sum(steps)
            return
        for i, step in enumerate(steps):
            if i:
                self.meet()
            yield step


def make(
    rank: int, n: int, device: torch.device, gather: Gather, meet: Meet | None = None
) -> tuple[PeerSum | None, str]:
    """The sum, or the reason why there is none. All ranks call it together and get the same answer. meet: see PeerSum."""
    own: Any = None
    handle, why = torch.zeros(HANDLE, dtype=torch.uint8, device=device), _missing(n, device)
    if not why:
        try:
            own = _allocate(Places(n), device)
            handle = torch.tensor(list(_handle_of(own)), dtype=torch.uint8, device=device)
        except Exception as e:  # noqa: BLE001 - on any error there is NCCL
            why = f"no memory that others reach: {e}"
    handles = [h.clone() for h in gather(handle)]
    if why := agreed(why, device, gather):
        return None, why
    launch: PeerSum | None = None
    try:
        places = [own if i == rank else _opened(bytes(h.tolist())) for i, h in enumerate(handles)]
        late = torch.zeros(1, dtype=torch.int32, device=device)
        arch = arch_of(torch.cuda.get_device_capability(device))
        compiled = compile_cubin("peer_sum", arch, Places(n).defines)
        whole, shared = (compiled.kernel(name, SIGNATURE) for name in ("peer_sum", "peer_sum_shared"))
        launch = PeerSum(whole, shared, rank, [np.int64(int(p)) for p in places], late, meet)
        weakref.finalize(launch, _free, own).atexit = False
    except Exception as e:  # noqa: BLE001
        why = f"the others' memory is not reached: {e}"
    why = agreed(why, device, gather)  # no rank begins before all can
    if why or launch is None:
        return None, why
    why = check(launch, gather)
    return (None, why) if why else (launch, "")


def check(launch: PeerSum, gather: Gather) -> str:
    """The first error in sums of several sizes, several times in a row, against sums of gathered tensors; "" if there is none.
    The ranks agree after each sum, because none may go on alone."""
    gen = torch.Generator().manual_seed(launch.rank)
    for n in (4, CHUNK, 5120, 3 * CHUNK + 8, 17 * 5120, launch.layout.most):
        for _ in range(3):
            x = (torch.randn(n, generator=gen) * 100).to(launch.late.device)
            x[::3] = -0.0  # the neutral element
            found, parts = launch(x, LIMIT), gather(x)
            want = parts[0]
            for part in parts[1:]:
                want = want + part
            flaw = (
                ""
                if torch.equal(found, want)
                else f"a sum of {n} numbers has other bits than its parts have"
            )
            if launch.late.item():
                flaw = f"a sum of {n} numbers waits for a rank in vain"
            if why := agreed(flaw, x.device, gather):
                return why
    return ""


def _missing(n: int, device: torch.device) -> str:
    if __name__ in current().demoted:
        return "it is left out"
    if n > MOST_RANKS:
        return f"it is for {MOST_RANKS} ranks at most"
    return missing(device) or ""


def agreed(why: str, device: torch.device, gather: Gather) -> str:
    """The objection of the first rank that has one."""
    text = torch.zeros(200, dtype=torch.uint8)
    said = why.encode()[:200]
    text[: len(said)] = torch.tensor(list(said), dtype=torch.uint8)
    for i, part in enumerate(gather(text.to(device))):
        if other := bytes(part.tolist()).rstrip(b"\0").decode(errors="replace"):
            return f"rank {i}: {other}"
    return ""


def _allocate(layout: Places, device: torch.device) -> Any:
    from cuda.bindings import driver

    place = _done(driver.cuMemAlloc(layout.n_bytes))
    _done(driver.cuMemsetD8(place, 0, layout.n_bytes))
    _done(driver.cuMemsetD32(place, NOTHING, layout.n_number))
    torch.cuda.synchronize(device)
    return place


def _handle_of(place: Any) -> bytes:
    from cuda.bindings import driver

    return ctypes.string_at(_done(driver.cuIpcGetMemHandle(place)).getPtr(), HANDLE)


def _opened(handle: bytes) -> Any:
    from cuda.bindings import driver

    theirs = driver.CUipcMemHandle()
    ctypes.memmove(theirs.getPtr(), handle, HANDLE)
    flag = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    return _done(driver.cuIpcOpenMemHandle(theirs, flag.value))


def _free(place: Any) -> None:
    from cuda.bindings import driver

    driver.cuMemFree(place)


def _done(result: tuple[Any, ...]) -> Any:
    """The result of a driver call; DeviceError with its name if it failed."""
    if result[0].value:
        raise DeviceError(result[0].name)
    return result[1] if len(result) > 1 else None
