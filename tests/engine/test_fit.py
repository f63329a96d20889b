"""The report on fitting matches a load's plan: the same sums, the largest contexts, and valid flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pyspec.cli import main
from pyspec.config import EngineSettings
from pyspec.cuda.ops.linear import unpacked
from pyspec.engine.plan import describe, longest, planned_bytes
from pyspec.engine.plan.fit import fit
from pyspec.engine.plan.memory_plan import AssumedGpu
from pyspec.errors import ModelError
from pyspec.gguf.write import GGUFWriter
from pyspec.slots import arena
from pyspec.synth import write

GIB, MIB = 1 << 30, 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("qwen35", tmp_path_factory.mktemp("fit") / "m.gguf", tiny=True, quant="q8_0")


def call(*args: str) -> Result:
    return CliRunner().invoke(main, ["fit", *map(str, args)])


def test_the_plan_is_that_of_a_load(model: Path):
    settings = EngineSettings(np=3, ctx=512, device="cpu")
    report = fit(model, settings)
    assert report.asked == planned_bytes.plan_memory(describe.describe(model, settings))
    one, two = (
        planned_bytes.plan_memory(describe.describe(model, EngineSettings(np=n, ctx=512)))
        for n in (1, 2)
    )
    assert report.kv_per_slot == two.kv - one.kv > 0
    assert report.draft_per_slot == two.draft_kv - one.draft_kv > 0
    assert report.state_per_slot > report.checkpoint > 0


@pytest.mark.parametrize(
    ("arch", "given", "counts"),
    [
        ("sm_80", {"weights": "packed"}, True),
        ("sm_90a", {"weights": "packed"}, False),  # prompts need no memory there
        ("sm_80", {"weights": "packed", "exact": True}, False),
        ("sm_80", {}, False),  # copies have room
    ],
)
def test_unpacked_rows_of_prompts_are_planned(
    model: Path, arch: str, given: dict[str, object], counts: bool, monkeypatch: pytest.MonkeyPatch
):
    settings = EngineSettings(np=3, ctx=512, device="auto", **given)
    d = describe.describe(model, settings, AssumedGpu(100 * GIB, arch))
    first = planned_bytes.plan_memory(d)
    monkeypatch.setattr(unpacked, "SCRATCH_BYTES", unpacked.SCRATCH_BYTES + 5 * MIB)
    assert planned_bytes.plan_memory(d).total - first.total == (5 * MIB if counts else 0)


def test_no_copies_where_prompts_need_none(model: Path, monkeypatch: pytest.MonkeyPatch):
    d = describe.describe(model, EngineSettings(np=3, ctx=512, device="auto"), AssumedGpu(100 * GIB))
    assert planned_bytes.plan_memory(d).wide > 0
    monkeypatch.setattr(planned_bytes, "NO_COPIES", ("sm_90a",))
    assert planned_bytes.plan_memory(d).wide == 0


def test_contexts_are_those_of_a_load_without_one(model: Path):
    free = int(
        678 * MIB / 0.96
    )  # above the memory of a GPU process and its products, but so little that slots crowd each other
    report = fit(model, EngineSettings(np=3), free)
    found = {one.np: one.n_ctx for one in report.fits}
    assert sorted(found) == [1, 2, 3, 4, 8, 16, 32] and list(found.values()) == sorted(
        found.values(), reverse=True
    )
    assert found[1] == 1024  # as trained
    for one in report.fits:
        load = longest.widened(describe.describe(model, EngineSettings(np=one.np), AssumedGpu(free)))
        fits = planned_bytes.plan_memory(load).total <= report.usable
        assert one.n_ctx == (load.n_ctx if fits else 0)
    best = report.best()
    assert best is not None and best.np == max(
        one.np for one in report.fits if one.n_ctx == 1024 and one.np <= 8
    )


@pytest.mark.parametrize("flags", [(), ("-np", "2"), ("-np", "2", "-c", "54016"), ("-np", "32")])
def test_fit_says_one_number(flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A drafter's four-bit copy of the head is made where the memory is short for the slots, too."""
    monkeypatch.setattr(GGUFWriter, "write", heads_only)
    target = write("qwen3.6-35b-a3b", tmp_path / "t.gguf", quant="q4_k")
    about = json.loads(call(str(target), "--vram", "24G", "--ram", "64G", *flags, "--json").stdout)
    row = next(row for row in about["contexts"] if row["np"] == about["np"])
    if "-c" not in flags and about["fits"]:
        assert (row["n_ctx"], row["total"]) == (about["n_ctx"], about["plan"]["total"])
    if about["fits"]:
        assert about["flags"] == [str(target), "-np", str(about["np"]), "-c", str(about["n_ctx"])]
    else:
        assert about["note"].startswith("32 slots do not fit; 8 hold")


def test_of_a_local_file_no_other_quantisation_is_spoken_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(GGUFWriter, "write", heads_only)
    target = write("qwen3.6-35b-a3b", tmp_path / "t.gguf", quant="q4_k")
    done = call(str(target), "--vram", "16G", "-fit", "off")
    assert done.exit_code == 5 and "quantisation" not in done.stderr
    assert "nothing fits. By its size this model fits: gpt-oss-20b:Q4_K_M" in done.stderr


