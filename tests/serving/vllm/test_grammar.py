"""Tool calls and JSON behind vLLM: its grammars choose among the tokens that the rule leaves, and revive none."""

import json

import httpx
import openai
import pytest
import torch

from support.exactness import assert_same_answer
from support.tools import ARGUMENTS, CLOCK, WEATHER, fits
from support.vllm_reference import EXTRA, HEADERS, KEY, Reference, vllm_serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

# Names alone: the context of the tiny models has no room for whole descriptions.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}<|user|>{{ message.content }}{% endfor %}<|assistant|>"
)
TURNS = [{"role": "user", "content": "How is it in Oslo?"}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "trip", "schema": ARGUMENTS, "strict": True}}
# vLLM enforces the schema of a function that is strict; of another only that arguments are JSON.
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
NAMED = {"type": "function", "function": {"name": "weather"}}
SAMPLED = {"temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def steered(make_bundle):
    return make_bundle()


@pytest.fixture(scope="module")
def url(steered, tmp_path_factory):
    folder = tmp_path_factory.mktemp("grammar")
    (folder / "tools.jinja").write_text(TEMPLATE)
    tools = [
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "hermes",
        "--chat-template",
        str(folder / "tools.jinja"),
    ]
    with vllm_serving(steered, folder / "log.txt", extra=[*EXTRA, *tools]) as url:
        yield url


@pytest.fixture
def chat(url, tokenizer):
    # A random model would fill a reply with spaces, which JSON allows between its parts.
    spaces = {str(token): -100 for token in range(len(tokenizer)) if tokenizer.decode([token]).isspace()}
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=300) as client:

        def ask(**options):
            fields = {"model": "steered", "messages": TURNS, "max_tokens": 160, "temperature": 0, "logit_bias": spaces}
            return client.chat.completions.create(**fields | options)

        yield ask


def complete(url, ids, **options):
    body = {"model": "steered", "prompt": ids, "max_tokens": 8, "temperature": 0} | options
    return httpx.post(f"{url}/v1/completions", json=body, headers=HEADERS, timeout=300)


def single_characters(tokenizer):
    """Tokens of one letter or digit by their text: no other token writes a part of them."""
    texts = {tokenizer.decode([token]): token for token in range(len(tokenizer))}
    return {text: token for text, token in texts.items() if len(text) == 1 and text.isascii() and text.isalnum()}


@pytest.mark.parametrize(
    "force",
    [{"tool_choice": "required", "tools": [STRICT]}, {"tool_choice": NAMED, "tools": [CLOCK, STRICT]}],
    ids=["required", "named"],
)
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_forced_call_behind_vllm_follows_the_schema(chat, force, options, stream):
    answer = chat(stream=stream, parallel_tool_calls=False, **force, **options)
    if stream:
        deltas = [event.choices[0].delta for event in answer]
        content = "".join(delta.content or "" for delta in deltas)
        functions = [call.function for delta in deltas for call in delta.tool_calls or ()]
    else:
        content = answer.choices[0].message.content
        functions = [call.function for call in answer.choices[0].message.tool_calls]
    assert not content
    assert [function.name for function in functions if function.name] == ["weather"]
    assert fits(json.loads("".join(function.arguments or "" for function in functions)))


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_reply_behind_vllm_follows_a_json_schema(chat, options):
    (choice,) = chat(response_format=SCHEMA, **options).choices
    assert choice.finish_reason == "stop"
    assert fits(json.loads(choice.message.content))
    events = [event.choices[0] for event in chat(response_format=SCHEMA, stream=True, **options)]
    assert fits(json.loads("".join(event.delta.content or "" for event in events)))


def test_grammar_behind_vllm_chooses_what_the_steered_model_prefers(url, steered, prompts, tokenizer):
    texts = single_characters(tokenizer)
    model, choices = Reference(steered), []
    for ids in prompts:
        by_steered, by_target = ({text: logprobs[-1, token].item() for text, token in texts.items()}
                                 for logprobs in (model.logprobs(ids), model.own_logprobs(ids)))  # fmt: skip
        first, second = max(by_steered, key=by_steered.get), max(by_target, key=by_target.get)
        if first != second and by_steered[first] - by_steered[second] > 0.1:
            reply = complete(url, ids, structured_outputs={"choice": [second, first]})
            choices.append((reply.json()["choices"][0]["text"], first))
    assert len(choices) > 5
    assert [text for text, _ in choices] == [first for _, first in choices]


@pytest.mark.parametrize("options", [{}, {"speculative": 2}], ids=["plain", "drafts"])
def test_reply_behind_vllm_is_an_error_where_the_rule_leaves_no_token(
    options, make_bundle, prompts, tokenizer, tmp_path
):
    """The grammar demands suppressed texts at once, or after a token that the rule leaves.

    Of a row without tokens vLLM's sampler gives token 0, here the end of the text, which the grammar rejects.
    """
    bundle = make_bundle(steering="rank:400")
    model, texts = Reference(bundle), single_characters(tokenizer)

    def suppressed(ids):
        logits = model.logprobs(ids)[-1]
        return [text for text, token in texts.items() if logits[token] == -torch.inf]

    with vllm_serving(bundle, tmp_path / "log.txt", **options) as url:
        for ids in prompts[4:8]:
            left = next(text for text in texts if text not in suppressed(ids))
            later = suppressed([*ids, texts[left]])
            pairs = [left + text for text in later if tokenizer.convert_tokens_to_ids(left + text) is None]
            assert min(len(suppressed(ids)), len(pairs)) > 5
            assert model.logprobs(ids)[-1, tokenizer.convert_tokens_to_ids('"')] == -torch.inf
            schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string"}}}
            choices = [{"structured_outputs": {"choice": demanded}} for demanded in (suppressed(ids), pairs)]
            for grammar in (*choices, {"response_format": schema}):
                # vLLM has no biases with drafts.
                bias = [] if options else [{"logit_bias": {str(token): 100.0 for token in texts.values()}}]
                for fields in ({}, SAMPLED, *bias):
                    reply = complete(url, ids, **grammar, **fields)
                    assert reply.status_code == 500, reply.text
                    assert "choices" not in reply.json()
                events = complete(url, ids, **grammar, stream=True).text.split("\n\n")
                *parts, last = [json.loads(event.removeprefix("data: ")) for event in events if event.endswith("}")]
                assert last["error"]["code"] == 500
                assert "".join(part["choices"][0]["text"] for part in parts) in ("", left)
        # The server goes on.
        reply = complete(url, prompts[4], max_tokens=16, return_token_ids=True).json()["choices"][0]
        assert_same_answer(model.model, prompts[4], reply["token_ids"], model.greedy(prompts[4]))
