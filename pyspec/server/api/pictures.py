"""The pictures of a prompt, from the parts of a body to rows among its tokens."""

from __future__ import annotations

import logging
import secrets
import time

from pyspec.engine.sight import NO_PROJECTOR, SHOWN, Shown, Sighted, placed, rows_of
from pyspec.errors import NotSupported, RequestError
from pyspec.server.media import Media
from pyspec.text.tokenizer import Part, Tokenizer

log = logging.getLogger(__name__)

MARKER = f"<__media_{secrets.token_hex(16)}__>"
"""Where a picture goes in a prompt of `/completion`, and where it stood in one of `/apply-template`. Another one in each process, as in
llama-server, so that no text contains it by chance."""


class SentPictures:
    """The pictures of one prompt, in order.

    media   None: the model sees none
    counts  only their rows are wanted, not their pixels
    """

    def __init__(self, media: Media | None, *, counts: bool = False) -> None:
        self.media, self.shown = media, Shown()
        self._counts = counts
        self._sent: list[tuple[str, str]] = []

    def add(self, url: str, where: str) -> str:
        """The mark of a picture, which is read later. Raises NotSupported, RequestError."""
        if self.media is None:
            raise NotSupported(f"{where}: {NO_PROJECTOR}")
        if len(self._sent) >= self.media.limits.pictures:
            raise RequestError(f"{where}: at most {self.media.limits.pictures} images are taken")
        self._sent.append((url, where))
        return self.shown.marks.add()

    def encoded(self, tokenizer: Tokenizer, texts: list[str]) -> Sighted:
        """The prompt of texts with these pictures between them."""
        rows = self.rows(tokenizer)
        parts: list[Part] = [(texts[0], True)]
        for ids, text in zip(rows.values(), texts[1:], strict=True):
            parts += [ids, (text, True)]
        return placed(tokenizer.encode_parts([part for part in parts if part[0]]), self.shown)

    def rows(self, tokenizer: Tokenizer) -> dict[str, list[int]]:
        """The ids of each picture by its mark, as of `rows_of`, which are for `placed`. The pictures are read now. Raises RequestError,
        NotSupported."""
        media, counts = self.media, list[int]()
        if media is None or not self._sent:
            return {}
        began = time.monotonic()
        until = began + media.limits.pictures_s
        self.shown.pictures.clear()
        for url, where in self._sent:
            if time.monotonic() > until:
                raise RequestError(f"{where}: reading the images takes too long")
            try:
                content = media.content(url, until)
                if not self._counts:
                    self.shown.pictures.append(media.picture(content))
                counts.append(media.n_row(content))
            except (RequestError, NotSupported) as e:
                raise type(e)(f"{where}: {e}") from None
        if not self._counts:
            ms = 1e3 * (time.monotonic() - began)
            log.info("%d images: %d rows, read in %.1f ms", len(counts), sum(counts), ms)
        return rows_of(tokenizer, media.projector, self.shown.marks.marks, counts)


def text_of(prompt: Sighted, tokenizer: Tokenizer) -> str:
    """A prompt's text, with a word for each picture."""
    texts, at = list[str](), 0
    for image in prompt.images:
        texts += [tokenizer.decode(prompt.ids[at : image.first], special=True), SHOWN]
        at = image.first + image.picture.n_row
    return "".join([*texts, tokenizer.decode(prompt.ids[at:], special=True)])
