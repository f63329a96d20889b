"""Without a given context, a request holds as much as fits: planned here for assumed GPUs and a CPU."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from sampling import slow
from test_fit import heads_only

from pyspec import registry
from pyspec.cli import main
from pyspec.config import EngineSettings
from pyspec.engine.plan import describe, longest, memory_plan, planned_bytes
from pyspec.engine.plan.fit import fit
from pyspec.engine.plan.longest import STEP, widened
from pyspec.engine.plan.memory_plan import RESERVE, AssumedGpu
from pyspec.errors import DoesNotFit
from pyspec.gguf import open_gguf
from pyspec.gguf.write import GGUFWriter
from pyspec.synth import write

GIB, TRAINED = 1 << 30, 262144


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3.6-27B in Q8_0, without its weights: 29 GB with room for 64 KiB a token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GGUFWriter, "write", heads_only)
        return write("qwen3.6-27b", tmp_path_factory.mktemp("longest") / "t.gguf")


opened = cache(open_gguf)


def described(model: Path, free: int = 80 * GIB, **values: object) -> describe.Description:
    """Of a file that is read once, and without the part of its tokenizer that encodes."""
    settings, gpu = EngineSettings(**values), AssumedGpu(free)  # type: ignore[arg-type]
    return describe.describe(model, settings, gpu, is_isolated=True, file=opened(model))


@pytest.mark.parametrize(("np", "spec_type"), [(1, "mtp"), (3, "none"), (10, "none"), (33, "mtp")])
def test_every_slot_has_as_much_as_fits(
    model: Path, caplog: pytest.LogCaptureFixture, np: int, spec_type: str
) -> None:
    caplog.set_level(logging.INFO, "pyspec")
    d = described(model, np=np, spec_type=spec_type)
    wide = widened(d)
    usable = 80 * GIB * (1 - RESERVE)
    assert planned_bytes.plan_memory(wide).total <= usable
    if np == 1:
        assert wide.n_ctx == TRAINED and "as the model was trained, for the 1 slot" in caplog.text
    else:
        assert 8192 < wide.n_ctx < TRAINED and wide.n_ctx % STEP == 0
        more = planned_bytes.plan_memory(describe.resized(d, np, wide.n_ctx + STEP))
        first = planned_bytes.plan_memory(d)
        assert more.total > usable or more.draft_head < first.draft_head, "there is room for more"
        assert (
            f"-c {wide.n_ctx}: tokens a request, as the free memory allows, for each of the {np} slots"
            in caplog.text
        )
    assert wide.n_page >= np * wide.n_ctx // 32, "all of them may hold so much at once"


def test_a_plan_goes_through_the_names_of_the_tensors_once(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pyspec fit` makes hundreds of plans."""
    d, calls, unread = described(model, np=1), [], planned_bytes._unread
    monkeypatch.setattr(planned_bytes, "_unread", lambda d: calls.append(d) or unread(d))
    planned_bytes.plan_memory(d)
    assert len(calls) == 1


def test_installed_packages_are_searched_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are again for another `sys.path`: tests/draft/test_own_drafter.py."""
    searches: list[str] = []
    monkeypatch.setattr(metadata, "entry_points", lambda group: searches.append(group) or ())
    monkeypatch.syspath_prepend(tmp_path)
    assert [registry.drafters() for _ in range(3)] == [dict(registry.DRAFTERS)] * 3
    assert searches == [registry.GROUP]


def test_what_is_given_stays(model: Path) -> None:
    for n in (1, 777, 200_000):
        assert widened(described(model, np=3, ctx=n)).n_ctx == n


def test_copies_that_make_it_fast_go_before_length(model: Path) -> None:
    d = described(model, 139 * GIB, np=8)
    wide = widened(d)
    assert planned_bytes.plan_memory(d).wide == planned_bytes.plan_memory(wide).wide > 0
    assert planned_bytes.plan_memory(wide).total <= 0.85 * 139 * GIB
    assert planned_bytes.plan_memory(describe.resized(d, 8, wide.n_ctx + STEP)).wide == 0


def test_little_memory_gives_less_and_hardly_any_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = widened(described(model, 36 * GIB, np=8))
    assert 1024 <= small.n_ctx < 8192 and planned_bytes.plan_memory(small).total <= 36 * GIB * (
        1 - RESERVE
    )
    none = described(model, 36 * GIB, np=64)
    tried = widened(none)
    assert (tried.n_ctx, tried.away) == (none.n_ctx, []), "fewer slots are faster"
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 36 * GIB)
    with pytest.raises(DoesNotFit, match="this would fit: -np"):
        memory_plan.check_fit(
            planned_bytes.plan_memory(none),
            torch.device("cuda"),
            n_slot=64,
            n_ctx=none.n_ctx,
            packed=True,
        )


def test_a_pool_is_no_larger_than_asked_for(model: Path) -> None:
    d = widened(described(model, np=3, kv_pool=100_001))
    assert d.n_page == -(-100_001 // 32) and 8192 < d.n_ctx <= 100_032 // 3
    assert widened(described(model, np=33, kv_pool=100_001)).n_ctx == 8192, (
        "as many run at once as before"
    )


def test_a_cpu_leaves_half_of_its_memory_to_others(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 100 * GIB
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: free)
    for tp in (1, 2):
        d = replace(
            described(model, np=5, device="cpu", tp=tp), assumed=None, device=torch.device("cpu")
        )
        wide = widened(d)
        plan = longest.here(wide, planned_bytes.plan_memory(wide))
        slots = plan.kv + plan.state + plan.draft_kv
        rest = free * (1 - RESERVE) - plan.total + slots
        assert 8192 < wide.n_ctx < TRAINED and 0.4 * rest < slots <= 0.52 * rest, (
            wide.n_ctx,
            slots / rest,
        )


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize(
    ("flags", "has", "n"),
    [
        slow(["--tp", "2", "--vram", "24G"], ["--tp", "2"], 4),
        (["-np", "7", "-ub", "333", "--no-cache-prompt", "--vram", "48G"], ["--no-cache-prompt", "-ub", "333"], 7),
        (["-np", "5", "-c", "3333", "--vram", "40G"], ["-np", "5", "-c", "3333"], 5),
        # More of them hold a few hundred each; the embedding goes to host memory
        slow(["-np", "33", "--page-size", "64", "--vram", "40G", "--ram", "64G"], ["--page-size", "64"], 16),
    ],
)  # fmt: skip
def test_what_fit_advises_is_what_was_planned(
    model: Path, flags: list[str], has: list[str], n: int
) -> None:
    done = CliRunner().invoke(main, ["fit", str(model), *flags, "--json"])
    about = json.loads(done.stdout)
    words = about["flags"]
    assert " ".join(has) in " ".join(words), words
    np, n_ctx = int(words[words.index("-np") + 1]), int(words[words.index("-c") + 1])
    assert np == n
    vram = int(flags[flags.index("--vram") + 1][:-1]) * GIB
    settings = replace(
        EngineSettings(tp=2 if "--tp" in flags else 1, prefix_cache="--no-cache-prompt" not in flags),
        np=np,
        ctx=n_ctx,
    )
    if "-ub" not in flags and "--page-size" not in flags:
        assert fit(model, settings, vram).asked.total <= 0.96 * vram, "the advice does not fit"
    assert bool(about["note"]) == ("33" in flags)
