"""Settings of the engine: one frozen dataclass, built once and checked when built.

Each field has its flag, its legal values and its meaning (docs/python.md lists them); errors name the flag, for values from any source.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

from pyspec.errors import ConfigError
from pyspec.ranges import INT32, SWITCH, Doc, Many, Of, OneOf, Real, Text, Whole, check, shown
from pyspec.registry import RESERVED, SUFFIX, drafters, is_spec_type, split_spec_type

KV_TYPES = ("f16", "bf16", "f32", "q8_0", "f8_e4m3", "q5_1", "q5_0", "q4_1", "q4_0")
ROPE_SCALINGS = ("", "none", "linear", "yarn")
WEIGHTS = ("auto", "dense", "packed")
CPU_ACTIVATIONS = ("q16", "q8")
DRAFT_SAMPLINGS = ("argmax", "coupled", "probabilistic")
DRAFT_HEADS = ("auto", "full", "q4_0", "iq4_nl")
PAGE_SIZES = (16, 32, 64)
_TIER = "(auto|cuda|triton|reference)"
TIERS = rf"{_TIER}|\w+={_TIER}(,\w+={_TIER})*"
MAX_SLOTS = 256
MAX_CTX = 1 << 24  # tokens of a request
MAX_POOL = 1 << 27  # tokens of all slots: their pages are listed before the memory plan
MAX_ROWS = 65536  # of a forward
MAX_MIB = 1 << 24
MAX_RANKS = 64
MAX_REPLICAS = 64
UBATCH = 512  # rows of a forward with decoding slots that are not too many anywhere
MAX_THREADS = 1024  # torch accepts more, and crashes
EVENT_FORMATS = ("map", "array")
_PORT = r"(\*|\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"
ENDPOINT = rf"(|(ipc|inproc)://[!-~]{{1,100}}|tcp://[!-~]{{1,200}}:{_PORT})"
ENDPOINT_WANTED = "an address as tcp://*:5557"
RATES = r"(|[0-9.]{1,20}(,[0-9.]{1,20}){0,63})"


@dataclass(frozen=True)
class SpecType:
    """The name of a known drafter, with ",suffix" or without."""

    @property
    def wanted(self) -> str:
        return f"one of {', '.join((*RESERVED, *drafters(), SUFFIX))}, or one with ',{SUFFIX}' behind it"

    def flaw(self, value: object) -> str:
        if isinstance(value, str) and is_spec_type(value):
            return ""
        return f"is {shown(value)}; want {self.wanted}"


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The engine's settings: flag, legal values, default and meaning of each. 0 or "auto": decided at load and logged.

    A field without a Doc is set by pyspec itself.
    """

    # fmt: off
    np: Annotated[int, "-np", Whole(1, MAX_SLOTS), Doc("slots: requests that run at once")] = 1
    ctx: Annotated[int, "-c", Whole(0, MAX_CTX, "0: as fits"), Doc("tokens of one request, prompt and answer; 0: as many as fit, up to the model's length")] = 0
    rope_scaling: Annotated[str, "--rope-scaling", OneOf(ROPE_SCALINGS), Doc("how positions beyond the trained context are reached; here and in the next eight \"\", 0 or -1: as the model's file says")] = ""
    rope_scale: Annotated[float, "--rope-scale", Real(1e-3, 1e6, also=(0,)), Doc("the factor by which contexts become longer")] = 0.0
    rope_freq_scale: Annotated[float, "--rope-freq-scale", Real(1e-6, 1e3, also=(0,)), Doc("1 / rope_scale")] = 0.0
    rope_freq_base: Annotated[float, "--rope-freq-base", Real(1, 1e15, also=(0,)), Doc("base of the frequencies")] = 0.0
    yarn_orig_ctx: Annotated[int, "--yarn-orig-ctx", Whole(0, INT32), Doc("tokens that the model was trained for")] = 0
    yarn_ext_factor: Annotated[float, "--yarn-ext-factor", Real(0, 1, also=(-1,)), Doc("share of YaRN's ramp that leaves fast frequencies as they are; 0: none stay")] = -1.0
    yarn_attn_factor: Annotated[float, "--yarn-attn-factor", Real(1e-3, 1e3, also=(-1,)), Doc("multiplies cos and sin where nothing is left as it is")] = -1.0
    yarn_beta_fast: Annotated[float, "--yarn-beta-fast", Real(1e-3, 1e6, also=(-1,)), Doc("frequencies with more turns in the old context stay")] = -1.0
    yarn_beta_slow: Annotated[float, "--yarn-beta-slow", Real(1e-3, 1e6, also=(-1,)), Doc("frequencies with fewer turns in the old context are divided")] = -1.0
    kv_pool: Annotated[int, "--kv-pool", Whole(0, MAX_POOL, "0: -np times -c"), Doc("tokens of all slots together")] = 0
    page_size: Annotated[int, "--page-size", OneOf(PAGE_SIZES), Doc("tokens of a page of the cache")] = 32
    batch: Annotated[int, "-b", Whole(0, MAX_ROWS, "0: automatic"), Doc("most rows of a forward while no slot decodes; 0: 2048 on a GPU, ubatch (or 512) on a CPU")] = 0
    ubatch: Annotated[int, "-ub", Whole(0, MAX_ROWS, "0: by time"), Doc("most rows of a forward with decoding slots, which wait for the prompt rows in it; 0: 512 at least, and batch as long as it takes 0.4 s")] = 0
    tpot: Annotated[float, "--tpot", Real(0, 1e6, "0: no target"), Doc("milliseconds of an output token that prompts leave to decoding slots, in the mean")] = 0.0
    ttft: Annotated[float, "--ttft", Real(0, 1e7, "0: no target"), Doc("milliseconds to the first token: from half of it on, a prompt takes all rows of a forward, whatever tpot says")] = 0.0
    prompt_weight: Annotated[float, "--prompt-weight", Real(0, 1000), Doc("a long prompt's share of the time beside decoding slots, each of which has 1; 0: no limit")] = 1.0
    prefix_cache: Annotated[bool, "--cache-prompt", SWITCH, Doc("reuse cached prefixes, and cache this engine's requests")] = True
    cache_device: Annotated[int, "--cache-device", Whole(0, MAX_MIB, "0: one checkpoint a slot"), Doc("MiB on the device for checkpoints of recurrent states and windows")] = 0
    cache_ram: Annotated[int, "--cache-ram", Whole(0, MAX_MIB), Doc("MiB of host memory for checkpoints beyond that, at most half of the free memory")] = 8192
    cache_disk: Annotated[Path | None, "--cache-disk", Of((Path, str)), Doc("folder of the prefix cache's tier on disk, which engines of this machine share; None: no such tier")] = None
    cache_disk_size: Annotated[int, "--cache-disk-size", Whole(1, MAX_MIB), Doc("MiB of all files there")] = 32768
    checkpoint_every: Annotated[int, "--checkpoint-every", Whole(0, INT32, "0: none"), Doc("tokens between the checkpoints inside a long prompt")] = 8192
    swa_full: Annotated[bool, "--swa-full", SWITCH, Doc("layers with a sliding window keep the pages of the whole text: the cache continues any prefix")] = False
    draft_path: Annotated[Path | None, "-md", Of((Path, str)), Doc("file of the drafter: `draft` of a load sets it")] = None
    spec_type: Annotated[str, "--spec-type", SpecType(), Doc("the drafter's kind: `draft` of a load sets it")] = "auto"
    n_draft_max: Annotated[int, "--spec-draft-n-max", Whole(0, 64, "0: the drafter's own"), Doc("tokens of a draft at most; the drafters' own: the block's length less 1, or 3 for MTP, 4 for a model, 8 for n-grams")] = 0
    n_draft_fixed: Annotated[bool, "--spec-fixed", SWITCH, Doc("always draft n_draft_max, even if slower")] = False
    draft_p_min: Annotated[float, "--spec-draft-p-min", Real(0, 1), Doc("a draft ends below this probability")] = 0.0
    draft_sampling: Annotated[str, "--spec-draft-sampling", OneOf(DRAFT_SAMPLINGS), Doc("drafts of sampled requests: the likeliest tokens, or draws from the drafter's distribution")] = "argmax"
    draft_head: Annotated[str, "--draft-head", OneOf(DRAFT_HEADS), Doc("output head of drafts: the target's, or a four-bit copy")] = "auto"
    ngram_match: Annotated[int, "--spec-ngram-simple-size-n", Whole(1, 32), Doc("tokens that an n-gram must match")] = 3
    suffix_n_max: Annotated[int, "--spec-suffix-n-max", Whole(1, 64), Doc("tokens of a suffix draft at most")] = 15
    suffix_min_prob: Annotated[float, "--spec-suffix-min-token-prob", Real(0.01, 1), Doc("a suffix draft ends where the product of its probabilities is lower")] = 0.1
    suffix_cache: Annotated[int, "--spec-suffix-cache", Whole(0, MAX_MIB, "0: none"), Doc("MiB of host memory for finished answers, which suffix drafts continue")] = 64
    suffix_share: Annotated[bool, "--spec-suffix-share", SWITCH, Doc("suffix drafts of a client come from other clients' answers, too")] = False
    synth_len: Annotated[float, "--spec-synth-len", Real(1, 65, also=(0,)), Doc("for measurements: above 0 acceptance is simulated, with this mean of tokens a round")] = 0.0
    synth_rates: Annotated[str, "--spec-synth-rates", Text(RATES, "shares as 0.9,0.7,..."), Doc("the same by position: shares of rounds that accept at least so many drafts")] = ""
    device: Annotated[str, "-dev", Text(r"auto|cpu|cuda(:[0-9]{1,3})?", "auto, cpu, cuda, cuda:1 ..."), Doc("where the model runs; auto: the first GPU, if there is one")] = "auto"
    tp: Annotated[int, "--tp", Whole(0, MAX_RANKS, "0: every GPU"), Doc("processes that share the model, each with its own GPU if there are any")] = 1
    replicas: Annotated[int, "--replicas", Whole(1, MAX_REPLICAS), Doc("engines of the model, each with its own GPUs or its part of the CPU's threads; np, ctx and queue are those of each")] = 1
    kv_type: Annotated[str, "-ctk", OneOf(KV_TYPES), Doc("type of keys, and of values unless kv_type_v names theirs")] = "f16"
    kv_type_v: Annotated[str | None, "-ctv", OneOf(KV_TYPES), Doc("type of values; None: that of keys")] = None
    draft_kv_type: Annotated[str | None, "-ctkd", OneOf(KV_TYPES), Doc("type of the drafter's keys; None: as the target's")] = None
    draft_kv_type_v: Annotated[str | None, "-ctvd", OneOf(KV_TYPES), Doc("type of its values; None: as its keys, if draft_kv_type names a type, else as the target's")] = None
    weights: Annotated[str, "--weights", OneOf(WEIGHTS), Doc("keep matrices as they are in the file (packed), or unpack them (dense)")] = "auto"
    cpu_activations: Annotated[str, "--cpu-activations", OneOf(CPU_ACTIVATIONS), Doc("on CPUs: rows that packed matrices multiply, as whole numbers of 16 or 8 bits")] = "q16"
    threads: Annotated[int, "-t", Whole(-1, MAX_THREADS, "0, -1: by measured times"), Doc("threads of the CPU")] = 0
    queue: Annotated[int, "--queue", Whole(0, 1_000_000, "0: automatic"), Doc("requests that may wait; 0: max(16, 4 * np)")] = 0
    kv_events: Annotated[str, "--kv-events", Text(ENDPOINT, ENDPOINT_WANTED), Doc("address at which changes of the prefix cache are published; \"\": off")] = ""
    kv_events_replay: Annotated[str, "--kv-events-replay", Text(ENDPOINT, ENDPOINT_WANTED), Doc("address at which readers ask for batches again")] = ""
    kv_events_topic: Annotated[str, "--kv-events-topic", Text(r"[ -~]{0,256}", "plain ASCII text"), Doc("begins each message")] = ""
    kv_events_format: Annotated[str, "--kv-events-format", OneOf(EVENT_FORMATS), Doc("events with their fields' names, or as arrays in vLLM's order before its version 0.24")] = "map"
    kv_events_buffer: Annotated[int, "--kv-events-buffer", Whole(1, 1_000_000), Doc("batches kept for replays")] = 10_000
    seed: Annotated[int, Whole(-1, 2**32 - 1), Doc("of the simulated acceptance (synth_len), and of nothing else: the draws of a text are repeated by the `seed` of its request")] = -1
    check_tap_shift: bool = True
    warm_up: Annotated[bool, "--warmup", SWITCH, Doc("run a few rounds before the first request")] = True
    plain_loop: Annotated[bool, "--plain-loop", SWITCH, Doc("one round after the other, without graphs: slow, with the same text")] = False
    exact: Annotated[bool, "--exact", SWITCH, Doc("on GPUs: a row's bits do not depend on other rows; slows prompts down")] = False
    hang_timeout: Annotated[float, "--hang-timeout", Real(0, 86400, "0: by the pace of rounds"), Doc("seconds of a round after which an isolated engine is replaced")] = 0.0
    kernels: Annotated[str, "--kernels", Text(TIERS, "auto, cuda, triton or reference, or op=tier,..."), Doc("kernels to use; an op that refuses falls back to the next tier")] = "auto"
    demoted: Annotated[tuple[str, ...], Many(Text())] = ()  # modules whose implementations failed at run time: the next one is used
    # fmt: on

    def __post_init__(self) -> None:
        check(self, ConfigError)
        if self.synth_len and self.synth_rates:
            raise ConfigError("--spec-synth-len and --spec-synth-rates exclude each other")
        if self.rope_scale and self.rope_freq_scale:
            raise ConfigError("--rope-scale and --rope-freq-scale exclude each other")
        if self.kv_events and not self.prefix_cache:
            raise ConfigError(
                "--kv-events publishes the prefix cache, which --no-cache-prompt turns off: leave one out"
            )
        if self.kv_events_replay and not self.kv_events:
            raise ConfigError(
                "--kv-events-replay needs --kv-events, the address of the events themselves"
            )
        check_event_ports(self.kv_events, self.kv_events_replay, self.replicas)
        if self.replicas > 1 and self.tp == 0:
            raise ConfigError("--tp 0 takes every GPU: with --replicas, give the GPUs of each replica")
        if 0 < self.batch < self.ubatch:
            raise ConfigError(f"-b is {self.batch}; want -ub ({self.ubatch}) to {MAX_ROWS}, or 0")
        if not self.kv_pool and self.np * self.ctx > MAX_POOL:
            raise ConfigError(
                f"-np {self.np} times -c {self.ctx} is {self.np * self.ctx} tokens; want at most {MAX_POOL} (--kv-pool shares fewer)"
            )

    @property
    def drafter(self) -> str:
        """The drafter in `spec_type`."""
        return split_spec_type(self.spec_type)[0]

    @property
    def n_suffix(self) -> int:
        """Tokens of the longest suffix draft; 0: there are none."""
        return self.suffix_n_max if split_spec_type(self.spec_type)[1] else 0

    @property
    def queue_limit(self) -> int:
        return self.queue or max(16, 4 * self.np)


