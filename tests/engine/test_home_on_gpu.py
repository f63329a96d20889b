"""Models larger than the GPU, on one: logits and texts of any placement, a start under a cap, experts that move, and drafts that never cost.

Not run by CI, which has no GPU: `make check-gpu`. The largest file takes 7 GB of the temporary folder.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from pyspec.bench.session import Plan, bench
from pyspec.cache import n_cores
from pyspec.config import EngineSettings
from pyspec.cuda.ops.moe.host import HostExperts, _brought
from pyspec.engine.api import Engine
from pyspec.gguf import open_gguf
from pyspec.logits import LogitReader
from pyspec.models.wants import TABLES
from pyspec.synth import write
from pyspec.synth.dims import find, widened

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

N_EXPERT = 40
EXPERTS = {"qwen35moe": "q4_k", "gpt-oss": "mxfp4_moe", "glm4moe": "q8_0", "nemotron_h_moe": "q5_k"}
DENSE = {"qwen3": "q4_k", "gemma3": "q8_0"}
PLACES: dict[str, dict[str, object]] = {
    "-cmoe": {"cpu_moe": True, "moe_cache_mib": 0},
    "-cmoe, slots": {"cpu_moe": True, "moe_cache_mib": 1},
    "-ncmoe": {"n_cpu_moe": 3, "moe_cache_mib": 0},
    "-ot": {"override_tensor": (r"blk\.[123]\.ffn_(up|down)_exps\.=CPU",), "moe_cache_mib": 0},
    "-ngl": {"n_gpu_layers": 2},
    "-ncffn": {"n_cpu_ffn": 2},
}
CASES = [(arch, place) for arch in EXPERTS for place in PLACES if place != "-ncffn"]
CASES += [(arch, place) for arch in DENSE for place in ("-ngl", "-ncffn")]
TOKENS = [int(t) for t in np.random.default_rng(8).integers(0, 250, 420)]
GIB = 1 << 30
CAP, SLOTS_MIB = 5 * GIB, 1200
LARGE = pytest.mark.xdist_group("large")  # one process writes its file


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("home")

    @cache
    def file(arch: str) -> Path:
        dims = widened(find(arch, tiny=True))
        if arch in EXPERTS:
            dims = replace(dims, n_expert=N_EXPERT, n_used=3)
        return write(dims, folder / f"{arch}.gguf", quant=(EXPERTS | DENSE)[arch])

    return file


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """35B-A3B cut to twelve layers, whose texts keep to few experts."""
    path = tmp_path_factory.mktemp("large") / "m.gguf"
    return write("qwen3.6-35b-a3b", path, quant="q4_k", n_layer=12, routing="hot")


def logits(path: Path, chunk: int, tokens: list[int] = TOKENS, **places: object) -> torch.Tensor:
    """[token, vocab] f32 on the host."""
    given = {"ctx": len(tokens) + 1, "batch": chunk, "device": "cuda", **places}
    reader = LogitReader(path, EngineSettings(**given))  # type: ignore[arg-type]
    return torch.cat([rows.cpu() for _, rows in reader.read(tokens)])


def formulas(path: Path, tokens: list[int] = TOKENS) -> torch.Tensor:
    """The same by plain torch in f32."""
    return logits(path, len(tokens), tokens, device="cpu", kernels="reference", weights="dense")


def off(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    return (got - want).abs().amax(-1) / want.std()


AT = torch.tensor([0.1, 0.5, 0.9])  # quantiles of rows that are compared


@cache
def alone(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The formulas' logits, and quantiles of how far those of all on the card lie from them."""
    want = formulas(path)
    near = [off(logits(path, n, weights="packed"), want).quantile(AT) for n in (5, 420)]
    return want, torch.stack(near).amax(0)


@pytest.mark.parametrize("chunk", [5, 420])
@pytest.mark.parametrize(
    ("arch", "place"), [pytest.param(*case, marks=pytest.mark.xdist_group(case[0])) for case in CASES]
)
def test_logits_are_as_near_to_the_formulas_as_those_of_all_on_the_card(
    arch: str, place: str, chunk: int, made: Callable[[str], Path]
) -> None:
    """Few rows go to the lane, one prompt of all brings its experts in groups. Random weights make much of each rounding, and a near tie of experts
    may turn: quantiles of rows are compared, with those of packed weights, of which none has a copy where some are away."""
    path = made(arch)
    want, most = alone(path)
    found = off(logits(path, chunk, **PLACES[place]), want).quantile(AT)
    assert (found <= 1.5 * most + 0.002).all(), (found, most)


