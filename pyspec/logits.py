"""Logits of given tokens from the forward that serves requests, for comparison with other programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pyspec.config import EngineSettings
from pyspec.cuda.kernel_context import within
from pyspec.engine.load.load import load
from pyspec.errors import ConfigError, RequestError, cannot_write
from pyspec.slots.batch import Seq, SeqMode, lay_out


class LogitReader:
    """A loaded model that gives the logits of sequences, each read from its first token, without speculation."""

    def __init__(self, path: Path, settings: EngineSettings) -> None:
        """settings: `ctx` is the longest sequence and one more, `batch` the rows of a forward. Raises the errors of a load, and ConfigError
        for several ranks."""
        if settings.tp != 1:
            raise ConfigError("logits are read on one device: leave out --tp")
        self._loaded = load(path, replace(settings, np=1, spec_type="none", warm_up=False))
        self.info, self.tokenizer = self._loaded.info, self._loaded.tokenizer
        self._n_row = settings.batch or 512

    def read(self, ids: Sequence[int], first: int = 0) -> Iterator[tuple[int, Tensor]]:
        """(i, logits [row, vocab] f32 on the device) of pieces of a sequence; row j is the model's prediction after tokens 0..i+j.
        first: of the rows wanted. Raises RequestError for unknown ids and beyond the trained context."""
        n, n_vocab, n_train = len(ids), self.info.n_vocab, self.info.n_ctx_train
        bad = next((t for t in ids if not 0 <= t < n_vocab), None)
        if bad is not None:
            raise RequestError(f"token {bad} is outside 0..{n_vocab - 1}")
        if n_train and n > n_train:
            raise RequestError(f"{n} tokens are more than the {n_train} the model was trained for")
        loop = self._loaded.loop
        slot = loop.table.pick()
        assert slot is not None, "one slot, and no request"
        loop.table.acquire(slot, n)
        loop.memory.reset(slot.index)  # recurrent states of the sequence before
        try:
            for start in range(0, n, self._n_row):
                tokens = list(ids[start : start + self._n_row])
                n_out = min(len(tokens), max(0, start + len(tokens) - first))
                seq = Seq(slot.index, start, tokens, mode=SeqMode.KEEP, n_out=n_out)
                with within(self._loaded.kernels), loop.worker.lock:
                    out = loop.target.forward(lay_out(loop.table, [seq], loop.target.device))
                    rows = out.logits.to(torch.float32, copy=True) if n_out else None
                slot.tokens.extend(tokens)
                if rows is not None:
                    yield start + len(tokens) - n_out, rows
        finally:
            loop.table.release(slot)


def compute_logits(
    path: Path,
    ids: Sequence[int],
    *,
    chunk: int = 512,
    kv_type: str = "f32",
    kv_type_v: str | None = None,
    device: str = "auto",
    weights: str = "auto",
    cpu_activations: str = "q16",
) -> np.ndarray:
    """[token, vocab] float32: row i is the model's prediction after tokens 0..i.

    The tokens run as one prompt in forwards of `chunk` rows, without speculation. Raises RequestError for unknown ids and beyond the
    trained context, and the errors of a load.
    """
    if not ids:
        raise RequestError("no tokens; give at least one id")
    settings = EngineSettings(
        ctx=len(ids) + 1,
        batch=chunk,
        ubatch=chunk,
        kv_type=kv_type,
        kv_type_v=kv_type_v,
        device=device,
        weights=weights,
        cpu_activations=cpu_activations,
    )
    reader = LogitReader(path, settings)
    rows = np.empty((len(ids), reader.info.n_vocab), np.float32)
    for start, found in reader.read(ids):
        rows[start : start + len(found)] = found.cpu().numpy()
    return rows


def save_logits(out: Path, ids: Sequence[int], rows: np.ndarray) -> None:
    """Write arrays `tokens` int32 [token] and `logits` float32 [token, vocab]. Raises ConfigError on failure."""
    try:
        with out.open("wb") as file:
            np.savez(file, tokens=np.asarray(ids, np.int32), logits=rows)
    except OSError as e:
        raise cannot_write(out, e) from e
