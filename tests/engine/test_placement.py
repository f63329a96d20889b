"""Where feed-forwards lie: llama.cpp's flags, the fit to card and host, and refusals, as plans of models without their weights."""

from __future__ import annotations

import gc
import json
import logging
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from sampling import all_pairs
from test_fit import heads_only

from pyspec import synth
from pyspec.cli import main
from pyspec.config import EngineSettings
from pyspec.cuda import pinned
from pyspec.cuda.ops.moe.host import staging_bytes
from pyspec.cuda.ops.moe.lane import JOB_ROWS
from pyspec.draft import draft_model, mtp
from pyspec.draft.draft_model import ModelPlan
from pyspec.draft.drafter import DraftOptions
from pyspec.engine.load import load as loading
from pyspec.engine.plan import fitted, memory_plan
from pyspec.engine.plan.asks import asks_of
from pyspec.engine.plan.describe import Description, describe, resized
from pyspec.engine.plan.fit import holds
from pyspec.engine.plan.fitted import check_host, expected, fit_lines, share_on_card, without
from pyspec.engine.plan.longest import widened
from pyspec.engine.plan.memory_plan import (
    CUDA_BYTES,
    PIECE_BYTES,
    AssumedGpu,
    DeviceRoom,
    cap_memory,
    check_fit,
)
from pyspec.engine.plan.need import need_of
from pyspec.engine.plan.placement import (
    N_POOL,
    FeedForward,
    PlaceFlags,
    Rates,
    blocks_of,
    bounds,
    even,
    wanted,
    within,
)
from pyspec.engine.plan.planned_bytes import host_bytes, job_bytes, load_bytes, plan_host, plan_memory
from pyspec.errors import ConfigError, DoesNotFit, PyspecError
from pyspec.gguf import GGMLType, open_gguf
from pyspec.gguf.write import GGUFWriter
from pyspec.models.host import HostBytes
from pyspec.models.placement import ON_CARD, Placement
from pyspec.models.wants import EMBEDDING, TOKEN_INPUTS
from pyspec.models.weight_bytes import repacked_bytes
from pyspec.synth import write
from pyspec.synth.dims import Dims
from pyspec.synth.layout import Spec

GIB, MIB = 1 << 30, 1 << 20

# -- flags, as functions of names ----------------------------------------------------------------------------------

BLOCKS = tuple(FeedForward(f"blk.{i}", 0 if i < 2 else 8, 10, 80, 30 if i < 2 else 0) for i in range(24))
"""Of GLM's kind: two plain feed-forwards, then experts."""
PARTS = (
    "attn_q.weight", "ffn_norm.weight", "ffn_gate_inp.weight", "exp_probs_b.bias", "ffn_gate_exps.weight", "ffn_up_exps.weight",
    "ffn_down_exps.weight", "ffn_up_shexp.weight",
)  # fmt: skip
PLAIN_PARTS = "attn_q.weight", "ffn_norm.weight", "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"
NAMES = [
    "token_embd.weight",
    *(f"blk.{i}.{part}" for i in range(24) for part in (PLAIN_PARTS if i < 2 else PARTS)),
    "output.weight",
]
ALL = tuple(range(2, 24))


