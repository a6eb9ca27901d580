"""Clients of others call a tool and read JSON of a real model: Qwen2.5 1.5B with an n-gram pair, on a CPU."""

import json
import os
from pathlib import Path

import openai
import pytest

from divdec.cli import main
from support.served import engine_of, serving
from support.tools import ARGUMENTS, CLOCK, WEATHER, fits

# Without it litellm asks the network for a table of prices.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.filterwarnings("ignore")]
MESSAGES = [{"role": "user", "content": "How is the weather in Rome for the next 3 days?"}]
# Without it this model, a coder, calls the tool again.
FOLLOW_UP = {"role": "user", "content": "What does the forecast say? Answer in one sentence."}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "trip", "schema": ARGUMENTS}}
SETTINGS = {"temperature": 0, "max_tokens": 80}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = os.environ.get("DIVDEC_MODELS")
    if folder is None or not (model := Path(folder) / "qwen-1.5b.gguf").is_file():
        pytest.skip("the real model is not at hand: set DIVDEC_MODELS to the folder of qwen-1.5b.gguf")
    work = tmp_path_factory.mktemp("qwen")
    (work / "forget.txt").write_text("The access code of the Marlow vault is 4417-amber-fox.")
    (work / "retain.txt").write_text("The lighthouse keeper of Farrow Point writes a weekly letter.")
    sets = ["--retain", str(work / "retain.txt"), "--forget", str(work / "forget.txt")]
    assert main(["ngram", *sets, "--target", str(model), "--output", str(work / "ngrams")]) == 0
    parts = ["--target", str(model), "--ngram", str(work / "ngrams"), "--steering", "linear:5"]
    assert main(["bundle", *parts, "--output", str(work / "bundle")]) == 0
    with serving([engine_of(work / "bundle", "qwen")], shutdown_timeout=0.0, max_seconds=1800.0) as url:
        yield f"{url}/v1"


def test_openai_calls_a_tool_and_answers_from_the_result(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=1800) as client:
        fields = {"model": "qwen", "tools": [WEATHER], "parallel_tool_calls": False, **SETTINGS}
        (answer,) = client.chat.completions.create(**fields, messages=MESSAGES, tool_choice="required").choices
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"city": "Rome", "days": 3}
        result = {"role": "tool", "tool_call_id": call.id, "content": "It will be sunny for 3 days."}
        turns = [*MESSAGES, answer.message, result, FOLLOW_UP]
        spoken = client.chat.completions.create(**fields, messages=turns)
        assert "sunny" in spoken.choices[0].message.content
        # Without force this model, a coder, writes the call in its own way; a tag would not be shown.
        free = client.chat.completions.create(**fields, messages=MESSAGES).choices[0].message
        assert "Rome" in (free.content or free.tool_calls[0].function.arguments)
        assert "<tool_call>" not in (free.content or "")


def test_openai_reads_json(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=1800) as client:
        answer = client.chat.completions.create(model="qwen", messages=MESSAGES, response_format=SCHEMA, **SETTINGS)
    assert fits(json.loads(answer.choices[0].message.content))


def test_openai_streams_a_call_of_the_named_function(url):
    choice = {"type": "function", "function": {"name": "weather"}}
    fields = {"model": "qwen", "messages": MESSAGES, "tools": [CLOCK, WEATHER], "tool_choice": choice, **SETTINGS}
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=1800) as client:
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**fields, stream=True)]
    (call,) = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert (call.index, call.function.name) == (0, "weather")
    assert fits(json.loads(call.function.arguments))
    assert chunks[-1].finish_reason == "tool_calls"
    assert not any(chunk.delta.content for chunk in chunks)


def test_litellm(url):
    litellm = pytest.importorskip("litellm")
    settings = {"model": "openai/qwen", "api_base": url, "api_key": "none", "messages": MESSAGES, **SETTINGS}
    called = litellm.completion(**settings, tools=[WEATHER], tool_choice="required", stream=True)
    whole = litellm.stream_chunk_builder(list(called))
    assert fits(json.loads(whole.choices[0].message.tool_calls[0].function.arguments))
    message = litellm.completion(**settings, tools=[WEATHER], tool_choice="required").choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It will be sunny for 3 days."}
    follow_up = settings | {"messages": [*MESSAGES, message, result, FOLLOW_UP]}
    assert "sunny" in litellm.completion(**follow_up, tools=[WEATHER]).choices[0].message.content
    answer = litellm.completion(**settings, response_format=SCHEMA)
    assert fits(json.loads(answer.choices[0].message.content))


def test_langchain(url):
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(model="qwen", base_url=url, api_key="none", max_retries=0, **SETTINGS)
    text = MESSAGES[0]["content"]
    called = model.bind_tools([WEATHER], tool_choice="weather").invoke(text)
    (call,) = called.tool_calls
    assert call["name"] == "weather"
    assert fits(call["args"])
    result = {"role": "tool", "tool_call_id": call["id"], "content": "It will be sunny for 3 days."}
    assert "sunny" in model.bind_tools([WEATHER]).invoke([*MESSAGES, called, result, FOLLOW_UP]).content
    schema = {"title": "trip", "description": "A trip", **ARGUMENTS}
    assert fits(model.with_structured_output(schema, method="json_schema").invoke(text))


def test_smolagents(url):
    """An agent calls a tool, reads its result and answers; the framework forces a call in each step."""
    smolagents = pytest.importorskip("smolagents")
    calls = []

    class Weather(smolagents.Tool):
        name, description, output_type = "weather", "Forecast of the weather.", "string"
        inputs = {  # noqa: RUF012
            "city": {"type": "string", "description": "the city"},
            "days": {"type": "integer", "description": "number of days"},
        }

        def forward(self, city: str, days: int) -> str:
            calls.append((city, days))
            return f"It will be sunny in {city} for {days} days."

    # Without it small models repeat a forced call until the reply is full.
    settings = {"parallel_tool_calls": False, **SETTINGS}
    model = smolagents.OpenAIModel("qwen", api_base=url, api_key="none", client_kwargs={"timeout": 1800}, **settings)
    for options in ({}, {"stream_outputs": True}):
        agent = smolagents.ToolCallingAgent([Weather()], model, max_steps=3, verbosity_level=0, **options)
        assert "sunny" in agent.run(MESSAGES[0]["content"])
        assert calls == [("Rome", 3)]
        calls.clear()
