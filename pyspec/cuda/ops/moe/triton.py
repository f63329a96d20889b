"""`moe` in Triton: the products of `linear` for pairs of a row and an expert (triton_kernels.py).

Five launches after that of the rows: pairs by expert; gates and ups; the activation; downs; the sum of a row's experts. The fewest rows need
no lists. The rows' choices never reach the host: grids are as large as the number of rows can make them, and programs without work end at
once, so graphs may hold it. A shared expert is cut into pieces of the others' width, which every row takes. Of few rows columns are split over
programs, of many a program makes all splits itself and adds them in the same order: a row's bits do not depend on its company.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda import tri
from pyspec.cuda.ops.linear import tile_codes
from pyspec.cuda.ops.linear.tile_launch import BLOCKS, constants, nothing, planes, table_of
from pyspec.cuda.ops.linear.tiles import COLUMNS, FORMATS, ROWS, TiledMatrix, tile
from pyspec.cuda.ops.moe.cuda import cut
from pyspec.cuda.ops.moe.ref import ACTS, NOTHING, Added, ExpertsRun, MoeSpec, Stack, Stacks
from pyspec.cuda.ops.rows.op import rows
from pyspec.cuda.ops.rows.ref import Norm, PrepKind, RowsSpec
from pyspec.cuda.temporary import temporary

MAX_ROWS, MAX_EXPERT, MAX_USED = 512, 1024, 64
FEWEST = 2  # rows up to which a pair is looked at alone
FEW = 32  # rows up to which columns are split, and a program has 8 pairs
MORE = 128  # and 16; beyond it 32
PROGRAMS = 10  # of a multiprocessor, about, that one row is split for
LEAST = 4  # chunks of a split
STAGES, FEW_STAGES = 3, 3
STRETCH, BETWEEN = 512, 8
MAX_PIECES = 8
WORTH = 1 << 26  # weights repacked at once


def limits(spec: MoeSpec) -> str | None:
    if spec.slots is not None:
        return "experts in the host's memory"
    if spec.biased and spec.pieces:
        return "a shared expert beside experts with biases"
    if spec.up is None or spec.down is None or spec.gate is not None:
        return "takes packed matrices, gates and ups of one type"
    for type in (spec.up, spec.down):
        if type not in FORMATS:
            return f"{type.name} matrices have no tiles"
    if spec.n_in % 32 or spec.n_ff % 32:
        return f"{spec.n_in} and {spec.n_ff} columns; the kernel takes multiples of 32"
    if spec.pieces > MAX_PIECES or (spec.pieces > 1 and spec.n_ff % spec.down.block_size):
        return f"a shared expert of {spec.pieces} pieces of {spec.n_ff} columns"
    if spec.n_used > MAX_USED or spec.n_expert > MAX_EXPERT:
        return f"{spec.n_used} of {spec.n_expert} experts; the kernel takes up to {MAX_USED} of {MAX_EXPERT}"
    return None


def tiled(sources: Sequence[Sequence[Stack]], device: torch.device) -> TiledMatrix:
    """Experts of several sources, one behind the other; of each the matrices of one input, padded to whole tiles, below each other."""
    first = sources[0][0]
    assert first.type is not None
    n_tile = sum(-(-s.n_out // ROWS) for s in sources[0])
    n_all, whole, at = sum(part[0].data.shape[0] for part in sources), None, 0
    step = max(1, WORTH // (n_tile * ROWS * first.n_in))
    for part in sources:
        for start in range(0, part[0].data.shape[0], step):
            with temporary(device):
                raws = [
                    s.data[start : start + step].reshape(-1, s.n_out, s.data[0].numel() // s.n_out)
                    for s in part
                ]
                raw = torch.cat([F.pad(r, (0, 0, 0, -r.shape[1] % ROWS)) for r in raws], 1)
                made = tile(raw.flatten(0, 1), first.type, (raw.shape[0] * raw.shape[1], first.n_in))
            found = {f.name: x for f in fields(made) if isinstance(x := getattr(made, f.name), Tensor)}
            if whole is None:
                whole = {
                    k: torch.empty(n_all * n_tile, *x.shape[1:], dtype=x.dtype, device=device)
                    for k, x in found.items()
                }
            for name, x in found.items():
                whole[name][at : at + len(x)] = x
            at += raw.shape[0] * n_tile
            del raws, raw, made, found
    assert whole is not None
    parts: dict[str, Any] = {f.name: whole.get(f.name) for f in fields(TiledMatrix)[3:]}
    return TiledMatrix(first.type, n_all * n_tile * ROWS, first.n_in, **parts)


def factors(stacks: Sequence[Stacks], name: str, device: torch.device) -> Tensor:
    """[expert] f32: the factor of each one's matrix."""
    out = []
    for s in stacks:
        stack = getattr(s, name)
        ones = torch.ones(s.n_expert, dtype=torch.float32, device=device)
        out.append(ones if stack is None or stack.scale is None else stack.scale.to(ones))
    return torch.cat(out)


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The experts of the rows: `ids`, and lists of pairs by expert if there are any."""

    ids: Tensor
    order: Tensor
    items: Tensor
    counter: Tensor
    n_item: int
    n_shared: int
    block: int
    listed: bool
    compact: bool


class _TileProduct:
    """All experts' products with one matrix of each."""

    def __init__(self, spec: MoeSpec, matrix: TiledMatrix, n_expert: int, inner: bool) -> None:
        self.inner = inner
        self.planes = planes(matrix, table_of(spec.device, matrix.type), nothing(spec.device))
        self.n_expert = n_expert
        self.n_tile = matrix.n_out // ROWS // (n_expert + spec.pieces)
        form = FORMATS[matrix.type]
        n_step, n_at_once = form.n_step(matrix.n_in), self.n_tile * spec.n_used
        wanted = -(-PROGRAMS * tri.n_multiprocessor(spec.device) // n_at_once)
        per = max(-(-LEAST // form.step), -(-n_step // wanted))
        self.n_split = -(-n_step // per)
        self.constants = constants(spec.device, matrix.type, matrix.n_in) | {
            "UNIT": tile_codes.unit(form),
            "PER": per,
            "X_STEP": matrix.n_in if inner else -(-matrix.n_in // COLUMNS) * COLUMNS,
            "INNER": inner,
            "N_EXPERT": n_expert,
            "N_USED": spec.n_used,
            "PIECES": spec.pieces,
        }

    def __call__(
        self, t: _Pairs, x: Tensor, powers: Tensor, n_pair: int, n_row: int
    ) -> tuple[Tensor, int]:
        """(sums [split, pair, tile * 64], splits)."""
        from pyspec.cuda.ops.moe import triton_kernels as kernels

        n_split = self.n_split if t.block == min(BLOCKS) else 1
        part = torch.empty(n_split * n_pair * self.n_tile * ROWS, dtype=torch.float32, device=x.device)
        tri.launch(
            kernels.products,
            (self.n_tile, t.n_shared + t.n_item, n_split),
            (x, powers, *self.planes, part, t.ids, t.order, t.items, t.counter, n_row, t.n_shared),
            {
                **self.constants,
                "TURNS": self.n_split // n_split,
                "STAGES": FEW_STAGES if t.block == min(BLOCKS) else STAGES,
                "BN": t.block,
                "LISTED": t.listed,
                "COMPACT": t.compact,
            },
            BLOCKS[t.block],
        )
        return part, n_split


class ExpertsTriton:
    """The experts of one layer, ready to run. See ref.py for the tensors."""

    def __init__(self, spec: MoeSpec, stacks: Stacks) -> None:
        assert (stacks.gate is None) == (spec.act == "relu2")
        assert (stacks.shared is None) == (spec.pieces == 0)
        self.spec, self.n_expert, device = spec, stacks.n_expert, spec.device
        with temporary(device):
            pieces = [] if stacks.shared is None else [cut(stacks.shared, spec.pieces)]
        every = [stacks, *pieces]
        inner = [[s.up] if s.gate is None else [s.gate, s.up] for s in every]
        self.inner = _TileProduct(spec, tiled(inner, device), self.n_expert, inner=True)
        self.down = _TileProduct(
            spec, tiled([[s.down] for s in every], device), self.n_expert, inner=False
        )
        self.scaled = any(
            x is not None and x.scale is not None for s in every for x in (s.gate, s.up, s.down)
        )
        self.inner_factors = torch.stack(
            [factors(every, name, device) for name in ("gate", "up")], -1
        ).contiguous()
        self.down_factors, self.none = factors(every, "down", device), nothing(device)
        self.inner_biases = self.down_biases = self.none
        if spec.biased:
            own = [s.bias for s in inner[0] if s.bias is not None]
            self.inner_biases = torch.stack(own, 1).float().contiguous()
            assert stacks.down.bias is not None
            self.down_biases = stacks.down.bias.float().contiguous()
        self.wide = -(-spec.n_ff // COLUMNS) * COLUMNS

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        norm: Norm | None = None,
        added: Added = NOTHING,
        ready: object = None,
    ) -> Tensor:
        out = torch.empty(x.shape[0], self.spec.n_in, dtype=torch.float32, device=x.device)
        kind = RowsSpec(
            self.spec.device, self.spec.n_in, PrepKind.PLAIN if norm is None else PrepKind.NORM
        )
        prepare = rows.bind(kind)
        for first in range(0, len(x), MAX_ROWS):
            part = slice(first, first + MAX_ROWS)
            half, powers = prepare(x[part], norm)
            self._run(
                half,
                powers,
                ids[part].contiguous(),
                weights[part].contiguous(),
                added.part(part),
                out[part],
            )
        return out

    def _run(
        self, x: Tensor, powers: Tensor | None, ids: Tensor, weights: Tensor, added: Added, out: Tensor
    ) -> None:
        from pyspec.cuda.ops.moe import triton_kernels as kernels

        spec, (n_row, n_used), none, device = self.spec, ids.shape, self.none, x.device
        assert ids.dtype == torch.int32 and n_used == spec.n_used and weights.shape == ids.shape
        assert added.shared is None or not spec.pieces
        n_pair, taken = n_row * (n_used + spec.pieces), self._taken(ids)
        ends = {
            "N_EXPERT": self.n_expert,
            "N_USED": n_used,
            "PIECES": spec.pieces,
            "SCALED": self.scaled,
            "BIASED": spec.biased,
        }
        part, n_split = self.inner(taken, x, none, n_pair, n_row)
        h = torch.empty(n_pair, self.wide, dtype=torch.float16, device=device)
        h_powers = torch.empty(n_pair, self.wide // COLUMNS, dtype=torch.float32, device=device)
        tri.launch(
            kernels.between,
            (n_pair, -(-self.wide // (COLUMNS * BETWEEN))),
            (
                part,
                none if powers is None else powers,
                ids,
                self.inner_factors,
                self.inner_biases,
                h,
                h_powers,
                n_row,
            ),
            {
                "N_FF": spec.n_ff,
                "WIDE": self.wide,
                "SPLITS": n_split,
                **ends,
                "ACT": ACTS.index(spec.act),
                "POWERS": powers is not None,
                **dict(zip(("GATE_LIMIT", "LIMIT"), spec.numbers, strict=True)),
                "BLOCKS": BETWEEN,
            },
            4,
        )
        part, n_split = self.down(taken, h, h_powers, n_pair, n_row)
        beside = [t if t is None else t.contiguous() for t in (added.shared, added.gate, added.residual)]
        tri.launch(
            kernels.combine,
            (n_row, -(-spec.n_in // STRETCH)),
            (
                part,
                ids,
                weights,
                self.down_factors,
                self.down_biases,
                *(none if t is None else t for t in beside),
                out,
                n_row,
            ),
            {
                "N_OUT": spec.n_in,
                "WIDE": self.down.n_tile * ROWS,
                "SPLITS": n_split,
                **ends,
                "SHARED": beside[0] is not None,
                "GATE": beside[1] is not None,
                "RESIDUAL": beside[2] is not None,
            },
            4,
        )

    def _taken(self, ids: Tensor) -> _Pairs:
        from pyspec.cuda.ops.moe import triton_kernels as kernels

        n_row, n_pair = ids.shape[0], ids.numel()
        few, fewer, more, *_ = BLOCKS
        block = few if n_row <= FEW else fewer if n_row <= MORE else more
        n_shared, compact = self.spec.pieces * -(-n_row // block), n_row > FEW
        if n_row <= FEWEST:
            return _Pairs(ids, ids, ids, ids, n_pair, n_shared, block, False, False)
        n_item = min(n_pair, self.n_expert + n_pair // block) if compact else n_pair
        order = torch.empty(n_pair, dtype=torch.int32, device=ids.device)
        items = torch.empty(3 * n_item if compact else 2 * n_pair, dtype=torch.int32, device=ids.device)
        counter = torch.zeros(1, dtype=torch.int32, device=ids.device) if compact else ids
        size = 1024 if compact else 256
        tri.launch(
            kernels.lists,
            (self.n_expert,),
            (ids, order, items, counter, n_pair),
            {"N_EXPERT": self.n_expert, "BN": block, "COMPACT": compact, "BLOCK": size},
            size // 256,
        )
        return _Pairs(ids, order, items, counter, n_item, n_shared, block, True, compact)


def bind(spec: MoeSpec) -> Callable[[Stacks], ExpertsRun]:
    return lambda stacks: ExpertsTriton(spec, stacks)
