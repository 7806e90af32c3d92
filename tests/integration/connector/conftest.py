"""Engines without vLLM: real paged arrays, real save and load threads, a real pool."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

np = pytest.importorskip("numpy")

from kvrelay.connector.codec import find_codec  # noqa: E402 - after the skip
from kvrelay.connector.core.geometry import KvGeometry, RankShare, rank_share  # noqa: E402
from kvrelay.connector.core.orders import LoadOrder, SaveOrder, StepOrders  # noqa: E402
from kvrelay.connector.core.tables import Blocks, Tables  # noqa: E402
from kvrelay.connector.counters import Counters  # noqa: E402
from kvrelay.connector.layout import BlockKind, PagedLayer, Run  # noqa: E402
from kvrelay.connector.link import PoolLink  # noqa: E402
from kvrelay.connector.loader import Loader  # noqa: E402
from kvrelay.connector.rank_kv import RankKv  # noqa: E402
from kvrelay.connector.saver import Saver  # noqa: E402
from kvrelay.connector.staging import Staging  # noqa: E402
from kvrelay.connector.worker_side import WorkerSide  # noqa: E402
from kvrelay.identity.core.chunks import Chunk, chain_seed, prompt_chunks  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvrelay.connector.codec import Codec
    from kvrelay.connector.core.orders import LoadOutcome
    from kvrelay.connector.core.rank import Results
    from kvrelay.connector.rank_kv import Layer

GEOMETRY = KvGeometry.dense(layers=4, kv_heads=4, head_size=32, item_bytes=4)
(GROUP,) = GEOMETRY.groups
LATENT = replace(GROUP, heads=1, head_size=72, planes=1)
CHUNK = 48
WAIT_S = 20.0


class Rank:
    """One worker: pages of random bits, and the connector's worker side on them."""

    def __init__(
        self,
        address: str,
        *,
        share: RankShare | None = None,
        block_tokens: int = 32,
        blocks: int = 24,
        isa: str = "vec",
        name: str = "P",
        load_timeout_s: float = 10.0,
        hold_s: float = 10.0,
        connected: bool = True,
        staging_bytes: int = 64 << 20,
        native: bool = False,
        latent: bool = False,
        copies: Any = None,
        publish_bytes: int = 1,
    ) -> None:
        """``native``: in native packing. ``latent``: of a model with MLA. ``copies``: of its device.

        ``publish_bytes``: as `Saver` takes it; unless told otherwise each layer is published by itself.
        """
        group = LATENT if latent else GROUP
        self.share = share or rank_share(group, tp_rank=0, tp_size=1, first_layer=0, layers=GEOMETRY.layers)
        self.block_tokens = block_tokens
        backend, isa = ("CPU_MLA", "") if latent else ("CPU_ATTN", isa)
        codec = find_codec(backend, isa, block_tokens=block_tokens, head_size=group.head_size, item_bytes=4)
        shape = (blocks, self.share.heads, group.planes * block_tokens * group.head_size)
        self.random = np.random.default_rng(len(name) + blocks)
        self.pages = [self.random.integers(0, 1 << 32, shape, dtype="u4") for _ in range(self.share.layers)]
        self.layers = [
            PagedLayer(pages, codec, block_tokens=block_tokens, head_size=group.head_size, native=native)
            for pages in self.pages
        ]
        layers: list[Layer] = [*self.layers]
        if copies is not None:
            layers = on_device(self.pages, codec, block_tokens, group.head_size, copies, native=native)
        self.counters = Counters()
        self.links = [
            PoolLink(address, name=f"{name} {what}", token=None, map_arena=True)
            for what in ("saves", "loads", "synchronous loads")
        ]
        for link in self.links:
            link.start()
            if connected:
                assert link._known.wait(WAIT_S)
        geometry = KvGeometry((replace(group, block_tokens=block_tokens if native else 1),))
        kv = RankKv.dense(geometry, self.share, layers)
        self.side = WorkerSide(
            layers=len(self.layers),
            tables=Tables.one(block_tokens),
            hold_s=hold_s,
            announce_wait_s=5.0,
            step_begins=copies.step_begins if copies is not None else lambda: None,
        )
        self.saver = Saver(
            kv=kv,
            group=name,
            link=self.links[0],
            counters=self.counters,
            name=f"{name} saves",
            publish_bytes=publish_bytes,
        )
        self.staging = Staging(staging_bytes)
        self.loader, sync_loader = (
            Loader(
                kv=kv,
                links=[link],
                timeout_s=load_timeout_s,
                cancelled=self.side.is_cancelled,
                ended=self.side.load_ended,
                counters=self.counters,
                name=f"{name} loads",
                staging=self.staging,
                stage_ended=self.side.stage_ended,
                unstaged=self.side.is_unstaged,
            )
            for link in self.links[1:]
        )
        self.side.start(self.saver, self.loader, sync_loader)

    def begin(self, **orders: Any) -> None:
        """A step's forward pass starts."""
        step = StepOrders(**orders)
        self.side.before_step(step)
        self.side.begin_step(step)

    def announce(self, **orders: Any) -> None:
        """A step's forward pass starts, and the pool has heard of its saves."""
        self.begin(**orders)
        assert self.side._step is not None
        assert self.side._step.announced.wait(10.0)

    def step(self, **orders: Any) -> None:
        """A whole step."""
        self.begin(**orders)
        for layer in range(len(self.layers)):
            self.side.layer_computed(layer)
        self.side.end_step()

    def save_order(
        self, chunks: Sequence[Chunk], blocks: Sequence[int], *, request: str = "r", ticket: str | None = None
    ) -> SaveOrder:
        """Save these consecutive chunks of a request whose block table is ``blocks``."""
        first = chunks[0].start // self.block_tokens
        last = -(-chunks[-1].end // self.block_tokens)
        stretch = Blocks(tuple(blocks[first:last]), first)
        return SaveOrder(request, tuple(chunks), (stretch,), (chunks[0].start,), ticket)

    def load_order(
        self, chunks: Sequence[Chunk], blocks: Sequence[int], start: int = 0, request: str = "r"
    ) -> LoadOrder:
        """Load a prompt from token ``start`` on."""
        wanted = tuple(chunk for chunk in chunks if chunk.end > start)
        first, end = start // self.block_tokens, chunks[-1].end
        stretch = Blocks(tuple(blocks[first : -(-end // self.block_tokens)]), first)
        return LoadOrder(request, wanted, (stretch,), (start,), start, end)

    def tokens(self, blocks: Sequence[int], count: int, start: int = 0) -> list[Any]:
        """What the blocks hold of tokens ``[start, count)``, a layer each: ``[head][K, V][token][dim]``."""
        return [layer.read(Run(blocks, 0, count))[:, :, start:] for layer in self.layers]

    def until_holds(self, layer: int, blocks: Sequence[int], wanted: Any) -> None:
        """Wait until the first tokens' ``layer`` in the blocks is ``wanted``, ``[head][K, V][token][dim]``."""
        run = Run(blocks, 0, wanted.shape[2])
        deadline = time.monotonic() + WAIT_S
        while not np.array_equal(self.layers[layer].read(run), wanted):
            assert time.monotonic() < deadline, f"layer {layer} has not arrived"
            time.sleep(0.001)

    def results(self, done: Callable[[Results], bool]) -> Results:
        """Step until the reports, added up, satisfy ``done``."""
        total = self.side.take_results()
        deadline = time.monotonic() + WAIT_S
        while not done(total):
            assert time.monotonic() < deadline, total
            with self.side._changed:
                self.side._changed.wait(0.05)
            more = self.side.take_results()
            total.finished_sending |= more.finished_sending
            total.finished_recving |= more.finished_recving
            total.invalid_block_ids |= more.invalid_block_ids
            total.report = total.report.join(more.report)
        return total

    def saved(self, count: int, request: str = "r") -> Results:
        """Wait until ``count`` save orders have ended."""
        return self.results(lambda results: results.report.saves_ended.get(request, 0) == count)

    def staged(self, number: int = 1) -> LoadOutcome:
        """Wait until an order is staged, or cannot be."""
        return self.results(lambda results: number in results.report.stages).report.stages[number]

    def loaded(self, request: str = "r") -> Results:
        """Wait until a load has ended."""
        return self.results(lambda results: request in results.finished_recving)

    def close(self) -> None:
        """Stop the threads."""
        self.side.close()


def on_device(
    pages: Sequence[Any], codec: Codec, block_tokens: int, head_size: int, copies: Any, *, native: bool
) -> list[Layer]:
    """These pages as layers of a device's."""
    import torch

    from kvrelay.connector.device import DeviceLayer, Mirrors

    blocks, heads, items = pages[0].shape
    kind = BlockKind(
        codec,
        heads,
        block_tokens,
        items // block_tokens,
        4,
        block_tokens=block_tokens,
        head_size=head_size,
        native=native,
    )
    mirrors = Mirrors(kind, copies)
    shape = (blocks, heads, block_tokens, items // block_tokens)
    return [DeviceLayer(mirrors, torch.from_numpy(one.view("i4")).view(shape)) for one in pages]


def chunks_of(tokens: int, prompt: int = 0) -> tuple[Chunk, ...]:
    """Chunks of the ``prompt``-th prompt of that length."""
    return prompt_chunks(chain_seed("namespace"), [prompt * 10_000 + at for at in range(tokens)], CHUNK)


def shares_of(tp: int, pp: int = 1) -> list[RankShare]:
    """The shares of all ranks of an engine."""
    count = GEOMETRY.layers // pp
    return [
        rank_share(GROUP, tp_rank=rank, tp_size=tp, first_layer=stage * count, layers=count)
        for stage in range(pp)
        for rank in range(tp)
    ]


@pytest.fixture
def make_rank() -> Iterator[Callable[..., Rank]]:
    """``make_rank(address, **options)``: a `Rank`, stopped after the test."""
    others = set(threading.enumerate())
    with ExitStack() as ranks:

        def make(address: str, **options: Any) -> Rank:
            rank = Rank(address, **options)
            ranks.callback(rank.close)
            return rank

        yield make
    threads = set(threading.enumerate()) - others
    names = [thread.name for thread in threads if thread.name.endswith(("saves", "loads", "loads 0"))]
    assert not names, "threads were left behind"


@pytest.fixture
def make_chunks() -> Callable[..., tuple[Chunk, ...]]:
    """``make_chunks(tokens, prompt=0)``."""
    return chunks_of


@pytest.fixture
def make_shares() -> Callable[..., list[RankShare]]:
    """``make_shares(tp, pp)``."""
    return shares_of
