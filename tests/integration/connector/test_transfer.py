"""KV from one engine's pages to another's, through a real pool, and everything that can go wrong on the way."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from msgspec.structs import replace

from kvrelay.client.blocking import PoolClient
from kvrelay.connector.core.geometry import RankShare
from kvrelay.connector.saves import Job
from kvrelay.testing.certificates import Authority
from kvrelay.testing.pool import PoolProcess, PoolThread
from kvrelay.transport.certificates import server_context
from kvrelay.types import Reason
from kvrelay.wire import limits

np = pytest.importorskip("numpy")

if TYPE_CHECKING:
    from pathlib import Path

Make: TypeAlias = Callable[..., Any]

P_BLOCKS = [7, 3, 4, 5, 20, 1, 0, 9, 11, 12]
D_BLOCKS = [2, 13, 6, 21, 22, 23, 1, 8, 17, 18]
TOKENS = 200
WAIT_S = 10.0


def same(one: list[Any], other: list[Any]) -> bool:
    return all(np.array_equal(mine, yours) for mine, yours in zip(one, other, strict=True))


def waiting(pool: PoolThread) -> None:
    """A reader has found what is written and waits for the rest."""
    deadline = time.monotonic() + WAIT_S
    with PoolClient.connect(pool.unix, name="stat", map_arena=False) as client:
        while not client.stat()["waiting"]:
            assert time.monotonic() < deadline, "nobody waits"


def stat(pool: PoolThread) -> dict[str, int]:
    with PoolClient.connect(pool.unix, name="stat", map_arena=False) as client:
        return client.stat()


def until_waited_for(pool: PoolThread) -> None:
    """D has found the prompt, and waits for layers of it."""
    deadline = time.monotonic() + 10.0
    while not stat(pool)["waiting"]:
        assert time.monotonic() < deadline, "D never waited"


@pytest.mark.parametrize("tp", [(2, 1), (1, 2)])
def test_a_latent_is_written_once_and_arrives_on_every_rank(
    address: str, make_rank: Make, make_chunks: Make, tp: tuple[int, int]
) -> None:
    chunks = make_chunks(TOKENS)

    def ranks(name: str, count: int, block_tokens: int) -> list[Any]:
        shares = [RankShare(0, 4, 0, 1, writes=rank == 0) for rank in range(count)]
        return [make_rank(address, share=share, name=name, block_tokens=block_tokens, latent=True) for share in shares]

    p, d = ranks("P", tp[0], 16), ranks("D", tp[1], 32)
    blocks = list(range(24))[: -(-TOKENS // 16)]
    for rank in p:
        rank.step(saves=(rank.save_order(chunks, blocks),))
    for rank in d:
        rank.step(loads=(rank.load_order(chunks, D_BLOCKS),))
        outcome = rank.loaded().report.loads["r"]
        assert (outcome.valid_end, outcome.bytes) == (TOKENS, TOKENS * 4 * 72 * 4)
        assert same(rank.tokens(D_BLOCKS, TOKENS), p[0].tokens(blocks, TOKENS))
    assert [rank.counters.take().get("saved_bytes", 0) for rank in p[1:]] == [0] * (tp[0] - 1)


@pytest.mark.parametrize("isa", ["vec", "amx"])
@pytest.mark.parametrize("block_tokens", [32, 64])
def test_a_prompt_arrives_whole_whatever_the_block_size_and_packing(
    address: str, make_rank: Make, make_chunks: Make, isa: str, block_tokens: int
) -> None:
    chunks = make_chunks(TOKENS)
    p = make_rank(address)
    d = make_rank(address, isa=isa, block_tokens=block_tokens, name="D")
    p.step(saves=(p.save_order(chunks, P_BLOCKS),))
    d.step(loads=(d.load_order(chunks, D_BLOCKS),))
    results = d.loaded()
    assert results.invalid_block_ids == set()
    outcome = results.report.loads["r"]
    assert (outcome.valid_end, outcome.reason) == (TOKENS, Reason.NONE)
    assert outcome.bytes == TOKENS * 4 * 4 * 2 * 32 * 4
    assert same(d.tokens(D_BLOCKS, TOKENS), p.tokens(P_BLOCKS, TOKENS))


@pytest.mark.parametrize("isa", ["vec", "amx"])
@pytest.mark.parametrize("shapes", [((1, 1), (1, 1)), ((2, 1), (1, 2))])
@pytest.mark.parametrize("start", [0, 32])
def test_a_prompt_arrives_whole_in_native_packing_between_engines_of_equal_blocks(
    pool: PoolThread, make_rank: Make, make_chunks: Make, make_shares: Make, isa: str, shapes: Any, start: int
) -> None:
    from kvrelay.connector.layout import Run

    chunks = make_chunks(TOKENS)
    block = chunks[0].tokens if isa == "vec" else chunks[0].tokens // 3
    p_ranks, d_ranks = (
        [
            make_rank(address, share=share, isa=isa, block_tokens=block, blocks=60, native=True, name=name)
            for share in make_shares(*shape)
        ]
        for address, shape, name in zip((pool.unix, pool.tcp), shapes, "PD", strict=True)
    )
    p_blocks, d_blocks = [list(range(at, at + 26)) for at in (3, 30)]
    whole = np.random.default_rng(5).integers(0, 1 << 32, (4, 4, 2, TOKENS, 32), dtype="u4")
    start = start // block * block
    for rank in p_ranks:
        heads = slice(rank.share.first_head, rank.share.first_head + rank.share.heads)
        for at, layer in enumerate(rank.layers):
            layer.write(Run(p_blocks, 0, TOKENS), whole[rank.share.first_layer + at, heads])
        rank.step(saves=(rank.save_order(chunks, p_blocks),))
    before = [[pages.copy() for pages in rank.pages] for rank in d_ranks]
    for rank in d_ranks:
        rank.step(loads=(rank.load_order(chunks, d_blocks, start=start),))
    for rank, old in zip(d_ranks, before, strict=True):
        assert rank.loaded().report.loads["r"].reason is Reason.NONE
        heads = slice(rank.share.first_head, rank.share.first_head + rank.share.heads)
        for at, layer in enumerate(rank.layers):
            held = layer.read(Run(d_blocks, 0, TOKENS))[:, :, start:]
            assert np.array_equal(held, whole[rank.share.first_layer + at, heads][:, :, start:])
            written = (TOKENS - start) * 2 * 32 * rank.share.heads
            assert written * 0.99 < (rank.pages[at] != old[at]).sum() <= written


@pytest.mark.parametrize(
    ("p_shape", "d_shape"), [((1, 1), (2, 1)), ((2, 1), (1, 1)), ((4, 1), (2, 2)), ((8, 1), (1, 2))]
)
def test_engines_of_different_parallelism_exchange_kv(
    pool: PoolThread,
    make_rank: Make,
    make_chunks: Make,
    make_shares: Make,
    p_shape: tuple[int, int],
    d_shape: tuple[int, int],
) -> None:
    chunks = make_chunks(TOKENS)
    whole = np.random.default_rng(5).integers(0, 1 << 32, (4, 4, 2, TOKENS, 32), dtype="u4")
    from kvrelay.connector.layout import Run

    p_ranks = [make_rank(pool.unix, share=share, name="P") for share in make_shares(*p_shape)]
    d_ranks = [make_rank(pool.tcp, share=share, name="D") for share in make_shares(*d_shape)]

    def part(rank: Any, layer: int) -> Any:
        heads = slice(rank.share.first_head, rank.share.first_head + rank.share.heads)
        return whole[rank.share.first_layer + layer, heads]

    for rank in p_ranks:
        for at, layer in enumerate(rank.layers):
            layer.write(Run(P_BLOCKS, 0, TOKENS), part(rank, at))
        rank.step(saves=(rank.save_order(chunks, P_BLOCKS),))
    for rank in d_ranks:
        rank.step(loads=(rank.load_order(chunks, D_BLOCKS),))
    for rank in d_ranks:
        assert rank.loaded().report.loads["r"].reason is Reason.NONE
        assert same(rank.tokens(D_BLOCKS, TOKENS), [part(rank, at) for at in range(len(rank.layers))])


@pytest.mark.parametrize("start", [32, 64, 128, 192])
def test_a_load_that_begins_inside_a_chunk_touches_no_slot_but_its_own(
    address: str, make_rank: Make, make_chunks: Make, start: int
) -> None:
    chunks = make_chunks(TOKENS)
    p, d = make_rank(address), make_rank(address, name="D")
    before = [pages.copy() for pages in d.pages]
    p.step(saves=(p.save_order(chunks, P_BLOCKS),))
    d.step(loads=(d.load_order(chunks, D_BLOCKS, start=start),))
    d.loaded()
    assert same(d.tokens(D_BLOCKS, TOKENS, start), p.tokens(P_BLOCKS, TOKENS, start))
    written = (TOKENS - start) * 4 * 2 * 32
    for pages, old in zip(d.pages, before, strict=True):
        assert (pages != old).sum() <= written
        untouched = [block for block in range(24) if block not in D_BLOCKS[start // 32 : 7]]
        assert np.array_equal(pages[untouched], old[untouched])


def test_a_prompt_arrives_whole_over_tls(tmp_path: Path, make_rank: Make, make_chunks: Make) -> None:
    authority = Authority(tmp_path)
    pair = authority.server("127.0.0.1")
    chunks = make_chunks(TOKENS)
    with PoolThread(tmp_path, tls=server_context(pair.cert, pair.key)) as pool:
        address = f"{pool.tcp}?ca={authority.ca}"
        assert address.startswith("tls:")
        p, d = make_rank(address), make_rank(address, name="D")
        p.step(saves=(p.save_order(chunks, P_BLOCKS),))
        d.step(loads=(d.load_order(chunks, D_BLOCKS),))
        assert d.loaded().report.loads["r"].valid_end == TOKENS
        assert same(d.tokens(D_BLOCKS, TOKENS), p.tokens(P_BLOCKS, TOKENS))
        for rank in (p, d):
            rank.close()


def test_a_prompt_prefilled_in_parts_arrives_whole(address: str, make_rank: Make, make_chunks: Make) -> None:
    chunks = make_chunks(TOKENS)
    p, d = make_rank(address), make_rank(address, name="D")
    for part in (chunks[:1], chunks[1:3], chunks[3:]):
        p.step(saves=(p.save_order(part, P_BLOCKS),))
    d.step(loads=(d.load_order(chunks, D_BLOCKS),))
    d.loaded()
    assert same(d.tokens(D_BLOCKS, TOKENS), p.tokens(P_BLOCKS, TOKENS))


def test_a_reader_takes_each_layer_as_soon_as_it_is_saved(pool: PoolThread, make_rank: Make, make_chunks: Make) -> None:
    """1. P announces. 2. D's load begins and waits. 3. P's layers come one by one: D has each before the next.

    4. D has all with the last.
    """
    chunks = make_chunks(TOKENS)
    p, d = make_rank(pool.unix), make_rank(pool.unix, name="D")
    p.announce(saves=(p.save_order(chunks, P_BLOCKS),))
    d.step(loads=(d.load_order(chunks, D_BLOCKS),))
    for layer in range(3):
        p.side.layer_computed(layer)
        d.until_holds(layer, D_BLOCKS, p.tokens(P_BLOCKS, TOKENS)[layer])
    assert d.side.take_results().finished_recving == set()
    p.side.layer_computed(3)
    p.side.end_step()
    assert d.loaded().report.loads["r"].valid_end == TOKENS
    assert same(d.tokens(D_BLOCKS, TOKENS), p.tokens(P_BLOCKS, TOKENS))


LAYER_BYTES = TOKENS * 4 * 2 * 32 * 4


@pytest.mark.parametrize("publish_bytes", [2 * LAYER_BYTES, 1 << 30])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (2, 2)])
def test_layers_published_together_arrive_whole_from_ranks_of_any_shape(
    address: str, make_rank: Make, make_chunks: Make, make_shares: Make, shape: tuple[int, int], publish_bytes: int
) -> None:
    chunks = make_chunks(TOKENS)
    ranks = [make_rank(address, share=share, name="P", publish_bytes=publish_bytes) for share in make_shares(*shape)]
    d = make_rank(address, name="D")
    for rank in ranks:
        rank.step(saves=(rank.save_order(chunks, P_BLOCKS),))
    d.step(loads=(d.load_order(chunks, D_BLOCKS),))
    assert d.loaded().report.loads["r"].valid_end == TOKENS
    arrived = d.tokens(D_BLOCKS, TOKENS)
    for rank in ranks:
        heads = slice(rank.share.first_head, rank.share.first_head + rank.share.heads)
        layers = slice(rank.share.first_layer, rank.share.first_layer + rank.share.layers)
        assert same([layer[heads] for layer in arrived[layers]], rank.tokens(P_BLOCKS, TOKENS))
        assert rank.saved(1).report.saves_ended == {"r": 1}


@pytest.mark.parametrize(("computed", "ready"), [(1, 0), (2, 2), (3, 2), (4, 4)])
def test_layers_wait_until_they_are_many_bytes_or_the_last_is_computed(
    pool: PoolThread, make_rank: Make, make_chunks: Make, computed: int, ready: int
) -> None:
    chunks = make_chunks(TOKENS)
    p = make_rank(pool.unix, publish_bytes=2 * LAYER_BYTES)
    p.announce(saves=(p.save_order(chunks, P_BLOCKS),))
    for layer in range(computed):
        p.side.layer_computed(layer)
    with PoolClient.connect(pool.unix, name="looker", map_arena=False) as client:
        found = client.match_prefix([chunk.key for chunk in chunks], lease_s=WAIT_S)
        assert len(found) == len(chunks)
        if ready:
            assert client.wait(found, ready, timeout_s=WAIT_S) == ready
        else:
            assert [view.ready for view in found.views] == [0] * len(chunks)


def test_kv_that_is_all_there_when_it_is_ordered_saved_is_published_in_messages_of_no_more_bytes(
    pool: PoolThread, make_rank: Make, make_chunks: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a request that ended while it was not known whether it may be saved: many chunks, all layers at once."""
    chunks = make_chunks(TOKENS)
    p = make_rank(pool.tcp, publish_bytes=2 * LAYER_BYTES)
    monkeypatch.setattr(limits, "MAX_PAYLOAD_BYTES", 2 * LAYER_BYTES)
    p.begin(saves=(replace(p.save_order(chunks, P_BLOCKS), complete=True),))
    p.saved(1)
    assert p.counters.take().get("saved_tokens") == TOKENS


