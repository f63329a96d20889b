"""Settings of the engine: one frozen dataclass, built once and checked when built.

Each field has its legal values, its flag and its meaning. The options of the command line with their help, variables of the environment
and docs/python.md are made of them; errors name the flag, for values from any source. `LoadOptions` has the same names for type checkers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, TypedDict

from pyspec.errors import ConfigError
from pyspec.ranges import (
    INT32,
    SWITCH,
    Doc,
    Flag,
    Many,
    Of,
    OneOf,
    Real,
    Text,
    Whole,
    check,
    rules_of,
    shown,
)
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
MAX_IMAGE = 1 << 14  # tokens of an image
UBATCH = 512  # rows of a forward with decoding slots that are not too many anywhere
MAX_THREADS = 1024  # torch accepts more, and crashes
EVENT_FORMATS = ("map", "array")
_PORT = r"(\*|\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"
ENDPOINT = rf"(|(ipc|inproc)://[!-~]{{1,100}}|tcp://[!-~]{{1,200}}:{_PORT})"
ENDPOINT_WANTED = "an address as tcp://*:5557"
RATES = r"(|[0-9.]{1,20}(,[0-9.]{1,20}){0,63})"
TENSORS = Many(Text(r".{1,400}=[^=]{1,40}", "REGEX=CPU or REGEX=CUDA0"))

MODEL, ROPE, SLOTS = "Model", "Longer contexts", "Slots, context and cache"
DEVICE, DRAFTS, SERVING = "Device", "Drafts", "Serving"
OFFLOAD = "Memory of GPU and host"
"""Headings in help. Those of SERVING are options of `pyspec server` alone."""


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
    """The engine's settings: legal values, flag, meaning and default of each. 0 or "auto": decided at load and logged.

    A field without a Doc is set by pyspec itself. Sentences name flags; docs/python.md has the fields' names in their place.
    """

    # fmt: off
    mmproj: Annotated[Path | None, Of((Path, str)), Flag("-mm --mmproj $MMPROJ", MODEL), Doc("GGUF file of the model's projector, with which it sees images")] = None
    mmproj_offload: Annotated[bool, SWITCH, Flag("--mmproj-offload $MMPROJ_OFFLOAD", MODEL), Doc("images are encoded on the model's device, or on the CPU")] = True
    image_min_tokens: Annotated[int, Whole(0, MAX_IMAGE, "0: as it has"), Flag("--image-min-tokens $IMAGE_MIN_TOKENS", MODEL), Doc("scale smaller images up to this number of tokens, where sizes differ. 0: as the projector has")] = 0
    image_max_tokens: Annotated[int, Whole(0, MAX_IMAGE, "0: as it has"), Flag("--image-max-tokens $IMAGE_MAX_TOKENS", MODEL), Doc("scale larger images down to this number of tokens, where sizes differ. 0: as the projector has")] = 0
    np: Annotated[int, Whole(1, MAX_SLOTS), Flag("-np --parallel $N_PARALLEL", MODEL, help="Number of slots. -1: 4 in the server, else 1."), Doc("slots: requests that run at once")] = 1
    ctx: Annotated[int, Whole(0, MAX_CTX, "0: as fits"), Flag("-c --ctx-size $CTX_SIZE", MODEL), Doc("context size per request, prompt and answer. 0: as much as fits, up to the model's length")] = 0
    rope_scaling: Annotated[str, OneOf(ROPE_SCALINGS), Flag("--rope-scaling $ROPE_SCALING_TYPE", ROPE), Doc("how positions beyond the trained context are reached. Default, here and in the next eight: as the model's file says")] = ""
    rope_scale: Annotated[float, Real(1e-3, 1e6, also=(0,)), Flag("--rope-scale $ROPE_SCALE", ROPE), Doc("factor by which the context becomes longer")] = 0.0
    rope_freq_base: Annotated[float, Real(1, 1e15, also=(0,)), Flag("--rope-freq-base $ROPE_FREQ_BASE", ROPE), Doc("base of the frequencies")] = 0.0
    rope_freq_scale: Annotated[float, Real(1e-6, 1e3, also=(0,)), Flag("--rope-freq-scale $ROPE_FREQ_SCALE", ROPE), Doc("1 / --rope-scale")] = 0.0
    yarn_orig_ctx: Annotated[int, Whole(0, INT32), Flag("--yarn-orig-ctx $YARN_ORIG_CTX", ROPE), Doc("context that the model was trained for")] = 0
    yarn_ext_factor: Annotated[float, Real(0, 1, also=(-1,)), Flag("--yarn-ext-factor $YARN_EXT_FACTOR", ROPE), Doc("share of YaRN's ramp, 0 to 1, that leaves fast frequencies as they are. 0: all frequencies are divided")] = -1.0
    yarn_attn_factor: Annotated[float, Real(1e-3, 1e3, also=(-1,)), Flag("--yarn-attn-factor $YARN_ATTN_FACTOR", ROPE), Doc("multiplies cos and sin. No effect with YaRN, as in llama-server")] = -1.0
    yarn_beta_slow: Annotated[float, Real(1e-3, 1e6, also=(-1,)), Flag("--yarn-beta-slow $YARN_BETA_SLOW", ROPE), Doc("frequencies with fewer turns in the old context are divided")] = -1.0
    yarn_beta_fast: Annotated[float, Real(1e-3, 1e6, also=(-1,)), Flag("--yarn-beta-fast $YARN_BETA_FAST", ROPE), Doc("frequencies with more turns in the old context stay")] = -1.0
    kv_pool: Annotated[int, Whole(0, MAX_POOL, "0: -np times -c"), Flag("--kv-pool", SLOTS), Doc("size of the KV cache in tokens, for all slots. 0: -np times -c")] = 0
    page_size: Annotated[int, OneOf(PAGE_SIZES), Flag("--page-size", SLOTS), Doc("tokens of a page of the KV cache")] = 32
    prefix_cache: Annotated[bool, SWITCH, Flag("--cache-prompt $CACHE_PROMPT", SLOTS), Doc("reuse the KV cache of equal prompt prefixes")] = True
    cache_device: Annotated[int, Whole(0, MAX_MIB, "0: one checkpoint a slot"), Flag("--cache-device", SLOTS), Doc("device memory for checkpoints of recurrent states and windows, in MiB. 0: one per slot")] = 0
    cache_ram: Annotated[int, Whole(0, MAX_MIB), Flag("--cache-ram -cram $CACHE_RAM", SLOTS, help="Host memory for more checkpoints, in MiB. -1: no limit."), Doc("host memory for more checkpoints, in MiB, at most half of what is free")] = 8192
    cache_disk: Annotated[Path | None, Of((Path, str)), Flag("--cache-disk", SLOTS, "DIR"), Doc("folder where the prefix cache is also kept, for restarts and other servers of this machine")] = None
    cache_disk_size: Annotated[int, Whole(1, MAX_MIB), Flag("--cache-disk-size", SLOTS), Doc("size of that folder, in MiB")] = 32768
    checkpoint_every: Annotated[int, Whole(0, INT32, "0: none"), Flag("--checkpoint-every", SLOTS), Doc("tokens between checkpoints in a long prompt. 0: none")] = 8192
    swa_full: Annotated[bool, SWITCH, Flag("--swa-full $SWA_FULL", SLOTS), Doc("layers with a sliding window keep the whole text: the cache continues any prefix")] = False
    batch: Annotated[int, Whole(0, MAX_ROWS, "0: automatic"), Flag("-b --batch-size $BATCH", SLOTS), Doc("maximum rows per forward while only prompts run. 0: 2048, or -ub on a CPU")] = 0
    ubatch: Annotated[int, Whole(0, MAX_ROWS, "0: by time"), Flag("-ub --ubatch-size $UBATCH", SLOTS), Doc("maximum rows per forward while slots decode. 0: 512, and up to -b as long as a forward takes less than 0.4 s")] = 0
    tpot: Annotated[float, Real(0, 1e6, "0: no target"), Flag("--tpot", SLOTS), Doc("target in milliseconds per output token: prompts leave decoding slots as much time. 0: none")] = 0.0
    ttft: Annotated[float, Real(0, 1e7, "0: no target"), Flag("--ttft", SLOTS), Doc("target in milliseconds to the first token: goes before --tpot once half of it is over. 0: none")] = 0.0
    prompt_weight: Annotated[float, Real(0, 1000), Flag("--prompt-weight", SLOTS), Doc("share of the time that a long prompt gets beside decoding slots: 1 is as much as one of them. 0: no limit")] = 1.0
    kv_type: Annotated[str, OneOf(KV_TYPES), Flag("-ctk --cache-type-k $CACHE_TYPE_K", SLOTS, help="Type of keys [that of values, else f16]."), Doc("type of keys, and of values unless -ctv names theirs")] = "f16"
    kv_type_v: Annotated[str | None, OneOf(KV_TYPES), Flag("-ctv --cache-type-v $CACHE_TYPE_V", SLOTS), Doc("type of values. Default: that of keys")] = None
    draft_path: Annotated[Path | None, Of((Path, str)), Flag("-md --model-draft --spec-draft-model $SPEC_DRAFT_MODEL", MODEL, help="GGUF file of a drafter, or of a small model that drafts."), Doc("file of the drafter: `draft` of a load sets it")] = None
    spec_type: Annotated[str, SpecType(), Flag("--spec-type $SPEC_TYPE", DRAFTS, "TYPE"), Doc("the drafter's kind: `draft` of a load sets it")] = "auto"
    n_draft_max: Annotated[int, Whole(0, 64, "0: the drafter's own"), Flag("--spec-draft-n-max $SPEC_DRAFT_N_MAX", DRAFTS), Doc("maximum draft tokens per round. 0: the drafter's own: the block's length less 1, or 3 for MTP, 4 for a model, 8 for n-grams")] = 0
    draft_p_min: Annotated[float, Real(0, 1), Flag("--spec-draft-p-min --draft-p-min $SPEC_DRAFT_P_MIN", DRAFTS), Doc("stop a draft below this probability")] = 0.0
    draft_kv_type: Annotated[str | None, OneOf(KV_TYPES), Flag("-ctkd --spec-draft-type-k --cache-type-k-draft $SPEC_DRAFT_CACHE_TYPE_K", DRAFTS), Doc("type of the drafter's keys. Default: as the target's")] = None
    draft_kv_type_v: Annotated[str | None, OneOf(KV_TYPES), Flag("-ctvd --spec-draft-type-v --cache-type-v-draft $SPEC_DRAFT_CACHE_TYPE_V", DRAFTS), Doc("type of the drafter's values. Default: as its keys, if -ctkd names a type, else as the target's")] = None
    draft_sampling: Annotated[str, OneOf(DRAFT_SAMPLINGS), Flag("--spec-draft-sampling", DRAFTS), Doc("drafts of sampled requests: the likeliest tokens, or draws from the drafter's distribution")] = "argmax"
    draft_head: Annotated[str, OneOf(DRAFT_HEADS), Flag("--draft-head", DRAFTS), Doc("output head for drafts: the target's, or a four-bit copy")] = "auto"
    n_draft_fixed: Annotated[bool, SWITCH, Flag("--spec-fixed", DRAFTS), Doc("always draft the full length, even if slower")] = False
    ngram_match: Annotated[int, Whole(1, 32), Flag("--spec-ngram-simple-size-n $", DRAFTS), Doc("tokens that an n-gram must match")] = 3
    suffix_n_max: Annotated[int, Whole(1, 64), Flag("--spec-suffix-n-max", DRAFTS), Doc("maximum tokens of a suffix draft")] = 15
    suffix_min_prob: Annotated[float, Real(0.01, 1), Flag("--spec-suffix-min-token-prob", DRAFTS), Doc("end a suffix draft where the product of its probabilities is lower")] = 0.1
    suffix_cache: Annotated[int, Whole(0, MAX_MIB, "0: none"), Flag("--spec-suffix-cache", DRAFTS), Doc("MiB of host memory for finished answers that suffix drafts continue. 0: none")] = 64
    suffix_share: Annotated[bool, SWITCH, Flag("--spec-suffix-share", DRAFTS), Doc("let suffix drafts of a client come from other clients' answers")] = False
    synth_len: Annotated[float, Real(1, 65, also=(0,)), Flag("--spec-synth-len $SPEC_SYNTH_LEN", DRAFTS), Doc("for tests: simulate acceptance, as mean tokens per round")] = 0.0
    synth_rates: Annotated[str, Text(RATES, "shares as 0.9,0.7,..."), Flag("--spec-synth-rates $SPEC_SYNTH_RATES", DRAFTS, "P0,P1,..."), Doc("for tests: simulate acceptance, as shares of rounds with 1, 2, ... or more drafts")] = ""
    device: Annotated[str, Text(r"auto|cpu|cuda(:[0-9]{1,3})?", "auto, cpu, cuda, cuda:1 ..."), Flag("-dev --device $DEVICE", DEVICE, help="auto, cpu, cuda, cuda:1 ..."), Doc("where the model runs. auto: the first GPU, if there is one")] = "auto"
    threads: Annotated[int, Whole(-1, MAX_THREADS, "0, -1: by measured times"), Flag("-t --threads $THREADS", DEVICE), Doc("CPU threads. 0 or -1: by measured times")] = 0
    tp: Annotated[int, Whole(0, MAX_RANKS, "0: every GPU"), Flag("--tp", DEVICE), Doc("tensor-parallel ranks, each with its own process and GPU. 0: all GPUs")] = 1
    vram: Annotated[int, Whole(0, 1 << 50, "bytes; 0: all that is free"), Flag("--vram", OFFLOAD, "SIZE"), Doc("most memory of each GPU that is planned and taken, as 24G; bytes in a program. 0: all that is free")] = 0
    fit: Annotated[str, OneOf(("on", "off")), Flag("-fit --fit $FIT", OFFLOAD, "on|off"), Doc("put tables and experts into host memory if a model does not fit on the GPU")] = "on"
    fit_target: Annotated[str, Text(r"(|\d{1,8}(,\d{1,8}){0,63})", "MiB as 1024, or as 1024,512 for several GPUs"), Flag("-fitt --fit-target $FIT_TARGET", OFFLOAD, "MIB,..."), Doc("memory that stays free on the GPU, or on each, in MiB. Default: 4 % of what is free")] = ""
    fit_ctx: Annotated[int, Whole(0, MAX_CTX, "0: 8192"), Flag("-fitc --fit-ctx $FIT_CTX", OFFLOAD), Doc("context size per request without -c, where feed-forwards are in host memory. 0: 8192 at most")] = 0
    n_gpu_layers: Annotated[int, Whole(-1, INT32, "-1: as fits"), Flag("-ngl --gpu-layers --n-gpu-layers $N_GPU_LAYERS", OFFLOAD, "N"), Doc("keep feed-forwards and experts of the last N blocks on the GPU, those before in host memory; attention is always on the GPU. -1: as fits")] = -1
    n_cpu_moe: Annotated[int, Whole(0, INT32), Flag("-ncmoe --n-cpu-moe $N_CPU_MOE", OFFLOAD), Doc("keep experts of the first N blocks in host memory")] = 0
    cpu_moe: Annotated[bool, SWITCH, Flag("-cmoe --cpu-moe $CPU_MOE", OFFLOAD), Doc("keep all experts in host memory")] = False
    n_cpu_ffn: Annotated[int, Whole(0, INT32), Flag("-ncffn --n-cpu-ffn $N_CPU_FFN", OFFLOAD), Doc("keep feed-forwards without experts of the first N blocks in host memory")] = 0
    override_tensor: Annotated[tuple[str, ...], TENSORS, Flag("-ot --override-tensor $OVERRIDE_TENSOR", OFFLOAD, "REGEX=CPU|CUDA0,..."), Doc("place experts, feed-forwards and tables of tokens whose names match. The first match decides, and goes before the flags above")] = ()
    moe_cache_mib: Annotated[int, Whole(-1, MAX_MIB, "-1: what is left"), Flag("--moe-cache-mib", OFFLOAD, "N"), Doc("memory of the GPU for copies of experts that are in host memory, in MiB: those that are used most, without --exact. -1: what is left, and each stays where it is; 0: none")] = -1
    draft_n_gpu_layers: Annotated[int, Whole(-1, INT32, "-1: as fits"), Flag("-ngld --spec-draft-ngl --gpu-layers-draft --n-gpu-layers-draft $N_GPU_LAYERS_DRAFT", OFFLOAD, "N"), Doc("as -ngl, for the drafter")] = -1
    draft_n_cpu_moe: Annotated[int, Whole(0, INT32), Flag("-ncmoed --spec-draft-n-cpu-moe --spec-draft-ncmoe --n-cpu-moe-draft $SPEC_DRAFT_N_CPU_MOE", OFFLOAD), Doc("as -ncmoe, for the drafter")] = 0
    draft_cpu_moe: Annotated[bool, SWITCH, Flag("-cmoed --spec-draft-cpu-moe --cpu-moe-draft $SPEC_DRAFT_CPU_MOE", OFFLOAD), Doc("as -cmoe, for the drafter")] = False
    draft_override_tensor: Annotated[tuple[str, ...], TENSORS, Flag("-otd --spec-draft-override-tensor --override-tensor-draft $", OFFLOAD, "REGEX=CPU|CUDA0,..."), Doc("as -ot, for the drafter")] = ()
    weights: Annotated[str, OneOf(WEIGHTS), Flag("--weights", DEVICE), Doc("keep weights as they are in the file (packed), or unpack them (dense)")] = "auto"
    cpu_activations: Annotated[str, OneOf(CPU_ACTIVATIONS), Flag("--cpu-activations", DEVICE), Doc("on CPUs: bits of the rows that packed matrices multiply. q8 is faster and less exact")] = "q16"
    warm_up: Annotated[bool, SWITCH, Flag("--warmup $", DEVICE), Doc("on GPUs, run a few rounds before the first request, or leave that to the first requests")] = True
    plain_loop: Annotated[bool, SWITCH, Flag("--plain-loop", DEVICE), Doc("run rounds one by one, without CUDA graphs: to check a text that looks wrong")] = False
    exact: Annotated[bool, SWITCH, Flag("--exact", DEVICE), Doc("batch-invariant: a row's bits do not depend on other rows. Slows prompts down")] = False
    kernels: Annotated[str, Text(TIERS, "auto, cuda, triton or reference, or op=tier,..."), Flag("--kernels", DEVICE, "TIER"), Doc("kernels to use: cuda, triton, reference, or op=tier,... for single ops; one that refuses falls back to the next tier")] = "auto"
    queue: Annotated[int, Whole(0, 1_000_000, "0: automatic"), Flag("--queue", SERVING), Doc("maximum waiting requests. 0: 4 per slot, at least 16")] = 0
    replicas: Annotated[int, Whole(1, MAX_REPLICAS), Flag("--replicas", SERVING), Doc("engines of the model, each with its own GPU (--tp GPUs) or its part of the CPU's threads, and with -np slots")] = 1
    hang_timeout: Annotated[float, Real(0, 86400, "0: by the pace of rounds"), Flag("--hang-timeout", SERVING), Doc("replace the engine's process after a round of this many seconds. 0: chosen by its pace")] = 0.0
    kv_events: Annotated[str, Text(ENDPOINT, ENDPOINT_WANTED), Flag("--kv-events", SERVING, "ENDPOINT"), Doc("publish changes of the prefix cache for routers over ZeroMQ, as tcp://*:5557")] = ""
    kv_events_replay: Annotated[str, Text(ENDPOINT, ENDPOINT_WANTED), Flag("--kv-events-replay", SERVING, "ENDPOINT"), Doc("replay published batches from here, as tcp://*:5558")] = ""
    kv_events_topic: Annotated[str, Text(r"[ -~]{0,256}", "plain ASCII text"), Flag("--kv-events-topic", SERVING), Doc("topic of KV events; llm-d wants kv@ADDRESS:PORT@MODEL")] = ""
    kv_events_format: Annotated[str, OneOf(EVENT_FORMATS), Flag("--kv-events-format", SERVING), Doc("events as maps, or as arrays for readers made for vLLM before 0.24")] = "map"
    kv_events_buffer: Annotated[int, Whole(1, 1_000_000), Flag("--kv-events-buffer", SERVING), Doc("batches kept for replays")] = 10_000
    seed: Annotated[int, Whole(-1, 2**32 - 1), Doc("of the simulated acceptance (synth_len), and of nothing else: the draws of a text are repeated by the `seed` of its request")] = -1
    check_tap_shift: bool = True
    parks: bool = False  # weights and slots on a GPU have memory that `Engine.park` can take from it
    demoted: Annotated[tuple[str, ...], Many(Text())] = ()  # modules whose implementations failed at run time: the next one is used
    # fmt: on

    def __post_init__(self) -> None:
        check(self, ConfigError, by_flag=True)
        if self.synth_len and self.synth_rates:
            raise ConfigError("--spec-synth-len and --spec-synth-rates exclude each other")
        if 0 < self.image_max_tokens < self.image_min_tokens:
            raise ConfigError(
                f"--image-max-tokens is {self.image_max_tokens}; want --image-min-tokens ({self.image_min_tokens}) at least"
            )
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
    def idle_flags(self) -> list[str]:
        """Flags of suffix drafts with values of their own, while there are no such drafts."""
        mine = [
            rule
            for rule in rules_of(type(self))
            if rule.name.startswith("suffix_") and not self.n_suffix
        ]
        return [rule.spelt for rule in mine if getattr(self, rule.name) != rule.default]

    @property
    def queue_limit(self) -> int:
        return self.queue or max(16, 4 * self.np)


class LoadOptions(TypedDict, total=False):
    """Arguments of `Engine.load`, for type checkers: the fields of EngineSettings without a parameter of it
    (tests/engine/test_options.py compares them)."""

    mmproj: Path | None
    mmproj_offload: bool
    image_min_tokens: int
    image_max_tokens: int
    rope_scaling: str
    rope_scale: float
    rope_freq_base: float
    rope_freq_scale: float
    yarn_orig_ctx: int
    yarn_ext_factor: float
    yarn_attn_factor: float
    yarn_beta_slow: float
    yarn_beta_fast: float
    kv_pool: int
    page_size: int
    prefix_cache: bool
    cache_device: int
    cache_ram: int
    cache_disk: Path | None
    cache_disk_size: int
    checkpoint_every: int
    swa_full: bool
    batch: int
    ubatch: int
    tpot: float
    ttft: float
    prompt_weight: float
    kv_type: str
    kv_type_v: str | None
    draft_path: Path | None
    spec_type: str
    n_draft_max: int
    draft_p_min: float
    draft_kv_type: str | None
    draft_kv_type_v: str | None
    draft_sampling: str
    draft_head: str
    n_draft_fixed: bool
    ngram_match: int
    suffix_n_max: int
    suffix_min_prob: float
    suffix_cache: int
    suffix_share: bool
    synth_len: float
    synth_rates: str
    device: str
    threads: int
    tp: int
    vram: int
    fit: str
    fit_target: str
    fit_ctx: int
    n_gpu_layers: int
    n_cpu_moe: int
    cpu_moe: bool
    n_cpu_ffn: int
    override_tensor: tuple[str, ...]
    moe_cache_mib: int
    draft_n_gpu_layers: int
    draft_n_cpu_moe: int
    draft_cpu_moe: bool
    draft_override_tensor: tuple[str, ...]
    weights: str
    cpu_activations: str
    warm_up: bool
    plain_loop: bool
    exact: bool
    kernels: str
    queue: int
    replicas: int
    hang_timeout: float
    kv_events: str
    kv_events_replay: str
    kv_events_topic: str
    kv_events_format: str
    kv_events_buffer: int
    seed: int


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