def asked(**flags: object) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """(blocks whose experts, and whose other feed-forwards, go to the host, notes)."""
    found = wanted(PlaceFlags(**flags), BLOCKS, NAMES, "CUDA0")  # type: ignore[arg-type]
    numbers = (tuple(int(prefix[4:]) for prefix in part) for part in (found.experts, found.dense))
    return (*numbers, " / ".join(found.notes))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("flags", "experts", "dense"),
    [
        ({}, (), ()),
        ({"n_moe": 1}, (), ()),  # the first block has none
        ({"n_moe": 5}, (2, 3, 4), ()),
        ({"n_moe": 999}, ALL, ()),
        ({"all_moe": True}, ALL, ()),
        ({"n_ffn": 1}, (), (0,)),
        ({"n_ffn": 999}, (), (0, 1)),
        ({"n_gpu": 999}, (), ()),
        ({"n_gpu": 24}, (), ()),
        ({"n_gpu": 23}, (), (0,)),
        ({"n_gpu": 20}, (2, 3), (0, 1)),
        ({"n_gpu": 0}, ALL, (0, 1)),
        ({"n_gpu": 20, "n_moe": 6}, (2, 3, 4, 5), (0, 1)),
        ({"n_moe": 3, "n_ffn": 1}, (2,), (0,)),
        ({"rules": (r"\.ffn_(up|down|gate)_exps\.=CPU",)}, ALL, ()),
        ({"rules": ("exps=CPU",)}, ALL, ()),
        ({"rules": (r"blk\.(1[0-9])\.ffn_.*_exps.=CPU",)}, tuple(range(10, 20)), ()),
        ({"rules": (r"blk\.([0-4])\.ffn_(gate|up|down)\.weight=CPU",)}, (), (0, 1)),
        ({"rules": (r"blk\.(2|3)\.ffn_.*_exps=cpu", r"blk\.23\..*exps=CPU")}, (2, 3, 23), ()),
        # the first rule that matches decides,
        ({"rules": (r"blk\.7\.=CUDA0", "exps=CPU")}, tuple(i for i in ALL if i != 7), ()),
        ({"rules": ("exps=CPU", r"blk\.7\.=CUDA0")}, ALL, ()),
        # and goes before the other flags
        ({"rules": (r"blk\.7\.=CUDA0",), "all_moe": True}, tuple(i for i in ALL if i != 7), ()),
        ({"rules": (r"blk\.([2-4])\.ffn_.*exps=CUDA0",), "n_moe": 6}, (5,), ()),
        ({"rules": (r"blk\.20\..*exps=CPU",), "n_moe": 4}, (2, 3, 20), ()),
        ({"rules": (r"^blk\.(?=5)\d\..*exps=CPU",)}, (5,), ()),
        # a part of a block takes the rest along; what the rules leave open follows the flags
        ({"rules": (r"blk\.9\.ffn_up_exps=CPU",)}, (9,), ()),
        ({"rules": (r"blk\.9\.ffn_up_exps=CUDA0", r"blk\.9\..*exps=CPU")}, (9,), ()),
        ({"rules": (r"blk\.2\.ffn_up_exps=CUDA0",), "n_moe": 3}, (2,), ()),
        ({"rules": ("nothing=CPU",)}, (), ()),
        ({"rules": (r"ffn_.*=CPU",)}, ALL, (0, 1)),
    ],
)  # fmt: skip
def test_flags_choose_the_blocks_that_llama_cpp_chooses(
    flags: dict[str, object], experts: tuple[int, ...], dense: tuple[int, ...]
) -> None:
    assert asked(**flags)[:2] == (experts, dense)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"n_gpu": 20}, "-ngl 20: feed-forwards of the last 20 of 24 blocks stay on the GPU, and attention of all"),
        ({"n_gpu": 20, "suffix": "d"}, "-ngld 20: "),
        ({"rules": ("nothing=CPU",)}, "-ot nothing=CPU matches no tensor"),
        ({"rules": ("exps=CPU", "up_exps=CUDA0")}, "-ot up_exps=CUDA0 matches no tensor"),
        ({"rules": (r"blk\.9\.ffn_up_exps=CPU",)}, "matrices lie together, so all of blk.9 are in host memory"),
        ({"rules": ("up_exps=CPU",)}, "so all of blk.2, blk.3, blk.4 ... are"),
        ({"rules": (r"[35]\.ffn_up_exps=CUDA0",), "n_moe": 4}, "so all of blk.3 are in host memory"),
        ({"n_moe": 2}, "-ncmoe 2: none of the first 2 blocks has experts; -ncffn N places other"),
        ({"rules": ("ffn_.*=CPU",)}, "blk.0.ffn_norm.weight and its like stay on the GPU"),
    ],
)  # fmt: skip
def test_what_a_user_would_not_expect_is_said_once(flags: dict[str, object], said: str) -> None:
    notes = asked(**flags)[2]
    assert notes.count(said) == 1
    assert asked(n_moe=5)[2] == asked(n_gpu=99)[2] == asked(rules=(r"exps\.=CPU",))[2] == ""


def test_flags_of_what_a_model_has_not_say_so() -> None:
    for flags, blocks, note in (
        (PlaceFlags(n_ffn=3), BLOCKS[2:], "-ncffn 3: no block has a feed-forward without experts; -ncmoe N places experts"),
        (PlaceFlags(n_moe=3), BLOCKS[:2], "-ncmoe 3: no block has experts; -ncffn N places other feed-forwards"),
        (PlaceFlags(all_moe=True, suffix="d"), (), "-cmoed: no block of the drafter has experts"),
    ):  # fmt: skip
        found = wanted(flags, blocks, NAMES, "CUDA0")
        assert not found and found.notes == (note,)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (r"attn=CPU", "-ot attn=CPU matches blk.0.attn_q.weight, which every token reads"),
        (r"blk\.3\.=CPU", "blk.3.attn_q.weight"),
        (r"output\.weight=CPU", "output.weight, which every token reads"),
        (r"exps=CUDA1", r"CUDA1 is not a place for weights; the model runs on CUDA0"),
        (r"exps=Vulkan0", r"VULKAN0 is not a place"),
        (r"(exps=CPU", r"not a regular expression"),
    ],
)
def test_a_rule_for_anything_else_is_refused_by_name(rule: str, said: str) -> None:
    with pytest.raises(ConfigError) as e:
        asked(rules=(rule,))
    assert said in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("rules", "tables"),
    [
        ((r"token_embd=CPU",), {TOKEN_INPUTS: True, EMBEDDING: True}),
        ((r"^token_embd=CPU",), {EMBEDDING: True}),
        ((r"per_layer_token_embd\.weight=CUDA0",), {TOKEN_INPUTS: False}),
        ((r"per_layer=CUDA0", r"embd=CPU"), {TOKEN_INPUTS: False, EMBEDDING: True}),
        ((r"exps=CPU",), {}),
    ],
)
def test_rules_place_tables_too(rules: tuple[str, ...], tables: dict[str, bool]) -> None:
    found = wanted(PlaceFlags(rules=rules), (), [TOKEN_INPUTS, EMBEDDING, "output.weight"], "CUDA0")
    assert found.tables == tables and bool(found) == any(tables.values())
    with pytest.raises(ConfigError, match="which every token reads"):  # a drafter's stay
        wanted(PlaceFlags(rules=("embd=CPU",), suffix="d"), (), [EMBEDDING], "CUDA0")


