"""Logits of given tokens from the forward that serves requests, for comparison with other programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pyspec.config import EngineSettings
from pyspec.engine.load.load import load
from pyspec.errors import ConfigError, RequestError
from pyspec.slots.batch import Seq, SeqMode, lay_out


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
    n = len(ids)
    settings = EngineSettings(
        ctx=n + 1,
        batch=chunk,
        ubatch=chunk,
        kv_type=kv_type,
        kv_type_v=kv_type_v,
        device=device,
        weights=weights,
        cpu_activations=cpu_activations,
        spec_type="none",
        warm_up=False,
    )
    loaded = load(path, settings)
    n_vocab, n_train = loaded.info.n_vocab, loaded.info.n_ctx_train
    bad = next((t for t in ids if not 0 <= t < n_vocab), None)
    if bad is not None:
        raise RequestError(f"token {bad} is outside 0..{n_vocab - 1}")
    if n_train and n > n_train:
        raise RequestError(f"{n} tokens are more than the {n_train} the model was trained for")
    loop = loaded.loop
    slot = loop.table.pick()
    assert slot is not None, "a new table has idle slots"
    loop.table.acquire(slot, n)
    rows = np.empty((n, n_vocab), np.float32)
    for start in range(0, n, chunk):
        tokens = list(ids[start : start + chunk])
        seq = Seq(slot.index, start, tokens, mode=SeqMode.KEEP, n_out=len(tokens))
        batch = lay_out(loop.table, [seq], loop.target.device)
        with loop.worker.lock:
            rows[start : start + len(tokens)] = loop.target.forward(batch).logits.float().cpu().numpy()
        slot.tokens.extend(tokens)
    return rows


def save_logits(out: Path, ids: Sequence[int], rows: np.ndarray) -> None:
    """Write arrays `tokens` int32 [token] and `logits` float32 [token, vocab]. Raises ConfigError on failure."""
    try:
        with out.open("wb") as file:
            np.savez(file, tokens=np.asarray(ids, np.int32), logits=rows)
    except OSError as e:
        raise ConfigError(f"cannot write {out}: {e.strerror or e}") from e
