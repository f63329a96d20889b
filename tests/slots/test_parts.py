"""Parts: a layer's memory for its slots has the declared bytes, and survives verifies, checkpoints and pages."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.engine.plan.memory_plan import checkpoint_bytes, memory_bytes
from pyspec.errors import OutOfBounds
from pyspec.slots.cache import PrefixCache
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.kv_types import TYPES, type_of
from pyspec.slots.memory import Memory, allocate, memory_of
from pyspec.slots.parts import CachePart, CacheSizes, Paged, Recurrent, Ring, RingPages
from pyspec.slots.ring import RingRows
from pyspec.slots.states import StateStore
from pyspec.slots.table import SlotTable

CPU = torch.device("cpu")
GDN = Recurrent(GdnShape(n_k_head=1, n_v_head=2, dim=8, n_conv=4, n_channel=32))
MAMBA = Recurrent(Mamba2Shape(n_head=2, head_dim=4, n_group=1, n_state=8, n_conv=3))
WINDOW = Ring(24, {"kv": (1, 8)}, torch.float16)
PARTIAL = Ring(8, {"v": (6,), "score": (6,)})
PARTS: dict[str, CachePart] = {
    "keys and values": Paged(2, 32),
    "keys alone": Paged(1, 32, keys_only=True),
    "a row for 4 tokens": Paged(1, 64, tokens_per_row=4, keys_only=True),
    "a row for 128 tokens": Paged(1, 32, tokens_per_row=128),
    "a window": WINDOW,
    "partial sums": PARTIAL,
    "a ring of pages": RingPages(Paged(2, 32, window=24)),
    "gated delta": GDN,
    "mamba2": MAMBA,
}


def sizes(
    dtype: torch.dtype = torch.float32, *, n_slot: int = 3, n_row: int = 80, width: int = 5
) -> CacheSizes:
    return CacheSizes(n_slot, n_row, page_size=16, width=width, kv=KvFormat.both(type_of(dtype)))


def n_bytes(tensors: list[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("dtype", TYPES.values())
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_a_part_takes_the_bytes_it_declares(part: CachePart, dtype: torch.dtype) -> None:
    s = sizes(dtype)
    memory = memory_of(part, s, CPU)
    assert n_bytes(list(memory.tensors())) == part.n_bytes(s) > 0 and memory.paged is part.paged
    assert not any(raw.any() for raw in (t.view(torch.uint8) for t in memory.tensors()))
    most = max(n_bytes(list(memory.saved(1, n))) for n in (0, 1, 7, 8, 24, 500))
    assert most == part.saved_bytes(s) and (most == 0) is part.paged
    assert bool(memory.page(2, 16)) is part.paged


def test_a_plan_is_the_sum_of_its_parts() -> None:
    layers, s = [{name: part} for name, part in PARTS.items()] + [{}, dict(PARTS)], sizes(torch.float16)
    memory, one = allocate(layers, s, CPU), checkpoint_bytes(layers, s)
    assert memory_bytes(layers, s) == (memory.kv_bytes, memory.state_bytes + 3 * one)
    assert n_bytes(memory.checkpoint(2, 100).tensors) == one
    assert len({t.data_ptr() for part in memory.parts for t in part.tensors()}) == sum(
        len(part.tensors()) for part in memory.parts
    )


def test_keys_that_are_values_are_kept_once() -> None:
    pool = memory_of(Paged(1, 32, keys_only=True), sizes(torch.int8), CPU)
    x = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(0))
    pool.write(torch.tensor([3, 9]), x, None)
    k, v = pool.read(torch.tensor([3, 9]), torch.float32)
    assert torch.equal(k, v) and (k - x).abs().max() < 0.02 and len(pool.planes) == 2


# -- rows of several tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page_size", "ratio"), [(16, 4), (16, 16), (16, 128), (64, 128), (16, 3), (16, 24), (8, 1)]
)
def test_rows_of_several_tokens_go_where_the_last_of_them_goes(page_size: int, ratio: int) -> None:
    """For all sizes: no two rows of the pool share a place, and a page has all rows whose tokens end on it."""
    table, n = SlotTable(2, 40, page_size), 20 * page_size - 5
    random.Random(3).shuffle(table._free)
    part = Paged(1, 8, tokens_per_row=ratio)
    pool = memory_of(part, CacheSizes(2, table.n_alloc_row, page_size, 1, KvFormat.named("f32")), CPU)
    seen = set()
    for slot in table.slots:
        table.acquire(slot, n)
        table.grow(slot, n)
        slot.tokens.extend([0] * n)
        ends = range(ratio - 1, n, ratio)
        rows = pool.rows_of(torch.tensor([table.row(slot, end) for end in ends]), page_size)
        pool.write(rows, *(torch.full((len(rows), 1, 8), 1.0 + slot.index),) * 2)
        per_page = -(-page_size // ratio)
        assert [row // per_page for row in rows.tolist()] == [
            slot.pages[end // page_size] for end in ends
        ]
        seen |= set(rows.tolist())
    assert len(seen) == 2 * (n // ratio) and max(seen) < len(pool.k) - -(-page_size // ratio), (
        "the null page is free"
    )
    for slot in table.slots:
        on_pages = torch.cat([pool.page(page, page_size)[0] for page in slot.pages])
        assert (on_pages == 1.0 + slot.index).any(-1).sum() == n // ratio


def test_a_page_is_copied_in_every_part_that_has_pages() -> None:
    """A request that continues in the middle of a page finds rows of one token, of four, and a ring as they were."""
    gen = torch.Generator().manual_seed(0)
    table = SlotTable(2, 6, 16)
    s = CacheSizes(2, table.n_alloc_row, 16, 4, KvFormat.named("bf16"))
    memory = allocate(
        [{"kv": Paged(1, 8)}, {"rows": Paged(1, 8, tokens_per_row=4), "window": WINDOW}], s, CPU
    )
    cache = PrefixCache(table, memory, StateStore(1 << 20, 0))
    assert table.needs_state, "a ring is not known from its pages"
    prompt = list(range(41))
    slot = table.slots[0]
    cache.seat(slot, 48, prompt, cache.find(prompt), memory.paged)
    table.grow(slot, 40)
    slot.tokens.extend(prompt[:40])
    for part in memory.parts:
        for t in part.tensors():
            t.copy_(torch.randn(t.shape, generator=gen))
    cache.file(slot, None, lambda slot: None, whole=True)
    own = list(slot.pages)
    table.release(slot)
    window = memory.layers[1]["window"]
    assert isinstance(window, RingRows)
    want = window.read(0, 16, 40)["kv"]

    other, hit = table.slots[1], cache.find(prompt)
    assert hit.n == 40 and hit.tail is not None
    cache.seat(other, 48, prompt, hit, memory.paged)
    assert other.pages[:2] == own[:2] and other.pages[2] != own[2]
    for part in memory.paged:
        pairs = zip(part.page(other.pages[2], 16), part.page(own[2], 16), strict=True)
        assert all(torch.equal(a, b) and a.any() for a, b in pairs)
    assert torch.equal(window.read(1, 16, 40)["kv"], want), "from the checkpoint, in another slot"
    cache.check(now=True)


# -- rings ---------------------------------------------------------------------------------------------------------


def tagged(positions: list[int], draft: int = 0) -> dict[str, Tensor]:
    """Rows with a tag: position, and whether a refused draft wrote them."""
    rows = torch.tensor(positions).view(-1, 1) + draft / 2
    return {"v": rows.expand(-1, 6), "score": -rows.expand(-1, 6)}


def window_of(ring: RingRows, slot: int, n_past: int) -> list[float]:
    """The window of the token at `n_past`."""
    rows = ring.read(slot, max(n_past + 1 - ring.window, 0), n_past + 1)
    assert torch.equal(rows["score"], -rows["v"])
    return rows["v"][:, 0].tolist()


@pytest.mark.parametrize("width", [1, 2, 5, 16])
def test_taking_drafts_back_is_lowering_the_length(width: int) -> None:
    """Prompts in chunks, then verifies of any width with any number of kept rows: every token always sees its own window."""
    rng, slot = random.Random(width), 1
    ring = memory_of(PARTIAL, sizes(width=width), CPU)
    assert ring.n_row == 8 + 2 * width
    ring.rows["v"].fill_(torch.nan)
    ring.rows["score"].fill_(torch.nan)
    n_past = 0
    for n in (3, 30, 2, 7):  # one chunk is longer than the ring
        ring.write(slot, n_past, tagged(list(range(n_past, n_past + n))))
        n_past += n
    for _ in range(200):
        n = rng.randint(1, width)
        kept = rng.randint(1, n)
        ring.write(slot, n_past, tagged([n_past]))
        ring.write(slot, n_past + 1, tagged(list(range(n_past + 1, n_past + n)), draft=1))
        for i in range(n):  # in the verify itself: rows see drafts before them
            drafts = [p + 0.5 for p in range(n_past + 1, n_past + i + 1)]
            past = [float(p) for p in range(max(n_past + i + 1 - 8, 0), n_past + 1)]
            assert window_of(ring, slot, n_past + i) == (past + drafts)[-8:]
        ring.write(slot, n_past + 1, tagged(list(range(n_past + 1, n_past + kept))))  # those were right
        n_past += kept
        rest = ring.read(slot, n_past - 7, n_past)
        assert rest["v"][:, 0].tolist() == [float(p) for p in range(n_past - 7, n_past)], (
            "what the next token sees"
        )
    assert ring.rows["v"][[0, 2]].isnan().all(), "other slots' rings were written"


def test_one_row_less_and_a_refused_draft_is_in_the_window() -> None:
    """The slack is exact: with a row less, the window of the next token has lost its first row."""
    ring = RingRows({"v": (6,), "score": (6,)}, 1, 8, 3, torch.float32, CPU)
    for width, whole in ((4, True), (5, False)):
        ring.write(0, 0, tagged(list(range(20))))
        ring.write(0, 20, tagged(list(range(20, 20 + width)), draft=1))
        ring.write(0, 20, tagged([20]))
        assert (window_of(ring, 0, 20) == [float(p) for p in range(13, 21)]) is whole


@pytest.mark.parametrize("width", [1, 3, 8])
def test_a_round_behind_a_verify_leaves_the_window_of_where_the_request_ended(width: int) -> None:
    """Two rounds in flight: the second begins behind all rows of the first, of which the host then keeps one."""
    ring = memory_of(PARTIAL, sizes(width=width), CPU)
    ring.write(0, 0, tagged(list(range(21))))
    ring.write(0, 20, tagged(list(range(20, 20 + width)), draft=1))
    ring.write(0, 20 + width, tagged(list(range(20 + width, 20 + 2 * width)), draft=1))
    saved = Memory([{"partial": ring}], width).checkpoint(0, 20)
    rows = ring.read(0, 12, 20)["v"][:, 0].tolist()
    assert rows == [float(p) for p in range(12, 20)] and saved.n_past == 20


def test_a_rings_checkpoint_is_its_window_wherever_the_ring_stands() -> None:
    ring = memory_of(PARTIAL, sizes(width=4), CPU)
    memory, seen = Memory([{"partial": ring}], 4), set()
    for n_past in (0, 1, 5, 8, 9, 11, 12, 18, 19, 25, 31, 300):
        ring.write(0, 0, tagged(list(range(n_past))))
        ring.write(0, n_past, tagged([n_past, n_past + 1, n_past + 2], draft=1))
        saved = memory.checkpoint(0, n_past)
        seen.add(len(saved.tensors))
        assert n_bytes(saved.tensors) == min(n_past, 8) * 48
        ring.rows["v"].fill_(torch.nan)
        ring.rows["score"].fill_(torch.nan)
        memory.restore(2, saved)
        n = min(n_past, 8)
        rows = ring.read(2, n_past - n, n_past)
        assert rows["v"][:, 0].tolist() == [float(p) for p in range(n_past - n, n_past)]
        assert torch.equal(rows["score"], -rows["v"]) and ring.rows["v"][:2].isnan().all()
    assert seen == {0, 2, 4}, "nothing, one run of rows and two"


def test_a_reset_ring_has_nothing_of_the_last_sequence() -> None:
    ring = memory_of(PARTIAL, sizes(), CPU)
    ring.write(0, 0, tagged(list(range(1, 40))))
    ring.write(1, 0, tagged(list(range(1, 40))))
    Memory([{"partial": ring}], 5).reset(0)
    assert not any(t[0].any() for t in ring.tensors()) and all(t[1].all() for t in ring.tensors())


def test_rows_that_a_ring_does_not_have_are_refused() -> None:
    ring = memory_of(PARTIAL, sizes(), CPU)
    for slot, first, end in (
        (0, 0, memory_of(PARTIAL, sizes(), CPU).n_row + 1),
        (0, -1, 3),
        (3, 0, 2),
        (-1, 0, 2),
    ):
        with pytest.raises(OutOfBounds):
            ring.read(slot, first, end)
    with pytest.raises(OutOfBounds):
        ring.write(3, 0, tagged([0]))


# -- checkpoints ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_all_kinds_brings_each_back_in_its_own_type() -> None:
    gen = torch.Generator().manual_seed(1)
    layers = [{"state": GDN, "window": WINDOW}, {"kv": Paged(1, 8)}, {"state": MAMBA}, {"partial": PARTIAL}]  # fmt: skip
    memory = allocate(layers, sizes(torch.float16), CPU)
    for part in memory.parts:
        for t in part.tensors():
            t.copy_(torch.randn(t.shape, generator=gen))
    want = [t.clone() for part in memory.parts for t in part.saved(1, 30)]
    saved = memory.checkpoint(1, 30)
    assert {t.dtype for t in saved.tensors} == {torch.float16, torch.float32}
    assert len({t.untyped_storage().data_ptr() for t in saved.tensors}) == 2, "one allocation a type"
    for part in memory.parts:
        for t in part.tensors():
            t.fill_(torch.nan)
    memory.restore(2, saved)
    got = [t for part in memory.parts for t in part.saved(2, 30)]
    assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(got, want, strict=True))
    assert all(t[:2].isnan().all() for part in memory.parts if not part.paged for t in part.tensors())


def test_only_what_pages_do_not_hold_needs_a_checkpoint() -> None:
    for layer, needs in (
        ({}, False),
        ({"kv": Paged(1, 8)}, False),
        ({"kv": WINDOW}, True),
        ({"state": GDN}, True),
    ):
        memory = allocate([layer, {"kv": Paged(1, 8, tokens_per_row=4)}], sizes(), CPU)
        assert memory.needs_state is needs
        assert bool(memory.checkpoint(0, 9).tensors) is needs
        assert len(memory.paged) == len(memory.parts) - needs


def test_a_record_that_would_hide_what_every_layer_has_is_refused() -> None:
    class Bad(Mamba2Shape):
        records = {"conv": (2,)}  # noqa: RUF012

    with pytest.raises(AssertionError, match="can not be called conv"):
        memory_of(Recurrent(Bad(2, 4, 1, 8, 3)), sizes(), CPU)


def test_recurrent_layers_have_the_records_of_their_own_shape_alone() -> None:
    delta, mamba = (memory_of(part, sizes(), CPU) for part in (GDN, MAMBA))
    assert delta.g.shape == (3, 5, 2) and mamba.decay.shape == (3, 5, 2)
    assert not hasattr(delta, "decay") and not hasattr(mamba, "g")
    assert [t.shape[2:] for t in delta.records()] == [(1, 8), (2, 8), (2,), (2,)]


def test_a_pool_of_a_whole_model_is_found_by_its_layer() -> None:
    memory = allocate([{"state": GDN}, {"kv": Paged(2, 8)}, {}], sizes(), CPU)
    assert isinstance(memory.kv[1], KVPool)
    assert list(memory.states) == [0]
    assert memory.kv_format == KvFormat.named("f32")
    assert memory.kv[1].k.numel() == 80 * 2 * 8
