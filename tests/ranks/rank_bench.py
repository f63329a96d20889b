"""Ranks as threads of one process: a model's shares with a real process group between them, and no engine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from pyspec.cuda.collective import Collective
from pyspec.cuda.rank import Rank
from pyspec.gguf import open_gguf
from pyspec.models import read_config
from pyspec.models.checks import check_ranks
from pyspec.models.decoder import Decoder
from pyspec.models.weights import Weights, cuts_of
from pyspec.slots.batch import Seq, SeqMode, lay_out
from pyspec.slots.kv import KvFormat
from pyspec.slots.memory import allocate
from pyspec.slots.parts import CacheSizes
from pyspec.slots.table import SlotTable

T = TypeVar("T")
CPU = torch.device("cpu")
FIXTURES = Path(__file__).parents[1] / "fixtures"
LIMIT_S = 60.0


def together(n: int, do: Callable[[Collective], T]) -> list[T]:
    """The results of `do` on each of `n` ranks."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(n) as pool:
        store, found = str(Path(folder) / "ranks"), []
        for i in range(n):
            found.append(pool.submit(lambda i=i: do(Collective(Rank(i, n), CPU, store, LIMIT_S))))
        return [f.result(LIMIT_S) for f in found]


class RankBench:
    """One rank's part of a model over two slots."""

    def __init__(
        self, path: Path, ranks: Collective | None, dense: torch.dtype | None = torch.float32
    ) -> None:
        self.file = open_gguf(path)
        config = read_config(self.file)
        n = 1 if ranks is None else ranks.rank.n
        cuts = cuts_of(config.tensors(self.file))
        check_ranks(self.file, cuts, n)
        self.own = config.share(n)
        self.table = SlotTable(2, 32, 16)
        sizes = CacheSizes(2, self.table.n_alloc_row, self.table.page_size, 9, KvFormat.named("f32"))
        self.memory = allocate(self.own.parts(), sizes, CPU)
        self.weights = Weights(self.file, CPU, dense, ranks=ranks, cuts=cuts)
        self.target = Decoder(config, self.weights, self.memory)
        for slot in self.table.slots:
            self.table.acquire(slot, 256)

    def forwards(self) -> list[Tensor]:
        """Logits of prompts of two slots in chunks, of a verify with some kept rows, and of the rows after it."""
        gen = torch.Generator().manual_seed(5)
        prompt = [
            torch.randint(min(300, self.target.n_vocab), (40,), generator=gen).tolist() for _ in range(2)
        ]
        found = []
        plan = [
            [Seq(0, 0, prompt[0][:30], SeqMode.KEEP, 30)],
            [Seq(0, 30, prompt[0][30:], SeqMode.KEEP, 1), Seq(1, 0, prompt[1][:7], SeqMode.KEEP, 7)],
            [Seq(0, 40, prompt[1][:6], SeqMode.VERIFY, 6), Seq(1, 7, prompt[1][7:8], SeqMode.KEEP, 1)],
            [Seq(0, 43, prompt[1][8:10], SeqMode.VERIFY, 2, 3), Seq(1, 8, prompt[1][8:30], SeqMode.KEEP, 0)],
            [Seq(0, 45, prompt[1][8:9], SeqMode.KEEP, 1, 2), Seq(1, 30, prompt[1][30:31], SeqMode.KEEP, 1)],
        ]  # fmt: skip
        for seqs in plan:
            found.append(self.target.forward(lay_out(self.table, seqs, CPU)).logits.clone())
        return found
