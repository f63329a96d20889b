"""The meaning of each option of a generation, for `help()` and docs/python.md. Types and defaults come from the declarations.

`with_options` adds the list to a method's docstring, so that help(Engine.generate) is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar, get_type_hints

from pyspec.request import Request, SamplingParams

F = TypeVar("F", bound=Callable[..., Any])

TEXTS = {
    "temperature": "randomness: 0 or less always takes the likeliest token, 0.8 is usual, above 1 gets wild",
    "top_k": "choose among this number of likeliest tokens; 0: all",
    "top_p": "choose among the likeliest tokens that together have this probability; 1: all",
    "min_p": "drop tokens that are less likely than this share of the likeliest one; 0: none",
    "typical_p": "locally typical sampling: keep this probability of tokens whose surprise is near the mean; 1: off",
    "min_keep": "samplers that drop tokens keep at least this number",
    "repeat_penalty": "divide the logits of recent tokens by this; 1: off",
    "repeat_last_n": "tokens that the penalties look back on; 0: none, -1: all",
    "presence_penalty": "subtract this from the logits of recent tokens",
    "frequency_penalty": "subtract this for each recent occurrence of a token",
    "dry_multiplier": "strength of DRY, which makes it unlikely to repeat a sequence; 0: off",
    "dry_base": "DRY: growth of the penalty with the length of the repetition",
    "dry_allowed_length": "DRY: tokens that may be repeated without a penalty",
    "dry_penalty_last_n": "DRY: tokens that it looks back on; 0: none, -1: all",
    "dry_sequence_breakers": "DRY: texts that end a repetition",
    "logit_bias": "pairs (token id, number added to its logit); -inf bans the token",
    "seed": "of the random draws: the same seed gives the same text; -1 draws a seed",
    "logprobs": "report the log probability of each token and of this number of alternatives, from 0 on; None: none",
    "ignore_eos": "continue where the model would end",
    "min_tokens": "no end before this number of tokens",
    "samplers": "their order, by name; (): llama.cpp's",
    "top_n_sigma": "keep tokens within this number of standard deviations of the largest logit; 0 and below: off",
    "xtc_probability": "XTC: chance to drop all likely tokens but the last; 0: off",
    "xtc_threshold": "XTC: least probability of a likely token; above 0.5: off",
    "dynatemp_range": "range in which the temperature follows the entropy; 0: off",
    "dynatemp_exponent": "exponent of that dependence",
    "mirostat": "version 1 or 2 of Mirostat, in place of the other samplers; 0: off",
    "mirostat_tau": "Mirostat: surprise to hold, in bits",
    "mirostat_eta": "Mirostat: how fast it adapts",
    "adaptive_target": "adaptive-p: probability of chosen tokens to hold; below 0: off",
    "adaptive_decay": "adaptive-p: how slowly it forgets",
    "post_sampling": "`logprobs` are those after the samplers instead of the model's own",
    "max_tokens": "most tokens to generate; -1: until the context is full",
    "stop": "text, or a list of texts, that ends the answer; it is not part of the text",
    "cache_prompt": "reuse the prefix cache, and add to it",
    "n_draft_max": "most tokens to draft a round; None: the engine decides, 0: no speculation",
    "slot": "the slot to run in; -1: any",
    "max_predict_ms": "milliseconds of generating after which the answer ends; 0: no limit",
    "json_schema": "a JSON Schema, as an object or as JSON text, that the text follows; {} is any JSON",
    "grammar": "a grammar, llama.cpp's GBNF or lark, that the text matches",
    "regex": "a regular expression that the whole text matches",
    "choices": "a list of texts; the answer is one of them",
    "params": "a pyspec.SamplingParams: values for the sampling options that are not given",
}
GROUPS = {
    "How far it goes, and where it runs": (
        "max_tokens",
        "stop",
        "cache_prompt",
        "n_draft_max",
        "slot",
        "max_predict_ms",
    ),
    "The text has to match one of": ("json_schema", "grammar", "regex", "choices"),
}


@dataclass(frozen=True)
class Option:
    """One option, as help shows it."""

    name: str
    type: str
    default: str
    text: str


def options() -> Iterator[tuple[str, list[Option]]]:
    """Groups of options with their titles, in the order of help."""
    named = {name for names in GROUPS.values() for name in names}
    for title, names in GROUPS.items():
        yield title, [_option(name) for name in names]
    yield "How the next token is chosen", [_option(name) for name in TEXTS if name not in named]


def _option(name: str) -> Option:
    from pyspec.engine.options import GenerateOptions  # help of the command line needs the texts alone

    hints = get_type_hints(GenerateOptions)
    return Option(name, _type_text(hints[name]), _default(name), TEXTS[name])


def _default(name: str) -> str:
    for holder in (SamplingParams, Request):
        for field in fields(holder):
            if field.name == name and field.default is not MISSING:
                return repr(field.default)
    return "None"


def _type_text(hint: Any) -> str:
    text = hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else str(hint)
    for module in ("collections.abc.", "typing.", "pyspec.request."):
        text = text.replace(module, "")
    return text


def help_text(indent: str = " " * 8) -> str:
    """All options as lines of a docstring."""
    lines: list[str] = []
    for title, group in options():
        lines += ["", f"{indent}{title}:", ""]
        for option in group:
            lines.append(f"{indent}    {option.name}: {option.type} = {option.default}")
            lines.append(f"{indent}        {option.text}")
    return "\n".join(lines)


def with_options(method: F) -> F:
    """The method with the options in its docstring."""
    method.__doc__ = f"{(method.__doc__ or '').rstrip()}\n{help_text()}\n{' ' * 8}"
    return method
