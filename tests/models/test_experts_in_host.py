"""Models whose experts are in the host's memory beside an emulated card: the logits of the references, wherever experts are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from harness import DEVICE, Bench
from tiny_models import MODELS

from pyspec import synth
from pyspec.cpu import build
from pyspec.cuda.ops.moe import host
from pyspec.cuda.ops.moe.op import moe
from pyspec.device.expert_uploads import ExpertUploads
from pyspec.device.expert_use import ExpertLog
from pyspec.engine.loop import expert_cache
from pyspec.engine.loop.expert_cache import ExpertCache
from pyspec.models.binding import Binding
from pyspec.models.placement import Placement
from pyspec.models.target import Out
from pyspec.slots.batch import Batch
from pyspec.synth.dims import find, widened

sys.path.append(str(Path(__file__).parents[1] / "kernels"))

from emulated.lane import served_lane
from emulated.machine import needs_compiler
from emulated.ops import of_a_card, only

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(DEVICE.type != "cpu", reason="kernels run thread by thread on the CPU here"),
    pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler"),
]
QUANTS = {"gpt-oss": "mxfp4_moe", "qwen3moe": "q4_k", "nemotron_h_moe": "q5_k", "qwen3next": "nvfp4"}
TOKENS = [(7 * i * i + 3 * i) % 250 for i in range(40)]


def logits(path: Path) -> tuple[torch.Tensor, Bench]:
    """Of a prompt, of single rows and of verifies, of two slots."""
    bench = Bench(path, n_slot=2, n_ctx=64, dense=None)
    return fed(bench), bench


def fed(bench: Bench) -> torch.Tensor:
    out = [bench.feed(0, TOKENS[:19]), bench.feed(1, TOKENS[:5])]
    for at, width in ((19, 1), (20, 7)):
        seqs = bench.seq(0, TOKENS[at : at + width], keep=False), bench.seq(1, TOKENS[at : at + 1])
        out.append(bench.forward(*seqs).logits)
        bench.commit(seqs[0], width)
        bench.commit(seqs[1], 1)
    return torch.cat(out)


def made_layers(monkeypatch: pytest.MonkeyPatch) -> list[host.HostExperts]:
    """Those that are made from now on."""
    made: list[host.HostExperts] = []
    begin = host.HostExperts.__init__

    def watched(self: host.HostExperts, *given: object) -> None:
        begin(self, *given)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(host.HostExperts, "__init__", watched)
    return made


def ops(bench: Bench) -> list[str]:
    return [call.op for call in bench.target.blocks[-1].program.calls]


@pytest.mark.parametrize(
    "arch",
    [
        arch if arch in ("qwen35moe", "nemotron_h_moe") else pytest.param(arch, marks=pytest.mark.slow)
        for arch, dims in MODELS.items()
        if dims.n_expert
    ],
)
def test_logits_are_the_references_wherever_experts_are(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quant = QUANTS.get(arch, "q8_0")
    path = synth.write(widened(MODELS[arch]), tmp_path / "m.gguf", quant=quant)
    with only("torch", (moe,)):
        want, _ = logits(path)
    made = made_layers(monkeypatch)
    for slots in (0, 2):
        # the first layers; with 0 all of them
        places = Placement(tuple((f"blk.{i}", slots) for i in range(2 if slots else 9)))
        monkeypatch.setattr(Binding, "slots", property(lambda b, p=places: p.slots(b.prefix)))
        made.clear()
        with served_lane(), only("lane", (moe,), of_a_card):
            got, bench = logits(path)
            assert all(i.name in ("lane", "torch") for i in moe.decided.values())
            jobs = sum(int(run.counts[1]) for run in made)
        off = (got - want).abs().amax(-1) / want.std()
        assert float(off.median()) < 0.01, off
        assert float((off < 0.05).float().mean()) > 0.9, off  # a near tie of experts may turn
        assert made and jobs > len(made)
        if not slots and arch == "qwen35moe":  # a shared expert runs beside the host
            names = ops(bench)
            route = names.index("moe_route")
            assert names[route:] == ["moe_route", "moe.begin", "product", "product", "moe"]
        del bench


def test_logits_stay_those_of_the_card_while_experts_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a slot, and of one beside it, against all on the card."""
    path = synth.write(widened(find("qwen35moe", tiny=True)), tmp_path / "m.gguf", quant="q8_0")
    with only("torch", (moe,)):
        want, _ = logits(path)
    places = Placement(tuple((f"blk.{i}", 2) for i in range(9)))
    monkeypatch.setattr(Binding, "slots", property(lambda b: places.slots(b.prefix)))
    host.take_layers(torch.device("cpu"))
    with served_lane(), only("lane", (moe,), of_a_card):
        bench = Bench(path, n_slot=3, n_ctx=64, dense=None)
        layers = host.take_layers(torch.device("cpu"))
        log = ExpertLog(layers, len(layers))
        uploads = ExpertUploads(log)
        cache, run, n = ExpertCache(uploads), bench.target.run, 0
        monkeypatch.setattr(expert_cache, "LEAST", 0.5)
        cache.host = cache.link / 4

        def watched(batch: Batch, taps: Sequence[int] = ()) -> Out:
            nonlocal n
            n += 1
            uploads.before()
            out = run(batch, taps)
            uploads.behind()
            use = log.used(log.copy(batch.n_row, batch.n_row), batch.starts, len(batch.seqs))
            assert use is not None
            cache.landed(use, 10.0, 0.0)
            return out

        monkeypatch.setattr(bench.target, "run", watched)
        for token in TOKENS[:14]:  # of a slot that nobody compares
            bench.feed(2, [token])
        moved, got = cache.n_upload, fed(bench)
    assert len(layers) > 1 and cache.n_upload > moved > 0 and not cache.frozen
    off = (got - want).abs().amax(-1) / want.std()
    assert float(off.median()) < 0.01, off
    assert float((off < 0.05).float().mean()) > 0.9, off  # a near tie of experts may turn
