"""`pyspec verify`: equal texts are equal, near ties are distinguished from bugs, and proving nothing is an error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from pyspec.bench.verify import Verification, verify
from pyspec.cli import main
from pyspec.cli.verify import describe_parting
from pyspec.engine.api import Engine, Result
from pyspec.errors import ConfigError

FIXTURE = Path(__file__).parents[1] / "fixtures" / "qwen35.gguf"
PROMPTS = [[3, 5, 7], [11, 2], [40, 41, 42, 43]]
N = 24


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(
        FIXTURE, "mtp", np=2, ctx=128, n_draft_fixed=True, warm_up=False, check_tap_shift=False
    ) as e:
        yield e


def spoilt(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Result], Result]
) -> Verification:
    """The comparison, with the second speculative answer as `spoil` makes it."""
    ask = engine.generate_many

    def several(prompts: list[list[int]], **options: object) -> list[Result]:
        found = ask(prompts, **options)  # type: ignore[arg-type]
        return found if options["n_draft_max"] == 0 else [found[0], spoil(found[1]), found[2]]

    monkeypatch.setattr(engine, "generate_many", several)
    return verify(engine, PROMPTS, N)


def test_texts_of_a_sound_engine_are_equal(engine: Engine):
    seen: list[tuple[int, int]] = []
    found = verify(engine, PROMPTS, N, progress=lambda done, of: seen.append((done, of)))
    assert (found.n_prompt, found.n_equal, found.partings) == (3, 3, ())
    assert found.n_compared == 3 * N and found.drafted > 0 and found.tie == 2e-3
    assert seen == [(i + 1, 6) for i in range(6)]


def test_a_wrong_token_is_a_bug_with_its_place(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    want = engine.generate(PROMPTS[1], temperature=0, max_tokens=N).tokens
    wrong = (want[9] + 1) % 250
    found = spoilt(
        engine, monkeypatch, lambda r: replace(r, tokens=(*r.tokens[:9], wrong, *r.tokens[10:]))
    )
    (bug,) = found.bugs
    assert (bug.prompt, bug.token, bug.plain, bug.spec, bug.verdict) == (1, 9, want[9], wrong, "bug")
    assert bug.margin > found.tie and bug.logits[0] == 0.0
    assert found.n_compared == 2 * N + 9
    assert "margin" in describe_parting(bug) and describe_parting(bug).endswith("bug")


def test_a_text_that_ends_too_soon_is_a_bug(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    found = spoilt(engine, monkeypatch, lambda r: replace(r, tokens=r.tokens[:6], finish="eos"))
    (bug,) = found.bugs
    assert (bug.token, bug.spec, bug.spec_text) == (6, -1, "(end)")


def test_what_the_target_likes_as_well_is_a_near_tie(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    text = list(engine.generate(PROMPTS[1], temperature=0, max_tokens=N).tokens)
    seen = engine.generate([*PROMPTS[1], *text[:9]], temperature=0, max_tokens=1, logprobs=2).logprobs[0]
    (_, best), (other, second) = seen.top

    def spoil(r: Result) -> Result:
        return replace(r, tokens=(*r.tokens[:9], other, *r.tokens[10:]))

    monkeypatch.setitem(verify.__globals__["TIE"], "cpu", (best - second) * 1.01)
    found = spoilt(engine, monkeypatch, spoil)
    (near,) = found.partings
    assert near.verdict == "near tie"
    assert near.margin == pytest.approx(best - second, abs=1e-4)
    assert not found.bugs
    monkeypatch.undo()
    monkeypatch.setitem(verify.__globals__["TIE"], "cpu", (best - second) * 0.99)
    assert spoilt(engine, monkeypatch, spoil).bugs


def test_proving_nothing_is_an_error(engine: Engine):
    with pytest.raises(ConfigError, match="nothing was drafted in 1 answers"):
        verify(engine, [[1, 2]], 1)
    with (
        Engine.load(FIXTURE, None, ctx=64, warm_up=False) as plain,
        pytest.raises(ConfigError, match="no drafter, so there is nothing to verify"),
    ):
        verify(plain, [[1, 2]], 4)


def test_the_command_reads_prompts_and_says_what_came_of_it(tmp_path: Path):
    (tmp_path / "p.txt").write_text("Hello there\n\nOnce upon a time\n")
    args = [
        "verify",
        str(FIXTURE),
        "-f",
        str(tmp_path / "p.txt"),
        "-n",
        "12",
        "--no-warmup",
        "-c",
        "128",
        "--json",
    ]
    done = CliRunner().invoke(main, [*args, "--random-prompts", "2"])
    assert done.exit_code == 0, done.output
    about = json.loads(done.stdout)
    assert (about["n_prompt"], about["bugs"]) == (4, 0) and about["drafted"] > 0
    (tmp_path / "p.txt").write_text("\n")
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 2 and "has no prompts" in done.stderr
