"""What the launcher is told of each connector: what is refused, what vLLM gets, what the user hears."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.launch.core.config import resolve
from kvrelay.launch.core.plan import HostFacts, Plan, ProcessSpec, make_plan, ports_needed
from kvrelay.profiles.registry import PROFILES
from kvrelay.router.config import pool_addresses
from kvrelay.router.core.legs import ClientBody, Endpoint, parse_fields

if TYPE_CHECKING:
    from kvrelay.launch.core.settings import UpSettings

RUN_DIR = "/run/kv"


def settings_of(connector: str, flags: dict[str, object] | None = None, text: str = "") -> UpSettings:
    given = {"model": "/models/tiny", "connector": connector, **(flags or {})}
    return resolve(given, {}, text, "up.toml").settings


def plan_of(settings: UpSettings, devices: tuple[str, ...] = ()) -> Plan:
    facts = HostFacts(
        python="py", run_dir=RUN_DIR, environ={}, cores=(0, 1), devices=devices, ports=tuple(range(20001, 20100))
    )
    return make_plan(settings, facts)


def spec(plan: Plan, name: str) -> ProcessSpec:
    return next(process for process in plan.processes if process.name == name)


def transfer(process: ProcessSpec) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(process.argv[process.argv.index("--kv-transfer-config") + 1])
    return value


def refusals(settings: UpSettings, *, cpu: bool = True) -> list[str]:
    assert settings.profile is not None
    return list(settings.profile.refusals(settings, cpu=cpu))


def body(**fields: Any) -> ClientBody:
    return ClientBody(Endpoint.COMPLETIONS, parse_fields(json.dumps(fields).encode()))


def test_every_profile_is_registered_under_its_name() -> None:
    assert {name: profile.name for name, profile in PROFILES.items()} == {name: name for name in PROFILES}


@pytest.mark.parametrize("connector", PROFILES)
def test_every_connector_can_be_planned_and_tells_vllm_its_class(connector: str) -> None:
    settings = settings_of(connector, {"engine.max_model_len": "2048"})
    plan = plan_of(settings, devices=("0", "1"))
    for name in plan.engines:
        config = transfer(spec(plan, name))
        assert config["kv_connector"].endswith("Connector") or config["kv_connector"].endswith("ConnectorV1")
        assert config["kv_load_failure_policy"] == "recompute"
    router = spec(plan, "router").argv
    assert router[router.index("--connector") + 1] == connector
    profile = PROFILES[connector]
    assert ("--pool" in router) == profile.uses_pool == bool(plan.pools)
    assert ports_needed(settings) == len(plan.engines) * (1 + profile.num_ports)


@pytest.mark.parametrize("connector", ["kvrelay", "direct", "nixl", "nixl-push", "multi"])
def test_what_runs_on_cpus_is_not_refused_there(connector: str) -> None:
    assert refusals(settings_of(connector)) == []


def test_push_engines_use_the_push_connector_and_side_channels_of_their_own() -> None:
    plan = plan_of(settings_of("nixl-push"))
    prefill, decode = spec(plan, "P0"), spec(plan, "D0")
    assert transfer(prefill)["kv_connector"] == transfer(decode)["kv_connector"] == "NixlPushConnector"
    assert prefill.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] != decode.env["VLLM_NIXL_SIDE_CHANNEL_PORT"]
    assert not plan.pools


def test_multi_puts_nixl_first_and_gives_the_pool_connector_its_options() -> None:
    plan = plan_of(settings_of("multi", text="[connector_options]\nload_threads = 4\n"))
    assert [process.name for process in plan.processes] == ["pool", "P0", "D0", "router"]
    first, second = transfer(spec(plan, "D0"))["kv_connector_extra_config"]["connectors"]
    assert (first["kv_connector"], second["kv_connector"]) == ("NixlConnector", "KvRelayConnector")
    assert "kv_connector_extra_config" not in first
    assert second["kv_connector_extra_config"] == {
        "pool": f"unix:{RUN_DIR}/ipc/pool.sock",
        "engine": "D0",
        "chunk_tokens": 64,
        "load_threads": 4,
    }
    assert second["kv_load_failure_policy"] == first["kv_load_failure_policy"] == "recompute"


def test_shared_storage_computes_no_prompt_in_parts_and_caches_none() -> None:
    settings = settings_of("shared-storage", {"engine.max_model_len": "4096"})
    assert refusals(settings) == []
    plan = plan_of(settings)
    for name in ("P0", "D0"):
        argv = spec(plan, name).argv
        assert {"--no-enable-chunked-prefill", "--no-enable-prefix-caching"} <= set(argv)
        assert argv[argv.index("--max-num-batched-tokens") + 1] == "4096"
        assert transfer(spec(plan, name))["kv_connector_extra_config"] == {"shared_storage_path": f"{RUN_DIR}/kv"}
    assert plan.folders == (f"{RUN_DIR}/kv",)


def test_a_folder_the_user_names_is_neither_made_nor_removed() -> None:
    text = '[connector_options]\nshared_storage_path = "/mnt/kv"\n'
    settings = settings_of("shared-storage", {"engine.max_model_len": "4096"}, text)
    plan = plan_of(settings)
    assert plan.folders == ()
    assert transfer(spec(plan, "P0"))["kv_connector_extra_config"] == {"shared_storage_path": "/mnt/kv"}
    assert any("/mnt/kv stays behind" in note for note in PROFILES["shared-storage"].notes(settings))


def test_shared_storage_refuses_whatever_kills_an_engine() -> None:
    settings = settings_of(
        "shared-storage",
        {
            "prefill.count": "2",
            "engine.max_model_len": "4096",
            "decode.max_num_batched_tokens": "2048",
            "prefill.args": "--enable-prefix-caching",
        },
    )
    several, cached, parts = refusals(settings)
    assert several == (
        "connector shared-storage: prefill.count = 2: two engines could read and write one folder at once, and a "
        "half-written one kills its reader; use --prefill 1, or --connector kvrelay"
    )
    assert cached == (
        "connector shared-storage: prefill.args has --enable-prefix-caching, with which this connector kills engines; "
        "leave it out"
    )
    assert parts == (
        "connector shared-storage: decode.max_num_batched_tokens = 2048 is less than max_model_len = 4096: a prompt "
        "computed in parts kills the engine that reads it; raise --decode-max-num-batched-tokens to it, or lower "
        "--max-model-len"
    )
    unset = refusals(settings_of("shared-storage"))
    assert unset[0] == (
        "connector shared-storage: prefill.max_model_len is not set: a prompt computed in parts kills the engine that "
        "reads it, so a step must take the longest; set --max-model-len"
    )


def test_offloading_is_refused_on_cpus_and_elsewhere_hands_nothing_over() -> None:
    settings = settings_of("offloading")
    (refusal,) = refusals(settings)
    assert refusal == (
        "connector offloading: vLLM 0.32 offloads from CUDA-like and XPU devices only ('CPU Offloading is currently "
        "only supported on CUDA-alike and XPU GPUs'), and these engines run on the CPU; use --connector kvrelay, whose "
        "pool keeps KV in host memory, or give a larger --kv-cache-memory"
    )
    assert refusals(settings, cpu=False) == []
    plan = plan_of(settings, devices=("0",))
    assert [process.name for process in plan.processes] == ["D0", "router"]
    assert PROFILES["offloading"].bypass(body(prompt="a")) == "no_handover"


def test_a_prefill_engine_of_a_connector_that_hands_nothing_over_is_refused() -> None:
    with pytest.raises(Exception, match="connector offloading does not hand KV over, so there is no prefill engine"):
        settings_of("offloading", {"prefill.count": "1"})


def test_lmcache_is_refused_on_cpus_and_without_a_store() -> None:
    cpu, prefill, decode = refusals(settings_of("lmcache"))
    assert cpu == (
        "connector lmcache: LMCache 0.5.6 has no connector for engines on the CPU (it logs 'No supported cpu connector "
        "found', then each request waits 3 s for lookups that nobody answers); use --connector kvrelay"
    )
    assert prefill == (
        "connector lmcache: no store for prefill engines: without one that both sides reach, nothing is handed over; "
        "set LMCACHE_CONFIG_FILE or LMCACHE_REMOTE_URL in [engine.env]"
    )
    assert "no store for decode engines" in decode
    stored = settings_of("lmcache", text='[engine.env]\nLMCACHE_REMOTE_URL = "redis://a:1"\n')
    assert refusals(stored, cpu=False) == []
    assert spec(plan_of(stored, devices=("0", "1")), "P0").env["PYTHONHASHSEED"] == "0"


def test_mooncake_is_refused_on_cpus_and_without_a_store() -> None:
    cpu, prefill, _ = refusals(settings_of("mooncake"))
    assert cpu == (
        "connector mooncake: vLLM 0.32's Mooncake connectors need an accelerator (MooncakeConnector: 'Cannot access "
        "accelerator device when none is available', MooncakeStoreConnector: it saves behind a CUDA event), and these "
        "engines run on the CPU; use --connector kvrelay or nixl"
    )
    assert prefill == (
        "connector mooncake: no store for prefill engines: set MOONCAKE_CONFIG_PATH in [engine.env] to the file that "
        "names Mooncake's master and metadata server"
    )


def test_direct_has_the_prefill_engine_run_the_pool_that_the_others_connect_to() -> None:
    plan = plan_of(settings_of("direct", {"decode.count": "2", "pool.size": "1GiB", "pool.port": "7000"}))
    assert [process.name for process in plan.processes] == ["P0", "D0", "D1", "router"]
    address = f"unix:{RUN_DIR}/ipc/pool.sock"
    assert plan.pools == {"": address}
    prefill, *decodes = (transfer(spec(plan, name)) for name in plan.engines)
    own = prefill["kv_connector_extra_config"]
    assert (own["pool"], own["embedded_pool"], own["embedded_listen"]) == (address, str(1 << 30), "127.0.0.1:7000")
    for decode in decodes:
        extra = decode["kv_connector_extra_config"]
        assert extra["pool"] == address
        assert not any(name.startswith("embedded") for name in extra)
    router = spec(plan, "router").argv
    assert router[router.index("--pool") + 1] == address


def test_direct_tells_decode_engines_of_the_pool_of_every_prefill_engine() -> None:
    plan = plan_of(settings_of("direct", {"prefill.count": "2", "decode.count": "2"}))
    at = {name: f"unix:{RUN_DIR}/ipc/pool-{name}.sock" for name in ("P0", "P1")}
    assert plan.pools == at
    extra = {name: transfer(spec(plan, name))["kv_connector_extra_config"] for name in plan.engines}
    for name, address in at.items():
        assert (extra[name]["pool"], "pools" in extra[name], "embedded_pool" in extra[name]) == (address, False, True)
        assert plan.registered_at(name) == (name, "D0", "D1")
    for name in ("D0", "D1"):
        assert (extra[name]["pools"], "pool" in extra[name], "embedded_pool" in extra[name]) == (at, False, False)
    router = spec(plan, "router").argv
    assert pool_addresses(router[router.index("--pool") + 1]) == list(at.values())


ASKS_POOL = {"router.policy": "kv-aware", "router.disaggregate_above": "9"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"pool.port": "7000"}, "connector direct: pool.port = 7000: 2 prefill engines cannot share a port; use"),
        ({"dispatch": "decode-first"}, "connector direct: dispatch = decode-first: a decode engine that is asked"),
        ({"router.pool_index": "true", **ASKS_POOL}, "connector direct: router.pool_index: what one of 2 pools holds"),
    ],
)
def test_direct_refuses_what_needs_one_pool_for_all(options: dict[str, object], told: str) -> None:
    (refused,) = refusals(settings_of("direct", {"prefill.count": "2", **options}))
    assert refused.startswith(told)
    assert refused.endswith("; use --prefill 1, or --connector kvrelay, whose pool serves any number")
    assert not refusals(settings_of("direct", {"prefill.count": "2"}))
    assert not refusals(settings_of("direct", options))


def test_direct_refuses_what_its_pools_are_not_started_with() -> None:
    (unheard,) = refusals(settings_of("direct", {"pool.args": "--mlock"}))
    assert unheard == (
        "connector direct: pool.args have no effect on a pool that the prefill engine runs; leave --pool-args "
        "out, or use --connector kvrelay"
    )
    (replicas,) = refusals(settings_of("direct", {"prefill.data_parallel_size": "2"}))
    assert replicas == (
        "connector direct: prefill.data_parallel_size = 2: each replica would run a pool at the same address; use "
        "--prefill-data-parallel-size 1, or --connector kvrelay"
    )


def test_nixl_refuses_replicas_whose_ports_nobody_chose() -> None:
    for connector in ("nixl", "nixl-push", "multi"):
        (refusal,) = refusals(settings_of(connector, {"decode.data_parallel_size": "2"}))
        assert refusal == (
            f"connector {connector}: decode.data_parallel_size = 2: the replicas' side channels would take ports that "
            "may not be free; use --decode 2 instead"
        )


def test_shared_storage_refuses_sides_that_would_read_each_others_bytes_wrongly() -> None:
    flags = {"engine.max_model_len": "4096", "prefill.block_size": "32", "decode.args": "--dtype=float32 --enable-lora"}
    types, blocks, ranks, lora = refusals(settings_of("shared-storage", {**flags, "prefill.tensor_parallel_size": "2"}))
    why = "bytes are copied as they are, which the other side would read as something else"
    mend = "give both the same, in [engine]"
    assert types == f"connector shared-storage: prefill.dtype = None, decode.dtype = float32: {why}; {mend}"
    assert blocks == f"connector shared-storage: prefill.block_size = 32, decode.block_size = None: {why}; {mend}"
    assert ranks == (
        "connector shared-storage: prefill engines of 2 ranks: all ranks would write the same files; use engines of "
        "one rank, or --connector kvrelay"
    )
    assert lora == (
        "connector shared-storage: decode.args has --enable-lora: a prompt's KV would be taken for that of every "
        "adapter; leave it out"
    )
