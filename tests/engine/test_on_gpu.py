"""The demo pair on a GPU: same text with any drafter and any neighbours, same bits twice, nothing allocated on the way.

Not run by CI, which has no GPU: `make check-gpu`.
"""

from __future__ import annotations

import gc
import itertools
import os
import queue
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from known_texts import n_same
from plans import fix_alone, fix_lengths

from pyspec.cuda.graph import Graphed
from pyspec.cuda.ops.linear.dequant import dequantize
from pyspec.cuda.ops.linear.fit_q4 import fit_q4
from pyspec.cuda.streamed_tiles import StreamedTiles
from pyspec.cuda.temporary import release, temporary
from pyspec.draft import dflash
from pyspec.engine.api import Engine, Result, collect
from pyspec.engine.loop.pending_round import PendingRound
from pyspec.gguf import GGMLType
from pyspec.logits import compute_logits
from pyspec.models.coarse import rows_of
from pyspec.request import Delta, Done, Event, Failed
from pyspec.synth import write

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

KERNELS = os.environ.get("PYSPEC_TEST_KERNELS", "auto")  # in a process of its own, without conftest.py
QUESTIONS = [
    "Write a short story about a dog.",
    "What is a river?",
    "Tell me about the moon.",
    "Count from one to ten.",
    "Why is the sky blue?",
    "Name three animals.",
    "Write a story about a girl and her red kite.",
    "What do bees do?",
]


def load(draft: str | None, np: int, **options: object) -> Engine:
    return Engine.load("demo", draft, np=np, ctx=1024, device="cuda", check_tap_shift=False, **options)


def answers(engine: Engine, n: int = len(QUESTIONS), **options: object) -> list[Result]:
    prompts = [[{"role": "user", "content": q}] for q in QUESTIONS[:n]]
    return engine.generate_many(prompts, max_tokens=160, temperature=0.0, **options)


def together(engine: Engine, n: int, **options: object) -> list[Result]:
    """`answers` of requests that all come in one round: a prompt's neighbours in its forward decide its last bits."""
    requests = [
        engine.request([{"role": "user", "content": q}], max_tokens=160, temperature=0.0, **options)
        for q in QUESTIONS[:n]
    ]
    events: list[queue.SimpleQueue[Event]] = [queue.SimpleQueue() for _ in requests]
    with engine.core._wake:  # the engine's thread takes the requests after this block
        for request, to in zip(requests, events, strict=True):
            engine.submit(request, to.put)
    return [collect([e for e in iter_until_done(to) if isinstance(e, Delta | Done)]) for to in events]


def iter_until_done(events: queue.SimpleQueue[Event]) -> Iterator[Event]:
    while True:
        event = events.get(timeout=60)
        assert not isinstance(event, Failed), event
        yield event
        if isinstance(event, Done):
            return


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    with load(None, 1) as engine:
        return [r.tokens for r in answers(engine)]


@pytest.mark.parametrize("head", ["full", "q4_0", "iq4_nl"])
@pytest.mark.parametrize("draft", ["auto", "mtp"])
def test_a_coarse_head_for_drafts_leaves_the_text(draft: str, head: str, expected: list) -> None:
    with load(draft, 4, draft_head=head) as engine:
        drafter, target = engine.loop.drafter, engine.loop.target
        own = drafter.block.output if draft == "mtp" else drafter.net.head
        assert [r.tokens for r in answers(engine)] == expected
        if head != "full":
            type = GGMLType[head.upper()]
            held = own.matrix if isinstance(own, StreamedTiles) else own.packed
            weight, copy = (rows_of(m, 0, held.n_out) for m in (target.output, own))
            assert held.type is type
            assert torch.equal(copy, dequantize(fit_q4(weight, type), type, weight.shape))


@pytest.mark.parametrize("np", [1, 2, 4, 8])
@pytest.mark.parametrize("draft", [None, "auto", "mtp", "ngram"])
def test_the_text_is_that_of_plain_decoding_in_one_slot(
    draft: str | None, np: int, expected: list
) -> None:
    with load(draft, np) as engine:
        assert [r.tokens for r in answers(engine)] == expected


