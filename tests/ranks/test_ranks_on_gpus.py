"""Several ranks on GPUs: the text of one, sums by peer_sum, graphs. Not run by CI, which has no GPU:

python -m pytest tests/ranks/test_ranks_on_gpus.py                      # needs two GPUs
PYSPEC_SHARE_GPU=1 python -m pytest tests/ranks/test_ranks_on_gpus.py   # two ranks on one: no NCCL, no graphs

Ranks that wait for each other end after a minute, and say in which calls and where their threads are: `-s` shows it as it comes. What hangs
elsewhere is seen with `-o faulthandler_timeout=90`.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from waiting import children

from pyspec.cuda.collective import may_share_gpu
from pyspec.engine.api import Engine
from pyspec.synth import write
from pyspec.synth.dims import MODELS

N_GPU = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(
    (1 if may_share_gpu() else 2) > N_GPU, reason="needs two GPUs, or PYSPEC_SHARE_GPU=1"
)
QUESTIONS = [
    "Write a short story about a dog.",
    "What is a river?",
    "Count from one to ten.",
    "Why is the sky blue?",
]
DEMOTED = "pyspec.cuda.ops.peer_sum.cuda"
MINUTE_S = 60.0


def texts(draft: str | None, tp: int, **options: object) -> list[tuple[int, ...]]:
    with Engine.load("demo", draft, np=4, ctx=1024, device="cuda", tp=tp, **options) as engine:
        found = engine.generate_many(QUESTIONS, max_tokens=48, temperature=0.0)
        again = engine.generate_many(QUESTIONS, max_tokens=48, temperature=0.0)
        assert [r.tokens for r in found] == [r.tokens for r in again]
        return [tuple(r.tokens) for r in found]


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, ...]]:
    return texts(None, 1)


@pytest.mark.parametrize("draft", [None, "mtp", "auto", "ngram"])
def test_text_over_two_gpus_is_that_of_one(draft: str | None, alone: list[tuple[int, ...]]) -> None:
    began = time.monotonic()
    assert texts(draft, 2) == alone
    assert time.monotonic() - began < MINUTE_S, "the ranks of the demo load and answer in seconds"


def test_a_drafter_that_is_whole_on_the_first_gpu_drafts_the_same(alone: list[tuple[int, ...]]) -> None:
    """Its drafts are cut by their probabilities. Graphs of single rows are its own, and all ranks must have them."""
    assert texts("auto", 2, draft_p_min=0.2) == alone


@pytest.mark.parametrize(
    "options", [{"plain_loop": True}, {"demoted": (DEMOTED,)}], ids=["no graphs", "no peer_sum"]
)
def test_every_way_to_sum_gives_the_same_text(
    options: dict[str, object], alone: list[tuple[int, ...]]
) -> None:
    assert texts("auto", 2, **options) == alone


def first_tokens(path: Path, tp: int) -> list[dict[int, float]]:
    """The likeliest first tokens behind four prompts, each alone and all together, and their log probabilities."""
    prompts = [tuple(range(5, 5 + n)) for n in (3, 40, 150, 300)]
    how = {"max_tokens": 1, "temperature": 0.0, "logprobs": 8, "cache_prompt": False}
    with Engine.load(str(path), None, np=4, ctx=512, device="cuda", tp=tp) as engine:
        found = [
            *(engine.generate(prompt, **how) for prompt in prompts),
            *engine.generate_many(prompts, **how),
        ]  # type: ignore[arg-type]
    return [dict(r.logprobs[0].top) for r in found]


def test_deepseek4_over_two_gpus_is_that_of_one(tmp_path: Path) -> None:
    """Layers that kernels support, experts in MXFP4: the same probabilities, up to rounding of other sums."""
    dims = replace(
        MODELS["deepseek-v4-flash"], n_layer=4, ratios=(0, 4, 128, 4), n_embd=1024, n_ff=512, n_head=16, n_group=4, q_rank=256, out_rank=256,
        n_expert=8, n_used=2, n_hash=1,
    )  # fmt: skip
    path = write(dims, tmp_path / "f.gguf", quant="mxfp4")
    for one, two in zip(first_tokens(path, 1), first_tokens(path, 2), strict=True):
        both = one.keys() & two.keys()
        assert len(both) >= 6 and max(abs(one[t] - two[t]) for t in both) < 0.05


def test_sums_are_taken_in_each_others_memory(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pyspec"), Engine.load("demo", None, np=1, device="cuda", tp=2):
        pass
    assert any("one launch in each other's memory" in r.message for r in caplog.records), caplog.text


def test_a_lost_rank_costs_a_pause() -> None:
    with Engine.load("demo", None, np=1, device="cuda", tp=2, isolated=True) as engine:
        want = engine.generate(QUESTIONS[0], max_tokens=32, temperature=0.0).tokens
        (rank,) = children(os.getpid(), "rank_main")
        os.kill(rank, signal.SIGKILL)
        assert engine.generate(QUESTIONS[0], max_tokens=32, temperature=0.0).tokens == want
        assert engine.metrics().restarts == 1


def test_a_program_over_two_gpus_ends() -> None:
    """NCCL's own end waits for graphs, which live as long as the program: it waited for 15 minutes."""
    command = [
        sys.executable,
        "-m",
        "pyspec",
        "bench",
        "-m",
        "demo",
        "--tp",
        "2",
        "-npl",
        "1",
        "-n",
        "24",
        "-r",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
