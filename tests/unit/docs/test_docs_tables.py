"""Tables of the reference pages say what the code says: a row too many, too few or out of date fails."""

from __future__ import annotations

import argparse
import ast
import asyncio
import dataclasses
import inspect
import re
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from kvrelay import errors
from kvrelay.admin.bridge import Bridge
from kvrelay.cli import build_parser
from kvrelay.connector.config import BOUNDS, CHOICES, ConnectorConfig
from kvrelay.launch.core.settings import NO_CONNECTOR, EngineSettings, UpSettings, flag_of, leaves
from kvrelay.pool import metrics as pool_metrics
from kvrelay.pool import preflight
from kvrelay.pool import settings as pool_settings
from kvrelay.pool.admin.app import make_app
from kvrelay.pool.core.pool import PoolCore
from kvrelay.profiles.registry import PROFILES
from kvrelay.router.admin.app import make_app as make_router_app
from kvrelay.router.core import paths
from kvrelay.router.core.admission.keys import Key
from kvrelay.router.core.legs import OUTPUT_ONLY, OUTPUT_ONLY_OF, Endpoint
from kvrelay.router.core.lifecycle import TIMESTAMPS, Lifecycle
from kvrelay.router.core.paths import Route, route
from kvrelay.router.core.records import Record
from kvrelay.router.core.resilience import Resilience
from kvrelay.router.errors import EngineError
from kvrelay.router.metric_types import Counter, Family
from kvrelay.router.metrics import RouterMetrics
from kvrelay.router.reloading import LIVE
from kvrelay.testing.fake_control import FakeControl
from kvrelay.types import Proof, Reason
from kvrelay.wire import limits

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.docs.conftest import Tables

ROUTES = {
    "disaggregated": Route.DISAGGREGATE,
    "one decode engine answers, unchanged": Route.PASS,
    "any engine that lives answers, decode engines first": Route.ANY,
}


