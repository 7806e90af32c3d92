from __future__ import annotations

import json
import shlex
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.errors import ConfigError
from kvrelay.launch.core.config import resolve
from kvrelay.launch.core.placement import bind_cores, give_devices
from kvrelay.launch.core.plan import MAX_SOCKET_PATH, HostFacts, Plan, ProcessSpec, make_plan, ports_needed
from kvrelay.launch.service import curl_line

if TYPE_CHECKING:
    from kvrelay.launch.core.settings import UpSettings

RUN_DIR = "/run/kv"
SOCKET = "/run/kv/ipc/pool.sock"


def settings_of(flags: dict[str, object] | None = None, text: str = "") -> UpSettings:
    return resolve({"model": "/models/tiny", **(flags or {})}, {}, text, "up.toml").settings


def plan_of(flags: dict[str, object] | None = None, text: str = "", **facts: Any) -> Plan:
    defaults: dict[str, Any] = {
        "python": "py",
        "run_dir": RUN_DIR,
        "environ": {"HOME": "/home/x"},
        "cores": (0, 1),
        "devices": (),
        "ports": tuple(range(20001, 20100)),
    }
    return make_plan(settings_of(flags, text), HostFacts(**(defaults | facts)))


def spec(plan: Plan, name: str) -> ProcessSpec:
    return next(process for process in plan.processes if process.name == name)


def after(process: ProcessSpec, flag: str) -> str:
    return process.argv[process.argv.index(flag) + 1]


def transfer(process: ProcessSpec) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(after(process, "--kv-transfer-config"))
    return value


def test_pool_engines_and_router_form_three_stages() -> None:
    plan = plan_of({"prefill.count": "2", "decode.count": "1"})
    assert [(process.name, process.role, process.stage) for process in plan.processes] == [
        ("pool", "pool", 0),
        ("P0", "prefill", 1),
        ("P1", "prefill", 1),
        ("D0", "decode", 1),
        ("router", "router", 2),
    ]
    assert plan.engines == ("P0", "P1", "D0")
    assert plan.endpoint == "http://127.0.0.1:8000"
    assert plan.pools == {"": f"unix:{SOCKET}"}


def test_the_pool_listens_on_a_socket_and_on_tcp_only_when_asked() -> None:
    pool = spec(plan_of({"pool.size": "2GiB"}), "pool")
    assert pool.argv == (
        *("py", "-P", "-m", "kvrelay", "pool", "serve", "--listen", "none"),
        *("--unix", SOCKET, "--size", str(2 << 30)),
    )
    assert pool.readiness.unix == SOCKET
    assert after(spec(plan_of({"pool.port": "7000"}), "pool"), "--listen") == "127.0.0.1:7000"


def test_the_router_knows_every_engine_by_its_url_the_pool_and_the_endpoint() -> None:
    plan = plan_of({"prefill.count": "2", "host": "0.0.0.0", "port": "9000", "router.args": "--log-level debug"})
    router = spec(plan, "router")
    assert router.argv == (
        *("py", "-P", "-m", "kvrelay", "router", "serve"),
        *("--prefill", "http://127.0.0.1:20001", "--prefill", "http://127.0.0.1:20002"),
        *("--decode", "http://127.0.0.1:20003", "--host", "0.0.0.0", "--port", "9000", "--connector", "kvrelay"),
        *("--drain-timeout", "10.0", "--pool", f"unix:{SOCKET}", "--log-level", "debug"),
    )
    assert router.grace_s > 10
    assert plan.endpoint == "http://127.0.0.1:9000"


def test_an_engine_gets_its_model_address_and_transfer_configuration() -> None:
    plan = plan_of()
    prefill, decode = spec(plan, "P0"), spec(plan, "D0")
    assert prefill.argv[:5] == ("py", "-P", "-m", "vllm.entrypoints.openai.api_server", "--model")
    assert after(prefill, "--model") == "/models/tiny"
    assert after(prefill, "--served-model-name") == "tiny"
    assert (after(prefill, "--host"), after(prefill, "--port")) == ("127.0.0.1", "20001")
    assert transfer(prefill) == {
        "kv_connector": "KvRelayConnector",
        "kv_connector_module_path": "kvrelay.connector.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"pool": f"unix:{SOCKET}", "engine": "P0", "chunk_tokens": 64},
    }
    assert transfer(decode)["kv_role"] == "kv_consumer"
    assert transfer(decode)["kv_connector_extra_config"]["engine"] == "D0"


