"""Validates requests against the loaded model before they are queued: one that can never run is refused at once. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pyspec.constrain.check import GrammarCheck
from pyspec.errors import PromptTooLong, RequestError
from pyspec.request import EngineInfo, Grammar, Request, check_request
from pyspec.slots.images import IMAGE, ROWS
from pyspec.text.tokenizer import Tokenizer
from pyspec.vision.picture import Placed

Ids = NDArray[np.int64]
FIRST_TURN = 8  # the first turn begins before this token
OPENING_MIN = 64  # tokens of a system prompt that are worth a checkpoint


class Validator:
    """Checks and completes requests. No Python loops over the prompt: it may have 100,000 tokens, and other requests wait meanwhile."""

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer) -> None:
        self.info, self.bos = info, tokenizer.bos_id
        self.grammars = GrammarCheck(tokenizer, info.n_vocab)
        self.room = info.room
        opening = [t for t in tokenizer.special - tokenizer.eog if 0 <= t < info.n_vocab]
        self._opening = np.zeros(info.n_vocab, dtype=bool)  # by token: it may begin a turn of a chat
        self._opening[opening] = True

    def check(self, request: Request) -> Request:
        """Return the request as it will run. Raises RequestError if it never can."""
        check_request(request)
        prompt, resumed = tuple(request.prompt), tuple(request.resumed)
        if not prompt:
            if self.bos is None:
                raise RequestError(
                    "the prompt is empty, and the model has no begin-of-text token to start from"
                )
            prompt = (self.bos,)
        if len(prompt) >= self.room:
            i = self.info
            is_trained = i.n_ctx >= i.n_ctx_train > 0
            raise PromptTooLong(
                len(prompt), self.room, is_pool=self.room < i.n_ctx, is_trained=is_trained
            )
        ids = self._prompt(prompt, request.images)
        self._ids(resumed, "resumed")
        most = self.room - len(prompt)
        if len(resumed) > (most if request.max_tokens < 0 else min(most, request.max_tokens)):
            raise RequestError(f"{len(resumed)} tokens are resumed, more than the request may generate")
        if request.slot >= self.info.n_slot:
            raise RequestError(
                f"slot {request.slot} does not exist; slots are 0..{self.info.n_slot - 1} (-np)"
            )
        first, last = turns(ids, self._opening)
        places = request.n_before_turn or last, request.n_system or first, request.n_stable
        before, system, stable = (n if n < len(prompt) else 0 for n in places)
        return replace(
            request,
            prompt=prompt,
            resumed=resumed,
            stop=tuple(request.stop),
            n_before_turn=before,
            n_system=system,
            n_stable=stable,
            grammar=self._grammar(request.grammar),
        )

    def _prompt(self, prompt: tuple[int, ...], images: Sequence[Placed]) -> Ids:
        """The prompt's ids, 0 for those of pictures' rows, which must be exactly where the pictures are."""
        if not images:
            return self._ids(prompt, "prompt")
        if not self.info.sees:
            raise RequestError("this model was loaded without --mmproj")
        tokens, end = list(prompt), 0
        for i, image in enumerate(images):
            at, n_row = image.first, image.picture.n_row
            if not (end <= at and 0 < n_row < ROWS and at + n_row <= len(prompt)):
                raise RequestError(
                    f"images[{i}] has rows {at} to {at + n_row - 1} of a prompt of {len(prompt)}; want places in order, apart, and within it"
                )
            end = at + n_row
            if {*prompt[at:end]} != {IMAGE}:
                raise RequestError(f"images[{i}]: the prompt has other ids than {IMAGE} in its rows")
            tokens[at:end] = [0] * n_row
        return self._ids(tuple(tokens), "prompt")

    def _grammar(self, grammar: Grammar | None) -> Grammar | None:
        """A checked grammar is not checked again, because other requests wait meanwhile."""
        return (
            grammar if grammar is None or grammar.kind == "compiled" else self.grammars.compiled(grammar)
        )

    def _ids(self, tokens: tuple[int, ...], name: str) -> Ids:
        n_vocab = self.info.n_vocab
        if tokens and not (min(tokens) >= 0 and max(tokens) < n_vocab):
            bad = next(t for t in tokens if not 0 <= t < n_vocab)
            raise RequestError(f"{name} token {bad} is outside 0..{n_vocab - 1}")
        return np.array(tokens, dtype=np.int64)


def turns(prompt: Ids, opening: NDArray[np.bool_]) -> tuple[int, int]:
    """Prompt tokens before the second turn of a chat and before the last user turn; 0 for none. opening[token]: it may begin a turn.

    The last opening token begins the answer. If the prompt starts with the same one, all turns do. Otherwise each role has its own
    token, and the first turn ends at the next one that follows on enough text for a checkpoint.
    """
    at = np.flatnonzero(opening[prompt])
    if len(at) < 2:
        return 0, 0
    same = at[prompt[at] == prompt[at[-1]]]
    if same[0] < FIRST_TURN:
        return (int(same[1]), int(same[-2])) if len(same) > 1 else (0, 0)
    far = at[1:][np.diff(at) >= OPENING_MIN]
    return int(far[0]) if len(far) else 0, int(at[-2])
