"""Settings of the engine: one frozen dataclass, built once, checked where it is built.

Each field says which flag sets it and what is legal; errors name the flag, from wherever the value came.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

from pyspec.errors import ConfigError
from pyspec.ranges import INT32, SWITCH, Many, Of, OneOf, Real, Text, Whole, check, shown
from pyspec.registry import WHETHER, drafters, is_spec_type

KV_TYPES = ("f16", "bf16", "f32", "q8_0", "f8_e4m3")
WEIGHTS = ("auto", "dense", "packed")
DRAFT_HEADS = ("auto", "full", "q4_0", "iq4_nl")
PAGE_SIZES = (16, 32, 64)
_TIER = "(auto|cuda|triton|reference)"
TIERS = rf"{_TIER}|\w+={_TIER}(,\w+={_TIER})*"
MAX_SLOTS = 256
MAX_CTX = 1 << 24  # tokens of a request
MAX_POOL = 1 << 27  # tokens of all slots: their pages are listed before anybody knows whether they fit
MAX_ROWS = 65536  # of a forward
MAX_MIB = 1 << 24
MAX_RANKS = 64
MAX_THREADS = 1024  # torch takes more and dies of it
RATES = r"(|[0-9.]{1,20}(,[0-9.]{1,20}){0,63})"


@dataclass(frozen=True)
class SpecType:
    """The name of a drafter that is known."""

    def flaw(self, value: object) -> str:
        if isinstance(value, str) and is_spec_type(value):
            return ""
        return f"is {shown(value)}; want one of {', '.join((*WHETHER, *drafters()))}"


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How an engine is set up. 0 or "auto" means: decided at load and printed. What does not fit beside a field stands below it."""

    np: Annotated[int, "-np", Whole(1, MAX_SLOTS)] = 1  # slots
    ctx: Annotated[int, "-c", Whole(0, MAX_CTX, "0: as fits")] = 0
    # tokens one request may hold; 0: as many as fit, up to the model's length
    kv_pool: Annotated[int, "--kv-pool", Whole(0, MAX_POOL, "0: -np times -c")] = 0  # tokens of all slots together
    page_size: Annotated[int, "--page-size", OneOf(PAGE_SIZES)] = 32  # tokens
    batch: Annotated[int, "-b", Whole(0, MAX_ROWS, "0: automatic")] = 0
    # rows of a forward of prompts alone; 0: 2048 on a GPU, ubatch on a CPU
    ubatch: Annotated[int, "-ub", Whole(1, MAX_ROWS)] = 512
    # rows of a forward in which somebody decodes: what prompts add is what the others wait
    prompt_weight: Annotated[float, "--prompt-weight", Real(0, 1000)] = 1.0
    # time that a long prompt may take beside slots that decode, in that of one of them; 0: no limit
    prefix_cache: Annotated[bool, "--cache-prompt", SWITCH] = True
    # go on from what earlier requests left, and leave something for later ones
    cache_device: Annotated[int, "--cache-device", Whole(0, MAX_MIB, "0: one checkpoint a slot")] = 0
    # MiB on the device for recurrent checkpoints
    cache_ram: Annotated[int, "--cache-ram", Whole(0, MAX_MIB)] = 8192
    # MiB of host memory for those the device has no room for, at most half of what is free
    checkpoint_every: Annotated[int, "--checkpoint-every", Whole(0, INT32, "0: none")] = 8192
    # tokens between the checkpoints inside a long prompt
    draft_path: Annotated[Path, "-md", Of((Path, str))] | None = None
    spec_type: Annotated[str, "--spec-type", SpecType()] = "auto"
    n_draft_max: Annotated[int, "--spec-draft-n-max", Whole(0, 64, "0: the drafter's own")] = 0
    # drafted tokens a round; the drafters' own: block - 1, or 3 for MTP, 8 for n-grams
    n_draft_fixed: Annotated[bool, "--spec-fixed", SWITCH] = False  # always draft n_draft_max, whatever it costs
    draft_p_min: Annotated[float, "--spec-draft-p-min", Real(0, 1)] = 0.0
    draft_head: Annotated[str, "--draft-head", OneOf(DRAFT_HEADS)] = "auto"
    # of a head that drafts share: the target's, or a copy in four bits that only they see
    ngram_match: Annotated[int, "--spec-ngram-simple-size-n", Whole(1, 32)] = 3
    synth_len: Annotated[float, "--spec-synth-len", Real(1, 65, also=(0,))] = 0.0
    # > 0: make acceptance up, mean tokens a round
    synth_rates: Annotated[str, "--spec-synth-rates", Text(RATES, "shares as 0.9,0.7,...")] = ""
    # the same by position: how often so many drafts and more are kept
    device: Annotated[str, "-dev", Text(r"auto|cpu|cuda(:[0-9]{1,3})?", "auto, cpu, cuda, cuda:1 ...")] = "auto"
    tp: Annotated[int, "--tp", Whole(0, MAX_RANKS, "0: every GPU")] = 1
    # processes that share the model, each with a GPU of its own where there are any
    kv_type: Annotated[str, "-ctk", OneOf(KV_TYPES)] = "f16"
    weights: Annotated[str, "--weights", OneOf(WEIGHTS)] = "auto"
    threads: Annotated[int, "-t", Whole(-1, MAX_THREADS, "0, -1: as torch chooses")] = 0
    queue: Annotated[int, "--queue", Whole(0, 1_000_000, "0: automatic")] = 0
    # requests that may wait; 0: max(16, 4 * np)
    seed: Annotated[int, Whole(-1, 2**32 - 1)] = -1
    check_tap_shift: bool = True
    warm_up: Annotated[bool, "--warmup", SWITCH] = True
    plain_loop: Annotated[bool, "--plain-loop", SWITCH] = False
    # one round after the other, without graphs: slow, and the same text
    exact: Annotated[bool, "--exact", SWITCH] = False
    # on GPUs a row has the same bits whatever runs with it, and however many rows: prompts are slower
    hang_timeout: Annotated[float, "--hang-timeout", Real(0, 86400, "0: by what rounds take")] = 0.0
    # seconds of a round after which an isolated engine is replaced
    kernels: Annotated[str, "--kernels", Text(TIERS, "auto, cuda, triton or reference, or op=tier,...")] = "auto"
    # what ops run as; what is refused falls on to the next tier
    demoted: Annotated[tuple[str, ...], Many(Text())] = ()
    # modules of ops whose implementations failed while they ran: the next one is taken

    def __post_init__(self) -> None:
        check(self, ConfigError)
        if self.synth_len and self.synth_rates:
            raise ConfigError("--spec-synth-len and --spec-synth-rates: give one of them")
        if 0 < self.batch < self.ubatch:
            raise ConfigError(f"-b is {self.batch}; want -ub ({self.ubatch}) to {MAX_ROWS}, or 0")
        if not self.kv_pool and self.np * self.ctx > MAX_POOL:
            raise ConfigError(
                f"-np {self.np} times -c {self.ctx} is {self.np * self.ctx} tokens; want at most {MAX_POOL} (--kv-pool shares fewer)"
            )

    @property
    def queue_limit(self) -> int:
        return self.queue or max(16, 4 * self.np)


def settings_from(values: dict[str, object]) -> EngineSettings:
    """Settings from keyword values; a name we do not have is an error with a hint."""
    known = [f.name for f in fields(EngineSettings)]
    for name in values:
        if name not in known:
            near = get_close_matches(name, known, 1)
            raise ConfigError(f"no setting '{name}'" + (f"; did you mean '{near[0]}'?" if near else ""))
    return EngineSettings(**values)  # type: ignore[arg-type]  # values are checked when it is made