@pytest.mark.parametrize("np", [1, 4])
def test_context_that_is_made_later_is_as_good(
    np: int, expected: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight rounds without drafts, eight with, repeatedly: equal texts, drafts nearly so (rows may round otherwise)."""
    shares = []
    for late in (True, False):
        if not late:
            monkeypatch.setattr(dflash, "held_rows", lambda n_slot: 0)
        with load("auto", np, prefix_cache=False) as engine:
            assert (engine.loop.worker.plan.n_held > 0) == late
            rounds = itertools.count()
            fix_lengths(
                engine.loop,
                lambda caps, rounds=rounds: [
                    cap * (n // 8 % 2) for n in (next(rounds),) for _, cap in caps
                ],
            )
            got = together(engine, np)
        assert [r.tokens for r in got] == expected[:np]
        assert sum(r.timings.draft_n for r in got) > 40 * np
        shares.append(sum(r.timings.draft_n_accepted for r in got) / sum(r.timings.draft_n for r in got))
    assert abs(shares[0] - shares[1]) < 0.03


@pytest.mark.parametrize("n_draft", [1, 2, 5, 9, 15])
def test_every_width_leaves_the_text(n_draft: int, expected: list) -> None:
    """Up to 16 rows a slot, more than the pair's own blocks of 8."""
    with load("ngram", 4, n_draft_max=n_draft, n_draft_fixed=True, ngram_match=1) as engine:
        found = answers(engine)
        assert [r.tokens for r in found] == expected
        assert max(len(r.timings.n_draft_used) for r in found) == n_draft + 1


@pytest.mark.parametrize("draft", [None, "auto", "mtp"])
def test_rounds_behind_a_prompt_that_runs_alone_leave_the_text(
    draft: str | None, expected: list
) -> None:
    """Each prompt that joins three slots runs alone, and the round behind it is launched meanwhile."""
    with load(draft, 3, n_draft_fixed=True) as engine:
        loop, behind = engine.loop, []
        fix_alone(
            loop, lambda whole, n_verify: next((i for i, n in enumerate(whole) if n and n_verify), None)
        )
        launch = loop.behind.launch
        loop.behind.launch = lambda *a: behind.append(launch(*a)) or behind[-1]
        for _ in range(2):
            assert [r.tokens for r in answers(engine, cache_prompt=False)] == expected
        ahead = [round_ for round_ in behind if round_ is not None]
        assert len(ahead) > 5 and len(ahead) >= 0.7 * len(behind)
        assert any(round_.launched.tokens is not None for round_ in ahead) == (draft is not None)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("draft", [None, "auto", "mtp"])
def test_rounds_behind_a_prompt_in_a_graph_leave_the_text_and_wait_for_nothing(
    draft: str | None,
) -> None:
    """Prompts that find a graph, which QUESTIONS do not. No call on the way to the next launch waits for the device, which reads the prompt."""
    with load(draft, 3, n_draft_fixed=True) as engine:
        loop, vocab, behind = engine.loop, engine.info.n_vocab, []
        if not loop.worker.arena.prompts and KERNELS != "auto":
            pytest.skip("prompts are captured with our own kernels only")
        assert loop.worker.arena.prompts, "the demo's layers may be captured"
        prompts = [[(n * i + i // n) % vocab for i in range(n)] for n in (193, 250, 301, 389, 440, 511)]
        lengths = (24, 17, 11, 20, 14, 9)  # so that they join and leave one by one

        def answer(prompt: list[int], n: int) -> tuple[int, ...]:
            plain = {"temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
            return engine.generate(prompt, max_tokens=n, **plain).tokens

        want = [answer(*asked) for asked in zip(prompts, lengths, strict=True)]
        fix_alone(
            loop,
            lambda whole, n_verify: next((i for i, n in enumerate(whole) if n and n_verify), None),
            loop.controller.rules.graph_of,
        )
        launch = loop.behind.launch

        def watched(pending: PendingRound, *more: Any) -> PendingRound | None:
            assert pending.launched.batch.prompt, "it is a graph"
            torch.cuda.set_sync_debug_mode("error" if len(behind) > 4 else "default")  # once it is warm
            try:
                behind.append(launch(pending, *more))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            return behind[-1]

        loop.behind.launch = watched
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(answer, prompts * 4, lengths * 4)) == want * 4
        assert sum(round_ is not None for round_ in behind) > 7


@pytest.mark.parametrize("draft", [None, "auto", "mtp"])
def test_rounds_launched_ahead_leave_the_text(draft: str | None, expected: list) -> None:
    """Requests with and without drafts, beside each other and after each other, and second turns that reuse their pages."""
    with load(draft, 4, n_draft_fixed=True) as engine, load(None, 1, prefix_cache=False) as cold:
        assert engine.loop.lookahead.on
        cold.loop.lookahead.on = False
        fly, flown = engine.loop.launch_next, []

        def count(flight: PendingRound) -> PendingRound | None:
            flown.append(fly(flight))
            return flown[-1]

        engine.loop.launch_next = count  # type: ignore[method-assign]
        prompts = [[{"role": "user", "content": q}] for q in QUESTIONS]
        for n_draft_max in (0, None):
            first = engine.generate_many(
                prompts, max_tokens=160, temperature=0.0, n_draft_max=n_draft_max
            )
            assert [r.tokens for r in first] == expected
            turns = [
                [
                    *p,
                    {"role": "assistant", "content": r.text},
                    {"role": "user", "content": "Tell me more about it."},
                ]
                for p, r in zip(prompts, first, strict=True)
            ]
            got = engine.generate_many(turns, max_tokens=60, temperature=0.0, n_draft_max=n_draft_max)
            want = cold.generate_many(turns, max_tokens=60, temperature=0.0)
            assert [r.tokens for r in got] == [r.tokens for r in want]
            long = engine.generate_many(
                prompts, max_tokens=100, temperature=0.0, n_draft_max=n_draft_max, ignore_eos=True
            )
            assert [r.tokens for r in long] == [
                r.tokens
                for r in cold.generate_many(prompts, max_tokens=100, temperature=0.0, ignore_eos=True)
            ]
        ahead = [flight for flight in flown if flight is not None]
        assert len(ahead) > 50 and any(flight.launched.tokens is not None for flight in ahead) == (
            draft is not None
        )


def test_two_runs_have_the_same_bits_and_neighbours_do_not_matter() -> None:
    with load("auto", 4, n_draft_fixed=True, prefix_cache=False) as engine:
        first, second = (together(engine, 4, logprobs=2) for _ in range(2))
        assert [r.logprobs for r in first] == [r.logprobs for r in second]
        alone = together(engine, 1, logprobs=2)[0]
        assert alone.tokens == first[0].tokens
        for a, b in zip(
            alone.logprobs, first[0].logprobs, strict=True
        ):  # other bucket, other kernels: nearly the same
            assert a.token == b.token and abs(a.logprob - b.logprob) < 2e-3


def test_two_engines_of_one_process_do_not_disturb_each_other(expected: list) -> None:
    """Kernels keep scratch data between launches: prompts of one engine came between another's, and its text was wrong."""
    with load("mtp", 4) as a, load(None, 2, prefix_cache=False) as b, ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(lambda e=e: [answers(e) for _ in range(3)]) for e in (a, b)]
        for run in runs:
            assert all([r.tokens for r in found] == expected for found in run.result())


@pytest.mark.parametrize("draft", [None, "auto", "mtp"])
@pytest.mark.parametrize("n", [192, 300, 512])
def test_a_prompt_in_a_graph_is_the_prompt_without(n: int, draft: str | None) -> None:
    """Long and short ones in turns, so that rows of another prompt stand behind. Each run drafts the same number of tokens: rounds of
    other widths are nearly the same, not the same bits."""
    with load(draft, 2, prefix_cache=False, n_draft_fixed=True) as engine:
        graphs, vocab = engine.loop.worker.arena.prompts, engine.info.n_vocab
        captured = set(graphs)
        if not captured and KERNELS != "auto":
            pytest.skip("prompts are captured with our own kernels only")
        assert captured == {256, 320, 384, 448, 512}, "the demo's layers may be captured"
        found = []
        for now in (captured, set(), captured):
            engine.generate(list(range(100, 600)), max_tokens=2, temperature=0.0)
            graphs.clear()
            graphs |= now
            prompt = [(7 * i) % vocab for i in range(n)]
            found.append(
                engine.generate(prompt, max_tokens=8, temperature=0.0, logprobs=2, ignore_eos=True)
            )
        graph, plain, again = found
        assert graph.tokens == again.tokens and graph.logprobs == again.logprobs
        assert graph.tokens == plain.tokens
        for a, b in zip(graph.logprobs, plain.logprobs, strict=True):
            assert a.token == b.token and abs(a.logprob - b.logprob) < 5e-3


@pytest.mark.parametrize("draft", [None, "auto", "mtp"])
def test_a_second_turn_from_the_cache_says_what_a_cold_engine_says(draft: str | None) -> None:
    with load(draft, 4) as warm, load(None, 1, prefix_cache=False) as cold:
        first = answers(warm, 4)
        turns = [
            [
                {"role": "user", "content": q},
                {"role": "assistant", "content": r.text},
                {"role": "user", "content": "Tell me more about it."},
            ]
            for q, r in zip(QUESTIONS, first, strict=False)
        ]
        got, want = (e.generate_many(turns, max_tokens=100, temperature=0.0) for e in (warm, cold))
        assert [r.tokens for r in got] == [r.tokens for r in want]
        assert all(r.timings.cache_n > 0 for r in got)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    folder = tmp_path_factory.mktemp("windowed")

    @cache
    def made(name: str, n_layer: int) -> Path:
        write(name, path := folder / f"{name}.gguf", quant="q8_0", n_layer=n_layer)
        return path

    return made


@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "q4_0")])
@pytest.mark.parametrize(("np", "draft"), [(1, None), (5, None), (5, "ngram")])
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        pytest.param(*model, marks=pytest.mark.xdist_group(model[0]))  # one process writes its file
        for model in (("gemma-3-270m", 7), ("gpt-oss-20b", 3), ("gemma-4-31b", 6))
    ],
)
def test_windows_that_keep_only_their_window_leave_the_text(
    name: str,
    layers: int,
    np: int,
    draft: str | None,
    types: tuple[str, str],
    windowed: Callable[[str, int], Path],
) -> None:
    """In graphs, prompts from shorter than a window to many of them: as with whole pages. Random weights leave margins of hundredths. Rows beside
    others, and values of 4 bits, which fall on another side for a last bit of their row, have the same bits beside any others (`exact`)."""
    rng = random.Random(5)
    prompts = [rng.choices(range(300, 3000), k=n) * 2 for n in (4, 60, 101, 290, 531, 1201)]
    given = {
        "np": np,
        "ctx": 2600,
        "kv_type": types[0],
        "kv_type_v": types[1],
        "ubatch": 100,
        "device": "cuda",
        "exact": np > 1 or types[1] == "q4_0",
    }

    def texts(**more: object) -> list[Result]:
        with Engine.load(windowed(name, layers), draft, **given, **more) as engine:
            return engine.generate_many(
                prompts, max_tokens=90, temperature=0.0, logprobs=3, ignore_eos=True
            )

    same = [n_same(want, got, 0.02) for want, got in zip(texts(swa_full=True), texts(), strict=True)]
    assert np > 1 or sum(same) > 0.9 * 90 * len(same), same


