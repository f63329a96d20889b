"""step35 with three MTP blocks: draft k is by block k, against the formulas in f64 as llama.cpp chains them; and texts that are those of the trunk.

For draft k llama.cpp computes block k anew over all rows: the text's, with the trunk's hidden states, then the anchor's and those of the drafts
before, with the hidden states that the blocks before made.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_rig import plain_rig, rig
from harness import FIXTURES, Bench
from rewrite import rewrite
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softmax

from pyspec.draft.chain import Chain
from pyspec.gguf import GGUFFile, open_gguf
from pyspec.models.mtp_block import MtpBlock
from pyspec.slots.batch import lay_out
from pyspec.slots.drafts import DraftRequest, Drafts

CPU = torch.device("cpu")
STEP = FIXTURES / "step35.gguf"
N_LAYER, N, DIM, N_FF = 5, 32, 16, 32
HEADS, KEYS, NEAR = (4, 6, 4), (2, 2, 1), (True, False, True)  # of the MTP blocks
LIMITS = (0.0, 0.7, 0.3)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fixture with three dense MTP blocks; the second one sees the whole text, and the third has an embedding and a head of its own."""
    rng, new = np.random.default_rng(5), {}

    def matrix(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape) / shape[-1] ** 0.5

    with open_gguf(STEP) as file:
        n_vocab = file.tensors["output.weight"].shape[0]
        keys = {
            "step35.block_count": N_LAYER + 3,
            "step35.nextn_predict_layers": 3,
            "step35.attention.sliding_window_pattern": [*_row(file, "attention.sliding_window_pattern"), *NEAR],
            "step35.attention.head_count": [*_row(file, "attention.head_count"), *HEADS],
            "step35.attention.head_count_kv": [*_row(file, "attention.head_count_kv"), *KEYS],
            "step35.swiglu_clamp_exp": [*_row(file, "swiglu_clamp_exp"), 0.0, 0.0, 0.0],
            "step35.swiglu_clamp_shexp": [*_row(file, "swiglu_clamp_shexp"), *LIMITS],
        }  # fmt: skip
    for i, (n_head, n_key) in enumerate(zip(HEADS, KEYS, strict=True)):
        p = f"blk.{N_LAYER + i}"
        norms = {"attn_norm": N, "ffn_norm": N, "attn_q_norm": DIM, "attn_k_norm": DIM}
        norms |= {f"nextn.{x}": N for x in ("enorm", "hnorm", "shared_head_norm")}
        new |= {f"{p}.{x}.weight": 1 + 0.2 * rng.standard_normal(n) for x, n in norms.items()}
        shapes = {
            "attn_q": (n_head * DIM, N),
            "attn_k": (n_key * DIM, N),
            "attn_v": (n_key * DIM, N),
            "attn_output": (N, n_head * DIM),
            "attn_gate": (n_head, N),
            "ffn_gate": (N_FF, N),
            "ffn_up": (N_FF, N),
            "ffn_down": (N, N_FF),
            "nextn.eh_proj": (N, 2 * N),
        }
        new |= {f"{p}.{x}.weight": matrix(*shape) for x, shape in shapes.items()}
    new[f"{p}.nextn.embed_tokens.weight"] = N**0.5 * matrix(n_vocab, N)
    new[f"{p}.nextn.shared_head_head.weight"] = matrix(n_vocab, N)
    return rewrite(STEP, tmp_path_factory.mktemp("heads") / "m.gguf", change=keys, add=new)


def _row(file: GGUFFile, name: str) -> list[object]:
    row: list[object] = file.metadata[f"step35.{name}"].tolist()
    return row


