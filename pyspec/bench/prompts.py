"""Prompts of the benchmark: short ones in eight categories, the demo model's, or random ids."""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Collection, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from pyspec.errors import ConfigError

if TYPE_CHECKING:
    from pyspec.engine.api import Engine

_TEXTS = tomllib.loads((files("pyspec") / "bench" / "prompts.toml").read_text(encoding="utf-8"))
PROMPTS: dict[str, list[str]] = _TEXTS["prompts"]
"""Category to prompts."""
PASSAGE: str = _TEXTS["passage"]
"""Text that makes prompts longer."""

LONGEST_DEMO = 16  # the demo prompts with the longest answers
DEMO = "pyspec-demo.gguf"
Prompt = tuple[int, ...]


def categories() -> list[tuple[str, str]]:
    """(category, prompt), alternating between categories, so that any number of streams is mixed."""
    longest = max(len(p) for p in PROMPTS.values())
    return [(name, p[i]) for i in range(longest) for name, p in PROMPTS.items() if i < len(p)]


def demo_prompts() -> list[str]:
    """The demo model's questions with the longest answers, shuffled by kind."""
    text = (files("pyspec") / "demo" / "prompts.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines() if line]
    single = [r for r in rows if len(r["messages"]) == 1 and r["sensible"]]
    single.sort(key=lambda r: -len(r["answer_ids"]))
    longest = single[:LONGEST_DEMO]
    # Otherwise a few streams would get only stories, which are hard to draft
    random.Random(0).shuffle(longest)
    return [r["messages"][0]["content"] for r in longest]


def random_ids(n_vocab: int, banned: Collection[int], n: int, seed: int) -> list[int]:
    """`n` token ids, the same for the same seed, none of them in `banned`."""
    draw = random.Random(seed)
    ids: list[int] = []
    while len(ids) < n:
        t = draw.randrange(n_vocab)
        if t not in banned or len(banned) >= n_vocab:
            ids.append(t)
    return ids


def lengthen(ids: Sequence[int], passage: Sequence[int], n: int) -> list[int]:
    """`ids` after enough of the repeated passage to make `n` tokens; unchanged if they are already `n` or more."""
    missing = n - len(ids)
    if missing <= 0:
        return list(ids)
    return (list(passage) * (missing // len(passage) + 1))[:missing] + list(ids)


def make_prompts(engine: Engine, count: int, n_prompt: int, is_random: bool) -> list[Prompt]:
    """`count` prompts of token ids, with at least `n_prompt` tokens (0: the length of the question).

    Random ids are for random models (`pyspec synth`); they are `n_prompt`, at least 16, tokens long.
    Raises ConfigError if they do not fit the context.
    """
    info = engine.info
    if is_random:
        n = n_prompt or 16
        made = [random_ids(info.n_vocab, info.eog_ids, n, seed) for seed in range(count)]
    else:
        is_demo = Path(info.model_path).name == DEMO
        texts = demo_prompts() if is_demo else [p for _, p in categories()]
        passage = engine.encode(PASSAGE)
        chats = [[{"role": "user", "content": texts[i % len(texts)]}] for i in range(count)]
        made = [lengthen(engine.encode(chat), passage, n_prompt) for chat in chats]
    longest = max(map(len, made))
    if longest >= info.n_ctx:
        advice = "make -p smaller or -c larger"
        raise ConfigError(f"prompts of {longest} tokens do not fit -c {info.n_ctx}; {advice}")
    return [tuple(ids) for ids in made]