def test_a_save_cancelled_while_its_layers_wait_reads_no_block_and_readers_are_told(
    pool: PoolThread, make_rank: Make, make_chunks: Make
) -> None:
    """1. P announces; D waits. 2. All layers but one wait. 3. The blocks are taken back. 4. The last is computed."""
    chunks = make_chunks(TOKENS)
    p, d = make_rank(pool.unix, publish_bytes=1 << 30), make_rank(pool.unix, name="D")
    p.announce(saves=(p.save_order(chunks, P_BLOCKS),))
    d.step(loads=(d.load_order(chunks, D_BLOCKS),))
    until_waited_for(pool)
    for layer in range(3):
        p.side.layer_computed(layer)
    p.saver.cancel(list(p.side._jobs["r"]))
    p.side.layer_computed(3)
    p.side.end_step()
    p.saved(1)
    outcome = d.loaded().report.loads["r"]
    assert (outcome.valid_end, outcome.reason) == (0, Reason.WRITER_LOST)
    assert stat(pool)["objects"] == 0
    assert "saved_bytes" not in p.counters.take()


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_a_forward_pass_broken_off_saves_nothing_and_readers_are_told(
    pool: PoolThread, make_rank: Make, make_chunks: Make, layers: int
) -> None:
    """1. P announces. 2. D waits. 3. P's pass ends in the middle, as when its process is told to stop. 4. D is told.

    vLLM calls `wait_for_save` in a ``finally``: the blocks of the layers not computed hold anything.
    """
    chunks = make_chunks(TOKENS)
    p, d = make_rank(pool.unix), make_rank(pool.unix, name="D")
    p.announce(saves=(p.save_order(chunks, P_BLOCKS),))
    d.step(loads=(d.load_order(chunks, D_BLOCKS),))
    until_waited_for(pool)
    for layer in range(layers):
        p.side.layer_computed(layer)
    p.side.end_step()
    p.saved(1)
    outcome = d.loaded().report.loads["r"]
    assert (outcome.valid_end, outcome.reason) == (0, Reason.WRITER_LOST)
    assert {name: stat(pool)[name] for name in ("objects", "unsealed", "leases")} == dict.fromkeys(
        ("objects", "unsealed", "leases"), 0
    )


