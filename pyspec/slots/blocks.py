"""The prefix tree as blocks that routers know: full pages, each named by a hash of all tokens up to its end. No torch here: it is arithmetic.

A router counts a prompt's first blocks as cached, so only a block that a request can go on from is stored there. Where a prefix can be
continued only at a kept state, that is a block with a state at its end or behind it; the others are removed from the router's view, though
their pages are filed. Texts that grow are stored block by block, too: they are filed when their requests end. Routers hash the ids of texts,
and pictures have none that they could know: no block is stored from a text's first picture on.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

from pyspec.slots.images import has_images
from pyspec.slots.prefix import Node, PrefixTree
from pyspec.slots.table import Slot


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks one behind the other. parent: the block before the first one; None at the beginning of a text. tokens: of all, in order."""

    hashes: array[int]  # of 64 bits
    parent: int | None
    tokens: array[int]
    block_size: int


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that are not cached any more."""

    hashes: array[int]


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """No block is cached."""


BlockChange = BlocksStored | BlocksRemoved | BlocksCleared
CLEARED = (BlocksCleared(),)


def chained(before: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a block: SHA-256 of the digest of the block before it (at the beginning that of the salt, or nothing without one), then
    its token ids as 32-bit little-endian numbers."""
    return sha256(before + struct.pack(f"<{len(tokens)}I", *tokens)).digest()


def start_of(salt: str) -> bytes:
    """What the digest of a text's first block begins with."""
    return sha256(salt.encode()).digest() if salt else b""


def number_of(digest: bytes) -> int:
    """The published hash: the digest's last 8 bytes as a big-endian number."""
    return int.from_bytes(digest[-8:], "big")


@dataclass(slots=True)
class Growth:
    """The full blocks of a slot's text, by their digests; generation: of the slot's request."""

    generation: int
    digests: list[bytes] = field(default_factory=list)


