"""Sums of ranks that a product reads next: the launch that sums them also norms and rounds them (rows.cu, RANKS), which saves a launch.

All ranks must do alike, because each waits for the others' part. They agree on it, and on the number of rows, when a model is bound. They
compare a launch to the bit with a sum and a launch that prepares its rows; if any bit differs, all of them sum by NCCL.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from pyspec.cuda.collective import Collective
from pyspec.cuda.context import per_device
from pyspec.cuda.jit import Kernel, arch_of, compile_cubin
from pyspec.cuda.ops.peer_sum.cuda import LIMIT, MOST_RANKS, PeerSum, Places, agreed
from pyspec.cuda.ops.rows.cuda import ROWS_ARGS, THREADS, defines
from pyspec.cuda.ops.rows.ref import Norm, PrepKind
from pyspec.cuda.streamed import Streamed

log = logging.getLogger(__name__)

SIGNATURE = ROWS_ARGS + "p" * (1 + MOST_RANKS) + "piii"
CHECKED = 1, 3, 17, 32, 33, 64, 128  # rows, and the most of them
Reader = tuple[Streamed, Norm]


class SumRows:
    """The sum of all ranks' x [row, n] f32, and the rows that `product` reads of it after `norm`, of up to `most` rows."""

    def __init__(self, ranks: Collective, peers: PeerSum, reader: Reader, most: int) -> None:
        self.ranks, self.peers, (self.product, self.norm), self.most = ranks, peers, reader, most
        self.none = torch.empty(4, dtype=torch.float32, device=peers.late.device)
        n, layouts = len(self.norm.weight), {self.product.reads(i).prepare.layout for i in (1, most)}
        self.kernels = {
            layout: _kernel(peers.late.device, n, layout, peers.layout) for layout in layouts
        }

    def __call__(self, x: Tensor, limit: int = 0) -> Tensor:
        # peers are given up by all ranks together, also where those of a drafter are checked behind the model's
        if not 0 < len(x) <= self.most or self.ranks.peers is not self.peers:
            return self.ranks.sum(x)
        assert x.dtype == torch.float32 and x.is_contiguous()
        to, p, norm = self.product.reads(len(x)), self.peers, self.norm
        rows, out = to.room(len(x)), torch.empty_like(x)
        for steps in p.steps():
            read = x, x.stride(0), norm.weight, norm.eps, norm.power, self.none, 0, 0
            made = rows.blocks, rows.sums, rows.powers, rows.pad, out
            args = *read, *made, *p.buffers, p.late, p.rank, steps, limit
            self.kernels[to.prepare.layout].launch((len(x),), THREADS, args, overlap=True)
        to.hold(out, norm, rows)
        return out

    def flaw(self) -> str:
        """The first error in this rank's results, over sizes of all kinds; "" if there is none. All ranks call it together, and none leaves
        early, because the others need its part."""
        why, gen, late = "", torch.Generator().manual_seed(self.peers.rank), self.peers.late
        for n_row in sorted({min(n, self.most) for n in (*CHECKED, self.most)}):
            x = (torch.randn(n_row, len(self.norm.weight), generator=gen) * 100).to(late.device)
            x[:, ::3] = -0.0  # the neutral element
            to, total = self.product.reads(n_row), self.peers(x, LIMIT)
            places = to.blocks, to.sums, to.powers
            _clear(places)
            to(total, self.norm)
            want = [total, *(t.clone() for t in places)]
            _clear(places)
            got = [self(x, LIMIT), *places]
            to.room(n_row)  # these are not read
            if late.item():
                why = why or f"a sum of {n_row} rows waits for a rank in vain"
            if not all(torch.equal(a, b) for a, b in zip(got, want, strict=True)):
                why = why or f"{n_row} rows are not those of a sum and a launch behind it"
        return why


def _clear(places: Sequence[Tensor]) -> None:
    for t in places:
        t.zero_()


@per_device
def _kernel(device: torch.device, n_in: int, layout: int, places: Places) -> Kernel:
    macros = defines(n_in, PrepKind.NORM, 0, layout) | places.defines
    arch = arch_of(torch.cuda.get_device_capability(device))
    return compile_cubin("rows", arch, macros).kernel("rows", SIGNATURE)


def sums_into(ranks: Collective, readers: Sequence[Reader | None]) -> list[SumRows | None]:
    """For each reader of a sum the launch that makes both, or None if a sum and the reader's own launch do. All ranks call it together, with readers of
    the same matrices."""
    nothing: list[SumRows | None] = [None] * len(readers)
    peers = ranks.peers
    if peers is None or not readers:
        return nothing
    device = peers.late.device
    own = [0 if reader is None else _most(peers, reader) for reader in readers]
    most = torch.stack(list(ranks.gather(torch.tensor(own, device=device)))).amin(0).tolist()
    made, why = nothing, ""
    try:
        made = [
            SumRows(ranks, peers, r, n) if r is not None and n else None
            for r, n in zip(readers, most, strict=True)
        ]
    except Exception as e:  # noqa: BLE001 - as in an op's check: there are launches that do the same
        why = f"{type(e).__name__}: {e}"
    if why := agreed(why, device, ranks.gather):
        log.warning("sums of ranks do not prepare the rows of the next product: %s", why)
        return nothing
    kinds = {(s.product.packed.type, s.product.packed.n_in, s.most): s for s in made if s is not None}
    for one in kinds.values():
        if why := agreed(one.flaw(), device, ranks.gather):
            # a launch that gave up or failed may have left numbers that a later sum would take for its own
            log.warning("sums of ranks prepare no rows, and NCCL takes them: %s", why)
            ranks.distrust_peers()
            return nothing
    if n_made := sum(s is not None for s in made):
        log.info(
            "%d of %d sums of a forward prepare the rows of the next product", n_made, len(readers) + 1
        )
    return made


def _most(peers: PeerSum, reader: Reader) -> int:
    product, norm = reader
    fits = len(norm.weight) <= peers.layout.place and len(norm.weight) % 32 == 0
    return min(product.most_ready(norm), peers.layout.blocks) if fits else 0
