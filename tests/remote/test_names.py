"""A provider that names tokens by text, of a vocabulary in which several tokens have the same text."""

import pytest
import torch

from divdec import DivergenceForCausalLM, write_bundle
from divdec.endpoint import Endpoint
from divdec.errors import FailedClosed, UsageError
from divdec.model.loading import Bundle
from divdec.remote.completions import Completions, ProviderCapabilities
from divdec.remote.experts import LoadedExperts
from divdec.remote.settings import RemoteSettings
from divdec.remote.target import RemoteTarget
from divdec.steering import Steering
from support import tokenizer_kinds
from support.served import engine_of, serving
from support.tiny import tiny_model

TOKENS = 5


@pytest.fixture(scope="module")
def byte_tokenizer(world):
    return tokenizer_kinds.trained("llama", tuple(world.corpus[:300]))


@pytest.fixture(scope="module")
def byte_models(tmp_path_factory, byte_tokenizer):
    """A steered bundle and the plain one that its provider serves; random models like byte tokens as much as others."""
    folder = tmp_path_factory.mktemp("bytes")
    parts = {"target": "target", "retain_auxiliary": "retain", "forget_auxiliary": "forget"}
    for seed, name in enumerate(parts.values()):
        model = tiny_model("llama", len(byte_tokenizer), seed)
        model.config.eos_token_id = model.generation_config.eos_token_id = byte_tokenizer.eos_token_id
        if name == "target":
            _like_twins(model, byte_tokenizer)
        model.save_pretrained(folder / name)
        byte_tokenizer.save_pretrained(folder / name)
    paths = {role: str(folder / name) for role, name in parts.items()}
    return write_bundle(folder / "steered", **paths, steering="rank:1"), write_bundle(
        folder / "plain", **paths, steering="linear:0"
    )


def _like_twins(model, tokenizer):
    """Let the model mostly say one of two tokens with one text, and never a part of a character."""
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    twins = [token for token, name in enumerate(names) if len(name) == 1 or name in tokenizer_kinds.BYTES[33:127]]
    parts = tokenizer.convert_tokens_to_ids(tokenizer_kinds.BYTES[128:])
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[twins] *= 2
        head[parts] = 0.0


@pytest.fixture(scope="module")
def byte_local(byte_models):
    return DivergenceForCausalLM.from_pretrained(byte_models[0])


@pytest.fixture(scope="module")
def url(byte_models):
    with serving([engine_of(byte_models[1], "plain")], shutdown_timeout=0.0) as address:
        yield address


def by_text(body):
    return (400, "tokens are named by text here") if "return_tokens_as_token_ids" in body else None


def text_alone(body):
    return by_text(body) or ((400, "no log-probabilities") if body.get("logprobs") is not None else None)


@pytest.fixture
def remote(opened, byte_models):
    def make(url, steering, entries=1000, **settings):
        experts = LoadedExperts.load(Bundle.open(byte_models[0], target=False))
        endpoint = Endpoint(f"{url}/v1", "plain", retries=1)
        settings = RemoteSettings(bias_entries=entries, tries=4, **settings)
        return opened(RemoteTarget(endpoint, experts, Steering.parse(steering), settings))

    return make


def steered(local, steering, ids):
    local.steering = steering
    with torch.no_grad():
        return local(torch.tensor([ids])).logits[0].double()


@pytest.mark.parametrize("settings", [{}, {"block": 4}], ids=str)
@pytest.mark.parametrize("steering", ["linear:1.5", "rank:1"])
@pytest.mark.parametrize("request_", [by_text, text_alone])
def test_exact_tokens_are_steered_argmax(remote, provider, byte_local, byte_tokenizer, steering, settings, request_):
    if request_ is text_alone and settings:
        pytest.skip("nothing to choose among, and no block")
    target = remote(provider(request=request_).url, steering, **settings)
    proved = 0
    for text in ("The sea", "A book")[: 1 if settings else 2]:
        prompt = byte_tokenizer(text).input_ids
        try:
            answer = target.generate(prompt, TOKENS)
        except FailedClosed:
            continue  # a byte token came whose text is that of a suppressed one
        tokens = [choice.token for choice in answer.choices]
        logits = steered(byte_local, steering, prompt + tokens)[len(prompt) - 1 : -1]
        for scores, choice in zip(logits, answer.choices, strict=True):
            assert not scores[choice.token].isneginf()
            if choice.exact:
                proved += 1
                assert scores.max() - scores[choice.token] < 1e-4
            else:
                assert scores.max() - scores[choice.token] <= choice.gap + 1e-4
    assert not target.capabilities.answer_ids
    assert proved or "method" in settings


