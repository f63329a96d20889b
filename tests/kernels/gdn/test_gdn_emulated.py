"""gdn.cu and gdn_chunk.cu run thread by thread on the CPU, against the reference in float64 and themselves to the bit."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler
from torch import Tensor

from pyspec.cuda import faults
from pyspec.cuda.ops.gdn import cuda as gdn_cuda
from pyspec.cuda.ops.gdn import ref as gdn_ref
from pyspec.cuda.ops.gdn.ref import GdnSpec
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.cuda.ops.rows.cuda import GatedRowBuffer, Rows, RowsLaunch
from pyspec.cuda.ops.rows.ref import HeadNorm
from pyspec.errors import OutOfBounds
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Batch, Seq, SeqMode, lay_out
from pyspec.slots.recurrent import StateLayer
from pyspec.slots.table import SlotTable

pytestmark = [needs_compiler, pytest.mark.sampled(1)]
SEEDS = (0, 1)
WIDTH, N_SLOT, EPS = 6, 4, 1e-6


def shape_of(n_k: int, n_v: int) -> GdnShape:
    return GdnShape(n_k, n_v, 128, 4, 128 * (2 * n_k + n_v))


def seq(slot: int, n: int, keep: bool = False, fold: int = 0, late: bool = False) -> Seq:
    return Seq(
        slot, 0, [0] * n, SeqMode.LATE if late else SeqMode.KEEP if keep else SeqMode.VERIFY, 0, fold
    )


def laid(seqs: list[Seq]) -> Batch:
    return lay_out(SlotTable(N_SLOT, 64, 64), seqs, CPU)


def inputs(n: int, shape: GdnShape, gen: torch.Generator) -> list[Tensor]:
    """m and the raw gates, as slices of wider rows that are NaN elsewhere."""
    sizes = [shape.n_channel, shape.n_v_head, shape.n_v_head]
    sizes.append(64 + -sum(sizes) % 4)
    out = torch.full((n, sum(sizes)), torch.nan).split(sizes, 1)[:3]
    for x, scale in zip(out, (1.0, 3.0, 3.0), strict=True):
        x.copy_(scale * torch.randn(x.shape, generator=gen))
    return list(out)


def weights(shape: GdnShape, gen: torch.Generator) -> list[Tensor]:
    """a, dt_bias, conv_w; some heads keep all they saw, some forget at once."""
    scale = torch.tensor([0.0, 0.1, 1.0, 30.0])[torch.arange(shape.n_v_head) % 4]
    a = -scale * torch.rand(shape.n_v_head, generator=gen)
    return [
        a,
        torch.randn(shape.n_v_head, generator=gen),
        torch.randn(shape.n_channel, 4, generator=gen),
    ]


def layer_of(shape: GdnShape, doubled: bool = False) -> StateLayer:
    """A new layer; for the kernels, unwritten records hold NaN."""
    layer = StateLayer(shape, N_SLOT, WIDTH, CPU)
    for name in ("state", "conv", "k", "v", "g", "beta"):
        t = getattr(layer, name)
        if doubled:
            setattr(layer, name, t.double())
        elif name != "state":
            (t[:, 3:] if name == "conv" else t).fill_(torch.nan)
    return layer


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


ROUNDS = [
    [seq(0, 5, True), seq(2, 1), seq(3, 3, True)],
    [seq(0, 6), seq(2, 3, fold=1), seq(3, 1)],
    [seq(2, 1, fold=3), seq(0, 2, fold=1), seq(1, 4, True), seq(3, 6, fold=1)],
    [seq(3, 1, True, fold=6), seq(0, 2, True, fold=2), seq(2, 6, fold=0), seq(1, 1)],
    [seq(3, 1, late=True), seq(1, 2, fold=1, late=True), seq(0, 1, late=True)],
    [seq(0, 1, fold=1, late=True), seq(3, 2, fold=1, late=True), seq(1, 1, fold=3, late=True)],
    [seq(0, 1, fold=2, late=True), seq(3, 6, fold=3), seq(1, 1, True, fold=4)],
    [seq(0, 1, fold=3), seq(1, 1, late=True)],
    [seq(1, 66, True, fold=1), seq(2, 25, True, fold=6), seq(0, 6)],
    [seq(0, 9, True, fold=6), seq(1, 1, True), seq(2, 6), seq(3, 2, True)],
]
PROMPTS = [
    [seq(0, 64, True), seq(2, 3), seq(3, 63, True)],
    [seq(2, 65, True, fold=2), seq(0, 130, True), seq(1, 6), seq(3, 2, True)],
    [seq(1, 72, True, fold=6), seq(3, 64, True)],
]


def follow(
    rounds: list[list[Seq]], heads: tuple[int, int], capability: tuple[int, int], seed: int, **how: int
) -> None:
    """All rounds on the kernels and on the reference in float64."""
    shape, gen = shape_of(*heads), torch.Generator().manual_seed(1)
    w, mine, theirs = weights(shape, gen), layer_of(shape), layer_of(shape, doubled=True)
    reference = gdn_ref.bind(GdnSpec(CPU, shape, EPS))
    with emulated_gpu(capability, seed=seed):
        run = gdn_cuda.bind(GdnSpec(CPU, shape, EPS), **how)  # type: ignore[arg-type]
        for seqs in rounds:
            rows = inputs(sum(s.width for s in seqs), shape, gen)
            got = run(*rows, *w, mine, laid(seqs))
            want = reference(*(x.double() for x in (*rows, *w)), theirs, laid(seqs))
            chunked = max(s.width for s in seqs) >= how.get("chunked", gdn_cuda.CHUNKED)
            assert error(got, want) < (1e-3 if chunked else 1e-5)
            assert error(mine.state, theirs.state) < 3e-5
            for s in seqs:
                n = 3 if s.keep else 3 + s.width + s.n_fold * s.late
                assert error(mine.conv[s.slot, :n], theirs.conv[s.slot, :n]) < 1e-6
                if not s.keep:
                    for a, b in zip(mine.tensors()[2:], theirs.tensors()[2:], strict=True):
                        assert error(a[s.slot, : n - 3], b[s.slot, : n - 3]) < 1e-5
        assert faults.record(CPU).tolist() == [0] * 5


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("heads", "columns"), [((1, 1), 2), ((2, 4), 4)])
def test_ragged_rounds_follow_the_reference(heads: tuple[int, int], columns: int, seed: int) -> None:
    follow(ROUNDS, heads, (9, 0), seed, columns=columns, chunked=gdn_cuda.NEVER)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("heads", [(1, 1), (2, 4)])
def test_a_warp_for_each_sequence_makes_the_bits_that_a_block_makes(
    heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, folds, windows and records of ragged rounds, a sequence of padding and one that is only folded among them."""
    shape, gen = shape_of(*heads), torch.Generator().manual_seed(1)
    w, layers = weights(shape, gen), [layer_of(shape) for _ in range(2)]
    fold_only = [*ROUNDS, [seq(2, 5, fold=0)], [seq(2, 0, True, fold=3), seq(1, 1)]]
    with emulated_gpu(seed=3):
        runs = [
            gdn_cuda.bind(GdnSpec(CPU, shape, EPS), columns=2, chunked=gdn_cuda.NEVER) for _ in layers
        ]
        runs[1].many = 1, gdn_cuda.NEVER
        for seqs in fold_only:
            rows = inputs(sum(s.width for s in seqs), shape, gen)
            got = [run(*rows, *w, layer, laid(seqs)) for run, layer in zip(runs, layers, strict=True)]
            assert torch.equal(*got)
            for a, b in zip(layers[0].tensors(), layers[1].tensors(), strict=True):
                assert torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))
        assert faults.record(CPU).tolist() == [0] * 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("heads", "capability"), [((1, 2), (9, 0)), ((2, 2), (8, 6))])
