"""EAGLE-3: the layer's numbers are llama.cpp's, drafts are those of a reference over the text's own taps, and the text is the target's."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from eagle_files import LAYERS, eagle_for
from engine_rig import FIXTURES, Rig, plain_rig, rig
from known_texts import N_TEXT, joined, known_texts, tiny

from pyspec import synth
from pyspec.config import EngineSettings
from pyspec.draft.chain import Chain
from pyspec.draft.eagle3 import EagleBlock, read_eagle
from pyspec.engine.plan.describe import describe
from pyspec.engine.plan.planned_bytes import plan_memory
from pyspec.engine.policy.controller import REST_AFTER
from pyspec.errors import ConfigError, PairError
from pyspec.gguf import open_gguf
from pyspec.models.target import Out
from pyspec.models.weights import Weights
from pyspec.slots.batch import Seq, SeqMode, lay_out
from pyspec.slots.kv import KvFormat
from pyspec.slots.memory import allocate
from pyspec.slots.parts import CacheSizes
from pyspec.slots.table import SlotTable

EAGLE = FIXTURES / "eagle3.gguf"


def test_rows_and_taps_give_the_numbers_of_llama_cpp() -> None:
    """Row 0 has no state and is no context: others see the rows that they see in llama.cpp, which has no such row."""
    want, file = np.load(FIXTURES / "eagle3.npz"), open_gguf(EAGLE)
    c, device, table = read_eagle(file), torch.device("cpu"), SlotTable(1, 4, 16)
    memory = allocate(
        [c.attention.memory()],
        CacheSizes(1, table.n_alloc_row, 16, 1, KvFormat.named("f32", None)),
        device,
    )
    target = SimpleNamespace(n_vocab=len(file.fields.strings("tokenizer.ggml.tokens")))
    block = EagleBlock(c, Weights(file, device, torch.float32), memory, target, None)  # type: ignore[arg-type]
    g = block.states_of(Out(torch.empty(0), torch.empty(0), torch.from_numpy(want["features"])))
    assert np.abs(g.numpy() - want["g"]).max() < 1e-4
    table.acquire(table.slots[0], 40)
    tokens = want["tokens"].tolist()
    batch = lay_out(table, [Seq(0, 0, tokens)], device, first_key=block.first_key)
    states = block.forward(batch, torch.cat([torch.full((1, c.n_embd), 3.0), g]))[1:]
    assert np.abs(states.numpy() - want["states"]).max() < 1e-4
    found = torch.zeros(len(states), dtype=torch.int64)
    logits = block.propose(states, found)
    assert np.abs(logits.numpy() - want["logits"]).max() < 1e-3
    assert found.tolist() == want["d2t"][want["logits"].argmax(-1)].tolist()


# -- a drafter for a target of the tests ------------------------------------------------------------------------------

TARGETS = ("qwen3", "qwen35")


def eagle(kind: str, *, own: bool) -> Path:
    """A random drafter of a tiny model."""
    return eagle_for(tiny(kind), own=own)


def drafted(kind: str, *, own: bool, **settings: object) -> Rig:
    return rig(tiny(kind), **({"draft_path": eagle(kind, own=own), "n_draft_fixed": True} | settings))


class Reference:
    """The drafter in numpy, over the taps of a target that reads whole texts."""

    def __init__(self, kind: str, *, own: bool) -> None:
        self.file, target = open_gguf(eagle(kind, own=own)), open_gguf(tiny(kind))
        self.h, self.own = self.file.hparams, own
        shared = target if not own else self.file
        self.embedding = self._w(shared, "token_embd.weight")
        self.head = self._w(
            shared, "output.weight" if "output.weight" in shared.tensors else "token_embd.weight"
        )
        self.d2t = self._w(self.file, "d2t").astype(int) if own else np.arange(len(self.head))
        self.target = plain_rig(tiny(kind)).loop.target

    @staticmethod
    def _w(file: object, name: str) -> np.ndarray:
        info = file.tensors[name]  # type: ignore[attr-defined]
        return file.raw(name).view("<f4").reshape(info.shape).astype(np.float64)  # type: ignore[attr-defined]

    def w(self, name: str) -> np.ndarray:
        return self._w(self.file, f"{name}.weight")

    @staticmethod
    def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight

    def states(self, tokens: Sequence[int]) -> np.ndarray:
        """g of every token."""
        table = SlotTable(1, 64, 16)
        table.acquire(table.slots[0], 200)
        self.target.memory.reset(0)
        out = self.target.forward(
            lay_out(table, [Seq(0, 0, tokens, SeqMode.KEEP)], torch.device("cpu")),
            [t - 1 for t in LAYERS],
        )
        assert out.taps is not None
        taps = out.taps.numpy().astype(np.float64)
        return (self.rms(taps, self.w("enc.output_norm")) if self.own else taps) @ self.w("fc").T

    def turned(self, x: np.ndarray) -> np.ndarray:
        """Pairs of neighbours by the row's place."""
        dim = x.shape[-1]
        angles = np.arange(len(x))[:, None, None] * 1e4 ** (-np.arange(0, dim, 2) / dim)
        a, b, out = x[..., ::2], x[..., 1::2], np.empty_like(x)
        out[..., ::2], out[..., 1::2] = (
            a * np.cos(angles) - b * np.sin(angles),
            a * np.sin(angles) + b * np.cos(angles),
        )
        return out

    def last(self, tokens: Sequence[int], g: np.ndarray) -> tuple[np.ndarray, int]:
        """State and best token behind rows (tokens[i], g[i])."""
        dim = self.h.integer("attention.key_length")
        e = self.rms(self.embedding[list(tokens)], self.w("blk.0.attn_norm"))
        m = self.rms(g, self.w("blk.0.attn_norm_2"))
        u = np.concatenate([e, m], -1)
        q, k, v = ((u @ self.w(f"blk.0.attn_{x}").T).reshape(len(u), -1, dim) for x in "qkv")
        q, k = self.turned(q)[-1], self.turned(k)[:, 0]
        s = np.exp(q @ k.T / np.sqrt(dim))
        o = (s / s.sum(-1, keepdims=True) @ v[:, 0]).reshape(-1) @ self.w("blk.0.attn_output").T
        x = o + (g[-1] if self.own else m[-1])
        n = self.rms(x, self.w("blk.0.ffn_norm"))
        gate = n @ self.w("blk.0.ffn_gate").T
        x = (
            x
            + (gate / (1 + np.exp(-gate)) * (n @ self.w("blk.0.ffn_up").T)) @ self.w("blk.0.ffn_down").T
        )
        return x, int(self.d2t[(self.head @ self.rms(x, self.w("output_norm"))).argmax()])

    def draft(self, tokens: Sequence[int], states: np.ndarray, n: int) -> list[int]:
        """Drafts behind `tokens`, the last of which is the anchor."""
        ids, g = list(tokens[1:]), list(states[: len(tokens) - 1])
        for _ in range(n):
            state, token = self.last(ids, np.array(g))
            ids, g = [*ids, token], [*g, state]
        return ids[len(tokens) - 1 :]