def wait_for_checks() -> None:
    """Wait until no child checks kernels, because it has GPU memory."""
    for thread in threading.enumerate():
        if thread.name == "pyspec-checks-end":
            thread.join(120)


@pytest.mark.alone
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_nothing_is_allocated_after_warm_up(prefix_cache: bool) -> None:
    """Of the device as a whole, in at least one of several tries: another process may allocate or free some meanwhile."""
    with load("auto", 8, prefix_cache=prefix_cache) as engine:
        wait_for_checks()
        before, free = torch.cuda.memory_reserved(), list[int]()
        for _ in range(6):
            answers(engine)
            assert torch.cuda.memory_reserved() == before, (
                f"{torch.cuda.memory_reserved() - before} more than before"
            )
            torch.cuda.synchronize()
            free.append(torch.cuda.mem_get_info()[0])
            # libraries allocate some at the first product of a new kind
            if len(free) > 3 and free[-1] == free[-2] == free[-3]:
                return
        pytest.fail(
            f"free memory goes on changing, bytes: {[b - a for a, b in itertools.pairwise(free)]}"
        )


def test_graphs_that_are_garbage_do_not_end_a_capture() -> None:
    """A graph may not be freed while its thread captures another: an engine that was closed left some, in cycles."""
    x = torch.zeros(1, device="cuda")

    def leave_garbage() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            x.add_(1)
        cycle: list[object] = [graph]
        cycle.append(cycle)

    def forward(_: object) -> torch.Tensor:
        held = [[i] for i in range(2000)]  # enough new containers for the collector to run
        return x + len(held)

    batch = SimpleNamespace(bucket=1, n_place=1, single=False, prompt=False, tokens=x)
    gc.collect()  # of engines before, which would be freed in the first capture
    leave_garbage()
    run = Graphed(forward)
    assert [float(run(batch)) for _ in range(3)] == [2000.0] * 3  # type: ignore[arg-type]
    assert gc.isenabled()


