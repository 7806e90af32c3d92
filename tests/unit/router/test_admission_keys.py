"""API keys: made, hashed, found, and refused for what is wrong with them."""

from __future__ import annotations

import asyncio
import datetime as dt
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.cli import main
from kvrelay.errors import ConfigError
from kvrelay.router.core.admission.accounts import Account, Accounts
from kvrelay.router.core.admission.keys import (
    ID_BYTES,
    SALT_BYTES,
    SECRET_BYTES,
    Key,
    KeyRing,
    hash_secret,
    make_secret,
    read_keys,
)
from kvrelay.router.entrance.keyring import Keyring, read_key_file
from kvrelay.router.entrance.settings import EntranceConfig, EntranceSettings, check_entrance

if TYPE_CHECKING:
    from pathlib import Path


def secret_of(number: int) -> str:
    return make_secret(bytes([number]) * ID_BYTES, bytes([number]) * SECRET_BYTES)


def key(number: int = 1, name: str = "a", **fields: Any) -> Key:
    return Key(name=name, hash=hash_secret(secret_of(number), b"s" * SALT_BYTES), **fields)


def test_a_key_is_found_by_its_secret_and_by_nothing_else() -> None:
    ring = KeyRing([key(1, "a"), key(2, "b")])
    found = ring.find(secret_of(2).encode())
    assert found is not None
    assert found.name == "b"
    wrong = secret_of(1)[:-1] + "B"
    swapped = secret_of(1)[: len("sk-kvr-") + 12] + secret_of(2)[len("sk-kvr-") + 12 :]
    for other in (secret_of(3), wrong, swapped, secret_of(1) + "x", "", "sk-kvr-", key().hash, secret_of(1).upper()):
        assert ring.find(other.encode()) is None


def test_an_empty_ring_knows_nobody() -> None:
    assert KeyRing([]).find(secret_of(1).encode()) is None


def test_the_hash_does_not_tell_the_secret_and_is_salted() -> None:
    one, other = hash_secret(secret_of(1), b"1" * SALT_BYTES), hash_secret(secret_of(1), b"2" * SALT_BYTES)
    assert one.split(":")[1] == other.split(":")[1]
    assert one.split(":")[3] != other.split(":")[3]
    assert secret_of(1).split("-")[3] not in one


@pytest.mark.parametrize("expires", ["2027-01-31", "2027-01-31T00:00:00Z", "2027-01-31T00:00:00", dt.date(2027, 1, 31)])
def test_a_key_expires_at_its_moment(expires: object) -> None:
    ring = read_keys({"keys": [{"name": "a", "hash": key().hash, "expires": expires}]}, "file")
    moment = dt.datetime(2027, 1, 31, tzinfo=dt.UTC).timestamp()
    assert not ring.keys[0].expired(moment - 1)
    assert ring.keys[0].expired(moment)
    assert not key().expired(moment)


def test_everything_wrong_with_keys_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        KeyRing([
            key(1, "a"), key(1, "b"), key(2, "a"), key(3, "no spaces"), key(4, "c", weight=0.0),
            key(5, "d", requests_per_minute=0.5), key(6, "e", max_concurrent=0), Key(name="f", hash="secret"),
        ])  # fmt: skip
    said = "\n".join(raised.value.problems)
    for part in ("'b' has the secret of 'a'", "'a' is there twice", "no spaces", "weight = 0", "requests_per_minute",
                 "max_concurrent = 0", "'f': its hash"):  # fmt: skip
        assert part in said
    assert len(raised.value.problems) == 7


@pytest.mark.parametrize(
    "text", ["[[keys]]\nname = 'a'", "[[keys]]\nname = 'a'\nhash = 'x'\nlimit = 3", "key = 1", "keys = 3", "[[keys]"]
)
def test_a_file_with_anything_unknown_or_missing_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"keys\.toml"):
        read_key_file(file)


