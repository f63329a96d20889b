"""Prompts take the library's attention sequence by sequence, or our kernel in pieces that its planned workspace has room for; pictures see ahead."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from machines import CPU
from torch import Tensor

from pyspec.cuda.kernel_context import KernelContext, use
from pyspec.cuda.ops.attend import cpu as attend_cpu
from pyspec.cuda.ops.attend import prompt as attend_prompt
from pyspec.cuda.ops.attend import prompt_blocks
from pyspec.cuda.ops.attend import ref as attend_ref
from pyspec.cuda.ops.attend.cases import TOLERANCE, Case, make, spec_of, worst
from pyspec.cuda.ops.attend.cuda import FEW, MANY, SPLIT
from pyspec.cuda.ops.attend.prompt import attend_prompt as op
from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.slots.arena import LEAST_PROMPT, Arena
from pyspec.slots.batch import Batch, Seq, SeqMode, lay_out
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.kv_types import TYPES, type_of
from pyspec.slots.table import SlotTable

HEADS = (6, 2, 64)
SPEC = AttendSpec(CPU, *HEADS, 0.125)
BATCHES = {
    "first chunk": [(0, MANY)],
    "later chunk": [(300, MANY + 7)],
    "beside decoding": [(70, 1), (40, MANY), (9, 4)],
    "two prompts": [(0, MANY), (5, 3), (200, 250)],
    "short": [(0, MANY - 1), (3, 2)],
}


class Counted:
    """Our own attention, and the widths it was asked for."""

    def __init__(self) -> None:
        self.run, self.widths = attend_ref.bind(SPEC), list[int]()

    def __call__(
        self, q: Tensor, pool: KVPool, batch: Batch, window: int = 0, sinks: Tensor | None = None
    ) -> Tensor:
        self.widths += [seq.width for seq in batch.seqs]
        assert len(q) == batch.n_row == len(batch.row_seq) and batch.seq_start.tolist() == list(
            batch.starts
        )
        return self.run(q, pool, batch, window, sinks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("seqs", BATCHES.values(), ids=BATCHES.keys())
def test_rows_equal_the_reference_whoever_runs_them(
    seqs: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    made, own = make(Case(*HEADS, dtype, seqs, scale=0.125), CPU), Counted()
    got = attend_prompt.beside(own, attend_prompt.reference(SPEC))(made.q, made.pool, made.plain, 0)
    assert worst(got, attend_ref.bind(SPEC)(made.q, made.pool, made.plain)) < TOLERANCE[dtype]
    assert own.widths == [w for _, w in seqs if w < MANY]


@pytest.mark.parametrize(
    ("n_past", "width", "keep", "is_long"),
    [
        (5000, 100, True, True),  # 5 splits and 100 rows
        (5000, 100, False, False),  # a verify: as wide as graphs have them, and to the bit like theirs
        (900, 100, True, False),
        (200_000, 1, True, False),  # an undrafted token
        (200_000, FEW, True, False),
        (200_000, FEW + 1, True, True),
        (0, MANY, False, True),
    ],
)
def test_pieces_of_prompts_behind_many_keys_are_the_librarys(
    n_past: int, width: int, keep: bool, is_long: bool
) -> None:
    seq = Seq(0, n_past, [0] * width, mode=SeqMode.KEEP if keep else SeqMode.VERIFY)
    assert attend_prompt.is_long(seq, n_past + width) == is_long


def test_a_sequence_has_the_same_bits_alone() -> None:
    made = make(Case(*HEADS, torch.float16, BATCHES["two prompts"], scale=0.125), CPU)
    alone = make(Case(*HEADS, torch.float16, BATCHES["first chunk"], scale=0.125), CPU)
    attend = attend_prompt.beside(attend_ref.bind(SPEC), attend_prompt.reference(SPEC))
    keys = attend_ref.key_rows(alone.plain, 0), attend_ref.key_rows(made.plain, 0)
    for to, source in ((alone.pool.k, made.pool.k), (alone.pool.v, made.pool.v)):
        to[keys[0]] = source[keys[1]]
    assert torch.equal(
        attend(made.q, made.pool, made.plain, 0)[:MANY],
        attend(made.q[:MANY], alone.pool, alone.plain, 0),
    )


@pytest.mark.parametrize(
    "change", [{"block": True}, {"window": 50}, {"dtype": torch.float32}, {"sinks": True}]
)
def test_blocks_windows_f32_and_sinks_stay_with_our_own(change: dict[str, object]) -> None:
    case, own = replace(Case(*HEADS, torch.float16, [(20, MANY)]), **change), Counted()  # type: ignore[arg-type]
    made = make(case, CPU)
    attend_prompt.beside(own, attend_prompt.reference(SPEC))(
        made.q, made.pool, made.plain, case.window, made.sinks
    )
    assert own.widths == [MANY]


def test_the_check_finds_a_shifted_mask() -> None:
    def shifted(
        q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:  # upper left where keys and rows differ in number
        return attend_prompt.reference(SPEC)(q, k[: len(q)], v[: len(q)])

    assert (
        attend_prompt.check(attend_prompt.reference(SPEC), attend_prompt.reference(SPEC), SPEC) is None
    )
    assert "differs" in str(attend_prompt.check(shifted, attend_prompt.reference(SPEC), SPEC))
    assert op.refusal(op.impls[0], SPEC) == "for GPUs"


def part(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As a library's kernel has it, in f64; rounded on its way out."""
    n_head, n_kv = q.shape[1], k.shape[1]
    scores = q.double() @ k.repeat_interleave(n_head // n_kv, 1).double().transpose(2, 3) * SPEC.scale
    scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
    out = scores.softmax(-1) @ v.repeat_interleave(n_head // n_kv, 1).double()
    return out.to(q.dtype), scores.logsumexp(-1)[0].float()


def own_part(q: Tensor, n: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return part(q[:, :, :n], k, v, torch.ones(n, k.shape[2], dtype=torch.bool).tril(k.shape[2] - n))


@pytest.mark.parametrize(
    ("n_row", "n_past"), [(192, 0), (192, 31), (300, 32), (512, 64 + 32 + 5), (200, 3 * 128 + 64)]
)
def test_blocks_of_keys_put_together_are_the_whole(
    n_row: int, n_past: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_blocks, "BLOCKS", (128, 64, 32))
    asked: list[tuple[int, int]] = []

    def block(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        asked.append((q.shape[2], k.shape[2]))
        return part(q, k, v)

    without = attend_prompt.reference(SPEC)
    run = prompt_blocks.by_blocks(SPEC, without, own_part, block)
    q = (
        (torch.randn(n_row, HEADS[0], HEADS[2]) * torch.logspace(-2, 1, n_row)[:, None, None])
        .half()
        .float()
    )
    k, v = (torch.randn(n_row + n_past, HEADS[1], HEADS[2]).half() for _ in "kv")
    got, want = run(q, k, v), without(q, k, v)
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).amax() < 2e-3
    assert [n for _, n in asked] == [end - first for first, end in prompt_blocks.cut(n_past)]
    assert all(n % prompt_blocks.ROWS == 0 for n, _ in asked), "plans are made for few numbers of rows"


def test_blocks_are_cut_at_absolute_keys_and_leave_less_than_the_smallest() -> None:
    large, mid, *_, small = prompt_blocks.BLOCKS
    for n_past in (0, small - 1, small, mid + 3 * small + 9, 3 * large + 2 * mid + small, 130_000):
        found = prompt_blocks.cut(n_past)
        assert [a for a, _ in found] == [0, *(b for _, b in found)][: len(found)]
        assert 0 <= n_past - (found[-1][1] if found else 0) < small
        assert all(b - a in prompt_blocks.BLOCKS for a, b in found)
    assert (
        prompt_blocks.cut(large + mid)[0] == prompt_blocks.cut(large + mid + 9 * small)[0] == (0, large)
    )
    assert len(prompt_blocks.cut(2 * large - 1)) == len(prompt_blocks.BLOCKS)


def test_few_rows_and_few_keys_are_not_worth_a_block() -> None:
    def never(*_: object) -> tuple[Tensor, Tensor]:
        raise AssertionError("asked for a block")

    run = prompt_blocks.by_blocks(SPEC, attend_prompt.reference(SPEC), never, never)
    for n_row, n_key in ((16, 9000), (300, 300 + prompt_blocks.BLOCKS[-1] - 1)):
        q, k = torch.randn(n_row, HEADS[0], HEADS[2]), torch.randn(n_key, HEADS[1], HEADS[2]).half()
        assert run(q, k, k).isfinite().all()


@pytest.mark.parametrize("seqs", BATCHES.values(), ids=BATCHES.keys())
def test_with_exact_our_own_takes_all_rows_as_few_at_a_time_as_it_has_room_for(
    seqs: list[tuple[int, int]],
) -> None:
    made, own = make(Case(*HEADS, torch.float16, seqs, scale=0.125), CPU), Counted()
    got = attend_prompt.in_pieces(own)(made.q, made.pool, made.plain, 0)
    assert torch.allclose(got, attend_ref.bind(SPEC)(made.q, made.pool, made.plain), atol=1e-5)
    assert sorted(own.widths) == sorted(
        n for _, w in seqs for n in ([MANY] * (w // MANY) + [w % MANY] if w > MANY else [w]) if n
    )


def test_pieces_get_smaller_as_keys_get_more_and_are_kept_for_all_layers() -> None:
    n_past = 20 * SPLIT
    made, own = make(Case(*HEADS, torch.float16, [(n_past, 100)], scale=0.125), CPU), Counted()
    attend, plain = attend_prompt.in_pieces(own), made.plain
    batch = replace(plain, seqs=[replace(seq, mode=SeqMode.KEEP) for seq in plain.seqs])
    first = attend(made.q, made.pool, batch, 0)
    assert own.widths == [FEW] * 6 + [4]
    pieces = attend_prompt._pieces(CPU).of(batch, 0)
    again = attend(made.q, made.pool, batch, 0)
    assert attend_prompt._pieces(CPU).of(batch, 0) is pieces and torch.equal(again, first)


def test_the_library_is_loaded_where_a_slot_may_hold_a_block() -> None:
    asked: list[tuple[int, int]] = []
    least = prompt_blocks.BLOCKS[-1] + prompt_blocks.LEAST
    for n_key in (least - 1, least, 10 * least):
        prompt_blocks.warm(lambda q, k, v: asked.append((len(q), len(k))) or q, SPEC, n_key)
    assert asked == [(prompt_blocks.LEAST, least)] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_a_prompt_replayed_in_a_graph_sees_its_own_keys_alone(dtype: torch.dtype) -> None:
    """Rows after its own in its pages, and the row that padding is written to, are NaN here."""
    table, arena, n = SlotTable(2, 8, 64), Arena(2, 4, CPU), MANY + 7
    assert LEAST_PROMPT == MANY, "who runs a sequence depends on its own rows and keys alone"
    arena.prompts.add(256)
    captured = lay_out(table, [Seq(1, 0, [0] * 256, mode=SeqMode.KEEP, n_out=1)], CPU, arena=arena)
    lay_out(table, [Seq(1, 0, [0] * n, mode=SeqMode.KEEP, n_out=1)], CPU, arena=arena)
    plain = lay_out(table, [Seq(1, 0, [0] * n, mode=SeqMode.KEEP, n_out=1)], CPU)
    pool = KVPool(table.n_alloc_row, *HEADS[1:], KvFormat.both(type_of(dtype)), CPU)
    gen = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(256, heads, HEADS[2], generator=gen) for heads in (HEADS[0], HEADS[1], HEADS[1])
    )
    for plane in pool.planes:
        if plane.dtype is not torch.int8:
            plane.fill_(torch.nan)
    pool.write(plain.kv_rows, k[:n], v[:n])
    attend = attend_prompt.beside(attend_ref.bind(SPEC), attend_prompt.reference(SPEC))
    got, want = attend(q, pool, captured), attend_ref.bind(SPEC)(q[:n], pool, plain)
    assert ((got[:n] - want).norm(dim=-1) / want.norm(dim=-1)).amax() < TOLERANCE[dtype]


@pytest.mark.parametrize("follow", [True, False])
def test_keys_in_pages_that_follow_each_other_are_not_copied(follow: bool) -> None:
    table, n = SlotTable(2, 8, 64), 150
    lay_out(table, [Seq(0, 0, [0] * 64)], CPU)
    lay_out(table, [Seq(1, 0, [0] * 64)], CPU)
    batch = lay_out(table, [Seq(1 if follow else 0, 0, [0] * n, mode=SeqMode.KEEP)], CPU)
    pool = KVPool(table.n_alloc_row, *HEADS[1:], KvFormat(), CPU)
    for plane in pool.planes:
        plane.copy_(torch.randn(plane.shape))
    k, v = attend_prompt.keys_of(pool, batch, 0)
    for got, plane in ((k, pool.k), (v, pool.v)):
        assert torch.equal(got, plane[attend_ref.key_rows(batch, 0)])
        assert (got.untyped_storage().data_ptr() == plane.untyped_storage().data_ptr()) is follow


def test_what_is_faster_behind_many_keys_is_taken_once_it_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    took: list[str] = []

    def stands_for(name: str) -> Callable[[AttendSpec], attend_prompt.Run]:
        return lambda spec: lambda q, k, v: (took.append(name), q)[1]

    blocks = attend_prompt.attend_blocks
    monkeypatch.setattr(op, "reference", replace(op.reference, bind=stands_for("library")))
    monkeypatch.setattr(attend_prompt, "by_cudnn", stands_for("cudnn"))
    monkeypatch.setattr(blocks, "_decided", {})
    run = attend_prompt.prompts(SPEC)
    few, q = prompt_blocks.LEAST, torch.zeros(prompt_blocks.LEAST, *HEADS[::2])
    keys = {n: torch.zeros(few + n, *HEADS[1:]) for n in (0, prompt_blocks.BLOCKS[-1])}
    for known in (None, blocks.reference, blocks.impls[0]):
        if known is not None:
            blocks.decided[SPEC] = known
        for k in keys.values():
            run(q, k, k)
    assert took == ["library"] * 5 + ["cudnn"]


CPU, WINDOWED = torch.device("cpu"), (6, 2, 64)


class Planned:
    """Our own attention, which has room for what is planned: rows times splits of one sequence."""

    def __init__(self, spec: AttendSpec) -> None:
        self.run, self.pieces = attend_ref.bind(spec), list[tuple[int, int]]()

    def __call__(
        self, q: Tensor, pool: KVPool, batch: Batch, window: int = 0, sinks: Tensor | None = None
    ) -> Tensor:
        for seq, n_key in zip(batch.seqs, batch.max_hi, strict=True):
            n_split = -(-n_key // SPLIT)
            assert seq.width * n_split <= max(FEW * n_split, MANY), f"{seq.width} rows of {n_key} keys"
            self.pieces.append((seq.width, n_key))
        return self.run(q, pool, batch, window, sinks)


# Without either the library attends
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("window", "sinks"),
    [
        (window, sinks)
        for window in (0, 1, 8, 100, 1000, -8, -100, -1024)
        for sinks in (False, True)
        if window or sinks
    ],
)
@pytest.mark.parametrize(
    "seqs",
    [[(0, 193)], [(0, 511), (70, 1)], [(333, 257), (5, 3), (0, 401)], [(4 * SPLIT - 3, 197)]],
    ids=str,
)
def test_odd_numbers_of_rows_stay_in_the_planned_workspace(
    seqs: list[tuple[int, int]], window: int, sinks: bool
) -> None:
    case = Case(*WINDOWED, torch.float16, seqs, window=window, scale=0.125, sinks=sinks)
    made, spec = make(case, CPU), AttendSpec(CPU, *WINDOWED, 0.125, has_sinks=sinks)
    own = Planned(spec)

    def library(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise AssertionError("the library has neither windows nor sinks")

    got = attend_prompt.beside(own, library)(made.q, made.pool, made.plain, window, made.sinks)
    want = attend_ref.bind(spec)(made.q, made.pool, made.plain, window, made.sinks)
    assert worst(got, want) < TOLERANCE[torch.float16]
    assert sum(n for n, _ in own.pieces) == sum(n for _, n in seqs)


def test_pieces_read_the_pages_of_their_window_only() -> None:
    """So they need not get smaller as the context grows."""
    made = make(Case(*WINDOWED, torch.float16, [(6 * SPLIT, 400)], window=128, scale=0.125), CPU)
    own = Planned(AttendSpec(CPU, *WINDOWED, 0.125))
    attend_prompt.in_pieces(own)(made.q, made.pool, made.plain, 128)
    assert [n for n, _ in own.pieces] == [MANY, MANY, 16]
    assert max(n_key for _, n_key in own.pieces) < 128 + made.plain.page_size + MANY


def test_pieces_read_the_pages_of_their_chunks_only() -> None:
    made = make(Case(*WINDOWED, torch.float16, [(6 * SPLIT, 400)], window=-128, scale=0.125), CPU)
    own = Planned(AttendSpec(CPU, *WINDOWED, 0.125))
    attend_prompt.in_pieces(own)(made.q, made.pool, made.plain, -128)
    assert own.pieces == [(MANY, MANY), (MANY, MANY + 64), (16, 16)]


SEQS = [(70, 1), (9, 90), (1011, 40)]
PICTURES = (1, 9, 40), (1, 40, 41), (1, 47, 99), (2, 1000, 1023), (2, 1024, 1049)


@pytest.mark.parametrize("window", [0, 7, 60])
def test_the_reference_is_the_formula(window: int) -> None:
    case = Case(6, 2, 64, torch.float32, SEQS, 16, window, pictures=PICTURES)
    made = make(case, CPU)
    b = made.plain
    got = attend_ref.bind(spec_of(case, CPU))(made.q, made.pool, b, window)
    for s, seq in enumerate(b.seqs):
        k, v = made.pool.read(attend_ref.key_rows(b, s), torch.float64)
        for i in range(b.starts[s], b.starts[s + 1]):
            p = seq.n_past + i - b.starts[s]
            end = next((end for of, first, end in PICTURES if of == s and first <= p < end), p + 1)
            first = max(0, p - window + 1) if window else 0
            for head in (0, 5):
                logits = (k[first:end, head // 3] @ made.q[i, head].double()) / math.sqrt(64)
                want = logits.softmax(0) @ v[first:end, head // 3]
                assert (got[i, head] - want).norm() < 2e-6 * max(1, want.norm()), (s, i, head)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("kv", TYPES.values(), ids=lambda kv: kv.name)
def test_cpus_have_the_references_values(kv: object, window: int, exact: bool) -> None:
    use(KernelContext(is_exact=exact))
    case = Case(8, 2, 64, kv, SEQS, 16, window, pad=(3, 1), pictures=PICTURES)  # type: ignore[arg-type]
    made, spec = make(case, CPU), spec_of(case, CPU)
    assert attend_cpu.limits(spec) is None
    got = attend_cpu.bind(spec)(made.q, made.pool, made.batch, window)
    n = made.plain.n_row
    assert worst(got[:n], attend_ref.bind(spec)(made.q[:n], made.pool, made.plain, window)) < 1e-5
    assert not got[n:].any()


LONG = [(5, 2), (40, 3 * MANY + 7), (2000, MANY)]
LARGE = (1, 41, 41 + 2 * MANY), (1, 41 + 2 * MANY + 3, 40 + 3 * MANY), (2, 1990, 2000 + MANY)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("window", [0, 5, 300])
def test_pieces_of_long_sequences_see_whole_pictures(window: int, exact: bool) -> None:
    """The library, whose mask is another, gets none of them."""
    use(KernelContext(is_exact=exact))
    case = Case(6, 2, 64, torch.float16, LONG, 16, window, scale=0.125, pictures=LARGE)
    made, spec = make(case, CPU), spec_of(case, CPU)
    seqs = [replace(seq, mode=1) for seq in made.plain.seqs]
    whole, own, most = replace(made.plain, seqs=seqs), attend_ref.bind(spec), list[int]()

    def counted(q, pool, batch, window=0, sinks=None):  # type: ignore[no-untyped-def]
        most.extend(seq.width for seq in batch.seqs)
        assert all(
            int(batch.hi[batch.starts[i] : batch.starts[i + 1]].max()) <= n
            for i, n in enumerate(batch.max_hi)
        )
        return own(q, pool, batch, window, sinks)

    def library(*given: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it sees no picture")

    got = attend_prompt.beside(counted, library)(made.q, made.pool, whole, window)
    assert worst(got, own(made.q, made.pool, made.plain, window)) < TOLERANCE[torch.float16]
    assert max(most) <= MANY
