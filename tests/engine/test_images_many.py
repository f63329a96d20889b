"""Eighty-eight prompts with up to three pictures each, many at once: drafts leave every text as it is without them, in one slot or in sixteen."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from picture_drafters import TAPPED, drafter_for
from pictures import IMAGES

from pyspec import Engine

FILES = [IMAGES / f"{name}.png" for name in ("odd", "alpha", "grey")] + [IMAGES / "wide.jpg"]
WORDS = [
    "what",
    "is",
    "in",
    "the",
    "picture",
    "red",
    "blue",
    "cat",
    "a",
    "tree",
    "sees",
    "left",
    "right",
    "7",
    "13",
]
N_PROMPT = 88

Prompt = tuple[str, Sequence[Path], int]


def prompts() -> list[Prompt]:
    """Text with a mark for each picture, the pictures, and how many tokens are wanted."""
    rng, made = random.Random(3), list[Prompt]()
    for _ in range(N_PROMPT):
        files = rng.choices(FILES, k=rng.randrange(4))
        texts = [" ".join(rng.choices(WORDS, k=rng.randrange(1, 13))) for _ in range(len(files) + 1)]
        made.append((" <__media__> ".join(texts), files, rng.choice([5, 11, 23, 37])))
    return made


def texts_of(name: str, np: int, **options: Any) -> list[list[int]]:
    path, projector = IMAGES / f"{name}.gguf", IMAGES / f"mmproj-{name}.gguf"
    if options.get("spec_type") in TAPPED:
        options["draft"] = str(drafter_for(path, options["spec_type"]))
    with (
        Engine.load(
            str(path), mmproj=str(projector), np=np, ctx=1311, device="cpu", **options
        ) as engine,
        ThreadPoolExecutor(np + 5) as clients,
    ):

        def answer(prompt: Prompt) -> list[int]:
            text, files, n = prompt
            got = engine.generate(text, images=files, max_tokens=n, temperature=0, ignore_eos=True)
            return list(got.tokens)

        found = list(clients.map(answer, prompts()))
        assert engine.metrics().requests_failed == 0
        return found


plain = cache(lambda name: texts_of(name, 1, draft=None))
MTP: dict[str, Any] = {"spec_type": "mtp"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "np", "options"),
    [
        ("qwen35", 7, MTP),
        ("qwen35", 16, {"spec_type": "mtp,suffix"}),
        ("qwen3vl", 16, {"spec_type": "suffix"}),
        ("gemma3", 16, {"spec_type": "ngram"}),
        ("gemma4", 7, {"draft": str(IMAGES / "gemma4.gguf")}),
        ("gemma4-e", 16, {"draft": str(IMAGES / "gemma4-e.gguf")}),
        ("mistral3", 16, {"draft": str(IMAGES / "mistral3.gguf")}),
        ("qwen35", 16, {"spec_type": "dflash"}),
        ("qwen35", 7, {"spec_type": "eagle3"}),
        ("gemma3", 7, {"spec_type": "dflash"}),
        ("gemma4-e", 16, {"spec_type": "eagle3"}),
        ("mistral3", 7, {"spec_type": "eagle3"}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_many_prompts_with_pictures_have_the_texts_of_one_slot_without_drafts(
    name: str, np: int, options: dict[str, Any]
) -> None:
    assert texts_of(name, np, **options) == plain(name)
