"""Prefixes of one block size, and who holds them.

A node is a prefix that ends with a block, named by the XXH64 hash of *all* its tokens. So a prompt's prefix of any
length is looked up with one hash of its bytes, which runs at memory speed, and no walk from the first block is needed.
To know how far a source's blocks reach without a gap, each node keeps two sets of sources, as bits of an integer:

* ``held``: those that hold the node's own block;
* ``reach``: those that hold it and every block before it.

Along a prompt ``reach`` can only shrink, so the places where it does are found by halving: the whole answer, for any
number of sources, costs a dozen hashes mostly, and a walk along the nodes at worst. Keeping ``reach`` right costs what
it changes: engines drop the ends of prefixes first, where nothing lies behind.

64 bits do not keep an attacker from making two prompts collide; the seed is there for that. A collision costs a worse
choice of engine, never a wrong answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xxhash import xxh64

if TYPE_CHECKING:
    from collections.abc import Iterator

WALK = 32
"""Over so many blocks a walk from child to parent is cheaper than halving."""
ALL = -1
"""Every source: the empty prefix is held by all."""


class Node:
    """A prefix. Children are a doubly linked list: most have one, the empty prefix may have many thousands."""

    __slots__ = ("first", "held", "key", "next", "parent", "prev", "reach", "state")

    def __init__(self, key: int, parent: Node | None, state: xxh64) -> None:
        """Nobody holds it yet."""
        self.key = key
        self.parent = parent
        self.state = state
        """The hash so far, to go on from."""
        self.held = 0
        self.reach = 0
        self.first: Node | None = None
        self.next: Node | None = None
        self.prev: Node | None = None

    def children(self) -> Iterator[Node]:
        """In no particular order."""
        child = self.first
        while child is not None:
            yield child
            child = child.next


class Root(Node):
    """The empty prefix of a scope: all sources hold it."""

    __slots__ = ("scope",)

    def __init__(self, scope: bytes, state: xxh64) -> None:
        """``scope``: what it is called."""
        super().__init__(-1, None, state)
        self.scope = scope
        self.held = self.reach = ALL


class Table:
    """The prefixes of one block size, under any number of scopes (adapter and salt)."""

    __slots__ = ("_block_bytes", "_roots", "_seed", "nodes")

    def __init__(self, block_tokens: int, seed: int) -> None:
        """``seed``: of all hashes."""
        self._block_bytes = 4 * block_tokens
        self._seed = seed
        self._roots: dict[bytes, Root] = {}
        self.nodes: dict[int, Node] = {}

    def root(self, scope: bytes) -> Root:
        """The empty prefix of a scope; made when first asked for, gone with the last prefix."""
        root = self._roots.get(scope)
        if root is None:
            state = xxh64(len(scope).to_bytes(8, "little") + scope, seed=self._seed)
            root = self._roots[scope] = Root(scope, state)
        return root

    def find(self, parent: Node, block: bytes | memoryview) -> tuple[int, xxh64, Node | None]:
        """The prefix that ``block`` (packed tokens) makes of ``parent``: its name, hash, and node if there is one."""
        state = parent.state.copy()
        state.update(block)
        key = state.intdigest()
        return key, state, self.nodes.get(key)

    def add(self, key: int, parent: Node, state: xxh64) -> Node:
        """A node for a prefix that has none."""
        node = self.nodes[key] = Node(key, parent, state)
        if (sibling := parent.first) is not None:
            node.next, sibling.prev = sibling, node
        parent.first = node
        return node

    def hold(self, node: Node, bit: int) -> None:
        """The source ``bit`` holds the node's block now."""
        if node.held & bit:
            return
        node.held |= bit
        parent = node.parent
        if parent is None or not parent.reach & bit:
            return
        reached = [node]
        while reached:
            one = reached.pop()
            one.reach |= bit
            reached += [child for child in one.children() if child.held & bit]

    def drop(self, node: Node, bit: int) -> None:
        """The source ``bit`` holds the node's block no longer. Nodes that nobody needs any more go."""
        node.held &= ~bit
        if node.reach & bit:
            lost = [node]
            while lost:
                one = lost.pop()
                one.reach &= ~bit
                lost += [child for child in one.children() if child.reach & bit]
        self.prune(node)

    def prune(self, node: Node) -> None:
        """Remove a node that nobody holds and nothing follows, and those before it of which that is true then."""
        while node.first is None and (parent := node.parent) is not None and not node.held:
            if self.nodes.get(node.key) is not node:
                return
            del self.nodes[node.key]
            if node.prev is None:
                parent.first = node.next
            else:
                node.prev.next = node.next
            if node.next is not None:
                node.next.prev = node.prev
            node = parent
        if isinstance(node, Root) and node.first is None:
            self._roots.pop(node.scope, None)

    def reaches(self, scope: bytes, packed: memoryview, num_blocks: int) -> list[tuple[int, int]]:
        """How far each source's blocks reach into a prompt.

        ``packed``: its tokens; ``num_blocks``: how many of its blocks count. Answers pairs of sources and the number of
        blocks that they all reach; sources that reach none are in no pair.
        """
        root = self._roots.get(scope)
        if root is None or num_blocks < 1:
            return []
        nodes, size = self.nodes, self._block_bytes
        state = root.state.copy()
        state.update(packed[:size])
        begin = nodes.get(state.intdigest())
        if begin is None or not begin.reach:
            return []
        low, first, high, last, so_far = 1, begin, num_blocks + 1, begin, state
        while high - low > 1:  # the last block that anybody reaches
            middle = (low + high) // 2
            further = so_far.copy()
            further.update(packed[low * size : middle * size])
            node = nodes.get(further.intdigest())
            if node is not None and node.reach:
                low, last, so_far = middle, node, further
            else:
                high = middle
        found = [(last.reach, low)]
        parts = [(1, first, state, low, last)]
        while parts:
            low, first, state, high, last = parts.pop()
            while high - low > WALK and first.reach != last.reach:
                middle = (low + high) // 2
                further = state.copy()
                further.update(packed[low * size : middle * size])
                node = nodes.get(further.intdigest())
                if node is None:  # two prefixes of one name
                    break
                parts.append((middle, node, further, high, last))
                high, last = middle, node
            if first.reach != last.reach:
                found += _shrinks(last, high, low)
        return found

    def check_integrity(self) -> None:
        """Assert that links, sets and names agree."""
        seen = 0
        for node in [*self._roots.values(), *self.nodes.values()]:
            previous: Node | None = None
            for child in node.children():
                seen += 1
                assert child.parent is node, f"{child.key:x}: another's child"
                assert child.prev is previous, f"{child.key:x}: badly linked"
                assert self.nodes.get(child.key) is child, f"{child.key:x}: not known by its name"
                assert child.reach == child.held & node.reach, f"{child.key:x}: {child.reach:b} of {child.held:b}"
                assert child.held or child.first is not None, f"{child.key:x}: there for nobody"
                previous = child
            assert node.parent is not None or node.first is not None, f"an empty scope: {node.key:x}"
        assert seen == len(self.nodes), f"{len(self.nodes)} nodes, {seen} of them linked"


def _shrinks(node: Node, at: int, low: int) -> Iterator[tuple[int, int]]:
    """Who gets no farther than a block from number ``low`` on, and before ``node``, number ``at``; and which block."""
    while at > low and (before := node.parent) is not None:
        at -= 1
        if before.reach != node.reach:
            yield before.reach & ~node.reach, at
        node = before
