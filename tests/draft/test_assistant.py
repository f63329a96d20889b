"""gemma4-assistant: its layers' numbers are llama.cpp's, drafts are those of a reference over the target's keys, and the text is the target's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_rig import FIXTURES, Rig, rig
from harness import Bench
from known_texts import N_TEXT, known_texts
from rewrite import rewrite

from pyspec.config import EngineSettings
from pyspec.draft import assistant
from pyspec.draft.assistant import Assistant, AssistantBlock, read_assistant
from pyspec.draft.drafter import TargetFile
from pyspec.errors import BadTensors, ConfigError, PairError
from pyspec.gguf import open_gguf
from pyspec.models import read_config
from pyspec.models.decoder import Decoder
from pyspec.models.weights import Weights
from pyspec.slots.batch import Seq, lay_out

TARGET, ASSISTANT = FIXTURES / "gemma4-e.gguf", FIXTURES / "gemma4-assistant.gguf"
READS = (1, 2)  # layers whose keys its first and its second layer read: the last with keys of their own
WINDOW, EPS = 8, 1e-6


def test_two_steps_give_the_numbers_of_llama_cpp() -> None:
    """llama.cpp's gelu is a table of f16."""
    want, bench = np.load(FIXTURES / "gemma4-assistant.npz"), Bench(TARGET)
    target, tokens = bench.target, want["tokens"].tolist()
    bench.feed(0, tokens)
    assert isinstance(target, Decoder)
    file = open_gguf(ASSISTANT)
    block = AssistantBlock(
        read_assistant(file, target.config), Weights(file, target.device, torch.float32), target
    )
    token, hidden = int(want["anchor"]), torch.from_numpy(want["h"])[None]
    for logits, state in zip(want["logits"], want["states"], strict=True):
        batch = lay_out(bench.table, [Seq(0, len(tokens), [token])], target.device, sees_own=False)
        found, out = block.forward(batch, hidden), torch.zeros(1, dtype=torch.int64)
        assert np.abs(block.propose(found, out).numpy() - logits).max() < 1e-2
        hidden, token = block.next_of(found), int(out)
        assert np.abs(hidden.numpy() - state).max() < 1e-2 and token == logits.argmax()


class Reference:
    """Drafts behind tokens, in f64, from the keys and values that the target has of them."""

    def __init__(self) -> None:
        file = open_gguf(ASSISTANT)
        self.w = {
            name: file.raw(name).view("<f4").reshape(info.shape).astype(float)
            for name, info in file.tensors.items()
        }

    def rms(self, x: np.ndarray, weight: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * self.w[weight + ".weight"]

    def turned(self, q: np.ndarray, at: int, near: bool) -> np.ndarray:
        half = q.shape[-1] // 2
        theta = at * (1e4 if near else 1e6) ** (-np.arange(half) / half)
        theta = theta if near else theta / self.w["rope_freqs.weight"]
        a, b, c, s = q[:, :half], q[:, half:], np.cos(theta), np.sin(theta)
        return np.concatenate([a * c - b * s, a * s + b * c], -1)

    def layer(self, i: int, z: np.ndarray, at: int, kv: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        p, w, near = f"blk.{i}", self.w, i == 0
        k, v = (x[max(0, at - WINDOW + 1) if near else 0 : at, 0] for x in kv)
        q = (w[f"{p}.attn_q.weight"] @ self.rms(z, f"{p}.attn_norm")).reshape(-1, k.shape[-1])
        s = self.turned(self.rms(q, f"{p}.attn_q_norm"), at, near) @ k.T
        s = np.exp(s - s.max(-1, keepdims=True))
        o = w[f"{p}.attn_output.weight"] @ (s / s.sum(-1, keepdims=True) @ v).reshape(-1)
        z = z + self.rms(o, f"{p}.post_attention_norm")
        n = self.rms(z, f"{p}.ffn_norm")
        g, u = (w[f"{p}.ffn_{x}.weight"] @ n for x in ("gate", "up"))
        g = g / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (g + 0.044715 * g**3)))
        z = z + self.rms(w[f"{p}.ffn_down.weight"] @ (g * u), f"{p}.post_ffw_norm")
        return z * w[f"{p}.layer_output_scale.weight"]

    def draft(self, tokens: Sequence[int], n: int) -> list[int]:
        """Behind `tokens`, the last of which is the anchor."""
        bench, found = Bench(TARGET), list[int]()
        at, token = len(tokens) - 1, tokens[-1]
        seq = bench.seq(0, list(tokens[:-1]))
        h = bench.forward(seq).hidden[-1].double().numpy()
        rows = torch.from_numpy(
            bench.table.rows_of(
                [bench.table.reach(bench.table.slots[0], 0, at)], np.array([at]), np.arange(at)
            )
        )
        read = [
            [x.double().numpy() for x in bench.memory.kv[i].read(rows, torch.float32)] for i in READS
        ]
        for _ in range(n):
            e = bench.target.embed(torch.tensor([token]))[0].double().numpy()
            z = self.w["nextn.pre_projection.weight"] @ np.concatenate([e, h])
            for i, kv in enumerate(read):
                z = self.layer(i, z, at, (kv[0], kv[1]))
            y = self.rms(z, "output_norm")
            token = int((self.w["token_embd.weight"] @ y).argmax())
            h = self.w["nextn.post_projection.weight"] @ y
            found.append(token)
        return found


