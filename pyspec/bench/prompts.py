"""Prompts of the benchmark: short ones in eight categories, the demo model's, or random ids."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from pyspec.errors import ConfigError

if TYPE_CHECKING:
    from pyspec.engine.api import Engine

PROMPTS: dict[str, tuple[str, ...]] = {
    "code": (
        "Write a Python function that merges two sorted lists without using sort, with a docstring and three asserts.",
        "Write a C function that reverses a singly linked list in place, and explain each line in a comment.",
        "Write a SQL query for the three best-selling products of each month, given orders(id, product, day, amount).",
    ),
    "edit": (
        "Rewrite this as a numbered list, one sentence each, changing no word: Heat the oven. Mix flour and salt. "
        "Rub in the butter. Add cold water. Roll out the dough. Bake for forty minutes. Let it cool on a rack.",
        "Add type hints to this code and return all of it: def total(rows, tax):\n    s = 0\n    for r in rows:\n"
        "        s += r['price'] * r['count']\n    return round(s * (1 + tax), 2)",
    ),
    "math": (
        "A tank holds 840 litres. One pipe fills it in 7 hours, another empties it in 12. Both are open. Show every "
        "step to the time it takes to fill.",
        "Prove that the sum of the first n odd numbers is n squared, by induction.",
    ),
    "reasoning": (
        "Four friends finished a race. Ana was faster than Ben, Cem was not last, Dora was directly behind Ana. Which "
        "orders are possible? Go through the cases.",
        "A shop opens at nine, each customer takes eleven minutes, and six people are waiting. Who is served after ten? "
        "Reason step by step.",
    ),
    "writing": (
        "Write a story of about three hundred words about a lighthouse keeper who finds a letter addressed to the sea.",
        "Write a polite letter to a neighbour about a tree whose branches hang over the fence.",
    ),
    "knowledge": (
        "Explain to a student how a refrigerator moves heat from cold to warm, and where the energy goes.",
        "Describe how a bill becomes a law in a parliament with two chambers, in general terms.",
    ),
    "data": (
        "Turn this into JSON with one object per person: Mara, 34, Lyon, baker; Otis, 29, Ghent, welder; Pia, 41, "
        "Turin, nurse; Ravi, 37, Leeds, driver; Sol, 25, Porto, cook.",
        "Make a markdown table of the planets with their order from the sun, type, and number of known moons (about).",
    ),
    "translation": (
        "Translate into French, then into German, sentence by sentence: The ferry leaves at six. Bring a warm coat. "
        "The crossing takes two hours. There is tea on board.",
    ),
}
"""Category to prompts. Written for this benchmark."""

PASSAGE = (
    "The valley lay between two ridges, and the road followed the river because there was no other way through. In "
    "spring the water rose to the third step of the mill and the miller moved his sacks upstairs without hurry, as his "
    "father had done. People came down on market days with cheese, wool and news, and went home with salt, nails and "
    "more news than they had brought. Nobody thought of the valley as small, since few had seen its other end. "
)
"""Text that makes prompts longer."""

LONGEST_DEMO = 16  # the demo prompts with the longest answers
DEMO = "pyspec-demo.gguf"


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
    random.Random(0).shuffle(longest)  # otherwise a few streams would get only stories, which are hard to draft
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


def make_prompts(engine: Engine, count: int, n_prompt: int, is_random: bool) -> list[tuple[int, ...]]:
    """`count` prompts of token ids, with at least `n_prompt` tokens (0: the length of the question).

    Random ids are for random models (`pyspec synth`); they are `n_prompt`, at least 16, tokens long.
    Raises ConfigError if they do not fit the context.
    """
    info = engine.info
    if is_random:
        n = n_prompt or 16
        made = [random_ids(info.n_vocab, info.eog_ids, n, seed) for seed in range(count)]
    else:
        texts = demo_prompts() if Path(info.model_path).name == DEMO else [p for _, p in categories()]
        passage = engine.encode(PASSAGE)
        asked = [engine.encode([{"role": "user", "content": texts[i % len(texts)]}]) for i in range(count)]
        made = [lengthen(ids, passage, n_prompt) for ids in asked]
    longest = max(map(len, made))
    if longest >= info.n_ctx:
        raise ConfigError(f"prompts of {longest} tokens do not fit -c {info.n_ctx}; make -p smaller or -c larger")
    return [tuple(ids) for ids in made]
