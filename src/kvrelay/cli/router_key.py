"""``kvrelay router key``: make an API key."""

from __future__ import annotations

import datetime as dt
import json
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.errors import ConfigError
from kvrelay.router.core.admission.keys import ID_BYTES, SALT_BYTES, SECRET_BYTES, hash_secret, make_secret, read_keys
from kvrelay.router.entrance.keyring import read_key_file

if TYPE_CHECKING:
    import argparse


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``key``."""
    key = verbs.add_parser(
        "key",
        help="make an API key for --keys-file",
        description="Make an API key: its entry goes to FILE, or is printed; its secret is shown once.",
    )
    key.add_argument("name", metavar="NAME", help="what the key is called in logs and metrics")
    key.add_argument("--file", type=Path, metavar="FILE", help="append the entry to this TOML file; made if missing")
    key.add_argument("--expires", metavar="WHEN", help="a date or time, such as 2027-01-31 or 2027-01-31T12:00:00Z")
    key.add_argument("--model", action="append", default=[], metavar="NAME", help="a model it is for; repeat for more")
    key.add_argument("--requests-per-minute", type=float, metavar="N", help="requests")
    key.add_argument("--tokens-per-minute", type=float, metavar="N", help="tokens, prompt and completion together")
    key.add_argument("--max-concurrent", type=int, metavar="N", help="requests at once")
    key.add_argument("--weight", type=float, metavar="W", help="its share beside others' (1)")
    key.add_argument("--min-priority", type=int, metavar="P", help="the most urgent priority it may ask for (0)")
    key.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make one. The secret goes to standard output, everything else to standard error or the file."""
    secret = make_secret(secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES))
    fields: dict[str, Any] = {"name": args.name, "hash": hash_secret(secret, secrets.token_bytes(SALT_BYTES))}
    if args.expires is not None:
        fields["expires"] = _moment(args.expires)
    if args.model:
        fields["models"] = args.model
    for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent", "weight", "min_priority"):
        if (value := getattr(args, name)) is not None:
            fields[name] = value
    read_keys({"keys": [fields]}, "the key")
    entry = "[[keys]]\n" + "".join(f"{name} = {_toml(value)}\n" for name, value in fields.items())
    if args.file is None:
        print(entry, file=sys.stderr)
        print("Put the lines above into --keys-file. The secret, shown this once:", file=sys.stderr)
    else:
        _append(args.file, args.name, entry)
        print(f"Added to {args.file}. The secret, shown this once:", file=sys.stderr)
    print(secret)
    return 0


def _append(file: Path, name: str, entry: str) -> None:
    if file.suffix == ".json":
        raise ConfigError(f"--file {str(file)!r}: entries are added to TOML files only; leave --file out and add it")
    if file.exists():
        if name in {key.name for key in read_key_file(file).keys}:
            raise ConfigError(
                f"{str(file)!r} has a key {name!r} already: choose another name, or remove it there first"
            )
        entry = "\n" + entry
    try:
        file.touch(mode=0o600)
        with file.open("a", encoding="utf-8") as out:
            out.write(entry)
    except OSError as error:
        raise ConfigError(f"{str(file)!r} cannot be written: {error.strerror or error}") from None


def _moment(said: str) -> dt.datetime | dt.date:
    try:
        return dt.date.fromisoformat(said)
    except ValueError:
        pass
    try:
        return dt.datetime.fromisoformat(said)
    except ValueError:
        raise ConfigError(
            f"--expires {said!r} is not a date or time: write 2027-01-31 or 2027-01-31T12:00:00Z"
        ) from None


def _toml(value: object) -> str:
    if isinstance(value, dt.datetime | dt.date):
        return value.isoformat()
    return json.dumps(value)  # of strings, numbers and lists of strings TOML takes JSON's form
