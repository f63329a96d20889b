"""Compiles a request's grammar before the request is queued, in a process that bounds the cost of a hostile grammar.

llguidance's limits and the system hold in that process, which is started as `python -m pyspec.constrain.check`: JSON lines, the
vocabulary first, then one grammar per line.
"""

from __future__ import annotations

import base64
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, replace

from llguidance import LLMatcher, LLTokenizer

from pyspec.constrain.grammar import check_size, compile_text
from pyspec.constrain.trie import LIMITS, TokenTable, begin, one_line
from pyspec.errors import RequestError, Unavailable
from pyspec.ranges import printable
from pyspec.request import Grammar
from pyspec.text.rust import border
from pyspec.text.sandbox_process import STALLED, SandboxProcess, serve
from pyspec.text.tokenizer import Tokenizer

TIME_S, START_S = 2.0, 20.0
BEGUN_CHARS = 80  # characters of a begun answer that a refusal shows
MEMORY_BYTES = 2 << 30  # of address space, including the interpreter and its threads
KEPT_BYTES = 8 << 20  # of recent grammars and their results


class GrammarCheck:
    """Compiles grammars for one model. Safe to use from several threads; a recent grammar costs nothing."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, Grammar | str] = OrderedDict()
        self._n_bytes = 0
        self._box = SandboxProcess(
            "pyspec.constrain.check",
            lambda: _first_line(TokenTable.of(tokenizer, n_vocab)),
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
        answer = self._box.ask(json.dumps(asdict(grammar)).encode() + b"\n", TIME_S)
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


def _first_line(table: TokenTable) -> bytes:
    """The line with the vocabulary, before any grammar."""
    tokens = [base64.b64encode(t).decode() for t in table.tokens]
    return json.dumps([tokens, list(table.special), list(table.eog)]).encode() + b"\n"


def answers(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    """The child's answer to each line: to the vocabulary, then to each grammar."""
    tokens, special, eog = json.loads(next(lines))
    table = TokenTable([base64.b64decode(t) for t in tokens], special, eog)
    tokenizer = table.build(lambda text: [])
    yield {"text": ""}
    for line in lines:
        grammar = Grammar(**json.loads(line))
        try:
            with border(RequestError, f"the {grammar.kind} can not be compiled"):
                found = _answer(table, tokenizer, grammar)
            yield found
        except RequestError as e:
            yield {"failed": str(e)}
        except MemoryError:
            yield {"failed": f"the {grammar.kind} needs more than {MEMORY_BYTES >> 20} MiB"}


def _answer(table: TokenTable, tokenizer: LLTokenizer, grammar: Grammar) -> dict[str, str]:
    """{"text": the grammar, compiled}, or {"failed": why}."""
    try:
        text = compile_text(grammar, table)
    except RequestError as e:
        return {"failed": str(e)}
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
    if matcher.is_error():
        return {"failed": f"the {grammar.kind} can not be used: {one_line(matcher.get_error())}"}
    if begin(tokenizer, matcher, grammar.begun) is None:
        begun = printable(grammar.begun, BEGUN_CHARS)
        why = f"the answer has begun with {begun!r}, which it does not allow"
        return {"failed": f"the {grammar.kind} can not be enforced: {why}"}
    begins = matcher.is_stopped() or any(matcher.compute_bitmask())
    if matcher.is_error() or not begins:
        why = one_line(matcher.get_error().partition("<")[0]) if matcher.is_error() else ""
        why = why and f" ({why})"
        return {"failed": f"the {grammar.kind} can not be enforced: no text matches it{why}"}
    return {"text": text}


if __name__ == "__main__":
    serve(answers, MEMORY_BYTES)
