"""`gated_streams` on NVIDIA GPUs: gated_streams.cu, one launch for each of the four."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda.jit import Arg, KernelFile
from pyspec.cuda.ops.gated_streams.ref import GatedStreams, GatedStreamsSpec

THREADS, MAX_STREAMS, MAX_COLUMNS = 256, 8, 16384
FORMS = {
    "streams_norm": "ppp" + "f",
    "streams_bend": "pp" + "l" + "ii",
    "streams_read": "ppp",
    "streams_merge": "pppp" + "l",
}


def limits(spec: GatedStreamsSpec) -> str | None:
    if not 0 < spec.n_stream <= MAX_STREAMS:
        return f"{spec.n_stream} streams; the kernel takes up to {MAX_STREAMS}"
    if spec.n % 4 or not 0 < spec.n <= MAX_COLUMNS:
        return f"{spec.n} columns; the kernel takes multiples of 4 up to {MAX_COLUMNS}"
    return None


FILE = KernelFile[GatedStreamsSpec](
    "gated_streams", FORMS, lambda spec: {"STREAMS": spec.n_stream, "COLUMNS": spec.n}
)


class GatedLaunch(GatedStreams):
    """Of one spec."""

    def __init__(self, spec: GatedStreamsSpec) -> None:
        super().__init__(spec)
        self.wide = spec.n_stream * spec.n
        self.kernels = FILE.named(spec.device, spec)
        self.pieces = -(-spec.n // (4 * THREADS))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        x, weight = self._whole(x), self._whole(weight[None])
        out = self._room(x, self.wide)
        grid = len(x), self.spec.n_stream
        self._run("streams_norm", grid, x, weight, out, self.spec.eps)
        return out

    def bend(self, low: Tensor) -> Tensor:
        n_row, n = low.shape
        low, out = self._part(low), self._room(low, n)
        self._run("streams_bend", (-(-n_row * n // THREADS), 1), low, out, low.stride(0), n, n_row)
        return out

    def read(self, normed: Tensor, gates: Tensor) -> Tensor:
        normed, gates = self._whole(normed), self._whole(gates)
        out = self._room(normed, self.spec.n)
        self._run("streams_read", (len(out), self.pieces), normed, gates, out)
        return out

    def merge(self, x: Tensor, y: Tensor, inject: Tensor) -> Tensor:
        x, inject, y = self._whole(x), self._part(inject), y.contiguous()
        assert y.shape == (len(x), self.spec.n) and y.dtype == torch.float32
        assert inject.shape == (len(x), self.spec.n_stream)
        out = self._room(x, self.wide)
        self._run("streams_merge", (len(x), self.pieces), x, y, inject, out, inject.stride(0))
        return out

    def _run(self, name: str, grid: tuple[int, int], *args: Arg) -> None:
        if grid[0]:
            self.kernels[name].launch(grid, THREADS, args, overlap=True)

    def _whole(self, x: Tensor) -> Tensor:
        """Rows of all streams, one behind the other."""
        assert x.shape[1:] == (self.wide,) and x.dtype == torch.float32
        return x.contiguous()

    def _part(self, x: Tensor) -> Tensor:
        """Rows that may lie apart."""
        assert x.dtype == torch.float32
        return x if x.stride(1) == 1 else x.contiguous()

    def _room(self, like: Tensor, n: int) -> Tensor:
        return torch.empty(len(like), n, dtype=torch.float32, device=like.device)


bind = GatedLaunch