# -- by sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 1, 79, 80, 161, 1759, 1760, 1 << 40])
def test_the_first_blocks_go_to_the_host_as_far_as_it_holds_them(room: int) -> None:
    blocks = BLOCKS[2:]
    found = within(blocks, room)
    assert found == blocks[: len(found)]
    assert len(found) == min(room // 80, 22)


@pytest.mark.parametrize("seed", range(12))
def test_slots_are_even_and_use_what_is_left(seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = [
        FeedForward(f"blk.{i}", 16, int(n) * MIB, 16 * int(n) * MIB)
        for i, n in enumerate(rng.integers(2, 9, 11))
    ]
    room = int(rng.integers(0, 2 * sum(b.experts for b in blocks)))
    slots = even(blocks, room)
    left = room - sum(
        n * b.expert + (n > 0) * N_POOL * PIECE_BYTES for b, n in zip(blocks, slots, strict=True)
    )
    assert max(slots) - min(slots) <= 1 and max(slots) <= 16
    if max(slots):
        assert left >= 0
        assert min(slots) == 16 or left < sum(b.expert for b in blocks)
    else:
        assert room < sum(b.expert for b in blocks) + 11 * N_POOL * PIECE_BYTES


def test_there_are_no_slots_where_there_are_no_blocks() -> None:
    assert even((), GIB) == ()
    assert even(BLOCKS[2:], 0) == (0,) * 22


@pytest.mark.parametrize(
    ("trunk", "active", "share", "card", "host", "rates"),
    [  # 35B on a 3060 with DDR4, and on a 5060 Ti with DDR5; gpt-oss-120b on a 3090
        (1.6e9, 0.57e9, 0.42, 0.85 * 360e9, 42e9, (77, 127, 145)),
        (1.6e9, 0.57e9, 0.62, 0.85 * 448e9, 68e9, (136, 183, 183)),
        (1.65e9, 1.9e9, 0.31, 0.85 * 936e9, 44e9, (31, 61, 146)),
    ],
)
def test_forecasts_follow_from_the_rates_of_memory(
    trunk: float, active: float, share: float, card: float, host: float, rates: tuple[int, ...]
) -> None:
    found = bounds(int(trunk), int(active), share, Rates(card, host, ""))
    assert list(found) == ["uniform", "modest", "hot"]
    assert tuple(found.values()) == pytest.approx(rates, rel=0.02)
    with_dense = bounds(int(trunk), int(active), share, Rates(card, host, ""), dense=10**9)
    assert all(1 / with_dense[x] - 1 / found[x] == pytest.approx(1e9 / host) for x in found)


# -- models on machines ----------------------------------------------------------------------------------------------

MODELS = {"35b": ("qwen3.6-35b-a3b", "q4_k"), "120b": ("gpt-oss-120b", "mxfp4"), "122b": ("qwen3.5-122b-a10b", "q4_k")}  # fmt: skip


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of published sizes, with holes in place of their weights."""
    folder = tmp_path_factory.mktemp("heads")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GGUFWriter, "write", heads_only)
        return {
            key: write(name, folder / f"{key}.gguf", quant=quant)
            for key, (name, quant) in MODELS.items()
        }


opened = cache(open_gguf)


def described(path: Path, card: int, ram: int, **values: object) -> Description:
    settings = EngineSettings(**{"np": 1, **values})  # type: ignore[arg-type]
    gpu = AssumedGpu(card * GIB, ram=ram * GIB)
    return describe(path, settings, gpu, is_isolated=True, file=opened(path))


@pytest.mark.parametrize(
    ("model", "vram", "ram", "n_host", "share"),
    [  # blocks in host memory, and the share of the experts with a place on the card, as reckoned by hand
        ("35b", 8, 16, None, 0.0),
        ("35b", 8, 32, 40, 0.21),
        ("35b", 12, 32, 40, 0.42),
        ("35b", 16, 32, 40, 0.62),
        ("35b", 24, 32, 0, 1.0),
        ("35b", 12, 16, 27, 0.43),
        ("120b", 8, 64, 36, 0.07),
        ("120b", 12, 64, 36, 0.12),
        ("120b", 16, 128, 36, 0.19),
        ("120b", 24, 64, 36, 0.31),
        ("120b", 24, 32, None, 0.0),
        ("122b", 24, 128, 48, 0.25),
        ("122b", 24, 64, 47, 0.25),
    ],
)
def test_experts_go_where_there_is_memory(
    heads: dict[str, Path], model: str, vram: int, ram: int, n_host: int | None, share: float
) -> None:
    d = widened(described(heads[model], vram, ram), tells=False)
    plan, host = plan_memory(d), plan_host(d)
    if n_host is None:
        assert plan.total > d.room.usable
        return
    assert plan.total <= d.room.usable == int(vram * GIB * 0.96)
    assert len(d.placement.experts) == n_host and share_on_card(d) == pytest.approx(share, abs=0.045)
    if not n_host:
        assert host is None and plan.expert_cache == plan.staging == 0 and fit_lines(d) == []
        return
    assert host is not None and host.total <= host_bytes(d) == ram * GIB and host.spare == 4 * GIB
    assert d.placement.tables == (EMBEDDING,), "first what a token reads a row of"
    stays = [b for b in d.blocks if d.placement.slots(b.prefix) is None]
    assert [b.prefix for b in stays] == [f"blk.{i}" for i in range(n_host, d.config.n_layer)]
    assert plan.wide == 0, "experts go before copies for prompts"
    later = plan.activations + plan.staging + plan.workspace - CUDA_BYTES
    left = d.room.usable - plan.total - max(0, load_bytes(d) - later)
    each = sum(b.expert for b, _ in d.in_host)
    assert left < each, "the cache takes what is left"
    assert left >= 0 or not plan.expert_cache, "but what a load takes on its way"
    # bytes are those of slots in place of all experts
    all_there = plan_memory(replace(d, placement=ON_CARD))
    moved = sum(b.n_expert * b.expert for b, _ in d.in_host)
    moved += sum(map(repacked_bytes, d.tables_away))
    assert all_there.weights - plan.weights == pytest.approx(moved, rel=1e-4)
    rates = expected(d, fitted.rates_of(d))
    assert 0 < rates["uniform"] < rates["modest"] <= rates["hot"]
    lines = fit_lines(d)
    assert f"{share_on_card(d):.0%} of the model's" in lines[1]
    assert "forecast" in lines[2]
    assert "assumed: " in lines[2]


def test_fit_off_and_layers_on_the_card_leave_all_there(heads: dict[str, Path]) -> None:
    for values, hint in (({"fit": "off"}, "-fit on"), ({"n_gpu_layers": 99}, "without -ngl 99")):
        d = widened(described(heads["35b"], 12, 64, **values), tells=False)
        assert not d.in_host and plan_memory(d).total > d.room.usable and hint in without(d)
    assert "9 of host memory" not in without(d)
    d = widened(described(heads["120b"], 8, 2), tells=False)
    assert "of host memory for experts, where 2.00 GiB are free" in without(d)


def test_a_cache_of_a_given_size_and_none(heads: dict[str, Path]) -> None:
    for mib in (0, 100, 1024, 4096):
        d = widened(described(heads["35b"], 24, 64, cpu_moe=True, moe_cache_mib=mib), tells=False)
        plan = plan_memory(d)
        assert len(d.placement.experts) == 40 and plan.expert_cache <= mib * MIB
        assert plan.expert_cache > (mib - 80) * MIB if mib > 100 else not plan.expert_cache
    d = widened(described(heads["35b"], 24, 64, cpu_moe=True), tells=False)
    assert {n for _, n in d.in_host} == {256}, "all fit beside their copies in the host"


def test_the_least_context_is_kept_and_a_margin_stays_free(heads: dict[str, Path]) -> None:
    first = widened(described(heads["35b"], 12, 64), tells=False)
    long = widened(described(heads["35b"], 12, 64, fit_ctx=100_000), tells=False)
    assert (first.n_ctx, long.n_ctx) == (8192, 100_000) and share_on_card(long) < share_on_card(first)
    given = widened(described(heads["35b"], 12, 64, ctx=4096), tells=False)
    assert given.n_ctx == 4096 and share_on_card(given) > share_on_card(first)
    wide = widened(described(heads["35b"], 12, 64, fit_target="2048"), tells=False)
    assert wide.room.usable == 10 * GIB >= plan_memory(wide).total
    capped = widened(described(heads["35b"], 80, 64, vram=12 * GIB), tells=False)
    assert capped.placement == first.placement


def test_the_drafters_experts_stay_unless_flags_move_them(heads: dict[str, Path]) -> None:
    first = widened(described(heads["35b"], 12, 64), tells=False)
    moved = widened(described(heads["35b"], 12, 64, draft_cpu_moe=True), tells=False)
    assert first.draft_placement.experts == () and moved.draft_placement.slots("blk.40") is not None
    assert moved.on.placement.slots("blk.40") is None, "each has its own"
    assert plan_memory(first).weights - plan_memory(moved).weights > 0.4 * GIB
    by_name = widened(described(heads["35b"], 12, 64, draft_override_tensor=("exps=CPU",)), tells=False)
    layers = widened(described(heads["35b"], 12, 64, draft_n_gpu_layers=0), tells=False)
    assert by_name.draft_placement == layers.draft_placement == moved.draft_placement
    stay = widened(described(heads["35b"], 24, 64, draft_n_cpu_moe=1), tells=False)
    assert stay.placement.experts == () and stay.draft_placement.experts


def test_fit_reports_the_placement_and_its_flags_load_it(heads: dict[str, Path]) -> None:
    args = [str(heads["35b"]), "--vram", "12G", "--ram", "32G", "-np", "2"]
    about = json.loads(CliRunner().invoke(main, ["fit", *args, "--json"]).stdout)
    host = about["host"]
    assert about["fits"] and host["free"] == 32 * GIB and len(host["blocks"]) == 40
    assert host["plan"]["total"] == sum(n for name, n in host["plan"].items() if name != "total")
    assert about["plan"]["total"] == sum(n for name, n in about["plan"].items() if name != "total")
    assert 0.3 < host["share_on_gpu"] < 0.45 and host["forecast"]["uniform"] < host["forecast"]["hot"]
    assert "RTX 3060" in host["rates"] and about["flags"][-4:] == ["-np", "2", "-c", "8192"]
    text = CliRunner().invoke(main, ["fit", *args, "-ot", r"blk\.1\..*exps=CPU,exps=CUDA0"]).output
    assert "1 of 41 blocks are in host memory" in text and "does not fit" in text
    text = CliRunner().invoke(main, ["fit", *args, "-ncmoe", "39"]).output
    assert "39 of 41 blocks" in text and "-c 8192 -ncmoe 39" in text and "forecast" in text
    assert CliRunner().invoke(main, ["fit", "demo", "--ram", "32G"]).exit_code == 2


def test_rules_of_the_command_line_come_back_in_fits_flags(heads: dict[str, Path]) -> None:
    rules = r"blk\.([0-9]|1[0-9])\..*_exps=CPU,blk\.2\d\..*_exps=CPU"
    args = [str(heads["35b"]), "--vram", "16G", "--ram", "64G", "-ot", rules]
    about = json.loads(CliRunner().invoke(main, ["fit", *args, "--json"]).stdout)
    assert about["flags"][-2:] == ["-ot", rules] and len(about["host"]["blocks"]) == 30


def test_requests_are_shorter_where_slots_crowd_the_card_beside_experts_in_host_memory(
    heads: dict[str, Path],
) -> None:
    d = widened(described(heads["120b"], 12, 128, np=64), tells=False)
    assert len(d.in_host) == 36 and 1024 <= d.n_ctx < 8192 and d.n_ctx % 256 == 0
    assert plan_memory(d).total <= d.room.usable < plan_memory(resized(d, 64, d.n_ctx + 256)).total
    budget = {"cuda:0": 12 * GIB, "host": 128 * GIB}
    assert need_of(heads["120b"], EngineSettings(np=64), budget).n_ctx == d.n_ctx
    for values in ({"fit_ctx": 4096}, {"ctx": 4096}):  # asked for
        d = widened(described(heads["120b"], 12, 128, np=64, **values), tells=False)
        assert plan_memory(d).total > d.room.usable


def test_experts_of_a_small_model_stay_where_their_way_takes_more_than_they_do(tiny: Path) -> None:
    gpu, settings = AssumedGpu(800 * MIB, ram=64 * GIB), EngineSettings(np=8)
    there = plan_memory(widened(describe(tiny, settings, gpu), tells=False)).total
    short = AssumedGpu(there, ram=64 * GIB)  # of which some stays free
    d = widened(describe(tiny, settings, short), tells=False)
    assert not d.in_host and d.room.usable < plan_memory(d).total <= there
    for flags in ({"n_cpu_moe": 1}, {"draft_cpu_moe": True}):
        d = widened(describe(tiny, replace(settings, **flags), gpu), tells=False)
        said = f"without {d.wanted.given or d.draft_wanted.given}"
        assert d.in_host and plan_memory(d).total > d.room.usable and without(d) == said
        args = [*said.split()[1:], "-np", "8", "--vram", "800M", "--ram", "64G"]
        assert (
            f"nothing fits. This fits: {said}"
            in CliRunner().invoke(main, ["fit", str(tiny), *args]).output
        )
    d = widened(describe(tiny, replace(settings, n_cpu_moe=1), replace(gpu, free=MIB)), tells=False)
    assert without(d) == ""


# -- refused ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("qwen35moe", tmp_path_factory.mktemp("tiny") / "t.gguf", tiny=True, quant="f32")


def test_several_ranks_and_unpacked_weights_are_refused_with_the_flag(tiny: Path) -> None:
    for values, said in (
        ({"tp": 2, "cpu_moe": True}, "-cmoe with --tp 2: weights in host memory go with one GPU"),
        ({"tp": 2, "draft_cpu_moe": True}, "-cmoed with --tp 2"),
        ({"weights": "dense", "n_cpu_moe": 2}, "-ncmoe 2: weights in host memory stay packed"),
    ):
        with pytest.raises(ConfigError) as e:
            described(tiny, 24, 64, **values)
        assert said in str(e.value)
    assert not described(tiny, 24, 64, tp=2, n_gpu_layers=99).in_host


def test_on_a_cpu_there_is_nothing_to_offload(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pyspec")
    d = widened(
        describe(tiny, EngineSettings(device="cpu", cpu_moe=True, override_tensor=("exps=CPU",)))
    )
    assert not d.in_host and plan_host(d) is None and plan_memory(d).expert_cache == 0
    assert "-ot exps=CPU -cmoe: no effect on a CPU" in caplog.text


class Bound(Exception):
    """Raised in place of reading weights."""


def test_a_load_binds_target_and_drafter_where_they_are_placed(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Placement] = []

    def weights(*of: object, placement: Placement, **more: object) -> None:
        seen.append(placement)
        raise Bound

    one, two = Placement((("blk.1", 2),)), Placement((("blk.3", 0),))
    d = replace(describe(tiny, EngineSettings(device="cpu")), placement=one, draft_placement=two)
    monkeypatch.setattr(loading, "Weights", weights)
    with pytest.raises(Bound):
        loading.build(d, plan_memory(d))
    for drafter, plan in (
        (mtp, d.draft),
        (draft_model, ModelPlan(kind="model", file=d.file, tokens=dict)),
    ):
        monkeypatch.setattr(drafter, "Weights", weights)
        options = DraftOptions(settings=d.settings, dense=None, placement=two)
        with pytest.raises(Bound):
            drafter.load(plan, SimpleNamespace(device=d.device), d.table(), options)  # type: ignore[arg-type]
    assert seen == [one, two, two]


def test_feed_forwards_without_experts_are_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GGUFWriter, "write", heads_only)
    path = write("qwen3-8b", tmp_path / "d.gguf", quant="q4_k")
    plans = [
        plan_memory(widened(described(path, 24, 64, ctx=4096, n_cpu_ffn=n), tells=False)) for n in (0, 9)
    ]
    d = widened(described(path, 24, 64, ctx=4096, n_gpu_layers=27), tells=False)
    assert d.placement.dense == {f"blk.{i}" for i in range(9)}
    moved = sum(block.dense for block in d.blocks[:9])
    assert plans[0].weights - plans[1].weights == pytest.approx(moved, rel=0.05) and plans[1].wide == 0
    assert plan_host(d).weights == moved > GIB / 2
    assert plan_memory(d).staging == staging_bytes(d.blocks[0].dense, may_move=False), (
        "prompts bring one to the card at a time"
    )


@pytest.mark.parametrize(
    ("vram", "ram", "n_host"), [(4, 64, None), (6, 64, 17), (6, 4, None), (24, 64, 0)]
)
def test_feed_forwards_go_to_the_host_where_a_model_without_experts_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vram: int, ram: int, n_host: int | None
) -> None:
    monkeypatch.setattr(GGUFWriter, "write", heads_only)
    path = write("qwen3-8b", tmp_path / "d.gguf", quant="q4_k")
    d = widened(described(path, vram, ram, ctx=8192), tells=False)
    if not n_host:
        assert not d.placement.dense and bool(d.placement.tables) == (vram < 24 and ram > 4)
        assert (plan_memory(d).total > d.room.usable) == (n_host is None)
        assert bool(without(d)) == (ram == 4)
        return
    assert [block.prefix for block in d.away] == [f"blk.{i}" for i in range(len(d.away))]
    assert abs(len(d.away) - n_host) <= 1 and plan_memory(d).total <= d.room.usable
    one_less = replace(
        d, placement=replace(d.placement, dense=frozenset(f"blk.{i}" for i in range(len(d.away) - 1)))
    )
    assert fitted._left(d) >= 0 > fitted._left(one_less), "no more than have to"
    check_host(d)
    rates = fitted.rates_of(d)
    rate, four = (expected(d, rates, n_row)["hot"] for n_row in (1, 4))
    host_s = sum(b.dense for b in d.away) / rates.host
    assert 0.3 / host_s < rate < 1 / host_s and 1.0 <= rate / four < 1.1
    lines = fit_lines(d)
    assert f"of {len(d.away)} blocks" in lines[1] and "tokens/s, one stream" in lines[2]
    assert "four rows" in lines[3] and len(lines) == 4
    assert not widened(described(path, vram, ram, fit="off"), tells=False).away


# -- tables ----------------------------------------------------------------------------------------------------------

NARROW = {
    "q2_k": GGMLType.IQ4_NL,
    "q4_k": GGMLType.Q8_0,
}  # of rows of 160 numbers, which are no whole blocks


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Qwen3.8-Flash-Next without its weights. As Q2_K its rows that are no whole blocks are IQ4_NL, as llama.cpp's quantiser has them."""
    folder = tmp_path_factory.mktemp("flash")
    chosen = synth._type_of

    def type_of(spec: Spec, dims: Dims, quant: str) -> GGMLType:
        found = chosen(spec, dims, quant)
        return NARROW[quant] if found is GGMLType.Q8_0 else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GGUFWriter, "write", heads_only)
        patch.setattr(synth, "_type_of", type_of)
        return {
            quant: write("qwen3.8-flash-next", folder / f"{quant}.gguf", quant=quant) for quant in NARROW
        }


@pytest.mark.parametrize(
    ("quant", "ram", "values", "tables", "fits"),
    [
        ("q2_k", 64, {}, (TOKEN_INPUTS, EMBEDDING), True),
        ("q4_k", 160, {}, (TOKEN_INPUTS, EMBEDDING), True),
        ("q4_k", 64, {}, (TOKEN_INPUTS, EMBEDDING), False),  # its experts have no place beside 51 GiB
        ("q2_k", 24, {}, (EMBEDDING,), False),
        ("q2_k", 64, {"fit": "off"}, (), False),
        ("q2_k", 64, {"override_tensor": ("per_layer=CUDA0", "exps=CPU")}, (EMBEDDING,), False),
        ("q2_k", 96, {"cpu_moe": True}, (TOKEN_INPUTS,), True),  # the card has room for the rest
        ("q2_k", 96, {"override_tensor": ("embd=CPU", "exps=CPU")}, (TOKEN_INPUTS, EMBEDDING), True),
        ("q2_k", 192, {"card": 141}, (), True),
    ],
)
def test_tables_go_where_there_is_memory(
    flash: dict[str, Path],
    quant: str,
    ram: int,
    values: dict[str, object],
    tables: tuple[str, ...],
    fits: bool,
) -> None:
    card = int(values.get("card", 24))  # type: ignore[call-overload]
    d = widened(
        described(flash[quant], card, ram, **{k: x for k, x in values.items() if k != "card"}),
        tells=False,
    )
    plan, host = plan_memory(d), plan_host(d)
    assert sorted(d.placement.tables) == sorted(tables)
    assert (plan.total <= d.room.usable and holds(host, host_bytes(d))) == fits
    there = sum(d.file.tensors[name].n_bytes for name in tables)
    on_card = replace(d, placement=replace(d.placement, tables=()))
    assert host is None or host.weights - there == sum(b.experts for b, _ in d.in_host)
    moved = plan_memory(on_card).weights - plan.weights
    assert moved == pytest.approx(there, rel=0.02, abs=0), (
        "no products read them, so they are as in the file"
    )
    lines = fit_lines(d)
    assert [line.split()[1].rstrip(",") for line in lines[: len(tables)]] == list(d.placement.tables)
    if TOKEN_INPUTS in tables:
        row = {"q2_k": 90, "q4_k": 170}[quant]  # of 160 numbers, 16 of them for a token
        assert f"a token reads {16 * row:,} bytes of it" in lines[d.placement.tables.index(TOKEN_INPUTS)]


def test_a_forecast_counts_no_table_and_all_chosen_experts(flash: dict[str, Path]) -> None:
    """Experts stand within parts between streams; those that a token chooses are 10 of 512."""
    d = widened(described(flash["q2_k"], 24, 96, cpu_moe=True, moe_cache_mib=0), tells=False)
    found = expected(d, Rates(1e15, 1e9, ""))
    active = sum(b.experts for b, _ in d.in_host) * 10 / 512
    assert found["uniform"] == pytest.approx(1e9 / active, rel=1e-3)
    slow = expected(d, Rates(1e9, 1e15, ""))["uniform"]
    assert 1e9 / slow < 3 * GIB, "the rest of the weights, without tables"
    assert job_bytes(d) > 10 * 4 * JOB_ROWS * d.config.n_embd


@pytest.mark.parametrize(
    ("vram", "tables"), [(9, ()), (6, (TOKEN_INPUTS,)), (5, (TOKEN_INPUTS, EMBEDDING))]
)
def test_an_e_model_leaves_the_card_its_rows_of_tokens_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vram: int, tables: tuple[str, ...]
) -> None:
    """Gemma 4 E4B: its embedding is the head, too, so the card keeps that and loses the rows of the file."""
    monkeypatch.setattr(GGUFWriter, "write", heads_only)
    path = write("gemma-4-e4b", tmp_path / "e.gguf", quant="q4_k")
    d = widened(described(path, vram, 32, np=4), tells=False)
    assert d.placement.tables == tables and (plan_memory(d).total <= d.room.usable) and not d.away
    on_card, there = plan_memory(replace(d, placement=ON_CARD)), sum(t.n_bytes for t in d.tables_away)
    assert on_card.weights - plan_memory(d).weights == there  # Q6_K, which kernels read in as many bytes
    if tables:
        assert plan_host(d).weights == there and plan_host(d).jobs == 0
        assert len(fit_lines(d)) == len(tables), "no forecast of experts"


