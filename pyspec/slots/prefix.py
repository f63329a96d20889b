"""The prefix tree: pages by the tokens that they hold, shared by all texts that begin with them. No torch here: it is arithmetic.

A node is one filed page behind its parent's. Its tokens fill the page, or fewer do and nothing follows it. A filed page is immutable: a
slot that continues after whole pages reads them in place; a slot that continues within a page copies it. When pages are needed, those
that no slot holds are evicted, least recently used first, and children before parents.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspec.slots.blocks import BlockLog


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens two sequences share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


MOST_CLIENTS = 16  # of one page, whose texts are told from others'


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose text it is. salt: texts of different salts share no pages. client: breaks of the match are told within its texts alone."""

    client: str = ""
    salt: str = ""


NOBODY = Owner()


@dataclass(eq=False, slots=True)
class State:
    """A request's memory outside pages at exactly `n_past` tokens. It is attached to the node of the last one.

    is_start  it has the last token's logits: a prompt of exactly these tokens needs no forward
    """

    node: Node
    n_past: int
    content: object
    is_start: bool = False


@dataclass(eq=False, slots=True)
class Node:
    """One filed page, or the root of all texts of a salt, which has none. by: slot and generation that filed it; refs: slots that hold it
    now; n_unread: tokens of the text up to the last one of this page that the drafter has not read; clients: tokens of this page in texts of
    the latest clients that had it."""

    page: int
    tokens: tuple[int, ...]
    end: int  # tokens from the root to the last one of this page
    parent: Node | None
    by: tuple[int, int] = (-1, -1)
    refs: int = 0
    used: int = 0
    children: dict[int, list[Node]] = field(default_factory=dict)  # by their first token
    states: dict[int, State] = field(default_factory=dict)  # by n_past
    n_unread: int = 0
    clients: dict[str, int] = field(default_factory=dict)
    salt: str = ""  # of a root

    @property
    def start(self) -> int:
        return self.end - len(self.tokens)

    @property
    def is_root(self) -> bool:
        return self.page < 0

    def mark(self, client: str, n: int) -> None:
        """A text of this client has the first `n` tokens of this page."""
        self.clients[client] = max(n, self.clients.pop(client, 0))
        if len(self.clients) > MOST_CLIENTS:
            del self.clients[next(iter(self.clients))]


@dataclass(frozen=True, slots=True)
class Hit:
    """The part of a prompt in the tree.

    n        tokens that need no computing
    n_match  tokens whose pages are filed; more than n if the state there is missing
    nodes    whole pages to share
    tail     page to copy for the tokens behind them
    state    kept at exactly n tokens
    break_at  first token at which the client's own filed texts leave the prompt, or end without a usable state; -1 if they do not
    """

    n: int = 0
    n_match: int = 0
    nodes: tuple[Node, ...] = ()
    tail: Node | None = None
    state: State | None = None
    break_at: int = -1

    @property
    def n_unread(self) -> int:
        """Tokens at the begin behind which the drafter has read all."""
        pages = self.nodes if self.tail is None else (*self.nodes, self.tail)
        return min(self.n, unread_end(pages))


def unread_end(nodes: Sequence[Node]) -> int:
    """Tokens of a text up to the last one that the drafter has not read."""
    return next((node.n_unread for node in reversed(nodes) if node.n_unread), 0)


NO_HIT = Hit()


@dataclass(frozen=True, slots=True)
class Known:
    """What the tree has of a prompt, as a waiting request's order depends on it.

    n      tokens whose pages are filed
    n_own  those of them behind the last page that other texts continue, too: evicting this text's pages would lose them
    """

    n: int = 0
    n_own: int = 0


NOT_KNOWN = Known()


def _own_match(
    prompt: Sequence[int], whole: Sequence[Node], root: Node, client: str
) -> tuple[int, bool]:
    """Tokens that the prompt has in common with a client's own texts, and whether one of these goes on otherwise. whole: pages of any client
    that begin the prompt"""
    last = next((node for node in reversed(whole) if client in node.clients), root)
    n = last.end if last.is_root else last.start + last.clients[client]
    if n < last.end or n == len(prompt):
        return n, False  # the text or the prompt ends here
    rest, near = prompt[n:], last.children.get(prompt[n], ())
    ways = [(c.clients[client], common_prefix(c.tokens, rest)) for c in near if client in c.clients]
    best = max((min(way) for way in ways), default=0)
    if best:
        return n + best, any(n_own > best == m for n_own, m in ways)
    return n, any(client in node.clients for near in last.children.values() for node in near)


