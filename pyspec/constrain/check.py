"""Compiles a request's grammar before the request is queued, in a process that bounds the cost of a hostile grammar."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace

from pyspec.constrain.child import first_line, question
from pyspec.constrain.grammar import check_size
from pyspec.constrain.trie import TokenTable
from pyspec.errors import RequestError, Unavailable
from pyspec.request import Grammar
from pyspec.text.sandbox_process import STALLED, SandboxProcess
from pyspec.text.tokenizer import Tokenizer

TIME_S, START_S = 2.0, 20.0
KEPT_BYTES = 8 << 20  # of recent grammars and their results


class GrammarCheck:
    """Compiles grammars for one model. Safe to use from several threads; a recent grammar costs nothing."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, Grammar | str] = OrderedDict()
        self._n_bytes = 0
        self._box = SandboxProcess(
            "pyspec.constrain.child",
            lambda: first_line(TokenTable.of(tokenizer, n_vocab)),
            first_s=START_S,
            died="made the process die that compiles it (too much memory or too deep a recursion)",
        )

    def compiled(self, grammar: Grammar) -> Grammar:
        """The compiled grammar. Raises RequestError if it is invalid or too large; Unavailable if the process got no time."""
        found = self.known(grammar)
        if found is None:
            check_size(grammar)
            found = _or_raise(self._ask(grammar))
        return found

    def known(self, grammar: Grammar) -> Grammar | None:
        """The result for a recent grammar, at once; None for another grammar. Raises RequestError."""
        with self._lock:
            found = self._kept.get(grammar)
            if found is not None:
                self._kept.move_to_end(grammar)
        return None if found is None else _or_raise(found)

    def _ask(self, grammar: Grammar) -> Grammar | str:
        answer = self._box.ask(question(grammar), TIME_S)
        if STALLED in answer:  # not the grammar's fault, so the result is not kept
            why = answer[STALLED]
            raise Unavailable(f"the {grammar.kind} could not be compiled: {why}; try again")
        if "failed" in answer:
            why = answer["failed"]
            found: Grammar | str = why if why.startswith("the ") else f"the {grammar.kind} {why}"
        else:
            found = replace(grammar, kind="compiled", source=answer["text"], calls="")
        with self._lock:
            self._keep(grammar, found)
            if isinstance(found, Grammar):
                self._keep(found, found)
        return found

    def _keep(self, grammar: Grammar, found: Grammar | str) -> None:
        if grammar not in self._kept:
            self._n_bytes += _size(grammar, found)
            self._kept[grammar] = found
        while self._n_bytes > KEPT_BYTES:
            old = self._kept.popitem(last=False)
            self._n_bytes -= _size(*old)


def _or_raise(found: Grammar | str) -> Grammar:
    if isinstance(found, str):
        raise RequestError(found)
    return found


def _size(grammar: Grammar, found: Grammar | str) -> int:
    return (
        len(grammar.source)
        + len(grammar.calls)
        + len(grammar.begun)
        + len(grammar.lead)
        + len(found if isinstance(found, str) else found.source)
    )