def test_the_pools_token_and_connector_options_reach_all_who_need_them() -> None:
    plan = plan_of({"pool.token_file": "/t", "chunk_tokens": "32"}, "connector_options = { load_threads = 4 }")
    assert transfer(spec(plan, "P0"))["kv_connector_extra_config"] == {
        "pool": f"unix:{SOCKET}",
        "engine": "P0",
        "chunk_tokens": 32,
        "token_file": "/t",
        "load_threads": 4,
    }
    assert after(spec(plan, "pool"), "--token-file") == "/t"
    assert after(spec(plan, "router"), "--pool-token-file") == "/t"


def test_settings_become_arguments_of_the_engines_of_their_role() -> None:
    plan = plan_of(
        {
            "engine.dtype": "float32",
            "prefill.max_num_batched_tokens": "256",
            "decode.tensor_parallel_size": "2",
            "engine.enforce_eager": True,
            "decode.enforce_eager": False,
            "prefill.args": "--seed 5",
        }
    )
    prefill, decode = spec(plan, "P0"), spec(plan, "D0")
    assert after(prefill, "--dtype") == after(decode, "--dtype") == "float32"
    assert after(prefill, "--max-num-batched-tokens") == "256"
    assert "--max-num-batched-tokens" not in decode.argv
    assert after(decode, "--tensor-parallel-size") == "2"
    assert "--enforce-eager" in prefill.argv
    assert "--no-enforce-eager" in decode.argv
    assert prefill.argv[-2:] == ("--seed", "5")


def test_on_a_cpu_host_every_engine_gets_cores_and_a_bounded_kv_cache() -> None:
    plan = plan_of({"prefill.count": "1", "decode.count": "2"})
    bound = [spec(plan, name).env["VLLM_CPU_OMP_THREADS_BIND"] for name in plan.engines]
    assert bound == ["0", "1", "0"]
    assert after(spec(plan, "P0"), "--kv-cache-memory-bytes") == str(1 << 30)


def test_each_rank_gets_cores_and_each_replica_a_name_to_register_under() -> None:
    plan = plan_of(
        {
            "prefill.tensor_parallel_size": "2",
            "prefill.pipeline_parallel_size": "2",
            "decode.data_parallel_size": "2",
            "decode.args": "-tp 3",
        },
        cores=tuple(range(10)),
    )
    prefill, decode = spec(plan, "P0"), spec(plan, "D0")
    assert (after(prefill, "--tensor-parallel-size"), after(prefill, "--pipeline-parallel-size")) == ("2", "2")
    assert after(decode, "--data-parallel-size") == "2"
    assert prefill.env["VLLM_CPU_OMP_THREADS_BIND"] == "0|1|2|3"
    assert decode.env["VLLM_CPU_OMP_THREADS_BIND"] == "4|5|6|7|8|9"
    assert plan.connectors == ("P0", "D0-dp0", "D0-dp1")
    assert plan_of({"engine.args": "-dp=2"}).connectors == ("P0-dp0", "P0-dp1", "D0-dp0", "D0-dp1")


def test_engines_are_told_not_to_call_home_unless_the_environment_says_otherwise() -> None:
    env = spec(plan_of(), "P0").env
    assert (env["HF_HUB_OFFLINE"], env["VLLM_NO_USAGE_STATS"], env["HOME"]) == ("1", "1", "/home/x")
    assert spec(plan_of(environ={"HF_HUB_OFFLINE": "0"}), "P0").env["HF_HUB_OFFLINE"] == "0"


