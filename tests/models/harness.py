"""A model with its slots, without an engine: run rows through a forward by hand."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from pyspec import draft
from pyspec.config import EngineSettings
from pyspec.draft.drafter import Drafter, DraftOptions, TargetFile
from pyspec.gguf import open_gguf
from pyspec.models import read_config
from pyspec.models.checks import check_tensors
from pyspec.models.decoder import Decoder
from pyspec.models.rope import NO_FLAGS, RopeFlags
from pyspec.models.target import Out
from pyspec.models.weights import Weights
from pyspec.slots.batch import Seq, SeqMode, lay_out
from pyspec.slots.kv import KvFormat
from pyspec.slots.kv_types import KvType, type_of
from pyspec.slots.memory import allocate
from pyspec.slots.parts import CacheSizes
from pyspec.slots.table import SlotTable

FIXTURES = Path(__file__).parents[1] / "fixtures"
ADDED = [
    "qwen2",
    "qwen3moe",
    "gemma3",
    "granite",
    "mistral3",
    "glm4moe",
    "minimax-m2",
    "lfm2moe",
    "qwen3next",
    "gpt-oss",
    "deepseek2",
    "gemma4-dense",
    "gemma4-moe",
    "gemma4-e",
    "granitemoe",
    "granitehybrid",
    "granitehybrid-moe",
    "smollm3",
    "seed_oss",
    "qwen2moe",
    "dots1",
    "bailingmoe2",
    "ernie4_5",
    "ernie4_5-moe",
    "glm4",
    "phi3",
    "olmo2",
    "olmo3",
    "exaone4",
    "exaone4-32b",
    "exaone-moe",
    "muse-glimmer",
    "k2-horizon",
    "laguna",
    "step35",
    "falcon-h1",
    "cohere2",
    "hunyuan-dense",
    "hunyuan-moe",
    "gemma2",
    "kimi-linear",
    "bailingmoe3",
    "llama4",
    "qwen4exp",
    "glm-dsa",
    "kimi-k3",
    "k2-horizon-mova",
    "glm5-next",
]
"""Fixtures of architectures that were added one by one, with llama.cpp's logits and ids."""
DEVICE = torch.device(
    os.environ.get("PYSPEC_TEST_DEVICE", "cpu")
)  # the GPU machine runs these tests with cuda


class Bench:
    """A target over `n_slot` slots, with a verify width of at most `width`."""

    def __init__(
        self,
        path: Path,
        *,
        n_slot: int = 1,
        width: int = 17,
        n_ctx: int = 256,
        kv: torch.dtype | KvType = torch.float32,
        dense: torch.dtype | None = torch.float32,
        rope: RopeFlags = NO_FLAGS,
        n_chunk: int = 0,
    ) -> None:
        self.file = open_gguf(path)
        config = read_config(self.file)
        check_tensors(self.file, config.tensors(self.file))
        self.table = SlotTable(n_slot, n_slot * n_ctx // 16, 16)
        self.memory = allocate(
            config.parts(),
            CacheSizes(
                n_slot,
                self.table.n_alloc_row,
                self.table.page_size,
                width,
                KvFormat.both(type_of(kv)),
                n_chunk=n_chunk,
            ),
            DEVICE,
        )
        self.target = Decoder(config, Weights(self.file, DEVICE, dense, rope=rope), self.memory)
        for slot in self.table.slots:
            self.table.acquire(slot, n_ctx)

    def drafter(self, kind: str, path: Path | None = None, *, n_draft: int) -> Drafter:
        """A drafter of this target, from its own file or another one."""
        settings = EngineSettings(np=len(self.table.slots), kv_type="f32", n_draft_max=n_draft)
        module, file = draft.find(kind), None if path is None else open_gguf(path)
        plan = module.plan(file, TargetFile(self.file, self.target.config, DEVICE), settings)
        return module.load(
            plan, self.target, self.table, DraftOptions(settings=settings, dense=torch.float32)
        )

    def seq(self, slot: int, tokens: list[int], *, keep: bool = True, n_out: int | None = None) -> Seq:
        s = self.table.slots[slot]
        return Seq(
            slot,
            s.n_past,
            tokens,
            SeqMode.KEEP if keep else SeqMode.VERIFY,
            len(tokens) if n_out is None else n_out,
            s.n_fold,
        )

    def forward(self, *seqs: Seq, taps: tuple[int, ...] = ()) -> Out:
        return self.target.forward(lay_out(self.table, seqs, DEVICE), taps)

    def commit(self, seq: Seq, n: int) -> None:
        """Keep the first n rows of a sequence that has run."""
        slot = self.table.slots[seq.slot]
        slot.tokens.extend(seq.tokens[:n])
        slot.n_fold = 0 if seq.keep else n

    def feed(self, slot: int, tokens: list[int], *, keep: bool = True) -> torch.Tensor:
        """Run and keep all; logits of all rows."""
        seq = self.seq(slot, tokens, keep=keep)
        out = self.forward(seq)
        self.commit(seq, len(tokens))
        return out.logits.cpu()


def near(
    got: torch.Tensor, want: torch.Tensor, dense: torch.dtype | None, atol: float, turned: float = 0.1
) -> bool:
    """Whether logits [row, token] agree: all of them, where products are exact.

    Products of packed matrices round their rows, to f16 on a GPU and to 16-bit whole numbers on a CPU, so a close choice of experts may
    turn: there a share `turned` of the rows may differ.
    """
    if dense is not None:
        return bool((got - want).abs().max() < (atol if DEVICE.type == "cpu" else 2 * atol))
    off = (got - want).abs().amax(-1) > 0.05 * want.std()
    return bool(off.float().mean() < turned)
