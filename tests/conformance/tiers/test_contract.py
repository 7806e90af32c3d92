"""What every tier keeps of the contract in `kvrelay.pool.tiers.core.tier`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from kvrelay.pool.tiers.core.tier import Loaded, Outcome, tier_key
from kvrelay.testing.tier_media import MIB, item, load, outcomes

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.pool.tiers.core.tier import Tier
    from kvrelay.testing.tier_media import Medium


def test_what_was_stored_is_found_with_its_shape_and_loaded_with_its_checksums(tier: Tier) -> None:
    items = [item("a", 4096), item("b", 12_288, layers=3, segments=2), item("c", 1), item("d", MIB)]
    assert tier.store(items) == [Outcome.DONE] * 4
    assert tier.find([one.key for one in items]) == [one.shape for one in items]
    assert outcomes(tier, *items) == [Outcome.DONE] * 4


def test_what_was_not_stored_is_absent(tier: Tier) -> None:
    assert tier.find([tier_key("default", b"nothing")]) == [None]
    assert outcomes(tier, item("nothing")) == [Outcome.ABSENT]


def test_looking_for_a_prefix_may_stop_at_the_first_that_is_absent(tier: Tier) -> None:
    items = [item(f"chunk {number}") for number in range(40)]
    tier.store([one for number, one in enumerate(items) if number != 20])
    found = tier.find([one.key for one in items], prefix=True)
    assert found[:20] == [one.shape for one in items[:20]]
    assert found[20] is None
    assert len(found) == 40


def test_an_object_of_another_size_than_wanted_is_absent_and_stays(tier: Tier) -> None:
    one = item("a", 4096)
    tier.store([one])
    assert tier.load([(one.key, memoryview(bytearray(8192)))]) == [Loaded(Outcome.ABSENT)]
    assert outcomes(tier, one) == [Outcome.DONE]


def test_storing_again_changes_nothing_and_other_bytes_replace(tier: Tier) -> None:
    first, second = item("a", seed=1), item("a", seed=2)
    assert tier.store([first]) == tier.store([first]) == [Outcome.DONE]
    assert outcomes(tier, first) == [Outcome.DONE]
    assert tier.store([second]) == [Outcome.DONE]
    assert outcomes(tier, second) == [Outcome.DONE]
    assert list(tier.keys()) == [first.key]


def test_tenants_do_not_see_each_others_objects(tier: Tier) -> None:
    ours, theirs = item("a", tenant="us", seed=1), item("a", tenant="them", seed=2)
    tier.store([ours])
    assert tier.find([theirs.key]) == [None]
    tier.store([theirs])
    assert outcomes(tier, ours, theirs) == [Outcome.DONE, Outcome.DONE]


def test_what_is_deleted_is_gone_at_once_and_after_a_restart(opened: Callable[[], Tier]) -> None:
    tier = opened()
    kept, gone = item("kept"), item("gone")
    tier.store([kept, gone])
    tier.delete([gone.key, tier_key("default", b"never there")])
    assert outcomes(tier, kept, gone) == [Outcome.DONE, Outcome.ABSENT]
    assert outcomes(opened(), kept, gone) == [Outcome.DONE, Outcome.ABSENT]


def test_a_purge_takes_one_tenants_objects_only(tier: Tier) -> None:
    ours = [item(f"{number}", tenant="us") for number in range(30)]
    theirs = item("0", tenant="usa")
    tier.store([*ours, theirs])
    assert tier.purge("us") == 30
    assert set(outcomes(tier, *ours)) == {Outcome.ABSENT}
    assert outcomes(tier, theirs) == [Outcome.DONE]


def test_its_keys_are_those_of_what_is_there(tier: Tier) -> None:
    items = [item(f"{number}", 64) for number in range(25)]
    tier.store(items)
    tier.delete([items[3].key])
    assert sorted(tier.keys()) == sorted(one.key for one in items if one is not items[3])


def test_what_has_expired_is_absent(medium: Medium) -> None:
    now = [1_000.0]
    tier = medium.open(clock=lambda: now[0])
    one = item("a", expires_at=1_060.0)
    tier.store([one])
    assert tier.find([one.key]) == [one.shape]
    now[0] = 1_060.0
    assert tier.find([one.key]) == [None]
    assert outcomes(tier, one) == [Outcome.ABSENT]
    tier.close()


def test_a_restart_finds_what_was_stored(opened: Callable[[], Tier]) -> None:
    items = [item(f"{number}", 10_000) for number in range(50)]
    opened().store(items)
    tier = opened()
    assert outcomes(tier, *items) == [Outcome.DONE] * 50
    more = [item(f"more {number}", 10_000) for number in range(50)]
    tier.store(more)
    assert outcomes(opened(), *items, *more) == [Outcome.DONE] * 100


def test_usage_grows_with_what_is_stored(tier: Tier) -> None:
    before = tier.usage()
    tier.store([item("a", MIB)])
    after = tier.usage()
    assert after.objects == before.objects + 1
    assert after.size_bytes >= before.size_bytes + MIB


def test_threads_store_load_and_delete_at_the_same_time(tier: Tier) -> None:
    """Each thread has objects of its own and shares some: none ever sees bytes that are not the object's."""
    shared = [item(f"shared {number}", 20_000) for number in range(4)]
    problems: list[BaseException] = []

    def work(number: int) -> None:
        try:
            own = [item(f"{number}/{turn}", 30_000) for turn in range(6)]
            for one in own:
                tier.store([one, *shared])
                assert outcomes(tier, one) == [Outcome.DONE]
                load(tier, *shared)
                tier.delete([shared[number % 4].key])
            assert outcomes(tier, *own) == [Outcome.DONE] * 6
        except BaseException as error:  # noqa: BLE001 (told to the main thread)
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems


