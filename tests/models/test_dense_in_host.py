"""Models whose feed-forwards are in the host's memory beside an emulated card: the logits of all on the card, one graph's calls."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness import DEVICE
from test_experts_in_host import logits, made_layers, ops

from pyspec import synth
from pyspec.cpu import build
from pyspec.cuda.ops.moe.op import moe
from pyspec.models.binding import Binding
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


@pytest.mark.parametrize(
    ("arch", "quant"),
    [("qwen3", "q8_0"), *(pytest.param(*x, marks=pytest.mark.slow) for x in (("gemma3", "q4_k"), ("qwen35", "q4_k"), ("nemotron_h", "q8_0")))],
)  # fmt: skip
def test_logits_are_those_of_all_on_the_card(
    arch: str, quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = synth.write(widened(find(arch, tiny=True)), tmp_path / "m.gguf", quant=quant)
    want, _ = logits(path)
    made = made_layers(monkeypatch)
    for n in (1, 99) if arch != "nemotron_h" else (99,):  # where the first block is of another kind
        away = {f"blk.{i}" for i in range(n)}
        monkeypatch.setattr(Binding, "away", property(lambda b, away=away: b.prefix in away))
        made.clear()
        with served_lane(), only("lane", (moe,), of_a_card):
            got, bench = logits(path)
            names = ops(bench)
            jobs = sum(int(run.counts[1]) for run in made)
            assert all(i.name == "lane" for i in moe.decided.values())
        off = (got - want).abs().amax(-1) / want.std()
        assert float(off.max()) < 0.02, off
        assert made and jobs > len(made) and all(run.n_expert == 1 for run in made)
        if n > 1 and arch == "qwen3":
            assert names[-3:] == ["one_expert", "moe.begin", "moe"]
        del bench
