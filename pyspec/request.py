"""The engine's input and output: plain data, without torch, picklable. The server, the command line and the Python API use the engine only
through these types, so the engine can run in a separate process without a change to them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Annotated, Literal, TypedDict

from pyspec.errors import PyspecError, RequestError
from pyspec.ranges import INT32, Doc, Flag, Ids, Key, Many, Of, OneOf, Pair, Real, Text, Whole, check
from pyspec.vision.picture import Placed

Finish = Literal["eos", "stop", "length", "cancelled", "error"]
"""How a request ended: end-of-generation token, stop string, token or context limit, cancel, failure."""
FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "error"]
"""OpenAI's finish reasons."""

Share = Annotated[float, Real(0, 1)]
Penalty = Annotated[float, Real(-100, 100)]
Count = Annotated[int, Whole(0, INT32)]
Window = Annotated[int, Whole(-1, INT32)]
ID = re.compile("[0-9]{1,10}")
BIAS = Pair(Whole(0, INT32), Real(-1e10, 1e10, also=(-inf,)))
"""A token id, and the bias of its logit; -inf bans it."""

SAMPLING = "Default sampling"
"""Heading of the sampling flags in help."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """A sampler of the chain: llama.cpp's letter for it, and the values of parameters that switch it off."""

    letter: str
    off: Mapping[str, float]