def parser_of(*verbs: str) -> argparse.ArgumentParser:
    parser = build_parser()
    for verb in verbs:
        (inner,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        parser = inner.choices[verb]
    return parser


def plain(cell: str) -> str:
    return cell.replace("`", "").replace("\\|", "|")


def test_every_row_of_a_table_has_the_columns_of_its_header(prose: dict[str, str]) -> None:
    ragged = []
    for page, text in prose.items():
        columns = 0
        for line in text.splitlines():
            here = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
            if here and columns and here != columns:
                ragged.append(f"{page}: {line}")
            columns = here and (columns or here)
    assert not ragged


def test_settings_of_kvrelay_up(tables: Tables) -> None:
    defaults: dict[str, Any] = {}
    for path in leaves():
        value: Any = UpSettings()
        for name in path.split("."):
            value = getattr(value, name)
        defaults[path] = value
    inherited = {f"{role}.{name}" for role in ("prefill", "decode") for name in EngineSettings.model_fields}
    expected = [
        [
            path,
            "MODEL" if path == "model" else flag_of(path) or "",
            str(defaults[path]) if defaults[path] not in (None, (), {}) else "",
            plain(field.description),
        ]
        for path, field in leaves().items()
        if path not in inherited
    ]
    assert [[plain(cell) for cell in row] for row in tables.rows("docs/launch.md", "Settings")] == expected


def test_flags_of_the_router(tables: Tables) -> None:
    parser = parser_of("router", "serve")
    actions = {flag: a for a in parser._actions for flag in a.option_strings if flag.startswith("--")}
    del actions["--help"]
    rows = tables.rows("docs/router.md", "Flags")
    assert [plain(row[0]) for row in rows] == list(actions)
    for row in rows:
        action = actions[plain(row[0])]
        if action.default not in (None, []):
            shown = f"{action.default:g}" if isinstance(action.default, float) else str(action.default)
            assert plain(row[1]) == shown, row


def test_fields_of_a_routers_keys(tables: Tables) -> None:
    fields = msgspec.structs.fields(Key)
    rows = {plain(row[0]): row[1] for row in tables.rows("docs/router-limits.md", "Keys")}
    assert list(rows) == [field.name for field in fields]
    for field in fields:
        if isinstance(field.default, int | float):
            assert rows[field.name] == f"{field.default:g}", field.name


def test_settings_of_a_pool_server(tables: Tables) -> None:
    expected = []
    for path, field in pool_settings.leaves().items():
        value: Any = pool_settings.PoolSettings()
        for name in path.split("."):
            value = getattr(value, name)
        shown = str(value) if value not in (None, (), False) else ""
        expected.append([path, pool_settings.flag_of(path) or "", shown, plain(field.description)])
    assert [[plain(cell) for cell in row] for row in tables.rows("docs/pool-operations.md", "Settings")] == expected


def test_metrics_of_the_pool(pages: dict[str, str], tables: Tables) -> None:
    rows = [row for row in tables.rows("docs/pool-operations.md", "Watching") if row[0].startswith("`kvrelay_")]
    told = {plain(row[0]): (set(re.findall(r"\w+", row[1])), row[2]) for row in rows}
    assert told == pool_metrics.described()
    named = {name for text in pages.values() for name in re.findall(r"\bkvrelay_pool_\w+", text)}
    assert named <= told.keys()


def test_requests_of_the_pools_admin_api(tables: Tables) -> None:
    loop = asyncio.new_event_loop()
    described = make_app(FakeControl(), Bridge(loop), lambda: bytes, None).openapi()["paths"]
    loop.close()
    known = {f"{method.upper()} {path}" for path, methods in described.items() for method in methods}
    assert {plain(row[0]) for row in tables.rows("docs/pool-operations.md", "Admin API")} == known


def test_requests_of_the_routers_admin_api(tables: Tables) -> None:
    loop = asyncio.new_event_loop()
    described = make_router_app(SimpleNamespace(fleet=None), Bridge(loop), None, None).openapi()["paths"]  # type: ignore[arg-type]
    loop.close()
    known = {f"{method.upper()} {path}" for path, methods in described.items() for method in methods}
    assert {plain(row[0]) for row in tables.rows("docs/router-operations.md", "Admin API")} == known


def test_settings_of_the_router_that_can_change(prose: dict[str, str]) -> None:
    (listed,) = re.findall(r"These settings can change: (.+?)\.", prose["docs/router-operations.md"], re.DOTALL)
    names = {"prefill": "prefills", "decode": "decodes", "on_lost_kv": "on_lost_kv", "max_reprefills": "max_reprefills",
             "kv_events": "kv_events"}  # fmt: skip
    told = {names.get(name) or f"{name}_s" for name in re.findall(r"`(\w+)`", listed)}
    inner = {"request_timeout_s", "first_byte_timeout_s", "probe_interval_s", "retry_share_s", "drain_notice_s"}
    assert told - inner == LIVE - {"resilience"}
    assert {name.replace("share_s", "share") for name in inner} == set(Resilience.__struct_fields__)


def test_checks_before_a_pool_starts(tables: Tables) -> None:
    tree = ast.parse(inspect.getsource(preflight))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    names = {ast.literal_eval(call.args[1]) for call in calls if call.func.id == "Finding"}  # type: ignore[attr-defined]
    assert set(tables.names("docs/pool-operations.md", "Checks", 0)) == names


def test_connectors_and_what_the_router_does_for_each(tables: Tables) -> None:
    assert tables.names("docs/connectors.md", "Connectors") == [*PROFILES, NO_CONNECTOR]
    assert set(tables.names("docs/connectors.md", "What the router does")) == set(PROFILES)


def test_keys_of_the_connector(tables: Tables) -> None:
    fields = {field.name: field for field in dataclasses.fields(ConnectorConfig)}
    rows = {plain(row[0]): row for row in tables.rows("docs/connector.md", "Configuration")}
    assert list(rows) == list(fields)
    for name, field in fields.items():
        if field.default is not dataclasses.MISSING:
            default = {None: "none", False: "false", True: "true"}.get(
                field.default, f"{field.default}".removesuffix(".0")
            )
            assert rows[name][1] == default, name
        if name in CHOICES:
            assert plain(rows[name][2]).replace("`", "") == ", ".join(CHOICES[name]), name
        if name in BOUNDS:
            assert rows[name][2] == f"{BOUNDS[name][0]:g} to {BOUNDS[name][1]:g}", name


def test_reasons_and_proofs(tables: Tables) -> None:
    assert tables.names("docs/connector.md", "Reasons") == [str(reason) for reason in Reason if reason]
    assert tables.names("docs/life-of-a-request.md", "The proof") == list(Proof.__struct_fields__)
    assert tables.names("docs/life-of-a-request.md", "States and timestamps") == list(TIMESTAMPS)
    record = Record(Lifecycle("ho-1", 0.0)).view()
    assert [plain(row[0]) for row in tables.rows("docs/life-of-a-request.md", "The record")] == list(record)


def test_errors_of_the_pool(tables: Tables) -> None:
    told = [(plain(row[0]), plain(row[1])) for row in tables.rows("docs/pool.md", "Errors")]
    assert sorted(told) == sorted((code, cls.__name__) for code, cls in errors.BY_CODE.items())


def test_errors_of_the_router(root: Path, tables: Tables) -> None:
    """A refusal is made with its status and code, or of an error that has them."""
    made: set[tuple[object, object]] = {(503, "queue_full"), (503, "queue_timeout")}  # the queue's reasons
    made |= {(kind.http_status, kind.code) for kind in EngineError.__subclasses__()}
    for file in (root / "src/kvrelay/router").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Refusal":
                status, code = node.args[:2]
                if isinstance(status, ast.Constant) and isinstance(code, ast.Constant):
                    made.add((status.value, code.value))
                elif isinstance(status, ast.Constant) and isinstance(code, ast.Name):
                    module = import_module(".".join(file.relative_to(root / "src").with_suffix("").parts))
                    made.add((status.value, getattr(module, code.id)))
    told: set[tuple[object, object]] = set()
    for row in tables.rows("docs/router.md", "Errors"):
        statuses = [int(status) for status in row[0].split(", ")]
        codes = re.findall(r"`(\w+)`", row[1])
        told |= set(zip(statuses, codes, strict=True) if len(statuses) > 1 else ((statuses[0], code) for code in codes))
    assert told == made


def test_numbers_of_pool_stat(tables: Tables) -> None:
    stats = PoolCore(1 << 20, pool="p", server="s").stats()
    assert tables.names("docs/pool.md", "Numbers in `stat`") == list(stats)


def test_limits_of_the_wire(tables: Tables) -> None:
    known = {name: value for name, value in vars(limits).items() if name.startswith("MAX_")}
    told = {row[0].split("`")[1]: float(row[1]) for row in tables.rows("docs/pool.md", "Limits")}
    assert told == known


def test_what_the_router_does_with_a_request(tables: Tables) -> None:
    rows = tables.rows("docs/router.md", "Requests")
    for row in rows:
        method, path = plain(row[0]).replace("{id}", "x1").split()
        kind, is_own = route(method, path), row[1].startswith("the router: ")
        stored = row[1].startswith("[a stored response]")
        expected = Route.STORED if stored else ROUTES.get(row[1].partition(", [with")[0])
        own = {Route.HEALTH, Route.METRICS, Route.HANDOVER, Route.MODELS}
        assert kind is expected or (is_own and kind in own), row
    told = {plain(row[0]) for row in rows}
    assert {f"POST {path}" for path in paths._POST | paths._DISAGGREGATED} <= told
    assert {f"GET {path}" for path in {*paths._GET, *paths._OWN, paths._MODELS}} <= told


def test_what_the_prefill_leg_leaves_out(prose: dict[str, str]) -> None:
    (listed,) = re.findall(r"^Left out: (.+?)\.$", prose["docs/router.md"], re.MULTILINE | re.DOTALL)
    replaced = {"max_tokens", "max_completion_tokens", "stream"}
    assert set(re.findall(r"`(\w+)`", listed)) == OUTPUT_ONLY - replaced
    (more,) = re.findall(r"^Left out of (responses, too: .+?)\n\n", prose["docs/router.md"], re.MULTILINE | re.DOTALL)
    of = {
        name.lower(): set(re.findall(r"`(\w+)`", fields))
        for name, fields in re.findall(r"(\w+)(?:, too)?:\s([^.]+)", more)
    }
    assert of == {"responses": OUTPUT_ONLY_OF[Endpoint.RESPONSES], "messages": OUTPUT_ONLY_OF[Endpoint.MESSAGES],
                  "completions": OUTPUT_ONLY_OF[Endpoint.COMPLETIONS]}  # fmt: skip


def test_metrics_of_the_router(pages: dict[str, str], tables: Tables) -> None:
    metrics = RouterMetrics([])
    found = [*vars(metrics).values(), *vars(metrics.kv).values()]
    known = {
        f"{metric.name}{'_total' if isinstance(metric, Counter) else ''}": set(metric.labelnames)
        for metric in found
        if isinstance(metric, Family)
    }
    known |= {family.name: set(family.labels) for family in metrics.timings}
    assert len(known) == len([*metrics.registry.collect()])
    rows = tables.rows("docs/router.md", "Metrics")
    assert {plain(row[0]): set(re.findall(r"\w+", row[1])) for row in rows} == known
    named = {name for text in pages.values() for name in re.findall(r"\bkvrelay_router_\w+", text)}
    assert named <= known.keys()


def test_metrics_of_the_connector(root: Path, pages: dict[str, str], tables: Tables) -> None:
    """Read from the source: importing it needs vLLM."""
    tree = ast.parse((root / "src/kvrelay/connector/stats.py").read_text())
    values = {
        target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in {"PLAIN", "BY_REASON"}
    }
    known = {f"kvrelay:{name}_total" for name in (*values["PLAIN"], *values["BY_REASON"])}
    assert {name for name in tables.names("docs/connector.md", "Metrics") if name.startswith("kvrelay:")} == known
    named = {name for text in pages.values() for name in re.findall(r"\bkvrelay:\w+", text)}
    assert named <= known
