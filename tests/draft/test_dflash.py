"""DFlash: blocks against a dense reference, context in any pieces and put off, both spellings of the file."""

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
from plans import fix_lengths, timed
from rewrite import rewrite
from sampling import few

from pyspec import synth
from pyspec.device.capture import capture
from pyspec.draft.dflash import N_HELD, DFlash
from pyspec.engine.load import warmup
from pyspec.engine.loop.loop import Loop
from pyspec.engine.policy import plan
from pyspec.engine.policy.estimate import CURVE_AT_FIRST
from pyspec.errors import SlotError
from pyspec.gguf import open_gguf
from pyspec.models.target import Out
from pyspec.models.weights import Weights
from pyspec.slots.arena import BUCKETS, Arena
from pyspec.slots.batch import Batch, Seq, lay_out
from pyspec.slots.drafts import DraftRequest

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
    drafter = bench.drafter("dflash", draft, n_draft=7)
    assert isinstance(drafter, DFlash)
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
    out = bench.target.forward(batch, drafter.plan.taps)
    drafter.absorb(batch, out)
    drafter.observe(batch, [kept], out)
    bench.commit(seq, kept)
    assert out.taps is not None
    return out.taps


def block_logits(bench: Bench, drafter: DFlash, slot: int, anchor: int) -> torch.Tensor:
    drafter.catch_up()
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
    n_head, n_kv = int(get("attention.head_count")), int(get("attention.head_count_kv"))
    dim = int(get("attention.key_length"))
    block, mask_id = int(get("block_size")), int(m["tokenizer.ggml.mask_token_id"])
    norm = lambda x, weight: x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight  # noqa: E731
    c = norm(taps.double() @ t("fc.weight").T, t("enc.output_norm.weight"))
    x = (
        Weights(bench.file, CPU, torch.float32)
        .vector("token_embd.weight")
        .double()[[anchor, *[mask_id] * (block - 1)]]
    )
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
            + (F.silu(f @ t(f"{p}.ffn_gate.weight").T) * (f @ t(f"{p}.ffn_up.weight").T))
            @ t(f"{p}.ffn_down.weight").T
        )
    y = norm(x, t("output_norm.weight"))
    head = (
        t("output.weight").T
        if "output.weight" in file.tensors
        else bench.target.output.weight.double().T
    )
    return y @ head


@pytest.mark.sampled(1)
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
def test_sinks_take_their_share_of_the_weights(
    files: tuple[Path, Path], tmp_path: Path, n_context: int
) -> None:
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
    two.catch_up()
    rows = (
        whole.table.rows(whole.table.slots[0], 0, N_CTX),
        parts.table.rows(parts.table.slots[0], 0, N_CTX),
    )
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
    alone = [drafter.draft([DraftRequest(slots[i], 10 + i, 7)])[0].tokens for i in range(4)]
    assert all(len(d) == 7 for d in alone)
    for ks in ((7, 7, 7, 7), (0, 7, 1, 3), (5, 0, 0, 2), (0, 0, 0, 0)):
        for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
            drafts = drafter.draft([DraftRequest(slots[i], 10 + i, ks[i]) for i in order])
            assert [list(d.tokens) for d in drafts] == [alone[i][: ks[i]] for i in order]


