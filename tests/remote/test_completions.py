"""Requests and replies of a completions endpoint, retries and errors."""

import copy
import dataclasses
import pickle

import pytest
from transformers import AddedToken

from divdec.endpoint import Endpoint, Refused
from divdec.errors import UsageError
from divdec.remote.completions import NEUTRAL, Completions, ProviderCapabilities, probe_provider


@pytest.fixture
def asking(url, tokenizer, opened):
    def make(at=url, key=None, **options):
        endpoint = Endpoint(f"{at}/v1", "plain", key, retries=1)
        completions = Completions(endpoint, tokenizer, [tokenizer.eos_token_id], **options)
        opened(completions.endpoint)
        return completions

    return make


def test_a_position_holds_the_returned_log_probabilities(asking, prompts):
    (position,) = asking().complete(prompts[0], ProviderCapabilities(top_logprobs=5), {})
    assert len(position.logprobs) == 5
    assert position.token in position.logprobs
    assert position.floor == min(position.logprobs.values())


def test_text_names_map_to_same_tokens_as_ids(asking, prompts):
    by_id = asking().complete(prompts[1], ProviderCapabilities(), {}, tokens=4)
    by_text = asking().complete(prompts[1], ProviderCapabilities(prompt_ids=False, answer_ids=False), {}, tokens=4)
    assert [position.token for position in by_id] == [position.token for position in by_text]
    both = set(by_id[0].logprobs) & set(by_text[0].logprobs)
    assert len(both) >= 18  # tokens with one text share a name
    assert all(by_id[0].logprobs[token] == pytest.approx(by_text[0].logprobs[token], abs=1e-5) for token in both)


def test_tokens_that_are_special_among_the_added_ones_alone_have_names(url, tokenizer, opened):
    other = copy.deepcopy(tokenizer)
    other.add_tokens([AddedToken("<|tool|>", special=True)])
    token = other.convert_tokens_to_ids("<|tool|>")
    assert token not in other.all_special_ids
    endpoint = opened(Endpoint(f"{url}/v1", "plain"))
    completions = Completions(endpoint, other, [other.eos_token_id], size=len(other))
    assert completions._token_texts()[b"<|tool|>"] == [token]


def test_sampled_token_outside_top_logprobs_does_not_lower_floor(provider, asking, prompts):
    def choose_another(content, body):
        logprobs = content["choices"][0]["logprobs"]
        logprobs["tokens"], logprobs["top_logprobs"][0]["token_id:3"] = ["token_id:3"], -30.0

    (position,) = asking(provider(reply=choose_another).url).complete(
        prompts[0], ProviderCapabilities(top_logprobs=5), {}
    )
    assert position.token == 3
    assert position.floor > -30


def test_too_few_log_probabilities_are_not_used(provider, asking, prompts):
    def fewer(content, body):
        top = content["choices"][0]["logprobs"]["top_logprobs"][0]
        top.pop(min(top, key=top.get))

    (position,) = asking(provider(reply=fewer).url).complete(prompts[0], ProviderCapabilities(top_logprobs=5), {})
    assert position.logprobs is None


@pytest.mark.parametrize("reason", ["stop", "eos", "eos_token"])
def test_other_names_of_the_end(provider, asking, prompts, tokenizer, reason):
    def end(content, body):
        content["choices"][0].update(text="", finish_reason=reason, logprobs=None)

    (position,) = asking(provider(reply=end).url).complete(prompts[0], ProviderCapabilities(True, False, 0), {})
    assert position.token == tokenizer.eos_token_id


def test_a_null_log_probability_is_none(provider, asking, prompts):
    def null(content, body):
        top = content["choices"][0]["logprobs"]["top_logprobs"][0]
        top[min(top, key=top.get)] = None

    (position,) = asking(provider(reply=null).url).complete(prompts[0], ProviderCapabilities(top_logprobs=5), {})
    assert position.logprobs is None


def test_an_error_in_a_reply_is_named(provider, asking, prompts):
    def fail(content, body):
        content.clear()
        content["error"] = {"message": "Rate limit exceeded", "code": 429}

    with pytest.raises(UsageError, match=r"replied with an error: .*Rate limit exceeded"):
        asking(provider(reply=fail).url).complete(prompts[0], ProviderCapabilities(), {})


