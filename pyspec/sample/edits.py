"""Applies the samplers' sparse changes to a batch of logits rows: bias, penalties, DRY, in that order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pyspec.request import SamplingParams
from pyspec.sample.noise import Floats, Ints
from pyspec.sample.sampler import Edits


def apply(logits: Tensor, edits: Sequence[tuple[int, SamplingParams, Edits]]) -> None:
    """Change `logits` in place. Each entry has the first row of its span.

    logits  [row, vocab]  f32  read and written
    """
    bias(logits, edits)
    _penalise(logits, edits)
    _add(logits, [(first, e.dry[0], e.dry[1], -e.dry[2]) for first, _, e in edits])


def bias(logits: Tensor, edits: Sequence[tuple[int, SamplingParams, Edits]]) -> None:
    """The part of `apply` that does not depend on the history's tokens: biases and bans."""
    _add(logits, [(first, e.bias[0], e.bias[1], e.bias[2]) for first, _, e in edits])
    _add(logits, [(first, e.bans[0], e.bans[1], e.bans[2]) for first, _, e in edits])


def _add(logits: Tensor, parts: list[tuple[int, Ints, Ints, Floats]]) -> None:
    if not any(len(ids) for _, _, ids, _ in parts):
        return
    at = _flat(logits, [(first, rows, ids) for first, rows, ids, _ in parts])
    values = torch.from_numpy(np.concatenate([values for *_, values in parts])).to(logits.device)
    flat = logits.view(-1)
    flat[at] = flat[at] + values  # pairs are unique within a kind, so no accumulation is needed


def _penalise(logits: Tensor, edits: Sequence[tuple[int, SamplingParams, Edits]]) -> None:
    """Divide (or multiply, if negative) by repeat_penalty, then take off frequency * count and presence. As llama.cpp."""
    if not any(len(e.counts[0]) for _, _, e in edits):
        return
    at = _flat(logits, [(first, e.counts[0], e.counts[1]) for first, _, e in edits])
    sizes = [len(e.counts[0]) for _, _, e in edits]
    counts = np.concatenate([e.counts[2] for _, _, e in edits]).astype(np.float32)
    factor = np.repeat(np.array([p.repeat_penalty for _, p, _ in edits], np.float32), sizes)
    frequency = np.repeat(np.array([p.frequency_penalty for _, p, _ in edits], np.float32), sizes)
    presence = np.repeat(np.array([p.presence_penalty for _, p, _ in edits], np.float32), sizes)
    both = np.stack([factor, counts * frequency + presence])
    scale, offset = torch.from_numpy(both).to(logits.device)
    flat = logits.view(-1)
    old = flat[at]
    flat[at] = torch.where(old <= 0, old * scale, old / scale) - offset


def _flat(logits: Tensor, parts: list[tuple[int, Ints, Ints]]) -> Tensor:
    n_vocab = logits.shape[1]
    return torch.from_numpy(
        np.concatenate([(first + rows) * n_vocab + ids for first, rows, ids in parts])
    ).to(logits.device)