@pytest.mark.parametrize("is_ahead", [False, True])
def test_requests_that_were_not_read_are_joined_where_they_stand(is_ahead: bool) -> None:
    texts, r = known_texts(tiny("qwen3")), drafted("qwen3", own=True, np=5, ubatch=40)
    r.loop.lookahead.on, reading = is_ahead, r.loop.controller.reading
    reading.wants = lambda n_read, n_busy: n_read < 2  # type: ignore[method-assign]
    reading.n_idle = REST_AFTER
    heard = [r.submit(prompt, N_TEXT) for prompt in list(texts)[:5]]
    r.steps(12)
    assert len(r.loop.controller.unread) == 3
    reading.n_idle = 0
    r.run()
    assert [h.tokens for h in heard] == list(texts.values())[:5]
    assert all(h.timings.draft_n > 0 for h in heard)


def tensor_bytes(*roots: object) -> int:
    """Of all memory of tensors that these objects reach."""
    found, seen, left = {}, set(), list(roots)
    while left:
        x = left.pop()
        if id(x) in seen or isinstance(x, type | ModuleType | FunctionType):
            continue
        seen.add(id(x))
        if isinstance(x, torch.Tensor):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        else:
            left += gc.get_referents(x)
    return sum(found.values())


@pytest.mark.parametrize("kind", TARGETS)
def test_a_file_of_pyspec_synth_drafts_and_takes_the_planned_memory(kind: str, tmp_path: Path) -> None:
    path = synth.write(kind, tmp_path / "e.gguf", tiny=True, drafter=True, kind="eagle3", quant="f32")
    settings = {"draft_path": path, "np": 3, "ctx": 256, "kv_type": "f32", "device": "cpu"}
    r, texts = drafted(kind, own=True, **settings), known_texts(tiny(kind))
    heard = joined(r, texts, cancels=True)
    assert [h.tokens for h in heard] == list(texts.values())
    assert r.info.drafter == "eagle3" and sum(h.timings.draft_n for h in heard) > 100
    drafter, plan = r.loop.drafter, plan_memory(describe(tiny(kind), EngineSettings(**settings)))
    assert isinstance(drafter, Chain) and isinstance(drafter.block, EagleBlock)
    block = drafter.block
    assert tensor_bytes(block.memory.parts) == pytest.approx(plan.draft_kv, rel=0.02)
    used = tensor_bytes(block.layer, block.fc, block.output, block.best, block.norm)
    assert used == pytest.approx(plan.draft_weights, rel=0.02)


def test_the_file_has_to_be_one() -> None:
    with pytest.raises(ConfigError, match="--spec-type eagle3 needs a draft file"):
        rig(tiny("qwen3"), spec_type="eagle3")
    with pytest.raises(PairError, match="is of architecture eagle3; this file is qwen3"):
        rig(tiny("qwen3"), spec_type="eagle3", draft_path=tiny("qwen3"))