def test_fit_says_where_tables_are(flash: dict[str, Path]) -> None:
    args = [str(flash["q2_k"]), "--vram", "24G", "--ram", "64G", "-np", "1"]
    about = json.loads(CliRunner().invoke(main, ["fit", *args, "--json"]).stdout)
    assert about["fits"] and about["host"]["tables"] == [TOKEN_INPUTS, EMBEDDING]
    text = CliRunner().invoke(main, ["fit", *args]).output
    assert f"table: {TOKEN_INPUTS}, 26.82 GiB, is in host memory; a token reads 1,440 bytes" in text
    done = CliRunner().invoke(main, ["fit", *args, "-fit", "off"])
    assert done.exit_code == DoesNotFit.exit_code and "table" not in done.stdout


def test_host_memory_that_does_not_suffice_is_refused_with_numbers(heads: dict[str, Path]) -> None:
    d = widened(described(heads["120b"], 24, 48, cpu_moe=True), tells=False)
    with pytest.raises(DoesNotFit) as e:
        check_host(d)
    assert "needs 60." in str(e.value)
    assert "48.00 GiB are free" in str(e.value)
    assert "-cmoe" in str(e.value)
    assert "spare 4.00 GiB" in str(e.value)


def test_the_refusal_of_a_card_names_what_would_help() -> None:
    plan = memory_plan.MemoryPlan(100 * GIB, 1, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_plan, "free_bytes", lambda device: 80 * GIB)
        with pytest.raises(DoesNotFit, match="this would fit: -fit on"):
            check_fit(plan, torch.device("cuda", 0), n_slot=1, n_ctx=1, packed=True, more="-fit on")
        roomy = replace(plan, weights=70 * GIB)
        check_fit(roomy, torch.device("cuda", 0), n_slot=1, n_ctx=1, packed=True)
        with pytest.raises(DoesNotFit, match=r"64\.00 GiB are free"):
            check_fit(
                roomy, torch.device("cuda", 0), n_slot=1, n_ctx=1, packed=True, settings=EngineSettings(vram=64 * GIB),
            )  # fmt: skip


