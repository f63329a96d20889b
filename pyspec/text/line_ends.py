"""Runs of line ends in vocabularies of `gemma4`: one that is a token is that token, whatever its merges give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspec.text.vocab import NORMAL


class LineEnds:
    """The tokens that are nothing but line ends, without those that are matched in raw text, which need no merges."""

    def __init__(self, table: Mapping[str, int], types: Sequence[int]) -> None:
        self._tokens = {
            len(text): i
            for text, i in table.items()
            if types[i] == NORMAL and text and not text.strip("\n")
        }
        self._lengths = {i: n for n, i in self._tokens.items()}

    def whole(self, ids: list[int]) -> list[int]:
        """Ids of a text, with one token for each run of line ends that is one."""
        if sum(map(self._lengths.__contains__, ids)) < 2:
            return ids
        found: list[int] = []
        run: list[int] = []
        for token in [*ids, None]:
            if token in self._lengths:
                run.append(token)
                continue
            whole = self._tokens.get(sum(self._lengths[i] for i in run)) if len(run) > 1 else None
            found += run if whole is None else [whole]
            run = []
            if token is not None:
                found.append(token)
        return found
