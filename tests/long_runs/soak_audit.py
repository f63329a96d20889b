"""Compare the content of a prefix cache with another engine's for the same tokens: keys, values, recurrent states.

A wrong text shows a fault somewhere before it. This finds the fault, also where the model is too sure of itself to show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.engine.api import Engine
from pyspec.request import Request, SamplingParams
from pyspec.slots.prefix import Node
from pyspec.slots.states import Saved

OFF = {
    "cpu": 1e-3,
    "cuda": 0.03,
}  # of a row's norm; found are 2e-5 and 3e-3, as sums follow the cut of a prompt
ENOUGH = 8  # wrong ones
ASKED = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass
class Audit:
    """wrong: tokens up to the first wrong place, and the fault."""

    wrong: list[tuple[list[int], str]]
    n_row: int = 0
    n_state: int = 0
    worst: float = 0.0

    def __str__(self) -> str:
        return f"{self.n_row} filed rows and {self.n_state} states are off by {self.worst:.2g} at most"


def _way(node: Node) -> list[Node]:
    """From the root's child to `node`."""
    way = [node]
    while (parent := way[-1].parent) is not None:
        way.append(parent)
    return way[-2::-1]


def _texts(engine: Engine) -> Iterator[tuple[list[int], Node]]:
    """Every text that is filed to its end, or to where a state was kept; those with one beginning one after another."""
    found = []
    for node in engine.loop.table.tree.nodes():
        ends = set(node.states) | (set() if node.children else {node.end})
        text = [token for each in _way(node) for token in each.tokens]
        found += [(text[:end], node) for end in ends]
    return iter(sorted(found, key=lambda x: x[0]))


def _off(own: Tensor, want: Tensor) -> Tensor:
    """By how much each row is off, in parts of its norm; [row]."""
    own, want = (t.float().flatten(1).cpu() for t in (own, want))
    return (own - want).norm(dim=1) / want.norm(dim=1).clamp_min(1e-9)


def audit(engine: Engine, other: Engine) -> Audit:
    """`engine` is idle; `other` has one slot, a prefix cache, and pages for the longest text."""
    found, seen = Audit([]), set[int]()
    most = OFF[engine.loop.target.device.type]
    for text, node in _texts(engine):
        if len(found.wrong) >= ENOUGH:
            break
        other.run(Request(prompt=tuple(text), params=ASKED, max_tokens=1))
        way, own = _way_of(other, text), _way(node)
        new = [i for i in range(len(own)) if id(own[i]) not in seen]
        seen |= {id(own[i]) for i in new if own[i].end <= len(text)}
        at = [position for i in new for position in range(own[i].start, min(own[i].end, len(text)))]
        first = len(text)
        for what, x, y in [*_rows(engine, other, own, way, at), *_states(node, way[-1], len(text))]:
            off = _off(x, y)
            found.worst = max(found.worst, float(off.max())) if len(off) else found.worst
            bad = [i for i, o in enumerate(off.tolist()) if not o <= most]  # catches NaN
            places = at if what.startswith("layer") else [len(text)]
            if bad and (place := places[bad[0] % len(places)]) <= first:
                first = place
                found.wrong.append(
                    (text[: place + 1], f"{what} off by {off[bad[0]]:.2g} at {place} of {len(text)}")
                )
        found.n_row, found.n_state = found.n_row + len(at), found.n_state + (len(text) in node.states)
    return found


def _way_of(engine: Engine, text: list[int]) -> list[Node]:
    """Where an engine that has just run it has filed a text."""
    tree = engine.loop.table.tree
    whole, partial = tree._match(text, len(text), tree.root)
    rest = len(text) - len(whole) * engine.loop.table.page_size
    return [*whole, *[node for node, n in partial if n == rest][:1]]


def _rows(
    engine: Engine, other: Engine, own: list[Node], want: list[Node], at: list[int]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Keys and values of every layer at positions `at`."""
    size, pools = engine.loop.table.page_size, engine.loop.memory.kv
    places = [[way[p // size].page * size + p % size for p in at] for way in (own, want)]
    device = engine.loop.target.device
    rows = [torch.tensor(place, dtype=torch.int64, device=device) for place in places]
    for layer, pool in pools.items():
        theirs = other.loop.memory.kv[layer].read(rows[1], torch.float32)
        for name, x, y in zip(
            ("keys", "values"), pool.read(rows[0], torch.float32), theirs, strict=True
        ):
            yield f"layer {layer}'s {name}", x, y


def _states(own: Node, want: Node, n_past: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    saved = [node.states[n_past].content for node in (own, want) if n_past in node.states]
    if len(saved) == 2 and isinstance(saved[0], Saved) and isinstance(saved[1], Saved):
        mine, theirs = (s.checkpoint for s in saved)  # type: ignore[union-attr]
        for i, (x, y) in enumerate(zip(mine.tensors, theirs.tensors, strict=True)):
            yield f"state {i}", x[None], y[None]
