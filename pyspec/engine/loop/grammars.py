"""Compiles the grammars of requests on threads beside the engine's, before the loop gets them: no round waits for one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property

from pyspec.constrain.constraint import Constraint
from pyspec.constrain.phrases import Phrasebooks
from pyspec.constrain.trie import TokenTrie
from pyspec.engine.loop.job import Job, blamed
from pyspec.errors import NoTokenLeft, PyspecError, RequestError
from pyspec.request import Grammar
from pyspec.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

N_THREAD = 2


class Grammars:
    """Gives jobs their constraints. drafts: also phrasebooks of earlier texts, to draft from."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int, *, drafts: bool = False) -> None:
        self.trie = TokenTrie(tokenizer, n_vocab)
        self.books = Phrasebooks() if drafts else None
        self._under_way: set[str] = set()

    @property
    def n_waiting(self) -> int:
        """Jobs whose grammar is being compiled."""
        return len(self._under_way)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(N_THREAD, thread_name_prefix="pyspec-grammar")

    def warm(self) -> None:
        """Build the trie now: for 150,000 tokens it holds the interpreter for half a second."""
        # a vocabulary without an end token: each request with a grammar fails with that reason
        with suppress(RequestError):
            _ = self.trie.walked

    def begin(self, job: Job, grammar: Grammar, done: Callable[[Job], None]) -> None:
        """Compile a checked grammar. `done` is called on a grammar thread, also after a failure (`Job.flaw`)."""
        self._under_way.add(job.id)
        self._threads.submit(self._compile, job, grammar, done)

    def _compile(self, job: Job, grammar: Grammar, done: Callable[[Job], None]) -> None:
        try:
            constraint = Constraint(self.trie, grammar)
            job.constrain(constraint)
            _check_begin(job, constraint)
            constraint.book = None if self.books is None else self.books.of(job.client, grammar.source)
        except Exception as e:
            if not isinstance(e, PyspecError):
                log.exception("the grammar of request %s could not be compiled", job.id)
            job.flaw = blamed(e)
        done(job)
        self._under_way.discard(job.id)


def _check_begin(job: Job, constraint: Constraint) -> None:
    """Raise NoTokenLeft if the request bans every token that its grammar allows first."""
    banned = job.sampler.banned_next()
    if not banned or constraint.is_over or constraint.free is not None:
        return
    if not (constraint.row() & constraint.trie.bits(banned)).any() and not constraint.matcher.is_error():
        raise NoTokenLeft(
            "the request bans every token that its grammar allows first (see logit_bias, ignore_eos and min_tokens): no text fits both"
        )
