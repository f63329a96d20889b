"""Capturing graphs at load runs every batch size over empty slots and leaves nothing behind."""

import torch
from engine_rig import rig

from pyspec.slots.arena import Arena
from pyspec.synth import write
from pyspec.warmup import capture


def test_capturing_leaves_no_trace(tmp_path) -> None:
    target = write("qwen35", tmp_path / "t.gguf", quant="f32", tiny=True)
    draft = write("qwen35", tmp_path / "d.gguf", quant="f32", tiny=True, drafter=True)
    plain, captured = (rig(target, draft_path=draft, np=3) for _ in range(2))
    loop = captured.loop
    pages = -(-300 // loop.table.page_size)
    loop.arena = loop.drafter.arena = Arena(3, pages, torch.device("cpu"))
    capture(loop)
    loop.table.check()
    assert all(slot.n_past == slot.n_fold == 0 and not slot.pages for slot in loop.table.slots)
    assert all(not layer.state.any() and not layer.conv[:, :3].any() for layer in loop.memory.states.values())
    prompt = list(range(5, 30))
    assert captured.generate(prompt, max_tokens=40).tokens == plain.generate(prompt, max_tokens=40).tokens