class PrefixTree:
    """Filed pages by content. give: called with the page of a removed node; lose: called with each removed state.

    blocks  collects the changes for routers, if there are any
    """

    def __init__(self, page_size: int, give: Callable[[int], None]) -> None:
        self.page_size, self.give = page_size, give
        self.lose: Callable[[State], None] = lambda state: None
        self.blocks: BlockLog | None = None
        self.root = Node(-1, (), 0, None)
        self._roots = {"": self.root}  # by salt
        self.n_node = self.n_held = 0  # filed pages, and those that slots hold
        self._clock = 0
        self._idle: list[
            tuple[int, int, Node]
        ] = []  # heap of candidates for eviction; outdated entries are skipped

    @property
    def n_idle(self) -> int:
        """Filed pages that no slot holds, all of which can be evicted."""
        return self.n_node - self.n_held

    def root_of(self, salt: str) -> Node:
        """The root of the texts of a salt. It is kept once a page is filed behind it."""
        return self._roots.get(salt) or Node(-1, (), 0, None, salt=salt)

    def nodes(self, first: Node | None = None) -> Iterator[Node]:
        """Yield `first` (or all nodes) and its descendants, parents before children."""
        todo = [*self._roots.values()] if first is None else [first]
        while todo:
            node = todo.pop()
            if not node.is_root:
                yield node
            todo += [child for children in node.children.values() for child in children]

    # -- finding -------------------------------------------------------------------------------------------------

    def find(self, prompt: Sequence[int], needs_state: bool, owner: Owner = NOBODY) -> Hit:
        """The longest usable prefix of `prompt`. Its last token is excluded, unless its logits are kept.

        With `needs_state` a prefix is usable only at a state; otherwise anywhere.
        """
        root = self.root_of(owner.salt)
        whole, partial = self._match(prompt, len(prompt) - 1, root)
        best = max(partial, key=lambda x: x[1], default=(root, 0))
        base = len(whole) * self.page_size
        n_match = base + best[1]
        tail = best[0] if best[1] else None
        last = tail or (whole[-1] if whole else root)
        if needs_state and (start := self._start(prompt, root)) is not None:
            return start
        n_own, parts = _own_match(prompt[:-1], whole, root, owner.client)
        parts = parts and n_own < len(prompt) - 1
        if not needs_state:
            break_at = n_own if parts else -1
            return Hit(n_match, n_match, tuple(whole), tail, last.states.get(n_match), break_at)
        found = [s for node, m in partial for s in node.states.values() if s.n_past <= base + m]
        for node in reversed(whole):
            if found:
                break
            found = list(node.states.values())
        state = max(found, key=lambda s: s.n_past, default=None)
        n = 0 if state is None else state.n_past
        break_at = n_own if parts or n < n_own else -1
        n_whole, rest = divmod(n, self.page_size)
        tail = state.node if state is not None and rest else None
        return Hit(n, n_match, tuple(whole[:n_whole]), tail, state, break_at)

    def _start(self, prompt: Sequence[int], root: Node) -> Hit | None:
        """The whole prompt, if the logits of its last token are kept."""
        n, (whole, partial) = len(prompt), self._match(prompt, len(prompt), root)
        n_whole, rest = divmod(n, self.page_size)
        if len(whole) != n_whole:
            return None
        near = [node for node, m in partial if m == rest] if rest else whole[-1:]
        found = next((s for node in near if (s := node.states.get(n)) is not None and s.is_start), None)
        return None if found is None else Hit(n, n, tuple(whole), found.node if rest else None, found)

    def _match(
        self, tokens: Sequence[int], n: int, root: Node
    ) -> tuple[list[Node], list[tuple[Node, int]]]:
        """Nodes whose whole pages begin tokens[:n], and nodes that match in part, with their number of tokens."""
        node, at = root, 0
        whole: list[Node] = []
        while at < n:
            block = tuple(tokens[at : min(at + self.page_size, n)])
            near = node.children.get(block[0], [])
            same = next((c for c in near if c.tokens == block and len(block) == self.page_size), None)
            if same is None:
                return whole, [(c, common_prefix(c.tokens, block)) for c in near]
            whole.append(same)
            node, at = same, at + self.page_size
        return whole, []

    def path(self, tokens: Sequence[int], salt: str = "") -> tuple[list[Node], int]:
        """The nodes that hold the beginning of `tokens`, and the number of tokens found."""
        root = self.root_of(salt)
        whole, partial = self._match(tokens, len(tokens), root)
        last, n = max(partial, key=lambda x: x[1], default=(root, 0))
        return [*whole, last] if n else whole, len(whole) * self.page_size + n

    def known(self, tokens: Sequence[int], salt: str = "") -> Known:
        """How much of `tokens` is filed. Takes time in proportion to it: some 3 us a page."""
        nodes, n = self.path(tokens, salt)
        n_own = 0
        for node in reversed(nodes):
            assert node.parent is not None
            n_own = n - node.start
            if sum(map(len, node.parent.children.values())) > 1:
                break
        return Known(n, n_own)

    # -- holding -------------------------------------------------------------------------------------------------

    def hold(self, node: Node) -> None:
        """A slot reads this page; it holds all pages before it, too."""
        self.n_held += node.refs == 0
        node.refs += 1

    def let_go(self, nodes: Sequence[Node]) -> None:
        """A slot is done with these pages, given in order."""
        for node in reversed(nodes):
            node.refs -= 1
            self.n_held -= node.refs == 0
            self.touch(node)

    def touch(self, node: Node) -> None:
        """Mark as used now."""
        self._clock += 1
        node.used = self._clock
        self._offer(node)

    def _offer(self, node: Node) -> None:
        if node.refs or node.children or node.parent is None:
            return
        if len(self._idle) > 2 * self.n_node + 64:
            self._idle = [(n.used, id(n), n) for n in self.nodes() if not n.refs and not n.children]
            heapq.heapify(self._idle)
        heapq.heappush(self._idle, (node.used, id(node), node))

    # -- filing and giving back ----------------------------------------------------------------------------------

    def add(self, parent: Node, tokens: tuple[int, ...], page: int, by: tuple[int, int]) -> Node:
        """File `page` behind `parent`. If its content is filed already, return that node; the page stays free.

        Shorter pages that `tokens` begins with are merged: their states and clients move to the new node.
        """
        if parent.is_root:
            self._roots[parent.salt] = parent
        near = parent.children.setdefault(tokens[0], [])
        for child in near:
            if child.tokens[: len(tokens)] == tokens:
                return child
        node = Node(page, tokens, parent.end + len(tokens), parent, by)
        shorter = [c for c in near if tokens[: len(c.tokens)] == c.tokens]
        near.append(node)
        for short in shorter:
            for state in short.states.values():
                state.node = node
            node.states |= short.states
            for client, n in short.clients.items():
                node.mark(client, n)
            short.states = {}
            self.remove(short)
        self.n_node += 1
        self.touch(node)
        if self.blocks is not None:
            self.blocks.touch(node)
        return node

    def remove(self, node: Node) -> None:
        """Remove a node with its page and states. No slot holds it, and it has no children."""
        parent = node.parent
        assert parent is not None and not node.refs and not node.children, "a page in use is given back"
        for state in node.states.values():
            self.lose(state)
        node.states = {}  # states refer to their node: the cycle would keep megabytes until the garbage collector runs
        near = parent.children[node.tokens[0]]
        near.remove(node)
        if not near:
            del parent.children[node.tokens[0]]
            if parent.salt and not parent.children:
                del self._roots[parent.salt]
        node.parent = None
        if self.blocks is not None:
            self.blocks.gone(node, parent)
        self.n_node -= 1
        self.give(node.page)
        self._offer(parent)

    def evict(self) -> bool:
        """Remove the least recently used idle page. Returns False if there is none."""
        while self._idle:
            used, _, node = heapq.heappop(self._idle)
            if not node.refs and not node.children and node.parent is not None and node.used == used:
                self.remove(node)
                return True
        return False

    def prune(self, node: Node | None = None) -> None:
        """Remove a node (or all) and its descendants, except held ones."""
        for each in reversed(list(self.nodes(node))):  # children before their parents
            if not each.refs and not each.children:
                self.remove(each)

    def check(self) -> None:
        """Check the tree's own invariants."""
        n_node = n_held = 0
        for node in self.nodes():
            n_node, n_held = n_node + 1, n_held + (node.refs > 0)
            assert node.parent is not None and node.end == node.parent.end + len(node.tokens)
            assert 0 < len(node.tokens) <= self.page_size and node.start % self.page_size == 0
            assert not node.children or len(node.tokens) == self.page_size, (
                "something follows a page that is not full"
            )
            assert node.refs <= node.parent.refs or node.parent.is_root, (
                "a page is held without those before it"
            )
            for n_past, state in node.states.items():
                assert (
                    state.node is node and state.n_past == n_past and node.start < n_past <= node.end
                ), f"a state of {n_past} tokens hangs at a page of {node.start}..{node.end}"
            for first, near in node.children.items():
                assert near and all(c.tokens[0] == first for c in near)
                for a in near:
                    assert not any(a is not b and b.tokens[: len(a.tokens)] == a.tokens for b in near), (
                        "filed twice"
                    )
            assert (
                node.parent.clients.keys() >= node.clients.keys()
                or node.parent.is_root
                or (len(node.parent.clients) == MOST_CLIENTS)
            ), "a client has a page without those before it"
        assert (n_node, n_held) == (self.n_node, self.n_held), "pages are miscounted"
        assert all(root.children for salt, root in self._roots.items() if salt), "an empty root is kept"
