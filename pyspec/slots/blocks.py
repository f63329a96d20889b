"""The prefix tree as blocks that routers know: full pages, each named by a hash of all tokens up to its end. No torch here: it is arithmetic.

A router counts a prompt's first blocks as cached, so only a block that a request can go on from is stored there. Where a prefix can be
continued only at a kept state, that is a block with a state at its end or behind it; the others are removed from the router's view, though
their pages are filed.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from pyspec.slots.prefix import Node, PrefixTree


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
    """The digest of a block: SHA-256 of the digest of the block before it (nothing at the beginning), then its token ids as 32-bit
    little-endian numbers."""
    return sha256(before + struct.pack(f"<{len(tokens)}I", *tokens)).digest()


def number_of(digest: bytes) -> int:
    """The published hash: the digest's last 8 bytes as a big-endian number."""
    return int.from_bytes(digest[-8:], "big")


class BlockLog:
    """Collects the changes of a tree. Used on the thread that changes the tree.

    needs_state  a prefix can be continued only at a kept state
    """

    def __init__(self, tree: PrefixTree, needs_state: bool) -> None:
        self.tree, self.needs_state = tree, needs_state
        self._digests: dict[Node, bytes] = {}  # of blocks that are stored in the routers' view
        self._changes: list[BlockChange] = []
        self._touched: dict[Node, None] = dict.fromkeys(tree.nodes())

    def __len__(self) -> int:
        return len(self._digests)

    def touch(self, node: Node) -> None:
        """A node was filed, or its states have changed."""
        self._touched[node] = None

    def gone(self, node: Node, parent: Node) -> None:
        """A node leaves the tree; its states are gone with it."""
        self._touched.pop(node, None)
        self._remove(node)
        if self.needs_state and parent is not self.tree.root:
            self._touched[parent] = None

    def take(self) -> Sequence[BlockChange]:
        """The changes since the last call, in order."""
        if self._touched:
            touched, self._touched = self._touched, {}
            # those with states first: then no block is removed that another one's state supports
            for node in sorted(touched, key=lambda node: not node.states):
                self._refresh(node)
        changes, self._changes = self._changes, []
        return changes

    def _refresh(self, node: Node) -> None:
        """Bring the view of a node and of those before it up to date."""
        root = self.tree.root
        while node is not root and not self._goes_on(node):
            self._remove(node)
            assert node.parent is not None
            node = node.parent
        path = []
        while node is not root and node not in self._digests:
            path.append(node)
            assert node.parent is not None
            node = node.parent
        for each in reversed(path):
            self._store(each)

    def _goes_on(self, node: Node) -> bool:
        """A prompt that begins with all tokens up to this page's end can go on behind it, or behind a longer part of this text."""
        if len(node.tokens) < self.tree.page_size:
            return False
        return not self.needs_state or node.end in node.states or any(map(self._leads_on, _next(node)))

    def _leads_on(self, node: Node) -> bool:
        return bool(node.states) or node in self._digests

    def _store(self, node: Node) -> None:
        before = b"" if node.parent is None else self._digests.get(node.parent, b"")
        self._digests[node] = digest = chained(before, node.tokens)
        number, parent = number_of(digest), number_of(before) if before else None
        last = self._changes[-1] if self._changes else None
        if isinstance(last, BlocksStored) and last.hashes[-1] == parent:
            last.hashes.append(number)
            last.tokens.extend(node.tokens)
        else:
            hashes, tokens = array("Q", [number]), array("I", node.tokens)
            self._changes.append(BlocksStored(hashes, parent, tokens, self.tree.page_size))

    def _remove(self, node: Node) -> None:
        digest = self._digests.pop(node, None)
        if digest is None:
            return
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
        last = found[-1]
        if isinstance(last, BlocksStored) and last.hashes[-1] == block.parent:
            last.hashes.extend(block.hashes)
            last.tokens.extend(block.tokens)
        else:
            copy = array("Q", block.hashes), block.parent, array("I", block.tokens)
            found.append(BlocksStored(*copy, block.block_size))
    return found


def _next(node: Node) -> Iterator[Node]:
    return (child for near in node.children.values() for child in near)
