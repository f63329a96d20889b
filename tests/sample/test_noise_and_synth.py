"""Random numbers by position, and acceptance by coin."""

import numpy as np
import pytest
import torch

from pyspec.errors import ConfigError
from pyspec.request import SamplingParams
from pyspec.sample.choose import Span, choose
from pyspec.sample.noise import COIN, uniform
from pyspec.sample.sampler import SlotSampler
from pyspec.sample.synth import SynthAcceptance
from pyspec.slots.drafts import Drafts


def test_noise_depends_on_seed_and_position_alone():
    whole = uniform(9, np.arange(100))
    assert np.array_equal(whole[40:50], uniform(9, np.arange(40, 50)))
    assert not np.intersect1d(whole, uniform(10, np.arange(100))).size
    assert not np.intersect1d(whole, uniform(9, np.arange(100), COIN)).size


def test_noise_is_the_published_splitmix64_sequence():
    """Position 0 of a stream that starts at 0 is SplitMix64's first output for seed 0."""
    assert uniform(0, np.array([0]), stream=0)[0] == (0xE220A8397B1DCDAF >> 11) * 2.0**-53


def test_noise_is_even_along_positions_and_along_seeds():
    """256 bins of 2**16 numbers: chi-square has mean 255 and deviation 22.6; and neighbours do not correlate."""
    for sample in (
        uniform(1, np.arange(2**16)),
        np.array([uniform(s, np.array([17]))[0] for s in range(2**13)]),
    ):
        counts = np.bincount((sample * 256).astype(int), minlength=256)
        expected = len(sample) / 256
        assert ((counts - expected) ** 2 / expected).sum() < 255 + 4 * 22.6
        assert abs(np.corrcoef(sample[1:], sample[:-1])[0, 1]) < 4 / len(sample) ** 0.5


@pytest.mark.parametrize(("mean_len", "n"), [(1.0, 4), (2.5, 4), (3.7, 7), (5.0, 4)])
def test_synthetic_acceptance_has_the_mean_length_asked_for(mean_len, n):
    synth = SynthAcceptance.of_length(mean_len, n, seed=3)
    assert sum(synth.chances[0] ** i for i in range(1, n + 1)) == pytest.approx(mean_len - 1, abs=1e-9)
    rounds = [synth.n_accepted(1, 10 * i, n) for i in range(4000)]
    assert 1 + sum(rounds) / len(rounds) == pytest.approx(mean_len, abs=0.12)


def test_a_mean_length_out_of_reach_is_refused():
    for mean_len in 0.5, 5.5:
        with pytest.raises(ConfigError, match=r"outside 1\.\.5"):
            SynthAcceptance.of_length(mean_len, 4)


def test_synthetic_acceptance_has_the_rates_asked_for():
    synth = SynthAcceptance.of_rates("0.9,0.6,0.6,0", 4, seed=3)
    rounds = [synth.n_accepted(1, 10 * i, 4) for i in range(4000)]
    for n, rate in enumerate((0.9, 0.6, 0.6, 0.0), 1):
        assert sum(r >= n for r in rounds) / len(rounds) == pytest.approx(rate, abs=0.03)
    assert max(SynthAcceptance.of_rates("1,1,1", 3).n_accepted(1, i, 3) for i in range(9)) == 3


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0.5,0.6", "none larger"),
        ("1.5", "none larger"),
        ("0.5,,1", "no number"),
        ("0.5", "has 1 values; 2"),
    ],
)
def test_rates_that_can_not_be_are_refused(text, why):
    with pytest.raises(ConfigError, match=why):
        SynthAcceptance.of_rates(text, 2)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_synthetic_acceptance_ignores_the_target_until_its_own_token(temperature):
    logits = torch.zeros(4, 12)
    logits[:, 7] = 50.0
    who = SlotSampler(SamplingParams(temperature=temperature), 12, (3,), [1])
    always, never = SynthAcceptance.of_length(4.0, 3), SynthAcceptance.of_length(1.0, 3)
    assert choose(logits, [Span(who, 0, 4, Drafts([1, 2, 4]))], always)[0].tokens == [1, 2, 4, 7]
    assert choose(logits, [Span(who, 0, 4, Drafts([7, 7, 7]))], never)[0].tokens == [7]
    assert choose(logits, [Span(who, 0, 4, Drafts([1, 3, 4]))], always)[0].tokens == [1, 7], (
        "a drafted end token is refused"
    )
    assert choose(logits, [Span(who, 0, 4, Drafts([1, 99, 4]))], always)[0].tokens == [1, 7], (
        "and so is no token at all"
    )


def test_synthetic_acceptance_repeats():
    def coins(prompt):
        who = SlotSampler(SamplingParams(), 12, (), prompt)
        return [SynthAcceptance.of_length(2.5, 5).n_accepted(who.fingerprint, i, 5) for i in range(30)]

    assert coins([1, 2]) == coins([1, 2]) != coins([2, 1])
