"""Prompts with pictures of the fixtures in tests/fixtures/images, for a rig: requests, and the tokens behind them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from engine_rig import FIXTURES, Heard, Rig, rig
from torch import Tensor

from pyspec.engine.api import Engine
from pyspec.slots.images import IMAGE
from pyspec.vision.encoder import Encoder
from pyspec.vision.picture import Picture, Placed
from pyspec.vision.pixels import prepared
from pyspec.vision.projector import Projector, read_projector

IMAGES = FIXTURES / "images"
MODELS = ("qwen35", "gemma3", "gemma4", "gemma4-e", "mistral3")  # that pyspec runs
PROMPTS = ("one", "two", "side", "late")
N_TOKEN = 12


@dataclass(frozen=True)
class Seen:
    """A prompt with its pictures, and the tokens that llama.cpp gives behind it."""

    prompt: tuple[int, ...]
    images: tuple[Placed, ...]
    tokens: list[int]

    @property
    def first(self) -> Placed:
        return self.images[0]

    @property
    def text(self) -> tuple[int, ...]:
        """Its tokens without pictures."""
        return tuple(t for t in self.prompt if t < IMAGE)

    def asked(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The same up to its last picture's end, with another question behind."""
        last = self.images[-1]
        return self.prompt[: last.first + last.picture.n_row] + ids


@cache
def projector(name: str) -> Projector:
    return read_projector(mmproj(name))


def mmproj(name: str) -> Path:
    return IMAGES / f"mmproj-{name}.gguf"


@cache
def picture(name: str, file: str) -> Picture:
    """A file's pixels for a model's projector."""
    return prepared(projector(name), (IMAGES / file).read_bytes())


@cache
def seen(name: str, prompt: str) -> Seen:
    """A prompt of a model's fixture."""
    own = json.loads((IMAGES / f"{name}.json").read_text())["prompts"][prompt]
    files = [part["image"] for part in own["parts"] if isinstance(part, dict)]
    ids: list[int] = []
    images: list[Placed] = []
    for chunk in own["chunks"]:
        if "ids" in chunk:
            ids += chunk["ids"]
            continue
        made = picture(name, files[len(images)])
        assert (made.n_row, made.nx, made.ny) == tuple(chunk[x] for x in ("image_tokens", "nx", "ny"))
        images.append(Placed(made, len(ids)))
        ids += [IMAGE] * made.n_row
    assert len(ids) == own["prompt_tokens"]
    return Seen(tuple(ids), tuple(images), own["tokens"])


def seeing(name: str, **settings: object) -> Rig:
    """A rig of a model with its projector, without drafts, and with pages for several texts."""
    own = {"mmproj": mmproj(name), "spec_type": "none", "kv_pool": 2048}
    return rig(IMAGES / f"{name}.gguf", **(own | settings))


def look(r: Rig, s: Seen, n: int = N_TOKEN, **request: object) -> Heard:
    """Submit a prompt with its pictures."""
    return r.submit(s.prompt, n, images=s.images, **request)


@dataclass
class WatchedEncoder:
    """A rig's encoder, which counts pictures. fails: raises at a slice; before: called before each slice"""

    encoder: Encoder
    pictures: list[Picture] = field(default_factory=list)
    n_slice: int = 0
    fails: Exception | None = None
    before: Callable[[], None] = lambda: None

    @property
    def projector(self) -> Projector:
        return self.encoder.projector

    def slices(self, picture: Picture, n_block: int) -> Iterator[Tensor | None]:
        self.pictures.append(picture)
        for rows in self.encoder.slices(picture, 1):
            self.n_slice += 1
            self.before()
            if self.fails is not None:
                raise self.fails
            yield rows


def watched(r: Rig | Engine) -> WatchedEncoder:
    """Count the pictures that it encodes from now on, one step behind each round."""
    own: object = r.loop.pictures.encoder
    assert isinstance(own, Encoder | WatchedEncoder)
    found = own if isinstance(own, WatchedEncoder) else WatchedEncoder(own)
    r.loop.pictures.encoder, r.loop.pictures.slice_s = found, 0.0  # type: ignore[assignment]
    return found