# --- bytes that have changed on the medium ---


def flip(position: int) -> Callable[[bytes], bytes]:
    def change(record: bytes) -> bytes:
        changed = bytearray(record)
        changed[position] ^= 0x40
        return bytes(changed)

    return change


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "the magic": flip(0),
    "the header's size": flip(8),
    "the size": flip(24),
    "the time of expiry": flip(38),
    "the key": flip(60),
    "a checksum": flip(-4096 - 3),
    "the first byte": flip(-4096),
    "the last byte": flip(-1),
    "zeroed": lambda record: bytes(len(record)),
    "half of it zeroed": lambda record: record[: len(record) // 2] + bytes(len(record) - len(record) // 2),
}


@pytest.mark.parametrize("where", DAMAGE)
def test_damaged_bytes_are_never_handed_out(medium: Medium, opened: Callable[[], Tier], where: str) -> None:
    damaged, sound = item("damaged"), item("sound")
    opened().store([damaged, sound])
    opened()
    medium.rewrite(damaged, DAMAGE[where])
    tier = opened()
    first = load(tier, damaged)[0].outcome
    assert first in (Outcome.CORRUPT, Outcome.ABSENT)
    assert outcomes(tier, damaged, sound) == [Outcome.ABSENT, Outcome.DONE]
    assert tier.store([damaged]) == [Outcome.DONE]
    assert outcomes(tier, damaged) == [Outcome.DONE]


@pytest.mark.parametrize("left", [0, 10, 70, 100, 4000, -1])
def test_a_truncated_record_is_never_handed_out(medium: Medium, opened: Callable[[], Tier], left: int) -> None:
    one = item("truncated")
    opened().store([one])
    opened()
    medium.rewrite(one, lambda record: record[:left])
    tier = opened()
    assert load(tier, one)[0].outcome in (Outcome.CORRUPT, Outcome.ABSENT)
    assert outcomes(tier, one) == [Outcome.ABSENT]
    assert tier.store([one]) == [Outcome.DONE]
    assert outcomes(tier, one) == [Outcome.DONE]


def test_another_objects_record_is_not_taken_for_it(medium: Medium, opened: Callable[[], Tier]) -> None:
    one, other = item("one", seed=1), item("two", seed=2)
    opened().store([one, other])
    records: list[bytes] = []

    def keep(record: bytes) -> bytes:
        records.append(record)
        return record

    opened()
    medium.rewrite(other, keep)
    medium.rewrite(one, lambda _: records[0])
    tier = opened()
    assert load(tier, one)[0].outcome in (Outcome.CORRUPT, Outcome.ABSENT)
    assert outcomes(tier, one, other) == [Outcome.ABSENT, Outcome.DONE]