class BlockLog:
    """Collects the changes of a tree, and of the texts that grow in slots. Used on the thread that changes them.

    A block is stored while it has a holder: a node of the tree from which a request can go on, or a slot whose text will be filed. Each
    holder of a block also holds those before it, so no reader ever sees a block without them.

    needs_state  a prefix can be continued only at a kept state
    """

    def __init__(self, tree: PrefixTree, needs_state: bool) -> None:
        self.tree, self.needs_state = tree, needs_state
        self._digests: dict[Node, bytes] = {}  # of nodes that hold their blocks
        self._growths: dict[int, Growth] = {}  # by slot
        self._ended: list[Growth] = []  # of slots that have the next request already
        self._holders: dict[bytes, int] = {}  # of each stored block
        self._changes: list[BlockChange] = []
        self._touched: dict[Node, None] = dict.fromkeys(tree.nodes())

    def __len__(self) -> int:
        return len(self._holders)

    def touch(self, node: Node) -> None:
        """A node was filed, or its states have changed."""
        self._touched[node] = None

    def gone(self, node: Node, parent: Node) -> None:
        """A node leaves the tree; its states are gone with it."""
        self._touched.pop(node, None)
        self._remove(node)
        if self.needs_state and not parent.is_root:
            self._touched[parent] = None

    def take(self, growing: Sequence[Slot] = ()) -> Sequence[BlockChange]:
        """The changes since the last call, in order. growing: slots whose text will be filed when their request ends."""
        for slot in growing:
            self._grow(slot)
        if self._touched:
            touched, self._touched = self._touched, {}
            # those with states first: then no block is removed that another one's state supports
            for node in sorted(touched, key=lambda node: not node.states):
                self._refresh(node)
        if len(self._growths) > len(growing):
            gone = self._growths.keys() - {slot.index for slot in growing}
            self._ended += [self._growths.pop(index) for index in gone]
        while self._ended:  # what was filed has its nodes by now
            self._forget(self._ended.pop())
        changes, self._changes = self._changes, []
        return changes

    def _grow(self, slot: Slot) -> None:
        """Hold the full blocks that a slot's text has gained."""
        growth, size = self._growths.get(slot.index), self.tree.page_size
        if growth is None or growth.generation != slot.generation:
            new = self._growths[slot.index] = Growth(slot.generation)
            self._extend(new, slot)
            if growth is not None:
                self._ended.append(growth)
        elif slot.n_past // size > len(growth.digests):
            self._extend(growth, slot)

    def _extend(self, growth: Growth, slot: Slot) -> None:
        digests, size = growth.digests, self.tree.page_size
        for i in range(len(digests), slot.n_past // size):
            before = digests[-1] if digests else start_of(slot.owner.salt)
            tokens = slot.tokens[i * size : (i + 1) * size]
            if slot.images and slot.images[0].first < (i + 1) * size:
                break
            known = self._digests.get(slot.nodes[i]) if i < len(slot.nodes) else None
            digest = known or chained(before, tokens)
            self._hold(digest, before if i else None, tokens)
            digests.append(digest)

    def _forget(self, growth: Growth) -> None:
        for digest in reversed(growth.digests):
            self._let_go(digest)

    def _refresh(self, node: Node) -> None:
        """Bring the view of a node and of those before it up to date."""
        while not node.is_root and not self._goes_on(node):
            self._remove(node)
            assert node.parent is not None
            node = node.parent
        path = []
        while not node.is_root and node not in self._digests:
            path.append(node)
            assert node.parent is not None
            node = node.parent
        for each in reversed(path):
            if has_images(each.tokens):
                break
            self._store(each)

    def _goes_on(self, node: Node) -> bool:
        """A prompt that begins with all tokens up to this page's end can go on behind it, or behind a longer part of this text."""
        if len(node.tokens) < self.tree.page_size:
            return False
        return not self.needs_state or node.end in node.states or any(map(self._leads_on, _next(node)))

    def _leads_on(self, node: Node) -> bool:
        return bool(node.states) or node in self._digests

    def _store(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        before = None if parent.is_root else self._digests[parent]
        digest = chained(start_of(parent.salt) if before is None else before, node.tokens)
        self._digests[node] = digest
        self._hold(digest, before, node.tokens)

    def _hold(self, digest: bytes, before: bytes | None, tokens: Sequence[int]) -> None:
        """A block has one more holder. before: the digest of the block before it, if there is one."""
        self._holders[digest] = n = self._holders.get(digest, 0) + 1
        if n > 1:
            return
        parent = None if before is None else number_of(before)
        ids = array("Q", [number_of(digest)]), parent, array("I", tokens)
        _store_in(self._changes, BlocksStored(*ids, self.tree.page_size))

    def _remove(self, node: Node) -> None:
        digest = self._digests.pop(node, None)
        if digest is not None:
            self._let_go(digest)

    def _let_go(self, digest: bytes) -> None:
        """A block has one holder less."""
        self._holders[digest] -= 1
        if self._holders[digest]:
            return
        del self._holders[digest]
        last = self._changes[-1] if self._changes else None
        if isinstance(last, BlocksRemoved):
            last.hashes.append(number_of(digest))
        else:
            self._changes.append(BlocksRemoved(array("Q", [number_of(digest)])))


class BlockMirror:
    """The blocks that a reader of all changes knows."""

    def __init__(self) -> None:
        self._blocks: dict[int, BlocksStored] = {}  # by hash; a parent is older than its children

    def take(self, changes: Sequence[BlockChange]) -> None:
        """Follow changes."""
        for change in changes:
            if isinstance(change, BlocksStored):
                parent, size = change.parent, change.block_size
                for i, number in enumerate(change.hashes):
                    tokens = change.tokens[i * size : (i + 1) * size]
                    self._blocks[number] = BlocksStored(array("Q", [number]), parent, tokens, size)
                    parent = number
            elif isinstance(change, BlocksRemoved):
                for number in change.hashes:
                    self._blocks.pop(number, None)
            else:
                self._blocks.clear()

    def blocks(self) -> list[BlocksStored]:
        """Them, one by one, each behind its parent."""
        return list(self._blocks.values())


def anew(blocks: Sequence[BlocksStored]) -> list[BlockChange]:
    """Changes after which any reader knows these blocks and no others."""
    found: list[BlockChange] = [BlocksCleared()]
    for block in blocks:
        _store_in(found, replace(block, hashes=block.hashes[:], tokens=block.tokens[:]))
    return found


def _store_in(changes: list[BlockChange], block: BlocksStored) -> None:
    """Add blocks, which are ours to change: to those that they follow, if these came last."""
    last = changes[-1] if changes else None
    if isinstance(last, BlocksStored) and last.hashes[-1] == block.parent:
        last.hashes.extend(block.hashes)
        last.tokens.extend(block.tokens)
    else:
        changes.append(block)


def _next(node: Node) -> Iterator[Node]:
    return (child for near in node.children.values() for child in near)