def test_a_capture_that_fails_leaves_the_thread_as_it_was() -> None:
    """On its stream, and with memory whose pools can be freed: the next load ended the process."""
    x, device = torch.zeros(1, device="cuda"), torch.device("cuda", 0)
    calls = itertools.count()

    def forward(_: object) -> torch.Tensor:
        if next(calls) == 1:
            torch.cuda.synchronize()  # a capture does not survive it
        return x + 1

    batch = SimpleNamespace(bucket=1, n_place=1, single=False, prompt=False, tokens=x)
    stream, run = torch.cuda.current_stream(), Graphed(forward)
    assert float(run(batch)) == 1.0  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="captur"):
        run(batch)  # type: ignore[arg-type]
    assert torch.cuda.current_stream() == stream
    with temporary(device):
        y = torch.ones(5, device=device)
    assert float(y.sum()) == 5.0
    del y
    release(device)
    assert [float(run(batch)) for _ in range(2)] == [1.0] * 2  # type: ignore[arg-type]


ROUNDS = """
import sys
from pyspec.engine.api import Engine
options = {"n_draft_fixed": True, "check_tap_shift": False, "kernels": sys.argv[1]}
with Engine.load("demo", "mtp", np=4, ctx=1024, device="cuda", **options) as e:
    n, text = 0, []
    while n < 1000:
        for r in e.generate_many(["A dog", "The sun", "Once", "She"], max_tokens=200, temperature=0.0, ignore_eos=True):
            text.append(r.tokens)
            n += r.timings.n_rounds
    if "triton" in sys.argv[1]:
        from pyspec.cuda.op import tiers_of
        from pyspec.cuda.kernel_context import KernelContext, use
        from pyspec.cuda.ops.linear.op import linear
        use(KernelContext(tiers_of(sys.argv[1])))  # what is decided is decided for these
        assert {impl.name for impl in linear.decided.values()} == {"triton"}, linear.decided
    print(hash(tuple(text)), len(text))
"""