def test_chunked_prompts_follow_the_reference(
    heads: tuple[int, int], capability: tuple[int, int], seed: int
) -> None:
    """Two stages of keys, and one as on GPUs with less shared memory."""
    follow(PROMPTS, heads, capability, seed, columns=2, chunked=63)


@pytest.mark.slow
def test_the_kernels_pass_the_check_they_are_chosen_by() -> None:
    spec = GdnSpec(CPU, shape_of(1, 2), EPS)
    with emulated_gpu(seed=2):
        assert gdn_cuda.check(gdn_cuda.bind(spec), gdn_ref.bind(spec), spec) is None


def test_a_chunked_prompt_does_not_depend_on_its_neighbours_nor_on_the_order_to_the_bit() -> None:
    shape, gen = shape_of(1, 1), torch.Generator().manual_seed(8)
    w, rows, found = weights(shape, gen), inputs(300, shape, gen), []
    for seed, (before, after) in enumerate(
        (([], []), ([seq(0, 70, True), seq(3, 4)], [seq(2, 64, True)]))
    ):
        layer, first = StateLayer(shape, N_SLOT, WIDTH, CPU), sum(s.width for s in before)
        for t in layer.tensors():
            t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(9)))
        seqs = [*before, seq(1, 100, True, fold=3), *after]
        own = [
            torch.cat([x[150 : 150 + first], x[:100], x[230:]])[: sum(s.width for s in seqs)]
            for x in rows
        ]
        with emulated_gpu(seed=seed):
            got = gdn_cuda.bind(GdnSpec(CPU, shape, EPS), columns=2, chunked=63)(
                *own, *w, layer, laid(seqs)
            )
        found.append((got[first : first + 100], layer.state[1], layer.conv[1, :3]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
def test_value_heads_grouped_by_key_head_follow_the_reference() -> None:
    """Rows, folds, a prompt in chunks and rows prepared on the way; other groups than those of the reference differ."""
    shape, gen = replace(shape_of(2, 4), grouped=True), torch.Generator().manual_seed(14)
    w, found = weights(shape, gen), []
    for seqs in ([seq(0, 2, True), seq(2, 3)], [seq(2, 1, True, fold=2), seq(1, 65, True)]):
        found.append((seqs, inputs(sum(s.width for s in seqs), shape, gen)))
    for grouped in (True, False):
        own = replace(shape, grouped=grouped)
        theirs = layer_of(shape, doubled=True)
        reference, errors = gdn_ref.bind(GdnSpec(CPU, shape, EPS)), []
        with emulated_gpu():
            run, mine = gdn_cuda.bind(GdnSpec(CPU, own, EPS), columns=2, chunked=63), layer_of(own)
            for seqs, rows in found:
                got = run(*rows, *w, mine, laid(seqs))
                want = reference(*(x.double() for x in (*rows, *w)), theirs, laid(seqs))
                errors += [
                    error(got[: seqs[0].width], want[: seqs[0].width]),
                    error(got[-65:], want[-65:]),
                ]
            assert faults.record(CPU).tolist() == [0] * 5
        assert (max(errors) < 1e-3 and error(mine.state, theirs.state) < 3e-5) == grouped
        assert grouped or min(errors[0], errors[3]) > 0.1


def test_rows_of_grouped_heads_are_prepared_on_the_way() -> None:
    shape, gen = replace(shape_of(2, 4), grouped=True), torch.Generator().manual_seed(15)
    w, seqs = weights(shape, gen), [seq(1, 2), seq(0, 1, True)]
    x, prep = inputs(3, shape, gen), norm_of(shape, 3, gen)
    with emulated_gpu():
        run = gdn_cuda.bind(GdnSpec(CPU, shape, EPS), columns=2)
        into = GatedRowBuffer(rows_of(shape, 7.0), prep)
        got = run.prepared(*x, *w, layer_of(shape), laid(seqs), into=into)
        want = rows_of(shape, 7.0)(run(*x, *w, layer_of(shape), laid(seqs)).flatten(1), prep)
    assert same(got, want)


WAYS = {
    "token by token": ([1] * 14, [1] * 14),
    "all accepted": ([6] * 2, [6] * 2),
    "none but the anchor accepted": ([6] * 14, [1] * 14),
    "ragged": ([6, 2, 5, 1, 6], [3, 1, 5, 1, 2]),
}


def run_way(
    widths: list[int], accepts: list[int], columns: int, neighbours: bool, seed: int
) -> tuple[Tensor, Tensor]:
    """Slot 1's 15 tokens in verifies, the rest kept; rows that are not accepted hold noise. Its state and outputs."""
    shape, gen, n_text = shape_of(1, 2), torch.Generator().manual_seed(2), 15
    w, text = weights(shape, gen), inputs(n_text, shape, gen)
    layer, outs, done, fold = StateLayer(shape, N_SLOT, WIDTH, CPU), [], 0, 0
    with emulated_gpu(seed=seed):
        run = gdn_cuda.bind(GdnSpec(CPU, shape, EPS), columns=columns)
        for width, accepted in [*zip(widths, accepts, strict=True), (0, 0)]:
            last = width == 0
            n, taken = (n_text - done, n_text - done) if last else (width, accepted)
            noise = inputs(n, shape, gen)
            rows = [
                torch.cat([x[done : done + taken], y[taken:]]) for x, y in zip(text, noise, strict=True)
            ]
            seqs, at = [seq(1, n, last, fold)], 0
            if neighbours:
                seqs, at = [seq(3, 2), *seqs, seq(0, 5, True)], 2
                other = inputs(7, shape, gen)
                rows = [torch.cat([x[:2], y, x[2:]]) for x, y in zip(other, rows, strict=True)]
            got = run(*rows, *w, layer, laid(seqs))
            outs.append(got[at : at + taken])
            done, fold = done + taken, taken
    return layer.state[1], torch.cat(outs)


def run_late() -> tuple[Tensor, Tensor]:
    """The same text row by row, the state written with every fourth."""
    shape, gen = shape_of(1, 2), torch.Generator().manual_seed(2)
    w, text = weights(shape, gen), inputs(15, shape, gen)
    layer, outs = StateLayer(shape, N_SLOT, WIDTH, CPU), []
    with emulated_gpu():
        run = gdn_cuda.bind(GdnSpec(CPU, shape, EPS))
        for t in range(15):
            keeps = t % 4 == 3 or t == 14
            outs.append(
                run(*(x[t : t + 1] for x in text), *w, layer, laid([seq(1, 1, keeps, t % 4, not keeps)]))
            )
    return layer.state[1], torch.cat(outs)


@pytest.mark.slow
@pytest.mark.parametrize("fold", [1, 3, WIDTH])
def test_folding_alone_gives_the_bits_of_folding_before_rows(fold: int) -> None:
    shape, gen = shape_of(2, 4), torch.Generator().manual_seed(4)
    w, one, two = weights(shape, gen), layer_of(shape), layer_of(shape)
    first, later = inputs(WIDTH, shape, gen), inputs(2, shape, gen)
    before = [t.clone() for t in one.tensors()]
    with emulated_gpu(seed=fold):
        run, alone = gdn_cuda.bind(GdnSpec(CPU, shape, EPS)), gdn_cuda.folder(GdnSpec(CPU, shape, EPS))
        for layer in (one, two):
            run(*first, *w, layer, laid([seq(1, WIDTH)]))
        alone(one, 1, fold)
        alone(one, 2, 0)
        a = run(*later, *w, one, laid([seq(1, 2, True)]))
        b = run(*later, *w, two, laid([seq(1, 2, True, fold)]))
        assert torch.equal(a, b) and torch.equal(one.state, two.state)
        assert torch.equal(one.conv[1, :3], two.conv[1, :3])
        for t, old in zip(
            one.tensors(), before, strict=True
        ):  # other slots stay as they were, NaN where nothing is
            assert torch.equal(t[[0, 2]].nan_to_num(7.5), old[[0, 2]].nan_to_num(7.5))
        with pytest.raises(OutOfBounds):
            alone(one, 1, WIDTH + 1)
        assert faults.record(CPU).tolist() == [0] * 5


@pytest.mark.slow
def test_states_and_outputs_do_not_depend_on_how_tokens_came_nor_on_neighbours_to_the_bit() -> None:
    state, out = run_way([], [], 2, False, 0)
    again, rows = run_late()
    assert torch.equal(again, state) and torch.equal(rows, out)
    assert state.isfinite().all() and state.norm() > 0
    for seed, (way, columns, neighbours) in enumerate(
        zip(WAYS, (2, 4, 2, 4), (False, True, False, True), strict=True)
    ):
        again, rows = run_way(*WAYS[way], columns, neighbours, seed)
        assert torch.equal(again, state) and torch.equal(rows, out), way


def test_padding_and_idle_slots_are_not_touched() -> None:
    shape, gen = shape_of(1, 2), torch.Generator().manual_seed(3)
    w, layer, rows = weights(shape, gen), StateLayer(shape, N_SLOT, WIDTH, CPU), inputs(9, shape, gen)
    for t in layer.tensors():
        t[0], t[3] = torch.nan, torch.nan
    batch = laid([seq(1, 4), seq(2, 2, True)])

    def more(x: Tensor, value: int) -> Tensor:
        return torch.cat([x, x.new_full((2,), value)])

    batch = dataclasses.replace(  # two sequences without rows, and three rows without a sequence
        batch,
        seq_slot=more(batch.seq_slot, 10**9),
        seq_start=more(batch.seq_start, 6),
        seq_fold=more(batch.seq_fold, -7),
        seq_keep=more(batch.seq_keep, 1),
    )
    with emulated_gpu():
        got = gdn_cuda.bind(GdnSpec(CPU, shape, EPS), columns=2)(*rows, *w, layer, batch)
        assert faults.record(CPU).tolist() == [0] * 5
    assert got[:6].isfinite().all() and not got[6:].any()
    for t in layer.tensors():
        assert t[0].isnan().all() and t[3].isnan().all()
    assert layer.k[1, :4].isfinite().all() and not layer.k[1, 4:].any() and not layer.k[2].any()


@pytest.mark.parametrize("n", [3, 70])
@pytest.mark.parametrize(
    ("field", "value", "index", "limit"),
    [
        ("seq_slot", N_SLOT, N_SLOT, N_SLOT),
        ("seq_slot", -1, -1, N_SLOT),
        ("seq_fold", 7, 7, 7),
        ("seq_fold", -1, -1, 7),
    ],
)
def test_a_bad_index_is_reported_and_its_sequence_skipped(
    field: str, value: int, index: int, limit: int, n: int
) -> None:
    """One of few rows, and one that is chunked."""
    shape, gen = shape_of(1, 1), torch.Generator().manual_seed(4)
    w, rows, seqs = (
        weights(shape, gen),
        inputs(6 + n, shape, gen),
        [seq(0, 3, True), seq(1, n, True), seq(2, 3)],
    )
    good, bad, batch = (
        StateLayer(shape, N_SLOT, WIDTH, CPU),
        StateLayer(shape, N_SLOT, WIDTH, CPU),
        laid(seqs),
    )
    with emulated_gpu():
        run = gdn_cuda.bind(GdnSpec(CPU, shape, EPS), columns=2, chunked=63)
        want = run(*rows, *w, good, laid(seqs))
        assert faults.record(CPU).tolist() == [0] * 5
        getattr(batch, field)[1] = value
        got = run(*rows, *w, bad, batch)
        assert faults.record(CPU).tolist() == [1, 3, value if field == "seq_slot" else 1, index, limit]
    for part in (slice(0, 3), slice(3 + n, 6 + n)):
        assert torch.equal(got[part], want[part])
    for a, b in zip(bad.tensors(), good.tensors(), strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]]) and not a[[1, 3]].any()


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("n", [192, 200, 256])
def test_a_prompt_replayed_in_a_graph_has_the_bits_that_it_has_without(n: int) -> None:
    """Launched for as many rows and chunks as there is room for; how many there are stands in the arena, which was filled anew."""
    shape, gen, table = shape_of(1, 2), torch.Generator().manual_seed(5), SlotTable(N_SLOT, 64, 64)
    w, one, two, arena = weights(shape, gen), layer_of(shape), layer_of(shape), Arena(N_SLOT, 8, CPU)
    rows = inputs(256, shape, gen)
    arena.prompts.add(256)
    captured = lay_out(table, [Seq(2, 0, [0] * 256, mode=SeqMode.KEEP, n_out=1)], CPU, arena=arena)
    assert captured.prompt and captured.n_place == 1 and captured.out_rows.tolist() == [255]
    replayed = lay_out(table, [Seq(2, 0, [0] * n, mode=SeqMode.KEEP, n_out=1)], CPU, arena=arena)
    assert replayed.prompt and replayed.seq_start.data_ptr() == captured.seq_start.data_ptr()
    with emulated_gpu():
        run = gdn_cuda.bind(GdnSpec(CPU, shape, EPS), columns=2)
        want = run(*(x[:n] for x in rows), *w, one, laid([seq(2, n, True)]))
        got = run(*rows, *w, two, captured)
        assert faults.record(CPU).tolist() == [0] * 5
    assert torch.equal(got[:n], want)
    assert torch.equal(one.state, two.state) and torch.equal(one.conv[:, :3], two.conv[:, :3])


