"""A coarse head for drafts: made from any matrix in pieces, counted in the plan, refused where it makes no sense; the text stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_rig import DEMO, DEMO_DRAFT, FIXTURES, rig
from known_texts import tiny
from rewrite import rewrite

from pyspec.config import EngineSettings
from pyspec.cuda.ops.linear.dequant import dequantize, quantize
from pyspec.cuda.ops.linear.fit_q4 import fit_q4
from pyspec.cuda.ops.linear.pack import Packed, packed_bytes, repack, unpack
from pyspec.cuda.packed_cpu import CpuMatrix
from pyspec.cuda.streamed import Streamed
from pyspec.engine.plan import describe, planned_bytes
from pyspec.engine.plan import memory_plan as plan
from pyspec.engine.plan.memory_plan import MemoryPlan
from pyspec.errors import ConfigError, DoesNotFit
from pyspec.gguf import GGMLType, open_gguf
from pyspec.models import coarse
from pyspec.models.matrices import Dense, Unpacked
from pyspec.models.target import Matrix

CPU, GPU = torch.device("cpu"), torch.device("cuda")
Q4_0 = GGMLType.Q4_0
PROMPT = [3, 17, 99, 5, 5, 280, 44]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads are described as on a GPU with memory to spare."""
    monkeypatch.setattr(describe, "pick_device", lambda wanted: GPU if wanted == "cuda" else CPU)
    monkeypatch.setattr(plan, "free_bytes", lambda device: 8 << 30)


def planned(
    target: Path, device: torch.device = CPU, draft: Path | None = None, **settings: object
) -> MemoryPlan:
    values: dict[str, object] = {"ctx": 256, "draft_path": draft, "device": device.type, **settings}
    return planned_bytes.plan_memory(describe.describe(target, EngineSettings(**values)))  # type: ignore[arg-type]


def streamed(packed: Packed) -> Streamed:
    """As on a GPU, without its kernels."""
    matrix = object.__new__(Streamed)
    matrix.packed = packed
    return matrix


