"""The OpenAPI description holds for what the server does, whatever is sent."""

import hypothesis
import pytest
import schemathesis
from hypothesis import strategies

EXAMPLES = 25  # for each operation
BODIES = {"/v1/completions", "/v1/chat/completions"}
PATHS = BODIES | {"/v1/models", "/v1/models/{model}", "/health", "/metrics"}


@pytest.fixture(scope="module")
def described(url, http):
    description = http.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(description)
    schema.config.update(base_url=url)
    return schema


def test_every_endpoint_is_in_schema(http):
    description = http.get("/openapi.json").json()
    assert set(description["paths"]) == PATHS
    body = description["components"]["schemas"]["CompletionRequest"]
    assert body["additionalProperties"] == {"type": "null"}
    assert {"type": "null"} in body["properties"]["temperature"]["anyOf"]
    assert {"type": "null"} not in body["properties"]["prompt"]["anyOf"]
    assert "steering" not in body["properties"]


MODES = schemathesis.GenerationMode
CASES = [(path, MODES.POSITIVE) for path in sorted(PATHS)] + [(path, MODES.NEGATIVE) for path in sorted(BODIES)]


@pytest.mark.filterwarnings("ignore:Do not use the `random` module")  # schemathesis does, and seeds it
@pytest.mark.parametrize(("path", "mode"), CASES)
def test_fuzzed_requests_return_documented_responses(described, path, mode):
    (operation,) = described[path].values()

    @hypothesis.settings(max_examples=EXAMPLES, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode), known=strategies.booleans())
    def check(case, known):
        if isinstance(case.body, dict) and mode is MODES.POSITIVE:
            # Most requests would name no model, or want answers so long that they prove nothing more.
            case.body |= {"model": "tiny"} if known else {}
            case.body |= {"max_tokens": 3} if "completions" in path else {}
        # Nothing in the description says how long a context is, or which fields do not go together.
        case.call_and_validate(
            timeout=60, excluded_checks=[schemathesis.checks.CHECKS.get_one("positive_data_acceptance")]
        )

    check()


def test_null_field_is_treated_as_absent(http):
    nulls = {"temperature": None, "stop": None, "tools": None, "": None}
    said = {"role": "assistant", "content": "Yes.", "refusal": None, "tool_calls": None}
    turns = [{"role": "user", "content": "Is it?"}, said, {"role": "user", "content": "And now?"}]
    chat = {"model": "tiny", "messages": turns, "max_tokens": 2, **nulls}
    assert http.post("/v1/chat/completions", json=chat).status_code == 200
    for required in ("model", "messages"):
        answer = http.post("/v1/chat/completions", json={**chat, required: None})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, required)
    # Where a field is no name of ours, null is a value.
    assert http.post("/v1/chat/completions", json={**chat, "metadata": {"a": None}}).status_code == 400
    assert http.post("/v1/chat/completions", json={**chat, "logit_bias": {"5": None}}).status_code == 400