PREPARED = [
    *ROUNDS[:4],
    [seq(0, 18, True, fold=1), seq(1, 25, True), seq(2, 3)],
]  # up to four stages of 8 rows


def norm_of(shape: GdnShape, n_row: int, gen: torch.Generator) -> HeadNorm:
    """With a gate that is a slice of wider rows."""
    n_in = shape.n_v_head * shape.dim
    weight, gate = (
        1 + 0.3 * torch.randn(shape.dim, generator=gen),
        3 * torch.randn(n_row, n_in + 32, generator=gen),
    )
    return HeadNorm(weight, EPS, gate[:, 32:], 32.0)


def rows_of(shape: GdnShape, fill: float) -> RowsLaunch:
    """Rows for a product, all buffers holding `fill`."""
    rows = RowsLaunch(CPU, shape.n_v_head * shape.dim, (8, 16, 48))
    for t in (rows.blocks, rows.sums, rows.powers):
        t.fill_(fill)
    return rows


def same(a: Rows, b: Rows) -> bool:
    pairs = zip((a.blocks, a.sums, a.powers), (b.blocks, b.sums, b.powers), strict=True)
    return (a.n_row, a.pad) == (b.n_row, b.pad) and all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("heads", "columns"), [((1, 1), 2), ((1, 3), 4), ((2, 4), 2)])
