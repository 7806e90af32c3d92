"""The connector in the engine's scheduler process: asks the pool, claims tokens, orders saves and loads, proves.

Nothing here waits for the pool longer than `lookups.WAIT_S` in a step, and no error of the pool gets past it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from kvrelay.connector.adapted import AdaptedRequests
from kvrelay.connector.core.growth import Growth
from kvrelay.connector.core.ledger import Ledger
from kvrelay.connector.core.matching import Found, Search
from kvrelay.connector.core.orders import Placed
from kvrelay.connector.core.promises import Promises
from kvrelay.connector.core.requests import Entry, HandOver, Phase
from kvrelay.connector.holds import Holds
from kvrelay.connector.lookups import Lookups
from kvrelay.connector.naming import Name, Naming
from kvrelay.connector.outbox import Outbox
from kvrelay.identity.core.chunks import ChunkChain, chain_seed
from kvrelay.identity.core.namespace import namespace
from kvrelay.types import OnLostKv, Reason
from kvrelay.wire import limits
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from kvrelay.client.blocking import PoolClient
    from kvrelay.connector.adapters import Adapter, Adapters
    from kvrelay.connector.config import ConnectorConfig
    from kvrelay.connector.core.geometry import KvGeometry
    from kvrelay.connector.core.orders import RankReport, SaveOrder, StepOrders
    from kvrelay.connector.core.tables import Tables
    from kvrelay.connector.counters import Counters
    from kvrelay.connector.link import PoolLink
    from kvrelay.connector.naming import Digests
    from kvrelay.identity.core.chunks import Chunk, Extra

log = logging.getLogger(__name__)

MOST_SUMS = 8_192
"""Checksums that the pool may send with what it found: 64 KiB. Beyond that loads ask for them themselves."""
LOOK_AGAIN_S = 0.1
"""How soon the pool is asked again for a prompt of which it had only part."""


def read_hand_over(params: dict[str, Any] | None) -> HandOver | None:
    """What the router says in ``kv_transfer_params``; ``None`` if it says nothing that makes sense."""
    said: Any = (params or {}).get("kvrelay")
    try:
        over = msgspec.convert({**said, "id": said["handover"]}, HandOver)
    except (TypeError, KeyError, msgspec.ValidationError):
        return None
    return over if over.leg in ("prefill", "decode") and 0 < len(over.id) <= limits.MAX_NAME_CHARS else None


def _prefilled(entry: Entry) -> int:
    """How much of a prompt its prefill engine computed: the last chunk it saved ends there."""
    over = entry.hand_over
    generated = over.generated if over is not None and over.leg == "decode" else 0
    return entry.prompt_tokens - generated if 0 < generated < entry.prompt_tokens else entry.prompt_tokens


class _Prompt(msgspec.Struct, frozen=True):
    """What a request's keys are made of once its name is there."""

    token_ids: Sequence[int]
    salt: str | None
    extras: tuple[Extra, ...]
    skip: Reason