def test_a_pass_that_ends_without_a_word_is_given_up_when_the_next_begins(
    pool: PoolThread, make_rank: Make, make_chunks: Make
) -> None:
    """With speculative decoding vLLM ends a pass elsewhere, and not at all when it fails."""
    p = make_rank(pool.unix)
    p.begin(saves=(p.save_order(make_chunks(TOKENS), P_BLOCKS),))
    p.side.layer_computed(0)
    p.begin()
    p.saved(1)
    p.saver.close()
    assert (stat(pool)["objects"], stat(pool)["unsealed"]) == (0, 0)


def test_a_rank_that_has_written_its_part_leaves_no_bytes_lingering_when_another_gives_up(
    pool: PoolThread, make_rank: Make, make_chunks: Make, make_shares: Make
) -> None:
    """1. One rank writes its heads of all layers. 2. The other's pass is broken off. 3. The object is all gone."""
    first, second = (make_rank(pool.unix, share=share, name="P") for share in make_shares(2))
    order = first.save_order(make_chunks(TOKENS), P_BLOCKS)
    first.begin(saves=(order,))
    second.begin(saves=(order,))
    assert first.side._step.announced.wait(10.0)
    assert second.side._step.announced.wait(10.0)
    for layer in range(4):
        first.side.layer_computed(layer)
    first.side.end_step()
    first.saved(1)
    second.side.end_step()
    second.saved(1)
    second.saver.close()
    assert {name: stat(pool)[name] for name in ("objects", "unsealed", "lingering_bytes")} == dict.fromkeys(
        ("objects", "unsealed", "lingering_bytes"), 0
    )


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("layers", [0, 1])
def test_one_rank_that_dies_ends_what_all_ranks_were_writing_and_readers_are_told(
    pool: PoolThread, make_rank: Make, make_chunks: Make, make_shares: Make, shape: tuple[int, int], layers: int
) -> None:
    """1. All ranks announce; D waits. 2. All but one write their part. 3. The last dies. 4. D is told; others go on."""
    chunks = make_chunks(TOKENS)
    *others, last = (make_rank(pool.unix, share=share, name="P") for share in make_shares(*shape))
    d = make_rank(pool.unix, name="D")
    for rank in (*others, last):
        rank.announce(saves=(rank.save_order(chunks, P_BLOCKS),))
    d.step(loads=(d.load_order(chunks, D_BLOCKS),))
    until_waited_for(pool)
    for rank in others:
        for layer in range(rank.share.layers):
            rank.side.layer_computed(layer)
        rank.side.end_step()
        rank.saved(1)
    for layer in range(layers):
        last.side.layer_computed(layer)
    last.links[0]._client._stream.sock.shutdown(socket.SHUT_RDWR)
    outcome = d.loaded().report.loads["r"]
    assert (outcome.valid_end, outcome.reason) == (0, Reason.WRITER_LOST)
    deadline = time.monotonic() + 10.0
    held = ("objects", "unsealed", "leases", "lingering_bytes")
    while any(left := {name: stat(pool)[name] for name in held}.values()):
        assert time.monotonic() < deadline, left  # the dead one's bytes rest a second
    for rank in others:  # they go on: what they announce next is theirs again
        rank.step(saves=(rank.save_order(make_chunks(TOKENS, 1), P_BLOCKS),))
        assert rank.saved(1).report.saves_ended == {"r": 1}
    last.side.end_step()