def test_penalties_are_switched_off_where_top_k_cannot_be_0(provider, asking, prompts):
    def refuse(body):
        return (400, "top_k must be -1 or at least 1") if body.get("top_k") == 0 else None

    completions = asking(provider(request=refuse).url)
    expected = NEUTRAL | {"top_k": -1}
    del expected["repeat_penalty"]  # which the server refuses, too
    assert probe_provider(completions, prompts[0]).neutral == expected


def test_the_probe_suppresses_all_tokens_of_an_ambiguous_name(provider, asking, prompts):
    there = provider()
    completions = asking(there.url)
    complete = completions.complete

    def ambiguous(*arguments, **options):
        (position,) = complete(*arguments, **options)
        return [dataclasses.replace(position, ambiguous={position.token: frozenset([7, 9])})]

    completions.complete = ambiguous
    probe_provider(completions, prompts[0])
    biases = [body["logit_bias"] for _, body in there.seen if body.get("logit_bias")]
    assert {"7": -100.0, "9": -100.0}.items() <= biases[0].items()


def test_partial_character_without_token_ids_raises(provider, asking, prompts):
    def nothing(content, body):
        content["choices"][0].update(text="", finish_reason="length", logprobs=None)

    with pytest.raises(UsageError, match="no token that can be read"):
        asking(provider(reply=nothing).url).complete(prompts[0], ProviderCapabilities(True, False, 0), {})


def test_non_text_prompt_is_rejected(asking, tokenizer):
    ids = tokenizer("author").input_ids
    split = [token for letter in "author" for token in tokenizer(letter).input_ids]
    assert split != ids
    with pytest.raises(UsageError, match="cannot be sent as text"):
        asking().complete(split, ProviderCapabilities(prompt_ids=False), {})


def test_retokenize_matches_provider_tokenization(asking, tokenizer, prompts):
    split = [token for letter in " author" for token in tokenizer(letter).input_ids]
    result = asking().retokenize([*prompts[0], *split], len(prompts[0]))
    assert tokenizer.decode(result) == tokenizer.decode([*prompts[0], *split])
    assert len(result) < len(prompts[0]) + len(split)


def test_extra_fields_are_sent_with_every_request(provider, asking, prompts):
    there = provider()
    asking(there.url, extra={"top_k": -1, "user": "me"}).complete(
        prompts[0], ProviderCapabilities(), {}, temperature=0.5, seed=3
    )
    ((_, body),) = there.seen
    assert (body["top_k"], body["user"], body["top_p"], body["seed"], body["temperature"]) == (-1, "me", 1, 3, 0.5)


def test_a_reply_in_another_format(provider, asking, prompts):
    def other(content, body):
        content.clear()

    with pytest.raises(UsageError, match="no completions API"):
        asking(provider(reply=other).url).complete(prompts[0], ProviderCapabilities(), {})


def test_http_errors_name_status(provider, asking, prompts):
    with pytest.raises(Refused, match="status 403") as refused:
        asking(provider(request=lambda body: (403, "not you")).url).complete(prompts[0], ProviderCapabilities(), {})
    assert refused.value.status == 403
    there = provider(request=lambda body: (503, "busy"))
    with pytest.raises(UsageError, match=r"up to 2 attempts \(status 503"):
        asking(there.url).complete(prompts[0], ProviderCapabilities(), {})
    assert len(there.seen) == 2


def test_api_key_is_sent_but_never_printed(provider, asking, prompts, monkeypatch):
    monkeypatch.setenv("A_KEY", "very-secret-key")
    there = provider(request=lambda body: (401, "the key very-secret-key is not known"))
    completions = asking(there.url, "A_KEY")
    with pytest.raises(Refused) as refused:
        completions.complete(prompts[0], ProviderCapabilities(), {})
    assert there.seen[0][0]["authorization"] == "Bearer very-secret-key"
    assert "very-secret-key" not in str(refused.value)
    assert "very-secret-key" not in repr(completions.endpoint)


def test_truncated_api_key_is_not_shown(provider, asking, prompts, monkeypatch):
    monkeypatch.setenv("A_KEY", "very-secret-key")
    # The message is cut in the middle of the key.
    said = "x" * (300 - len('{"error":{"message":"') - 10) + "very-secret-key"
    with pytest.raises(Refused, match="status 401") as refused:
        asking(provider(request=lambda body: (401, said)).url, "A_KEY").complete(prompts[0], ProviderCapabilities(), {})
    assert "very-" not in str(refused.value)


