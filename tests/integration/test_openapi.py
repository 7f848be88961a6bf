"""Whatever the API's description allows, and much that it forbids: answers are those that it promises, and never a 5xx."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.integration.conftest import Server

pytestmark = pytest.mark.integration

VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/tokenize": {"prompt": "Hi"},
}
"""Requests that other parameters are added to."""
# Parameters may contradict each other, or ask for more than the model's context: no schema can say so.
EXCEPT = [positive_data_acceptance]


def fixed(examples: int) -> settings:
    """The same examples each time, so that what fails is due to the change that it fails with."""
    slow = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    return settings(deadline=None, derandomize=True, database=None, max_examples=examples, suppress_health_check=slow)


def bounded(path: str, body: Any) -> Any:
    """A body with a limit to its answer, if it has none: 128 texts that go on to the context's end take minutes."""
    limits = {name: value for name, value in VALID.get(path, {}).items() if name.startswith("max_")}
    if not isinstance(body, dict) or any(body.get(name) for name in (*limits, "max_completion_tokens")):
        return body
    return body | limits


@pytest.fixture(scope="module")
def description(server: Server) -> Any:
    return schemathesis.openapi.from_url(f"{server.root_url}/openapi.json")


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
def test_every_route_answers_as_described(description: Any, mode: GenerationMode) -> None:
    operations = [each.ok() for each in description.get_all_operations()]
    assert len(operations) >= 10
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # any path is a text

        @fixed(40 if operation.body else 5)
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            case.body = bounded(case.operation.path, case.body)
            case.call_and_validate(excluded_checks=EXCEPT, timeout=60)

        ask()


@pytest.mark.parametrize("path", VALID)
def test_any_two_parameters_are_honoured_or_refused(description: Any, path: str) -> None:
    seen: Counter[int] = Counter()

    @fixed(120)
    @given(case=description[path]["POST"].as_strategy(generation_mode=GenerationMode.POSITIVE), data=st.data())
    def ask(case: Any, data: st.DataObject) -> None:
        added = sorted(case.body.keys() - VALID[path])
        chosen = data.draw(st.lists(st.sampled_from(added), max_size=2, unique=True)) if added else []
        case.body = VALID[path] | {name: case.body[name] for name in chosen}
        seen[case.call_and_validate(excluded_checks=EXCEPT, timeout=60).status_code] += 1

    ask()
    assert seen[200] > sum(seen.values()) / 4, seen
