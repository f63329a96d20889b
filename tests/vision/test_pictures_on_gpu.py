"""Pictures on a GPU: the rows of every encoder, texts with them, and the cost of an encoder of Qwen3.5's size for those beside it.

Not run by CI, which has no GPU: `make check-gpu`; the time beside transformers wants that package.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from altered import IMAGES, NAMES, PICTURES, mmproj, write
from engine_rig import GREEDY
from known_texts import n_same
from picture_drafters import drafter_for
from seen import MODELS, PROMPTS, Seen, seen

from pyspec import synth
from pyspec.engine.api import Engine, Result
from pyspec.engine.loop.pictures import Pictures
from pyspec.errors import TimedOut
from pyspec.gguf import GGMLType, open_gguf
from pyspec.request import Delta, Done, Event, Failed, Request
from pyspec.slots.images import IMAGE
from pyspec.vision.encoder import Encoder
from pyspec.vision.kinds import CLAMPS, is_matrix, wants_of
from pyspec.vision.picture import Picture, Placed
from pyspec.vision.pixels import prepared
from pyspec.vision.projector import Projector, read_projector

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda", 0)
NEAR = 0.02  # of log probabilities: two machines round otherwise, and so do batches of other sizes
N_TEXT = 40
F32 = {"kv_type": "f32", "ctx": 1011, "prefix_cache": True}


def encoder(path: Path, device: torch.device, dtype: torch.dtype | None = None) -> Encoder:
    with open_gguf(path) as file:
        return Encoder.load(file, read_projector(file), device, dtype)


# -- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1e-4), (torch.float16, 0.04), (torch.bfloat16, 0.3)]
)
def test_rows_are_those_of_the_cpu(name: str, dtype: torch.dtype, most: float) -> None:
    """On the stream that engines use, in slices, with other work before and behind."""
    here, there = encoder(mmproj(name), torch.device("cpu")), encoder(mmproj(name), CUDA, dtype)
    stream = torch.cuda.Stream(CUDA)
    stream.wait_stream(torch.cuda.current_stream(CUDA))
    for file in PICTURES:
        picture = prepared(here.projector, (IMAGES / file).read_bytes())
        want = here.encode(picture)
        with torch.cuda.stream(stream), torch.inference_mode():
            *_, rows = there.slices(picture, 1)
            assert rows is not None and rows.dtype == torch.float32
            other = there.encode(picture).cpu()
        stream.synchronize()
        assert torch.equal(rows.cpu(), other), "slices change nothing"
        assert ((rows.cpu() - want).abs().max() / want.std()).item() < most


def test_products_of_a_file_in_f32_are_in_bf16() -> None:
    assert encoder(mmproj("gemma3"), CUDA)._w.dtype == torch.bfloat16


# -- texts ----------------------------------------------------------------------------------------------------------


def _load(name: str, device: str, drafter: str = "none", **options: Any) -> Engine:
    path = IMAGES / f"{name}.gguf"
    own: dict[str, Any] = {"spec_type": drafter}
    if drafter in ("dflash", "eagle3"):
        own["draft"] = str(drafter_for(path, drafter))
    values = {**F32, "device": device, "mmproj": str(mmproj(name)), **own, **options}
    return Engine.load(str(path), **values)


def _asked(s: Seen, n: int = N_TEXT) -> Request:
    return Request(prompt=s.prompt, images=s.images, params=replace(GREEDY, logprobs=2), max_tokens=n)


def _texts(engine: Engine, name: str) -> list[Result]:
    """All prompts with pictures at once, with a text between each two of them."""
    asked = [_asked(seen(name, p)) for p in PROMPTS]
    text = replace(asked[0], prompt=seen(name, "late").text, images=())
    with ThreadPoolExecutor(8) as clients:
        return list(clients.map(engine.run, [x for each in asked for x in (each, text)]))


@pytest.fixture
def in_f32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoders compute as on a CPU: the rest is compared."""
    monkeypatch.setattr(Encoder, "load", partial(Encoder.load, dtype=torch.float32))