def test_refusal_can_be_pickled():
    error = Refused("no", 403)
    result = pickle.loads(pickle.dumps(error))
    assert (type(result), str(result), result.status) == (Refused, "no", 403)


@pytest.mark.parametrize(
    "url",
    [
        "http://h/v1?key=secret",
        "http://h/v1#secret",
        "http://me:secret@h/v1",
        "http://secret\x00/",
        "http://h:9/secret\n",
    ],
)
def test_invalid_urls(url):
    with pytest.raises(UsageError):
        Endpoint(url, "plain")


def test_api_key_in_url_is_not_shown():
    with pytest.raises(UsageError) as refused:
        Endpoint("http://h/v1?key=secret", "plain")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("field", ["temperature", "logit_bias", "echo", "n", "stream", "seed"])
def test_further_fields_that_would_break_proofs_are_refused(asking, field):
    with pytest.raises(UsageError, match=f"extra holds {field}"):
        asking(extra={field: 1, "top_k": 0})


@pytest.mark.parametrize(
    "field", [{"frequency_penalty": 0.9}, {"presence_penalty": -1}, {"repetition_penalty": 1.1}, {"top_k": 40}]
)
def test_changes_to_the_logits_that_no_proof_knows_are_refused(asking, field):
    with pytest.raises(UsageError, match=f"extra holds {next(iter(field))}, which changes what a reply proves"):
        asking(extra=field)


def test_headers_of_the_environment_go_to_no_other_provider(provider, asking, prompts, monkeypatch):
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Gateway-Token: secret")
    there = provider()
    for final in ((), (400,)):
        asking(there.url).complete(prompts[0], ProviderCapabilities(), {}, final=final)
        assert "x-gateway-token" not in there.seen[-1][0]


@pytest.mark.parametrize("url", ["http://ex..ample.com/v1", "https://\u2603.net.x/v1"])
def test_hosts_that_cannot_exist_are_one_line(asking, prompts, url):
    with pytest.raises(UsageError, match="cannot be written as JSON or sent"):
        asking(url).complete(prompts[0], ProviderCapabilities(), {})


def test_a_value_outside_of_json_is_one_line(asking, prompts):
    with pytest.raises(UsageError, match="written as JSON"):
        asking(extra={"x": float("nan")}).complete(prompts[0], ProviderCapabilities(), {})


@pytest.mark.parametrize(
    "change",
    [
        lambda choice, usage: choice["logprobs"].update(tokens=[None]),
        lambda choice, usage: choice["logprobs"].update(tokens=["\ud83d"]),
        lambda choice, usage: choice["logprobs"].update(tokens=[]),
        lambda choice, usage: choice["logprobs"]["top_logprobs"][0].update({"token_id:5": "x"}),
        lambda choice, usage: choice["logprobs"].update(tokens=["token_id:" + "9" * 5000]),
    ],
)
def test_unreadable_replies_give_one_line_error(provider, asking, prompts, change):
    def reply(content, body):
        change(content["choices"][0], content["usage"])

    with pytest.raises(UsageError):
        asking(provider(reply=reply).url).complete(prompts[0], ProviderCapabilities(top_logprobs=5), {})


def test_invalid_counts_and_log_probabilities_of_fewer_tokens(provider, asking, prompts):
    def reply(content, body):
        content["usage"] = {"prompt_tokens": "many", "completion_tokens": None}
        content["choices"][0]["logprobs"]["top_logprobs"].pop()

    completions = asking(provider(reply=reply).url)
    result = completions.complete(prompts[1], ProviderCapabilities(top_logprobs=5), {}, tokens=3)
    assert len(result) == 3
    assert result[-1].logprobs is None
    assert completions.usage.prompt_tokens == len(prompts[1])


def test_merged_token_texts_do_not_lower_floor(provider, asking, prompts, tokenizer):
    name = tokenizer.decode(tokenizer("a").input_ids[-1:])

    def merge(content, body):
        # Two of the five likeliest have one name and are listed once; the chosen token is added.
        logprobs = content["choices"][0]["logprobs"]
        top = logprobs["top_logprobs"][0]
        top.pop(sorted(top, key=top.get)[1])
        logprobs["tokens"], top[name] = [name], -30.0

    capabilities = ProviderCapabilities(answer_ids=False, top_logprobs=5)
    (position,) = asking(provider(reply=merge).url).complete(prompts[0], capabilities, {})
    assert position.logprobs is None