def test_a_users_own_binding_wins() -> None:
    plan = plan_of({"decode.cpus": "7"}, environ={"VLLM_CPU_OMP_THREADS_BIND": "5"})
    assert spec(plan, "P0").env["VLLM_CPU_OMP_THREADS_BIND"] == "5"
    assert spec(plan, "D0").env["VLLM_CPU_OMP_THREADS_BIND"] == "7"
    role_env = plan_of(text='[prefill]\nenv = { VLLM_CPU_OMP_THREADS_BIND = "3" }')
    assert spec(role_env, "P0").env["VLLM_CPU_OMP_THREADS_BIND"] == "3"


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        ({"engine.gpu_memory_utilization": "0.2"}, {}),
        ({"engine.args": "--kv-cache-memory-bytes 5"}, {}),
        ({"engine.args": "--gpu-memory-utilization=0.1"}, {}),
        ({}, {"VLLM_CPU_KVCACHE_SPACE": "2"}),
    ],
)
def test_a_kv_cache_sized_by_the_user_is_left_alone(flags: dict[str, object], environ: dict[str, str]) -> None:
    engine = spec(plan_of(flags, environ=environ), "P0")
    assert str(1 << 30) not in engine.argv
    assert engine.env.get("VLLM_CPU_KVCACHE_SPACE") == environ.get("VLLM_CPU_KVCACHE_SPACE")


def test_a_configured_kv_cache_wins_over_the_ambient_variable_that_vllm_would_prefer() -> None:
    engine = spec(plan_of({"engine.kv_cache_memory": "2GiB"}, environ={"VLLM_CPU_KVCACHE_SPACE": "9"}), "P0")
    assert after(engine, "--kv-cache-memory-bytes") == str(2 << 30)
    assert "VLLM_CPU_KVCACHE_SPACE" not in engine.env


def test_on_a_gpu_host_engines_get_devices_of_their_own_and_vllm_sizes_the_cache() -> None:
    plan = plan_of({"decode.tensor_parallel_size": "2"}, devices=("4", "5", "6"))
    assert spec(plan, "P0").env["CUDA_VISIBLE_DEVICES"] == "4"
    assert spec(plan, "D0").env["CUDA_VISIBLE_DEVICES"] == "5,6"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in spec(plan, "P0").env
    assert "--kv-cache-memory-bytes" not in spec(plan, "P0").argv


def test_too_few_devices_are_an_error_that_says_how_many() -> None:
    with pytest.raises(ConfigError, match=r"4 accelerators are needed .* but 1 are visible"):
        plan_of({"engine.args": "-tp 2"}, devices=("0",))


def test_nixl_engines_get_side_channels_of_their_own_and_no_pool() -> None:
    plan = plan_of({"connector": "nixl"})
    assert [process.name for process in plan.processes] == ["P0", "D0", "router"]
    assert not plan.pools
    prefill, decode = spec(plan, "P0"), spec(plan, "D0")
    assert transfer(prefill) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_buffer_device": "cpu",
    }
    ports = [prefill.readiness.port, decode.readiness.port]
    ports += [int(engine.env["VLLM_NIXL_SIDE_CHANNEL_PORT"]) for engine in (prefill, decode)]
    assert len(set(ports)) == 4 == ports_needed(settings_of({"connector": "nixl"}))
    assert "--pool" not in spec(plan, "router").argv


def test_a_plain_engine_is_the_endpoint_itself() -> None:
    plan = plan_of({"connector": "none", "port": "9001"})
    assert [process.name for process in plan.processes] == ["D0"]
    assert plan.endpoint == "http://127.0.0.1:9001"
    assert "--kv-transfer-config" not in spec(plan, "D0").argv


def test_sockets_of_vllm_go_into_the_run_directory_when_their_paths_fit() -> None:
    assert spec(plan_of(), "P0").env["VLLM_RPC_BASE_PATH"] == f"{RUN_DIR}/ipc"
    assert "VLLM_RPC_BASE_PATH" not in spec(plan_of(run_dir="/r" * 40), "P0").env


def test_a_run_directory_too_long_for_the_pools_socket_is_refused() -> None:
    with pytest.raises(ConfigError, match="give a shorter --run-dir"):
        plan_of(run_dir="/r" * 60)


