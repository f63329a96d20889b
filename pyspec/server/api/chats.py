"""A chat's body, planned: what the template renders, how the answer is read, and what bounds it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyspec.errors import RequestError
from pyspec.request import Grammar, ThinkBudget
from pyspec.server.api.calls import CallPlan, call_plan
from pyspec.server.api.constrained import kept_grammar, wanted
from pyspec.server.api.prompts import begun_answer, chat_ids, continued_part
from pyspec.server.api.schema import ChatBody
from pyspec.server.api.spoken import spoken
from pyspec.server.engine import EngineLike, TokenizerLike
from pyspec.server.settings import ServerSettings
from pyspec.text.markup.dialect import AnswerMarkup, Dialect, think_marks
from pyspec.text.markup.held import control_tokens, ends_open, held_calls, shown_tokens
from pyspec.text.markup.reasoning import ThinkMarks


@dataclass(frozen=True)
class ChatPlan:
    """A prompt, and what its answer may be."""

    prompt: tuple[int, ...]
    markup: AnswerMarkup
    shown: tuple[int, ...]
    budget: ThinkBudget | None
    grammar: Grammar | None
    begun: str = ""  # what stands of the answer already, behind its reasoning
    calls: tuple[str, ...] = ()  # where the text may be held to a grammar: calls in its place, as lark

    @property
    def free(self) -> str:
        """Text up to and including this no grammar holds: the end of reasoning, if the answer begins within it."""
        return self.markup.think.end if self.markup.think is not None and self.markup.is_open else ""


def plan_chat(engine: EngineLike, body: ChatBody, settings: ServerSettings, *, compiles: bool) -> ChatPlan:
    """Check a chat's body and make its prompt. Raises RequestError, NotSupported, NotCompiled."""
    template = engine.info.chat_template
    speaks, think = spoken(template, settings), think_marks(template)
    calls = call_plan(body, speaks)
    prompt = chat_ids(engine, body, settings)
    form = body.reasoning_format or settings.reasoning_format
    is_open = think is not None and (
        continued_part(body, settings) == "reasoning_content" or ends_open(engine.tokenizer, prompt, think)
    )
    is_shown = form == "none" or (form == "deepseek-legacy" and bool(body.stream))
    beside = _in_place(engine, speaks, calls) if calls.schemas and not calls.is_bound and wanted(body) else []
    markup = AnswerMarkup(
        calls=speaks if calls.schemas else None,
        think=think,
        is_open=is_open,
        is_shown=is_shown,
        is_whole=form == "deepseek-legacy",
        tools=calls.schemas,
        is_bound=calls.is_bound,
        trigger=beside[0][1] if beside else "",
    )
    grammar = None if beside else _call_grammar(engine, calls, markup, compiles)
    return ChatPlan(
        prompt=tuple(prompt),
        markup=replace(markup, is_held=grammar is not None or bool(beside)),
        shown=shown_tokens(engine.tokenizer, markup),
        budget=_budget(engine.tokenizer, body, settings, think, is_open),
        grammar=grammar,
        begun=_behind(begun_answer(body, settings), think),
        calls=tuple(source for source, _ in beside),
    )


def _behind(begun: str, think: ThinkMarks | None) -> str:
    """Of an answer that has begun, what stands behind reasoning that is a part of it."""
    if think is None or think.start not in begun:
        return begun
    return begun.rpartition(think.end)[2].lstrip()


def _in_place(engine: EngineLike, speaks: Dialect | None, calls: CallPlan) -> list[tuple[str, str]]:
    """Calls that are held to their schemas; if these can not be kept and need not be, with any arguments. Each with its begin."""
    assert speaks is not None
    control = control_tokens(engine.tokenizer, speaks)
    found = [speaks.in_place(calls.schemas, is_single=calls.is_single, control=control)]
    if not calls.is_held:
        found.append(speaks.in_place({name: {} for name in calls.schemas}, is_single=calls.is_single, control=control))
    return found


def _call_grammar(engine: EngineLike, calls: CallPlan, markup: AnswerMarkup, compiles: bool) -> Grammar | None:
    """What holds the answer to the tools' schemas; None where nothing does. Of a model that is told how to call all calls are held:
    if not to their schemas, because these can not be kept, to the form."""
    if markup.calls is None or not (calls.is_held or markup.calls.is_told):
        return None
    try:
        held = held_calls(engine.tokenizer, markup, is_single=calls.is_single)
        return kept_grammar(engine, held, compiles=compiles)
    except RequestError as e:
        if calls.is_held:
            raise RequestError(f"tools: their schemas can not be kept: {e}") from None
    free = replace(markup, tools={name: {} for name in calls.schemas})
    return kept_grammar(engine, held_calls(engine.tokenizer, free, is_single=calls.is_single), compiles=compiles)


def _budget(
    tokenizer: TokenizerLike, body: ChatBody, settings: ServerSettings, think: ThinkMarks | None, is_open: bool
) -> ThinkBudget | None:
    """How long it may think, as the body or the server says; without a word on it, or where nothing thinks, as long as it likes."""
    said = (body.reasoning_budget_tokens, body.thinking_budget_tokens, body.reasoning_budget)
    n_tokens = next((n for n in said if n is not None and n >= 0), settings.reasoning_budget)
    if n_tokens < 0 or think is None:
        return None
    message = (
        settings.reasoning_budget_message if body.reasoning_budget_message is None else body.reasoning_budget_message
    )
    forced = [
        *(tokenizer.encode(message, add_special=False, parse_special=False) if message else ()),
        *tokenizer.encode(think.end, add_special=False, parse_special=True),
    ]
    return ThinkBudget(n_tokens=n_tokens, start=think.start, end=think.end, is_open=is_open, forced=tuple(forced))