def test_the_cap_holds_for_the_allocator_too(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[object] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *args: set_to.append(args))
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    cap_memory(torch.device("cpu"), EngineSettings(vram=8 * GIB))
    assert set_to == []
    cap_memory(gpu, EngineSettings())
    assert set_to.pop() == (1.0, gpu), "an engine without a cap is not held by one before it"
    cap_memory(gpu, EngineSettings(vram=8 * GIB))
    assert set_to == [(pytest.approx((8 * GIB - memory_plan.CUDA_BYTES) / (80 * GIB)), gpu)]
    cap_memory(gpu, EngineSettings(vram=8 * GIB, tp=2))
    assert set_to[1][0] < set_to[0][0] - memory_plan.LIBRARY_BYTES / (81 * GIB)  # type: ignore[index]
    assert DeviceRoom.of(gpu, EngineSettings(vram=8 * GIB)) == DeviceRoom(8 * GIB)
    assert DeviceRoom.of(gpu, EngineSettings(vram=100 * GIB)).free == 70 * GIB
    assert DeviceRoom.of(gpu, EngineSettings(fit_target="512,1024")).usable == 69 * GIB
    assert (
        DeviceRoom.of(torch.device("cuda", 5), EngineSettings(fit_target="512,1024")).usable == 69 * GIB
    )