def test_names_that_several_tokens_have_are_ambiguous(remote, provider, byte_tokenizer):
    target = remote(provider(request=by_text).url, "linear:1")
    completions = target.completions
    letter, byte = byte_tokenizer.convert_tokens_to_ids(["e", "<0x65>"])
    assert completions._ids(" the") == [byte_tokenizer.convert_tokens_to_ids("▁the")]
    assert completions._ids("e") == [letter, byte]
    assert completions._ids("</s>") == [byte_tokenizer.eos_token_id]
    for unreadable in ("\ufffd", "", "no such token", None, 5):
        with pytest.raises(UsageError, match="no token of the given tokenizer"):
            completions._ids(unreadable)


def test_a_name_without_its_space_is_ambiguous(remote, provider, byte_tokenizer):
    """As long as no name has begun with a space, names may be without the space that their tokens begin with."""
    completions = remote(provider(request=by_text).url, "linear:1").completions
    with_space = byte_tokenizer.convert_tokens_to_ids("▁the")
    assert with_space in completions._ids("the")
    completions._ids(" of")
    alone = byte_tokenizer.convert_tokens_to_ids("the")
    if alone == byte_tokenizer.unk_token_id:
        with pytest.raises(UsageError):
            completions._ids("the")
    else:
        assert completions._ids("the") == [alone]


@pytest.mark.parametrize("steering", ["linear:1.5", "rank:1"])
def test_provider_stripping_token_text_gives_no_false_exactness(remote, provider, byte_local, byte_tokenizer, steering):
    def strip(content, body):
        choice = content["choices"][0]
        choice["text"] = choice["text"].strip()
        logprobs = choice["logprobs"]
        logprobs["tokens"] = [name.strip() for name in logprobs["tokens"]]
        logprobs["top_logprobs"] = [
            {name.strip(): value for name, value in top.items()} for top in logprobs["top_logprobs"]
        ]

    target = remote(provider(request=by_text, reply=strip).url, steering)
    prompt = byte_tokenizer("The sea").input_ids
    try:
        answer = target.generate(prompt, TOKENS)
    except (UsageError, FailedClosed):
        return
    tokens = [choice.token for choice in answer.choices]
    logits = steered(byte_local, steering, prompt + tokens)[len(prompt) - 1 : -1]
    assert all(
        scores.max() - scores[choice.token] < 1e-4 for scores, choice in zip(logits, answer.choices, strict=True)
        if choice.exact
    )  # fmt: skip


def test_samples_with_ambiguous_token_text_are_not_exact(remote, provider, byte_tokenizer):
    there = provider(request=by_text)
    prompt = byte_tokenizer("The sea").input_ids
    all_sent = remote(there.url, "linear:1")
    choices = [
        choice
        for seed in range(5)
        for choice in all_sent.generate(prompt, 4, temperature=0.3, seed=seed).choices
    ]  # fmt: skip
    alike = [len(all_sent.completions._ids(byte_tokenizer.decode(choice.token))) > 1 for choice in choices]
    assert any(alike)
    assert not any(choice.exact for choice, more in zip(choices, alike, strict=True) if more)
    # Where not all entries fit, how often another token with the name came would decide how often the others are kept.
    assert remote(there.url, "linear:1", entries=50).generate(prompt, 4, temperature=0.3).exact_tokens == 0


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"token_id:5": float("inf")}, UsageError),
        ({"token_id:5": 3.0}, UsageError),
        ({"token_id:5": True}, UsageError),
        ({"token_id:5": -9999.0}, None),  # cut off by the provider: not the target's own
        ({"token_id:05": -1.0, "token_id:5": -1.0}, None),  # one token by two names
    ],
    ids=str,
)
def test_invalid_log_probabilities_are_not_used(opened, provider, byte_tokenizer, change, error):
    def reply(content, body):
        content["choices"][0]["logprobs"]["top_logprobs"][0].update(change)

    endpoint = Endpoint(f"{provider(reply=reply).url}/v1", "plain", retries=1)
    completions = Completions(endpoint, byte_tokenizer, [byte_tokenizer.eos_token_id])
    opened(completions.endpoint)
    ask = (byte_tokenizer("The sea").input_ids, ProviderCapabilities(top_logprobs=5), {})
    if error is not None:
        with pytest.raises(error):
            completions.complete(*ask)
    else:
        assert completions.complete(*ask)[0].logprobs is None


def test_an_unnamed_end_of_several_is_ambiguous(opened, provider, byte_tokenizer):
    def end(content, body):
        content["choices"][0].update(text="", finish_reason="stop", logprobs={"tokens": [""], "top_logprobs": [None]})

    endpoint = Endpoint(f"{provider(reply=end).url}/v1", "plain", retries=1)
    for others in ((), (5,)):
        completions = Completions(endpoint, byte_tokenizer, [byte_tokenizer.eos_token_id, *others])
        opened(completions.endpoint)
        (position,) = completions.complete(
            byte_tokenizer("The sea").input_ids, ProviderCapabilities(answer_ids=False), {}
        )
        assert position.token == byte_tokenizer.eos_token_id
        assert (position.token in position.ambiguous) == bool(others)
