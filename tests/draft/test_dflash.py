"""DFlash: blocks against a dense reference, context in any pieces, both spellings of the file."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engine_rig import DEMO, DEMO_DRAFT, GREEDY, rig
from harness import Bench
from known_texts import demo_prompts, tiny
from rewrite import rewrite

from pyspec import synth, warmup
from pyspec.draft import dflash
from pyspec.draft.dflash import DFlash
from pyspec.draft.drafter import Ask
from pyspec.gguf import open_gguf
from pyspec.models.weights import Weights
from pyspec.slots.batch import Seq, lay_out

CPU = torch.device("cpu")
N_CTX, WINDOW = 90, 24
TOKENS = random.Random(0).choices(range(256), k=N_CTX + 1)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target and a drafter with a sliding and a full layer, window far shorter than the text."""
    folder = tmp_path_factory.mktemp("dflash")
    dims = replace(synth.drafter_of(synth.find("qwen35", tiny=True)), window=WINDOW)
    return tiny("qwen35"), synth.write(dims, folder / "d.gguf", quant="f32", tiny=True, drafter=True)


def load(target: Path, draft: Path, n_slot: int = 1) -> tuple[Bench, DFlash]:
    bench = Bench(target, n_slot=n_slot)
    options = {"n_draft": 7, "p_min": 0.0, "kv_dtype": torch.float32, "dense": torch.float32}
    drafter = dflash.load(open_gguf(draft), bench.target, bench.table, **options)
    for slot in bench.table.slots:
        drafter.begin(slot, None)
    return bench, drafter


def feed(
    bench: Bench, drafter: DFlash, slot: int, tokens: list[int], *, kept: int = -1, keep: bool = True
) -> torch.Tensor:
    """Run rows through the target and tell the drafter; the taps of all rows."""
    kept = len(tokens) if kept < 0 else kept
    seq = bench.seq(slot, tokens, keep=keep)
    batch = lay_out(bench.table, [seq], CPU)
    out = bench.target.forward(batch, drafter.needs.taps)
    drafter.absorb(batch, out)
    drafter.observe(batch, [kept], out)
    bench.commit(seq, kept)
    assert out.taps is not None
    return out.taps


def block_logits(bench: Bench, drafter: DFlash, slot: int, anchor: int) -> torch.Tensor:
    c = drafter.net.c
    seq = Seq(slot, bench.table.slots[slot].n_past, [anchor, *[c.mask_id] * (c.block - 1)])
    return drafter.net.head(drafter.net.forward(lay_out(bench.table, [seq], CPU, see_block=True)))