# -- pairs of flags --------------------------------------------------------------------------------------------------

PAIRS: dict[str, tuple[object, ...]] = {
    "n_gpu_layers": (-1, 0, 1, 99),
    "n_cpu_moe": (0, 1, 7),
    "cpu_moe": (False, True),
    "n_cpu_ffn": (0, 3),
    "override_tensor": ((), ("exps=CPU",), (r"blk\.1\.=CUDA0", "up_exps=CPU"), ("attn=CPU",)),
    "moe_cache_mib": (-1, 0, 1),
    "fit": ("on", "off"),
    "fit_target": ("", "8"),
    "fit_ctx": (0, 300),
    "draft_n_gpu_layers": (-1, 0),
    "draft_n_cpu_moe": (0, 1),
    "draft_cpu_moe": (False, True),
    "draft_override_tensor": ((), ("exps=CPU",)),
    "vram": (0, 720 * MIB),
    "tp": (1, 2),
    "weights": ("auto", "packed", "dense"),
    "exact": (False, True),
    "replicas": (1, 2),
    "ctx": (0, 200),
    "np": (1, 5),
    "spec_type": ("auto", "none"),
    "prefix_cache": (True, False),
}


def test_all_pairs_of_these_flags_are_planned_or_refused_in_one_line(tiny: Path) -> None:
    cases, n_refused, n_placed = all_pairs(PAIRS), 0, 0
    for case in cases:
        for gpu in (None, AssumedGpu(770 * MIB, ram=64 * GIB)):
            settings = EngineSettings(device="auto", **case)  # type: ignore[arg-type]
            try:
                d = widened(describe(tiny, settings, gpu), tells=False)
                check_host(d) if gpu else None
            except PyspecError as e:
                assert "\n" not in str(e) and gpu is not None, (case, e)
                n_refused += 1
                continue
            plan, host = plan_memory(d), plan_host(d)
            assert plan.total == sum(n for _, n in plan.by_purpose), case
            assert gpu is not None or not d.in_host, case
            slots = [(n, block.n_expert) for block, n in d.in_host]
            assert all(0 <= n <= most for n, most in slots) and bool(host) == bool(slots), case
            if slots and case["moe_cache_mib"] >= 0:
                assert plan.expert_cache <= case["moe_cache_mib"] * MIB, case
            if case["cpu_moe"] and gpu is not None and not case["override_tensor"]:
                assert len(d.placement.experts) == d.config.n_layer, case
            asks_of(d)
            n_placed += bool(slots)
    assert n_placed >= 4 and n_refused >= 4, (n_placed, n_refused, len(cases))


