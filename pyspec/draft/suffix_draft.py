"""A suffix draft: tokens that followed before, and the chances that they do again."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import ClassVar

from pyspec.draft.suffix_chances import Promise
from pyspec.registry import SUFFIX


class SuffixDraft:
    """Tokens that followed before.

    chances   of each token, if all before it are right
    survival  for each token, the probability that it and all tokens before it are right
    expected  tokens that will be right
    """

    __slots__ = ("_promise", "chances", "expected", "survival", "tokens")
    source: ClassVar[str] = SUFFIX

    def __init__(
        self,
        tokens: list[int],
        chances: list[float],
        promise: Promise,
        known: tuple[list[float], float] | None = None,
    ) -> None:
        """promise: the share that drafts like it keep. known: survival and expected tokens, if they are."""
        self.tokens, self.chances, self._promise = tokens, chances, promise
        if known is None:
            found = self._found()
            size = total(found)
            factor = promise.factor(size)
            known = [factor * each for each in found], factor * size
        self.survival, self.expected = known

    def _found(self) -> list[float]:
        return list(accumulate(self.chances, mul))

    @property
    def chance_of_first(self) -> float:
        return self.survival[0] if self.survival else 0.0

    def first(self, n: int) -> SuffixDraft:
        """The first n tokens."""
        return (
            self
            if n >= len(self.tokens)
            else SuffixDraft(self.tokens[:n], self.chances[:n], self._promise)
        )

    def judge(self, n_draft: int, n_accepted: int) -> None:
        """Report that the first `n_draft` tokens were drafted and `n_accepted` of them were right."""
        if n_draft and self.tokens:
            found = self._found()
            self._promise.add(total(found), total(found[:n_draft]), n_accepted)


def total(numbers: list[float]) -> float:
    """The sum, rounded at each step in every version of Python."""
    found = 0.0
    for each in numbers:
        found += each
    return found


NO_DRAFT = SuffixDraft([], [], Promise(), ([], 0.0))