def test_rows_prepared_on_the_way_have_the_bits_of_outputs_prepared_alone(
    heads: tuple[int, int], columns: int, seed: int
) -> None:
    """Odd numbers of heads, too: their blocks end in zeros. All that was in the buffers stays but for the rows."""
    shape, gen = shape_of(*heads), torch.Generator().manual_seed(11)
    w, one, two = weights(shape, gen), layer_of(shape), layer_of(shape)
    with emulated_gpu(seed=seed):
        run = gdn_cuda.bind(GdnSpec(CPU, shape, EPS), columns=columns)
        mine, theirs = rows_of(shape, 7.0), rows_of(shape, 7.0)
        for seqs in PREPARED:
            n = sum(s.width for s in seqs)
            x, prep = inputs(n, shape, gen), norm_of(shape, n, gen)
            got = run.prepared(*x, *w, one, laid(seqs), into=GatedRowBuffer(mine, prep))
            want = theirs(run(*x, *w, two, laid(seqs)).flatten(1), prep)
            assert same(got, want)
            for a, b in zip(one.tensors(), two.tensors(), strict=True):
                assert torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))
        assert faults.record(CPU).tolist() == [0] * 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "chunked", "most"),
    [
        ((8, 6), gdn_cuda.NEVER, 1536),
        ((9, 0), 20, 1536),
        ((9, 0), gdn_cuda.NEVER, 3),
        ((9, 0), gdn_cuda.NEVER, 4),
    ],
    ids=["no clusters", "chunks", "many states", "few states"],
)
def test_without_clusters_with_chunks_and_of_many_states_rows_are_prepared_alone(
    capability: tuple[int, int], chunked: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gdn_cuda, "MOST_PREPARED", most)
    shape, gen = shape_of(1, 2), torch.Generator().manual_seed(12)
    w, x, prep = weights(shape, gen), inputs(24, shape, gen), norm_of(shape, 24, gen)
    seqs = [seq(1, 20, True), seq(3, 4)]
    with emulated_gpu(capability):
        run = gdn_cuda.bind(GdnSpec(CPU, shape, EPS), columns=2, chunked=chunked)
        places = gdn_cuda._place
        called: list[int] = []
        monkeypatch.setattr(gdn_cuda, "_place", lambda *given: (called.append(1), places(*given))[1])
        got = run.prepared(
            *x, *w, layer_of(shape), laid(seqs), into=GatedRowBuffer(rows_of(shape, 7.0), prep)
        )
        assert bool(called) == (most == 4)
        want = rows_of(shape, 7.0)(run(*x, *w, layer_of(shape), laid(seqs)).flatten(1), prep)
    assert same(got, want)