class Formulas:
    """MTP blocks of the file in f64, without a cache."""

    def __init__(self, path: Path) -> None:
        with open_gguf(path) as file:
            self.w = {
                name: torch.from_numpy(file.raw(name).view("<f4").reshape(info.shape).astype(np.float64))
                for name, info in file.tensors.items()
                if name.startswith(tuple(f"blk.{N_LAYER + i}." for i in range(3))) or "blk." not in name
            }
            h = file.hparams
            self.window, self.eps = (
                h.integer("attention.sliding_window"),
                h.number("attention.layer_norm_rms_epsilon"),
            )
            self.bases = h.number("rope.freq_base"), h.number("rope.freq_base_swa")

    def turned(self, x: Tensor, *, near: bool) -> Tensor:
        n_rot = DIM if near else DIM // 2
        freq = self.bases[near] ** (-torch.arange(0, n_rot, 2, dtype=torch.float64) / n_rot)
        if not near:
            freq = freq / self.w["rope_freqs.weight"][: n_rot // 2]
        at = torch.arange(len(x), dtype=torch.float64)[:, None, None] * freq
        a, b, rest = x.split([n_rot // 2, n_rot // 2, DIM - n_rot], -1)
        return torch.cat((a * at.cos() - b * at.sin(), a * at.sin() + b * at.cos(), rest), -1)

    def normed(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.eps)

    def block(self, i: int, tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden state behind the last row [N], and its logits."""
        p, near, n_row = f"blk.{N_LAYER + i}", NEAR[i], len(tokens)
        w = {x.removeprefix(f"{p}.").removesuffix(".weight"): y for x, y in self.w.items() if p in x}
        table = w.get("nextn.embed_tokens", self.w["token_embd.weight"])
        e, h = self.normed(table[tokens], f"{p}.nextn.enorm"), self.normed(hidden, f"{p}.nextn.hnorm")
        x = torch.cat((e, h), -1) @ w["nextn.eh_proj"].T
        n = self.normed(x, f"{p}.attn_norm")
        q, k, v = ((n @ w[f"attn_{c}"].T).view(n_row, -1, DIM) for c in "qkv")
        q, k = (
            self.turned(self.normed(y, f"{p}.attn_{c}_norm"), near=near) for y, c in ((q, "q"), (k, "k"))
        )
        k, v = (y.repeat_interleave(HEADS[i] // KEYS[i], 1) for y in (k, v))
        back = torch.arange(n_row)[:, None] - torch.arange(n_row)
        unseen = (back < 0) | ((back >= self.window) if near else False)
        scores = torch.einsum("thd,uhd->htu", q, k) * DIM**-0.5
        o = torch.einsum("htu,uhd->thd", softmax(scores.masked_fill(unseen, -torch.inf), -1), v)
        o = o * (n @ w["attn_gate"].T).sigmoid()[..., None]
        x = x + o.flatten(1) @ w["attn_output"].T
        n = self.normed(x, f"{p}.ffn_norm")
        gate, up = silu(n @ w["ffn_gate"].T), n @ w["ffn_up"].T
        if limit := LIMITS[i]:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        x = x + (gate * up) @ w["ffn_down"].T
        head = w.get("nextn.shared_head_head", self.w["output.weight"])
        return x[-1], self.normed(x[-1], f"{p}.nextn.shared_head_norm") @ head.T

    def drafts(self, text: list[int], hidden: Tensor, anchor: int, n: int) -> list[tuple[Tensor, int]]:
        """Hidden state and token of each draft. hidden [row, N]: the trunk's, of the text's rows."""
        tokens, before = [*text, anchor], torch.cat((torch.zeros(1, N, dtype=torch.float64), hidden))
        made = []
        for i in range(n):
            state, logits = self.block(min(i, 2), tokens, before)
            made.append((state, int(logits.argmax())))
            tokens, before = [*tokens, made[-1][1]], torch.cat((before, state[None]))
        return made


@pytest.mark.parametrize("n_row", [1, 7, 40])
def test_each_block_makes_its_draft_of_the_states_before(n_row: int, three: Path) -> None:
    bench = Bench(three, n_slot=2)
    drafter = bench.drafter("mtp", n_draft=3)
    assert isinstance(drafter, Chain) and len(drafter._steps) == 2
    text = np.random.default_rng(n_row).integers(0, bench.target.n_vocab, n_row).tolist()
    slot = bench.table.slots[1]
    drafter.begin(slot, None)
    pieces, hidden = [text[:5], text[5:6], text[6:]], []
    for tokens in filter(
        None, pieces
    ):  # keys of all blocks are made of rows that wait, and of late ones
        seq = bench.seq(1, tokens)
        batch = lay_out(bench.table, [seq], CPU)
        out = bench.target.forward(batch)
        hidden.append(out.hidden.double())
        drafter.observe(batch, [len(tokens)], out)
        bench.commit(seq, len(tokens))
    want = Formulas(three).drafts(text, torch.cat(hidden), 17, 3)
    for n in (3, 1, 2, 3):  # a draft that was not verified is made again
        (got,) = drafter.draft([DraftRequest(slot, 17, n)])
        assert list(got.tokens) == [token for _, token in want[:n]]
        assert (drafter.hidden[0] - want[n - 1][0]).abs().max() < 1e-4
    assert len({token for _, token in want}) > 1


def test_behind_the_last_block_it_goes_on_from_itself(three: Path) -> None:
    bench = Bench(three)
    drafter = bench.drafter("mtp", n_draft=5)
    assert isinstance(drafter, Chain)
    slot, text = bench.table.slots[0], [3, 1, 4, 1, 5, 9, 2, 6]
    drafter.begin(slot, None)
    seq = bench.seq(0, text)
    batch = lay_out(bench.table, [seq], CPU)
    out = bench.target.forward(batch)
    drafter.observe(batch, [len(text)], out)
    bench.commit(seq, len(text))
    (got,) = drafter.draft([DraftRequest(slot, 5, 5)])
    block = drafter.block
    assert isinstance(block, MtpBlock) and len(block.behind) == 2
    # rows of the third block: those that each pass gave it
    want = Formulas(three).drafts(text, out.hidden.double(), 5, 3)
    assert list(got.tokens[:3]) == [token for _, token in want] and len(got.tokens) == 5


def test_a_file_with_the_first_block_alone_drafts_with_it(three: Path, tmp_path: Path) -> None:
    cut = tuple(f"blk.{N_LAYER + i}." for i in (1, 2))
    path = rewrite(three, tmp_path / "one.gguf", drop=lambda name: name.startswith(cut))
    want = plain_rig(three).generate([5, 9, 2, 40, 7], 30).tokens
    r = rig(path, spec_type="mtp", n_draft_max=3, n_draft_fixed=True)
    assert isinstance(r.loop.drafter, Chain) and isinstance(r.loop.drafter.block, MtpBlock)
    assert not r.loop.drafter.block.behind
    h = r.generate([5, 9, 2, 40, 7], 30)
    assert h.tokens == want and h.timings.draft_n > 0


@pytest.mark.parametrize("np_", [1, 7])
@pytest.mark.parametrize("n_draft", [3, 5])
def test_texts_are_those_of_the_trunk(np_: int, n_draft: int, three: Path) -> None:
    """Twice, so that the second half of them goes on from the prefix cache; more of them than slots."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 256, n).tolist() for n in (1, 4, 17, 33, 50, 9, 26, 64)]
    plain = plain_rig(three)
    want = [plain.generate(prompt, 24).tokens for prompt in prompts]
    r = rig(three, np=np_, ubatch=24, spec_type="mtp", n_draft_max=n_draft, n_draft_fixed=True)
    for _ in range(2):
        heard = r.all(prompts, 24)
        assert [h.tokens for h in heard] == want
    assert sum(h.timings.draft_n for h in heard) > 100


@pytest.mark.parametrize("n_draft", [2, 5])
def test_after_kept_and_refused_drafts_the_keys_of_all_blocks_are_those_of_one_forward(
    n_draft: int, three: Path
) -> None:
    """Drafts of one slot are right but for every fifth token, those of the others are the blocks' own."""
    rng, np_ = np.random.default_rng(9), 3
    prompts = [rng.integers(0, 256, n).tolist() for n in (5, 90, 33)]
    plain = plain_rig(three)
    want = [plain.generate(prompt, 40).tokens for prompt in prompts]
    r = rig(three, np=np_, ubatch=40, spec_type="mtp", n_draft_max=n_draft, n_draft_fixed=True)
    drafter = r.loop.drafter
    assert isinstance(drafter, Chain)
    own, whole = drafter.draft, [[*p, *text] for p, text in zip(prompts, want, strict=True)]

    def draft(requests: Sequence[DraftRequest]) -> list[Drafts]:
        made = own(requests)
        for i, ask in enumerate(requests):
            at = ask.slot.n_past + 1
            if ask.slot.index == 0 and at % 5:
                made[i] = Drafts(whole[0][at : at + ask.n_draft])
        return made

    drafter.draft = draft  # type: ignore[method-assign]
    heard = [r.submit(prompt, 40, slot=i) for i, prompt in enumerate(prompts)]
    r.run()
    assert [h.tokens for h in heard] == want and heard[0].timings.draft_n_accepted > 10
    for h in heard:
        tokens = [*h.request.prompt, *h.tokens][:-1]
        rows = torch.tensor(r.filed(tokens))
        bench = Bench(three)
        other = bench.drafter("mtp", n_draft=n_draft)
        assert isinstance(other, Chain)
        batch = lay_out(bench.table, [bench.seq(0, tokens)], CPU)
        hidden = bench.target.forward(batch).hidden
        other.block.forward(batch, torch.cat((torch.zeros_like(hidden[:1]), hidden[:-1])))
        at = torch.tensor(bench.table.rows(bench.table.slots[0], 0, len(tokens)))
        pools = zip(drafter.memory.kv.values(), other.memory.kv.values(), strict=True)
        found = [(p.k[rows] - q.k[at]).abs().max() for p, q in pools]
        assert (
            len(found) == min(n_draft, 3) and max(found) < 1e-4
        )  # blocks behind the last draft are not loaded


def test_a_request_that_gives_up_its_slot_goes_on_with_its_text(three: Path) -> None:
    """Two long prompts hold both slots, and short ones wait."""
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 256, n).tolist() for n in (160, 150, 5, 3, 9)]
    plain = plain_rig(three)
    want = [plain.generate(prompt, 12).tokens for prompt in prompts]
    r = rig(three, np=2, ubatch=16, spec_type="mtp", n_draft_max=3, n_draft_fixed=True)
    heard = [r.submit(prompt, 12) for prompt in prompts[:2]]
    r.steps(3)
    heard += [r.submit(prompt, 12) for prompt in prompts[2:]]
    r.run()
    assert [h.tokens for h in heard] == want
