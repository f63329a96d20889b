"""Dimensions of each architecture's models, as classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

VocabKind = Literal[
    "qwen2",
    "qwen35",
    "llama-bpe",
    "pixtral",
    "joyai-llm",
    "gpt-4o",
    "spm",
    "refact",
    "tekken",
    "glm4",
    "lfm2",
    "minimax-m2",
    "deepseek-v3",
]


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Dimensions of any decoder. `n_layer` counts the trunk, without MTP blocks.

    mtp_alone  the MTP block has a file of its own
    """

    arch: ClassVar[str]
    mtp_alone: ClassVar[bool] = False
    name: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    vocab: VocabKind
    n_ctx: int
    rope_base: float
    eps: float = 1e-6
    tied: bool = False
    mtp: bool = False  # has a multi-token-prediction block


@dataclass(frozen=True, kw_only=True)
class Llama(Dims):
    arch: ClassVar[str] = "llama"


@dataclass(frozen=True, kw_only=True)
class Qwen3(Dims):
    arch: ClassVar[str] = "qwen3"


@dataclass(frozen=True, kw_only=True)
class Qwen3Moe(Dims):
    """`n_ff` is the width of an expert."""

    arch: ClassVar[str] = "qwen3moe"
    n_expert: int
    n_used: int


@dataclass(frozen=True, kw_only=True)
class GptOss(Dims):
    """Biases everywhere, sinks, windows in every other layer. `n_ff` is the width of an expert; `yarn` factor and trained length."""

    arch: ClassVar[str] = "gpt-oss"
    n_expert: int
    n_used: int
    window: int = 128
    yarn: tuple[float, int] = (32.0, 4096)


@dataclass(frozen=True, kw_only=True)
class Qwen35(Dims):
    """Every `interval`-th layer is gated attention, the others are Gated DeltaNet."""

    arch: ClassVar[str] = "qwen35"
    mtp: bool = True
    n_k_head: int
    n_v_head: int
    state: int = 128
    conv: int = 4
    interval: int = 4
    n_rot: int = 64
    sections: tuple[int, int, int, int] = (11, 11, 10, 0)

    @property
    def inner(self) -> int:
        return self.n_v_head * self.state

    @property
    def n_channel(self) -> int:
        return 2 * self.n_k_head * self.state + self.inner

    def is_recurrent(self, block: int) -> bool:
        return block < self.n_layer and (block + 1) % self.interval != 0


@dataclass(frozen=True, kw_only=True)
class Qwen35Moe(Qwen35):
    """Every feed-forward consists of experts; `n_ff` is the width of one."""

    arch: ClassVar[str] = "qwen35moe"
    n_expert: int
    n_used: int
    n_ff_shared: int


@dataclass(frozen=True, kw_only=True)
class Qwen3Next(Qwen35Moe):
    """Strength and decay have one matrix, and value heads of a key head stand side by side. Its files have no MTP block."""

    arch: ClassVar[str] = "qwen3next"
    mtp: bool = False


@dataclass(frozen=True, kw_only=True)
class NemotronH(Dims):
    """Blocks of one part each, in the order of `pattern`: M Mamba-2, * attention, - feed-forward, E experts."""

    arch: ClassVar[str] = "nemotron_h"
    pattern: str
    mamba_heads: int
    mamba_dim: int = 64
    groups: int = 8
    state: int = 128
    conv: int = 4

    @property
    def inner(self) -> int:
        return self.mamba_heads * self.mamba_dim

    @property
    def n_channel(self) -> int:
        return self.inner + 2 * self.groups * self.state


@dataclass(frozen=True, kw_only=True)
class NemotronHMoe(NemotronH):
    """`n_ff` is the width of an expert; with `latent`, experts work in that width instead of n_embd."""

    arch: ClassVar[str] = "nemotron_h_moe"
    n_expert: int
    n_used: int
    n_ff_shared: int
    routed_scale: float
    latent: int = 0


@dataclass(frozen=True, kw_only=True)
class Deepseek4Dims(Dims):
    """Residual streams, one key head that is also the value, compressed rows. `n_ff` is the width of an expert, also of the shared one.

    ratios   tokens of a compressed row in each trunk layer, 0 for none
    indexer  the indexer's heads, dimensions and number of chosen rows
    n_hash   layers whose experts are chosen by a table of tokens
    limit    clamp of the experts' activations
    """

    arch: ClassVar[str] = "deepseek4"
    mtp_alone: ClassVar[bool] = True
    mtp: bool = True
    ratios: tuple[int, ...]
    n_stream: int = 4
    n_rot: int = 64
    q_rank: int
    groups: int
    out_rank: int = 1024
    window: int = 128
    indexer: tuple[int, int, int]
    n_expert: int
    n_used: int
    n_hash: int = 3
    routed_scale: float
    limit: float = 10.0


@dataclass(frozen=True, kw_only=True)
class DFlashDims(Dims):
    """A block drafter. `taps` are layer ids of the target in the numbering of its training code; the file stores them + 1.

    `fork` writes the older `dflash-draft` naming, which stores the ids unchanged.
    """

    arch: ClassVar[str] = "dflash"
    n_target_embd: int
    taps: tuple[int, ...]
    mask_id: int
    block: int = 16
    window: int = 0  # 0: all layers see the whole context
    sliding: tuple[bool, ...] = ()
    mrope: bool = True  # the target has rope sections
    fork: bool = False
    kind: str = "dflash"  # one of `drafters.KINDS`
    conv: tuple[int, int] = (0, 0)  # dflash2: taps, and columns of a group
    selector: tuple[int, int] = (0, 0)  # dflash2: rank, candidates
    markov: int = 0  # dspark: rank


@dataclass(frozen=True, kw_only=True)
class EagleDims(Dims):
    """An EAGLE-3 drafter with the target's embedding and a head of its own.

    inputs   layers of the target whose inputs it reads
    n_drafts tokens of its head
    """

    arch: ClassVar[str] = "eagle3"
    n_target_embd: int
    inputs: tuple[int, ...]
    n_drafts: int


@dataclass(frozen=True, kw_only=True)
class StagesDims(Deepseek4Dims):
    """DSpark of DeepSeek-V4: layers as the target's, without compressed rows. taps, mask_id, block and markov as of DFlashDims."""

    arch: ClassVar[str] = "dflash"
    taps: tuple[int, ...]
    mask_id: int
    block: int
    markov: int
