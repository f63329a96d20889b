"""Settings of the engine: one frozen dataclass, built once, checked where it is built."""

from __future__ import annotations

from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path

from pyspec.errors import ConfigError
from pyspec.registry import WHETHER, drafters, is_spec_type

KV_TYPES = ("f16", "bf16", "f32", "q8_0", "f8_e4m3")
WEIGHTS = ("auto", "dense", "packed")
DRAFT_HEADS = ("auto", "full", "q4_0", "iq4_nl")
PAGE_SIZES = (16, 32, 64)
MAX_SLOTS = 256


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How an engine is set up. 0 or "auto" means: decided at load and printed."""

    np: int = 1  # slots
    ctx: int = 0  # tokens one request may hold; 0: the model's, at most 8192
    kv_pool: int = 0  # tokens of all slots together; 0: np * ctx
    page_size: int = 32  # tokens
    batch: int = 0  # rows of a forward of prompts alone; 0: 2048 on a GPU, ubatch on a CPU
    ubatch: int = 512  # rows of a forward in which somebody decodes: what prompts add is what the others wait
    prefix_cache: bool = True  # go on from what earlier requests left, and leave something for later ones
    cache_device: int = 0  # MiB on the device for recurrent checkpoints; 0: one checkpoint per slot
    cache_ram: int = 8192  # MiB of host memory for those the device has no room for, at most half of what is free
    checkpoint_every: int = 8192  # tokens between the checkpoints inside a long prompt; 0: none
    draft_path: Path | None = None
    spec_type: str = "auto"
    n_draft_max: int = 0  # drafted tokens a round; 0: the drafter's own (block - 1, or 3 for MTP, 8 for n-grams)
    n_draft_fixed: bool = False  # always draft n_draft_max, whatever it costs
    draft_p_min: float = 0.0
    draft_head: str = "auto"  # of a head that drafts share: the target's, or a copy in four bits that only they see
    ngram_match: int = 3
    synth_len: float = 0.0  # > 0: make acceptance up, mean tokens a round
    device: str = "auto"
    kv_type: str = "f16"
    weights: str = "auto"
    threads: int = 0
    queue: int = 0  # requests that may wait; 0: max(16, 4 * np)
    seed: int = -1
    check_tap_shift: bool = True
    warm_up: bool = True
    plain_loop: bool = False  # one round after the other, without graphs: slow, and the same text
    hang_timeout: float = 0.0  # seconds of a round after which an isolated engine is replaced; 0: by what rounds take
    demoted: tuple[str, ...] = ()  # modules of ops whose implementations failed while they ran: the next one is taken

    def __post_init__(self) -> None:
        def need(ok: bool, text: str) -> None:
            if not ok:
                raise ConfigError(text)

        need(1 <= self.np <= MAX_SLOTS, f"-np is {self.np}; slots can be 1..{MAX_SLOTS}")
        need(self.ctx >= 0, f"-c is {self.ctx}; want 0 (automatic) or more")
        need(self.page_size in PAGE_SIZES, f"page size {self.page_size} is not one of {PAGE_SIZES}")
        need(1 <= self.ubatch <= 65536, f"-ub is {self.ubatch}; want 1..65536")
        need(
            self.batch == 0 or self.ubatch <= self.batch <= 65536,
            f"-b is {self.batch}; want -ub ({self.ubatch}) to 65536, or 0",
        )
        for mib, flag in ((self.cache_device, "--cache-device"), (self.cache_ram, "--cache-ram")):
            need(mib >= 0, f"{flag} is {mib} MiB; want 0 or more")
        need(self.checkpoint_every >= 0, f"--checkpoint-every is {self.checkpoint_every}; want 0 (none) or more tokens")
        need(0 <= self.n_draft_max <= 64, f"--spec-draft-n-max is {self.n_draft_max}; want 0..64")
        need(0.0 <= self.draft_p_min <= 1.0, f"--spec-draft-p-min is {self.draft_p_min}; want 0..1")
        need(self.synth_len == 0 or self.synth_len >= 1, f"--spec-synth-len is {self.synth_len}; want at least 1")
        need(1 <= self.ngram_match <= 32, f"n-gram size {self.ngram_match} is not in 1..32")
        if not is_spec_type(self.spec_type):
            need(False, f"--spec-type is '{self.spec_type}'; known: {', '.join((*WHETHER, *drafters()))}")
        for value, known, flag in (
            (self.kv_type, KV_TYPES, "-ctk"),
            (self.weights, WEIGHTS, "--weights"),
            (self.draft_head, DRAFT_HEADS, "--draft-head"),
        ):
            need(value in known, f"{flag} is '{value}'; known: {', '.join(known)}")

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
    return EngineSettings(**values)  # type: ignore[arg-type]
