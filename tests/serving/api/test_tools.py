"""Function calling with the OpenAI client: calls that a model makes, calls that are forced, and what is refused."""

import copy
import json

import httpx
import openai
import pytest
from transformers import AddedToken

from divdec.decoding.text import AnswerText
from divdec.serving.grammar import TAGS
from support.served import CONTEXT, bundle_of, engine_of, serving, trained
from support.tools import ARGUMENTS, CLOCK, TEMPLATE, WEATHER, fits

TURNS = [{"role": "user", "content": "How is it in Oslo?"}]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def engine(models, tokenizer):
    """An engine whose target answers TURNS with a call, by heart."""
    said = [{"role": "assistant", "content": "I look.", "tool_calls": [call_of({"city": "Oslo", "days": 3})]}]
    text = tokenizer.apply_chat_template(TURNS + said, tools=[WEATHER], chat_template=TEMPLATE, tokenize=False)
    target = trained(tokenizer, [text], 0, 64, 2, steps=100, length=CONTEXT)
    target.save_pretrained(models / "caller")
    tokenizer.save_pretrained(models / "caller")
    engine = engine_of(bundle_of(models, "calling", "linear:0.1", target="caller"), "caller")
    engine.tokenizer.chat_template = TEMPLATE
    return engine


@pytest.fixture(scope="module")
def client(engine):
    with serving([engine], shutdown_timeout=0.0) as url, openai_client(url) as client:
        yield client


