"""The kernels of a program: the ops that its calls are bound to, known before any weight is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pyspec.cuda.op import op_named
from pyspec.cuda.ops.angles.ref import AnglesSpec
from pyspec.cuda.ops.embed.ref import EmbedSpec
from pyspec.cuda.ops.heads.op import asked
from pyspec.cuda.ops.heads.ref import HeadsSpec
from pyspec.cuda.ops.linear.formats import FORMATS
from pyspec.cuda.ops.linear.op import linear_tall
from pyspec.cuda.ops.linear.ref import PROBE_ROWS, Epilogue, LinearSpec
from pyspec.cuda.ops.norms.spec import NormsSpec
from pyspec.cuda.ops.rows.ref import GATES, PrepKind, RowsSpec
from pyspec.forward.call import ForwardProgram, OpCall, RunInput, Weight
from pyspec.forward.rewrite import plain
from pyspec.forward.trace import Block, Site, traced
from pyspec.gguf import GGUFFile, TensorInfo
from pyspec.models.block import BlockSpec
from pyspec.models.blocks.gated_part import head_row
from pyspec.models.blocks.layer_input import layer_inputs
from pyspec.models.model import ModelSpec
from pyspec.models.mtp import MtpOfBlock
from pyspec.models.part import LoadTypes, Place, Request
from pyspec.models.wants import EMBEDDING, scale_of
from pyspec.models.weight_bytes import row_bytes

KINDS = {
    "norm": PrepKind.NORM,
    "head_norm": PrepKind.HEADS,
    "group_norm": PrepKind.GROUPS,
    "head_gate": PrepKind.GATE,
    "relu2": PrepKind.RELU2,
}


Programs = Sequence[tuple[ForwardProgram, Site]]
"""Programs of a model's blocks, and where they stand."""


def of_model(model: ModelSpec, file: GGUFFile, on: LoadTypes) -> Iterator[Request]:
    """The ops that a load asks for, products and the embedding apart."""
    yield from kernels(_programs(model, file, on, range(model.n_layer)))
    yield from kernels(_of_inputs(model, file, on))
    yield op_named("norms"), NormsSpec(on.device, model.n_embd, model.eps)
    if (gates := model.residual.gates) is not None:
        place, wide = Place(file, "", model.n_embd, model.eps), model.n_hidden
        yield from kernels([program_of(partial(head_row, gates), place, on, wide)])


def of_mtp(block: MtpOfBlock, file: GGUFFile, on: LoadTypes) -> Iterator[Request]:
    """Those of the blocks behind the trunk, which may have a file of their own."""
    return kernels([program_of_block(one.block, one.place(file), on) for one in block.each])


@dataclass(frozen=True, slots=True)
class ForwardNeeds:
    """What a memory plan reads of a model's programs.

    row            bytes of a row while a forward runs
    scratch        bytes beside its rows: those of the largest block, and of the streams
    holds_prompts  a CUDA graph may hold the forward of a prompt that stands alone, kernels permitting
    """

    row: int
    scratch: int
    holds_prompts: bool


def needs_of_model(
    model: ModelSpec, file: GGUFFile, on: LoadTypes, n_row: int, n_token: int
) -> ForwardNeeds:
    """Those of a forward of `n_row` rows; contexts have up to `n_token` tokens."""
    distinct = {block: i for i, block in enumerate(model.blocks)}.values()
    programs = [program for program, _ in _programs(model, file, on, distinct)]
    ropes = {x.place for p in programs for c in p.calls for x in c.inputs if _is_angles(x)}
    angles = sum(4 * rope.n_rot for rope, _ in ropes)
    keeps = model.residual.n_iter is not None or not on.is_cuda
    # streams and scratch of sparse attention have room for its values
    peaks = (p.peak() for p in programs if all(call.op != "sparse_attend" for call in p.calls))
    scratch = (_scratch(p, n_row, n_token, keeps) for p in programs)
    of_inputs = (program.peak() for program, _ in _of_inputs(model, file, on))
    streams = model.residual.row_bytes(model.n_embd) + sum(of_inputs)
    return ForwardNeeds(
        scratch=n_row * streams + max(scratch, default=0),
        row=max(row_bytes(model.n_ff, model.n_embd), angles + max(peaks, default=0)),
        holds_prompts=model.residual.n_iter is None and all(map(holds_prompts, programs)),
    )


def _programs(
    model: ModelSpec, file: GGUFFile, on: LoadTypes, blocks: Iterable[int]
) -> list[tuple[ForwardProgram, Site]]:
    """The forwards of some of its blocks."""
    return [program_of_block(model.blocks[i], model.place(file, i), on) for i in blocks]


def token_bytes(model: ModelSpec, file: GGUFFile, on: LoadTypes, table: str) -> int:
    """Bytes of a table of rows (`wants.TABLES`) that a token reads."""
    programs = [*_programs(model, file, on, range(model.n_layer)), *_of_inputs(model, file, on)]
    read = [call for program, _ in programs for call in program.calls if isinstance(call.spec, Weight)]
    widths = [x.output.width for x in read if x.spec.kind == "embedding" and table in x.spec.names]
    info, n = file.tensors[table], model.n_embd if table == EMBEDDING else sum(widths)
    return n // info.type.block_size * info.type.type_size


