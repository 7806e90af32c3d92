from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from kvrelay.cli import build_parser
from kvrelay.cli.up import read_settings
from kvrelay.errors import ConfigError
from kvrelay.launch.core.config import resolve, show
from kvrelay.launch.core.settings import UpSettings, flag_of, leaves, variable_of
from kvrelay.pool import settings as pool


def problems_of(flags: dict[str, object], environ: dict[str, str] | None = None, text: str = "") -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        resolve(flags, environ or {}, text, "up.toml")
    return caught.value.problems


def test_a_flag_wins_over_the_environment_the_environment_over_the_file_the_file_over_the_default() -> None:
    text = "port = 1\nchunk_tokens = 1\n[pool]\nsize = '1MiB'\n"
    environ = {"KVRELAY_PORT": "2", "KVRELAY_CHUNK_TOKENS": "2"}
    settings, origins = resolve({"port": "3"}, environ, text, "up.toml")
    assert (settings.port, settings.chunk_tokens, settings.pool.size, settings.host) == (3, 2, 1 << 20, "127.0.0.1")
    assert [origins[path] for path in ("port", "chunk_tokens", "pool.size", "host")] == [
        "--port",
        "KVRELAY_CHUNK_TOKENS",
        "up.toml",
        "default",
    ]


def test_all_problems_are_listed_at_once_each_with_its_value_and_origin() -> None:
    problems = problems_of(
        {"prefill.count": "x", "connector": "carrier-pigeon"},
        {"KVRELAY_PORT": "70000"},
        "prot = 1\n[decode]\nmax_num_batched_token = 5\n",
    )
    assert len(problems) == 5
    assert "prefill.count = 'x' (from --prefill): input should be a valid integer" in "\n".join(problems)
    assert "port = '70000' (from KVRELAY_PORT): input should be less than or equal to 65535" in problems
    assert "prot (from up.toml): unknown setting; did you mean port?" in problems
    assert (
        "decode.max_num_batched_token (from up.toml): unknown setting; did you mean decode.max_num_batched_tokens?"
        in problems
    )
    assert any("'carrier-pigeon' (from --connector)" in line and "'nixl'" in line for line in problems)


def test_every_variable_of_another_part_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {name for path in pool.leaves() if (name := pool.variable_of(path)) is not None}
    others |= {"KVRELAY_POOL_TOKEN", "KVRELAY_ROUTER_ADMIN_TOKEN", "KVRELAY_ENGINE_API_KEY", "KVRELAY_PURE"}
    parser = build_parser()
    for name in others - {variable_of(path) for path in leaves()}:
        monkeypatch.setenv(name, "1")
        read_settings(parser.parse_args(["up", "model"]))
        monkeypatch.delenv(name)


def test_a_misspelt_variable_is_an_error_and_a_foreign_one_is_not() -> None:
    assert problems_of({}, {"KVRELAY_PREFIL_COUNT": "1"}) == (
        "KVRELAY_PREFIL_COUNT (environment): unknown setting; did you mean KVRELAY_PREFILL_COUNT?",
    )
    resolve({}, {"KVRELAY_POOL_TOKEN": "secret", "KVRELAY_SOMETHING_ELSE": "1"})


def test_a_file_that_is_not_toml_is_named() -> None:
    (problem,) = problems_of({}, text="port =")
    assert problem.startswith("up.toml: not valid TOML: ")


def test_a_value_where_a_table_belongs_is_an_error() -> None:
    (problem,) = problems_of({}, text="prefill = 2")
    assert problem.startswith("prefill = 2 (from up.toml): ")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_hand_over_needs_engines_of_both_roles(role: str) -> None:
    assert problems_of({f"{role}.count": "0"}) == (
        f"{role}.count = 0 (from --{role}): at least one {role} engine is needed; set --{role} 1",
    )


def test_plain_engines_are_decode_engines_only() -> None:
    settings, origins = resolve({"connector": "none"}, {})
    assert settings.prefill.count == 0
    assert origins["prefill.count"] == "default with connector none"
    (problem,) = problems_of({"connector": "none", "prefill.count": "1"})
    assert "connector none does not hand KV over" in problem


def test_arguments_that_the_launcher_writes_itself_are_refused_with_what_to_use_instead() -> None:
    problems = problems_of({"prefill.args": "--port 1 --seed 2", "engine.args": "--kv-transfer-config={}"})
    assert problems == (
        (
            "engine.args (from --engine-args): --kv-transfer-config={} is chosen by kvrelay up; "
            "use --connector and the table connector_options"
        ),
        (
            "prefill.args (from --prefill-args): --port is chosen by kvrelay up; "
            "use --port (engines themselves get free ports)"
        ),
    )


def test_cores_are_given_for_each_engine_or_for_none() -> None:
    (problem,) = problems_of({"decode.count": "2", "decode.cpus": "0-3"})
    assert problem.startswith("decode.cpus = ['0-3'] (from --decode-cpus): 1 entries for 2 engines")
    settings, _ = resolve({"decode.count": "2", "decode.cpus": "0-3 4|5"}, {})
    assert settings.decode.cpus == ("0-3", "4|5")


def test_a_role_inherits_what_it_does_not_set_and_arguments_add_up() -> None:
    text = """
    [engine]
    dtype = "float32"
    max_model_len = 4096
    args = "--seed 1"
    env = { A = "engine", B = "engine" }
    [prefill]
    max_model_len = 8192
    args = ["--x", "a b"]
    env = { A = "prefill" }
    """
    settings, _ = resolve({}, {}, text, "up.toml")
    role = settings.role("prefill")
    assert (role.dtype, role.max_model_len) == ("float32", 8192)
    assert role.args == ("--seed", "1", "--x", "a b")
    assert role.env == {"A": "prefill", "B": "engine"}
    assert settings.role("decode").max_model_len == 4096


def test_what_show_prints_is_toml_that_resolves_to_the_same_settings() -> None:
    text = "connector_options = { load_threads = 3, weights_id = 'x' }\n[prefill]\nenv = { A = 'b \"c\"' }\n"
    flags = {"model": "/m", "prefill.count": "2", "pool.size": "2GiB", "engine.args": "--a 'b c'"}
    configuration = resolve(flags, {}, text, "up.toml")
    printed = show(configuration)
    assert "prefill.count = 2" in printed
    assert "# --prefill" in printed
    assert "# engine.dtype is not set" in printed
    assert resolve({}, {}, printed, "again").settings == configuration.settings
    assert tomllib.loads(printed)["pool"]["size"] == 2 << 30


def test_every_setting_has_a_distinct_flag_and_variable() -> None:
    flags = [flag for path in leaves() if (flag := flag_of(path))]
    variables = [variable_of(path) for path in leaves()]
    assert len(set(flags)) == len(flags)
    assert len(set(variables)) == len(variables)
    assert flag_of("prefill.max_num_batched_tokens") == "--prefill-max-num-batched-tokens"
    assert flag_of("engine.dtype") == "--dtype"
    assert flag_of("engine.args") == "--engine-args"
    assert flag_of("ready_timeout_s") == "--ready-timeout"
    assert variable_of("pool.size") == "KVRELAY_POOL_SIZE"


def test_every_setting_says_what_it_means() -> None:
    assert [path for path, field in leaves().items() if not field.description] == []


def test_the_example_file_resolves() -> None:
    text = (Path(__file__).parents[3] / "examples" / "stack.toml").read_text()
    settings, _ = resolve({}, {}, text, "stack.toml")
    assert (settings.prefill.count, settings.role("decode").dtype) == (2, "float32")


def test_settings_are_frozen() -> None:
    settings = UpSettings(model=Path("/m"))
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1