@pytest.mark.parametrize("cause", ["no connection", "cancelled"])
def test_a_rank_that_never_announced_its_part_is_not_waited_for(
    pool: PoolThread, make_rank: Make, make_chunks: Make, make_shares: Make, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. One rank announces and writes its heads. 2. D waits for the rest. 3. The other rank never announced: it had no
    connection just then, or its request was preempted before its thread came to it. 4. D is told, long before it would
    give up by itself; nothing is left.
    """
    chunks = make_chunks(TOKENS)
    first, second = (make_rank(pool.unix, share=share, name="P") for share in make_shares(2))
    d = make_rank(pool.unix, name="D", load_timeout_s=600.0)
    first.step(saves=(first.save_order(chunks, P_BLOCKS),))
    first.saved(1)
    d.step(loads=(d.load_order(chunks, D_BLOCKS),))
    until_waited_for(pool)
    link = second.links[0]
    if cause == "no connection":
        with monkeypatch.context() as patch:
            patch.setattr(link, "wait", lambda _: None)
            second.step(saves=(second.save_order(chunks, P_BLOCKS),))
            second.saved(1)
    else:
        monkeypatch.setattr("kvrelay.connector.worker_side.DRAIN_S", 0.0)
        stuck, wait = threading.Event(), link.wait
        monkeypatch.setattr(link, "wait", lambda timeout_s: stuck.wait(10.0) and wait(timeout_s))
        second.begin(saves=(second.save_order(chunks, P_BLOCKS),))
        second.begin(preempted=("r",))
        stuck.set()
        second.saved(1)
    outcome = d.loaded().report.loads["r"]
    assert (outcome.valid_end, outcome.reason) == (0, Reason.WRITER_LOST)
    held = ("objects", "unsealed", "leases", "lingering_bytes")
    assert {name: stat(pool)[name] for name in held} == dict.fromkeys(held, 0)


def test_a_rank_that_was_refused_what_another_was_granted_is_not_waited_for(
    pool: PoolThread, make_rank: Make, make_chunks: Make, make_shares: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A stranger writes the objects. 2. One rank is told that they are busy. 3. The stranger gives up. 4. The other
    rank is granted them, and writes its half. 5. D waits for the other half, and is told that it does not come.
    """
    monkeypatch.setattr("kvrelay.connector.saver.REFUSED_S", 0.0)
    chunks = make_chunks(TOKENS)
    first, second = (make_rank(pool.unix, share=share, name="P") for share in make_shares(2))
    order = first.save_order(chunks, P_BLOCKS)
    link = first.links[0]
    with PoolClient.connect(pool.unix, name="stranger", map_arena=False) as stranger, monkeypatch.context() as patch:
        client = link.client()
        patch.setattr(link, "client", lambda: None)  # so that it does not tell the pool before all are there
        patch.setattr(link, "wait", lambda _: client)
        specs = [spec for _, _, spec in first.saver._objects(Job(order, lambda _: None))]
        given = stranger.announce(specs, group="stranger", lease_s=60.0)
        first.step(saves=(order,))
        first.saved(1)
        stranger.abort([grant.handle for grant in given.grants])
        second.step(saves=(order,))
        second.saved(1)
        d = make_rank(pool.unix, name="D", load_timeout_s=600.0)
        d.step(loads=(d.load_order(chunks, D_BLOCKS),))
        until_waited_for(pool)
    outcome = d.loaded().report.loads["r"]
    assert (outcome.valid_end, outcome.reason) == (0, Reason.WRITER_LOST)
    assert stat(pool)["unsealed"] == 0


def test_a_part_that_came_late_after_all_completes_the_object(
    pool: PoolThread, make_rank: Make, make_chunks: Make, make_shares: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. One rank writes its heads, the other has no connection. 2. The same prompt comes again before there is one."""
    chunks = make_chunks(TOKENS)
    first, second = (make_rank(pool.unix, share=share, name="P") for share in make_shares(2))
    first.step(saves=(first.save_order(chunks, P_BLOCKS),))
    first.saved(1)
    link = second.links[0]
    client = link.client()
    monkeypatch.setattr(link, "client", lambda: None)
    second.step(saves=(second.save_order(chunks, P_BLOCKS),))
    second.saved(1)
    assert len(second.saver._owed) == len(chunks)
    monkeypatch.setattr(link, "wait", lambda _: client)
    for rank in (first, second):
        rank.step(saves=(rank.save_order(chunks, P_BLOCKS),))
        rank.saved(1)
    assert not second.saver._owed
    d = make_rank(pool.unix, name="D")
    d.step(loads=(d.load_order(chunks, D_BLOCKS),))
    assert d.loaded().report.loads["r"].valid_end == TOKENS
    assert stat(pool)["unsealed"] == 0


def test_the_end_of_an_old_connection_does_not_cost_the_new_one(
    pool: PoolThread, make_rank: Make, make_chunks: Make
) -> None:
    """1. A step's objects are announced. 2. The connection breaks and another is made. 3. The step's saves fail."""
    p = make_rank(pool.unix)
    p.begin(saves=(p.save_order(make_chunks(TOKENS), P_BLOCKS),))
    assert p.side._step.announced.wait(10.0)
    link = p.links[0]
    first = link._client
    first._stream.sock.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + 10.0
    while link.client() in (None, first):
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    second = link.client()
    p.side.layer_computed(0)
    p.side.end_step()
    p.saved(1)
    assert link.client() is second
    assert not second.closed


def test_two_requests_of_one_step_write_a_common_chunk_once(
    address: str, pool: PoolThread, make_rank: Make, make_chunks: Make
) -> None:
    p = make_rank(address)
    chunks = make_chunks(100)
    orders = [
        p.save_order(chunks, blocks, request=name, ticket=t)
        for name, blocks, t in (("a", [1, 2, 3, 4], "t"), ("b", [5, 6, 7, 8], None))
    ]
    p.step(saves=tuple(orders))
    p.results(lambda results: set(results.report.saves_ended) == {"a", "b"})
    assert stat(pool)["objects"] == 3
    assert p.counters.take()["saved_tokens"] == 100


def test_what_the_pool_has_is_not_written_again_and_what_it_lost_is(
    pool: PoolThread, make_rank: Make, make_chunks: Make
) -> None:
    p = make_rank(pool.unix)
    chunks = make_chunks(TOKENS)
    order = p.save_order(chunks, P_BLOCKS)
    p.step(saves=(order,))
    p.saved(1)
    with PoolClient.connect(pool.unix, name="thief", map_arena=False) as thief:
        assert thief.delete([chunks[1].key, chunks[3].key]) == 2
    p.counters.take()
    p.step(saves=(order,))
    p.saved(1)
    counted = p.counters.take()
    assert counted["saved_tokens"] == chunks[1].tokens + chunks[3].tokens
    assert counted["not_saved_sealed"] == TOKENS - counted["saved_tokens"]
    d = make_rank(pool.unix, name="D")
    d.step(loads=(d.load_order(chunks, D_BLOCKS),))
    d.loaded()
    assert same(d.tokens(D_BLOCKS, TOKENS), p.tokens(P_BLOCKS, TOKENS))


def test_what_has_no_room_is_counted_and_the_rest_is_saved(tmp_path: Path, make_rank: Make, make_chunks: Make) -> None:
    with PoolThread(tmp_path, size=1 << 20) as small:
        p = make_rank(small.unix)
        p.step(saves=(p.save_order(make_chunks(480), list(range(15))),))
        p.saved(1)
        counted = p.counters.take()
        assert counted["saved_tokens"] + counted["not_saved_full"] == 480
        assert counted["not_saved_full"] > 0
        p.close()


def test_when_the_writer_dies_the_reader_keeps_what_is_sealed(
    pool: PoolThread, make_rank: Make, make_chunks: Make
) -> None:
    """1. P saves two chunks. 2. P announces three. 3. D waits for them. 4. P saves a layer. 5. P's connection ends."""
    chunks = make_chunks(TOKENS)
    p, d = make_rank(pool.unix), make_rank(pool.unix, name="D")
    p.step(saves=(p.save_order(chunks[:2], P_BLOCKS),))
    p.saved(1)
    p.announce(saves=(p.save_order(chunks[2:], P_BLOCKS),))
    d.step(loads=(d.load_order(chunks, D_BLOCKS),))
    waiting(pool)
    p.side.layer_computed(0)
    p.close()
    results = d.loaded()
    outcome = results.report.loads["r"]
    assert (outcome.valid_end, outcome.reason) == (96, Reason.WRITER_LOST)
    assert results.invalid_block_ids == set(D_BLOCKS[3:7])
    assert same(d.tokens(D_BLOCKS, 96), p.tokens(P_BLOCKS, 96))
    assert (stat(pool)["leases"], stat(pool)["unsealed"]) == (0, 0)


def test_a_writer_that_stalls_costs_the_reader_its_deadline_and_no_more(
    pool: PoolThread, make_rank: Make, make_chunks: Make
) -> None:
    chunks = make_chunks(TOKENS)
    p, d = make_rank(pool.unix), make_rank(pool.unix, name="D", load_timeout_s=0.3)
    p.announce(saves=(p.save_order(chunks, P_BLOCKS),))
    d.step(loads=(d.load_order(chunks, D_BLOCKS),))
    results = d.loaded()
    assert results.report.loads["r"].reason is Reason.TIMEOUT
    assert results.invalid_block_ids == set(D_BLOCKS[:7])
    assert stat(pool)["leases"] == 0
    p.side.end_step()


def test_a_corrupt_chunk_and_what_follows_it_is_not_used(pool: PoolThread, make_rank: Make, make_chunks: Make) -> None:
    chunks = make_chunks(TOKENS)
    p, d = make_rank(pool.unix), make_rank(pool.unix, name="D")
    p.step(saves=(p.save_order(chunks, P_BLOCKS),))
    p.saved(1)
    with PoolClient.connect(pool.unix, name="vandal") as vandal:
        found = vandal.match_prefix([chunk.key for chunk in chunks], lease_s=5.0)
        assert vandal.arena is not None
        vandal.arena[found.views[2].offset + found.views[2].size - 1] ^= 1
    d.step(loads=(d.load_order(chunks, D_BLOCKS),))
    outcome = d.loaded().report.loads["r"]
    assert (outcome.valid_end, outcome.reason) == (96, Reason.CORRUPT)
    assert same(d.tokens(D_BLOCKS, 96), p.tokens(P_BLOCKS, 96))
    assert stat(pool)["corrupt"] == 1


def test_a_miss_on_the_rank_is_a_failed_load(address: str, make_rank: Make, make_chunks: Make) -> None:
    d = make_rank(address, name="D")
    d.step(loads=(d.load_order(make_chunks(TOKENS), D_BLOCKS),))
    results = d.loaded()
    assert results.report.loads["r"].reason is Reason.FAILED_LOAD
    assert results.invalid_block_ids == set(D_BLOCKS[:7])


def test_a_cancelled_load_ends_early_and_leaves_no_lease(pool: PoolThread, make_rank: Make, make_chunks: Make) -> None:
    chunks = make_chunks(TOKENS)
    p, d = make_rank(pool.unix), make_rank(pool.unix, name="D", load_timeout_s=600.0)
    p.announce(saves=(p.save_order(chunks, P_BLOCKS),))
    d.step(loads=(d.load_order(chunks, D_BLOCKS),))
    d.step(cancelled=("r",))
    assert d.loaded().finished_recving == {"r"}
    assert stat(pool)["leases"] == 0
    p.side.end_step()


def test_an_engine_that_stops_gives_its_loads_up(pool: PoolThread, make_rank: Make, make_chunks: Make) -> None:
    chunks = make_chunks(TOKENS)
    p, d = make_rank(pool.unix), make_rank(pool.unix, name="D", load_timeout_s=600.0)
    p.announce(saves=(p.save_order(chunks, P_BLOCKS),))
    d.step(loads=(d.load_order(chunks, D_BLOCKS),))
    d.close()
    assert d.loaded().finished_recving == {"r"}
    assert stat(pool)["leases"] == 0
    p.side.end_step()


def test_blocks_of_a_preempted_request_are_not_read_once_the_step_begins(
    pool: PoolThread, make_rank: Make, make_chunks: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. P's layers are computed while its saving thread is stuck in the pool. 2. The request is preempted."""
    monkeypatch.setattr("kvrelay.connector.worker_side.DRAIN_S", 0.05)
    p = make_rank(pool.unix)
    stuck, read = threading.Event(), threading.Event()
    publish = PoolClient.commit

    def slow(client: PoolClient, *given: Any, **more: Any) -> None:
        read.set()
        assert stuck.wait(10.0)
        publish(client, *given, **more)

    monkeypatch.setattr(PoolClient, "commit", slow)
    p.begin(saves=(p.save_order(make_chunks(TOKENS), P_BLOCKS),))
    p.side.layer_computed(0)
    assert read.wait(10.0)
    p.side.end_step()
    p.begin(preempted=("r",))
    reads: list[int] = []
    for layer in p.layers:
        monkeypatch.setattr(layer, "read", reads.append)
    stuck.set()
    assert p.saved(1).report.saves_ended == {"r": 1}
    p.saver.close()
    assert reads == []
    assert stat(pool)["unsealed"] == 0
    assert p.counters.take() == {"saved_bytes": TOKENS * 4 * 2 * 32 * 4, "not_saved_cancelled": TOKENS}


def test_a_finished_request_is_held_until_its_saves_are_done(
    pool: PoolThread, make_rank: Make, make_chunks: Make
) -> None:
    p = make_rank(pool.unix)
    p.begin(saves=(p.save_order(make_chunks(TOKENS), P_BLOCKS),))
    p.side.layer_computed(0)
    p.side._ledger.hold("r", 0.0)
    assert p.side._ledger.take().finished_sending == set()
    p.side.end_step()
    assert p.results(lambda results: bool(results.finished_sending)).finished_sending == {"r"}


def test_a_finished_request_is_not_held_past_its_deadline(pool: PoolThread, make_rank: Make, make_chunks: Make) -> None:
    p = make_rank(pool.unix, hold_s=0.0)
    p.begin(saves=(p.save_order(make_chunks(TOKENS), P_BLOCKS),))
    p.begin(held=("r",))
    assert p.side.take_results().finished_sending == {"r"}


@pytest.mark.parametrize("address", ["unix:/nonexistent/pool.sock", "tcp:127.0.0.1:1"])
def test_without_a_pool_steps_are_not_delayed_and_everything_ends(
    address: str, make_rank: Make, make_chunks: Make
) -> None:
    p = make_rank(address)
    p.step(
        saves=(p.save_order(make_chunks(TOKENS), P_BLOCKS, request="s"),),
        loads=(p.load_order(make_chunks(TOKENS), D_BLOCKS),),
    )
    results = p.results(lambda results: bool(results.report.saves_ended and results.report.loads))
    assert results.invalid_block_ids == set(D_BLOCKS[:7])
    counted = p.counters.take()
    assert counted["not_saved_pool_down"] == TOKENS
    assert counted["load_failed_pool_down"] == 1


def test_a_pool_that_was_replaced_is_written_to_in_full(tmp_path: Path, make_rank: Make, make_chunks: Make) -> None:
    """1. P saves. 2. The pool dies and another takes its place, with the same handles. 3. P saves to that one."""
    first = PoolProcess(tmp_path)
    p = make_rank(first.unix)
    p.step(saves=(p.save_order(make_chunks(TOKENS), P_BLOCKS),))
    p.saved(1)
    first.kill()
    assert first.process.stdout is not None
    first.process.stdout.close()
    second = PoolProcess(tmp_path)
    try:
        p.counters.take()
        for prompt in range(1, 200):  # it connects again in its own time
            p.step(saves=(p.save_order(make_chunks(TOKENS, prompt), P_BLOCKS),))
            p.saved(1)
            if p.counters.take().get("saved_tokens"):
                break
            threading.Event().wait(0.02)
        with PoolClient.connect(second.unix, name="stat", map_arena=False) as client:
            assert (client.stat()["objects"], client.stat()["unsealed"]) == (5, 0)
    finally:
        p.close()
        second.terminate()
        assert second.process.stdout is not None
        second.process.stdout.close()