def test_a_json_file_says_the_same(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(f'{{"keys": [{{"name": "a", "hash": "{key().hash}", "expires": "2027-01-31", "models": ["m"]}}]}}')
    assert read_key_file(file).keys[0].models == ("m",)
    with pytest.raises(ConfigError, match=r"cannot be read"):
        read_key_file(tmp_path / "none.toml")


def test_the_command_shows_a_secret_once_and_its_file_lets_it_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.toml"
    flags = ["--file", str(file), "--expires", "2099-01-31", "--model", "m", "--model", 'q"uote', "--weight", "2.5"]
    secrets = []
    for name in ("one", "two"):
        assert main(["router", "key", name, *flags, "--min-priority", "-1"]) == 0
        secrets.append(capsys.readouterr().out.strip())
    assert file.stat().st_mode & 0o777 == 0o600
    assert not any(secret in file.read_text() for secret in secrets)
    ring = read_key_file(file)
    for name, secret in zip(("one", "two"), secrets, strict=True):
        found = ring.find(secret.encode())
        assert found is not None
        assert (found.name, found.models, found.weight, found.min_priority) == (name, ("m", 'q"uote'), 2.5, -1)
        assert found.expires == dt.datetime(2099, 1, 31, tzinfo=dt.UTC)
    assert main(["router", "key", "one", "--file", str(file)]) == 2
    assert main(["router", "key", "three", "--file", str(file), "--expires", "soon"]) == 2
    assert main(["router", "key", "three", "--file", str(tmp_path / "keys.json")]) == 2
    assert main(["router", "key", "three", "--file", str(tmp_path / "none" / "keys.toml")]) == 2
    assert "sk-kvr" not in capsys.readouterr().out
    assert len(read_key_file(file).keys) == 2


def test_requests_over_a_limit_are_told_when_to_come_again() -> None:
    account = Account(key(requests_per_minute=2, tokens_per_minute=600), 0.0)
    assert account.enter(100, 0.0) is None
    assert dict(account.headers(0.0)) == {
        b"x-ratelimit-limit-requests": b"2",
        b"x-ratelimit-remaining-requests": b"1",
        b"x-ratelimit-reset-requests": b"30s",
        b"x-ratelimit-limit-tokens": b"600",
        b"x-ratelimit-remaining-tokens": b"500",
        b"x-ratelimit-reset-tokens": b"10s",
    }
    denied = account.enter(550, 0.0)
    assert denied is not None
    assert (denied[0].status, denied[0].code, denied[0].kind, denied[1]) == (429, "rate_limit_exceeded", "tokens", 5)
    assert "Limit 600, Used 100, Requested 550. Please try again in 5s" in denied[0].message
    assert account.enter(550, 5.0) is None
    denied = account.enter(1, 5.0)
    assert denied is not None
    assert denied[0].kind == "requests"
    assert account.enter(1, 40.0) is None


def test_what_was_estimated_too_high_is_given_back_and_too_low_taken() -> None:
    account = Account(key(tokens_per_minute=600), 0.0)
    assert account.enter(600, 0.0) is None
    account.correct(-500, 0.0)
    assert dict(account.headers(0.0))[b"x-ratelimit-remaining-tokens"] == b"500"
    account.correct(800, 0.0)
    assert dict(account.headers(0.0))[b"x-ratelimit-remaining-tokens"] == b"0"
    denied = account.enter(1, 0.0)
    assert denied is not None
    assert denied[1] == 31


def test_a_request_larger_than_the_limit_needs_a_full_minutes_rest_and_is_served() -> None:
    account = Account(key(tokens_per_minute=60), 0.0)
    assert account.enter(1000, 0.0) is None
    denied = account.enter(1000, 60.0)
    assert denied is not None
    assert account.enter(1000, 1000.0) is None


def test_a_key_has_only_so_many_requests_at_once() -> None:
    account = Account(key(max_concurrent=1), 0.0)
    assert account.enter(1, 0.0) is None
    denied = account.enter(1, 0.0)
    assert denied is not None
    assert denied[0].code == "concurrency_limit_exceeded"
    account.leave()
    assert account.enter(1, 0.0) is None
    assert account.headers(0.0) == []


def test_a_changed_limit_does_not_forget_what_was_used() -> None:
    accounts = Accounts()
    account = accounts.of(key(tokens_per_minute=600), 0.0)
    account.enter(500, 0.0)
    accounts.renew([key(tokens_per_minute=700)], 0.0)
    assert accounts.of(key(), 0.0) is account
    assert dict(account.headers(0.0))[b"x-ratelimit-remaining-tokens"] == b"200"
    accounts.renew([key()], 0.0)
    assert not account.meters_tokens
    accounts.renew([], 0.0)
    assert accounts.of(key(), 0.0) is account  # one of its requests is still there
    account.leave()
    accounts.renew([], 0.0)
    assert accounts.of(key(), 0.0) is not account


def test_workers_together_allow_what_one_would() -> None:
    config = EntranceConfig(max_concurrent=10, max_per_decode=7, max_queued=5)
    shares = [config.share(number, 4) for number in range(4)]
    for field, bound in (("max_concurrent", 10), ("max_per_decode", 7), ("max_queued", 5)):
        assert sum(getattr(share, field) for share in shares) == bound
    assert min(share.max_concurrent for share in shares) > 0
    assert EntranceConfig().share(1, 4).max_concurrent == 0
    whole = key(requests_per_minute=60, tokens_per_minute=4000, max_concurrent=10)
    limited = [whole.share(number, 4) for number in range(4)]
    assert {(share.requests_per_minute, share.tokens_per_minute) for share in limited} == {(15, 1000)}
    assert [share.max_concurrent for share in limited] == [3, 3, 2, 2]
    accounts = Accounts(1, 2)
    assert accounts.of(key(requests_per_minute=60), 0.0).headers(0.0)[0] == (b"x-ratelimit-limit-requests", b"30")
    accounts.renew([key(requests_per_minute=20)], 0.0)
    assert accounts.of(key(), 0.0).headers(0.0)[0] == (b"x-ratelimit-limit-requests", b"10")


def test_too_little_to_be_divided_is_told() -> None:
    problems: list[str] = []
    check_entrance(EntranceSettings(max_concurrent=3, max_per_decode=4), problems, workers=4)
    assert len(problems) == 1
    assert "--max-concurrent 3 is less than --workers 4" in problems[0]


def test_a_key_with_fewer_requests_at_once_than_workers_is_refused_at_the_start_and_when_keys_are_read_again(
    tmp_path: Path,
) -> None:
    file = tmp_path / "keys.toml"
    entry = f'[[keys]]\nname = "a"\nhash = "{key().hash}"\nmax_concurrent = '
    file.write_text(entry + "1")
    problems: list[str] = []
    check_entrance(EntranceSettings(keys_file=str(file)), problems, workers=1)
    assert problems == []
    check_entrance(EntranceSettings(keys_file=str(file)), problems, workers=8)
    assert len(problems) == 1
    assert "key 'a': max_concurrent = 1 is less than --workers 8" in problems[0]
    file.write_text(entry + "10")
    ring = Keyring(file, read_key_file(file, 8), worker=0, num_workers=8)
    file.write_text(entry + "7")
    with pytest.raises(ConfigError, match="max_concurrent = 7 is less than --workers 8"):
        asyncio.run(ring.reload(0.0))
