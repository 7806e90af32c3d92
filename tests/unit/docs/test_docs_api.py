"""docs/api.md is what its generator makes, and names tests that exist."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvrelay.router.core.legs import Endpoint
from kvrelay.router.core.paths import Route, route
from kvrelay.testing.differential.api_page import OWN, SPECS, page
from kvrelay.testing.differential.cases import How

if TYPE_CHECKING:
    from pathlib import Path


def test_the_page_of_parameters_is_up_to_date(pages: dict[str, str]) -> None:
    remade = "python -m kvrelay.testing.differential.api_page docs/api.md"
    assert pages["docs/api.md"] == page(), f"run: {remade}"


def test_the_tests_it_names_exist(root: Path) -> None:
    written = "".join(path.read_text() for path in (root / "tests").rglob("test_*.py"))
    assert {test for *_, test in OWN} <= set(re.findall(r"def (test_\w+)", written))


def test_every_endpoint_that_takes_requests_has_its_rows() -> None:
    from kvrelay.router.core import paths

    assert {spec.path for spec in SPECS if spec.how is How.PASSED} == paths._POST
    assert {spec.path for spec in SPECS if spec.how is not How.PASSED} == set(Endpoint)
    assert all(route(spec.method, spec.path) in {Route.PASS, Route.DISAGGREGATE} for spec in SPECS)
