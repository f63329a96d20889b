"""A budget of reasoning tokens: once it is spent, forced tokens end the reasoning, for any logits.

The forced token at a position depends on the tokens before it alone, so it is the same with and without drafts: committed tokens are
read once, drafts at each look. Marks are found in bytes, in any spelling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pyspec.request import ThinkBudget

FAR = 512
"""Tokens before the budget's end at which no token is forced in rounds in flight."""


@dataclass(frozen=True, slots=True)
class Thought:
    """A request's state behind its tokens so far.

    phase     before reasoning, in it, forcing tokens, or behind it
    n         tokens of reasoning
    n_forced  forced tokens so far
    tail      the last bytes: a mark may have begun in them
    n_missing bytes that the last character still needs
    """

    phase: Literal["before", "thinking", "forced", "over"]
    n: int = 0
    n_forced: int = 0
    tail: bytes = b""
    n_missing: int = 0


class BudgetRule:
    """The rule for one request. token_bytes: with control tokens as their text."""

    def __init__(self, budget: ThinkBudget, token_bytes: Callable[[int], bytes]) -> None:
        self.budget, self._bytes = budget, token_bytes
        self._start, self._end = budget.start.encode(), budget.end.encode()
        self.now = self._due(Thought("thinking" if budget.is_open else "before"))

    @property
    def is_far(self) -> bool:
        """No token is forced in the rounds that are launched before the next one is read."""
        now = self.now
        return now.phase == "over" or (now.phase != "forced" and self.budget.n_tokens - now.n > FAR)

    def commit(self, tokens: Sequence[int]) -> None:
        """Add committed tokens, without the prompt's."""
        if self.now.phase != "over":
            for token in tokens:
                self.now = self._after(self.now, token)

    def forced(self, drafts: Sequence[int]) -> tuple[int, int] | None:
        """The first row of a span with a forced token, and that token."""
        at = self.now
        for i in range(len(drafts) + 1):
            if at.phase == "forced":
                return i, self.budget.forced[at.n_forced]
            if at.phase == "over" or i == len(drafts):
                return None
            at = self._after(at, drafts[i])
        return None

    def _after(self, at: Thought, token: int) -> Thought:
        if at.phase == "over":
            return at
        if at.phase == "forced":
            n = at.n_forced + 1
            return Thought("over") if n >= len(self.budget.forced) else replace(at, n_forced=n)
        raw = self._bytes(token)
        mark = self._start if at.phase == "before" else self._end
        text = at.tail + raw
        if mark not in text:
            tail = text[-(len(mark) - 1) :] if len(mark) > 1 else b""
            n, n_missing = at.n + (at.phase == "thinking"), _missing(raw, at.n_missing)
            at = replace(at, n=n, tail=tail, n_missing=n_missing)
            return self._due(at)
        if at.phase == "thinking":
            return Thought("over")
        # Reasoning that came with the mark's last token
        behind = text[text.index(mark) + len(mark) :]
        return (
            Thought("over")
            if self._end in behind
            else self._due(Thought("thinking", tail=behind[-len(self._end) :]))
        )

    def _due(self, at: Thought) -> Thought:
        """The budget is spent, and the text ends at a whole character: at most three more tokens complete one."""
        n_more = at.n - self.budget.n_tokens
        is_due = at.phase == "thinking" and (n_more >= 3 or (n_more >= 0 and not at.n_missing))
        return replace(at, phase="forced") if is_due and self.budget.forced else at


def _missing(raw: bytes, n: int) -> int:
    """Bytes that the last character needs after `raw`, if it needed `n` before."""
    for byte in raw:
        if byte & 0xC0 == 0x80:
            n = max(0, n - 1)
        else:
            n = 0 if byte < 0xC0 else 1 if byte < 0xE0 else 2 if byte < 0xF0 else 3
    return n