class Rounds:
    """Random rounds over a few slots, the same for every drafter: what it drafts, and the context a request leaves."""

    def __init__(self, bench: Bench, drafter: DFlash, *, late: bool, seed: int) -> None:
        self.bench, self.drafter, self.rng = bench, drafter, random.Random(seed)
        drafter.plan = replace(drafter.plan, n_held=len(drafter.held) * late)
        self.busy = {slot.index for slot in bench.table.slots}
        self.drafts: list[list[int]] = []
        self.left: list[torch.Tensor] = []
        self.most = 0

    def run(self, n_round: int) -> None:
        for i in range(n_round):  # long silences, and stretches in which nearly everybody drafts
            self._round((0.0, 0.0, 0.05, 0.8)[i // 25 % 4])
            self.most = max(self.most, self.drafter.n_held)

    def _round(self, mood: float) -> None:
        rng, slots = self.rng, self.bench.table.slots
        for i in sorted(self.busy):
            if slots[i].n_past > 150 or rng.random() < 0.01:
                self._end(i)
        joins = [slot.index for slot in slots if slot.index not in self.busy and rng.random() < 0.1]
        for i in joins:
            self.bench.table.acquire(slots[i], 256)
            self.bench.memory.reset(i)
            self.drafter.begin(slots[i], None)
            self.busy.add(i)
        anchors = {i: rng.randrange(256) for i in sorted(self.busy)}
        wants = {
            i: rng.choice((0, 1, 3, 7)) if rng.random() < mood else 0 for i in anchors if slots[i].n_past
        }
        asks = [DraftRequest(slots[i], anchors[i], n) for i, n in wants.items()]
        found = zip(wants, self.drafter.draft(asks), strict=True) if any(wants.values()) else ()
        drafts = {i: list(draft.tokens) for i, draft in found}
        self.drafts += drafts.values()
        seqs, kept = [], []
        for i in anchors:
            prompt = rng.choices(range(256), k=rng.choice((1, 5, 40)))
            if slots[i].n_past == 0:
                seqs.append(self.bench.seq(i, prompt))
            else:
                draft = drafts.get(i, [])
                seqs.append(self.bench.seq(i, [anchors[i], *draft], keep=not draft))
            kept.append(seqs[-1].width if seqs[-1].keep else rng.randint(1, seqs[-1].width))
        if not seqs:
            return
        batch = lay_out(self.bench.table, seqs, CPU)
        out = self.bench.target.forward(batch, self.drafter.plan.taps)
        self.drafter.absorb(batch, out)
        if rng.random() < 0.05:
            return  # the forward failed after all: its rows are laid out again
        self.drafter.observe(batch, kept, out)
        assert out.taps is not None
        with torch.inference_mode():
            out.taps.fill_(float("nan"))  # as the next replay overwrites them
        for seq, n in zip(seqs, kept, strict=True):
            self.bench.commit(seq, n)

    def _end(self, i: int) -> None:
        """A finished request files its pages; a cancelled or failed one may not."""
        slot, table = self.bench.table.slots[i], self.bench.table
        if self.rng.random() < 0.6:
            self.drafter.checkpoint(slot)
            rows = torch.tensor(table.rows(slot, 0, slot.n_past), dtype=torch.int64)
            self.left += [
                t for p in self.drafter.pools() for t in (p.k[rows].clone(), p.v[rows].clone())
            ]
        self.drafter.end(slot)
        assert not self.drafter.late[i]
        table.release(slot)
        self.busy.discard(i)


@pytest.mark.slow
@pytest.mark.parametrize("seed", few(range(4), 0))
def test_context_that_was_put_off_drafts_the_same(files: tuple[Path, Path], seed: int) -> None:
    """Random acceptance, silences, joins, leaves and failed rounds, with and without putting off."""
    late, prompt = (Rounds(*load(*files, n_slot=4), late=x, seed=seed) for x in (True, False))
    for r in (late, prompt):
        r.run(300)
    assert late.drafts == prompt.drafts and sum(map(len, late.drafts)) > 100
    assert len(late.left) == len(prompt.left) > 0
    for a, b in zip(late.left, prompt.left, strict=True):
        assert (a - b).abs().max() < 1e-4
    assert prompt.most == 0 and N_HELD // 2 < late.most <= N_HELD


def test_silent_rounds_cost_the_drafter_no_pass(files: tuple[Path, Path]) -> None:
    """One pass makes the context of all slots' held rounds; what is held never outgrows its place."""
    bench, drafter = load(*files, n_slot=2)
    passes: list[int] = []
    inject = drafter.net.inject

    def watch(taps: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> None:
        passes.append(len(rows))
        inject(taps, rows, positions)

    drafter.net.inject = watch  # type: ignore[method-assign]
    for t in range(200):
        batch = lay_out(bench.table, [bench.seq(i, [t]) for i in (0, 1)], CPU)
        out = bench.target.forward(batch, drafter.plan.taps)
        drafter.absorb(batch, out)
        drafter.observe(batch, [1, 1], out)
        for seq in batch.seqs:
            bench.commit(seq, 1)
    assert set(passes) == {N_HELD} and len(passes) == 400 // N_HELD
    held = drafter.held.shape[0]
    drafter.draft([DraftRequest(bench.table.slots[0], 7, 3)])
    assert passes[-1] == 400 % N_HELD and drafter.n_held == 0 and drafter.held.shape[0] == held == N_HELD


def test_a_new_request_takes_nothing_of_the_slots_last_one(files: tuple[Path, Path]) -> None:
    bench, drafter = load(*files, n_slot=2)
    for i in (0, 1):
        feed(bench, drafter, i, TOKENS[:20])
        for t in TOKENS[20:25]:
            feed(bench, drafter, i, [t])
    want = block_logits(bench, drafter, 1, 5)
    feed(bench, drafter, 0, [9])
    drafter.end(bench.table.slots[0])
    assert drafter.n_held == 0, "nobody's taps are held"
    bench.table.release(bench.table.slots[0])
    bench.table.acquire(bench.table.slots[0], 64)
    bench.memory.reset(0)
    drafter.begin(bench.table.slots[0], None)
    feed(bench, drafter, 0, TOKENS[:25])
    assert (block_logits(bench, drafter, 0, 5) - want).abs().max() < 1e-3


def replay(loop: Loop, drafter: DFlash) -> None:
    """As on a GPU: batches lie in arenas, and what a graph's first one had on the host stands for all that follow."""
    n_slot = len(loop.table.slots)
    make_arena = lambda: Arena(n_slot, loop.table.n_page, CPU)  # noqa: E731
    loop.worker.arena = make_arena()
    drafter.use_graphs(make_arena)
    forward, inject = loop.worker.forward, drafter.inject
    seen: dict[tuple[int | None, bool], bool] = {}
    first: dict[int | None, Batch] = {}

    def forward_again(batch: Batch) -> Out:
        single = seen.setdefault((batch.bucket, forward.by_single and batch.single), batch.single)
        return forward.fn(replace(batch, single=single if batch.bucket is not None else batch.single))

    def inject_again(batch: Batch) -> None:
        assert batch.bucket is not None
        inject.fn(first.setdefault(batch.bucket, batch))

    forward_again.seal, inject_again.seal = forward.seal, inject.seal  # type: ignore[attr-defined]
    loop.worker.forward, drafter.inject = forward_again, inject_again  # type: ignore[assignment]
    capture(loop.worker, loop.limits.prompts)
    assert len(seen) > 10 and len(first) == len(BUCKETS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", few(["qwen3", "qwen35"], "qwen35"))
def test_requests_draft_the_same_whatever_was_put_off(kind: str) -> None:
    """The whole loop: silence and drafts in turns, prompts after earlier texts, cancels, lost observations."""
    files = tiny(kind), tiny(kind, drafter=True)
    heard, filed = [], []
    for late in ("replayed", "late", ""):
        r = rig(files[0], np=3, draft_path=files[1], page_size=16, ubatch=24)
        drafter, controller, rng = r.loop.drafter, r.loop.controller, random.Random(11)
        assert isinstance(drafter, DFlash)
        drafter.plan = replace(drafter.plan, n_held=len(drafter.held) * bool(late))
        if late == "replayed":
            replay(r.loop, drafter)
        fix_lengths(
            r.loop,
            lambda caps, rng=rng, c=controller: [
                min(cap, rng.choice((1, 7)) if c.n_round // 20 % 3 == 0 and rng.random() < 0.5 else 0)
                for _, cap in caps
            ],
        )
        r.loop.speculator.clock = lambda: (
            0.0
        )  # cuts take no time on it, so their account does not depend on this machine
        asked, observe, n_round = [], drafter.observe, 0

        def lose(*what, observe=observe) -> None:
            nonlocal n_round
            n_round += 1
            if n_round % 90 == 60:  # these slots are deaf from here on, with others beside them
                raise SlotError("the drafter did not listen")
            observe(*what)

        drafter.observe = lose  # type: ignore[method-assign]
        for i in range(30):
            turn = [*asked[i // 2].request.prompt, *asked[i // 2].tokens][:150] if i % 3 == 2 else []
            prompt = turn + TOKENS[: 10 + 7 * (i % 5)] + TOKENS[i : i + i % 3]
            asked.append(r.submit(prompt, 20 + 9 * (i % 7)))
            for _ in range(20):
                controller.n_round += 1
                r.loop.step()
            if i % 6 == 5:
                r.loop.cancel(asked[-1].job)
        r.run()
        heard.append(
            [(h.tokens, h.finish, h.timings.accepted_per_pos, h.timings.draft_n) for h in asked]
        )
        rows = [row for h in asked for row in r.filed([*h.request.prompt, *h.tokens])]
        filed.append([t[rows] for pool in drafter.pools() for t in (pool.k, pool.v)])
        assert r.loop.stats.guard_trips > 3 and sum(h.timings.cache_n for h in asked) > 100
        assert (
            sum(h.timings.draft_n for h in asked) > 200 and not any(drafter.late) and drafter.n_held == 0
        )
    assert heard[0] == heard[1] == heard[2]
    for *late_rows, rows in zip(*filed, strict=True):
        assert len(rows) > 300 and all((x - rows).abs().max() < 1e-4 for x in late_rows)


FORK = {"fc.weight": "dflash_fc.weight", "enc.output_norm.weight": "dflash_hidden_norm.weight"}


def test_the_forks_file_of_the_same_weights_drafts_the_same(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
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
    whole = drafter.draft([DraftRequest(bench.table.slots[0], 7, 7)])[0].tokens
    drafter.p_min = float(sure.sort().values[2:4].mean())  # between two, which rounding does not cross
    cut = drafter.draft([DraftRequest(bench.table.slots[0], 7, 7)])[0].tokens
    assert cut == whole[: int((sure < drafter.p_min).nonzero()[0])]


@pytest.mark.slow
def test_shifted_taps_are_noticed_at_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "BUDGET_S", 60.0)  # looked at however slow this machine is just now
    taps = [int(x) for x in open_gguf(DEMO_DRAFT).metadata["dflash.target_layers"]]  # type: ignore[attr-defined]
    shifted = rewrite(
        DEMO_DRAFT, tmp_path / "s.gguf", change={"dflash.target_layers": [t - 1 for t in taps]}
    )
    for path, warned in ((DEMO_DRAFT, False), (shifted, True)):
        caplog.clear()
        rig(DEMO, draft_path=path, warm_up=True)
        assert ("taps look shifted" in caplog.text) == warned


def test_the_demo_drafter_is_mostly_right() -> None:
    """Right context in the right place: a misplaced row would show here first."""
    r = rig(DEMO, draft_path=DEMO_DRAFT, n_draft_max=4, n_draft_fixed=True)
    t = [r.generate(p, 60, replace(GREEDY, ignore_eos=False)).timings for p, _ in demo_prompts()[:6]]
    assert sum(x.accepted_per_pos[0] for x in t) > 0.6 * sum(x.drafted_per_pos[0] for x in t)


def test_a_slot_with_a_window_drafts_from_its_last_tokens(files: tuple[Path, Path]) -> None:
    """As if the tokens before had other taps; the other slot sees all."""
    bench, drafter = load(*files, n_slot=2)
    for slot in range(2):
        feed(bench, drafter, slot, TOKENS[:N_CTX])
    slots = bench.table.slots
    drafter.set_window(slots[0], 30)

    def firsts() -> list[int]:
        batch = drafter._lay_out(list(slots), [TOKENS[N_CTX]] * 2, 7)
        assert batch.lo.shape[0] == 2 * drafter.net.c.block
        return batch.lo.tolist()

    block = drafter.net.c.block
    assert firsts() == [N_CTX - 30] * block + [0] * block
    own, _ = drafter.draft([DraftRequest(slot, TOKENS[N_CTX], 7) for slot in slots])
    for pool in drafter.pools():  # behind the window's edge nothing is read
        rows = bench.table.rows_of(
            [bench.table.reach(slots[0], 0, N_CTX)], np.array([N_CTX - 30]), np.arange(N_CTX - 30)
        )
        pool.k[torch.from_numpy(np.asarray(rows))] = 1e4
    again, _ = drafter.draft([DraftRequest(slot, TOKENS[N_CTX], 7) for slot in slots])
    assert own.tokens == again.tokens
    drafter.end(slots[0])
    drafter.begin(slots[0], None)
    assert drafter.windows[0] == 0


def test_drafts_tell_how_sure_they_are_if_they_are_asked(files: tuple[Path, Path]) -> None:
    bench, drafter = load(*files)
    feed(bench, drafter, 0, TOKENS[:N_CTX])
    slot = bench.table.slots[0]
    logits = block_logits(bench, drafter, 0, TOKENS[N_CTX])[1:]
    (told,) = drafter.draft([DraftRequest(slot, TOKENS[N_CTX], 5, tells=True)])
    (silent,) = drafter.draft([DraftRequest(slot, TOKENS[N_CTX], 5)])
    assert silent.sure is None and told.tokens == silent.tokens and told.sure is not None
    assert told.sure == pytest.approx(logits.softmax(-1).amax(-1)[:5].tolist(), abs=1e-4)
    assert told.first(2).sure == told.sure[:2]


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("np_", [1, 4])
def test_drafts_that_are_cut_and_windows_that_change_leave_the_text_as_it_is(
    np_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are cut by how sure the drafter is; windows change at every other round."""
    texts = demo_prompts()[:6]
    r = rig(DEMO, spec_type="dflash", draft_path=DEMO_DRAFT, np=np_, ctx=512)
    rng, controller = random.Random(0), r.loop.controller
    timed(r.loop, 10.0, 2.0)
    monkeypatch.setattr(plan, "window", lambda n_past, n_trained: rng.choice((0, 0, 16, 3)))
    lengths, cut = [], controller.cut
    controller.cut = lambda chosen, sure: lengths.append((chosen, found := cut(chosen, sure))) or found  # type: ignore[method-assign, func-returns-value]
    heard = [(r.submit(prompt, 48), text) for prompt, text in texts]
    r.run()
    n = [min(len(text), 48) for _, text in heard]
    assert all(h.tokens[:k] == text[:k] for k, (h, text) in zip(n, heard, strict=True))
    assert any(a != b for a, b in lengths) and (controller.texts.curves != CURVE_AT_FIRST).any()


def test_a_cut_draft_counts_with_the_time_of_the_whole_one() -> None:
    """Else drafts seem to cost what shorter ones cost, or nothing where all were cut."""
    r = rig(DEMO, spec_type="dflash", draft_path=DEMO_DRAFT, ctx=512).call_by_call()
    controller = r.loop.controller
    controller.cut = lambda chosen, sure: [(slot, 0) for slot, _ in chosen]  # type: ignore[method-assign]
    asked, told, take, timed = [], [], controller.take, controller.timed
    controller.take = lambda state, made: asked.append(made.asked) or take(state, made)  # type: ignore[method-assign, func-returns-value]
    controller.timed = lambda *took: told.append(took) or timed(*took)  # type: ignore[method-assign, func-returns-value]
    r.submit(demo_prompts()[0][0], 24)
    r.run()
    drafted = [n for found in asked for _, n in found if n]
    assert drafted and [took[3] for took in told if took[2]] == drafted
    assert all(took[0] == 1 for took in told), "no draft was verified"


def test_behind_its_trained_length_a_drafter_sees_half_of_it_and_slots_show_why() -> None:
    prompt, text = max(demo_prompts(), key=lambda pair: len(pair[1]))
    r = rig(DEMO, spec_type="dflash", draft_path=DEMO_DRAFT, ctx=512)
    assert r.loop.speculator.n_trained == 2048
    r.loop.speculator.n_trained = len(prompt) + 8
    heard = r.submit(prompt, len(text))
    seen = []
    while not heard.over:
        r.loop.step()
        seen += [row for row in r.loop.slot_rows(512) if row.is_processing]
    n = (len(prompt) + 8) // 2
    assert heard.tokens == text and [row.draft_window for row in seen][-1] == n
    assert f"the last {n} tokens" in seen[-1].draft_window_reason
    assert {row.draft_window for row in seen} == {0, n}
