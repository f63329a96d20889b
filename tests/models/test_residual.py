"""Several residual streams around parts of any kind: the way of the residual is a value of a model, which no part depends on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import DEVICE, FIXTURES, Bench

from pyspec.cuda.ops.streams.ref import StreamMix
from pyspec.models import streams as bound_streams
from pyspec.models.block import BlockSpec, Mix
from pyspec.models.decoder import Decoder
from pyspec.models.kernels import needs_of_model
from pyspec.models.part import LoadTypes
from pyspec.models.residual import HEAD_MIX, Residual
from pyspec.models.weights import Weights
from pyspec.slots.kv import KvFormat
from pyspec.slots.kv_types import F32


def even(n: int, n_embd: int) -> StreamMix:
    """Coefficients that read half of each of two streams, add the whole output to both, and mix them evenly."""
    n_out = (2 + n) * n
    return StreamMix(*(torch.zeros(shape, device=DEVICE) for shape in ((n_out, n * n_embd), 3, n_out)))


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen35", "qwen35moe", "nemotron_moe"])
def test_two_even_streams_are_one_stream(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention, recurrences, feed-forwards and norms behind them are the same parts in both models."""
    tokens = [(7 * i * i + 3 * i) % 200 for i in range(40)]
    path: Path = FIXTURES / f"{name}.gguf"
    bench = Bench(path)
    want = bench.forward(bench.seq(0, tokens), taps=(1,))
    config = bench.target.config
    streams, made = Residual(2, n_iter=3, floor=0.0), even(2, config.n_embd)
    head = StreamMix(made.fn[:2], made.scale[:1], made.base[:2])
    mixes = {HEAD_MIX: head}
    monkeypatch.setattr(bound_streams, "mix_of", lambda weights, name: mixes.get(name, made))
    mixed = tuple(
        replace(b, parts=tuple(replace(p, mix=Mix(f"hc_{p.norm}", 2)) for p in b.parts))
        for b in config.blocks
    )
    bench = Bench(path)
    bench.target = Decoder(
        replace(config, residual=streams, blocks=mixed),
        Weights(bench.file, DEVICE, torch.float32),
        bench.memory,
    )
    got = bench.forward(bench.seq(0, tokens), taps=(1,))
    assert got.taps is not None and want.taps is not None
    for one, other in ((got.logits, want.logits), (got.taps, want.taps)):
        assert torch.allclose(one, other, atol=1e-4)
    assert (
        got.hidden.shape
        == (len(tokens), 2 * config.n_embd)
        == (len(tokens), bench.target.config.n_hidden)
    )


def test_a_model_of_streams_wants_their_coefficients_and_room_for_their_rows() -> None:
    config = Bench(FIXTURES / "llama.gguf").target.config
    streams = Residual(4, n_iter=3, floor=1e-6)
    mixed = [
        BlockSpec(tuple(replace(p, mix=Mix(f"hc_{p.norm}", 4)) for p in b.parts)) for b in config.blocks
    ]
    model = replace(config, residual=streams, blocks=tuple(mixed))
    file = Bench(FIXTURES / "llama.gguf").file
    more = model.tensors(file).keys() - config.tensors(file).keys()
    parts = [f"blk.{i}.hc_{p.norm}" for i, b in enumerate(config.blocks) for p in b.parts]
    assert more == {
        f"{name}_{x}.weight" for name in ("output_hc", *parts) for x in ("fn", "base", "scale")
    }
    on = LoadTypes(torch.device("cpu"), KvFormat.both(F32), None)
    assert needs_of_model(model, file, on, 2, 64).scratch == 2 * 4 * 3 * 4 * config.n_embd
    assert needs_of_model(config, file, on, 2, 64).scratch == 0
