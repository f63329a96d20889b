"""schemathesis drives every documented route from the published document, with good and bad data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from server_fakes import FakeEngine, Script

from pyspec.server.api.openapi import document
from pyspec.server.app import ENDPOINTS, create_app
from pyspec.server.settings import ServerSettings

ANSWERS = (200, 400, 405, 413, 429)

PATHS = document(ENDPOINTS)["paths"]
OPERATIONS = [(path, method) for path, methods in PATHS.items() for method in methods]
HAVE_BODIES = [path for path, methods in PATHS.items() if "requestBody" in methods.get("post", {})]


@pytest.fixture(scope="module")
def api() -> Iterator[Any]:
    engine = FakeEngine(n_slot=8)
    engine.script = Script(text="ok", width=2)
    yield schemathesis.openapi.from_asgi("/openapi.json", create_app(engine, ServerSettings()))
    engine.close()


@pytest.mark.sampled(1, most=2)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_route_keeps_to_its_document(
    api: Any, path: str, method: str, mode: GenerationMode
) -> None:
    if mode == GenerationMode.NEGATIVE and (method == "get" or path not in HAVE_BODIES):
        return  # nothing to get wrong: no parameters
    # valid by the schema is not all: an id may be beyond the vocabulary, a template may refuse a role
    skipped = CHECKS.get_by_names(["positive_data_acceptance"])

    @settings(
        max_examples=30,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def drive(case: schemathesis.Case) -> None:
        response = case.call()
        assert response.status_code in ANSWERS, response.text
        case.validate_response(response, excluded_checks=skipped)

    drive()
