"""One client of the soak: a blocking connection that does one random thing after another and checks what it reads."""

from __future__ import annotations

import random
import socket
import time
import traceback
from typing import TYPE_CHECKING

from kvrelay.client.blocking import PoolClient
from kvrelay.client.core.operations import StagePart
from kvrelay.errors import (
    DeadlineError,
    KvRelayError,
    LeaseExpiredError,
    NotFoundError,
    PoolFullError,
    PoolUnavailableError,
    WriterLostError,
)
from kvrelay.transport.address import parse_address
from kvrelay.wire import messages as m
from soak import content

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrelay.client.core.operations import Prefix
    from soak.journal import Journal

EXPECTED = (PoolFullError, WriterLostError, LeaseExpiredError, NotFoundError)
"""What a client must reckon with when others write, delete, vanish and fill the pool beside it."""
ANSWER_S = 30.0
"""For an answer: everything here runs on few cores at low priority, and being slow is no violation."""
CONNECT_TRIES = 5
SHORT_S = 0.5
GRACE_S = 5.0
"""How long after its time to live an object may still be seen."""


class SoakClient:
    """The ``number``-th client, connected to ``address``; ``seed`` makes its choices."""

    def __init__(self, number: int, address: str, seed: int, journal: Journal) -> None:
        self._number = number
        self._address = address
        self._rng = random.Random(seed)
        self._journal = journal
        self._pinned: set[int] = set()
        self._short_lived: list[tuple[float, bytes]] = []
        self._acts: list[tuple[str, int, Callable[[], None]]] = [
            ("put", 20, self.put),
            ("get", 25, self.get),
            ("match", 12, self.match),
            ("write layers", 12, self.write_layers),
            ("follow layers", 12, self.follow_layers),
            ("exists", 4, self.exists),
            ("delete", 4, self.delete),
            ("pin", 3, self.pin),
            ("short-lived", 3, self.short_lived),
            ("ticket", 3, self.ticket),
            ("abrupt end", 1, self.reconnect),
            ("half a frame", 1, self.half_a_frame),
        ]
        self._weights = [weight for _, weight, _ in self._acts]
        self._client = self._connect()
        self._reclaim()

    def _connect(self) -> PoolClient:
        for attempt in range(CONNECT_TRIES):
            try:
                return PoolClient.connect(self._address, name=f"soak {self._number}", timeout_s=ANSWER_S)
            except PoolUnavailableError:
                if attempt == CONNECT_TRIES - 1:
                    raise
        raise AssertionError("unreachable")

    def _ask(self, request: m.Request, reply: type[m.Reply]) -> m.Reply:
        return self._client.start(request, reply).result(ANSWER_S)

    def _reclaim(self) -> None:
        """Undo the pins of a predecessor that was killed."""
        keys = [content.pinned_key(self._number, number) for number in range(content.PINS_OF_A_CLIENT)]
        self._ask(m.Unpin(0, keys), m.Affected)
        self._client.delete(keys)

    def step(self) -> None:
        """Do one thing. Errors that must not happen go to the journal."""
        ((name, _, act),) = self._rng.choices(self._acts, self._weights)
        try:
            act()
        except EXPECTED as error:
            self._journal.count(f"{name}: {type(error).__name__}")
        except DeadlineError as error:
            self._journal.count(f"{name}: {type(error).__name__}")
            if self._client.closed:
                self.reconnect()
        except (KvRelayError, AssertionError, OSError) as error:
            self._journal.violation(f"{name} of client {self._number}: {type(error).__name__}: {error}")
            self.reconnect()
        except Exception:  # noqa: BLE001 - a bug in the client or in this script: told, and the soak goes on
            self._journal.violation(f"{name} of client {self._number}: {traceback.format_exc()}")
            self.reconnect()
        else:
            self._journal.count(name)

    def close(self) -> None:
        """Give back what outlives a connection, then end it."""
        try:
            self._reclaim()
        finally:
            self._client.close()

    def _verify(self, key: bytes, got: memoryview | bytes, start: int = 0) -> None:
        wanted = content.content_of(key)[start : start + len(got)]
        if got != wanted:
            raise AssertionError(f"wrong bytes of {key!r} from {start} on, {len(got)} bytes")
        self._journal.count("bytes verified", len(got))

    def _run_of(self, make: Callable[[int], bytes], keys: int, longest: int) -> list[bytes]:
        first = self._rng.randrange(keys)
        return [make((first + step) % keys) for step in range(self._rng.randint(1, longest))]

    def put(self) -> None:
        """Whole objects, a few at once."""
        keys = self._run_of(content.whole_key, content.WHOLE_KEYS, 16)
        self._client.put_many([(key, memoryview(content.content_of(key))) for key in keys])

    def get(self) -> None:
        """A run of whole objects, as far as they are there."""
        keys = self._run_of(content.whole_key, content.WHOLE_KEYS, 16)
        if self._rng.random() < 0.2:
            data = self._client.get(keys[0])
            if data is not None:
                self._verify(keys[0], data)
            return
        into = [memoryview(bytearray(content.spec_of(key).size)) for key in keys]
        found = self._client.get_many(keys, into)
        for key, view in zip(keys[:found], into, strict=False):
            self._verify(key, view)
        self._journal.count("objects got", found)

    def match(self) -> None:
        """A prefix of whole objects under a lease, read or not, released or left to time and disconnection."""
        keys = self._run_of(content.whole_key, content.WHOLE_KEYS, 32)
        prefix = self._client.match_prefix(keys, lease_s=self._rng.choice([0.02, 0.5, 5.0]))
        self._journal.count("keys matched", len(prefix))
        if len(prefix) and self._rng.random() < 0.7:
            self._client.wait(prefix, prefix.layers, timeout_s=1.0)
            self._read(prefix, keys, [m.Range(index, 0, 1) for index in range(len(prefix))])
        if self._rng.random() < 0.8:
            self._client.release(prefix)

    def _read(self, prefix: Prefix, keys: Sequence[bytes], ranges: Sequence[m.Range]) -> None:
        views = self._client.fetch(prefix, ranges)
        for span, view in zip(ranges, views, strict=True):
            key = keys[span.index]
            start = span.first * prefix.segment_bytes(span.index)
            if bytes(view) != content.content_of(key)[start : start + view.nbytes]:
                self._client.release(prefix)  # LeaseExpiredError: nobody promised anything any more
                raise AssertionError(f"wrong bytes of {key!r}, segments from {span.first} on")
            self._journal.count("bytes verified", view.nbytes)

    def write_layers(self) -> None:
        """Objects of many segments, layer by layer; some are given up, some left half written by a disconnection."""
        keys = self._run_of(content.segmented_key, content.SEGMENTED_KEYS, 3)
        specs = [content.spec_of(key) for key in keys]
        group = f"soak {self._number}"
        announced = self._client.announce(specs, group=group, lease_s=self._rng.choice([0.05, 5.0]))
        granted = [
            (grant, spec) for grant, spec in zip(announced.grants, specs, strict=True) if grant.state == "granted"
        ]
        end = self._rng.choices(["whole", "given up", "vanish"], [8, 1, 1])[0]
        for layer in range(max((spec.layers for _, spec in granted), default=0)):
            if layer and end == "given up":
                self._client.abort([grant.handle for grant, _ in granted])
                return
            if layer and end == "vanish":
                self.reconnect()
                return
            parts = [
                StagePart(grant, spec, layer * spec.segments, spec.segments)
                for grant, spec in granted
                if layer < spec.layers
            ]
            views = self._client.stage(parts)
            for part, view in zip(parts, views, strict=True):
                start = part.first * part.segment_bytes
                view[:] = content.content_of(part.spec.key)[start : start + view.nbytes]
            self._client.commit(parts, views)
        self._journal.count("objects written in layers", len(granted))

    def follow_layers(self) -> None:
        """Objects of many segments, perhaps still being written, layer by layer."""
        keys = self._run_of(content.segmented_key, content.SEGMENTED_KEYS, 3)
        prefix = self._client.match_prefix(keys, lease_s=5.0)
        while prefix.ready < prefix.layers:
            before = prefix.ready
            ready = self._client.wait(prefix, before + 1, timeout_s=1.0)
            ranges = []
            for index, view in enumerate(prefix.views):
                first, last = min(before, view.layers) * view.segments, min(ready, view.layers) * view.segments
                if first < last:
                    start = self._rng.randrange(first, last)
                    ranges.append(m.Range(index, start, self._rng.randint(1, last - start)))
            self._read(prefix, keys, ranges)
            self._journal.count("layers followed", ready - before)
        self._client.release(prefix)

    def exists(self) -> None:
        """Ask, nothing to check: others write and delete beside this."""
        self._client.exists(self._run_of(content.whole_key, content.WHOLE_KEYS, 64))

    def delete(self) -> None:
        """Objects others may be reading or writing."""
        make, keys = self._rng.choice(
            [(content.whole_key, content.WHOLE_KEYS), (content.segmented_key, content.SEGMENTED_KEYS)]
        )
        self._journal.count("objects deleted", self._client.delete(self._run_of(make, keys, 4)))

    def pin(self) -> None:
        """An object of this client's own: once pinned it must be there until it is unpinned."""
        number = self._rng.randrange(content.PINS_OF_A_CLIENT)
        key = content.pinned_key(self._number, number)
        if number not in self._pinned:
            self._client.put(key, content.content_of(key))
            affected = self._ask(m.Pin(0, [key]), m.Affected)
            assert isinstance(affected, m.Affected)
            if affected.count:  # else it was evicted in between
                self._pinned.add(number)
            return
        data = self._client.get(key)
        if data is None:
            raise AssertionError(f"pinned object {key!r} is gone")
        self._verify(key, data)
        self._ask(m.Unpin(0, [key]), m.Affected)
        self._pinned.discard(number)
        self._client.delete([key])

    def short_lived(self) -> None:
        """An object of this client's own with a short time to live; one whose time is over must not be there."""
        now = time.monotonic()
        over = [key for due, key in self._short_lived if now > due]
        if over:
            self._short_lived = [(due, key) for due, key in self._short_lived if now <= due]
            if any(self._client.exists(over)):
                raise AssertionError(f"{over!r} outlived their time by {GRACE_S} s and more")
            self._journal.count("times to live kept", len(over))
        key = content.short_lived_key(self._number, self._rng.randbytes(8))
        self._client.put(key, content.content_of(key))
        self._ask(m.Touch(0, [key], SHORT_S), m.Affected)
        self._short_lived.append((time.monotonic() + SHORT_S + GRACE_S, key))

    def ticket(self) -> None:
        """A hand-over: objects under a ticket, a note, and an end; or no end but the connection's."""
        ticket = f"soak-{self._number}-{self._rng.getrandbits(64):x}"
        self._client.open_ticket(ticket, self._rng.choice([0.05, 10.0]))
        key = content.segmented_key(self._rng.randrange(content.SEGMENTED_KEYS))
        announced = self._client.announce(
            [content.spec_of(key)], group=f"soak {self._number}", lease_s=5.0, ticket=ticket
        )
        self._client.abort([grant.handle for grant in announced.grants if grant.state == "granted"])
        self._client.post(ticket, b"a note")
        if self._client.collect(ticket, 1.0) != [b"a note"]:
            raise AssertionError(f"ticket {ticket}: the note did not come back")
        if self._rng.random() < 0.8:
            self._client.end_ticket(ticket)

    def reconnect(self) -> None:
        """End the connection with whatever it holds, and make another."""
        self._client.close()
        self._client = self._connect()

    def half_a_frame(self) -> None:
        """A stranger that sends something and vanishes."""
        sock, target = parse_address(self._address).new_socket()
        with sock:
            sock.settimeout(ANSWER_S)
            sock.connect(target)
            head = b"KV\x01\x00" + self._rng.randbytes(4) + bytes(8)
            sock.sendall(self._rng.choice([b"GET / HTTP/1.1\r\n\r\n", head[: self._rng.randint(1, 16)], head]))
            if self._rng.random() < 0.5:
                sock.shutdown(socket.SHUT_WR)