@pytest.mark.parametrize("draft", [None, "ngram"])
@pytest.mark.parametrize(("arch", "place"), CASES)
def test_texts_are_greedy_ones_of_all_on_the_card(
    arch: str, place: str, draft: str | None, made: Callable[[str], Path]
) -> None:
    """In graphs, three slots. Each token is the formulas' best, or as near to it as all on the card may err."""
    path, prompts = made(arch), [TOKENS[:n] for n in (9, 150, 31)]
    given = {"np": 3, "ctx": 300, "device": "cuda", "n_draft_fixed": True}
    with Engine.load(path, draft, **given, **PLACES[place]) as engine:  # type: ignore[arg-type]
        found = engine.generate_many(prompts, max_tokens=60, temperature=0.0, ignore_eos=True)
        assert engine.loop.worker.forward._graphs, "rounds are graphs"
    for prompt, result in zip(prompts, found, strict=True):
        tokens, answer = [*prompt, *result.tokens], slice(len(prompt) - 1, -1)
        want = formulas(path, tokens)[answer]
        err = 2 * off(logits(path, 64, tokens)[answer], want).quantile(0.9)
        short = want.amax(-1) - want.gather(-1, torch.tensor(result.tokens)[:, None])[:, 0]
        assert float((short / want.std() <= err + 0.01).float().mean()) >= 0.9, (short, err)


@pytest.mark.parametrize("places", [{"cpu_moe": True, "moe_cache_mib": 0}, {"n_cpu_moe": 3}])
def test_drafts_leave_the_bits_of_a_fixed_placement(
    places: dict[str, object], made: Callable[[str], Path]
) -> None:
    """MTP, whose block has experts of its own: they are in host memory, too."""
    prompts = [TOKENS[:n] for n in (12, 77)]
    texts = []
    for draft in (None, "mtp"):
        given = {"np": 2, "ctx": 300, "device": "cuda", "exact": True, "n_draft_fixed": True}
        own = {"draft_cpu_moe": True} if draft else {}
        with Engine.load(made("qwen35moe"), draft, **given, **places, **own) as engine:  # type: ignore[arg-type]
            texts.append(engine.generate_many(prompts, max_tokens=80, temperature=0.0, ignore_eos=True))
    assert [r.tokens for r in texts[0]] == [r.tokens for r in texts[1]]
    assert sum(r.timings.draft_n for r in texts[1]) > 50


def pieces() -> list[int]:
    """Bytes of all tensors that torch's allocator has on the card."""
    blocks = (block for piece in torch.cuda.memory_snapshot() for block in piece["blocks"])
    return [block["requested_size"] for block in blocks if block["state"] == "active_allocated"]


@pytest.mark.parametrize("np", [1, 3])
@pytest.mark.parametrize("quant", ["iq4_nl", "q3_k"])  # by the kernel; the embedding by torch
def test_tables_in_host_memory_leave_the_bits_of_tables_on_the_card(
    quant: str, np: int, tmp_path: Path
) -> None:
    """In graphs and rounds ahead, with drafts whose tokens the device alone knows. Locked memory is read where it lies."""
    dims = replace(widened(find("qwen4exp", tiny=True)), state=128, ngrams=(2, 3, 2, 4, 40_009))
    path = write(dims, tmp_path / "t.gguf", quant=quant)
    with open_gguf(path) as file:
        n_byte = max(file.tensors[name].n_bytes for name in TABLES)
    rows, texts, n_held = [], [], []
    for place in ("CUDA0", "CPU"):
        rules = {"override_tensor": (f"token_embd={place}",)}
        rows.append(logits(path, 64, **rules))
        given = {"np": np, "ctx": 300, "device": "cuda", "exact": True, "n_draft_fixed": True}
        with Engine.load(path, "mtp", n_draft_max=3, **given, **rules) as engine:  # type: ignore[arg-type]
            prompts = [TOKENS[:n] for n in (9, 150, 31)]
            found = engine.generate_many(prompts, max_tokens=60, temperature=0.0, ignore_eos=True)
            assert engine.loop.worker.forward._graphs, "rounds are graphs"
            gc.collect()  # the reader of logits had tables of its own
            n_held.append(sum(n_byte <= n <= n_byte + 4096 for n in pieces()))
        texts.append([result.tokens for result in found])
        del engine
    assert torch.equal(*rows) and texts[0] == texts[1]
    assert n_held == [1, 0], "the card has the largest table, and then it has not"


