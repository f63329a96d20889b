"""A block's function bound to its weights: traced, rewritten by the rules that its launches allow, and lowered (`pyspec.forward`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

from torch import Tensor

from pyspec.cuda import fuse
from pyspec.cuda.collective import Collective
from pyspec.cuda.kernel_context import current
from pyspec.cuda.op import op_named
from pyspec.cuda.ops.rows.ref import Norm
from pyspec.forward import rewrite
from pyspec.forward.call import Folding, OpCall, RunInput, Value, Weight
from pyspec.forward.lower import ProgramText
from pyspec.forward.trace import traced
from pyspec.models.binding import Binding
from pyspec.models.block import BlockSpec
from pyspec.models.kernels import holds_prompts
from pyspec.models.matrices import reader_of

FEW = 32  # rows whose biases are ready
READS = "product", "unfinished", "biased", "handed"


class Sources:
    """Weights and launches of a block, each read or bound once."""

    def __init__(self, at: Binding) -> None:
        self.at: Binding | None = at
        self.weights: dict[Weight, Any] = {}
        self.launches: dict[tuple[str, Any], Any] = {}
        self.norms: dict[tuple[Weight, float], Norm] = {}
        self.loads: dict[tuple[Any, Weight], Any] = {}
        self.rank_sums: dict[int, fuse.RankSum] = {}
        self.added: dict[int, fuse.AddedNorm] = {}
        self.device, self.capturable = at.weights.device, True

    def read(self, call: OpCall) -> None:
        """Read all weights that a call names."""
        for x in (call.spec, *call.inputs, *call.more.values()):
            if isinstance(x, Weight):
                self.weight(x)
            elif isinstance(x, OpCall):
                self.read(x)
        if call.loads is not None:
            self.loaded(call)

    @property
    def binding(self) -> Binding:
        assert self.at is not None, "everything is bound when a block is"
        return self.at

    def weight(self, weight: Weight) -> Any:
        if weight not in self.weights:
            made = self._read(weight)
            if weight.kind == "heads":
                made, holds = made
                self.capturable = self.capturable and holds
            self.capturable = self.capturable and getattr(made, "capturable", True)
            self.weights[weight] = made
        return self.weights[weight]

    def _read(self, weight: Weight) -> Any:
        w, names = self.binding.weights, [self.binding.name(name) for name in weight.names]
        read = getattr(w, weight.kind) if isinstance(weight.kind, str) else partial(weight.kind, w)
        return read(*names, **dict(weight.how))

    def loaded(self, call: OpCall) -> Any:
        assert call.loads is not None
        if (key := (call.spec, call.loads)) not in self.loads:
            op = op_named(call.op.partition(".")[0])
            assert op.loaded is not None
            run = self.launch(op.name, call.spec)(self._read(call.loads))
            self.loads[key] = op.loaded(call.spec, run)
        return self.loads[key]

    def launch(self, op: str, spec: Any) -> Any:
        if (op, spec) not in self.launches:
            self.launches[op, spec] = op_named(op).bind(spec)
        return self.launches[op, spec]

    def runs(self, call: OpCall) -> Any:
        op, _, method = call.op.partition(".")
        if op == "rank_sum":
            ranks = self.binding.weights.ranks
            assert ranks is not None, "others have no such call"
            made = self.rank_sums[id(call)] = fuse.RankSum(ranks.sum)
            return made
        if call.op == "norms.added":
            added = self.added[id(call)] = fuse.AddedNorm(self.launch("norms", call.spec))
            return added
        if call.loads is not None:
            launch = self.loaded(call)
        else:
            launch = op_named(op).beside(self.launch(op, call.spec), call.spec)
        return getattr(launch, method) if method else launch

    def norm(self, weight: Weight, eps: float) -> Norm:
        if (weight, eps) not in self.norms:
            self.norms[weight, eps] = Norm(self.weight(weight), eps)
        return self.norms[weight, eps]

    def handing(self, first: Weight, next: Weight, bound: float) -> Any:
        return fuse.handing(self.weight(first), self.weight(next), bound)

    def few(self, bias: Weight) -> Tensor | None:
        """[FEW, n] the biases of a few rows on a GPU; None elsewhere."""
        found = self.weight(bias)
        return found.repeat(FEW, 1) if found.is_cuda and not current().is_exact else None

    def given(self, x: RunInput) -> str:
        if x.name == "rows":
            return f"run.rows[{self.binding.tables.place(self._read(x.place))}]"
        if x.name in ("angles", "queries"):
            rope, is_near = x.place
            return f"run.{x.name}[{self.binding.ropes.place(rope, is_near=is_near)}]"
        return GIVEN[x.name].format(x.place)


GIVEN = {
    "batch": "run.batch",
    "state": "run.memory.states[{}]",
    "pool": "run.memory.kv[{}]",
    "placed": "run.placed(run.memory.kv[{0[0]}], {0[1]})",
    "kv_rows": "run.placed(run.memory.kv[{}]).kv_rows",
    "kept": "run.memory.layers[{0[0]}][{0[1]!r}]",
    "positions": "run.batch.positions",
    "row_seq": "run.batch.row_seq",
    "tokens": "run.batch.tokens",
    "choices": "run.choices",
    "kept_rows": "run.kept_rows",
    "choice": "run.choices[0]",
    "inputs": "run.inputs[:, {}]",
}
"""What a forward brings, as it is read of a `Pass`. {}: the layer."""


class BoundForward:
    """A function of a block bound to weights and launches.

    run         the function, of its inputs and a `Pass`
    program     its calls as they run
    capturable  a CUDA graph may hold it: its launches look at no list of the host
    captures_prompts  and in the forward of a prompt that stands alone
    fold        folds the records of the op in `folds`, if there is one
    """

    def __init__(
        self, block: Callable[..., Value], at: Binding, *widths: int, folds: Folding | None = None
    ) -> None:
        self.sources = Sources(at)
        self.program = rewrite.plain(traced(block, at, *widths))
        self.captures_prompts = holds_prompts(self.program)
        for call in self.program.calls:
            self.sources.read(call)
        for rule in rewrite.BOUND:
            rule(self.program, self.sources)
        self.run: Callable[..., Tensor] = ProgramText(self.program, self.sources).function()
        self.sources.at = None  # the file's bytes go
        self.ops = [(op_named(op), spec) for op, spec in self.sources.launches]
        self.capturable = self.sources.capturable
        self.capturable = self.capturable and all(op.chosen(spec).capturable for op, spec in self.ops)
        self.captures_prompts &= self.capturable and all(op.holds_prompts(spec) for op, spec in self.ops)
        self.fold: fuse.Fold | None = None
        if folds is not None:
            launches = self.sources.launches.items()
            self.fold = fuse.folder(next(own for (op, _), own in launches if op == folds[0]), folds[1])

    def first(self) -> fuse.FirstRead | None:
        """The product that reads the first input first, behind a norm, if one does before all others."""
        return self._read_by(self.program.readers(self.program.inputs[0])[0])

    def first_read(self, value: Value) -> fuse.FirstRead | None:
        """The product that reads a stream first, and the norm before it, if nothing else reads it but a sum."""
        readers = [call for call in self.program.readers(value) if call.inputs[0] is value]
        found = self._read_by(readers[0]) if len(readers) == 1 else None
        return found and (reader_of(found[0]), found[1])

    def _read_by(self, call: OpCall) -> fuse.FirstRead | None:
        """The product of a call and the norm before it; None: it is no such call."""
        prep = call.inputs[1] if call.op in READS else None
        if not isinstance(prep, OpCall) or prep.op != "norm":
            return None
        return self.sources.weight(call.spec), self.sources.norm(prep.inputs[1], prep.spec.eps)


class Block(BoundForward):
    """A block bound to its weights. run: the residual stream x [row, n_stream * n_embd] f32 and a `Pass` -> the stream behind it."""

    def __init__(self, spec: BlockSpec, at: Binding) -> None:
        folds = next((part.folds for part in spec.specs if part.folds is not None), None)
        super().__init__(spec.forward, at, spec.n_stream * at.n_embd, folds=folds)

    @property
    def sums(self) -> Iterator[tuple[fuse.RankSum, Value]]:
        """Sums of ranks, and what they make."""
        for call in self.program.calls:
            if call.op == "rank_sum":
                yield self.sources.rank_sums[id(call)], call.output

    @property
    def normed_sums(self) -> Iterator[tuple[fuse.AddedNorm, Value]]:
        """Norms behind parts with their sums, and the streams that they make."""
        for call in self.program.calls:
            if call.op == "norms.added":
                yield self.sources.added[id(call)], call.output


def _behind(block: Block, next: Block | None, stream: Value) -> fuse.FirstRead | None:
    """What reads a stream of the block first; of its last one the next block does."""
    if stream is not block.program.output:
        return block.first_read(stream)
    return None if next is None else next.first_read(next.program.inputs[0])


def link_reads(blocks: Sequence[Block]) -> None:
    """Tell each norm behind a part what reads its sum first. The blocks run one after the other."""
    for block, next in zip_longest(blocks, blocks[1:]):
        for added, stream in block.normed_sums:
            added.link(_behind(block, next, stream))


def link_sums(ranks: Collective, blocks: Sequence[Block]) -> None:
    """Have the sums of ranks in these blocks prepare the rows of the part behind them, where kernels can. All ranks call it together."""
    found = [
        (own, _behind(block, next, stream))
        for block, next in zip_longest(blocks, blocks[1:])
        for own, stream in block.sums
    ]
    fuse.link(ranks, found)
