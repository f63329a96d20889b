"""Keys that are their values: attend_latent.cu and rope_latent.cu on every machine and for every architecture, their plans and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attend_checks import check_company, check_graph, check_rows, check_wild_page, wanted
from machines import CPU, NO_FAULT, ON_CARD, Machine, cases, compiled
from torch import Tensor

from pyspec.cuda import jit
from pyspec.cuda.ops.attend import cuda as attend_cuda
from pyspec.cuda.ops.attend import latent
from pyspec.cuda.ops.attend import ref as attend_ref
from pyspec.cuda.ops.attend.cases import Case, Made, make, only, spec_of, worst
from pyspec.cuda.ops.attend.latent import LatentBuild
from pyspec.cuda.ops.attend.op import attend
from pyspec.cuda.ops.attend.op import check as attend_check
from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.cuda.ops.attend.shared import room_of
from pyspec.cuda.ops.rope_latent import cuda as rope_latent_cuda
from pyspec.cuda.ops.rope_latent import ref as rope_latent_ref
from pyspec.cuda.ops.rope_latent.op import check as rope_latent_check
from pyspec.cuda.ops.rope_latent.op import rope_latent
from pyspec.cuda.ops.rope_latent.ref import RopeLatentSpec
from pyspec.slots.kv_types import Q4_0, Q5_1, Q8_0, TYPES, KvFormat

GPU = torch.device("cuda")
pytestmark = pytest.mark.sampled(1)

F8 = torch.float8_e4m3fn
CASES = {
    "first token": Case(3, 1, 64, torch.float16, [(0, 1), (0, 5)], n_value=48),
    "ragged": Case(5, 1, 128, torch.float16, [(0, 3), (255, 1), (127, 9), (1023, 2)], 32, pad=(5, 2), n_value=96),
    "ragged bf16": Case(17, 1, 64, torch.bfloat16, [(17, 3), (700, 1)], 64, pad=(1, 1), n_value=64),
    "more heads than columns": Case(72, 1, 64, torch.float16, [(70, 2), (3, 1)], n_value=32),
    "small window": Case(6, 1, 64, torch.bfloat16, [(600, 5), (127, 2), (9, 4)], 16, 7, n_value=48),
    "window of one": Case(6, 1, 64, torch.float16, [(600, 5), (128, 1)], 16, 1, n_value=48),
    "odd size": Case(5, 1, 24, torch.float16, [(40, 3), (0, 2)], 16, pad=(1, 1), n_value=16),
    "odd size f8": Case(5, 1, 104, F8, [(40, 3), (0, 2)], 16, n_value=80),
    "drafter block": Case(4, 1, 64, torch.float16, [(1100, 8), (100, 8)], 16, 0, True, (8, 1), n_value=48),
    "many sequences": Case(7, 1, 64, torch.float16, [(i * 37 % 61, 1 + i % 3) for i in range(71)], 16, pad=(3, 4), n_value=48),
    "q8_0": Case(6, 1, 128, torch.int8, [(0, 3), (127, 9), (260, 1)], 32, pad=(5, 2), n_value=96),
    "f8": Case(6, 1, 64, F8, [(17, 3), (300, 1)], 64, n_value=48),
    "q4_0": Case(6, 1, 64, Q4_0, [(17, 3), (300, 1)], 16, pad=(1, 1), n_value=32),
    "q5_1": Case(6, 1, 64, Q5_1, [(70, 2), (30, 1)], 16, n_value=64),
    "pages of one key": Case(5, 1, 128, torch.float16, [(0, 3), (255, 1), (300, 9)], 1, pad=(5, 2), n_value=96),
    "pages of one key of 4 bits": Case(6, 1, 64, Q4_0, [(17, 3), (300, 1)], 1, pad=(1, 1), n_value=32),
}  # fmt: skip


RAGGED = [(0, 3), (255, 1), (1500, 17), (4097, 2), (9000, 1)]
OF_A_CARD = {
    "128 heads": Case(128, 1, 576, torch.float16, RAGGED, 32, pad=(5, 2), n_value=512),
    "16 heads": Case(16, 1, 576, torch.float16, RAGGED, 64, pad=(5, 2), n_value=512),
    "20 heads": Case(20, 1, 576, torch.bfloat16, [(70, 16), (3000, 1)], 16, pad=(1, 1), n_value=512),
    "q8_0": Case(128, 1, 576, torch.int8, RAGGED, 32, pad=(5, 2), n_value=512),
    "f8": Case(16, 1, 576, torch.float8_e4m3fn, [(1023, 5), (40, 1)], 16, n_value=512),
    "q4_0": Case(16, 1, 576, Q4_0, [(1023, 5), (40, 1)], 16, n_value=512),
    "q5_1": Case(16, 1, 576, Q5_1, [(600, 3)], 16, n_value=512),
    "small window": Case(16, 1, 576, torch.float16, [(600, 5), (127, 2)], 16, 70, n_value=512),
    "odd size": Case(5, 1, 24, torch.float16, [(40, 3), (0, 2)], 16, pad=(1, 1), n_value=16),
    "a prompt": Case(16, 1, 576, torch.float16, [(900, 300), (77, 3)], 64, n_value=512),
    "pages of one key": Case(16, 1, 576, torch.float16, RAGGED, 1, pad=(5, 2), n_value=512),
    "rows of one part": Case(16, 1, 576, torch.float16, [(900, 600), (77, 3)], 64, n_value=512),
}


def case_of(machine: Machine, name: str) -> Case:
    return (CASES if machine.name == "emulated" else OF_A_CARD)[name]


def run(case: Case, made: Made, q: Tensor, batch: object, build: LatentBuild | None = None) -> Tensor:
    return latent.bind(spec_of(case, made.q.device), build=build)(q, made.pool, batch, case.window)  # type: ignore[arg-type]


@cases("name", emulated=CASES, card=OF_A_CARD, seeds=(0, 1))
def test_every_row_is_the_references_and_padding_comes_out_as_zeros(machine: Machine, name: str) -> None:
    check_rows(machine, latent.bind, case_of(machine, name), machine.seed)


@cases(
    "name",
    emulated=[
        "ragged",
        "more heads than columns",
        "small window",
        "q8_0",
        "odd size",
        "pages of one key",
    ],
    card=["128 heads", "16 heads", "20 heads", "q8_0", "small window"],
)
def test_a_row_has_the_same_bits_alone_and_in_any_company_and_build(machine: Machine, name: str) -> None:
    case = case_of(machine, name)
    check_company(machine, latent.bind, case)
    made, spec = make(case, machine.device), spec_of(case, machine.device)
    with machine.started():
        want = run(case, made, made.q, made.batch)
        builds = latent.builds(spec, "sm_90a") if machine.is_emulated else latent.bind(spec).builds
        for build in builds:
            for one in {build, replace(build, buffers=1)} if machine.is_emulated else {build}:
                assert torch.equal(run(case, made, made.q, made.batch, one), want), one


@cases(
    "page",
    emulated=[-1, 1 << 40, 99],
)
def test_a_wild_page_is_reported_and_other_sequences_are_right(machine: Machine, page: int) -> None:
    case = Case(3, 1, 64, torch.float16, [(40, 2), (33, 3)], 16, spare=0, n_value=48)
    check_wild_page(machine, latent.bind, 4, case, 0, 1, page)


@cases(
    "case, shifts",
    emulated=[(Case(4, 1, 64, torch.float16, [(300, 4), (200, 4)], 16, n_value=48), (0, -1, -199))],
    card=[
        (Case(16, 1, 576, torch.float16, [(2000, 4), (1500, 4)], 16, n_value=512), (0, -1, -700, -1499))
    ],
)
def test_a_captured_graph_serves_batches_of_other_lengths(
    machine: Machine, case: Case, shifts: tuple[int, ...]
) -> None:
    check_graph(machine, latent.bind, case, shifts, bucket=8)


@pytest.mark.parametrize("columns", [16, 64])
def test_rows_on_both_sides_of_a_length_with_larger_parts_share_a_tile(
    machine: Machine, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of 128 keys up to 256, and of twice as many behind: a verify of 17 rows over that length, and one far behind."""
    monkeypatch.setattr(latent, "parts_of", lambda spec: 2)
    case = Case(3, 1, 64, torch.float16, [(250, 17), (0, 1), (1020, 9)], 16, pad=(2, 1), n_value=48)
    made, spec = make(case, CPU), spec_of(case, CPU)
    n = made.plain.n_row
    want = wanted(case, made)
    with machine.started():
        build = LatentBuild(64, 48, columns, 2, spec.kv.k)
        out = run(case, made, made.q, made.batch, build)
        assert worst(out[:n], want) < case.tolerance and not out[n:].any()
        for row in (0, 5, 6, 16):
            q, batch = only(made, 0, row, 1)
            assert torch.equal(run(case, made, q, batch, build)[0], out[row])
        assert machine.faults().tolist() == NO_FAULT