# -- bytes on the host -----------------------------------------------------------------------------------------------


class Driver:
    """In place of a GPU's driver: locked memory, and the answer."""

    def __init__(self, answer: str = "") -> None:
        self.locked: list[tuple[int, int]] = []
        self.answer = answer
        self.n_asked = 0

    def register(self, address: int, n_bytes: int, device: torch.device) -> str:
        self.n_asked += 1
        if not self.answer:
            self.locked.append((address, n_bytes))
        return self.answer

    def unregister(self, address: int) -> None:
        (found,) = (one for one in self.locked if one[0] == address)
        self.locked.remove(found)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(pinned, "register", made.register)
    monkeypatch.setattr(pinned, "unregister", made.unregister)
    return made


SOURCE = np.random.default_rng(1).integers(0, 256, 70 * MIB + 13, dtype=np.uint8)


def test_host_bytes_are_read_once_locked_and_unlocked_with_their_last_view(driver: Driver) -> None:
    read: list[tuple[int, int]] = []

    def into(out: np.ndarray, first: int) -> None:
        read.append((first, out.size))
        out[:] = SOURCE[first : first + out.size]

    host = HostBytes(torch.device("cuda"))
    whole = host.of(SOURCE.size, into)
    assert whole.dtype == torch.uint8 and whole.shape == (SOURCE.size,) and not whole.is_cuda
    assert np.array_equal(whole.numpy(), SOURCE) and host.is_pinned
    ends = sorted((first, first + n) for first, n in read)
    assert len(ends) > 1 and ends[0][0] == 0 and ends[-1][1] == SOURCE.size
    assert all(a[1] == b[0] for a, b in pairwise(ends)), "each byte once"
    assert driver.locked == [(whole.data_ptr(), SOURCE.size)] and whole.data_ptr() % 4096 == 0
    view = whole[100:200].view(torch.int32)
    del whole
    gc.collect()
    assert driver.locked, "a view keeps it"
    del view
    gc.collect()
    assert driver.locked == []