def test_a_thousand_rounds_are_the_same_with_launch_blocking() -> None:
    def run(**env: str) -> str:
        found = subprocess.run(
            [sys.executable, "-c", ROUNDS, KERNELS],
            capture_output=True,
            text=True,
            env={**os.environ, **env},
            timeout=300,
        )
        assert found.returncode == 0, found.stderr[-2000:]
        return found.stdout

    assert run(CUDA_LAUNCH_BLOCKING="1") == run(CUDA_LAUNCH_BLOCKING="0")


@pytest.mark.parametrize("chunk", [1, 8, 64])
def test_logits_of_the_q8_0_demo_are_llama_cpps(chunk: int) -> None:
    """Mean KL in nats over three texts of 64 tokens, packed weights, f16 keys and values: llama.cpp rounds rows to 8 bits, we to f16."""
    root = Path(__file__).parents[2]
    data, found = np.load(root / "tests" / "fixtures" / "demo.npz"), []
    for i in range(3):
        rows = compute_logits(
            root / "pyspec" / "demo" / "pyspec-demo.gguf",
            data[f"tokens_{i}"].tolist(),
            chunk=chunk,
            kv_type="f16",
            device="cuda",
        )
        theirs = torch.from_numpy(data[f"quantised_logits_{i}"]).float().log_softmax(-1)
        found.append((theirs.exp() * (theirs - torch.from_numpy(rows).log_softmax(-1))).sum(-1).mean())
    assert torch.stack(found).mean() < 5e-4


def test_texts_go_on_from_the_disk_as_from_memory(tmp_path: Path) -> None:
    """After a restart, with a prompt that is long enough to be kept: the same tokens and drafts, beside others and alone."""
    story = " ".join(f"{i} birds sat on tree {i * 7}." for i in range(75))
    first = [{"role": "user", "content": story}]

    def second(answer: Result) -> list[dict[str, str]]:
        return [
            *first,
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": QUESTIONS[0]},
        ]

    def read(result: Result) -> tuple[object, ...]:
        t = result.timings
        return result.tokens, t.cache_n, t.draft_n, t.draft_n_accepted

    fixed: dict[str, Any] = {"temperature": 0.0, "max_tokens": 60}
    with load("auto", np=3, n_draft_fixed=True, cache_disk=tmp_path) as e:
        turn = second(e.generate(first, **fixed))
        want = e.generate(turn, **fixed)
        assert want.timings.cache_n >= 512 and want.timings.disk_n == 0
    with load("auto", np=3, n_draft_fixed=True, cache_disk=tmp_path) as e:
        others = [[{"role": "user", "content": q}] for q in QUESTIONS[1:3]]
        got, *_ = e.generate_many([turn, *others], **fixed)
        assert got.tokens == want.tokens and got.timings.disk_n >= 512
    with load("auto", np=3, n_draft_fixed=True, cache_disk=tmp_path) as e:
        again = e.generate(turn, **fixed)
        assert again.tokens == want.tokens and again.timings.disk_n >= 512
        if again.timings.cache_n == want.timings.cache_n:
            assert read(again) == read(want)