def test_the_longest_of_several_pools_sockets_counts() -> None:
    run_dir = "/" + "r" * (MAX_SOCKET_PATH - len("/ipc/pool.sock") - 1)
    assert plan_of({"connector": "direct"}, run_dir=run_dir).pools
    with pytest.raises(ConfigError, match="give a shorter --run-dir"):
        plan_of({"connector": "direct", "prefill.count": "2"}, run_dir=run_dir)


def test_an_ipv6_endpoint_is_bracketed() -> None:
    assert plan_of({"host": "::"}).endpoint == "http://[::1]:8000"


@pytest.mark.parametrize(
    ("cores", "ranks", "bound"),
    [
        ([0, 1], [1, 1], ["0", "1"]),
        ([0, 1], [1, 1, 1], ["0", "1", "0"]),
        ([0, 1], [2], ["0|1"]),
        ([0, 1], [2, 1], ["0|1", "0"]),
        ([4, 5, 6, 7, 8], [1, 1], ["4,5,6", "7,8"]),
        (list(range(8)), [2, 1], ["0,1,2|3,4,5", "6,7"]),
        ([3], [1, 1], ["3", "3"]),
    ],
)
def test_cores_are_dealt_evenly_and_shared_in_rotation_when_scarce(
    cores: list[int], ranks: list[int], bound: list[str]
) -> None:
    assert bind_cores(cores, ranks) == bound


def test_devices_are_dealt_in_order() -> None:
    assert give_devices(["a", "b", "c"], [1, 2]) == ["a", "b,c"]


def test_the_router_is_told_who_may_come_in() -> None:
    router = spec(
        plan_of({"router.keys_file": "keys.toml", "router.max_per_decode": "8", "router.tls_cert": "router.pem"}),
        "router",
    )
    assert after(router, "--keys-file") == "keys.toml"
    assert after(router, "--max-per-decode") == "8"
    assert after(router, "--tls-cert") == "router.pem"
    assert not {"--max-concurrent", "--tls-key"} & set(router.argv)
    assert router.url is not None
    assert router.url.startswith("https://")
    assert router.readiness.tls
    plain = spec(plan_of({}), "router")
    assert not plain.readiness.tls
    assert "--keys-file" not in plain.argv


def test_the_router_is_told_how_long_requests_may_take_and_how_it_is_to_end() -> None:
    given: dict[str, object] = {
        "router.request_timeout_s": "300",
        "router.drain_notice_s": "5",
        "router.admin_listen": "127.0.0.1:8001",
    }
    router = spec(plan_of(given), "router")
    assert after(router, "--request-timeout") == "300.0"
    assert after(router, "--drain-notice") == "5.0"
    assert after(router, "--admin-listen") == "127.0.0.1:8001"
    assert router.grace_s == spec(plan_of(), "router").grace_s + 5
    assert after(spec(plan_of({**given, "router.workers": "2"}), "router"), "--admin-listen") == "127.0.0.1:8001"


def test_the_router_is_told_where_to_send_requests() -> None:
    router = spec(
        plan_of(
            {
                "router.policy": "least-loaded",
                "router.decode_policy": "prefix-aware:threshold=0.3",
                "router.disaggregate_above": "auto",
                "router.colocated_fallback": "true",
            }
        ),
        "router",
    )
    assert after(router, "--policy") == "least-loaded"
    assert after(router, "--decode-policy") == "prefix-aware:threshold=0.3"
    assert after(router, "--disaggregate-above") == "auto"
    assert "--colocated-fallback" in router.argv
    assert "--prefill-policy" not in router.argv
    with pytest.raises(ConfigError, match="--policy 'best' is not a policy"):
        plan_of({"router.policy": "best"})
    with pytest.raises(ConfigError, match="do not tell what they lack"):
        plan_of({"dispatch": "decode-first", "connector": "nixl"})


def test_the_router_is_told_what_to_do_about_lost_kv() -> None:
    assert after(spec(plan_of({"on_lost_kv": "reprefill"}), "router"), "--on-lost-kv") == "reprefill"
    with pytest.raises(ConfigError, match="with connector nixl decode engines do not tell of lost KV"):
        plan_of({"on_lost_kv": "strict", "connector": "nixl"})