@LARGE
def test_a_start_under_a_cap_serves_within_it(large: Path) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with Engine.load(large, None, np=2, ctx=6000, vram=CAP, device="cuda") as engine:
        layers = engine.loop.worker.uploads.layers
        assert len(layers) == 12 and all(0 < layer.card.n_expert < 256 for layer in layers)
        assert len(engine.generate([7] * 5000, max_tokens=8, ignore_eos=True).tokens) == 8
        assert torch.cuda.max_memory_reserved() <= CAP


def same_as_packed(layer: HostExperts) -> None:
    """Each slot has the record of its expert, packed anew."""
    for expert in (layer.places >= 0).nonzero().flatten().tolist()[::7]:
        fresh = layer._packed(_brought(layer.stacks, slice(expert, expert + 1), layer.device))
        for product, made in zip((layer.card.inner, layer.card.down), fresh, strict=True):
            assert torch.equal(product.stack.records[layer.places[expert]], made.records[0])


@LARGE
@pytest.mark.alone  # measured times decide which experts come
def test_experts_come_that_are_used_and_slots_have_their_records(large: Path) -> None:
    prompts = [TOKENS[i : i + 40] for i in range(0, 160, 40)]
    with Engine.load(
        large,
        None,
        np=4,
        ctx=2000,
        cpu_moe=True,
        moe_cache_mib=SLOTS_MIB,
        device="cuda",
        threads=n_cores(),
    ) as e:
        rates = []
        for n_token in (40, 200, 200, 200):  # most come within the first hundred rounds
            before = e.metrics()
            e.generate_many(prompts, max_tokens=n_token, temperature=0.0, ignore_eos=True)
            after = e.metrics()
            hits = after.expert_hits - before.expert_hits
            rates.append(hits / (hits + after.expert_misses - before.expert_misses))
        assert after.expert_uploads > 100 and rates[-1] > rates[0] + 0.1, rates
        cache, uploads = e.loop.experts, e.loop.worker.uploads
        assert uploads.failed is None and cache.moves, cache.frozen
        assert 2e9 < cache.link < 2e11, "bytes a second of copies and packing"
        torch.cuda.synchronize()
        for layer in uploads.layers:
            same_as_packed(layer)
            assert torch.equal(layer.slots.cpu(), layer.places)


@pytest.mark.alone
@pytest.mark.parametrize("length", [1.02, 1.6, 3.0])
@pytest.mark.parametrize("places", [{"moe_cache_mib": 0}, {"moe_cache_mib": SLOTS_MIB}])
def test_drafts_never_cost_two_percent(places: dict[str, int], length: float, large: Path) -> None:
    """Tokens a round by coins: hardly ever right, now and then, mostly. With the machine's threads: tests of engines have one."""
    given = {
        "np": 4,
        "ctx": 1200,
        "cpu_moe": True,
        "draft_cpu_moe": True,
        "device": "cuda",
        "threads": n_cores(),
    }
    with Engine.load(large, "mtp", **given, **places, n_draft_max=3, synth_len=length) as engine:  # type: ignore[arg-type]
        plan = Plan(streams=(1, 4), n_prompt=64, random_prompts=True, ignore_eos=True)
        # many short turns, neighbours in time: a host's memory has slow seconds
        plan = replace(plan, turns=9, n_predict=140)
        rows = bench(engine, plan, print).rows
    assert all(row.ratio >= 0.98 for row in rows), [(row.np, row.ratio) for row in rows]