@pytest.mark.usefixtures("in_f32")
@pytest.mark.parametrize("np", [1, 7])
@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        *((name, "none") for name in MODELS),
        *((name, "ngram") for name in MODELS),
        *(("qwen35", drafter) for drafter in ("mtp", "mtp,suffix", "dflash", "eagle3")),
        ("gemma3", "eagle3"),
        ("mistral3", "dflash"),
    ],
)
def test_texts_are_those_of_a_cpu(name: str, drafter: str, np: int) -> None:
    with _load(name, "cpu", np=1) as engine:
        want = _texts(engine, name)
    with _load(name, "cuda", drafter, np=np) as engine:
        for _ in range(2):  # from nothing, and from the cache
            found = _texts(engine, name)
            n = [n_same(a, b, NEAR) for a, b in zip(want, found, strict=True)]
            assert sum(n) > 0.7 * N_TEXT * len(n), "near ties are few"
        assert engine.metrics().requests_failed == 0
        assert not engine.loop.worker.shown and engine.loop.stats.guard_trips == 0
        assert engine.loop.pictures.n_encoded == 4
        # a card's kernels take no heads and states as narrow as those of the others' fixtures
        assert (engine.loop.worker.arena is not None) == (name in ("gemma3", "mistral3"))


@pytest.mark.usefixtures("in_f32")
def test_an_encoder_on_the_cpu_beside_a_gpu_gives_the_same_texts() -> None:
    with _load("qwen35", "cpu", np=1) as engine:
        want = _texts(engine, "qwen35")
    with _load("qwen35", "cuda", "mtp", np=7, mmproj_offload=False) as engine:
        assert engine.loop.pictures.device.type == "cpu"
        assert all(n_same(a, b, NEAR) > 4 for a, b in zip(want, _texts(engine, "qwen35"), strict=True))


# -- an encoder of Qwen3.5's size -----------------------------------------------------------------------------------


N_EMBD = 2560  # of qwen3.5-4b
HEARD_S = 0.1  # in which a request has passed


def _fields() -> dict[str, object]:
    with open_gguf(mmproj("qwen35")) as file:
        own: dict[str, object] = dict(file.metadata)
    sizes = {
        "image_size": 768, "patch_size": 16, "embedding_length": 1152, "feed_forward_length": 4304,
        "block_count": 27, "attention.head_count": 16, "projection_dim": N_EMBD,
    }  # fmt: skip
    del own["clip.vision.is_deepstack_layers"]
    return own | {f"clip.vision.{key}": value for key, value in sizes.items()}