def check_event_ports(events: str, replay: str, n: int) -> None:
    """Each of `n` replicas has the ports, or the paths, of its number behind the first ones. Raises ConfigError."""
    paths = [
        e + f"_dp{i}" * (i > 0) for e in (events, replay) if e.startswith("ipc://") for i in range(n)
    ]
    if len(set(paths)) < len(paths):
        raise ConfigError(
            f"--kv-events {events} and --kv-events-replay {replay} meet in one path: use others"
        )
    ends = [e.rpartition(":")[2] for e in (events, replay) if e.startswith("tcp://")]
    ports = [int(end) if end.isdigit() else 0 for end in ends]  # 0 or *: the system chooses
    if any(port and port + n - 1 > 65535 for port in ports):
        raise ConfigError(
            f"--replicas {n} needs {n} ports for --kv-events from {max(ports)} on; there are 65535"
        )
    if len(ports) == 2 and all(ports) and abs(ports[0] - ports[1]) < n:
        raise ConfigError(
            f"--replicas {n} takes {n} ports from {ports[0]} on for --kv-events and {n} from {ports[1]} on for --kv-events-replay,"
            f" which overlap: put them {n} apart"
        )


def settings_from(values: dict[str, object]) -> EngineSettings:
    """Settings from keyword values. An unknown name is an error with a hint."""
    known = [f.name for f in fields(EngineSettings)]
    for name in values:
        if name not in known:
            near = get_close_matches(name, known, 1)
            raise ConfigError(
                f"no engine setting '{name}'" + (f"; did you mean '{near[0]}'?" if near else "")
            )
    return EngineSettings(**values)  # type: ignore[arg-type]  # checked in __post_init__
