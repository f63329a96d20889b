"""Reasoning before an answer: from <think> to </think>. <think> may be part of the prompt.

Some models call a tool without the end mark, so a call ends the reasoning, too. A mention of a call does not: a mark in quotes or in a
fenced block, or one that no call of an offered tool follows.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspec.text.markup.ahead import GAP, NAME, Lookahead, LookaheadTree, Names, Step
from pyspec.text.markup.prose import Prose
from pyspec.text.markup.reader import AnswerReader, Steps, Trimmed, beginnings


@dataclass(frozen=True, slots=True)
class ThinkMarks:
    """The marks around reasoning.

    answer   those around the text behind it, if the models write them
    marks    further texts of an answer whose messages have channels; (): it has none
    content  what such an answer writes before its content, and `again` between messages
    opens    begin the text behind it, too, and end reasoning that is not closed
    strays   these and other marks that mean nothing in an answer
    headers  of messages, of which an answer may have several: the first form is of reasoning, which no call ends
    lead     lark of such messages before a call, and of its own header
    """

    start: str
    end: str
    answer: tuple[str, str] | None = None
    marks: tuple[str, ...] = ()
    content: str = ""
    again: str = ""
    opens: Step = ()
    strays: Step = ()
    headers: tuple[Lookahead, ...] = ()
    lead: str = ""

    @property
    def is_chain(self) -> bool:
        """True if answers are chains of messages with channels (`harmony`)."""
        return bool(self.marks)


THINK = ThinkMarks("<think>", "</think>")
GRANITE_THINK = ThinkMarks("<think>", "</think>", ("<response>", "</response>"))
"""Of ERNIE, too."""
GEMMA4_THINK = ThinkMarks("<|channel>thought", "<channel|>", strays=("<channel|>",))
COHERE_THINK = ThinkMarks(
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    opens=(opens := ("<|START_RESPONSE|>", "<|START_TEXT|>")),
    strays=(*opens, "<|END_RESPONSE|>", "<|END_TEXT|>"),
)
_MESSAGE: Step = ("<|message|>",)
_HEADER = r'/ to=[^<\s]{1,128}/ "<|message|>"'
MUSE_THINK = ThinkMarks(
    "to=self<|message|>",
    "<|eom|>",
    opens=("<|start|>assistant",),
    strays=("<|start|>assistant", "<|eom|>", "<|eot|>", *_MESSAGE),
    headers=((("to=",), Names(["self"]), GAP, _MESSAGE), (("to=",), NAME, GAP, _MESSAGE)),
    lead=f'({_HEADER} TEXT? "<|eom|><|start|>assistant")* ({_HEADER})?',
)
KIMI_K3_THINK = ThinkMarks(
    "<|open|>think<|sep|>",
    "<|close|>think<|sep|>",
    opens=("<|open|>response<|sep|>",),
    strays=(
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|>",
        "<|close|>message<|sep|>",
        "<|end_of_msg|>",
    ),
)
MISTRAL_THINK = ThinkMarks("[THINK]", "[/THINK]")
SEED_THINK = ThinkMarks("<seed:think>", "</seed:think>")


@dataclass(frozen=True, slots=True)
class ThoughtForm:
    """How to read the reasoning of one answer.

    is_open   the prompt ends inside it
    is_shown  it stays in the content, with its marks
    heads     starts of calls that end it; (): no call ends it
    """

    is_open: bool
    is_shown: bool
    heads: tuple[Lookahead, ...] = ()


def read_reasoning(reader: AnswerReader, marks: ThinkMarks, form: ThoughtForm) -> Steps[bool]:
    """Read the reasoning at the beginning of an answer. Returns whether there was any."""
    if not form.is_open:
        spaces = yield from reader.take_spaces()
        if not (yield from reader.take_mark(marks.start)):
            reader.put_back(spaces)
            return False
        if form.is_shown:
            reader.content(spaces + marks.start)
    out = Trimmed(reader.content, trims_start=False) if form.is_shown else Trimmed(reader.reasoning)
    thought = Prose(out)
    starts = [mark for head in form.heads for mark in head[0]]
    options = beginnings([marks.end, *marks.opens, *starts])
    heads = LookaheadTree(form.heads)
    while (mark := (yield from reader.find(options, thought))) not in ("", marks.end):
        if mark in marks.opens or (not thought.quotes() and (yield from reader.sees(heads))):
            reader.strays = (marks.end,)
            return True
        thought((yield from reader.take_mark(mark)))
    yield from reader.take_mark(marks.end)
    if form.is_shown:
        out.flush()
        reader.content(mark)
    return True