def _wants(n_block: int) -> dict[str, tuple[int, ...]]:
    """Shapes of its tensors by name."""
    small = read_projector(mmproj("qwen35"))
    p = replace(
        small, patch=16, n_embd=1152, n_ff=4304, n_head=16, head_dim=72, n_block=n_block, n_out=N_EMBD, n_position=48 * 48
    )  # fmt: skip
    apart = ("attn_q.", "attn_k.", "attn_v.")
    return {
        name: shape
        for name, (shape, _) in wants_of(p.kind, p).items()
        if name.rpartition(".")[2] not in CLAMPS and not any(x in name for x in apart)
    }


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random projector file in F16."""
    rng, wants = np.random.default_rng(3), _wants(27)

    def random(name: str, shape: tuple[int, ...]) -> np.ndarray:
        x = rng.standard_normal(shape, np.float32)
        if "norm" in name or ".ln" in name or "_ln" in name:
            return np.float32(name.endswith("weight")) + 0.1 * x
        return x / np.sqrt(np.float32(np.prod(shape[1:], dtype=np.int64) or 1)) * np.float32(0.5)

    tensors = {name: random(name, shape) for name, shape in wants.items()}
    half = {name: GGMLType.F16 for name, shape in wants.items() if is_matrix(name, shape)}
    return write(tmp_path_factory.mktemp("large") / "mmproj.gguf", _fields(), tensors, half)


def _noise(p: Projector, width: int, height: int, seed: int = 0) -> Picture:
    """A picture that is not scaled."""
    assert p.size_of(width, height) == (width, height)
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    digest = bytes([seed]) + width.to_bytes(4) + height.to_bytes(4) + bytes(23)
    return Picture(digest, pixels, *p.grid(width, height), p.n_row(width, height))


def _milliseconds(*runs: Callable[[], object], n: int = 15) -> list[float]:
    """Of the GPU, the median of each; they take turns, because its clock changes."""
    times: list[list[float]] = [[] for _ in runs]
    with torch.inference_mode():
        for i in range(n + 3):
            for run, own in zip(runs, times, strict=True):
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record()
                run()
                ended.record()
                ended.synchronize()
                own += [began.elapsed_time(ended)] if i > 2 else []
    return list(map(median, times))


@pytest.mark.alone
def test_it_takes_at_most_1_2_of_the_time_of_transformers(large: Path) -> None:
    """1,024 x 768 pixels, in f16. The other one has its patches on the GPU; ours begins with the picture's bytes."""
    theirs = pytest.importorskip("transformers.models.qwen3_vl.modeling_qwen3_vl")
    about = pytest.importorskip("transformers.models.qwen3_vl.configuration_qwen3_vl")
    own = encoder(large, CUDA)
    assert own._w.dtype == torch.float16
    config = about.Qwen3VLVisionConfig(
        depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16, out_hidden_size=N_EMBD, patch_size=16, spatial_merge_size=2,
        temporal_patch_size=2, num_position_embeddings=48 * 48, deepstack_visual_indexes=[],
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    model = theirs.Qwen3VLVisionModel(config).to(CUDA, torch.float16).eval()
    picture = _noise(own.projector, 1024, 768)
    patches = torch.randn(64 * 48, 3 * 2 * 16 * 16, device=CUDA, dtype=torch.float16)
    grid = torch.tensor([[1, 48, 64]], device=CUDA)
    assert own.encode(picture).shape == (32 * 24, N_EMBD)
    ours, other = _milliseconds(lambda: own.encode(picture), lambda: model(patches, grid_thw=grid))
    assert ours <= 1.2 * other, f"{ours:.1f} ms; transformers: {other:.1f} ms"


@pytest.mark.parametrize(("width", "height"), [(1024, 768), (2048, 2048), (160, 9600)])
def test_it_takes_no_more_memory_than_the_plan(large: Path, width: int, height: int) -> None:
    own = encoder(large, CUDA)
    picture = _noise(own.projector, width, height)
    own.encode(picture)  # libraries take their own
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(CUDA)
    before = torch.cuda.memory_allocated(CUDA)
    own.encode(picture)
    plan = own.projector.work_bytes(2, width * height // own.projector.step**2)
    assert torch.cuda.max_memory_allocated(CUDA) - before < plan


class Pace:
    """The sink of a request. times: of its tokens, in seconds"""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.over: SimpleQueue[Event] = SimpleQueue()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Delta):
            self.times.append(time.perf_counter())
        if isinstance(event, Done | Failed):
            self.over.put(event)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random qwen3.5-4b."""
    return synth.write("qwen3.5-4b", tmp_path_factory.mktemp("model") / "m.gguf", quant="q4_0")


@pytest.fixture
def any_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary of a random model has no special tokens for pictures."""
    monkeypatch.setattr(Projector, "check_pair", lambda *_: None)


@pytest.fixture
def busy(model: Path, large: Path, any_pair: None) -> Iterator[tuple[Engine, list[Pace]]]:
    """An engine whose seven streams go on."""
    with Engine.load(str(model), None, np=8, ctx=8192, mmproj=str(large), device="cuda") as engine:
        paces = [Pace() for _ in range(7)]
        for i, pace in enumerate(paces):
            engine.submit(Request(prompt=(5 + i,) * 20, params=GREEDY, max_tokens=7000), pace)
        while min(len(pace.times) for pace in paces) < 64:
            time.sleep(0.01)
        yield engine, paces


def _longest(
    engine: Engine, paces: list[Pace], request: Request, kept: list[float]
) -> tuple[float, float]:
    """Seconds of a stream's longest gap that begins before the request's pictures are encoded, and of those behind until it has its only token. What
    the request before this one took has passed by then."""
    kept.clear()
    time.sleep(2 * HEARD_S)
    began, own = time.perf_counter(), Pace()
    engine.submit(replace(request, params=GREEDY, max_tokens=1), own)
    assert isinstance(own.over.get(timeout=60), Done)
    now, encoded = time.perf_counter(), kept[0] if kept else began
    gaps = [(a, b - a) for pace in paces for a, b in pairwise(pace.times) if began < b and a < now]
    before, behind = (
        [gap for a, gap in gaps if (a < encoded) is is_before] for is_before in (True, False)
    )
    return max(before), max(behind, default=0.0)


@pytest.mark.alone
def test_other_streams_pause_no_more_than_a_round_and_a_half_while_pictures_are_encoded(
    busy: tuple[Engine, list[Pace]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pictures of new sizes, because libraries may plan for each. Their rows take as long to be read as those of a text."""
    engine, paces = busy
    pictures, kept = engine.loop.pictures, list[float]()
    keep = pictures._keep

    def timed(handle: int, *rows: torch.Tensor) -> None:
        keep(handle, *rows)
        kept.append(time.perf_counter())

    monkeypatch.setattr(pictures, "_keep", timed)
    p = pictures.encoder.projector  # type: ignore[union-attr]
    rounds = [b - a for a, b in pairwise(paces[0].times[-60:])]
    reserved, found = torch.cuda.memory_reserved(CUDA), []
    for i in range(7):
        picture = _noise(p, 1024 + 32 * i, 768, i)
        ids = (9, *[IMAGE] * picture.n_row, 11 + i)
        text = Request(prompt=tuple((7 * i + 13 * k) % 9000 for k in range(len(ids))))
        seeing = Request(prompt=ids, images=(Placed(picture, 1),))
        found.append((*_longest(engine, paces, seeing, kept), _longest(engine, paces, text, kept)[1]))
    assert all(pace.over.empty() for pace in paces), "the streams went on all the time"
    (encoded, read, of_text), usual = zip(*found, strict=True), median(rounds)
    ms = f"a round {1e3 * usual:.1f} ms; encoded, read, a text read: "
    ms += "; ".join(" ".join(f"{1e3 * x:.1f}" for x in each) for each in found)
    with capsys.disabled():
        sys.stdout.write(f"\n{ms}\n")
    assert median(encoded) <= 2.5 * usual and max(encoded) <= 5 * usual, ms
    assert median(read) <= 1.3 * median(of_text), ms
    rows = 4 * p.width * (2048 + 2 * p.most_rows)
    assert torch.cuda.memory_reserved(CUDA) - reserved <= rows, "the warm-up has taken the rest"


@pytest.mark.alone
def test_a_load_within_vram_encodes_the_largest_pictures(
    model: Path, large: Path, any_pair: None
) -> None:
    def loaded(vram: int) -> Engine:
        return Engine.load(str(model), None, np=4, ctx=9000, mmproj=str(large), device="cuda", vram=vram)

    with loaded(0) as engine:
        plan = dict(engine.info.memory)
    assert plan["projector"] > 1 << 30
    with loaded(int(sum(plan.values()) / 0.95)) as engine:
        p = engine.loop.pictures.encoder.projector  # type: ignore[union-attr]
        pictures = [_noise(p, 2048, 2048, i) for i in range(4)]
        asked = [
            Request(
                prompt=(3, *[IMAGE] * x.n_row, 4), images=(Placed(x, 1),), params=GREEDY, max_tokens=9
            )
            for x in pictures
        ]
        with ThreadPoolExecutor(4) as clients:
            assert all(len(r.tokens) == 9 for r in clients.map(engine.run, asked))


@pytest.mark.alone
def test_a_request_that_leaves_takes_its_picture_from_the_encoder(
    busy: tuple[Engine, list[Pace]],
) -> None:
    engine, paces = busy
    pictures: Pictures = engine.loop.pictures
    picture = _noise(pictures.encoder.projector, 2048, 1024, 9)  # type: ignore[union-attr]
    ids = (9, *[IMAGE] * picture.n_row, 5)
    request = Request(prompt=ids, images=(Placed(picture, 1),), params=GREEDY, max_tokens=5)
    with pytest.raises(TimedOut):
        list(engine.run_stream(request, timeout=0.01))
    n = len(paces[0].times)
    while len(paces[0].times) < n + 20:
        time.sleep(0.01)
    assert not pictures.is_busy and engine.metrics().requests_failed <= 1
