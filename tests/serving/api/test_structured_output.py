"""Replies in JSON: they follow the schema in every way to ask, and end with an error where the rule leaves no token."""

import asyncio
import json

import openai
import pytest

from divdec import Speculation
from support.served import bundle_of, engine_of, serving
from support.tools import ARGUMENTS, fits

TURNS = [{"role": "user", "content": "Where was she born?"}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "trip", "schema": ARGUMENTS, "strict": True}}


def chat(client, **options):
    fields = {"model": "tiny", "messages": TURNS, "max_tokens": 100, "temperature": 0, "response_format": SCHEMA}
    return client.chat.completions.create(**fields | options)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3, "n": 4}, {"temperature": 1.0, "top_p": 0.3}])
def test_replies_follow_the_schema(client, options):
    for choice in chat(client, **options).choices:
        assert choice.finish_reason == "stop"
        assert fits(json.loads(choice.message.content))


def test_streams_seeds_and_limits_hold(client):
    options = {"temperature": 1.0, "seed": 5}
    whole = chat(client, **options).choices[0].message.content
    assert chat(client, **options).choices[0].message.content == whole
    events = [event.choices[0] for event in chat(client, stream=True, **options)]
    assert "".join(event.delta.content or "" for event in events) == whole
    assert events[-1].finish_reason == "stop"
    (cut,) = chat(client, **options, max_tokens=3).choices
    assert cut.finish_reason == "length"
    assert whole.startswith(cut.message.content)
    (stopped,) = chat(client, **options, stop=["days"]).choices
    assert stopped.message.content == whole.partition("days")[0]
    assert fits(json.loads(chat(client, extra_body={"ignore_eos": True}).choices[0].message.content))


def test_any_object_begins_with_a_brace(client):
    for seed in range(4):
        options = {"response_format": {"type": "json_object"}, "temperature": 1.0, "seed": seed, "max_tokens": 60}
        (choice,) = chat(client, **options).choices
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)


def test_logprobs_are_those_of_the_steered_model(client):
    """A grammar changes which token is chosen, not the probabilities that are shown."""
    free = chat(client, response_format=openai.omit, max_tokens=1, logprobs=True, top_logprobs=20)
    bound = chat(client, max_tokens=1, logprobs=True, top_logprobs=20)
    first = lambda answer: answer.choices[0].logprobs.content[0]
    likeliest = [(item.token, pytest.approx(item.logprob, abs=1e-4)) for item in first(free).top_logprobs]
    assert [(item.token, item.logprob) for item in first(bound).top_logprobs] == likeliest
    assert first(bound).logprob < first(free).logprob


def test_other_requests_of_the_batch_are_not_bound(url, client):
    free = {"response_format": openai.omit, "max_tokens": 40}
    alone = [chat(client, **options).choices[0].message.content for options in ({}, free)]

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as together:
            return await asyncio.gather(*(chat(together, **options) for options in [{}, free] * 3))

    assert [answer.choices[0].message.content for answer in asyncio.run(ask())] == alone * 3


def test_bound_requests_decode_without_drafts(served_bundle, client):
    engine = engine_of(served_bundle, speculation=Speculation(4))
    with (
        serving([engine], shutdown_timeout=0.0) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as drafting,
    ):
        assert chat(drafting).choices[0].message.content == chat(client).choices[0].message.content


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "objekt"}, "Invalid type: objekt"),
        ({"$ref": "#/nowhere"}, "'/nowhere' does not exist"),
        ({"not": {"type": "string"}}, "Unimplemented keys"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "Unsatisfiable schema"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"$ref": "#"}, "too large, nested too deeply or endless"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf[^_]*$"),
    ],
)
def test_unusable_schemas_are_refused(client, schema, says):
    with pytest.raises(openai.BadRequestError, match=says) as error:
        chat(client, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})
    assert error.value.param == "response_format"


def test_reply_ends_with_an_error_where_the_rule_leaves_no_token(models, tokenizer):
    """All but 12 of 512 tokens are suppressed, and the grammar demands some of them."""
    engine = engine_of(bundle_of(models, "narrow", "rank:500"))
    with serving([engine], shutdown_timeout=0.0) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        for stream in (False, True):
            with pytest.raises(openai.APIError, match="suppresses every token that the grammar allows") as error:
                list(chat(client, stream=stream))
            assert error.value.code == "no_token_left"
        assert chat(client, response_format=openai.omit, max_tokens=4).choices[0].message.content
