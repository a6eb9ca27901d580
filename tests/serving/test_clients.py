"""Clients of others call a tool and read JSON of a real model: Qwen2.5 1.5B with an n-gram pair, on a CPU."""

import json
import os
from pathlib import Path

import openai
import pytest

from divdec.cli import main
from support.served import engine_of, serving
from support.tools import ARGUMENTS, WEATHER, fits

# Without it litellm asks the network for a table of prices.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.filterwarnings("ignore")]
MESSAGES = [{"role": "user", "content": "How is the weather in Rome for the next 3 days?"}]
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
        spoken = client.chat.completions.create(**fields, messages=[*MESSAGES, answer.message, result])
        assert "sunny" in spoken.choices[0].message.content
        # Without force this model, a coder, writes the call in its own way; a tag would not be shown.
        free = client.chat.completions.create(**fields, messages=MESSAGES).choices[0].message
        assert "Rome" in (free.content or free.tool_calls[0].function.arguments)
        assert "<tool_call>" not in (free.content or "")


def test_openai_reads_json(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=1800) as client:
        answer = client.chat.completions.create(model="qwen", messages=MESSAGES, response_format=SCHEMA, **SETTINGS)
    assert fits(json.loads(answer.choices[0].message.content))


def test_litellm(url):
    litellm = pytest.importorskip("litellm")
    settings = {"model": "openai/qwen", "api_base": url, "api_key": "none", "messages": MESSAGES, **SETTINGS}
    called = litellm.completion(**settings, tools=[WEATHER], tool_choice="required", stream=True)
    whole = litellm.stream_chunk_builder(list(called))
    assert fits(json.loads(whole.choices[0].message.tool_calls[0].function.arguments))
    answer = litellm.completion(**settings, response_format=SCHEMA)
    assert fits(json.loads(answer.choices[0].message.content))


def test_langchain(url):
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(model="qwen", base_url=url, api_key="none", max_retries=0, **SETTINGS)
    text = MESSAGES[0]["content"]
    (call,) = model.bind_tools([WEATHER], tool_choice="weather").invoke(text).tool_calls
    assert call["name"] == "weather"
    assert fits(call["args"])
    schema = {"title": "trip", "description": "A trip", **ARGUMENTS}
    assert fits(model.with_structured_output(schema, method="json_schema").invoke(text))