def test_router_and_engines_send_their_traces_to_one_collector() -> None:
    plan = plan_of({"otlp_endpoint": "http://c:4318", "router.access_log": "-"})
    router = spec(plan, "router")
    assert (after(router, "--otlp-endpoint"), after(router, "--access-log")) == ("http://c:4318", "-")
    for name in ("P0", "D0"):
        engine = spec(plan, name)
        assert after(engine, "--otlp-traces-endpoint") == "http://c:4318/v1/traces"
        assert engine.env["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
        assert engine.env["OTEL_SERVICE_NAME"] == f"vllm-{name}"
    assert not any("otlp" in argument for process in plan_of().processes for argument in process.argv)


def test_a_collector_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"otlp_endpoint = 'collector' .*: it is not a URL"):
        plan_of({"otlp_endpoint": "collector"})


def test_engines_of_a_kv_aware_policy_publish_to_the_router_alone() -> None:
    plan = plan_of({"router.decode_policy": "kv-aware:overlap=2", "decode.count": "2", "router.token_ids": "off"})
    assert json.loads(after(spec(plan, "D1"), "--kv-events-config")) == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "ipc:///run/kv/ipc/D1-kv-inproc",
        "replay_endpoint": "ipc:///run/kv/ipc/D1-kvr-inproc",
    }
    assert "--kv-events-config" not in spec(plan, "P0").argv
    router = spec(plan, "router")
    given = [value for flag, value in pairwise(router.argv) if flag == "--kv-events"]
    assert given == [
        f"{name}=ipc:///run/kv/ipc/{name}-kv-inproc,ipc:///run/kv/ipc/{name}-kvr-inproc" for name in ("D0", "D1")
    ]
    assert after(router, "--token-ids") == "off"
    with pytest.raises(ConfigError, match=r"router.pool_index .* needs a connector with a pool"):
        plan_of({"router.policy": "kv-aware", "router.pool_index": "true"})
    asking: dict[str, object] = {
        "router.policy": "kv-aware",
        "router.pool_index": "true",
        "router.disaggregate_above": "9",
    }
    assert "--pool-index" in spec(plan_of(asking), "router").argv
    ranks = plan_of({"router.decode_policy": "kv-aware", "decode.data_parallel_size": "2"})
    assert [value for flag, value in pairwise(spec(ranks, "router").argv) if flag == "--kv-events"] == [
        "D0=ipc:///run/kv/ipc/D0-kv-inproc,ipc:///run/kv/ipc/D0-kvr-inproc",
        "D0=ipc:///run/kv/ipc/D0-kv-inproc_dp1,ipc:///run/kv/ipc/D0-kvr-inproc_dp1",
    ]
    with pytest.raises(ConfigError, match="--kv-events-config is chosen by kvrelay up"):
        plan_of({"router.policy": "kv-aware", "engine.args": "--kv-events-config {}"})


def test_first_tokens_from_p_go_to_the_router_and_engines_show_what_they_add() -> None:
    for name, value in (("first_token", "prefill"), ("tokenise", "once")):
        plan = plan_of({name: value})
        assert after(spec(plan, "router"), "--" + name.replace("_", "-")) == value
        assert all("--enable-scale-out" in spec(plan, engine).argv for engine in ("P0", "D0"))
    usual = plan_of({})
    assert "--enable-scale-out" not in spec(usual, "D0").argv
    assert "--first-token" not in spec(usual, "router").argv
    with pytest.raises(ConfigError, match="cannot go on from a prefill engine's token"):
        plan_of({"first_token": "prefill", "connector": "nixl"})


def test_the_command_that_is_printed_asks_the_endpoint_and_shows_a_key_where_one_is_needed() -> None:
    plan = plan_of()
    open_to_all, with_key = shlex.split(curl_line(plan)), shlex.split(curl_line(plan, keys=True))
    assert open_to_all[:2] == ["curl", f"{plan.endpoint}/v1/chat/completions"]
    assert json.loads(open_to_all[-1])["model"] == "tiny"
    assert [word for word in with_key if word not in open_to_all] == ["Authorization: Bearer $KEY"]
