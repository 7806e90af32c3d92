"""docs/api.md, made from the differential suite: ``python -m kvrelay.testing.differential.api_page docs/api.md``."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.testing.differential.cases import MODEL, OMIT, Fresh, How, cases
from kvrelay.testing.differential.comparing import EXCLUDED, TOLERANCE
from kvrelay.testing.differential.openai_specs import OPENAI
from kvrelay.testing.differential.other_specs import OTHERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvrelay.testing.differential.cases import Spec

SPECS = (*OPENAI, *OTHERS)
_STORED = "test_a_stored_response_is_continued_fetched_and_cancelled_where_it_is"
_AWAY = "test_a_response_that_may_be_on_an_engine_out_of_reach_is_not_called_unknown"
_PROOF = "test_a_request_that_can_prove_nothing_is_refused_before_anybody_is_asked"
OWN = (
    (
        "`GET /v1/models`",
        "the models of all engines",
        "test_all_models_are_listed_once_and_a_dead_engine_does_not_matter",
    ),
    ("`GET /version`", "any engine that lives", "test_an_engine_that_hangs_does_not_take_the_models_with_it"),
    ("`GET /v1/responses/{id}`", "the engine that holds it", _STORED),
    ("`POST /v1/responses/{id}/cancel`", "the engine that holds it", _STORED),
    ("a stored response whose engine is out of reach", "refused: 503 `stored_response_away`", _AWAY),
    ("a body that is not a JSON object", "refused: 400 `bad_request`", "test_what_is_not_a_json_object_is_refused"),
    ("a path that is not listed", "refused: 404 `unknown_path`", "test_administration_is_out_of_reach"),
    ("another method", "refused: 405 `method`", "test_a_wrong_method_is_a_405"),
    ("what can prove nothing, with a policy that wants proof", "refused: 400 `kv_unprovable`", _PROOF),
)
"""What is not compared with one vLLM: the case, what happens, the test of it."""
_MAX_SHOWN = 70
_PASSED = "To one decode engine, unchanged. The tried model generates text: what it cannot do is the same error."
_INTRO = """\
# Endpoints and parameters

Made from the differential suite by `python -m kvrelay.testing.differential.api_page docs/api.md`; a test tells when
it is out of date.

Every row's requests are sent to one plain vLLM and through the router to one P and one D, on real vLLM, and the
answers are compared field by field, errors too: status, content type, body; streams put together first.
Log-probabilities may differ by {tolerance:g}. `make test-matrix` sends all {total}, CI one of each parameter. Where
engines refuse a value, or lack a feature that needs a flag, "the same" is the same error. For each request that is
answered it is checked that it went the way the table says: *P and D*, or *D alone* with the
[detour](router.md#detours) named.

Not compared: {excluded}; and how many fields an error says the body has, since the router's own is one of them."""


def page() -> str:
    """The whole document."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for case in cases(SPECS, "m"):
        counts[case.spec.path, case.spec.name] += 1
    by_path: dict[str, list[Spec]] = defaultdict(list)
    for spec in SPECS:
        by_path[spec.path].append(spec)
    lines = [_intro(sum(counts.values()))]
    for path, specs in by_path.items():
        if specs[0].how is not How.PASSED:
            rows = [_row(spec, counts[path, spec.name]) for spec in specs]
            lines += _table(path, "", ("parameter", "what happens", "tried with", "requests"), rows)
    passed = [(f"`POST {spec.path}`", str(counts[spec.path, spec.name])) for spec in SPECS if spec.how is How.PASSED]
    lines += _table("Passed on", _PASSED, ("endpoint", "requests"), passed)
    own = [(what, happens, f"`{test}`") for what, happens, test in OWN]
    lines += _table("The router's own answers", "", ("request", "what happens", "test"), own)
    return "\n".join(lines) + "\n"


def _intro(total: int) -> str:
    excluded = ", ".join(f"`{name}` ({why})" for name, why in EXCLUDED.items())
    return _INTRO.format(tolerance=TOLERANCE, total=total, excluded=excluded)


def _table(heading: str, text: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    head = [columns, ["---"] * len(columns)]
    said = [text, ""] if text else []
    return ["", f"## {heading}", "", *said, *(f"| {' | '.join(row)} |" for row in [*head, *rows])]


def _row(spec: Spec, count: int) -> tuple[str, ...]:
    how = f"{spec.how}: `{spec.reason}`" if spec.reason else str(spec.how)
    plain = ":" in spec.name or " " in spec.name.replace(", ", "")
    name = spec.name if plain else ", ".join(f"`{part}`" for part in spec.name.split(", "))
    shown = ", ".join(dict.fromkeys(map(_shown, spec.values)))
    return name, f"{how}; {spec.note}" if spec.note else how, shown, str(count)


def _shown(value: Mapping[str, Any]) -> str:
    if not value:
        return "nothing else"
    absent = [f"without `{name}`" for name, field in value.items() if field is OMIT]
    given = {name: _plain(field) for name, field in value.items() if field is not OMIT}
    text = json.dumps(given, ensure_ascii=False)[1:-1]
    if len(text) > _MAX_SHOWN:
        text = text[:_MAX_SHOWN].rstrip() + " ..."
    return " ".join([*([f"`{text}`"] if text else []), *absent]).replace("|", "\\|")


def _plain(value: Any) -> Any:
    if isinstance(value, Fresh):
        return "..."
    if isinstance(value, dict):
        return {name: _plain(field) for name, field in value.items()}
    if isinstance(value, list):
        return [*map(_plain, value[:4]), *(["..."] if len(value) > 4 else [])]
    return "m" if value == MODEL else value


def main() -> None:
    """Write it."""
    parser = argparse.ArgumentParser(description="Write the page of endpoints and parameters.")
    parser.add_argument("path", type=Path)
    parser.parse_args().path.write_text(page())


if __name__ == "__main__":
    main()