def test_more_tiles_than_there_is_room_for_run_some_at_a_time_to_the_same_bits(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = CASES["ragged"]
    made, n_launch = make(case, CPU), 0
    with machine.started():
        want = run(case, made, made.q, made.batch)
        monkeypatch.setattr(latent, "at_once", lambda size, room: 2)
        launch = latent.bind(spec_of(case, CPU), build=LatentBuild(128, 96, 16, 2, case.kv.k))
        parts = launch.kernels[launch.builds[0]][0]
        plain = type(parts).launch

        def counted(self: object, *args: object, **more: object) -> None:
            nonlocal n_launch
            n_launch += self is parts
            plain(self, *args, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(type(parts), "launch", counted)
        assert torch.equal(launch(made.q, made.pool, made.batch), want)
    assert n_launch == 3  # of tiles: 1, 1, 3 and 1


def test_many_rows_are_one_part_each_unless_the_engine_is_exact(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(2, 1, 64, torch.float16, [(150, 130), (20, 3)], 32, pad=(3, 1), n_value=48)
    made, spec = make(case, CPU), spec_of(case, CPU)
    n = made.plain.n_row
    want = wanted(case, made)
    monkeypatch.setattr(latent, "SPLIT", 2 * 128)
    with machine.started():
        launch = latent.bind(spec)
        out = launch(made.q, made.pool, made.batch)
        assert worst(out[:n], want) < case.tolerance and not out[n:].any()
        launch.exact = True
        split = launch(made.q, made.pool, made.batch)
        q, batch = only(made, 0, 120, 4)
        assert torch.equal(launch(q, made.pool, batch), split[120:124])
    assert worst(split[:n], want) < case.tolerance and not torch.equal(split, out)


def test_a_graphs_batch_of_padding_alone_and_no_rows_at_all(machine: Machine) -> None:
    case = CASES["first token"]
    made = make(case, CPU)
    with machine.started():
        idle = replace(
            made.batch,
            row_seq=torch.full_like(made.batch.row_seq, -1),
            seq_start=torch.full_like(made.batch.seq_start, 6),
            bucket=6,
        )
        assert not run(case, made, made.q, idle).any()
        filled = run(case, made, made.q, replace(made.batch, bucket=6))
        assert torch.equal(filled, run(case, made, made.q, made.batch))
        none = replace(
            made.plain,
            seqs=[],
            **{name: getattr(made.plain, name)[:0] for name in ("positions", "lo", "hi", "row_seq")},
        )
        assert run(case, made, made.q[:0], none).shape == (0, 3, 48)
        assert machine.faults().tolist() == NO_FAULT


@ON_CARD
def test_a_hundred_rounds_without_waiting_give_what_waiting_rounds_give(machine: Machine) -> None:
    case, results = OF_A_CARD["128 heads"], []
    made = make(case, machine.device)
    for waits in (True, False):
        run = latent.bind(spec_of(case, machine.device))
        out = torch.zeros(len(made.q), 128, 512, device=machine.device)
        for _ in range(100):
            out += run(made.q, made.pool, made.batch)
            if waits:
                machine.waited()
        results.append(out)
    assert torch.equal(*results)


@ON_CARD
@pytest.mark.parametrize("n_head", [128, 16])
@pytest.mark.parametrize("kv", ["f16", "bf16", "q8_0", "q4_0"])
def test_both_ops_pass_their_checks_and_are_what_models_run_with(
    machine: Machine, n_head: int, kv: str
) -> None:
    form = KvFormat.named(kv)
    spec = AttendSpec(machine.device, n_head, 1, 576, 192**-0.5, form, n_value=512)
    assert attend_check(latent.bind(spec), attend_ref.bind(spec), spec) is None
    roped = RopeLatentSpec(machine.device, n_head, 128, 512, 64, False, 1e-6, form)
    own, other = rope_latent_cuda.bind(roped), rope_latent_ref.bind(roped)
    assert rope_latent_check(own, other, roped) is None
    if kv == "f16":
        assert attend.chosen(spec).name == rope_latent.chosen(roped).name == "cuda"


@ON_CARD
@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("kv", TYPES)
def test_keys_of_every_type_are_the_references(machine: Machine, kv: str, neox: bool) -> None:
    for sizes in ((5, 8, 24, 8), (3, 128, 40, 24), (20, 192, 512, 64)):
        spec = RopeLatentSpec(machine.device, *sizes, neox, 1e-6, KvFormat.named(kv))
        own, other = rope_latent_cuda.bind(spec), rope_latent_ref.bind(spec)
        assert rope_latent_check(own, other, spec) is None
    assert not machine.faults().any()


V3 = AttendSpec(GPU, 128, 1, 576, 192**-0.5, n_value=512)


@pytest.mark.slow
@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("kv", ["f16", "bf16", "q8_0", "f8_e4m3", "q4_0", "q5_1"])
@pytest.mark.parametrize("arch", jit.ARCHS)
def test_every_build_compiles_without_spills_and_fits_a_multiprocessor(arch: str, kv: str) -> None:
    choices = latent.builds(replace(V3, kv=KvFormat.named(kv)), arch)
    assert choices
    scattered = latent.builds(replace(V3, kv=KvFormat.named(kv), scattered=True), arch)
    for build in (*choices, *scattered):
        made = compiled("attend_latent", arch, build.defines())
        assert set(made) == {"attend_latent_parts", "attend_latent_merge"}
        assert build.shared_bytes <= room_of(arch) - 1024


@pytest.mark.slow
@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("kv", TYPES)
@pytest.mark.parametrize("arch", jit.ARCHS)
def test_keys_compile_without_spills(arch: str, kv: str) -> None:
    spec = RopeLatentSpec(GPU, 128, 128, 512, 64, False, 1e-6, KvFormat.named(kv))
    compiled("rope_latent", arch, rope_latent_cuda.FILE.defines(spec))


def test_builds_have_as_many_columns_and_buffers_as_fit() -> None:
    def of(arch: str, spec: AttendSpec = V3) -> list[tuple[int, int]]:
        return [(b.columns, b.buffers) for b in latent.builds(spec, arch)]

    assert of("sm_90a") == [(16, 2), (32, 2), (64, 2)]
    assert of("sm_80") == [(16, 1), (32, 1), (64, 1)]
    assert of("sm_120f") == of("sm_89") == [(16, 1)]
    assert of("sm_90a", replace(V3, kv=KvFormat.both(Q8_0))) == [(16, 1), (32, 1), (64, 1)]
    assert of("sm_89", replace(V3, head_dim=768)) == []
    choices = latent.builds(V3, "sm_90a")
    widths = [latent.build_for(choices, n).columns for n in (1, 16, 17, 33, 128)]
    assert widths == [16, 16, 32, 64, 64]
    assert [latent.parts_of(replace(V3, n_head=n)) for n in (16, 64, 65, 128, 1024)] == [64, 64, 32, 32, 16]  # fmt: skip


def test_the_planned_workspace_holds_every_launch_of_few_rows() -> None:
    """Up to what runs some tiles at a time: 256 MiB."""
    spec = replace(V3, n_head=16)
    for n_seq, n_key, n_row in ((1, 4096, 1), (8, 9000, 17), (3, 200, 5)):
        planned = latent.most_floats(spec, "sm_90a", n_seq, n_key, n_row)
        assert attend_cuda.bytes_on("sm_90a", 132, spec, n_seq, n_key, n_row) == 4 * planned
        build = latent.build_for(latent.builds(spec, "sm_90a"), n_row * 16)
        size = min(latent.parts_of(spec), -(-n_key // latent.LEAST)) * build.n_float
        n_tile = n_seq * -(-n_row * 16 // build.columns)
        assert planned <= latent.MOST_FLOATS
        assert planned >= min(n_tile * size, latent.MOST_FLOATS - size)
    assert latent.most_floats(replace(V3, head_dim=768), "sm_89", 8, 4096, 17) == 0
