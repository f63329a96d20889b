"""The race that draws a token: every token runs with a random number of its own, and the first one is drawn.

A token's score is its logit plus a Gumbel number, hashed from the row's number and the token's id; the highest score wins, which has the
softmax's probabilities (Gumbel 1954). A row's draw depends on its number, ids and logits alone, not on the order or count of its candidates.
Two distributions that race by one number mostly agree: with probability (1 - d) / (1 + d) at least, where d is their distance in
total variation (arXiv:2408.07978). So a drafter that draws by the target's number drafts the token that the target will draw.
"""

from __future__ import annotations

from torch import Tensor

_GAMMA, _C1, _C2 = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def gumbel(noise: Tensor, ids: Tensor) -> Tensor:
    """The numbers of tokens. Bits are SplitMix64's of a stream that starts at the 53 bits of the row's number, at the token's id.

    noise   [row, 1]       f64, in [0, 1), multiples of 2**-53
    ids     [row or 1, n]  int64
    return  [row, n]       f32
    """
    z = (ids * _GAMMA + _GAMMA) + (noise * 2.0**53).long()
    z.bitwise_xor_((z >> 30).bitwise_and_(2**34 - 1)).mul_(_C1)
    z.bitwise_xor_((z >> 27).bitwise_and_(2**37 - 1)).mul_(_C2)
    z.bitwise_xor_((z >> 31).bitwise_and_(2**33 - 1))
    # Exact where it is near 0, as winners' numbers are; never 0 nor 1
    u = z.bitwise_and_(2**52 - 1).float().add_(0.5).mul_(2.0**-52).clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def winners(scaled: Tensor, noise: Tensor, ids: Tensor) -> Tensor:
    """The column of each row's winner. scaled: [row, n] logits over temperature, -inf for tokens that do not run; the rest as for `gumbel`."""
    return (scaled + gumbel(noise, ids)).argmax(-1)
