"""Engines with experts in the host's memory beside an emulated card, also those of drafters: the text of plain decoding with the same experts on the
card, wherever they are and while they move."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from engine_rig import DEVICE, Rig, rig
from test_faults import OF_REQUESTS, tripping

from pyspec import synth
from pyspec.cpu import build
from pyspec.cuda.ops.moe import host, lane
from pyspec.cuda.ops.moe.lane import HostLane
from pyspec.cuda.ops.moe.op import moe
from pyspec.device.worker import Launched
from pyspec.engine.load import load as loading
from pyspec.engine.loop import expert_cache
from pyspec.engine.plan.describe import Description
from pyspec.engine.plan.longest import widened as fit
from pyspec.engine.plan.placement import PlaceFlags, placement, wanted
from pyspec.errors import DeviceError, OutOfBounds
from pyspec.models.binding import Binding
from pyspec.slots.round import Round
from pyspec.synth.dims import find, widened

sys.path.append(str(Path(__file__).parents[1] / "kernels"))

from emulated.lane import served_lane
from emulated.machine import needs_compiler
from emulated.ops import of_a_card, only

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(DEVICE != "cpu", reason="kernels run thread by thread on the CPU here"),
    pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler"),
]
PROMPTS = [[(11 * i * i + 5 * i + k) % 250 for i in range(n)] for k, n in ((1, 9), (2, 14))]
N_TEXT, N_LAYER = {"mtp": 14, "draft": 26}, 2


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("home")
    return {
        arch: synth.write(
            replace(widened(find(arch, tiny=True)), n_layer=N_LAYER),
            folder / f"{arch}.gguf",
            quant="q8_0",
        )
        for arch in ("qwen35moe", "qwen3moe")
    }


@contextmanager
def in_host(monkeypatch: pytest.MonkeyPatch, slots: int) -> Iterator[None]:
    """Engines that are loaded meanwhile have all experts in the host's memory, and so many of each layer on the card."""
    with monkeypatch.context() as patch, served_lane(), only("lane", (moe,), of_a_card):
        patch.setattr(Binding, "slots", property(lambda binding: slots))
        yield


def texts(path: Path, n: int, **settings: object) -> tuple[list[list[int]], Rig, list[list[int]]]:
    """Texts, their engine, and the rows of each sequence that it launched: drafts are among them."""
    r = rig(path, np=2, weights="packed", ctx=64, **settings).call_by_call()  # not recorded
    launched = list[list[int]]()
    launch = r.loop.worker.launch

    def watched(round_: Round) -> Launched:
        launched.extend(list(seq.tokens) for seq in round_.seqs)
        return launch(round_)

    r.loop.worker.launch = watched  # type: ignore[method-assign]
    heard = r.all(PROMPTS, n)
    return [h.tokens for h in heard], r, launched


DRAFTERS = {"mtp": "qwen35moe", "draft": "qwen3moe"}


def drafts_of(kind: str, path: Path) -> dict[str, object]:
    own: dict[str, object] = {"spec_type": kind, "n_draft_max": 3, "n_draft_fixed": True}
    return own | {"draft_path": path} if kind == "draft" else own


@pytest.fixture(scope="module", params=DRAFTERS)
def on_card(
    request: pytest.FixtureRequest, paths: dict[str, Path]
) -> tuple[str, Path, list[list[int]], list[list[int]]]:
    """A drafter, its model, and texts and rows with all experts in torch. A draft model that is the target is always right, so it has few rounds."""
    kind: str = request.param
    path = paths[DRAFTERS[kind]]
    with only("torch", (moe,)):
        want, _, launched = texts(path, N_TEXT[kind], **drafts_of(kind, path))
    assert max(map(len, launched[2:])) == 4, "an anchor and its drafts"
    return kind, path, want, launched