# -- the copy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", [GGMLType.Q8_0, GGMLType.BF16, GGMLType.F16])
@pytest.mark.parametrize("n_out", [256, 600, 1000])
def test_rows_of_a_packed_matrix_are_those_of_the_whole(type: GGMLType, n_out: int) -> None:
    weight = torch.randn(n_out, 96, generator=torch.Generator().manual_seed(n_out))
    packed = repack(quantize(weight, type), type, (n_out, 96))
    whole = unpack(packed)
    for first, end in ((0, n_out), (0, 100), (256, 512), (256, 300), (512, 2000)):
        if first < n_out:
            assert torch.equal(unpack(packed, first, end), whole[first:end])


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("kind", ["streamed", "dense", "unpacked"])
@pytest.mark.parametrize("to", [Q4_0, GGMLType.IQ4_NL])
def test_a_copy_in_pieces_is_that_of_the_whole(
    kind: str, to: GGMLType, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = open_gguf(DEMO)
    info = file.tensors["output.weight"]
    raw = torch.from_numpy(file.raw(info.name).copy())
    weight = dequantize(raw, info.type, info.shape)
    matrices: dict[str, Matrix] = {
        "streamed": streamed(repack(raw, info.type, info.shape)),  # type: ignore[arg-type]
        "dense": Dense(weight),
        "unpacked": Unpacked([(raw, info, 1.0)]),
    }
    monkeypatch.setattr(coarse, "PIECE", 600 * info.shape[1])  # 512 rows at a time
    got = coarse.coarse(matrices[kind], info, to, CPU)
    want = dequantize(fit_q4(weight, to), to, info.shape)
    assert isinstance(got, Dense) and torch.equal(got.weight, want)
    ends = [(first, min(first + 512, len(weight))) for first in range(0, len(weight), 512)]
    pieces = (coarse.rows_of(matrices[kind], *each) for each in ends)
    packed = coarse._packed(pieces, *info.shape, to, CPU)  # matrices that a GPU streams
    assert torch.equal(unpack(packed), want) and packed.data.numel() == packed_bytes(to, *info.shape)
    x = torch.randn(3, info.shape[1])
    assert (got(x) - matrices["dense"](x)).norm() < 0.2 * matrices["dense"](x).norm()


# -- the plan --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [None, DEMO_DRAFT])
def test_the_plan_counts_the_copy(draft: Path | None, on_gpu: None) -> None:
    n_out, n_in = open_gguf(DEMO).tensors["output.weight"].shape
    full = planned(DEMO, GPU, draft, draft_head="full")
    more = planned(DEMO, GPU, draft, draft_head="q4_0")
    assert full.draft_head == 0 and "draft head" not in str(full)
    assert more.draft_head == packed_bytes(Q4_0, n_out, n_in)
    assert more.total == full.total + more.draft_head
    assert "draft head" in str(more)
    # DFlash has one pass a block
    assert planned(DEMO, GPU, draft).draft_head == (more.draft_head if draft is None else 0)
    asked = planned(DEMO, CPU, draft, draft_head="q4_0")
    assert asked.draft_head == 4 * n_out * n_in and planned(DEMO, CPU, draft).draft_head == 0


def test_auto_wants_a_drafter_and_a_head_of_six_bits_that_kernels_stream(on_gpu: None) -> None:
    assert planned(DEMO, GPU).draft_head > 0
    assert (
        planned(DEMO, GPU, spec_type="none").draft_head
        == planned(DEMO, GPU, spec_type="ngram").draft_head
        == 0
    )
    assert planned(DEMO, GPU, weights="dense").draft_head == 0
    assert planned(FIXTURES / "qwen35.gguf", GPU).draft_head == 0  # f32: no kernel streams it


def test_without_memory_auto_keeps_the_head_and_says_so(
    monkeypatch: pytest.MonkeyPatch, on_gpu: None
) -> None:
    need = planned(DEMO, GPU, draft_head="q4_0", weights="packed")
    monkeypatch.setattr(plan, "free_bytes", lambda device: need.total)  # a reserve is left to others
    d = describe.describe(DEMO, EngineSettings(ctx=256, device="cuda", weights="packed"))
    assert planned_bytes.plan_memory(d).draft_head == 0
    assert "no room for a coarse copy of" in planned_bytes.missing_copy(d, planned_bytes.plan_memory(d))
    assert planned_bytes.missing_copy(d, need) == ""
    asked = planned(DEMO, GPU, draft_head="q4_0", weights="packed")
    monkeypatch.setattr(
        plan, "free_bytes", lambda device: (need.total - need.draft_head) / (1 - plan.RESERVE) + 1
    )
    with pytest.raises(DoesNotFit, match="--draft-head full"):
        plan.check_fit(asked, GPU, n_slot=1, n_ctx=256, packed=True)


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec_type", "text"), [("none", "nothing drafts"), ("ngram", "ngram drafts need no head")]
)
def test_without_a_drafter_that_has_use_for_it_it_is_refused(spec_type: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        rig(tiny("qwen35"), spec_type=spec_type, draft_head="q4_0")


def test_a_drafter_with_its_own_head_is_told(tmp_path: Path, on_gpu: None) -> None:
    source, head = FIXTURES / "qwen35.gguf", "nextn.shared_head_head.weight"
    file = open_gguf(source)
    block = next(n for n in file.tensors if n.endswith("nextn.eh_proj.weight")).removesuffix(
        "nextn.eh_proj.weight"
    )
    add = (
        {}
        if block + head in file.tensors
        else {block + head: np.zeros(file.tensors["token_embd.weight"].shape)}
    )
    own = rewrite(source, tmp_path / "own.gguf", add=add)
    with pytest.raises(
        ConfigError, match="--draft-head q4_0 makes no sense here: the drafter has a head of its own"
    ):
        rig(own, draft_head="q4_0")
    assert planned(own, GPU).draft_head == 0
    add = {"token_embd.weight": np.zeros((320, 64)), "output.weight": np.zeros((320, 64))}
    with_head = tmp_path / "d.gguf"
    rewrite(tiny("qwen35", drafter=True), with_head, add=add)
    with pytest.raises(ConfigError, match="a head of its own"):
        rig(tiny("qwen35"), draft_path=with_head, draft_head="iq4_nl")


def test_a_head_that_is_as_coarse_already_stays() -> None:
    info = open_gguf(DEMO).tensors["output.weight"]
    assert coarse.refusal(info, Q4_0) is None
    why = coarse.refusal(replace(info, type=GGMLType.Q4_K), Q4_0)
    assert why == "it has 4.5 bits a weight (Q4_K), the copy would have 4.5"
    assert (
        coarse.refusal(replace(info, type=GGMLType.Q5_K), Q4_0) is None
    )  # if asked for, but not worth it by itself
    assert not coarse.is_worth(replace(info, type=GGMLType.Q5_K)) and coarse.is_worth(info)
    assert coarse.is_worth(replace(info, type=GGMLType.Q6_K))
    assert (
        coarse.refusal(replace(info, shape=(300, 40)), Q4_0) == "its rows of 40 are not a multiple of 32"
    )


def test_an_unknown_kind_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="--draft-head is 'q3'; want one of auto, full, q4_0, iq4_nl"):
        EngineSettings(draft_head="q3")


# -- the text --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("head", ["q4_0", "iq4_nl"])
@pytest.mark.parametrize("weights", ["dense", "packed"])
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_the_text_is_that_of_plain_decoding(kind: str, weights: str, head: str) -> None:
    want = rig(DEMO, spec_type="none", weights=weights).generate(PROMPT, 40)
    draft = {"draft_path": DEMO_DRAFT} if kind == "dflash" else {"spec_type": "mtp"}
    r = rig(DEMO, draft_head=head, weights=weights, n_draft_fixed=True, **draft)
    drafter = r.loop.drafter
    own = drafter.block.output if kind == "mtp" else drafter.net.head  # type: ignore[union-attr]
    assert (
        isinstance(own, Dense if weights == "dense" else CpuMatrix) and own is not r.loop.target.output
    )  # type: ignore[attr-defined]
    got = r.generate(PROMPT, 40)
    assert got.tokens == want.tokens
    assert got.timings.draft_n_accepted > 0
