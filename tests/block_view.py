"""A router's view of a prefix cache, rebuilt from KV events alone, and the view that it should have."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import zmq

from pyspec.slots.prefix import Node
from pyspec.slots.table import Slot, SlotTable

Text = tuple[int, ...]
WAIT_MS = 20_000


def hash_of(parent: bytes, tokens: Sequence[int]) -> bytes:
    """As docs/routers.md describes it."""
    return hashlib.sha256(parent + b"".join(t.to_bytes(4, "little") for t in tokens)).digest()


@dataclass
class BlockView:
    """Blocks by their published hash: the text from its beginning to the block's end."""

    texts: dict[int, Text] = field(default_factory=dict)
    block_size: int = 0
    n_cleared: int = 0

    def take(self, events: Iterable[Mapping[str, Any] | Sequence[Any]]) -> None:
        for event in events:
            self._take(event if isinstance(event, Mapping) else named(event))

    def _take(self, event: Mapping[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            assert len(event) == 1
            self.texts.clear()
            self.n_cleared += 1
        elif event["type"] == "BlockRemoved":
            assert event["medium"] == "GPU"
            for each in event["block_hashes"]:
                del self.texts[each]
        else:
            assert event["type"] == "BlockStored"
            assert (event["lora_id"], event["lora_name"], event["medium"]) == (None, None, "GPU")
            hashes, tokens, size = event["block_hashes"], event["token_ids"], event["block_size"]
            assert hashes and len(tokens) == len(hashes) * size
            assert self.block_size in (0, size)
            parent, self.block_size = event["parent_block_hash"], size
            before = () if parent is None else self.texts[parent]
            for i, each in enumerate(hashes):
                before = (*before, *tokens[i * size : (i + 1) * size])
                assert each not in self.texts, "stored twice"
                self.texts[each] = before

    def n_cached(self, prompt: Sequence[int]) -> int:
        """Tokens of the prompt's first blocks that are stored, as a router counts them by hashes of its own."""
        digest, n = b"", 0
        while self.block_size and n + self.block_size <= len(prompt):
            digest = hash_of(digest, prompt[n : n + self.block_size])
            number = int.from_bytes(digest[-8:], "big")
            if number not in self.texts:
                break
            assert self.texts[number] == tuple(prompt[: n + self.block_size])
            n += self.block_size
        return n

    def check(self, table: SlotTable, growing: Iterable[Slot] = ()) -> None:
        """Blocks of the cache, and those that these slots will leave there."""
        assert sorted(self.texts.values()) == sorted(wanted(table, growing))


def named(event: Sequence[Any]) -> dict[str, Any]:
    """An event that is an array, with the names of its values by vLLM's order."""
    stored = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
    names = {"BlockStored": (*stored, "lora_name"), "BlockRemoved": ("block_hashes", "medium")}
    return {
        "type": event[0],
        **dict(zip(names.get(event[0], ()), event[1:], strict=True)),
    }


def text_of(node: Node) -> Text:
    """All tokens up to the node's end."""
    text: Text = ()
    at: Node | None = node
    while at is not None:
        text, at = (*at.tokens, *text), at.parent
    return text


def wanted(table: SlotTable, growing: Iterable[Slot] = ()) -> set[Text]:
    """Texts of the full pages from which a request can go on, and of those of texts that grow."""
    size = table.page_size
    grown = {
        tuple(slot.tokens[: i + size])
        for slot in growing
        for i in range(0, slot.n_past - size + 1, size)
    }
    return _wanted(table) | grown


def _wanted(table: SlotTable) -> set[Text]:
    nodes = list(table.tree.nodes())
    full = {text_of(node) for node in nodes if len(node.tokens) == table.page_size}
    if not table.needs_state:
        return full
    kept = [text_of(node)[:n] for node in nodes for n in node.states]
    return {text for text in full if any(k[: len(text)] == text for k in kept)}


class BlockReader:
    """Subscribes to KV events of the replica `rank`, and asks for replays of missed batches, as routers do."""

    def __init__(
        self, endpoint: str, replay: str = "", topic: str = "", rank: int = 0, **options: int
    ) -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        for name, value in options.items():
            setattr(self.sub, name, value)
        self.sub.subscribe(topic)
        self.sub.connect(endpoint)
        self.replay, self.rank, self.view = replay, rank, BlockView()
        self.seen: list[int] = []
        self.topics: set[str] = set()

    def read(self) -> int:
        """Take in the next batch, behind those that were missed before it. Returns its number."""
        assert self.sub.poll(WAIT_MS), "no batch came"
        topic, number, body = self.sub.recv_multipart()
        self.topics.add(topic.decode())
        n = int.from_bytes(number, "big")
        first = self.seen[-1] + 1 if self.seen else 0
        if n > first and self.replay:
            for each, missed in self.ask(first):
                if each < n:
                    self._take(each, missed)
        if not self.seen or n > self.seen[-1]:
            self._take(n, body)
        return n

    def read_to(self, n: int) -> None:
        """Read until batch n."""
        while not self.seen or self.seen[-1] < n:
            self.read()

    def catch_up(self) -> None:
        """Take in the events of a replay that this reader lacks."""
        for n, body in self.ask(self.seen[-1] + 1 if self.seen else 0):
            self._take(n, body)

    def ask(self, first: int) -> list[tuple[int, bytes]]:
        """A replay from a number on."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.connect(self.replay)
        dealer.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while True:
            assert dealer.poll(WAIT_MS), "no replay came"
            empty, number, body = dealer.recv_multipart()
            assert empty == b""
            if number == b"\xff" * 8 and not body:
                break
            found.append((int.from_bytes(number, "big"), body))
        dealer.close(0)
        return found

    def _take(self, n: int, body: bytes) -> None:
        at, events, rank = msgpack.unpackb(body)
        assert isinstance(at, float) and rank == self.rank
        self.view.take(events)
        self.seen.append(n)

    def close(self) -> None:
        self.context.destroy(0)
