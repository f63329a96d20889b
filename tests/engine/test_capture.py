"""Capturing graphs at load runs every batch size over empty slots and leaves nothing behind; padded batches draft alike."""

import pytest
import torch
from engine_rig import rig

from pyspec.draft.drafter import Graphing
from pyspec.slots.arena import Arena
from pyspec.synth import write
from pyspec.warmup import capture


@pytest.mark.parametrize("kind", ["dflash", "mtp"])
def test_capturing_leaves_no_trace(tmp_path, kind) -> None:
    target = write("qwen35", tmp_path / "t.gguf", quant="f32", tiny=True)
    settings = {"np": 3, "n_draft_fixed": True, "spec_type": kind}
    if kind == "dflash":
        settings["draft_path"] = write("qwen35", tmp_path / "d.gguf", quant="f32", tiny=True, drafter=True)
    plain, captured = (rig(target, **settings) for _ in range(2))
    loop = captured.loop
    pages = -(-300 // loop.table.page_size)
    loop.arena = Arena(3, pages, torch.device("cpu"))
    assert isinstance(loop.drafter, Graphing)
    loop.drafter.use_graphs(lambda: Arena(3, pages, torch.device("cpu")))
    capture(loop)
    loop.table.check()
    assert all(slot.n_past == slot.n_fold == 0 and not slot.pages for slot in loop.table.slots)
    assert all(not layer.state.any() and not layer.conv[:, :3].any() for layer in loop.memory.states.values())
    prompts = [list(range(5 + i, 30 + 3 * i)) for i in range(5)]
    for prompt in prompts:
        a, b = (engine.generate(prompt, max_tokens=40) for engine in (captured, plain))
        assert a.tokens == b.tokens
        assert a.timings.accepted_per_pos == b.timings.accepted_per_pos, "the arena changed the drafts"
        assert a.timings.draft_n == b.timings.draft_n > 0