@cache
def reference() -> Reference:
    return Reference()


def drafted(**settings: object) -> Rig:
    return rig(TARGET, **({"draft_path": ASSISTANT, "n_draft_fixed": True, "n_draft_max": 4} | settings))


def test_drafts_made_ahead_are_those_of_the_host() -> None:
    """The device goes on from the rows that a verify keeps: the same drafts, so as many are right."""
    prompt, text = next(iter(known_texts(TARGET).items()))
    counts = []
    for is_ahead in (False, True):
        r = drafted(np=1)
        r.loop.lookahead.on = is_ahead
        h = r.generate(prompt, N_TEXT)
        assert h.tokens == text
        counts.append(h.timings.draft_n_accepted / max(1, h.timings.draft_n))
    assert abs(counts[0] - counts[1]) < 0.05


def test_flags_that_change_the_targets_ropes_change_its_own() -> None:
    """Its queries meet keys that these have turned."""
    r = drafted(rope_freq_base=5e5, rope_scale=2.0)
    drafter, target = r.loop.drafter, r.loop.worker.target
    assert isinstance(drafter, Assistant) and isinstance(target, Decoder)
    assert drafter.own.ropes.bound.keys() == target.ropes.bound.keys()
    assert {rope.base for rope in target.ropes.bound} == {1e4, 5e5}


def plan(target: Path, settings: EngineSettings) -> object:
    file = open_gguf(target)
    return assistant.plan(open_gguf(ASSISTANT), TargetFile(file, read_config(file)), settings)


def test_it_drafts_for_gemma4_alone_and_on_one_rank(tmp_path: Path) -> None:
    with pytest.raises(PairError, match="drafts for gemma4; the target is gemma3"):
        plan(FIXTURES / "gemma3.gguf", EngineSettings())
    with pytest.raises(ConfigError, match="--spec-type assistant needs a draft file"):
        rig(TARGET, spec_type="assistant")
    with pytest.raises(PairError, match="each of --tp 2 ranks has some of them only"):
        plan(TARGET, EngineSettings(tp=2))
    dropped = rewrite(
        ASSISTANT, tmp_path / "a.gguf", drop=lambda name: name == "blk.1.layer_output_scale.weight"
    )
    with pytest.raises(BadTensors, match=r"blk\.1\.layer_output_scale\.weight: missing"):
        rig(TARGET, draft_path=dropped)