SAMPLERS = {
    "penalties": Sampler(
        "e", {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    ),
    "dry": Sampler("d", {"dry_multiplier": 0.0}),
    "top_n_sigma": Sampler("s", {"top_n_sigma": -1.0}),
    "top_k": Sampler("k", {"top_k": 0}),
    "typ_p": Sampler("y", {"typical_p": 1.0}),
    "top_p": Sampler("p", {"top_p": 1.0}),
    "min_p": Sampler("m", {"min_p": 0.0}),
    "xtc": Sampler("x", {"xtc_probability": 0.0}),
    "temperature": Sampler("t", {"temperature": 1.0, "dynatemp_range": 0.0}),
    "adaptive_p": Sampler("a", {"adaptive_target": -1.0}),
}
"""The samplers in llama.cpp's order, under its names."""
LAST = "adaptive_p"  # it chooses: it runs last, if its target is set, wherever it is named
DEFAULT_SAMPLERS = tuple(name for name in SAMPLERS if name != LAST)
LETTERS = {sampler.letter: name for name, sampler in SAMPLERS.items()}
ALIASES = {
    "nucleus": "top_p",
    "temp": "temperature",
    "typ": "typ_p",
    "typical_p": "typ_p",
    "typical": "typ_p",
}
ALIASES |= {name.replace("_", sign): name for sign in ("_", "-", "") for name in SAMPLERS}


def sampler_of(name: str) -> str:
    """llama.cpp's name of a sampler, from its letter or any variant; "" if unknown."""
    return LETTERS.get(name, "") if len(name) == 1 else ALIASES.get(name.lower(), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Parameters for choosing the next token, with llama.cpp's defaults. `temperature` 0 is greedy: the exact argmax.

    Logit bias comes first and the random draw last; between them run the samplers in the order of `samplers`; () is llama.cpp's order,
    DEFAULT_SAMPLERS. Mirostat replaces all of them except temperature.
    """

    # fmt: off
    temperature: Annotated[float, Real(-100, 100, "0 and below: greedy"), Flag("--temp --temperature $TEMPERATURE", SAMPLING), Key("temp"), Doc("randomness: 0 or less always takes the likeliest token, 0.8 is usual, above 1 gets wild")] = 0.8
    top_k: Annotated[Window, Flag("--top-k $TOP_K", SAMPLING), Key("top_k"), Doc("choose among this number of likeliest tokens; 0: all")] = 40
    top_p: Annotated[Share, Flag("--top-p $TOP_P", SAMPLING), Key("top_p"), Doc("choose among the likeliest tokens that together have this probability; 1: all")] = 0.95
    min_p: Annotated[Share, Flag("--min-p $MIN_P", SAMPLING), Key("min_p"), Doc("drop tokens that are less likely than this share of the likeliest one; 0: none")] = 0.05
    typical_p: Annotated[Share, Flag("--typical --typical-p $", SAMPLING), Doc("locally typical sampling: keep this probability of tokens whose surprise is near the mean; 1: off")] = 1.0
    min_keep: Annotated[Count, Doc("samplers that drop tokens keep at least this number")] = 0
    repeat_penalty: Annotated[float, Real(1e-6, 100, "1: off"), Flag("--repeat-penalty $REPEAT_PENALTY", SAMPLING), Key("penalty_repeat"), Doc("divide the logits of recent tokens by this; 1: off")] = 1.0
    repeat_last_n: Annotated[Window, Flag("--repeat-last-n $", SAMPLING), Key("penalty_last_n"), Doc("tokens that the penalties look back on; 0: none, -1: all")] = 64
    presence_penalty: Annotated[Penalty, Flag("--presence-penalty $PRESENCE_PENALTY", SAMPLING), Doc("subtract this from the logits of recent tokens")] = 0.0
    frequency_penalty: Annotated[Penalty, Flag("--frequency-penalty $FREQUENCY_PENALTY", SAMPLING), Doc("subtract this for each recent occurrence of a token")] = 0.0
    dry_multiplier: Annotated[float, Real(0, 100), Flag("--dry-multiplier $", SAMPLING), Doc("strength of DRY, which makes it unlikely to repeat a sequence; 0: off")] = 0.0
    dry_base: Annotated[float, Real(1, 100), Flag("--dry-base $", SAMPLING), Doc("DRY: growth of the penalty with the length of the repetition")] = 1.75
    dry_allowed_length: Annotated[Count, Flag("--dry-allowed-length $", SAMPLING), Doc("DRY: tokens that may be repeated without a penalty")] = 2
    dry_penalty_last_n: Annotated[Window, Flag("--dry-penalty-last-n $", SAMPLING), Doc("DRY: tokens that it looks back on; 0: none, -1: all")] = -1
    dry_sequence_breakers: Annotated[tuple[str, ...], Many(Text()), Doc("DRY: texts that end a repetition")] = ("\n", ":", '"', "*")
    logit_bias: Annotated[tuple[tuple[int, float], ...], Many(BIAS), Doc("a number added to the logit of each of these tokens: {id: number}, or pairs; -inf bans the token")] = ()
    seed: Annotated[int, Whole(-1, 2**64 - 1), Flag("-s --seed $", SAMPLING), Doc("of the random draws: the same seed gives the same text; -1 draws a seed, which the result has")] = -1
    logprobs: Annotated[Count | None, Doc("report the log probability of each token and of this number of alternatives, from 0 on; None: none")] = None
    ignore_eos: Annotated[bool, Flag("--ignore-eos $", SAMPLING), Doc("continue where the model would end")] = False
    min_tokens: Annotated[Count, Doc("no end before this number of tokens")] = 0
    samplers: Annotated[tuple[str, ...], Many(OneOf((*DEFAULT_SAMPLERS, "adaptive_p"))), Doc("their order, by name, each at most once; (): llama.cpp's")] = ()
    top_n_sigma: Annotated[float, Real(-1, 100, "0 and below: off"), Flag("--top-n-sigma --top-nsigma $", SAMPLING), Doc("keep tokens within this number of standard deviations of the largest logit; 0 and below: off")] = -1.0
    xtc_probability: Annotated[Share, Flag("--xtc-probability $", SAMPLING), Key("xtc_probability"), Doc("XTC: chance to drop all likely tokens but the last; 0: off")] = 0.0
    xtc_threshold: Annotated[Share, Flag("--xtc-threshold $", SAMPLING), Key("xtc_threshold"), Doc("XTC: least probability of a likely token; above 0.5: off")] = 0.1
    dynatemp_range: Annotated[float, Real(0, 100), Flag("--dynatemp-range $", SAMPLING), Doc("range in which the temperature follows the entropy; 0: off")] = 0.0
    dynatemp_exponent: Annotated[float, Real(0, 100), Flag("--dynatemp-exp $", SAMPLING), Doc("exponent of that dependence")] = 1.0
    mirostat: Annotated[int, Whole(0, 2), Flag("--mirostat $", SAMPLING), Key("mirostat"), Doc("version 1 or 2 of Mirostat, in place of the other samplers; 0: off")] = 0
    mirostat_tau: Annotated[float, Real(0, 100), Flag("--mirostat-ent $", SAMPLING), Key("mirostat_tau"), Doc("Mirostat: surprise to hold, in bits")] = 5.0
    mirostat_eta: Annotated[float, Real(0, 1), Flag("--mirostat-lr $", SAMPLING), Key("mirostat_eta"), Doc("Mirostat: how fast it adapts")] = 0.1
    adaptive_target: Annotated[float, Real(-1, 1, "below 0: off"), Flag("--adaptive-target $", SAMPLING), Doc("adaptive-p: probability of chosen tokens to hold; below 0: off")] = -1.0
    adaptive_decay: Annotated[float, Real(0, 0.99), Flag("--adaptive-decay $", SAMPLING), Doc("adaptive-p: how slowly it forgets")] = 0.9
    post_sampling: Annotated[bool, Doc("`logprobs` are those after the samplers instead of the model's own")] = False
    # fmt: on

    def __post_init__(self) -> None:
        if isinstance(self.temperature, int | float) and -100 <= self.temperature < 0:
            object.__setattr__(self, "temperature", 0.0)
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(map(_bias, self.logit_bias.items())))

    @property
    def greedy(self) -> bool:
        """True if the choice is an argmax after the deterministic parts of the chain."""
        return self.temperature <= 0.0 and (self.dynatemp_range <= 0.0 or self.mirostat > 0)

    @property
    def is_stepwise(self) -> bool:
        """True if a row needs the samplers that run row by row (see sample/stepwise.py)."""
        return not self.greedy and (
            bool(self.samplers)
            or self.top_n_sigma > 0
            or self.xtc_probability > 0
            or self.dynatemp_range > 0
            or self.mirostat > 0
            or self.adaptive_target >= 0
            or self.post_sampling
        )


class SamplingOptions(TypedDict, total=False):
    """How the next token is chosen, for type checkers: the fields of SamplingParams (tests/engine/test_options.py compares them)."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    min_keep: int
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: tuple[str, ...]
    logit_bias: Mapping[int, float] | Mapping[str, float] | tuple[tuple[int, float], ...]
    seed: int
    logprobs: int | None
    ignore_eos: bool
    min_tokens: int
    samplers: tuple[str, ...]
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    adaptive_target: float
    adaptive_decay: float
    post_sampling: bool


def _bias(pair: tuple[object, object]) -> tuple[object, object]:
    """A token and its bias, of a mapping whose keys may be the texts of JSON."""
    token, bias = pair
    return int(token) if isinstance(token, str) and ID.fullmatch(token) else token, bias


@dataclass(frozen=True, slots=True)
class SamplingGiven:
    """Sampling parameters of which some are given, for example by flags; the model's file may set the others.

    names  the given fields
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    names: frozenset[str] = frozenset()

    def over(self, recommended: SamplingParams) -> SamplingParams:
        """The given values, and the file's recommendations for the rest."""
        return replace(recommended, **{name: getattr(self.params, name) for name in self.names})


GrammarKind = Literal["json_schema", "gbnf", "regex", "lark", "compiled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grammar:
    """A constraint of the generated text.

    kind    json_schema: `source` is a JSON Schema as JSON text, "{}" for any JSON; gbnf: llama.cpp's grammars; regex; lark: llguidance's
            own language, which can embed the others (tool calls are composed in it); compiled: the checked form of one of these
    after   text up to and including the first occurrence of this is free (the end of reasoning, the start of a tool call), also a little
            white space after it; "": constrained from the start
    lazy    the text may end before `after` occurs; otherwise it may not
    calls   lark grammar of alternatives to the text: tool calls
    begun   given start of the text, at the prompt's end: the constraint covers it together with the generated text. Not with `after`
    lead    lark of the whole answer, in which the rule `body` is the text (or a call of `calls`); "": the text is all of it
    """

    kind: Annotated[GrammarKind, OneOf(("json_schema", "gbnf", "regex", "lark", "compiled"))]
    source: Annotated[str, Text()]
    after: Annotated[str, Text()] = ""
    lazy: bool = False
    calls: Annotated[str, Text()] = ""
    begun: Annotated[str, Text()] = ""
    lead: Annotated[str, Text()] = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ThinkBudget:
    """A limit of thinking tokens. After `n_tokens` of reasoning, the tokens `forced` follow regardless of the target's choice.

    start, end   text before and after reasoning
    is_open      the prompt ends within reasoning
    forced       token ids of the message at the end of the budget, including `end`
    """

    n_tokens: Annotated[int, Whole(0, INT32)]
    start: Annotated[str, Text()]
    end: Annotated[str, Text()]
    is_open: bool
    forced: Annotated[tuple[int, ...], Ids()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One generation. `prompt` holds token ids; text is tokenised before.

    resumed  tokens after the prompt that an earlier engine generated and delivered: the request continues after them as if it had
             generated them, and reports only later ones. With a seed, or greedy, the text is the first engine's.
    images   pictures of the prompt, in order. Each of their rows has the id `slots.images.IMAGE` in `prompt`, because handles are an engine's
             own: it fills in ids that tell rows apart. Positions elsewhere (`n_system`, say) count rows.
    """

    # fmt: off
    prompt: Annotated[tuple[int, ...], Ids()]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: Annotated[Window, Doc("most tokens to generate; -1: until the context is full")] = -1
    stop: Annotated[tuple[str, ...], Many(Text()), Doc("text, or a list of texts, that ends the answer; it is not part of the text")] = ()
    cache_prompt: Annotated[bool, Doc("reuse the prefix cache, and add to it")] = True
    n_before_turn: Count = 0  # prompt tokens before the last user turn, if known: a place for a checkpoint
    n_system: Count = 0  # prompt tokens of the system prompt and tools: another place for a checkpoint
    n_stable: Count = 0  # leading prompt tokens that later prompts may share; 0: all
    n_draft_max: Annotated[Count | None, Doc("most tokens to draft a round; None: the engine decides, 0: no speculation")] = None
    slot: Annotated[Window, Doc("the slot to run in; -1: any")] = -1
    timings_per_token: bool = False  # every Delta has the timings so far
    max_predict_ms: Annotated[float, Real(0, INT32), Doc("milliseconds of generating, behind the first token, after which the answer ends with \"length\"; 0: no limit")] = 0.0
    client: Annotated[str, Text()] = ""  # identity of the client: clients take turns in the queue
    cache_salt: Annotated[str, Text(), Doc("requests with different salts share no cached texts; \"\": the common ones")] = ""
    group: Annotated[str, Text()] = ""  # identity of a batch: a client's batches take turns; "": none
    resumed: Annotated[tuple[int, ...], Ids()] = ()
    grammar: Grammar | None = None
    shown: Annotated[tuple[int, ...], Ids()] = ()  # control tokens shown in the text: tokens that mark a call
    think_budget: ThinkBudget | None = None
    prompt_logprobs: Count | None = None  # n: report those of the prompt tokens, and of the n best in their places
    images: Annotated[tuple[Placed, ...], Many(Of(Placed))] = ()
    # fmt: on


def check_request(request: Request) -> None:
    """Raise RequestError for a field with an invalid type or value, for any model."""
    if not isinstance(request, Request):
        raise RequestError(f"a request is a pyspec.request.Request, not a {type(request).__name__}")
    check(request, RequestError)
    check(request.params, RequestError)
    if request.think_budget is not None:
        check(request.think_budget, RequestError)
    if request.grammar is not None:
        check_grammar(request.grammar)


def check_grammar(grammar: Grammar) -> None:
    """Raise RequestError for an object that is no grammar; the compiler checks its source later."""
    if not isinstance(grammar, Grammar):
        raise RequestError(f"a grammar is a pyspec.request.Grammar, not a {type(grammar).__name__}")
    check(grammar, RequestError)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token under the target, before sampling cuts, and of the best alternatives."""

    token: Annotated[int, Doc("its id")]
    logprob: Annotated[float, Doc("0 is certain; -inf: banned")]
    top: Annotated[
        tuple[tuple[int, float], ...], Doc("the best tokens, each with its own, the best first")
    ] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """llama-server's `timings`. Rates exclude the first token, which the prompt's forward produces."""

    # fmt: off
    cache_n: Annotated[int, Doc("prompt tokens taken from the prefix cache")] = 0
    disk_n: Annotated[int, Doc("of these, read from its tier on disk")] = 0
    prompt_n: Annotated[int, Doc("prompt tokens processed")] = 0
    prompt_ms: Annotated[float, Doc("milliseconds from the start in a slot to the first token")] = 0.0
    predicted_n: Annotated[int, Doc("tokens generated, an end-of-generation token included")] = 0
    predicted_ms: Annotated[float, Doc("milliseconds from the first token to the last")] = 0.0
    draft_n: Annotated[int, Doc("drafted tokens that were verified")] = 0
    draft_n_accepted: Annotated[int, Doc("of these, accepted")] = 0
    n_rounds: Annotated[int, Doc("target forwards of this request after the prompt")] = 0
    drafted_per_pos: Annotated[tuple[int, ...], Doc("number of times that draft position i was verified")] = ()
    accepted_per_pos: Annotated[tuple[int, ...], Doc("number of times that it was accepted")] = ()
    n_draft_used: Annotated[tuple[int, ...], Doc("rounds by the length of their draft, from 0 on")] = ()
    suffix_n: Annotated[int, Doc("of draft_n, tokens of suffix drafts")] = 0
    suffix_n_accepted: Annotated[int, Doc("of these, accepted")] = 0
    synthetic: Annotated[bool, Doc("acceptance was simulated (synth_len)")] = False
    cache_break_at: Annotated[int, Doc("first prompt token at which the client's nearest cached text differs or ends; -1: none")] = -1
    # fmt: on

    @property
    def prompt_per_second(self) -> float:
        """Prompt tokens processed per second."""
        return 1e3 * self.prompt_n / self.prompt_ms if self.prompt_ms > 0 else 0.0

    @property
    def predicted_per_second(self) -> float:
        """Tokens per second after the first one; 0.0 if there are none."""
        return (
            1e3 * (self.predicted_n - 1) / self.predicted_ms
            if self.predicted_n > 1 and self.predicted_ms > 0
            else 0.0
        )

    @property
    def mean_len(self) -> float:
        """Tokens committed per round, the bonus token included (acceptance length)."""
        return 1.0 + self.draft_n_accepted / self.n_rounds if self.n_rounds else 1.0


@dataclass(frozen=True, slots=True)
class Started:
    """The request has a slot; `n_cached` of its prompt tokens need no processing."""

    request: str
    slot: int
    n_prompt: int
    n_cached: int


@dataclass(frozen=True, slots=True)
class Progress:
    """A prompt chunk is done."""

    request: str
    n_prompt: int
    n_cached: int
    n_processed: int  # including the cached ones
    ms: float


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of the prompt tokens from `first` on, given the tokens before them. The prompt's first token has none.

    ranks  for each token, the number of tokens that are at least as likely, itself included

    A row of a picture has the token `slots.images.IMAGE`, no log probability (NaN), and the rank 0.
    """

    request: str
    first: int
    entries: tuple[TokenLogprob, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """The tokens committed in a round, and the released text.

    `text` lags behind `tokens` while a UTF-8 sequence is incomplete or a stop string may be starting; `logprobs` has one
    entry per token if requested.
    """

    # fmt: off
    request: Annotated[str, Doc("its id, for `cancel`")]
    tokens: Annotated[tuple[int, ...], Doc("ids that are final, in order")]
    text: Annotated[str, Doc("new text")]
    logprobs: Annotated[tuple[TokenLogprob, ...], Doc("one entry for each of `tokens`, if requested")] = ()
    n_draft: Annotated[int, Doc("drafted tokens that this round verified")] = 0
    n_accepted: Annotated[int, Doc("of these, accepted")] = 0
    timings: Annotated[Timings | None, Doc("those so far, if the request has `timings_per_token`")] = None
    # fmt: on


@dataclass(frozen=True, slots=True)
class Done:
    """The request ended well, or was cancelled. No event follows."""

    # fmt: off
    request: Annotated[str, Doc("its id")]
    finish: Annotated[Finish, Doc("eos: the model ended it; stop: a stop string; length: a limit of tokens, time or context; cancelled")]
    n_prompt: Annotated[int, Doc("tokens of the prompt")]
    n_predicted: Annotated[int, Doc("tokens generated")]
    timings: Annotated[Timings, Doc("times and counts")]
    stop_string: Annotated[str, Doc("the stop string that ended it")] = ""
    truncated: Annotated[bool, Doc("the context was full")] = False
    slot: Annotated[int, Doc("where it ran; -1: nowhere, it ended before")] = -1
    n_in_stop: Annotated[int, Doc("last tokens that are part of the stop string")] = 0
    seed: Annotated[int, Doc("of its random draws, given or drawn; -1: unknown")] = -1
    # fmt: on

    @property
    def text(self) -> str:
        """Empty: all text was in deltas. So a loop may read `text` of every event of a stream."""
        return ""

    @property
    def content(self) -> str:
        """Empty, as `text`, for streams of chats."""
        return ""

    @property
    def reasoning(self) -> str:
        """Empty, as `content`."""
        return ""

    @property
    def tool_calls(self) -> tuple[()]:
        """Empty, as `content`."""
        return ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended with an error; other requests are not affected. No event follows."""

    request: str
    error: PyspecError


def finish_reason(finish: Finish, *, has_called: bool = False) -> FinishReason:
    """OpenAI's finish reason. has_called: the answer has tool calls, unless its limit cut them off."""
    if finish == "eos" or finish == "stop":
        return "tool_calls" if has_called else "stop"
    return finish


Event = Started | Progress | PromptLogprobs | Delta | Done | Failed


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotInfo:
    """One row of `/slots`."""

    # fmt: off
    slot: Annotated[int, Doc("its number, from 0 on")]
    n_ctx: Annotated[int, Doc("tokens that it holds")]
    is_processing: Annotated[bool, Doc("a request runs in it")]
    request: Annotated[str, Doc("id of that request, or of the last one")] = ""
    state: Annotated[Literal["idle", "prefill", "decode"], Doc("prefill: it reads its prompt; decode: it generates")] = "idle"
    n_prompt: Annotated[int, Doc("tokens of the prompt")] = 0
    n_prompt_processed: Annotated[int, Doc("of these, read or taken from the cache so far")] = 0
    n_cached: Annotated[int, Doc("of these, taken from the cache")] = 0
    n_decoded: Annotated[int, Doc("tokens generated so far")] = 0
    n_remain: Annotated[int, Doc("tokens that it may still generate; -1: until the context is full")] = -1
    n_past: Annotated[int, Doc("tokens whose keys and values it holds")] = 0
    n_draft: Annotated[int, Doc("tokens of the last round's draft, the controller's choice")] = 0
    draft_reason: Annotated[str, Doc("the reason for that choice")] = ""
    draft_window: Annotated[int, Doc("tokens of the text that drafts see; 0: all")] = 0
    draft_window_reason: Annotated[str, Doc("the reason for it, with the last alarm of falling acceptance")] = ""
    acceptance: Annotated[float, Doc("moving average of accepted / drafted tokens")] = 0.0
    experts_per_row: Annotated[float, Doc("experts, of all layers, that a row of it adds to a round, where some are in host memory; otherwise 0")] = 0.0
    miss_rate: Annotated[float, Doc("share of them that have no place on the GPU")] = 0.0
    row_ms: Annotated[float, Doc("milliseconds that the experts of its next draft are expected to add to a round")] = 0.0
    draft_n: Annotated[int, Doc("drafted tokens of this request that were verified")] = 0
    draft_n_accepted: Annotated[int, Doc("of these, accepted")] = 0
    drafted_per_pos: Annotated[tuple[int, ...], Doc("of this request: times that draft position i was verified")] = ()
    accepted_per_pos: Annotated[tuple[int, ...], Doc("number of times that it was accepted")] = ()
    params: Annotated[SamplingParams | None, Doc("the request's")] = None
    speculative: Annotated[bool, Doc("the request may have drafts")] = False
    cache_salt: Annotated[str, Doc("the request's share of the prefix cache; \"\": the common one")] = ""
    # fmt: on


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """Counters since start and gauges now, read by `/metrics` and `pyspec bench`."""

    # fmt: off
    prompt_tokens: Annotated[int, Doc("prompt tokens processed")] = 0
    prompt_tokens_cached: Annotated[int, Doc("prompt tokens taken from the cache")] = 0
    prompt_tokens_disk: Annotated[int, Doc("prompt tokens taken from the cache that were read from disk")] = 0
    prompt_seconds: Annotated[float, Doc("seconds spent on prompts")] = 0.0
    predicted_tokens: Annotated[int, Doc("tokens generated")] = 0
    predicted_seconds: Annotated[float, Doc("seconds spent generating")] = 0.0
    requests_processing: Annotated[int, Doc("requests in slots")] = 0
    requests_queued: Annotated[int, Doc("requests that wait")] = 0
    requests_done: Annotated[int, Doc("requests that ended well")] = 0
    requests_cancelled: Annotated[int, Doc("requests cancelled")] = 0
    requests_failed: Annotated[int, Doc("requests that failed")] = 0
    rounds: Annotated[int, Doc("target forwards")] = 0
    busy_slot_rounds: Annotated[int, Doc("sum over rounds of busy slots")] = 0
    n_tokens_max: Annotated[int, Doc("largest context seen")] = 0
    drafts: Annotated[int, Doc("drafts verified")] = 0
    draft_tokens: Annotated[int, Doc("drafted tokens verified")] = 0
    accepted_tokens: Annotated[int, Doc("drafted tokens accepted")] = 0
    drafted_per_pos: Annotated[tuple[int, ...], Doc("drafted tokens verified, by position in the draft")] = ()
    accepted_per_pos: Annotated[tuple[int, ...], Doc("drafted tokens accepted, by position in the draft")] = ()
    suffix_drafts: Annotated[int, Doc("suffix drafts verified")] = 0
    suffix_draft_tokens: Annotated[int, Doc("tokens of suffix drafts verified")] = 0
    suffix_accepted_tokens: Annotated[int, Doc("tokens of suffix drafts accepted")] = 0
    suffix_bytes: Annotated[int, Doc("bytes of texts and answers for suffix drafts")] = 0
    pages_used: Annotated[int, Doc("cache pages in use")] = 0
    pages_total: Annotated[int, Doc("cache pages there are")] = 0
    pages_cached: Annotated[int, Doc("cache pages filed for later requests")] = 0
    states: Annotated[int, Doc("recurrent checkpoints kept")] = 0
    states_device_bytes: Annotated[int, Doc("bytes of checkpoints on the device")] = 0
    states_host_bytes: Annotated[int, Doc("bytes of checkpoints in host memory")] = 0
    disk_bytes: Annotated[int, Doc("bytes of the prefix cache on disk, of all engines that share it")] = 0
    disk_read_bytes: Annotated[int, Doc("bytes of the prefix cache read from disk")] = 0
    disk_written_bytes: Annotated[int, Doc("bytes of the prefix cache written to disk")] = 0
    draft_ms: Annotated[float, Doc("milliseconds spent drafting")] = 0.0
    verify_ms: Annotated[float, Doc("milliseconds spent verifying")] = 0.0
    expert_hits: Annotated[int, Doc("experts of rounds that had a place on the GPU, of those in host memory")] = 0
    expert_misses: Annotated[int, Doc("experts of rounds that the host computed")] = 0
    expert_uploads: Annotated[int, Doc("experts that came to the GPU behind rounds")] = 0
    expert_caches_frozen: Annotated[int, Doc("engines whose experts stay where they are")] = 0
    sample_ms: Annotated[float, Doc("milliseconds spent sampling")] = 0.0
    host_ms: Annotated[float, Doc("milliseconds spent between launches")] = 0.0
    guard_trips: Annotated[int, Doc("indices a kernel refused")] = 0
    seconds_since_step: Annotated[float, Doc("age of the last round while busy")] = 0.0
    restarts: Annotated[int, Doc("times the engine's process was replaced")] = 0
    tokens_replayed: Annotated[int, Doc("tokens that went through the model again after that")] = 0
    kv_event_batches: Annotated[int, Doc("batches of KV events")] = 0
    kv_event_batches_dropped: Annotated[int, Doc("batches of KV events that found the queue full")] = 0
    # fmt: on

    @property
    def prompt_tokens_seen(self) -> int:
        """Prompt tokens processed or cached."""
        return self.prompt_tokens + self.prompt_tokens_cached


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaInfo:
    """One of several engines of a model (`--replicas`)."""

    # fmt: off
    replica: Annotated[int, Doc("its number, from 0 on")]
    state: Annotated[str, Doc("as Engine.state")]
    device: Annotated[str, Doc("where it runs")]
    metrics: Annotated[Metrics | None, Doc("its counters, if they were asked for")] = None
    requests: Annotated[int, Doc("requests that the replica was given")] = 0
    prompt_tokens_known: Annotated[int, Doc("prompt tokens of those that it had read before, as their sender knows")] = 0
    requests_moved: Annotated[int, Doc("requests that continued elsewhere when its engine ended")] = 0
    # fmt: on


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """The loaded model, for `/props`, `/v1/models` and the banner. Fixed after load."""

    # fmt: off
    model_name: Annotated[str, Doc("the file's name, without blanks")]
    model_path: Annotated[str, Doc("the file")]
    arch: Annotated[str, Doc("its architecture, as GGUF names it")]
    n_vocab: Annotated[int, Doc("rows of the embedding: ids are below")]
    n_ctx: Annotated[int, Doc("tokens of a slot, prompt and answer")]
    n_ctx_train: Annotated[int, Doc("tokens that the model was trained for, or that flags of rope stretch it to")]
    n_slot: Annotated[int, Doc("requests that run at once")]
    n_embd: Annotated[int, Doc("width of the residual stream")]
    n_params: Annotated[int, Doc("weights in all tensors")]
    n_bytes: Annotated[int, Doc("bytes of all tensors")]
    file_type: Annotated[str, Doc("llama-server's name of it: \"Q8_0\", \"Q4_K - Medium\"; \"\" if the file has none")]
    device: Annotated[str, Doc("where it runs")]
    drafter: Annotated[str, Doc("\"none\", \"dflash\", \"mtp\", \"ngram\", \"suffix\" ...")]
    draft_path: Annotated[str, Doc("the drafter's file, if it has one")] = ""
    n_draft_max: Annotated[int, Doc("tokens of the longest draft")] = 0
    draft_note: Annotated[str, Doc("one line: what drafts, and what to expect of it")] = ""
    synthetic_len: Annotated[float, Doc("above 0: acceptance is simulated, with this mean of tokens a round")] = 0.0
    chat_template: Annotated[str, Doc("its text")] = ""
    bos_token: Annotated[str, Doc("text of the begin-of-text token")] = ""
    eos_token: Annotated[str, Doc("text of the end-of-generation token that the file names")] = ""
    eog_ids: Annotated[tuple[int, ...], Doc("all ids that end a generation")] = ()
    n_queue: Annotated[int, Doc("requests that may wait for a slot; 0: unknown")] = 0
    n_overhang: Annotated[int, Doc("rows of keys and values that a request needs beyond its tokens, for drafts")] = 0
    page_size: Annotated[int, Doc("tokens of a page of the cache")] = 0
    n_row: Annotated[int, Doc("rows of keys and values of all slots together; 0: as many as the slots can use")] = 0
    memory: Annotated[tuple[tuple[str, int], ...], Doc("the memory plan: bytes by purpose")] = ()
    cpu_activations: Annotated[str, Doc("\"q16\" or \"q8\"; \"\" on GPUs")] = ""
    has_suffixes: Annotated[bool, Doc("suffix drafts, alone or beside the drafter")] = False
    draft_sampling: Annotated[str, Doc("drafts of sampled requests: argmax, coupled or probabilistic")] = "argmax"
    sampling: Annotated[SamplingParams, Doc("defaults of requests: those that the file recommends")] = field(default_factory=SamplingParams)
    rope: Annotated[str, Doc("how flags stretch rope, and longrope's divisors in use; \"\" as the file says")] = ""
    mmproj: Annotated[str, Doc("the projector's file; \"\": it sees no images")] = ""
    image_min_tokens: Annotated[int, Doc("fewest tokens of an image; 0: as the projector has")] = 0
    image_max_tokens: Annotated[int, Doc("most tokens of an image; 0: as the projector has")] = 0
    # fmt: on

    @property
    def sees(self) -> bool:
        """Requests may have images."""
        return bool(self.mmproj)

    @property
    def room(self) -> int:
        """Tokens that one request holds: its slot's, or all of a smaller pool."""
        return min(self.n_ctx, self.n_row - self.n_overhang if self.n_row else self.n_ctx)
