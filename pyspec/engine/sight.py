"""Images of Python programs among the text of a prompt: files, their bytes, or Pillow's images. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pyspec.errors import RequestError
from pyspec.ranges import shown
from pyspec.request import EngineInfo
from pyspec.slots.images import IMAGE, handle_of, image_id, index_of, is_image
from pyspec.text.marks import Marks, spliced
from pyspec.text.tokenizer import Tokenizer
from pyspec.vision.picture import Picture, Placed
from pyspec.vision.pixels import DATA, from_base64, prepared
from pyspec.vision.projector import Projector, read_projector

MARKER = "<__media__>"
"""Where an image goes in the text of a prompt, as in llama.cpp's programs. Without any they stand before the text."""
NO_PROJECTOR = "this model was loaded without --mmproj"
SHOWN = "[image]"
_KINDS = ("image_url", "image", "input_image")


@dataclass(frozen=True, slots=True)
class Sighted:
    """The tokens of a prompt, IMAGE for each row of a picture, and its pictures."""

    ids: tuple[int, ...]
    images: tuple[Placed, ...] = ()


@dataclass(slots=True)
class Shown:
    """The images of one prompt, by the marks that stand for them in its text."""

    marks: Marks = field(default_factory=Marks)
    pictures: list[Picture] = field(default_factory=list)


@dataclass(frozen=True)
class Sight:
    """Reads images for the projector of a load."""

    info: EngineInfo

    @cached_property
    def projector(self) -> Projector:
        """RequestError if the load has none."""
        i = self.info
        if not i.sees:
            raise RequestError(NO_PROJECTOR)
        return read_projector(Path(i.mmproj), i.image_min_tokens or None, i.image_max_tokens or None)

    def add(self, shown: Shown, image: object, where: str) -> str:
        """The mark of an image, which is read now. where: names it in errors"""
        projector = self.projector
        try:
            shown.pictures.append(prepared(projector, _source_of(image)))
        except RequestError as e:
            raise RequestError(f"{where}: {e}") from None
        return shown.marks.add()

    def with_marks(
        self, messages: Sequence[Mapping[str, object]], images: object, seen: Shown
    ) -> list[Mapping[str, object]]:
        """Messages whose images have become marks in their texts. images: more of them, before the text of the last user message"""
        at = max((i for i, m in enumerate(messages) if m.get("role") == "user"), default=-1)
        more = _listed(images)
        if more and at < 0:
            raise RequestError("images: no message of a user, before whose text they would stand")
        out: list[Mapping[str, object]] = []
        for i, message in enumerate(messages):
            own: list[object] = [{"type": "image", "image": x} for x in more] if i == at else []
            content = message.get("content")
            if not own and not _has_image(content):
                out.append(message)
                continue
            parts: list[object] = (
                content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
            )
            texts = [self._part(seen, part, f"messages[{i}]") for part in (*own, *parts)]
            out.append({**message, "content": seen.marks.joined([text for text in texts if text])})
        return out

    def _part(self, seen: Shown, part: object, where: str) -> str:
        if not isinstance(part, Mapping):
            raise RequestError(f"{where} has a part that is {shown(part)}; want an object with a type")
        if part.get("type") in _KINDS:
            found: Any = part.get("image", part.get("image_url"))
            return self.add(seen, found.get("url") if isinstance(found, Mapping) else found, where)
        if part.get("type") != "text" or not isinstance(text := part.get("text"), str):
            raise RequestError(
                f"{where} has a part of type {shown(part.get('type'))}; want text or image"
            )
        return text

    def rows(self, tokenizer: Tokenizer, seen: Shown) -> dict[str, list[int]]:
        """The ids of each image by its mark, with the tokens around it; row `i` of image `k` is `image_id(k, i)` until `placed`."""
        if not seen.pictures:
            return {}
        counts = [picture.n_row for picture in seen.pictures]
        return rows_of(tokenizer, self.projector, seen.marks.marks, counts)

    def text(self, tokenizer: Tokenizer, text: str, images: object) -> Sighted:
        """The tokens of a text with images where it has MARKER, or before it."""
        found, seen = _listed(images), Shown()
        texts = text.split(MARKER)
        if len(texts) == 1:
            texts = [""] * len(found) + texts
        if len(texts) != len(found) + 1:
            raise RequestError(f"the text has {len(texts) - 1} {MARKER} for {len(found)} images")
        whole = texts[0]
        for i, (image, behind) in enumerate(zip(found, texts[1:], strict=True)):
            whole += self.add(seen, image, f"images[{i}]") + behind
        parts = spliced([(whole, True)], self.rows(tokenizer, seen))
        return placed(tokenizer.encode_parts(parts), seen)


def rows_of(
    tokenizer: Tokenizer, projector: Projector, marks: Sequence[str], counts: Sequence[int]
) -> dict[str, list[int]]:
    """The ids of each image by its mark, with the tokens around it; row `i` of image `k` is `image_id(k, i)` until `placed`. counts: rows of each"""
    before, behind = (
        tokenizer.encode(text, add_special=False, parse_special=True) if text else []
        for text in (projector.before, projector.after)
    )
    return {
        mark: [*before, *(image_id(k, i) for i in range(n)), *behind]
        for k, (mark, n) in enumerate(zip(marks, counts, strict=True))
    }


def placed(ids: Sequence[int], seen: Shown) -> Sighted:
    """A prompt whose images' rows are those of `Sight.rows`."""
    if not seen.pictures:
        return Sighted(tuple(ids))
    firsts = [(at, token) for at, token in enumerate(ids) if is_image(token) and not index_of(token)]
    images = tuple(Placed(seen.pictures[handle_of(token)], at) for at, token in firsts)
    return Sighted(tuple(IMAGE if is_image(token) else token for token in ids), images)


def _listed(images: object) -> Sequence[object]:
    if images is None:
        return ()
    if isinstance(images, str | bytes | Path) or not isinstance(images, Sequence):
        raise RequestError(f"images is {shown(images)}; want a list of paths, bytes or Pillow's images")
    return images


def _has_image(content: object) -> bool:
    return isinstance(content, list) and any(
        isinstance(part, Mapping) and part.get("type") in _KINDS for part in content
    )


def _source_of(image: object) -> Any:
    """The bytes of an image's file, or one of Pillow's images."""
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, str) and (head := DATA.match(image)) is not None:
        return from_base64(image[head.end() :])
    if isinstance(image, str) and "://" in image[:20]:
        raise RequestError(
            "images are not fetched from URLs: give bytes, a path or data:image/...;base64,..."
        )
    if isinstance(image, str | Path):
        try:
            return Path(image).read_bytes()
        except (OSError, ValueError) as e:
            raise RequestError(f"{shown(str(image))} can not be read: {e}") from None
    if not (hasattr(image, "convert") and hasattr(image, "mode")):
        raise RequestError(f"{shown(image)} is no image: want bytes, a path or one of Pillow's")
    return image