class SchedulerSide:
    """One engine's scheduler. Owned by its thread."""

    def __init__(
        self,
        config: ConnectorConfig,
        *,
        facts: dict[str, str],
        geometry: KvGeometry,
        tables: Tables,
        ranks: int,
        saves: bool,
        loads: bool,
        role: str,
        counters: Counters,
        make_link: Callable[[Callable[[PoolClient], None]], PoolLink],
        on_close: Callable[[], None] = lambda: None,
        evict: Callable[[set[int]], None] = lambda _: None,
        sync_loads: bool = False,
        in_flight: int = 1,
        clock: Callable[[], float] = time.monotonic,
        adapters: Adapters | None = None,
    ) -> None:
        """``facts``: of the namespace, all of them. ``make_link``: given what to say on every new connection.

        ``on_close``: what else ends with this. ``adapters``: identifies LoRA adapters, if the engine has any.
        ``sync_loads``: whether the engine takes synchronous loads, and knows how a step ended before it schedules the
        next. ``in_flight``: how many steps it schedules before it knows how the first of them ended. ``evict``: takes
        away what blocks are called in the engine's prefix cache.
        """
        self._on_close = on_close
        self._config = config
        self._geometry = geometry
        self._tables = tables
        self._facts = facts
        self._pool = ""
        """Which pool process answers; set by the link's thread."""
        self._near = False
        """Whether the pool is on this host and lends its memory; set by the link's thread."""
        self._role = role
        self._clock = clock
        self.namespace = namespace(facts)
        self.weights_stay = False
        """Whether, while its caches are dropped, the engine is known to keep the weights it has."""
        self._apart = False
        """Whether nobody knows which weights the engine has, so that its namespace is its own."""
        self.evict = evict
        sync = sync_loads and tables.divisible
        self._ledger = Ledger(
            engine=config.engine,
            tables=tables,
            ranks=ranks,
            saves=saves,
            loads=loads,
            sync_bytes=config.sync_load_bytes if sync else 0,
            sync_idle_bytes=config.sync_load_idle_bytes,
            max_early=config.max_early_loads,
        )
        self.holds = Holds(
            tables, ranks=ranks, clock=clock, limited=lambda tokens: counters.add("not_saved_held", tokens)
        )
        self._counters = counters
        self._lease_s = min(limits.MAX_LEASE_S, 2 * config.load_timeout_s)
        self._link = make_link(self._register)
        self._link.on_lost = self._lost
        self._outbox = Outbox(self._link, clock)
        self._promises = Promises(
            ranks=ranks,
            tables=tables,
            stages=config.staging_mib > 0,
            staging_s=config.load_timeout_s,
            patience_s=config.lost_kv_wait_s,
        )
        self._lookups = Lookups(
            self._link,
            self._outbox,
            timeout_s=config.lookup_timeout_s,
            lease_s=self._lease_s,
            clock=clock,
            counters=counters,
        )
        self._naming = Naming(
            adapters, chunk_tokens=config.chunk_tokens, timeout_s=config.lookup_timeout_s, clock=clock
        )
        self._prompts: dict[str, _Prompt] = {}
        """Of requests that wait for their names."""
        self._asked: dict[str, int] = {}
        """Tokens in the engine's own cache, of requests asked about in this step."""
        self._given: dict[str, int] = {}
        """Tokens there and those we load, of requests given blocks in this step."""
        self._in_flight: deque[tuple[bool, tuple[str, ...]]] = deque(maxlen=in_flight)
        """Of steps that may not have ended: whether another connector loads in it, and requests given blocks in it."""
        self._adapted = AdaptedRequests(adapters, self._ledger, self._naming)

    def start(self) -> None:
        """Connect and register; raises `ConfigError` if the pool refuses us."""
        self._link.connect()

    @property
    def sides(self) -> tuple[SchedulerSide, ...]:
        """Of an engine with one pool: this one."""
        return (self,)

    @property
    def saving(self) -> bool:
        """Whether ranks still read blocks for saves."""
        return self._ledger.saving

    @property
    def connected(self) -> bool:
        """Whether its pool is there."""
        return self._link.client() is not None

    def share_engine(self, others: Sequence[SchedulerSide]) -> None:
        """The engine's other requests are these sides'."""
        self._ledger.elsewhere = lambda: any(other._ledger.runs_others() for other in others)

    def must_wait(self, local: int) -> bool:
        """Whether a request with so many tokens in the prefix cache may share blocks this step is about to load."""
        return self._ledger.must_wait(local)

    def _register(self, client: PoolClient) -> None:
        self._pool, self._near = client.welcome.pool, client.welcome.shm
        client.register(self._config.engine, self._role, self.namespace, self._facts)

    # --- the engine's calls, in the order of a request's life ---

    def on_new_request(
        self,
        request_id: str,
        token_ids: Sequence[int] | None,
        prompt_tokens: int,
        *,
        salt: str | None,
        params: dict[str, Any] | None,
        skip: Reason = Reason.NONE,
        extras: Sequence[Extra] = (),
        digests: Digests | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        """Make the keys and send the lookup.

        ``token_ids``: the engine's own list, to which it will append what it generates; ``None`` if what is in the
        prompt cannot be named. ``skip``: why the engine will not take external KV for this request. ``extras``: what is
        in the prompt beside tokens. ``digests``: makes more of them, for chunks of the size given, and takes its time.
        ``adapter``: what the request is computed with beside the model.
        """
        entry = self._ledger.add(request_id, prompt_tokens, (), read_hand_over(params))
        if self._is_promised(entry):
            self._promises.add(request_id)
        if adapter is not None:
            self._adapted.add(request_id, adapter)
        prompt = _Prompt(token_ids or (), salt, tuple(extras), skip)
        if token_ids is None:
            self._unnamed(entry, Reason.NO_KEYS)
        elif adapter is not None or digests is not None:
            self._prompts[request_id] = prompt
            self._naming.begin(request_id, adapter, digests)
        else:
            self._named(entry, prompt, Name(None, ()))

    def _named(self, entry: Entry, prompt: _Prompt, name: Name) -> None:
        """A request's keys can be made: make them, and send the lookup."""
        made = self._chain(entry, prompt, name)
        if made is None:
            self._unnamed(entry, Reason.NO_KEYS)
            return
        chain, chunks = made
        growth = Growth(chain, prompt.token_ids, chain.tokens) if self._config.save_decode else None
        self._ledger.name(entry, chunks, growth, prompt.token_ids)
        entry.doubted = name.lora is not None
        if prompt.skip:
            self._ledger.leave_unread(entry, prompt.skip)
        elif self._ledger.may_look(entry):
            self._look(entry)
        else:
            self._settle(entry, Reason.MISS)

    def _unnamed(self, entry: Entry, reason: Reason) -> None:
        """A request's KV has no name: it is neither saved nor loaded."""
        if self._ledger.saves:
            self._counters.add(f"not_saved_{reason}", entry.prompt_tokens)
        self._settle(entry, reason)

    def _chain(self, entry: Entry, prompt: _Prompt, name: Name) -> tuple[ChunkChain, tuple[Chunk, ...]] | None:
        """The keys of a prompt, and what they can be continued with; ``None`` if it has none."""
        size = self._config.chunk_tokens
        if not 0 < entry.prompt_tokens <= size * (limits.MAX_KEYS // len(self._geometry.groups)):
            return None
        try:
            seed = chain_seed(self.namespace, lora=name.lora, salt=prompt.salt)
            chain = ChunkChain(seed, size, (*prompt.extras, *name.extras))
            chain.extend(prompt.token_ids[: _prefilled(entry)])
            return chain, tuple(chain.all())
        except ValueError as error:  # no token of any vocabulary, no text: the engine shall say so, not we
            log.warning("kvrelay: a prompt has no keys: %s", error)
            return None

    def _answered_name(self, entry: Entry) -> bool:
        """Whether a request that waits for its name has one, or will have none."""
        answer = self._naming.answer(entry.request_id)
        if answer is None:
            return False
        prompt = self._prompts.pop(entry.request_id)
        if isinstance(answer, Name):
            self._named(entry, prompt, answer)
        else:
            self._unnamed(entry, answer)
        return True

    @property
    def adapters_in_use(self) -> set[int]:
        """Numbers of the adapters that requests of this side are computed with."""
        return self._adapted.numbers

    def _stop_adapters(self) -> None:
        """What runs with an adapter that was stopped has no name any more."""
        for request_id in self._adapted.take_stopped():
            self._naming.end(request_id)
            self._prompts.pop(request_id, None)

    def num_matched(self, request_id: str, local: int) -> tuple[int | None, bool]:
        """Tokens beyond ``local`` to load, and whether asynchronously; ``None``: not known yet, ask again."""
        self._stop_adapters()
        entry = self._ledger.entry(request_id)
        if self._ledger.must_wait(local):
            return None, False
        if entry is None:
            return 0, False
        self._asked[request_id] = local
        if entry.phase is Phase.NEW and not self._answered_name(entry):
            return None, False
        if self._ledger.wants_look(entry, self._clock()):
            self._look(entry)
        if entry.phase is Phase.LOOKING and not self._answered(entry):
            return None, False
        if not self._may_claim(entry, local):
            return None, False
        entry.staged = self._promises.staged(request_id)
        if self._ledger.must_queue(entry, local):
            return None, False
        count = self._ledger.claimable(entry, local)
        return count, count > 0 and not entry.near

    def _may_claim(self, entry: Entry, local: int) -> bool:
        """Whether to go on with a request whose lookup is over."""
        may = self._promises.may_claim(entry, local, self._clock())
        awaited, entry.awaited = entry.awaited, self._promises.under_way(entry.request_id)
        self._tell_losses()
        if may and awaited and not entry.awaited and self._ledger.wants_look(entry, self._clock()):
            self._look(entry)  # what was known of the pool grew old meanwhile
            return False
        return may

    def _is_promised(self, entry: Entry) -> bool:
        """Whether a request must not recompute silently what it was promised."""
        over = entry.hand_over
        if over is None or over.leg != "decode" or not self._ledger.loads:
            return False
        policy = over.policy or self._config.on_lost_kv
        return policy == OnLostKv.STRICT or (policy in (OnLostKv.REPREFILL, OnLostKv.FAIL) and bool(over.prefill))

    def _tell_losses(self) -> None:
        for lost in self._promises.take_losses():
            self._counters.add(f"kv_lost_{lost.lost}")
            log.debug("kvrelay: %s", lost)
            if not self._outbox.tell(m.Post(0, lost.handover, msgspec.json.encode(lost))):
                self._promises.untold(lost.request_id)

    def allocated(self, request_id: str, block_ids: Sequence[Sequence[int]], external: int) -> None:
        """The engine gave the request blocks, in each of its tables; ``external`` tokens are to be loaded."""
        entry = self._ledger.entry(request_id)
        local = self._asked.pop(request_id, None)
        if local is not None:
            self._given[request_id] = local + external
        if entry is not None:
            self._ledger.allocated(entry, external, block_ids, self._clock())
            if external and entry.staged:
                self._promises.claimed(request_id)
                entry.awaited, entry.staged = False, 0

    def step(
        self,
        scheduled: Iterable[tuple[str, int, int]],
        preempted: Iterable[str],
        block_ids: Callable[[str], Sequence[Sequence[int]]],
        *,
        foreign: bool = False,
    ) -> StepOrders:
        """One step's orders. ``scheduled``: (request, tokens computed before, tokens computed in this step).

        ``foreign``: another connector loads for a request of the engine's that this side does not know.
        """
        scheduled = list(scheduled)
        lost = self._ledger.preempted(preempted)
        self._adapted.preempted(map(self._ledger.entry, lost))
        self._adapted.end_doubts(scheduled)
        self._stop_adapters()
        saves: list[SaveOrder] = []
        unsure = self._unsure(foreign=foreign or self.loads_elsewhere(scheduled))
        for request_id, computed, count in scheduled:
            entry = self._ledger.entry(request_id)
            if entry is None:
                continue
            self._ledger.runs(entry, put_off=request_id in unsure)
            if not entry.scheduled and not self._ledger.loads_now(entry):
                self._first_scheduled(entry, computed)
            if request_id in unsure:
                continue
            if self._ledger.has_unsaved(entry, computed + count):
                order = self._ledger.order_save(entry, computed + count, block_ids(request_id))
                saves.append(self.holds.hold(order))
        self._asked.clear()
        self._given.clear()
        self._send_releases()
        self._outbox.pump()
        self._lookups.new_step()
        self._naming.new_step()
        orders = self._ledger.take_orders(saves, lost)
        stages, unstaged = self._promises.take_stages(), self._promises.take_unstaged()
        return replace(orders, stages=stages, unstaged=unstaged) if stages or unstaged else orders

    def loads_elsewhere(self, scheduled: Iterable[tuple[str, int, int]]) -> bool:
        """Whether another connector loads for one of these requests of a step."""
        given = self._given
        return bool(given) and any(computed > given.get(request_id, computed) for request_id, computed, _ in scheduled)

    def _unsure(self, *, foreign: bool) -> Collection[str]:
        """New requests of steps in which another connector loads: whether that works is known when they have ended.

        All of them: others may have found what is loaded in the engine's prefix cache already.
        """
        self._in_flight.append((foreign, tuple(self._given)))
        if not any(loads for loads, _ in self._in_flight):
            return ()
        return frozenset(chain.from_iterable(given for _, given in self._in_flight))

    def update(self, report: RankReport | None, sent: Iterable[str], received: Iterable[str]) -> None:
        """What the workers report: progress, saves done, loads ended (by every rank)."""
        if report is not None:
            self._take_sync_loads(report)
            self.holds.ended(report.orders_ended)
            for number, outcome in report.stages.items():
                if (entry := self._ledger.entry(self._promises.owner(number))) is not None:
                    self._promises.report(entry, outcome, self._clock())
            self._tell_losses()
        for request_id in received:
            self._ledger.loaded(request_id, self._clock())
        for request_id in sent:
            self._ledger.sent(request_id)
        self._send_releases()

    def _take_sync_loads(self, report: RankReport) -> None:
        for entry, end in self._ledger.report(report):
            self._ledger.loaded_now(entry, end.took_s)
            self._counters.add("sync_loads", 1)
            if end.untrue:
                self.evict(set(end.untrue))
            if not entry.scheduled:
                self._first_scheduled(entry, end.computed)

    def finished(self, request_id: str, computed: int = 0, block_ids: Sequence[Sequence[int]] = ()) -> bool:
        """The engine finished or aborted a request; whether it must keep the blocks for our saves.

        ``computed``: how many of its tokens have been, into ``block_ids``.
        """
        entry = self._ledger.entry(request_id)
        if entry is None:
            return False
        self._lookups.end(request_id)
        self._promises.end(request_id)
        self._naming.end(request_id)
        self._prompts.pop(request_id, None)
        finish = self._ledger.finish(entry, computed, block_ids)
        self._adapted.finished(entry)
        self._send_releases()
        return finish.hold

    def reset(self) -> bool:
        """The engine drops its caches, as when its weights were replaced; False while a load is under way.

        Unless it is known that they were not, nobody knows which weights it has.
        """
        idle = not self._ledger.loading
        if not self.weights_stay or self._apart:
            self._part("its caches were reset")
        return idle

    def weights_replaced(self, by: str) -> None:
        """The engine's weights may be others from now on."""
        self._part(f"{by} may have replaced its weights")

    def prefix_cache_dropped(self) -> None:
        """The engine's own prefix cache holds nothing any more.

        If its weights may have been replaced before, KV of the old ones that was found there may have been saved since.
        """
        if self._apart:
            self._part("its prefix cache was reset")

    def _part(self, why: str) -> None:
        """Take a namespace of its own: it shares no KV with others, nor with its own past, until it is restarted."""
        self._ledger.forget_keys()
        self._lookups.end_all()
        self._naming.end_all()
        self._prompts.clear()
        self._adapted.forget_doubts()
        self._facts = {**self._facts, "weights": f"reset:{secrets.token_hex(16)}"}
        self.namespace = namespace(self._facts)
        log.log(
            logging.DEBUG if self._apart else logging.WARNING,
            "kvrelay: engine %s: %s: it exchanges no KV with others until it is restarted",
            self._config.engine,
            why,
        )
        self._apart = True
        self._outbox.tell(m.Register(0, self._config.engine, self._role, self.namespace, self._facts))
        self._send_releases()

    def close(self) -> None:
        """Disconnect; the pool forgets this engine and its leases."""
        self._naming.close()
        self._link.close()
        self._on_close()

    # --- lookups ---

    def _look(self, entry: Entry) -> None:
        sums = MOST_SUMS if self._near else 0
        search = Search(entry.chunks, entry.prompt_tokens, self._geometry, self._tables, sums=sums)
        over = entry.hand_over
        ticket = over.id if over is not None and over.leg == "decode" else None
        reason = self._lookups.begin(entry.request_id, search, ticket)
        if reason:
            self._ledger.decline(entry, reason)
        else:
            self._ledger.look(entry)

    def _answered(self, entry: Entry) -> bool:
        """Whether the lookup of a request is over."""
        answer = self._lookups.answer(entry.request_id)
        if isinstance(answer, Found):
            partial = answer.chunks < len(entry.chunks) and self._ledger.may_follow(entry)
            self._ledger.match(
                entry,
                answer.chunks,
                answer.lease,
                self._clock() + (LOOK_AGAIN_S if partial else self._lease_s / 4),
                answer.fresh,
                sealed=answer.sealed,
                far=not self._near,
                size_bytes=answer.size_bytes,
                placed=Placed(self._pool, answer.offsets, answer.sums) if answer.sums else None,
            )
        elif answer is not None:
            self._settle(entry, answer)
        return answer is not None

    def _lost(self) -> None:
        """The connection is gone, and with it every lookup and lease."""
        self._lookups.lost()
        self._outbox.lost()
        self._ledger.pool_lost(keep=self._lookups.unasked)

    def _settle(self, entry: Entry, reason: Reason) -> None:
        if entry.phase is not Phase.SETTLED:
            self._ledger.settle(entry, reason)

    # --- what is sent without waiting ---

    def _first_scheduled(self, entry: Entry, computed: int) -> None:
        self._promises.end(entry.request_id)
        entry.awaited = False
        proof = self._ledger.prove(entry, computed)
        self._counters.add("prompt_tokens", proof.prompt_tokens)
        self._counters.add("loaded_tokens", proof.handed_over_tokens + proof.earlier_tokens)
        self._counters.add("handed_over_tokens", proof.handed_over_tokens)
        self._counters.add("local_tokens", proof.local_tokens)
        for reason, tokens in proof.reasons.items() if self._ledger.loads else ():
            # Without a hand-over nobody promised anything: what the pool does not have is new.
            expected = not proof.handover and reason in (Reason.MISS, Reason.PARTIAL)
            self._counters.add(f"recomputed_{Reason.NEW if expected else reason}", tokens)
        if entry.claimed_at:
            self._counters.add("load_wait_seconds", entry.wait_s)
            self._counters.add("load_transfer_seconds", entry.transfer_s)
        log.debug("kvrelay: %s", proof)
        if proof.handover:
            self._outbox.post(proof.handover, msgspec.json.encode(proof))

    def _send_releases(self) -> None:
        self._link.client()  # leases of a connection that was lost are nobody's any more
        for lease in self._ledger.take_releases():
            self._outbox.tell(m.Release(0, lease))
