"""Rows of a table by n-grams of token ids, and what they add to several residual streams. Reference in plain torch.

    tokens   [row]                      int64  ids of the batch
    places   [row * n_head]             int64  rows of the table, `n_head` for each token
    x        [row, n_stream * n]        f32    the streams, side by side
    made     [row, n_stream * n + n]    f32    products of a token's gathered rows: keys of each stream, then the value
    norms    3 of [n_stream * n]        f32    weights of the norms of keys, of the streams and of what is convolved
    taps     [n_stream * n, n_tap]      f32    the last one multiplies the token's own row
    ring     IDS and INPUTS of the tokens before, for every slot (slots.ring)

Ids c_0 = the token's, c_1 = that of the token before it, and so on; from the first end token on, going back from c_1, and before the text's
begin, all are the end token. The n-gram of c_0 .. c_(n-1) has the number m = xor of c_j * multiplier_j, modulo 2^64, and each of its heads the
row m % size + offset. Each stream has the gate g = sigmoid(sign(s) sqrt(max(|s|, 1e-6))), where s = key . query / sqrt(n), both normed; the
value times g goes into the stream, and silu of a causal convolution of it, normed, too. Taps are `n_gram` tokens apart.
Source: llama.cpp's `qwen4exp`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.exact import by_row
from pyspec.cuda.guard import Guard
from pyspec.slots.batch import Batch
from pyspec.slots.ring import RingRows

GUARD = Guard(17)

IDS, INPUTS = "ids", "inputs"  # names of the ring's rows
LEAST = 1e-6
MOST_ID = 1 << 24  # ids that f32 holds


@dataclass(frozen=True, slots=True)
class NgramsSpec:
    """n-grams of 2 to `n_gram` tokens. multipliers: of the ids, by distance; sizes, offsets: of each head's rows, those of short n-grams first;
    end: the token behind which no n-gram goes back; n_tap: of the convolution; eps: of the norms."""

    device: torch.device
    n_gram: int
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    end: int
    n_stream: int
    n: int
    n_tap: int
    eps: float

    @property
    def n_head(self) -> int:
        """Rows of a token."""
        return len(self.sizes)

    @property
    def window(self) -> int:
        """Tokens before a row that it reads."""
        return (self.n_tap - 1) * self.n_gram


Norms = tuple[Tensor, Tensor, Tensor]


def signed(x: int) -> int:
    """The int64 with the bits of a whole number below 2^64."""
    return x - (1 << 64) if x >= 1 << 63 else x


def remainder(m: Tensor, size: int) -> Tensor:
    """m % size of int64 that stand for whole numbers below 2^64."""
    rest = torch.where(m < 0, (1 << 64) % size, 0)
    return (m.remainder(size) + rest).remainder(size)


class Ngrams:
    """The launch that the op binds: the reference, of which other implementations are kinds."""

    def __init__(self, spec: NgramsSpec) -> None:
        self.spec = spec

    def rows(self, ring: RingRows, batch: Batch) -> Tensor:
        """`places` of the batch's tokens, whose ids go into the ring, here or with what is convolved."""
        s, found = self.spec, []
        for i, seq in enumerate(batch.seqs):
            here, n_past = slice(batch.starts[i], batch.starts[i + 1]), seq.n_past
            first = max(0, n_past - s.n_gram + 1)
            old = ring.read(seq.slot, first, n_past)[IDS][:, 0].long()
            lead = old.new_full((s.n_gram - 1 - len(old),), s.end)
            ids = torch.cat((lead, old, batch.tokens[here]))
            ring.write(seq.slot, n_past, {IDS: batch.tokens[here, None].to(ring.rows[IDS].dtype)})
            ids = ids.unfold(0, s.n_gram, 1).flip(1)  # [row, distance]
            ended = (ids[:, 1:] == s.end).cumsum(1) > 0
            found.append(torch.cat((ids[:, :1], ids[:, 1:].masked_fill(ended, s.end)), 1))
        return self._places(torch.cat(found)).flatten()

    def _places(self, ids: Tensor) -> Tensor:
        """Of ids [row, distance]: [row, head]"""
        s, heads, per = self.spec, [], self.spec.n_head // (self.spec.n_gram - 1)
        m = ids[:, 0] * signed(s.multipliers[0])
        for n in range(1, s.n_gram):
            m = m ^ (ids[:, n] * signed(s.multipliers[n]))
            for head in range((n - 1) * per, n * per):
                heads.append(remainder(m, s.sizes[head]) + s.offsets[head])
        return torch.stack(heads, 1)

    def mixed(
        self, x: Tensor, made: Tensor, norms: Norms, taps: Tensor, ring: RingRows, batch: Batch
    ) -> Tensor:
        """The streams with what the rows add, [row, n_stream * n]. What is convolved goes into the ring."""
        s, wide = self.spec, self.spec.n_stream * self.spec.n
        value, u = by_row(lambda x, made: self._gated(x, made, norms), x, made.contiguous())
        y = torch.empty_like(x)
        for i, seq in enumerate(batch.seqs):
            here, n_past = slice(batch.starts[i], batch.starts[i + 1]), seq.n_past
            old = ring.read(seq.slot, max(0, n_past - s.window), n_past)[INPUTS]
            past = torch.cat((u.new_zeros(s.window - len(old), wide), old, u[here]))
            sums = past[: seq.width] * taps[:, 0]
            for t in range(1, s.n_tap):
                at = t * s.n_gram
                sums = torch.addcmul(sums, past[at : at + seq.width], taps[:, t])
            y[here] = sums
            ring.write(seq.slot, n_past, {INPUTS: u[here]})
        return by_row(lambda x, value, y: (x + value + F.silu(y),), x, value, y)[0]

    def _gated(self, x: Tensor, made: Tensor, norms: Norms) -> tuple[Tensor, Tensor]:
        """The value of each stream, and what is convolved."""
        s, wide = self.spec, self.spec.n_stream * self.spec.n
        key, query = self._normed(made[:, :wide], norms[0]), self._normed(x, norms[1])
        score = (key * query).unflatten(1, (s.n_stream, s.n)).sum(-1, keepdim=True) * s.n**-0.5
        gate = (score.sign() * score.abs().clamp(min=LEAST).sqrt()).sigmoid()
        value = (gate * made[:, None, wide:]).flatten(1)
        return value, self._normed(value, norms[2])

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        each = x.unflatten(1, (self.spec.n_stream, self.spec.n))
        return F.rms_norm(each, (self.spec.n,), None, self.spec.eps).flatten(1) * weight


bind = Ngrams
