"""The engine's input and output: plain data, without torch, picklable. The server, the command line and the Python API use the engine only
through these types, so the engine can run in a separate process without a change to them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import Annotated, Literal

from pyspec.errors import PyspecError, RequestError
from pyspec.ranges import INT32, Ids, Many, OneOf, Pair, Real, Text, Whole, check

Finish = Literal["eos", "stop", "length", "cancelled", "error"]
"""How a request ended: end-of-generation token, stop string, token or context limit, cancel, failure."""
FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "error"]
"""OpenAI's finish reasons."""

Share = Annotated[float, Real(0, 1)]
Penalty = Annotated[float, Real(-100, 100)]
Count = Annotated[int, Whole(0, INT32)]
Window = Annotated[int, Whole(-1, INT32)]
BIAS = Pair(Whole(0, INT32), Real(-1e10, 1e10, also=(-inf,)))
"""A token id, and the bias of its logit; -inf bans it."""

DEFAULT_SAMPLERS = (
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature",
)  # fmt: skip
"""llama.cpp's order and names. "adaptive_p" is not listed: it runs last, if its target is set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Parameters for choosing the next token, with llama.cpp's defaults. `temperature` 0 is greedy: the exact argmax.

    Logit bias comes first and the random draw last; between them run the samplers in the order of `samplers`; () is llama.cpp's order,
    DEFAULT_SAMPLERS. Mirostat replaces all of them except temperature.
    """

    temperature: Annotated[float, Real(-100, 100, "0 and below: greedy")] = 0.8  # below 0 becomes 0
    top_k: Window = 40  # 0 keeps all
    top_p: Share = 0.95  # 1 keeps all
    min_p: Share = 0.05  # 0 keeps all
    typical_p: Share = 1.0  # 1 keeps all
    min_keep: Count = 0  # truncating samplers keep at least this many tokens
    repeat_penalty: Annotated[float, Real(1e-6, 100, "1: off")] = 1.0
    repeat_last_n: Window = 64  # tokens that the penalties count; 0 off, -1 the whole context
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    dry_multiplier: Annotated[float, Real(0, 100)] = 0.0  # 0 off
    dry_base: Annotated[float, Real(1, 100)] = 1.75
    dry_allowed_length: Count = 2
    dry_penalty_last_n: Window = -1  # 0 off, -1 the whole context
    dry_sequence_breakers: Annotated[tuple[str, ...], Many(Text())] = ("\n", ":", '"', "*")
    logit_bias: Annotated[tuple[tuple[int, float], ...], Many(BIAS)] = ()
    seed: Annotated[int, Whole(-1, 2**64 - 1)] = -1  # -1 draws a new one
    logprobs: Count | None = None  # None: none; n: of the chosen token and the n best
    ignore_eos: bool = False
    min_tokens: Count = 0  # no end-of-generation token or stop string before this many tokens
    # In order, by name; each at most once
    samplers: Annotated[tuple[str, ...], Many(OneOf((*DEFAULT_SAMPLERS, "adaptive_p")))] = ()
    # Keeps tokens within this many standard deviations of the best logit
    top_n_sigma: Annotated[float, Real(-1, 100, "0 and below: off")] = -1.0
    xtc_probability: Share = (
        0.0  # probability of dropping all but the last of the tokens above the threshold; 0 off
    )
    xtc_threshold: Share = 0.1  # above 0.5: off
    dynatemp_range: Annotated[float, Real(0, 100)] = (
        0.0  # range by which the temperature follows the row's entropy; 0 off
    )
    dynatemp_exponent: Annotated[float, Real(0, 100)] = 1.0
    mirostat: Annotated[int, Whole(0, 2)] = 0  # version 1 or 2; 0 off
    mirostat_tau: Annotated[float, Real(0, 100)] = 5.0  # target surprise, in bits
    mirostat_eta: Annotated[float, Real(0, 1)] = 0.1  # learning rate
    adaptive_target: Annotated[float, Real(-1, 1, "below 0: off")] = -1.0  # target probability
    adaptive_decay: Annotated[float, Real(0, 0.99)] = 0.9
    post_sampling: bool = False  # `logprobs` are taken after the samplers, not from the model

    def __post_init__(self) -> None:
        if isinstance(self.temperature, int | float) and -100 <= self.temperature < 0:
            object.__setattr__(self, "temperature", 0.0)

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
    """

    prompt: Annotated[tuple[int, ...], Ids()]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: Window = -1  # -1: until the context is full
    stop: Annotated[tuple[str, ...], Many(Text())] = ()
    cache_prompt: bool = True  # False: neither use nor fill the prefix cache
    n_before_turn: Count = (
        0  # prompt tokens before the last user turn, if known: a place for a checkpoint
    )
    n_system: Count = 0  # prompt tokens of the system prompt and tools: another place for a checkpoint
    n_stable: Count = 0  # leading prompt tokens that later prompts may share; 0: all
    n_draft_max: Count | None = None  # None: the engine's; 0: no speculation for this request
    slot: Window = -1  # -1: any
    timings_per_token: bool = False  # every Delta has the timings so far
    max_predict_ms: Annotated[float, Real(0, INT32)] = 0.0  # 0: no limit; ends the request with "length"
    client: Annotated[str, Text()] = ""  # identity of the client: clients take turns in the queue
    cache_salt: Annotated[str, Text()] = ""  # requests with different salts share no cached texts
    group: Annotated[str, Text()] = ""  # identity of a batch: a client's batches take turns; "": none
    resumed: Annotated[tuple[int, ...], Ids()] = ()
    grammar: Grammar | None = None
    shown: Annotated[
        tuple[int, ...], Ids()
    ] = ()  # control tokens shown in the text: tokens that mark a call
    think_budget: ThinkBudget | None = None
    prompt_logprobs: Count | None = (
        None  # n: report those of the prompt tokens, and of the n best in their places
    )


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

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """llama-server's `timings`. Rates exclude the first token, which the prompt's forward produces."""

    cache_n: int = 0  # prompt tokens taken from the prefix cache
    disk_n: int = 0  # of these, read from its tier on disk
    prompt_n: int = 0  # prompt tokens processed
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    draft_n: int = 0  # drafted tokens that were verified
    draft_n_accepted: int = 0
    n_rounds: int = 0  # target forwards of this request after the prompt
    drafted_per_pos: tuple[int, ...] = ()  # number of times that draft position i was verified
    accepted_per_pos: tuple[int, ...] = ()  # number of times that it was accepted
    n_draft_used: tuple[int, ...] = ()  # histogram: rounds that ran with n_draft = index
    suffix_n: int = 0  # of draft_n, tokens of suffix drafts
    suffix_n_accepted: int = 0
    synthetic: bool = False  # acceptance was simulated (--spec-synth-len)
    # first prompt token at which the client's nearest cached text differs or ends; -1: none
    cache_break_at: int = -1

    @property
    def prompt_per_second(self) -> float:
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

    request: str
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    n_draft: int = 0
    n_accepted: int = 0
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """The request ended well, or was cancelled. No event follows."""

    request: str
    finish: Finish
    n_prompt: int
    n_predicted: int
    timings: Timings
    stop_string: str = ""  # the stop string that ended it
    truncated: bool = False  # the context was full
    slot: int = -1
    n_in_stop: int = 0  # last tokens that are part of the stop string

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

    slot: int
    n_ctx: int
    is_processing: bool
    request: str = ""
    state: Literal["idle", "prefill", "decode"] = "idle"
    n_prompt: int = 0
    n_prompt_processed: int = 0
    n_cached: int = 0
    n_decoded: int = 0
    n_remain: int = -1
    n_past: int = 0
    n_draft: int = 0  # the controller's choice for the last round
    draft_reason: str = ""  # the reason for it
    draft_window: int = 0  # tokens of the text that drafts see; 0: all
    draft_window_reason: str = ""  # the reason for it, with the last alarm of falling acceptance
    acceptance: float = 0.0  # moving average of accepted / drafted
    draft_n: int = 0
    draft_n_accepted: int = 0
    drafted_per_pos: tuple[int, ...] = ()  # of this request: times that draft position i was verified
    accepted_per_pos: tuple[int, ...] = ()  # number of times that it was accepted
    params: SamplingParams | None = None
    speculative: bool = False
    cache_salt: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """Counters since start and gauges now, read by `/metrics` and `pyspec bench`."""

    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_disk: int = 0  # of these, read from the prefix cache's tier on disk
    prompt_seconds: float = 0.0
    predicted_tokens: int = 0
    predicted_seconds: float = 0.0
    requests_processing: int = 0
    requests_queued: int = 0
    requests_done: int = 0
    requests_cancelled: int = 0
    requests_failed: int = 0
    rounds: int = 0  # target forwards
    busy_slot_rounds: int = 0  # sum over rounds of busy slots
    n_tokens_max: int = 0  # largest context seen
    drafts: int = 0  # drafts verified
    draft_tokens: int = 0
    accepted_tokens: int = 0
    drafted_per_pos: tuple[int, ...] = ()
    accepted_per_pos: tuple[int, ...] = ()
    suffix_drafts: int = 0  # of the drafts, those by suffixes
    suffix_draft_tokens: int = 0
    suffix_accepted_tokens: int = 0
    suffix_bytes: int = 0  # host memory of their texts and finished answers, estimated
    pages_used: int = 0
    pages_total: int = 0
    pages_cached: int = 0  # kept for later requests, in use or not
    states: int = 0  # recurrent checkpoints kept
    states_device_bytes: int = 0
    states_host_bytes: int = 0
    disk_bytes: int = 0  # of the prefix cache's tier on disk, by all engines that share it
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0
    draft_ms: float = 0.0  # wall time by part, summed
    verify_ms: float = 0.0
    sample_ms: float = 0.0
    host_ms: float = 0.0
    guard_trips: int = 0
    seconds_since_step: float = 0.0  # age of the last finished round while busy; 0 when idle
    restarts: int = 0  # times that an isolated engine was replaced
    tokens_replayed: int = 0  # prompt and generated tokens that were processed again after a replacement
    kv_event_batches: int = 0  # published changes of the prefix cache
    kv_event_batches_dropped: int = 0  # of them, those that found the queue full

    @property
    def prompt_tokens_seen(self) -> int:
        """Processed or cached."""
        return self.prompt_tokens + self.prompt_tokens_cached


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaInfo:
    """One of several engines of a model (`--replicas`)."""

    replica: int  # 0 is the first
    state: str  # as Engine.state
    device: str
    metrics: Metrics | None = None  # if they were asked for
    requests: int = 0  # that it was given
    prompt_tokens_known: int = 0  # of them, read before, as far as their sender knows
    requests_moved: int = 0  # that continued elsewhere when its engine ended


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """The loaded model, for `/props`, `/v1/models` and the banner. Fixed after load."""

    model_name: str
    model_path: str
    arch: str
    n_vocab: int
    n_ctx: int  # context size per request
    n_ctx_train: int
    n_slot: int
    n_embd: int
    n_params: int
    n_bytes: int
    file_type: str  # llama-server's name of it: "Q8_0", "Q4_K - Medium"; "" if the file has none
    device: str
    drafter: str  # "none", "dflash", "mtp", "ngram", "suffix"; suffix drafts may go beside it
    draft_path: str = ""
    n_draft_max: int = 0
    draft_note: str = ""  # one line: the planner's decision and its reason
    synthetic_len: float = 0.0
    chat_template: str = ""
    bos_token: str = ""
    eos_token: str = ""
    eog_ids: tuple[int, ...] = ()
    n_queue: int = 0  # requests that may wait for a slot; 0: unknown
    n_overhang: int = 0  # KV rows a request needs beyond its tokens
    page_size: int = 0  # tokens of a page of the cache
    n_row: int = 0  # KV rows of all slots together; 0: as many as the slots can use
    memory: tuple[tuple[str, int], ...] = ()  # the memory plan: bytes by purpose
    cpu_activations: str = ""  # "q16" or "q8"; "" on GPUs
    has_suffixes: bool = False  # suffix drafts, alone or beside the drafter
    draft_sampling: str = "argmax"  # drafts of sampled requests: argmax, coupled or probabilistic
    sampling: SamplingParams = field(default_factory=SamplingParams)  # defaults of requests: the file's
    rope: str = ""  # how flags stretch rope, and longrope's divisors in use; "" as the file says

    @property
    def room(self) -> int:
        """Tokens that one request holds: its slot's, or all of a smaller pool."""
        return min(self.n_ctx, self.n_row - self.n_overhang if self.n_row else self.n_ctx)