def test_where_locking_is_not_allowed_one_warning_says_so(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.answer = "CUDA_ERROR_OUT_OF_MEMORY"
    host = HostBytes(torch.device("cuda"))
    made = [host.of(n, lambda out, first: out.fill(7)) for n in (5000, 1, 0)]
    assert [t.numel() for t in made] == [5000, 1, 0] and bool((made[0] == 7).all())
    assert not host.is_pinned and driver.n_asked == 1 and driver.locked == []
    assert caplog.text.count("can not be locked") == 1 and "CUDA_ERROR_OUT_OF_MEMORY" in caplog.text


def test_a_cpu_locks_nothing(driver: Driver) -> None:
    host = HostBytes(torch.device("cpu"))
    host.of(4096, lambda out, first: out.fill(1))
    assert not host.is_pinned and driver.n_asked == 0


def test_blocks_are_read_from_names(heads: dict[str, Path]) -> None:
    file = opened(heads["35b"])
    blocks = blocks_of(file.tensors, 0, 40)
    assert len(blocks) == 40 and all(b.n_expert == 256 and not b.dense for b in blocks)
    total = sum(
        t.n_bytes
        for name, t in file.tensors.items()
        if "_exps." in name and not name.startswith("blk.40.")
    )
    assert sum(b.experts for b in blocks) == total
    assert [b.prefix for b in blocks_of(file.tensors, 40, 41)] == ["blk.40"]


def test_experts_of_another_shape_are_left_to_the_check_of_shapes(heads: dict[str, Path]) -> None:
    tensors = dict(opened(heads["35b"]).tensors)
    for shape in ((64,), (64, 32)):
        name = "blk.3.ffn_up_exps.weight"
        tensors[name] = replace(tensors[name], shape=shape)
        assert blocks_of(tensors, 3, 4)[0].n_expert == 256, "those of the gates are as they should be"
