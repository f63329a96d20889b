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
Chat = list[dict[str, str]]


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


def questions(is_demo: bool) -> list[str]:
    """The built-in questions, for the demo model or another."""
    return demo_prompts() if is_demo else [p for _, p in categories()]


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


def read_prompts(path: Path) -> list[str | Chat]:
    """Prompts of a file: texts to continue, and chats to answer.

    A line of a `.jsonl` file is `{"prompt": TEXT}`, `{"messages": [...]}` or a string, which is a text. A line of another file is a user's
    message. Raises ConfigError for a file that has no prompt, or a line of another form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot read {path}: {e}") from e
    of_line = _json_prompt if path.suffix == ".jsonl" else _message
    found = [of_line(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"{path} has no prompts: want one a line")
    return found


def _message(line: str, where: str) -> Chat:
    return [{"role": "user", "content": line}]


def _json_prompt(line: str, where: str) -> str | Chat:
    try:
        row = json.loads(line)
    except ValueError as e:
        raise ConfigError(f"{where}: {e}") from e
    if isinstance(row, dict):
        row = row.get("prompt", row.get("messages"))
    if isinstance(row, str) and row:
        return row
    if isinstance(row, list) and row and all(_is_message(m) for m in row):
        return row
    raise ConfigError(f'{where}: want {{"prompt": TEXT}} or {{"messages": [...]}}')


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and {"role", "content"} <= value.keys()
        and all(isinstance(v, str) for v in value.values())
    )


def make_prompts(
    engine: Engine,
    count: int,
    n_prompt: int,
    is_random: bool = False,
    own: Sequence[str | Chat] = (),
) -> list[Prompt]:
    """`count` prompts of token ids, with at least `n_prompt` tokens (0: their own length).

    own: prompts to use in turn, in place of the built-in questions. Random ids are for random models (`pyspec synth`); they are
    `n_prompt`, at least 16, tokens long. Raises ConfigError if the prompts do not fit the context.
    """
    info = engine.info
    if is_random:
        n = n_prompt or 16
        made = [random_ids(info.n_vocab, info.eog_ids, n, seed) for seed in range(count)]
    else:
        texts = own or [_message(text, "") for text in questions(Path(info.model_path).name == DEMO)]
        passage = engine.encode(PASSAGE)
        encoded = [engine.encode(text) for text in texts[:count]]
        made = [lengthen(encoded[i % len(encoded)], passage, n_prompt) for i in range(count)]
    longest = max(map(len, made))
    if longest >= info.n_ctx:
        advice = "make -p smaller or -c larger"
        raise ConfigError(f"prompts of {longest} tokens do not fit -c {info.n_ctx}; {advice}")
    return [tuple(ids) for ids in made]
