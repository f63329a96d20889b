"""Texts that a cache probably holds because their last requests ended lately: requests that go on with them. Arithmetic only: no torch here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class LeftTexts:
    """Remembers prompts by the key of their last whole block (`affinity.chain`), as many tokens as a cache holds.

    n_token  tokens that the cache holds
    """

    def __init__(self, n_token: int) -> None:
        self._n_token, self._n = n_token, 0
        self._texts: OrderedDict[int, int] = OrderedDict()  # tokens by key; the first is the oldest

    def leave(self, key: int, n_token: int) -> None:
        """A request ended. n_token: of its prompt and answer."""
        self._n += n_token - self._texts.pop(key, 0)
        self._texts[key] = n_token
        while self._n > self._n_token:
            self._n -= self._texts.popitem(last=False)[1]

    def goes_on(self, keys: Sequence[int]) -> bool:
        """True if a prompt with these keys begins with a remembered one."""
        return any(key in self._texts for key in keys)
