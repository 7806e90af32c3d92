"""``kvrelay up`` and ``kvrelay config`` as a user types them: what cannot work is said before anything starts."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvrelay.cli import up_commands
from kvrelay.errors import ConfigError
from kvrelay.launch import host, rundir
from kvrelay.launch.core.config import resolve
from kvrelay.launch.core.plan import make_plan
from kvrelay.launch.core.settings import UpSettings
from kvrelay.launch.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def kvrelay(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")} | variables
    command = [sys.executable, "-m", "kvrelay", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ, check=False)


def refusals(*arguments: object, **variables: str) -> list[str]:
    """The lines with which a start is refused."""
    done = kvrelay(*arguments, **variables)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert all(line.startswith("kvrelay: error: ") for line in lines)
    return [line.removeprefix("kvrelay: error: ") for line in lines]


def test_a_model_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    assert any(
        line.startswith(f"model {tmp_path}/nowhere: no such directory; download it first")
        for line in refusals("up", tmp_path / "nowhere")
    )


def test_a_model_without_configuration_or_weights_is_named(tmp_path: Path, model: Path) -> None:
    assert any(f"model {tmp_path}: it has no config.json" in line for line in refusals("up", tmp_path))
    (model / "model.safetensors").unlink()
    assert any(f"model {model}: it has no weights" in line for line in refusals("up", model))


def test_no_model_at_all_is_said() -> None:
    assert any(line.startswith("no model: name its directory") for line in refusals("up"))


def test_a_port_in_use_is_named_with_the_flag_that_changes_it(model: Path, busy_port: int) -> None:
    lines = refusals("up", model, "--port", busy_port)
    assert any(
        line.startswith(f"port {busy_port} on 127.0.0.1 is in use; choose another with --port") for line in lines
    )


def test_an_address_of_another_machine_is_named(model: Path) -> None:
    lines = refusals("up", model, "--host", "192.0.2.55", "--port", "18999")
    assert any(line.startswith("cannot listen on 192.0.2.55 port 18999") and "--host" in line for line in lines)


def test_a_token_file_that_is_missing_or_empty_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name in ("missing", "empty"):
        lines = refusals("up", model, "--port", "18998", "--pool-token-file", tmp_path / name)
        assert any(str(tmp_path / name) in line for line in lines)


def test_what_the_router_and_the_pool_would_refuse_is_told_before_any_engine_is_started(
    model: Path, tmp_path: Path
) -> None:
    """All of it at once, by the flags of `kvrelay up` where it has them."""
    gone = tmp_path / "gone"
    lines = refusals(
        "up", model, "--port", "18995", "--run-dir", tmp_path / "run", "--router-keys-file", gone, "--router-tls-cert",
        gone, "--router-args=--retry-share 7", "--pool-args=--huge-pages 3KiB",
    )  # fmt: skip
    wanted = ("router: --router-keys-file", "router: --router-tls-cert", "router: --retry-share 7 is out of range",
              "pool: huge_pages")  # fmt: skip
    for problem in wanted:
        assert any(line.startswith(problem) for line in lines), (problem, lines)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"connector": "direct"},
        {"connector": "nixl", "prefill.count": "2", "router.workers": "2", "router.max_concurrent": "8"},
        {"connector": "none"},
        {"pool.port": "18990", "pool.args": "--huge-pages none --log-level debug", "router.policy": "kv-aware"},
        {"dispatch": "overlapped", "on_lost_kv": "reprefill", "router.args": "--retry-share 0 --log-level debug"},
        {"router.access_log": "-", "router.disaggregate_above": "auto", "first_token": "prefill"},
    ],
)
def test_what_they_would_take_is_no_problem(model: Path, tmp_path: Path, given: dict[str, str]) -> None:
    given = {**given, **({"prefill.count": "0"} if given.get("connector") == "none" else {})}
    settings = resolve({"model": str(model), **given}, {}).settings
    plan = make_plan(settings, host.facts(settings, tmp_path))
    assert up_commands.problems_of(plan, settings) == []


def test_what_the_router_would_miss_when_it_starts_is_told_before_any_engine_is_started(
    model: Path, tmp_path: Path, busy_port: int
) -> None:
    lines = refusals(
        "up", model, "--port", "18993", "--router-access-log", tmp_path / "none" / "log", "--router-admin-listen",
        f"127.0.0.1:{busy_port}", "--router-policy", "kv-aware", f"--router-args=--tokenizer {tmp_path / 'nowhere'}",
    )  # fmt: skip
    for problem in (
        f"router: --router-access-log {tmp_path}/none/log cannot be written: No such file or directory",
        f"router: --router-admin-listen 127.0.0.1:{busy_port}: cannot listen there: ",
        "router: --tokenizer",
    ):
        assert any(line.startswith(problem) for line in lines), (problem, lines)


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("8001", "--router-admin-listen: address '8001' is not HOST:PORT with a port from 0 to 65535"),
        ("0.0.0.0:0", "--router-admin-listen 0.0.0.0:0 can be reached from other hosts, and the admin API asks for no"),
    ],
)
def test_an_admin_api_that_cannot_be_is_told_with_all_else_before_anything_is_started(
    model: Path, busy_port: int, address: str, problem: str
) -> None:
    pool = f"--pool-args=--admin-listen {address}"
    lines = refusals("up", model, "--port", busy_port, "--router-admin-listen", address, pool)
    assert any(line.startswith(f"router: {problem}") for line in lines), lines
    assert any(line.startswith(f"pool: admin.listen = '{address}'") for line in lines), lines
    assert any("is in use" in line for line in lines), lines


def test_arguments_that_the_router_or_the_pool_does_not_know_are_told_before_any_engine_is_started(
    model: Path,
) -> None:
    lines = refusals("up", model, "--port", "18994", "--router-args=--polcy random", "--pool-args=--foo")
    near = "did you mean --router-policy?"
    assert f"router: unrecognized arguments: --polcy random; {near} (from --router-args)" in lines
    assert "pool: unrecognized arguments: --foo; see `kvrelay pool serve --help` (from --pool-args)" in lines
    assert any(line.startswith("router: ") and "help" in line for line in refusals("up", model, "--router-args=-h"))


def test_several_problems_are_told_together(tmp_path: Path, busy_port: int) -> None:
    lines = refusals("up", tmp_path / "nowhere", "--port", busy_port)
    assert any("no such directory" in line for line in lines)
    assert any("is in use" in line for line in lines)


def test_a_configuration_that_cannot_work_is_told_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "up.toml"
    file.write_text("prefil = 1\n[decode]\ncount = 0\n")
    lines = refusals("up", "--config", file, "--port", "none")
    assert any(line.startswith(f"prefil (from {file}): unknown setting") for line in lines)
    assert any(line.startswith("port = 'none' (from --port): input should be a valid integer") for line in lines)


def test_a_configuration_file_that_is_missing_is_named(tmp_path: Path) -> None:
    (line,) = refusals("up", "--config", tmp_path / "nowhere.toml")
    assert line.startswith(f"--config {tmp_path}/nowhere.toml: cannot be read")


@pytest.mark.parametrize(
    ("connector", "why"),
    [
        ("offloading", "CPU Offloading is currently only supported on CUDA-alike and XPU GPUs"),
        ("lmcache", "No supported cpu connector found"),
        ("mooncake", "Cannot access accelerator device when none is available"),
    ],
)
def test_a_connector_that_does_nothing_on_cpus_is_refused_with_the_reason(
    model: Path, connector: str, why: str
) -> None:
    lines = refusals("up", model, "--port", "18996", "--connector", connector, CUDA_VISIBLE_DEVICES="")
    (line,) = (line for line in lines if line.startswith(f"connector {connector}: ") and why in line)
    assert "use --connector kvrelay" in line


def test_bounds_of_a_connector_are_refused_before_the_start(model: Path) -> None:
    steps = ("--max-model-len", "4096", "--prefill-max-num-batched-tokens", "512")
    lines = refusals("up", model, "--port", "18996", "--connector", "shared-storage", *steps)
    assert any("prefill.max_num_batched_tokens = 512 is less than max_model_len = 4096" in line for line in lines)


def test_an_unknown_connector_is_told_all_there_are(model: Path) -> None:
    (line,) = refusals("up", model, "--connector", "pigeon")
    assert line == (
        "connector = 'pigeon' (from --connector): unknown connector; choose one of 'kvrelay', 'direct', 'nixl', "
        "'nixl-push', 'shared-storage', 'multi', 'offloading', 'lmcache', 'mooncake', 'none'"
    )


@pytest.mark.vllm
def test_more_memory_than_there_is_is_refused_with_the_sum(model: Path) -> None:
    (line,) = refusals("up", model, "--port", "18997", "--pool-size", "900TiB")
    assert line.startswith("not enough memory: about 900 TiB needed (pool 900 TiB, ")
    assert "--pool-size" in line


@pytest.mark.vllm
def test_every_rank_of_every_replica_counts_for_the_memory(model: Path) -> None:
    sizes = ("--pool-size", "1MiB", "--kv-cache-memory", "20TiB")
    parallel = ("--prefill-tensor-parallel-size", "2", "--prefill-data-parallel-size", "2")
    (line,) = refusals("up", model, "--port", "18997", *sizes, *parallel)
    assert "about 100 TiB needed" in line
    assert "1 prefill engine 80 TiB, 1 decode engine 20 TiB" in line


@pytest.mark.vllm
def test_stages_that_are_not_compiled_are_refused_on_cpus(model: Path) -> None:
    stages = ("--prefill-pipeline-parallel-size", "2", "--enforce-eager")
    (line,) = refusals("up", model, "--port", "18997", *stages)
    assert line.startswith(
        "prefill engines: vLLM for CPUs crashes with several pipeline stages (2) and --enforce-eager"
    )
    assert line.endswith("or pass --no-prefill-enforce-eager")


@pytest.mark.vllm
def test_a_run_directory_in_use_is_refused(model: Path, tmp_path: Path) -> None:
    holder = RunDir(tmp_path / "run")
    (line,) = refusals("up", model, "--port", "18996", "--run-dir", tmp_path / "run", "--pool-size", "1MiB")
    assert "another `kvrelay up` uses it" in line
    holder.clean([], keep_logs=False)


def test_config_show_prints_values_and_origins_as_toml(tmp_path: Path) -> None:
    file = tmp_path / "up.toml"
    file.write_text("[prefill]\nmax_num_batched_tokens = 256\n")
    done = kvrelay("config", "show", "/m", "--config", file, "--decode", "2", KVRELAY_PORT="9000")
    assert done.returncode == 0, done.stderr
    for line in (f"prefill.max_num_batched_tokens = 256 *# {re.escape(str(file))}", "port = 9000 *# KVRELAY_PORT"):
        assert re.search(line, done.stdout)
    shown = tomllib.loads(done.stdout)
    assert shown["model"] == "/m"
    assert shown["decode"]["count"] == 2


def test_a_run_directory_loses_what_a_run_put_there_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    run_dir = RunDir(tmp_path)
    (tmp_path / "P0.log").touch()
    (tmp_path / "ipc" / "socket").touch()
    run_dir.clean(["P0"], keep_logs=False)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_run_directory_keeps_the_logs_of_a_failure(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    (run_dir.path / "P0.log").touch()
    run_dir.clean(["P0"], keep_logs=True)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["P0.log"]


def test_a_fresh_run_directory_is_private_and_disappears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run_dir = RunDir(None)
    assert run_dir.path.stat().st_mode & 0o077 == 0
    run_dir.clean([], keep_logs=False)
    assert not run_dir.path.exists()


def test_free_ports_are_distinct_free_and_outside_the_range_of_outgoing_connections() -> None:
    ports = list(host.free_ports(20, taken={18001}))
    assert len(set(ports)) == 20
    assert 18001 not in ports
    assert all(host.listening_problem("127.0.0.1", port) is None for port in ports)


def test_the_host_has_cores_memory_and_ports(tmp_path: Path) -> None:
    assert set(host.cores()) <= os.sched_getaffinity(0)
    assert host.available_memory() > 0
    assert len(host.facts(UpSettings(), tmp_path).ports) == 2


def test_folders_of_a_run_go_with_it_and_those_that_were_there_before_too(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    folder = tmp_path / "run" / "kv"
    for _ in range(2):  # a launcher that was killed left it behind
        run_dir.make([str(folder)])
    (folder / "object").touch()
    run_dir.clean([], keep_logs=False)
    assert not (tmp_path / "run").exists()


def test_a_directory_that_was_chosen_and_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(rundir, "LONGEST_RUN_DIR", 4096)
    with pytest.raises(ConfigError, match=rf"run_dir = {tmp_path}/state/kvrelay/[\d-]+: Not a directory"):
        RunDir(None)


def test_a_user_without_a_home_gets_a_directory_of_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    run_dir = RunDir(None)
    assert run_dir.path.name.startswith("kvrelay-")
    run_dir.clean([], keep_logs=False)