def openai_client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def call_of(arguments):
    return {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


def described(parameters):
    return {"type": "function", "function": {"name": "clock", "parameters": parameters}}


def chat(client, messages=TURNS, **options):
    fields = {"model": "caller", "messages": messages, "max_tokens": 200, "temperature": 0, "tools": [WEATHER]}
    return client.chat.completions.create(**fields | options)


def streamed(events):
    """Content, calls and finish reasons of a stream with one choice."""
    content, calls, reasons = "", [], []
    for event in events:
        (choice,) = event.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            assert call.index == len(calls)
            calls.append(call)
        reasons += [choice.finish_reason] if choice.finish_reason else []
    return content, calls, reasons


def test_a_model_calls_a_tool_and_reads_the_result(client, engine):
    (choice,) = chat(client).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo", "days": 3}
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    after = chat(client, [*TURNS, choice.message, result], max_tokens=1)
    turns = [*TURNS, {"role": "assistant", "content": "I look.", "tool_calls": [call_of({"city": "Oslo", "days": 3})]}]
    ids = engine.tokenizer.apply_chat_template([*turns, result], tools=[WEATHER], add_generation_prompt=True)
    assert after.usage.prompt_tokens == len(ids["input_ids"])


def test_a_stream_has_the_same_call_and_no_tag(client):
    content, (call,), reasons = streamed(chat(client, stream=True))
    assert content == "I look."
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Oslo", "days": 3}
    assert reasons == ["tool_calls"]


def test_tags_that_are_special_tokens_are_read(engine):
    """Some models have them as special tokens, which replies leave out."""
    special = copy.deepcopy(engine.tokenizer)
    special.add_tokens([AddedToken(tag, special=True) for tag in TAGS])
    ids = special.encode("<tool_call>{}</tool_call>x", add_special_tokens=False)
    for shown, text in ((TAGS, "<tool_call>{}</tool_call>x"), ((), "{}x")):
        answer = AnswerText(special, shown=shown)
        assert "".join([*map(answer.add, ids), answer.end()]) == text


@pytest.mark.parametrize("broken", ["\ud83d", "[" * 400])
def test_tools_that_cannot_be_laid_out_are_refused(client, broken):
    deep = "x"
    for _ in range(400 if broken[0] == "[" else 0):
        deep = {"items": deep}
    schema = {"type": "object", "description": broken if deep == "x" else "", "properties": {"a": deep}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    body = json.dumps({"model": "caller", "messages": TURNS, "tools": [tool], "max_tokens": 1})
    answer = httpx.post(
        f"{client.base_url}chat/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400


def test_no_tool_is_offered_with_none(client):
    without = chat(client, tools=openai.omit, max_tokens=20)
    assert chat(client, tool_choice="none", max_tokens=20).choices == without.choices


def test_a_call_cut_off_by_max_tokens_is_no_call(client):
    whole = chat(client)
    (choice,) = chat(client, max_tokens=whole.usage.completion_tokens - 8).choices
    assert choice.finish_reason == "length"
    assert not choice.message.tool_calls
    assert choice.message.content.startswith('I look.\n{"name": "weather"')


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("stream", [False, True])
def test_forced_calls_follow_the_schema(client, choice, stream):
    options = {"tool_choice": choice, "tools": [WEATHER], "parallel_tool_calls": False, "temperature": 1.0}
    for seed in range(3):
        messages = [{"role": "user", "content": "Tell me a story"}]
        answer = chat(client, messages, seed=seed, stream=stream, n=1 if stream else 3, **options)
        for content, calls, reasons in [streamed(answer)] if stream else [read(item) for item in answer.choices]:
            assert reasons == ["tool_calls"]
            assert not content
            (call,) = calls
            assert call.function.name == "weather"
            assert fits(json.loads(call.function.arguments))


def test_a_forced_call_of_a_function_without_parameters_has_no_arguments(client):
    tool = {"type": "function", "function": {"name": "clock"}}
    (choice,) = chat(client, tools=[tool], tool_choice="required").choices
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {}


def test_a_message_with_calls_is_not_continued(client):
    called = {"role": "assistant", "content": "I look.", "tool_calls": [call_of('{"city": "Oslo"}')]}
    with pytest.raises(openai.BadRequestError, match="tool_calls, which are complete"):
        chat(client, [*TURNS, called], extra_body={"continue_final_message": True, "add_generation_prompt": False})


def read(choice):
    return choice.message.content, choice.message.tool_calls, [choice.finish_reason]


def test_named_choice_excludes_other_tools(client):
    for name in ("weather", "clock"):
        named = {"type": "function", "function": {"name": name}}
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
        clock = {"type": "function", "function": {**CLOCK["function"], "parameters": parameters}}
        (choice,) = chat(client, tools=[WEATHER, clock], tool_choice=named).choices
        assert [call.function.name for call in choice.message.tool_calls] == [name]


def test_references_within_a_schema_hold(client):
    schema = {
        "type": "object", "$defs": {"place": {"enum": ["Rome"]}}, "properties": {"city": {"$ref": "#/$defs/place"}},
        "required": ["city"], "additionalProperties": False,
    }  # fmt: skip
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema, "strict": True}}
    (choice,) = chat(client, tools=[tool], tool_choice="required", parallel_tool_calls=False).choices
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Rome"}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [WEATHER, WEATHER]}, None, "same name"),
        ({"tools": [described({"type": "array"})]}, "tools.0.function.parameters", "a JSON schema of type object"),
        ({"tool_choice": NAMED | {"function": {"name": "clock"}}}, "tool_choice", "names 'clock'; the tools are"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice", "response_format"),
        (
            {"tool_choice": "required", "tools": [{"type": "function", "function": {
                "name": "a", "parameters": {"type": "object", "properties": {"b": {"type": "text"}}}}}]},
            "tools", "Invalid type: text",
        ),
        ({"messages": [{"role": "user", "tool_calls": [call_of("{}")]}]}, "messages.0", "of role assistant"),
        ({"messages": [{"role": "assistant", "tool_calls": [call_of("[1]")]}]}, "arguments", "a JSON object as text"),
        ({"messages": [{"role": "assistant"}]}, "messages.0", "content is required"),
        ({"messages": [{"role": "user", "content": "a", "tool_call_id": "b"}]}, "messages.0", "of role tool"),
    ],
)  # fmt: skip
def test_unusable_requests_are_refused(client, fields, param, says):
    with pytest.raises(openai.BadRequestError, match=says) as error:
        chat(client, **fields)
    assert (param or "") in (error.value.param or "")


def test_template_without_tools_refuses_them(http):
    body = {"model": "tiny", "messages": TURNS, "tools": [WEATHER]}
    for choice in ("auto", "required"):
        response = http.post("/v1/chat/completions", json=body | {"tool_choice": choice})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools"
        assert "does not read tools" in response.json()["error"]["message"]
    assert http.post("/v1/chat/completions", json=body | {"tool_choice": "none", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("level", ["off", "top-1"])
def test_levels_below_full_refuse_grammars_of_the_client(served_bundle, level):
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": ARGUMENTS}}
    engine = engine_of(served_bundle, "caller")
    engine.tokenizer.chat_template = TEMPLATE
    with serving([engine], shutdown_timeout=0.0, logprobs=level) as url, openai_client(url) as client:
        any_object = {"type": "json_object"}  # with tools
        fields_with_texts = ({"tool_choice": "required"}, {"tool_choice": NAMED}, {"response_format": schema})
        for fields in (*fields_with_texts, {"response_format": any_object}):
            with pytest.raises(openai.BadRequestError, match="accepted as") as error:
                chat(client, **fields)
            assert error.value.code == "logprobs_refused"
            assert error.value.param == next(iter(fields))
        for fields in ({}, {"tool_choice": "auto"}, {"response_format": any_object, "tools": []}):
            assert chat(client, max_tokens=2, **fields).choices