def test_experts_of_drafters_are_in_host_memory_too(
    on_card: tuple[str, Path, list[list[int]], list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are the same, so the drafter's experts are computed right."""
    kind, path, want, launched = on_card
    with in_host(monkeypatch, 2):
        got, r, found = texts(path, N_TEXT[kind], **drafts_of(kind, path))
        layers = r.loop.worker.experts.layers
        assert got == want and found == launched
        assert len(layers) == (N_LAYER + 1 if kind == "mtp" else 2 * N_LAYER)
        assert all(int(layer.counts[1]) for layer in layers), "each layer asked the host"
        assert r.loop.experts.n_upload == 0 and r.loop.experts.frozen == expert_cache.PLACED


def test_experts_of_drafters_move_too(
    on_card: tuple[str, Path, list[list[int]], list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, path, want, launched = on_card
    monkeypatch.setattr(expert_cache, "LEAST", 0.2)
    monkeypatch.setattr(expert_cache, "HOST", 1e9)
    # times of an emulated card say nothing
    monkeypatch.setattr(expert_cache.ExpertCache, "_judge", lambda *given, **more: None)
    with in_host(monkeypatch, 2):
        got, r, found = texts(path, N_TEXT[kind], **drafts_of(kind, path), moe_cache_mib=1)
        uploads = r.loop.worker.uploads
        moved = [layer.places.tolist()[:2] != [0, 1] for layer in uploads.layers]
        assert got == want and found == launched
        assert r.loop.experts.n_upload > 1 and not r.loop.experts.frozen
        assert any(moved[N_LAYER:]), moved


FILES = {"dspark": "deepseek4", "dflash": "qwen3", "dflash2": "qwen3", "eagle3": "qwen3"}
FLAGS: dict[str, tuple[str, dict[str, object], int]] = {
    "-cmoed": ("dspark", {"draft_cpu_moe": True}, 2),
    "-ncmoed": ("dspark", {"draft_n_cpu_moe": 1}, 1),
    "-otd": ("dspark", {"draft_override_tensor": (r"blk\.1\.ffn_up_exps=CPU",)}, 1),
    "-ngld of dflash": ("dflash", {"draft_n_gpu_layers": 1}, 1),
    "-ngld of dflash2": ("dflash2", {"draft_n_gpu_layers": 0}, 2),
    "-ngld of eagle3": ("eagle3", {"draft_n_gpu_layers": 0}, 1),
}
"""A drafter with a file of its own, flags, and how many of its layers these put into host memory."""


def by_flags(d: Description, slots: int) -> Description:
    """With the drafter where a card's flags put it."""
    assert d.draft.file is not None
    flags = PlaceFlags.of_drafter(d.settings)
    asked = wanted(flags, d.draft_blocks, d.draft.file.tensors, "CUDA0")
    blocks = [block for block in d.draft_blocks if block.prefix in asked.experts]
    return replace(d, draft_placement=placement(blocks, [slots] * len(blocks), asked.dense))


@pytest.mark.parametrize(
    "flag",
    [
        f if f in ("-cmoed", "-ngld of eagle3") else pytest.param(f, marks=pytest.mark.slow)
        for f in FLAGS
    ],
)
def test_drafters_of_other_files_are_where_flags_put_them(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DSpark's stages of DeepSeek-V4 have experts, layers of the others have not. Drafts and texts are those of all on the card."""
    kind, flags, n_layer = FLAGS[flag]
    dims = widened(find(FILES[kind], tiny=True))
    path, own = (
        synth.write(dims, tmp_path / f"{x}.gguf", quant="q8_0", drafter=x == "d", kind=kind)
        for x in "md"
    )
    given = {"spec_type": kind, "draft_path": own, "n_draft_max": 3, "n_draft_fixed": True}
    with only("torch", (moe,)):
        want, _, launched = texts(path, 12, **given)
    monkeypatch.setattr(loading, "widened", lambda d: by_flags(fit(d), 2))
    # on a card both ask whether its kernels are there, too
    monkeypatch.setattr(Binding, "slots", property(lambda b: b.placement.slots(b.prefix)))
    monkeypatch.setattr(Binding, "away", property(lambda b: b.prefix in b.placement.dense))
    made: list[host.HostExperts] = []
    begin = host.HostExperts.__init__

    def watched(self: host.HostExperts, *of: object) -> None:
        begin(self, *of)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(host.HostExperts, "__init__", watched)
    with served_lane(), only("lane", (moe,), of_a_card):
        got, _, found = texts(path, 12, **given, **flags)
    assert got == want and found == launched and max(map(len, found[2:])) == 4
    assert len(made) == n_layer and all(int(layer.counts[1]) for layer in made)


def plain(path: Path) -> Rig:
    """Two slots without drafts."""
    return rig(path, np=2, weights="packed", ctx=64, spec_type="none").call_by_call()


def test_a_host_that_falls_silent_ends_the_engine_and_no_request(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a thread that dies or comes late. Its supervisor goes on with the next one where it stood."""
    path = paths["qwen3moe"]
    with in_host(monkeypatch, 2):
        want, r = texts(path, 9, spec_type="none")[0], plain(path)
        heard = [r.submit(prompt, 9) for prompt in PROMPTS]
        r.steps(4)
        with monkeypatch.context() as patch:
            patch.setattr(HostLane, "serve", lambda self: 0)
            patch.setattr(lane, "LIMIT", 20_000)
            with pytest.raises(DeviceError, match="did not compute a layer's experts"):
                r.run()
    told = [h.tokens for h in heard]
    assert all(h.error is None for h in heard) and all(told)
    assert told == [text[: len(own)] for own, text in zip(told, want, strict=True)]
    with in_host(monkeypatch, 2):
        r = plain(path)
        rest = [r.submit([*p, *own], 9 - len(own)) for p, own in zip(PROMPTS, told, strict=True)]
        r.run()
        assert [own + h.tokens for own, h in zip(told, rest, strict=True)] == want


def test_one_slots_fault_ends_its_request_alone(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = paths["qwen3moe"]
    with in_host(monkeypatch, 2):
        want, r = texts(path, 9, spec_type="none")[0], plain(path)
        heard = [r.submit(prompt, 9, slot=i) for i, prompt in enumerate(PROMPTS)]
        tripping(r, OF_REQUESTS[0], 1, 3)
        r.run()
        assert isinstance(heard[1].error, OutOfBounds) and heard[0].tokens == want[0]
        assert r.generate(PROMPTS[1], 9, slot=1).tokens == want[1]