def rope(x: torch.Tensor, pos: torch.Tensor, base: float) -> torch.Tensor:
    """x [row, head, dim], pairs (d, d + dim/2)."""
    half = x.shape[-1] // 2
    theta = pos[:, None].double() * base ** (-torch.arange(half).double() / half)
    cos, sin = theta.cos()[:, None], theta.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def dense_reference(
    draft: Path, bench: Bench, taps: torch.Tensor, anchor: int, sliding: list[bool], causal: list[bool]
) -> torch.Tensor:
    """The block's logits in float64 by the formulas of the paper, every layer over [context; block] with an explicit mask."""
    file = open_gguf(draft)
    w, m = Weights(file, CPU, torch.float32), file.metadata
    t = lambda name: w.vector(name).double()  # noqa: E731
    get = lambda key: m[f"dflash.{key}"]  # noqa: E731
    eps, base = float(get("attention.layer_norm_rms_epsilon")), float(get("rope.freq_base"))
    n_head, n_kv, dim = (
        int(get("attention.head_count")),
        int(get("attention.head_count_kv")),
        int(get("attention.key_length")),
    )
    block, mask_id = int(get("block_size")), int(m["tokenizer.ggml.mask_token_id"])
    norm = lambda x, weight: x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight  # noqa: E731
    c = norm(taps.double() @ t("fc.weight").T, t("enc.output_norm.weight"))
    x = Weights(bench.file, CPU, torch.float32).vector("token_embd.weight").double()[[anchor, *[mask_id] * (block - 1)]]
    n = c.shape[0]
    pos = torch.arange(n + block)
    for i, slides in enumerate(sliding):
        p = f"blk.{i}"
        u = norm(x, t(f"{p}.attn_norm.weight"))
        q = norm((u @ t(f"{p}.attn_q.weight").T).view(block, n_head, dim), t(f"{p}.attn_q_norm.weight"))
        both = torch.cat([c, u])
        k = norm((both @ t(f"{p}.attn_k.weight").T).view(-1, n_kv, dim), t(f"{p}.attn_k_norm.weight"))
        v = (both @ t(f"{p}.attn_v.weight").T).view(-1, n_kv, dim)
        q, k = rope(q, pos[n:], base), rope(k, pos, base)
        k, v = (y.repeat_interleave(n_head // n_kv, 1) for y in (k, v))
        away = pos[n:, None] - pos  # [block row, key]
        seen = torch.ones_like(away, dtype=torch.bool)
        if slides:
            seen &= away < WINDOW
        if causal[i]:
            seen &= away >= 0
        weights = (torch.einsum("rhd,khd->hrk", q, k) / dim**0.5).masked_fill(~seen, float("-inf")).exp()
        below = weights.sum(-1, keepdim=True)
        if (sinks := w.optional(f"{p}.attn_sinks.weight")) is not None:
            below = below + sinks.double().exp()[:, None, None]
        o = torch.einsum("hrk,khd->rhd", weights / below, v)
        x = x + o.reshape(block, -1) @ t(f"{p}.attn_output.weight").T
        f = norm(x, t(f"{p}.ffn_norm.weight"))
        x = (
            x
            + (F.silu(f @ t(f"{p}.ffn_gate.weight").T) * (f @ t(f"{p}.ffn_up.weight").T)) @ t(f"{p}.ffn_down.weight").T
        )
    y = norm(x, t("output_norm.weight"))
    head = t("output.weight").T if "output.weight" in file.tensors else bench.target.output.weight.double().T
    return y @ head


@pytest.mark.parametrize("n_context", [1, 15, 30, N_CTX])
@pytest.mark.parametrize("causal_key", [None, False, True])
def test_a_block_equals_the_dense_formulas(
    files: tuple[Path, Path], tmp_path: Path, causal_key: bool | None, n_context: int
) -> None:
    """Sliding layers are windowed and causal inside the block, full layers see all of it; the file may overrule causality."""
    target, draft = files
    if causal_key is not None:
        draft = rewrite(draft, tmp_path / "d.gguf", change={"dflash.attention.causal": causal_key})
    causal = [True, False] if causal_key is None else [causal_key] * 2
    bench, drafter = load(target, draft)
    assert drafter.net.c.windows == (WINDOW, 0)
    taps = feed(bench, drafter, 0, TOKENS[:n_context])
    got = block_logits(bench, drafter, 0, TOKENS[-1])
    want = dense_reference(draft, bench, taps, TOKENS[-1], [True, False], causal)
    assert (got - want).abs().max() < 1e-3
    wrong = dense_reference(draft, bench, taps, TOKENS[-1], [True, False], [not c for c in causal])
    assert (got - wrong).abs().max() > 1e-2, "the mask matters here"


@pytest.mark.parametrize("n_context", [1, N_CTX])
def test_sinks_take_their_share_of_the_weights(files: tuple[Path, Path], tmp_path: Path, n_context: int) -> None:
    """The second layer has none: each layer for itself."""
    target, draft = files
    n_head = int(open_gguf(draft).metadata["dflash.attention.head_count"])  # type: ignore[call-overload]
    sinks = np.linspace(-2, 4, n_head)
    sunk = rewrite(draft, tmp_path / "d.gguf", add={"blk.0.attn_sinks.weight": sinks})
    bench, drafter = load(target, sunk)
    taps = feed(bench, drafter, 0, TOKENS[:n_context])
    got = block_logits(bench, drafter, 0, TOKENS[-1])
    want = dense_reference(sunk, bench, taps, TOKENS[-1], [True, False], [True, False])
    assert (got - want).abs().max() < 1e-3
    without = dense_reference(draft, bench, taps, TOKENS[-1], [True, False], [True, False])
    assert (got - without).abs().max() > 1e-2, "sinks matter here"


@pytest.mark.parametrize("pieces", [[1] * N_CTX, [7] * 12 + [6], [64, 26], [16, 16, 58]])
def test_context_may_come_in_any_pieces(files: tuple[Path, Path], pieces: list[int]) -> None:
    (whole, one), (parts, two) = load(*files), load(*files)
    feed(whole, one, 0, TOKENS[:N_CTX])
    at = 0
    for n in pieces:
        feed(parts, two, 0, TOKENS[at : at + n])
        at += n
    assert at == N_CTX
    rows = whole.table.rows(whole.table.slots[0], 0, N_CTX), parts.table.rows(parts.table.slots[0], 0, N_CTX)
    for a, b in zip(one.net.memory.kv.values(), two.net.memory.kv.values(), strict=True):
        assert (a.k[rows[0]] - b.k[rows[1]]).abs().max() < 1e-4
        assert (a.v[rows[0]] - b.v[rows[1]]).abs().max() < 1e-4
    want, got = block_logits(whole, one, 0, 5), block_logits(parts, two, 0, 5)
    assert (want - got).abs().max() < 1e-3


def test_refused_rows_and_old_blocks_leave_no_trace(files: tuple[Path, Path]) -> None:
    (plain, one), (spec, two) = load(*files), load(*files)
    feed(plain, one, 0, TOKENS[:60])
    feed(spec, two, 0, TOKENS[:20])
    at = 20
    for kept in (1, 3, 5, 1, 7, 3, 4, 8, 2, 6):
        block_logits(spec, two, 0, TOKENS[at])  # writes its rows beyond the committed ones
        wrong = [(t + 1) % 256 for t in TOKENS[at + kept : at + 8]]
        feed(spec, two, 0, TOKENS[at : at + kept] + wrong, kept=kept, keep=False)
        at += kept
    assert at == 60
    assert (block_logits(plain, one, 0, 9) - block_logits(spec, two, 0, 9)).abs().max() < 1e-3


def test_slots_draft_the_same_together_as_alone(files: tuple[Path, Path]) -> None:
    """Ragged, any order, some without a draft; a shorter draft is the beginning of the longer one."""
    bench, drafter = load(*files, n_slot=4)
    for i, n in enumerate((40, 3, 17, 64)):
        feed(bench, drafter, i, TOKENS[i : i + n])
    slots = bench.table.slots
    alone = [drafter.draft([Ask(slots[i], 10 + i, 7)])[0] for i in range(4)]
    assert all(len(d) == 7 for d in alone)
    for ks in ((7, 7, 7, 7), (0, 7, 1, 3), (5, 0, 0, 2), (0, 0, 0, 0)):
        for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
            drafts = drafter.draft([Ask(slots[i], 10 + i, ks[i]) for i in order])
            assert drafts == [alone[i][: ks[i]] for i in order]


FORK = {"fc.weight": "dflash_fc.weight", "enc.output_norm.weight": "dflash_hidden_norm.weight"}


def test_the_forks_file_of_the_same_weights_drafts_the_same(files: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = files
    m = open_gguf(draft).metadata
    a = "dflash-draft"
    change = {
        f"{a}.block_size": None,
        f"{a}.target_layers": None,
        "tokenizer.ggml.mask_token_id": None,
        f"{a}.dflash.block_size": m["dflash.block_size"],
        f"{a}.dflash.target_layer_ids": [int(x) - 1 for x in m["dflash.target_layers"]],  # type: ignore[attr-defined]
        f"{a}.dflash.mask_token_id": m["tokenizer.ggml.mask_token_id"],
        f"{a}.attention.causal": False,
    }
    rename = lambda name: FORK.get(name, name.replace("ffn_norm", "post_attention_norm"))  # noqa: E731
    fork = rewrite(draft, tmp_path / "fork.gguf", arch=a, change=change, rename=rename)
    (b1, upstream), (b2, forked) = load(target, draft), load(target, fork)
    assert upstream.net.c == replace(forked.net.c, alias=upstream.net.c.alias)
    for bench, drafter in ((b1, upstream), (b2, forked)):
        feed(bench, drafter, 0, TOKENS[:50])
    assert torch.equal(block_logits(b1, upstream, 0, 5), block_logits(b2, forked, 0, 5))


def test_uncertain_drafts_are_cut(files: tuple[Path, Path]) -> None:
    bench, drafter = load(*files)
    feed(bench, drafter, 0, TOKENS[:40])
    sure = block_logits(bench, drafter, 0, 7).softmax(-1).amax(-1)[1:]
    whole = drafter.draft([Ask(bench.table.slots[0], 7, 7)])[0]
    drafter.p_min = float(sure.sort().values[3])
    cut = drafter.draft([Ask(bench.table.slots[0], 7, 7)])[0]
    assert cut == whole[: int((sure < drafter.p_min).nonzero()[0])]


def test_shifted_taps_are_noticed_at_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "BUDGET_S", 60.0)  # looked at however slow this machine is just now
    taps = [int(x) for x in open_gguf(DEMO_DRAFT).metadata["dflash.target_layers"]]  # type: ignore[attr-defined]
    shifted = rewrite(DEMO_DRAFT, tmp_path / "s.gguf", change={"dflash.target_layers": [t - 1 for t in taps]})
    for path, warned in ((DEMO_DRAFT, False), (shifted, True)):
        caplog.clear()
        rig(DEMO, draft_path=path, warm_up=True)
        assert ("taps look shifted" in caplog.text) == warned


def test_the_demo_drafter_is_mostly_right() -> None:
    """Right context in the right place: a misplaced row would show here first."""
    r = rig(DEMO, draft_path=DEMO_DRAFT, n_draft_max=4, n_draft_fixed=True)
    t = [r.generate(p, 60, replace(GREEDY, ignore_eos=False)).timings for p, _ in demo_prompts()[:6]]
    assert sum(x.accepted_per_pos[0] for x in t) > 0.6 * sum(x.drafted_per_pos[0] for x in t)
