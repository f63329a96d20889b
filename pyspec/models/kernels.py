"""The kernels of a program: the ops that its calls are bound to, known before any weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pyspec.cuda.op import op_named
from pyspec.cuda.ops.angles.ref import AnglesSpec
from pyspec.cuda.ops.heads.op import asked
from pyspec.cuda.ops.heads.ref import HeadsSpec
from pyspec.cuda.ops.linear.ref import GATES
from pyspec.cuda.ops.rows.ref import PrepKind, RowsSpec
from pyspec.forward.call import Call, Given, Program, Weight
from pyspec.forward.rewrite import plain
from pyspec.forward.trace import Block, traced
from pyspec.models.part import ForwardSize, LoadTypes, Place, Request, Site

KINDS = {
    "norm": PrepKind.NORM,
    "head_norm": PrepKind.HEADS,
    "group_norm": PrepKind.GROUPS,
    "head_gate": PrepKind.GATE,
    "relu2": PrepKind.RELU2,
}


Programs = Sequence[tuple[Program, Site]]
"""Programs of a model's blocks, and where they stand."""


def program_of(
    block: Block, at: Place, on: LoadTypes, *widths: int | None, norm: str = ""
) -> tuple[Program, Site]:
    """That of a function whose inputs have these widths; a block's own one reads the stream alone."""
    site = Site(at.file, at.prefix, at.n_embd, at.eps, on, norm)
    return plain(traced(block, site, *(widths or (at.n_embd,)))), site


def kernels(programs: Programs) -> Iterator[Request]:
    """(op, spec) of all calls, products apart."""
    for program, at in programs:
        yield from _of_program(program, at)


def scratch_bytes(programs: Programs, size: ForwardSize) -> int:
    """Bytes that the largest program's calls take while they run, beyond those that every model takes."""
    return max((_scratch(program, size) for program, _ in programs), default=0)


def _scratch(program: Program, size: ForwardSize) -> int:
    return sum(call.spec[0].scratch(size) for call in program.calls if call.op == "part")


def _of_program(program: Program, at: Site) -> Iterator[Request]:
    for call in program.calls:
        for x in call.inputs:
            if isinstance(x, Given) and x.name == "angles":
                yield op_named("angles"), AnglesSpec(at.device)
            if isinstance(x, Call) and at.on.streams:
                yield (
                    op_named("rows"),
                    RowsSpec(at.device, call.inputs[0].width, KINDS[x.op], x.spec.dim),
                )
        if isinstance(call.spec, Weight):
            yield from _of_weight(program, call, call.spec, at)
        elif call.op == "part":
            yield from call.spec[0].kernels(at, at.on)
        elif call.op not in PLAIN:
            op = op_named(call.op.partition(".")[0])
            yield op, call.spec
            yield from op.also(call.spec)


PLAIN = ("add", "view", "scaled", "times_rows", "gelu_times", "side_by_side")


def _of_weight(program: Program, call: Call, weight: Weight, at: Site) -> Iterator[Request]:
    """A gate that a product leaves to the next one; a product of each head."""
    if weight.kind == "gated" and at.on.streams:
        kind = PrepKind.GLU if dict(weight.how)["act"] in GATES else PrepKind.GEGLU
        if any(reader.inputs[:2] == (call.output, None) for reader in program.readers(call.output)):
            yield op_named("rows"), RowsSpec(at.device, call.output.width, kind)
    if weight.kind == "heads" and at.on.dense is None:
        info = at.file.tensors.get(at.name(weight.names[0]))
        if info is not None and len(info.shape) == 3:
            n_head = call.output.shape[0]
            yield op_named("heads"), asked(HeadsSpec(at.device, info.type, n_head, *info.shape[1:]))
