"""What the OpenAI client gets over a real socket equals what the library gives."""

import math

import openai
import pytest
import torch

from divdec import DivergenceForCausalLM
from divdec.data.formatting import encode_prompt
from divdec.data.records import Message, Record
from support.exactness import assert_same_text
from support.served import bundle_of, engine_of, serving

PROMPT = "Who wrote the book of"
TURNS = [{"role": "user", "content": "Where was she born?"}]


def steered(model, ids):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)


def generated(model, ids, number):
    prompt = torch.tensor([ids])
    with torch.inference_mode():
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=number, do_sample=False)
    return found[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def greedy(model, tokenizer):
    """What the library answers to PROMPT: token ids and text."""
    ids = generated(model, tokenizer(PROMPT).input_ids, 24)
    return ids, tokenizer.decode(ids, skip_special_tokens=True)


def complete(client, prompt=PROMPT, **options):
    return client.completions.create(
        **{"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0} | options
    )


def chat(client, **options):
    return client.chat.completions.create(
        **{"model": "tiny", "messages": TURNS, "max_tokens": 16, "temperature": 0} | options
    )


def test_models_endpoint_lists_bundle(client):
    (card,) = client.models.list().data
    assert card.id == "tiny"
    assert client.models.retrieve("tiny") == card
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.models.retrieve("other")


def test_completion_matches_library_output(client, model, greedy, tokenizer):
    found = complete(client)
    prompt = tokenizer(PROMPT).input_ids
    assert_same_text(model, tokenizer, prompt, found.choices[0].text, greedy[0])
    assert found.usage.prompt_tokens == len(tokenizer(PROMPT).input_ids)
    assert found.usage.completion_tokens == len(greedy[0])
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert complete(client, prompt).choices[0].text == found.choices[0].text
    assert (
        len(
            complete(client, max_tokens=openai.omit, extra_body={"ignore_eos": True}, logprobs=0)
            .choices[0]
            .logprobs.tokens
        )
        == 16
    )


@pytest.mark.parametrize("rule", ["linear:2:0.5", "linear:2:0.5:full"])
def test_rules_with_a_margin_match_library_output(models, tokenizer, model, rule):
    bundle = bundle_of(models, rule.replace(":", "-"), rule)
    ids = tokenizer(PROMPT).input_ids
    expected = generated(DivergenceForCausalLM.from_pretrained(bundle), ids, 24)
    with (
        serving([engine_of(bundle)], shutdown_timeout=0.0) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        answer = complete(client).choices[0].text
    assert_same_text(DivergenceForCausalLM.from_pretrained(bundle), tokenizer, ids, answer, expected)
    assert expected != generated(model.target, ids, 24)


def test_multiple_prompts_are_returned_in_order(client, tokenizer):
    texts = [PROMPT, "The", "Where did"]
    alone = [complete(client, text).choices[0].text for text in texts]
    ids = [tokenizer(text).input_ids for text in texts]
    for prompts in (texts, ids):
        found = complete(client, prompts)
        assert [choice.text for choice in found.choices] == alone
        assert [choice.index for choice in found.choices] == [0, 1, 2]
    twice = complete(client, texts, n=2)
    assert [choice.text for choice in twice.choices] == [text for text in alone for _ in range(2)]
    assert twice.usage.prompt_tokens == sum(map(len, ids))


@pytest.mark.parametrize("echo", [False, True])
def test_streamed_chunks_concatenate_to_full_completion(client, echo):
    whole = complete(client, logprobs=2, echo=echo)
    events = list(complete(client, logprobs=2, echo=echo, stream=True, stream_options={"include_usage": True}))
    assert "".join(event.choices[0].text for event in events[:-1]) == whole.choices[0].text
    assert [event.choices[0].finish_reason for event in events[:-1]][-1] == whole.choices[0].finish_reason
    assert events[-1].choices == []
    assert events[-1].usage == whole.usage
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        parts = [getattr(event.choices[0].logprobs, name) for event in events[:-1] if event.choices[0].logprobs]
        streamed = [value for part in parts for value in part]
        expected = getattr(whole.choices[0].logprobs, name)
        if name == "token_logprobs":
            assert streamed[echo:] == pytest.approx(expected[echo:], abs=1e-4)
        elif name != "top_logprobs":
            assert streamed == expected


def test_stream_without_include_usage_has_no_usage(client):
    assert all(event.usage is None for event in complete(client, stream=True))


def test_echoed_logprobs_are_steered(client, model, tokenizer, greedy):
    for number in (0, 24):
        found = complete(client, echo=True, logprobs=3, max_tokens=number).choices[0]
        ids = tokenizer(PROMPT).input_ids + (greedy[0] if number else [])
        expected = steered(model, ids)
        assert found.text == PROMPT + (greedy[1] if number else "")
        told = found.logprobs
        assert told.token_logprobs[0] is None
        assert told.top_logprobs[0] is None
        assert len(told.tokens) == len(ids)
        for place in range(1, len(ids)):
            assert told.token_logprobs[place] == pytest.approx(expected[place - 1, ids[place]].item(), abs=1e-4)
            best = expected[place - 1].topk(3)
            assert sorted(told.top_logprobs[place].values())[-3:] == pytest.approx(best.values.tolist()[::-1], abs=1e-4)
        for token, offset in zip(told.tokens, told.text_offset, strict=True):
            assert token in ("<|end|>",) or found.text.startswith(token, offset)
        assert found.finish_reason in ("length", "stop")


def test_logprobs_differ_from_target(client, model, tokenizer):
    told = complete(client, echo=True, logprobs=0, max_tokens=0).choices[0].logprobs.token_logprobs[1:]
    ids = tokenizer(PROMPT).input_ids
    with torch.inference_mode():
        target = model.target(torch.tensor([ids])).logits[0].log_softmax(-1)
    own = [target[place, ids[place + 1]].item() for place in range(len(ids) - 1)]
    assert max(abs(a - b) for a, b in zip(told, own, strict=True)) > 0.05


def test_n_and_seed_parameters(client):
    def texts(**options):
        return [choice.text for choice in complete(client, temperature=1, **options).choices]

    first = texts(n=4, seed=7)
    assert texts(n=4, seed=7) == first
    assert texts(n=2, seed=7) == first[:2]
    assert len(set(first)) > 1
    assert texts(n=4, seed=8) != first
    assert texts(n=2, seed=-5) == texts(n=2, seed=-5)
    streamed = {}
    for event in complete(client, temperature=1, n=4, seed=7, stream=True):
        for choice in event.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert [streamed[index] for index in range(4)] == first


def test_stop_strings_are_excluded_from_completion(client, greedy):
    text = greedy[1]
    stop = text[6:9]
    expected = text[: text.index(stop)]
    for given in (stop, ["never said", stop]):
        found = complete(client, stop=given).choices[0]
        assert (found.text, found.finish_reason) == (expected, "stop")
    assert "".join(event.choices[0].text for event in complete(client, stop=stop, stream=True)) == expected


def test_stop_string_may_be_a_special_token(client, tokenizer):
    options = {"logit_bias": {str(tokenizer.eos_token_id): 100}, "extra_body": {"ignore_eos": True}}
    assert complete(client, **options, max_tokens=4).usage.completion_tokens == 4
    found = complete(client, **options, max_tokens=4, stop=tokenizer.eos_token)
    assert (found.choices[0].text, found.choices[0].finish_reason) == ("", "stop")
    assert found.usage.completion_tokens == 1


def test_logit_bias_penalties_and_filters_take_effect(client, model, tokenizer, greedy):
    token = tokenizer(" the").input_ids[0]
    found = complete(client, logit_bias={str(token): 100}, max_tokens=3).choices[0]
    assert found.text == tokenizer.decode([token] * 3)
    banned = complete(client, logit_bias={str(greedy[0][0]): -100}, max_tokens=1, logprobs=1).choices[0]
    assert banned.text != tokenizer.decode(greedy[0][:1])
    # What is told is the model's, before biases.
    expected = steered(model, tokenizer(PROMPT).input_ids)[-1]
    assert max(banned.logprobs.top_logprobs[0].values()) == pytest.approx(expected.max().item(), abs=1e-4)
    for options in ({"extra_body": {"top_k": 1}}, {"top_p": 1e-9}, {"extra_body": {"min_p": 1.0}}):
        found = complete(client, temperature=1, **options).choices[0]
        assert_same_text(model, tokenizer, tokenizer(PROMPT).input_ids, found.text, greedy[0])
    for cold in (5e-324, 1e-200, 1e-5):
        found = complete(client, temperature=cold).choices[0]
        assert_same_text(model, tokenizer, tokenizer(PROMPT).input_ids, found.text, greedy[0])
    hot = {complete(client, temperature=100, seed=seed).choices[0].text for seed in range(3)}
    assert len(hot) == 3
    plain = complete(client, logit_bias={str(token): 20}, max_tokens=6).choices[0].text
    penalised = complete(client, logit_bias={str(token): 20}, max_tokens=40, frequency_penalty=2).choices[0].text
    assert plain == tokenizer.decode([token] * 6)
    assert penalised.count(" the") < 40


def test_return_tokens_as_token_ids(client, greedy):
    told = complete(client, logprobs=0, extra_body={"return_tokens_as_token_ids": True}).choices[0].logprobs
    assert told.tokens == [f"token_id:{token}" for token in greedy[0]]


def test_chat_completion_matches_library_output(client, model, tokenizer):
    ids = encode_prompt(Record("", messages=(Message("user", TURNS[0]["content"]),)), tokenizer)
    answer = generated(model, ids, 16)
    found = chat(client, logprobs=True, top_logprobs=2)
    text = tokenizer.decode(answer, skip_special_tokens=True)
    assert_same_text(model, tokenizer, ids, found.choices[0].message.content, answer)
    assert found.choices[0].message.role == "assistant"
    assert found.usage.prompt_tokens == len(ids)
    expected = steered(model, ids + answer)[len(ids) - 1 :]
    content = found.choices[0].logprobs.content
    assert len(content) == len(answer)
    for place, (token, given) in enumerate(zip(answer, content, strict=True)):
        assert given.logprob == pytest.approx(expected[place, token].item(), abs=1e-4)
        assert [top.logprob for top in given.top_logprobs] == pytest.approx(
            expected[place].topk(2).values.tolist(), abs=1e-4
        )
    spelt = b"".join(bytes(given.bytes) for given, token in zip(content, answer, strict=True) if token != 0)
    assert spelt.decode(errors="replace") == text
    parts = chat(client, messages=[{"role": "user", "content": [{"type": "text", "text": TURNS[0]["content"]}]}])
    assert parts.choices[0].message.content == text


def test_a_chat_stream(client):
    whole = chat(client, n=2, temperature=1, seed=1, logprobs=True)
    events = list(
        chat(client, n=2, temperature=1, seed=1, logprobs=True, stream=True, stream_options={"include_usage": True})
    )
    for index in range(2):
        own = [event.choices[0] for event in events[:-1] if event.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == whole.choices[index].message.content
        assert own[-1].finish_reason == whole.choices[index].finish_reason
        tokens = [token.token for choice in own if choice.logprobs for token in choice.logprobs.content]
        assert tokens == [token.token for token in whole.choices[index].logprobs.content]
    assert events[-1].usage == whole.usage
    assert len({event.id for event in events}) == 1


def test_multi_turn_conversation(client):
    turns = [
        {"role": "developer", "content": "Be brief."},
        *TURNS,
        {"role": "assistant", "content": "In Velmora."},
        {"role": "user", "content": "And where did she write?"},
    ]
    system = [{"role": "system", "content": "Be brief."}, *turns[1:]]
    assert chat(client, messages=turns).choices == chat(client, messages=system).choices
    assert chat(client, messages=turns).usage.prompt_tokens > chat(client).usage.prompt_tokens


def test_reply_can_continue_the_last_message(client, tokenizer):
    begun = [*TURNS, {"role": "assistant", "content": "She was born in"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    prompt = tokenizer.apply_chat_template(TURNS, add_generation_prompt=True, tokenize=False) + begun[-1]["content"]
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    found = chat(client, messages=begun, extra_body=options)
    assert found.choices[0].message.content == complete(client, ids, max_tokens=16).choices[0].text
    assert found.usage.prompt_tokens == len(ids)
    events = chat(client, messages=begun, extra_body={"continue_final_message": True}, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in events) == found.choices[0].message.content


@pytest.fixture(scope="module")
def thinking(served_bundle):
    """A server of a model whose template has a variable."""
    engine = engine_of(served_bundle, chat_template_kwargs={})
    engine.tokenizer.chat_template += "{% if enable_thinking|default(true) %} Well,{{ mood }}{% endif %}"
    with serving([engine], shutdown_timeout=0.0) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        yield client


def test_chat_template_kwargs_set_variables_of_the_template(thinking, client):
    plain = chat(client).choices
    assert chat(client, extra_body={"chat_template_kwargs": {}}).choices == plain
    assert chat(thinking, extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices == plain
    by_default = chat(thinking)
    assert by_default.usage.prompt_tokens > chat(client).usage.prompt_tokens
    said = chat(thinking, extra_body={"chat_template_kwargs": {"mood": " happily,", "enable_thinking": True}})
    assert said.usage.prompt_tokens > by_default.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="accepted: enable_thinking, mood") as error:
        chat(thinking, extra_body={"chat_template_kwargs": {"chat_template": "{{ 1 }}"}})
    assert error.value.param == "chat_template_kwargs"
    with pytest.raises(openai.BadRequestError, match="'enable_thinking', which is no variable"):
        chat(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}})


def test_chat_default_max_tokens_is_remaining_context(client):
    found = chat(client, max_tokens=openai.omit, stop=["e"])
    assert found.choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, max_tokens=openai.omit, max_completion_tokens=4096)
    assert error.value.code == "context_length_exceeded"


def test_fields_without_effect_are_accepted(client):
    plain = chat(client).choices
    found = chat(
        client, user="somebody", store=False, metadata={"a": "b"}, service_tier="auto",
        response_format={"type": "text"}, modalities=["text"], frequency_penalty=None, tools=None,
    )  # fmt: skip
    assert found.choices == plain


def test_values_that_ask_for_nothing_are_accepted(client):
    unused = {
        "tools": [], "tool_choice": "none", "functions": [], "function_call": "auto", "parallel_tool_calls": False,
        "stop": "", "stop_token_ids": [], "min_tokens": 0, "skip_special_tokens": True, "top_logprobs": 0,
    }  # fmt: skip
    turns = [{**TURNS[0], "type": "text", "name": "alice"}]  # as lm-eval and AutoGen write them
    for field, value in unused.items():
        assert chat(client, extra_body={field: value}).choices == chat(client).choices
    assert chat(client, messages=turns, extra_body=unused).choices == chat(client).choices
    cached = [{"type": "text", "text": TURNS[0]["content"], "cache_control": {"type": "ephemeral"}}]
    assert chat(client, messages=[{"role": "user", "content": cached}]).choices == chat(client).choices
    options = {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}
    assert list(chat(client, **options))[-1].usage == chat(client).usage
    assert complete(client, suffix="", stop="").choices == complete(client).choices


def test_replies_can_be_sent_back(client):
    reply = chat(client).choices[0].message
    plain = [*TURNS, {"role": "assistant", "content": reply.content}, *TURNS]
    unused = {
        "annotations": [],
        "tool_calls": [],
        "reasoning_content": "",
        "refusal": "",
        "audio": None,
        "provider_specific_fields": {"refusal": None},
    }
    for said in (reply, reply.model_dump(), reply.model_dump() | unused):
        assert chat(client, messages=[*TURNS, said, *TURNS]).choices == chat(client, messages=plain).choices


def test_partial_characters_are_returned_as_bytes(client, tokenizer):
    text = "🜚"
    ids = tokenizer(text).input_ids
    assert len(ids) > 1
    found = complete(client, text, echo=True, logprobs=0, max_tokens=0).choices[0]
    assert found.text == text
    spelt = bytes(
        int(byte, 16) for token in found.logprobs.tokens for byte in token.removeprefix("bytes:").split("\\x")[1:]
    )
    assert spelt == text.encode()
    assert set(found.logprobs.text_offset) == {0}
    assert not any(math.isnan(value) for value in found.logprobs.token_logprobs[1:])