def _of_inputs(model: ModelSpec, file: GGUFFile, on: LoadTypes) -> Programs:
    """That of the blocks' inputs, if they have any."""
    if (inputs := model.per_layer) is None:
        return []
    return [program_of(partial(layer_inputs, inputs), Place(file, "", model.n_embd, model.eps), on)]


def holds_prompts(program: ForwardProgram) -> bool:
    """Whether a CUDA graph may hold it in the forward of a prompt that stands alone, kernels permitting."""
    return all(map(_holds_prompts, program.calls))


def _holds_prompts(call: OpCall) -> bool:
    if call.op == "attend" and call.inputs[WINDOW]:
        return False  # a prompt attends by the library, which has no windows
    if call.op in (*PLAIN, *KINDS) or isinstance(call.spec, Weight):
        return True
    return op_named(call.op.partition(".")[0]).in_prompts


def program_of_block(block: BlockSpec, at: Place, on: LoadTypes) -> tuple[ForwardProgram, Site]:
    """That of a block."""
    return program_of(block.forward, at, on, block.n_stream * at.n_embd)


def program_of(
    block: Block, at: Place, on: LoadTypes, *widths: int | None
) -> tuple[ForwardProgram, Site]:
    """That of a function whose inputs have these widths; a block's own one reads the stream alone."""
    site = on.site(at)
    return plain(traced(block, site, *(widths or (at.n_embd,)))), site


def kernels(programs: Programs) -> Iterator[Request]:
    """(op, spec) of all calls, products apart."""
    for program, at in programs:
        yield from _of_program(program, at)


def _is_angles(x: Any) -> bool:
    return isinstance(x, RunInput) and x.name == "angles"


def _scratch(program: ForwardProgram, n_row: int, n_token: int, keeps: bool) -> int:
    """keeps: with the buffers that loaded launches keep. On GPUs the plans of models of one stream have room for them elsewhere."""
    kept = most = 0
    for call in program.calls:
        if call.op in PLAIN or isinstance(call.spec, Weight):
            continue
        n = op_named(call.op.partition(".")[0]).scratch(call.spec, n_row, n_token)
        kept, most = (kept + n * keeps, most) if call.loads is not None else (kept, max(most, n))
    return kept + most


def _of_program(program: ForwardProgram, at: Site) -> Iterator[Request]:
    for call in program.calls:
        for x in call.inputs:
            if _is_angles(x):
                yield op_named("angles"), AnglesSpec(at.device)
            if isinstance(x, OpCall) and at.streams:
                yield (
                    op_named("rows"),
                    RowsSpec(at.device, call.inputs[0].width, KINDS[x.op], x.spec.dim),
                )
        if isinstance(call.spec, Weight):
            yield from _of_weight(program, call, call.spec, at)
        elif call.op not in PLAIN:
            op = op_named(call.op.partition(".")[0])
            yield op, call.spec
            yield from op.also(call.spec)


WINDOW = 3  # among the inputs of `attend`
PLAIN = (
    *(
        "add",
        "rank_sum",
        "view",
        "scaled",
        "times_rows",
        "gate_times",
        "side_by_side",
        "write_keys",
        "choose",
        "capped",
        "keep_row",
    ),
    *("weighed", "unweighed", "one_expert", "of_choices", "of_values"),
)


def is_streamed(t: TensorInfo, file: GGUFFile) -> bool:
    """Whether kernels of GPUs may multiply with a matrix as it is packed."""
    has_scale = scale_of(t.name) in file.tensors
    return len(t.shape) == 2 and t.type in FORMATS and (not has_scale or FORMATS[t.type].scaled)


def _of_weight(program: ForwardProgram, call: OpCall, weight: Weight, at: Site) -> Iterator[Request]:
    """A product with its gate, or a gate that it leaves to the next one; a product of each head; a table of tokens."""
    how, info = dict(weight.how), at.file.tensors.get(at.name(weight.names[0]))
    if weight.kind == "slice_norms":
        yield op_named("norms"), NormsSpec(at.device, how["dim"], how["eps"])
    if weight.kind == "gated" and at.streams and "limit" not in how:
        if how["act"] in GATES and info is not None and is_streamed(info, at.file):
            spec = LinearSpec(at.device, info.type, PROBE_ROWS, info.shape[1], Epilogue.GATED)
            yield linear_tall, spec
        kind = PrepKind.GLU if how["act"] in GATES else PrepKind.GEGLU
        if any(reader.inputs[:2] == (call.output, None) for reader in program.readers(call.output)):
            yield op_named("rows"), RowsSpec(at.device, call.output.width, kind)
    if weight.kind == "embedding" and info is not None:
        yield op_named("embed"), EmbedSpec(at.device, info.type, info.shape[1])
    is_packed = at.dense is None and info is not None and len(info.shape) == 3
    if weight.kind == "heads" and info is not None and is_packed:
        n_head = call.output.shape[0]
        yield op_named("heads"), asked(HeadsSpec(at.device, info.type, n_head, *info.shape[1:]))
