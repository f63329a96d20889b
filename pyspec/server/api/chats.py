"""The plan of a chat: the rendered prompt, the answer's parser, and the answer's constraints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pyspec.engine.sight import Sighted
from pyspec.errors import RequestError
from pyspec.request import ThinkBudget
from pyspec.server.api.constrained import compiled_grammar, wanted
from pyspec.server.api.pictures import SentPictures
from pyspec.server.api.prompts import answer_start, chat_prompt, continued_part
from pyspec.server.api.schema import Chat, ChatBody
from pyspec.server.engine import EngineLike
from pyspec.server.settings import ServerSettings
from pyspec.text.answer_plan import AnswerPlan, CallPlan, call_plan, plan_answer, tool_choice
from pyspec.text.markup.answer_grammar import ends_open
from pyspec.text.markup.dialect import AnswerMarkup, Dialect, dialect_for, think_marks
from pyspec.text.markup.reasoning import ThinkMarks
from pyspec.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ChatPlan:
    """A prompt, and the constraints of its answer."""

    prompt: Sighted
    answer: AnswerPlan
    budget: ThinkBudget | None
    begun: str = ""  # the given start of the answer, after its reasoning


def plan_chat(
    engine: EngineLike,
    body: ChatBody,
    settings: ServerSettings,
    pictures: SentPictures,
    *,
    compiles: bool,
) -> ChatPlan:
    """Check a chat body and build its prompt. Raises RequestError, NotSupported, NotCompiled."""
    think = think_marks(engine.info.chat_template)
    calls = calls_of(body, dialect_for(engine.info.chat_template, settings.tool_call_parser))
    prompt = chat_prompt(engine, body, settings, pictures)
    form = body.reasoning_format or settings.reasoning_format
    is_open = think is not None and (
        continued_part(body, settings) == "reasoning_content"
        or ends_open(engine.tokenizer, prompt.ids, think)
    )
    is_shown = form == "none" or (form == "deepseek-legacy" and bool(body.stream))
    is_whole = form == "deepseek-legacy"
    markup = AnswerMarkup(think=think, is_open=is_open, is_shown=is_shown, is_whole=is_whole)
    keep = partial(compiled_grammar, engine, compiles=compiles)
    return ChatPlan(
        prompt=prompt,
        answer=plan_answer(engine.tokenizer, calls, markup, keep, has_grammar=bool(wanted(body))),
        budget=_budget(engine.tokenizer, body, settings, think, is_open),
        begun=_behind(answer_start(body, settings), think),
    )


def with_tools(sent: dict[str, Any]) -> dict[str, Any]:
    """A body whose `functions`, the name that OpenAI's clients gave tools at first, are tools, in its history, too."""
    value = dict(sent)
    functions, choice = value.get("functions"), value.get("function_call")
    if isinstance(functions, list) and functions and not value.get("tools"):
        value["tools"] = [{"type": "function", "function": each} for each in value.pop("functions")]
        if value.pop("function_call", None) is not None:
            is_word = isinstance(choice, str)
            value["tool_choice"] = choice if is_word else {"type": "function", "function": choice}
    messages: list[Any] = []
    called: dict[Any, str] = {}  # the last call's id, by its name
    for i, message in enumerate(sent["messages"]):
        call = message.get("function_call") if isinstance(message, dict) else None
        if isinstance(call, dict):
            called[call.get("name")] = f"call_{i}"
            message = {key: each for key, each in message.items() if key != "function_call"}
            message["tool_calls"] = [{"id": f"call_{i}", "type": "function", "function": call}]
        elif isinstance(message, dict) and message.get("role") == "function":
            id_ = called.get(message.get("name"), f"call_{i}")
            message = message | {"role": "tool", "tool_call_id": id_}
        messages.append(message)
    return value | {"messages": messages}


def calls_of(body: Chat, speaks: Dialect | None) -> CallPlan:
    """The plan for the tools of a body. Raises RequestError, NotSupported."""
    choice = tool_choice(body.tool_choice)
    if body.parse_tool_calls is False:
        if choice.wanted == "required":
            raise RequestError("parse_tool_calls: it must not be false if a call is required")
        choice = replace(choice, wanted="none")
    tools = [tool.sent for tool in body.tools or ()]
    return call_plan(tools, choice, speaks, parallel=body.parallel_tool_calls is not False)


def _behind(begun: str, think: ThinkMarks | None) -> str:
    """The content of an answer's given start, without its reasoning."""
    if think is None or think.start not in begun:
        return begun
    return begun.rpartition(think.end)[2].lstrip()


def _budget(
    tokenizer: Tokenizer,
    body: ChatBody,
    settings: ServerSettings,
    think: ThinkMarks | None,
    is_open: bool,
) -> ThinkBudget | None:
    """The limit of thinking tokens from the body or the server; None if neither sets one, or the model does not think."""
    said = (body.reasoning_budget_tokens, body.thinking_budget_tokens, body.reasoning_budget)
    n_tokens = next((n for n in said if n is not None and n >= 0), settings.reasoning_budget)
    if n_tokens < 0 or think is None:
        return None
    message = (
        settings.reasoning_budget_message
        if body.reasoning_budget_message is None
        else body.reasoning_budget_message
    )
    forced = [
        *(tokenizer.encode(message, add_special=False, parse_special=False) if message else ()),
        *tokenizer.encode(think.end, add_special=False, parse_special=True),
    ]
    start, end = think.start, think.end
    return ThinkBudget(n_tokens=n_tokens, start=start, end=end, is_open=is_open, forced=tuple(forced))
