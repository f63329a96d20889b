"""Streams whose parts' rows are sums of ranks: of few rows the launch that merges them sums them, too (streams.cu, RANKS), for a launch less each, and
for two where experts are summed.

All ranks must do alike, for each waits for the others' part: whether they do is agreed when a model is bound, and for how many rows. What a launch
gives is compared then with a sum and a launch that merges it, to the bit; where something differs all of them sum by NCCL.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pyspec.cuda.collective import Collective
from pyspec.cuda.context import per_device
from pyspec.cuda.jit import Arg, Kernel, arch_of, compile_cubin
from pyspec.cuda.ops.peer_sum.cuda import LIMIT, MOST_RANKS, PeerSum, Places, agreed
from pyspec.cuda.ops.rows.cuda import Place, Shares
from pyspec.cuda.ops.streams.cuda import MERGES, N_STREAM, THREADS, StreamsLaunch, defines, random_mix, shares_and_sums
from pyspec.cuda.ops.streams.ref import Reading, StreamMix, Streams

log = logging.getLogger(__name__)

MOST = 8  # rows, at most
SENT = 1 << 20
"""Bytes that a rank sends for a sum, at most: each goes once for every stream, where a launch of its own would send it once."""
NUMBERS = 4 * THREADS  # of a row in a CTA: of a quad each
SIGNATURE = "p" * MOST_RANKS + "piii"  # behind the arguments of MERGES


class SumStreams:
    """Implements `Streams` where y, what goes back into them, is this rank's part of a sum. Of few rows `few` sums, where there is one."""

    def __init__(self, ranks: Collective, streams: Streams, few: FewSummed | None = None) -> None:
        self.ranks, self.streams, self.few = ranks, streams, few
        self.reads_into = getattr(streams, "reads_into", False)  # see fuse.py

    def sums_of(self, n_row: int) -> bool:
        """Whether `merge_split` of so many rows takes what experts gave as it is, too."""
        few = self._few(n_row)
        return few is not None and few.streams.sums_of(n_row)

    def split(self, x: Tensor, mix: StreamMix, into: Place | None = None) -> Reading:
        return self.streams.split(x, mix, **_told(into))

    def merge(self, y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return self.streams.merge(self.ranks.sum(y), x, post, comb)

    def merge_split(
        self, y: Tensor | Shares, x: Tensor, post: Tensor, comb: Tensor, mix: StreamMix, into: Place | None = None
    ) -> tuple[Tensor, Reading]:
        if (few := self._few(len(x))) is not None:
            return few(y, x, post, comb, mix, into)
        assert isinstance(y, Tensor)  # who gives shares has asked
        return self.streams.merge_split(self.ranks.sum(y), x, post, comb, mix, **_told(into))

    def head(self, x: Tensor, mix: StreamMix) -> Tensor:
        return self.streams.head(x, mix)

    def _few(self, n_row: int) -> FewSummed | None:
        few = self.few
        return few if few is not None and few.peers is self.ranks.peers and 0 < n_row <= few.most else None


def _told(into: Place | None) -> dict[str, Place]:
    return {} if into is None else {"into": into}


@dataclass(frozen=True, slots=True)
class FewSummed:
    """Launches what sums y of all ranks and merges it, of up to `most` rows. limit: see peer_sum.cu. Implements `MergesFew`."""

    peers: PeerSum
    streams: StreamsLaunch
    kernels: dict[str, Kernel]
    most: int
    limit: int = 0

    def __call__(
        self, y: Tensor | Shares, x: Tensor, post: Tensor, comb: Tensor, mix: StreamMix, into: Place | None = None
    ) -> tuple[Tensor, Reading]:
        return self.streams.merge_split_by(self, y, x, post, comb, mix, into)

    def lines(self, n_row: int) -> tuple[tuple[int, int], tuple[np.int32, np.int32]]:
        """Of as many CTAs as have places: one grid on all ranks, whatever GPUs they have."""
        n_chunk = self.streams.n_chunk
        per_cta = -(-n_row // min(n_row, self.peers.layout.blocks // n_chunk))
        return (n_chunk, -(-n_row // per_cta)), (np.int32(n_row), np.int32(per_cta))

    def merge_few(self, name: str, grid: tuple[int, int], args: Sequence[Arg]) -> None:
        p = self.peers
        for steps in p.steps():
            others: list[Arg] = [*p.buffers, p.late, np.int32(p.rank), np.int32(steps), np.int32(self.limit)]
            self.kernels[name].launch(grid, THREADS, [*args, *others], overlap=self.streams.overlap)


def flaw(few: FewSummed) -> str:
    """What is wrong first with what this rank gets, in sizes of all kinds; "" if nothing is. Called by all ranks together, and none leaves early: the
    others need its part."""
    few, streams, late, spec = replace(few, limit=LIMIT), few.streams, few.peers.late, few.streams.spec
    why, same, own = "", torch.Generator().manual_seed(0), torch.Generator().manual_seed(few.peers.rank + 1)
    mix = random_mix((2 + N_STREAM) * N_STREAM, spec, same)
    for n_row in range(1, few.most + 1):
        x = torch.randn(n_row, N_STREAM, spec.n, generator=same).to(late.device)
        _, post, comb = streams.split(x, mix)
        y = (torch.randn(n_row, spec.n, generator=own) * 100).to(late.device)
        y[:, ::3] = -0.0  # what stands for nothing
        pairs: list[tuple[Tensor | Shares, Tensor]] = [(y, y)]
        if streams.sums_of(n_row):
            pairs += shares_and_sums(n_row, spec.n, late.device, own)
        for given, whole in pairs:
            total = few.peers(whole, LIMIT)
            want, got = streams.merge_split(total, x, post, comb, mix), few(given, x, post, comb, mix)
            if late.item():
                why = why or f"a sum of {n_row} rows waits for a rank in vain"
            if not all(map(torch.equal, (got[0], *got[1]), (want[0], *want[1]))):
                what = "" if isinstance(given, Tensor) else " of what experts gave"
                why = why or f"{n_row} rows{what} are not those of a sum and a launch behind it"
    return why


def most_rows(n: int, layout: Places) -> int:
    """Rows of n columns that are summed so: as many as have places, and are worth it."""
    n_chunk, sent = -(-n // THREADS), 4 * n * N_STREAM * (layout.n - 1)
    return min(MOST, SENT // sent, layout.blocks // n_chunk * (layout.place // NUMBERS))


@per_device
def _kernels(device: torch.device, n: int, n_iter: int, places: Places) -> dict[str, Kernel]:
    macros = defines(n, n_iter) | places.defines
    code = compile_cubin("streams", arch_of(torch.cuda.get_device_capability(device)), macros)
    return {name: code.kernel(name, form + SIGNATURE) for name, form in MERGES.items()}


def summing(ranks: Collective, streams: Streams) -> SumStreams:
    """`streams` of sums of ranks. Called by all ranks together, with streams of the same sizes."""
    plain, peers = SumStreams(ranks, streams), ranks.peers
    if peers is None:
        return plain
    device, few, why = peers.late.device, None, ""
    own = most_rows(streams.spec.n, peers.layout) if isinstance(streams, StreamsLaunch) else 0
    most = int(torch.stack(list(ranks.gather(torch.tensor([own], device=device)))).amin())
    if not most:
        return plain
    try:
        assert isinstance(streams, StreamsLaunch)  # of other streams no row is summed so
        spec = streams.spec
        few = FewSummed(peers, streams, _kernels(device, spec.n, spec.n_iter, peers.layout), most)
    except Exception as e:  # noqa: BLE001 - as in an op's check: there are launches that do the same
        why = f"{type(e).__name__}: {e}"
    if why := agreed(why, device, ranks.gather):
        log.warning("launches that merge streams do not sum what ranks made: %s", why)
        return plain
    assert few is not None
    if why := agreed(flaw(few), device, ranks.gather):
        # a launch that gave up, or went astray, may have left numbers behind that a later sum would take for its own
        log.warning("launches that merge streams sum nothing of ranks, and NCCL does: %s", why)
        ranks.distrust_peers()
        return plain
    log.info("sums of ranks, of up to %d rows, are made by what merges them into the streams", most)
    return SumStreams(ranks, streams, few)
