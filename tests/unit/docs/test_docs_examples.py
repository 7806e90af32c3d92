"""What the documents tell to run can be run; what they tell to configure is accepted."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING, Any

from kvrelay.cli import build_parser
from kvrelay.cli.router import settings_of
from kvrelay.cli.router_file import load as load_router_file
from kvrelay.cli.up import read_settings
from kvrelay.connector.config import parse_extra_config
from kvrelay.errors import ConfigError
from kvrelay.launch.core.config import resolve
from kvrelay.launch.core.settings import leaves, variable_of
from kvrelay.pool import settings as pool_settings
from kvrelay.pool.config import resolve as resolve_pool
from kvrelay.router.core.admission.keys import read_keys
from kvrelay.router.entrance.settings import ENGINE_KEY_VARIABLE

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

FOREIGN_FLAGS = {
    "--model", "--kv-transfer-config", "--seed", "--enable-lora", "--local-dir", "--sizes", "--batch-mib", "--repeats",
    "--section", "--no-peers", "--api-key", "--otlp-traces-endpoint", "--scheduling-policy",
    "--ssl-certfile", "--ssl-keyfile", "--enable-auto-tool-choice", "--tool-call-parser",
    "--enable-force-include-usage", "--enable-scale-out",
    "--enable-prompt-embeds", "--trust-request-chat-template", "--compilation-config",
    "--prefill-X", "--decode-X", "--prefill-", "--decode-",
}  # fmt: skip
"""Of vLLM, of the model hub's command and of the benchmark; and patterns."""


def commands(blocks: list[tuple[str, str, str]]) -> Iterator[tuple[str, list[str]]]:
    """Every command of a shell block, as words; comments and environment assignments left out."""
    for page, kind, text in blocks:
        if kind != "bash":
            continue
        plain = re.sub(r"(^|\s)#.*$", "", text.replace("\\\n", " "), flags=re.MULTILINE)
        lexer = shlex.shlex(plain, posix=True, punctuation_chars="&;\n")
        lexer.commenters = ""
        lexer.whitespace = " \t"
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, "\n"]:
            if set(word) <= set("&;\n"):
                if words:
                    yield page, words
                words = []
            elif words or not re.match(r"[A-Z_]+=", word):
                words.append(word)


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    found: set[str] = set()
    for action in parser._actions:
        found.update(action.option_strings)
        if isinstance(action.choices, dict):
            for inner in action.choices.values():
                found |= flags_of(inner)
    return found


def test_runnable_python_examples_run(blocks: list[tuple[str, str, str]], tmp_path: Path) -> None:
    examples = [(page, text) for page, kind, text in blocks if kind == "python runnable"]
    assert examples
    assert not [page for page, kind, _ in blocks if kind == "python"], "mark Python examples runnable"
    for page, text in examples:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", text],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{page}\n{text}\n{done.stderr}"


def test_kvrelay_commands_are_understood(
    blocks: list[tuple[str, str, str]], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    parser, seen = build_parser(), 0
    for page, words in commands(blocks):
        if words[0] != "kvrelay":
            continue
        try:
            args = parser.parse_args(words[1:])
        except SystemExit:
            raise AssertionError(f"{page}: {shlex.join(words)}") from None
        if args.verb in {"up", "config"}:
            read_settings(args)
        seen += 1
    assert seen > 10


def test_make_targets_exist(root: Path, blocks: list[tuple[str, str, str]], prose: dict[str, str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    told = {
        (page, word) for page, words in commands(blocks) if words[0] == "make" for word in words[1:] if "=" not in word
    }
    told |= {(page, name) for page, text in prose.items() for name in re.findall(r"`make ([a-z-]+)", text)}
    assert told
    assert not [(page, name) for page, name in told if name not in targets]


def test_python_modules_that_are_run_exist(root: Path, blocks: list[tuple[str, str, str]]) -> None:
    modules = {words[words.index("-m") + 1] for _, words in commands(blocks) if "-m" in words}
    ours = {name for name in modules if name.startswith("kvrelay")}
    assert ours
    assert not [name for name in ours if not (root / "src" / (name.replace(".", "/") + ".py")).exists()]


def test_flags_named_in_the_text_exist(prose: dict[str, str]) -> None:
    known = flags_of(build_parser()) | FOREIGN_FLAGS
    named = {
        (page, flag)
        for page, text in prose.items()
        for code in re.findall(r"`([^`]+)`", text)
        for flag in re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", code)
    }
    assert not [(page, flag) for page, flag in sorted(named) if flag not in known]


def test_environment_variables_named_anywhere_exist(pages: dict[str, str]) -> None:
    known = {variable_of(path) for path in leaves()} | {
        "KVRELAY_POOL_TOKEN",
        ENGINE_KEY_VARIABLE,
        "KVRELAY_ROUTER_ADMIN_TOKEN",
        "KVRELAY_PURE",
        "KVRELAY_",
        "KVRELAY_POOL_",
    }
    known |= {name for path in pool_settings.leaves() if (name := pool_settings.variable_of(path)) is not None}
    named = {(page, name) for page, text in pages.items() for name in re.findall(r"\bKVRELAY_[A-Z_]*", text)}
    assert not [(page, name) for page, name in sorted(named) if name not in known]


def test_configuration_files_are_accepted(root: Path, blocks: list[tuple[str, str, str]]) -> None:
    texts = [text for _, kind, text in blocks if kind == "toml"]
    examples = [path.read_text() for path in root.glob("examples/*.toml")]
    assert texts
    assert examples
    for text in [*texts, *examples]:
        resolve({}, {}, text, "an example")


def test_files_of_keys_are_accepted(blocks: list[tuple[str, str, str]]) -> None:
    texts = [text for _, kind, text in blocks if kind == "toml keys"]
    assert texts
    for text in texts:
        read_keys(tomllib.loads(text), "an example")


def test_configuration_files_of_pools_are_accepted(blocks: list[tuple[str, str, str]]) -> None:
    texts = [text for _, kind, text in blocks if kind == "toml pool"]
    assert texts
    for text in texts:
        try:
            resolve_pool({}, {}, text, "an example")
        except ConfigError as error:
            there = [line for line in error.problems if "no such file" not in line and "cannot be read" not in line]
            assert not there


def test_configuration_files_of_routers_are_accepted(blocks: list[tuple[str, str, str]], tmp_path: Path) -> None:
    texts = [text for _, kind, text in blocks if kind == "toml router"]
    assert texts
    file = tmp_path / "router.toml"
    for text in texts:
        file.write_text(text)
        load_router_file(build_parser().parse_args(["router", "serve", "--config", str(file)]), settings_of)


def test_transfer_configurations_are_accepted(root: Path, blocks: list[tuple[str, str, str]]) -> None:
    parser: list[dict[str, Any]] = [json.loads(text) for _, kind, text in blocks if kind == "json"]
    for _, words in commands(blocks):
        if "--kv-transfer-config" in words:
            parser.append(json.loads(words[words.index("--kv-transfer-config") + 1]))
    configs = [config for config in parser if "kv_connector" in config]
    assert len(configs) >= 3
    for config in configs:
        parse_extra_config(config["kv_connector_extra_config"], "engine")
        module = root / "src" / (config["kv_connector_module_path"].replace(".", "/") + ".py")
        assert f"class {config['kv_connector']}(" in module.read_text()
        assert config["kv_role"] in {"kv_both", "kv_producer", "kv_consumer"}
        assert config["kv_load_failure_policy"] == "recompute"