def test_rows_of_nobody_and_of_a_bad_sequence_keep_what_was_there() -> None:
    """Some rows of a graph's bucket have no sequence; a product may read them, and its results are not used."""
    shape, gen = shape_of(1, 2), torch.Generator().manual_seed(13)
    w, x, prep = weights(shape, gen), inputs(12, shape, gen), norm_of(shape, 12, gen)
    batch = laid([seq(1, 4), seq(2, 3, True), seq(0, 2)])
    batch.seq_slot[1] = N_SLOT
    batch = dataclasses.replace(  # a sequence of no rows
        batch,
        seq_slot=torch.cat([batch.seq_slot, batch.seq_slot.new_tensor([10**9])]),
        seq_start=torch.cat([batch.seq_start, batch.seq_start[-1:]]),
        seq_fold=torch.cat([batch.seq_fold, batch.seq_fold.new_tensor([-7])]),
        seq_keep=torch.cat([batch.seq_keep, batch.seq_keep.new_tensor([1])]),
    )
    with emulated_gpu():
        run = gdn_cuda.bind(GdnSpec(CPU, shape, EPS), columns=2)
        got = run.prepared(
            *x,
            *w,
            StateLayer(shape, N_SLOT, WIDTH, CPU),
            batch,
            into=GatedRowBuffer(rows_of(shape, 7.0), prep),
        )
        assert faults.record(CPU).tolist() == [1, 3, N_SLOT, N_SLOT, N_SLOT]
    blocks, sums = got.blocks[: 8 * 16 * 32].view(8, 16, 32), got.sums[: 8 * 16].view(8, 16)
    nobodys = [4, 5, 6, *range(9, 16)]
    assert (
        (blocks[:, nobodys] == 7).all()
        and (sums[:, nobodys] == 7).all()
        and (got.powers[nobodys] == 7).all()
    )
    assert (got.powers[[0, 1, 2, 3, 7, 8]] == 32).all() and (sums[:, [0, 3, 7, 8]] != 7).all()


@pytest.mark.slow
def test_the_check_sees_rows_that_are_prepared_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = GdnSpec(CPU, shape_of(1, 1), EPS)
    with emulated_gpu():
        launch, right = gdn_cuda.bind(spec), gdn_cuda.GdnLaunch.prepared

        def wrong(self: gdn_cuda.GdnLaunch, *args: object, into: GatedRowBuffer) -> Rows:
            rows = right(self, *args, into=into)  # type: ignore[call-arg, arg-type]
            rows.sums[0] += 1
            return rows

        monkeypatch.setattr(gdn_cuda.GdnLaunch, "prepared", wrong)
        assert "prepared for the next product, outputs differ" in (
            gdn_cuda.check(launch, gdn_ref.bind(spec), spec) or ""
        )