def test_nothing_fits_is_an_exit_code_of_its_own(model: Path):
    done = call(str(model), "--vram", "64M")
    assert done.exit_code == 5 and "nothing fits" in done.stderr and "does not fit" in done.stdout
    assert json.loads(call(str(model), "--vram", "64M", "--json").stdout)["flags"] == []


def test_flags_are_those_to_load_with(model: Path):
    about = json.loads(call(str(model), "--vram", "24G", "-np", "16", "-ctk", "bf16", "--json").stdout)
    assert about["flags"] == [str(model), "-np", "16", "-c", "1024", "-ctk", "bf16"]
    assert about["free"] == 24 * GIB
    assert about["fits"]
    assert about["plan"]["total"] == sum(n for name, n in about["plan"].items() if name != "total")
    text = call("demo")
    assert text.exit_code == 0 and "pyspec server demo -np 4 -c 2048" in text.stdout


@pytest.mark.parametrize("vram", ["24X", "-1G", "0", "1K", "inf", "1e9"])
def test_an_amount_of_memory_that_is_none_is_refused(vram: str):
    done = call("demo", "--vram", vram)
    assert done.exit_code == 2 and "such as 24G" in done.stderr


def heads_only(self: GGUFWriter, fill: object) -> None:
    """Write a file of full length, with a hole in place of its weights."""
    header = self._header()
    with self.path.open("wb") as file:
        file.write(header)
        file.truncate(self._padded(len(header)) + self._end)


def test_two_gpus_hold_what_one_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """DeepSeek-V4-Flash in MXFP4: heads, experts and the head's tokens are divided, each rank has the rest whole."""
    monkeypatch.setattr(GGUFWriter, "write", heads_only)
    target = write("deepseek-v4-flash", tmp_path / "t.gguf", quant="mxfp4")
    one, two, eight = (
        planned_bytes.plan_memory(
            describe.describe(
                target, EngineSettings(np=8, tp=n, weights="packed"), AssumedGpu(139 * GIB)
            )
        )
        for n in (1, 2, 8)
    )
    assert one.total > 139 * GIB and two.total < 80 * GIB and two.kv == eight.kv == one.kv
    assert 7 * (two.weights - eight.weights) == pytest.approx(
        3 * (one.weights - eight.weights), rel=0.01
    )
    with pytest.raises(
        ModelError, match="8 groups of heads do not divide by 3; --tp 1 or 2 or 4 or 8 would do"
    ):
        describe.describe(target, EngineSettings(tp=3), AssumedGpu(139 * GIB))


@pytest.mark.parametrize(
    ("drafter", "gib"), [(False, 79.12), pytest.param(True, 84.07, marks=pytest.mark.slow)]
)
def test_a_plan_on_paper_is_what_an_h200_had_in_use(
    drafter: bool, gib: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Qwen3.6-27B in Q8_0 with its MTP block, or DFlash, at -np 8 -c 2560: docs/log.md has the measurements on the GPU."""
    monkeypatch.setattr(GGUFWriter, "write", heads_only)
    target = write("qwen3.6-27b", tmp_path / "t.gguf")
    draft = write("qwen3.6-27b", tmp_path / "d.gguf", drafter=True) if drafter else None
    d = describe.describe(
        target, EngineSettings(np=8, ctx=2560, draft_path=draft), AssumedGpu(139 * GIB)
    )
    starts, total = (
        planned_bytes.start_bytes(d),
        planned_bytes.plan_memory(d).total,
    )  # added later: starts,
    monkeypatch.setattr(planned_bytes, "PROMPTS", ())
    prompts = total - planned_bytes.plan_memory(d).total  # graphs of prompts,
    with_more = planned_bytes.plan_memory(d).total
    monkeypatch.setattr(arena, "BUCKETS", tuple(n for n in arena.BUCKETS if n not in (80, 112)))
    graphs = with_more - planned_bytes.plan_memory(d).total  # and graphs of 80 and 112 rows
    assert 0.28 < starts / GIB < 0.31 and 0.15 < prompts / GIB < 0.5 and 0 <= graphs / GIB < 0.25
    assert (total - starts - prompts - graphs) / GIB == pytest.approx(gib, rel=0.01)


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize(
    ("np", "ctx", "kind", "n_draft", "mib"),
    [
        (64, 1024, "mtp", 0, 57736),
        (10, 3001, "mtp", 0, 35730),
        (64, 1024, "dflash", 3, 60528),
        (64, 1024, "dflash", 0, 68362),
        (64, 1024, "none", 0, 53902),
    ],
)
def test_a_plan_of_many_slots_is_what_an_h100_had_in_use(
    np: int, ctx: int, kind: str, n_draft: int, mib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Qwen3.6-27B in Q8_0, measured by `tools/memory_use.py`: weights, slots, and memory of graphs of all batch sizes."""
    monkeypatch.setattr(GGUFWriter, "write", heads_only)
    target = write("qwen3.6-27b", tmp_path / "t.gguf")
    draft = write("qwen3.6-27b", tmp_path / "d.gguf", drafter=True) if kind == "dflash" else None
    settings = EngineSettings(np=np, ctx=ctx, spec_type=kind, draft_path=draft, n_draft_max=n_draft)
    plan = planned_bytes.plan_memory(describe.describe(target, settings, AssumedGpu(int(78.6 * GIB))))
    assert plan.total / MIB == pytest.approx(mib, rel=0.01)
