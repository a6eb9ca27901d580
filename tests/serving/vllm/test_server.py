"""vLLM's OpenAI server on a bundle: what clients are shown is steered, and they cannot ask for anything else."""

import httpx
import pytest
import torch

from divdec.data.records import texts_of
from divdec.takedowns.registry import Registry
from support.exactness import assert_same_text
from support.vllm_reference import HEADERS, KEY, Reference, vllm_serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def registry(make_registry, texts):
    return make_registry(texts[:20])


@pytest.fixture(scope="module")
def bundle(make_bundle, ngrams):
    return make_bundle(ngram=ngrams, ngram_weight=4.0)


@pytest.fixture(scope="module")
def followed(make_bundle, ngrams, registry):
    """The same bundle with the registry written into it, for transformers."""
    return make_bundle(ngram=ngrams, ngram_weight=4.0, registry=registry)


@pytest.fixture(scope="module")
def server(bundle, registry, tmp_path_factory):
    """The server's address; q drafts, and a registry is followed that the bundle does not name."""
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with vllm_serving(bundle, log, speculative=2, registry=str(registry), logprobs="full") as url:
        yield url
    assert KEY not in log.read_text()


@pytest.fixture
def post(server):
    def ask(path, headers=HEADERS, **body):
        return httpx.post(f"{server}{path}", json={"model": "steered", **body}, headers=headers, timeout=300)

    return ask


def echoed(post, ids, **changes):
    """Log-probabilities of a prompt's own tokens."""
    response = post("/v1/completions", prompt=ids, echo=True, logprobs=1, max_tokens=1, temperature=0, **changes)
    assert response.status_code == 200, response.text
    return torch.tensor(response.json()["choices"][0]["logprobs"]["token_logprobs"][1 : len(ids)])


def expected(logprobs, ids):
    return logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_vllm_chat_completion(server, followed, tokenizer):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server}/v1", api_key=KEY)
    messages = [{"role": "user", "content": "Who wrote it?"}]
    answer = client.chat.completions.create(
        model="steered", messages=messages, temperature=0, max_tokens=16, logprobs=True, top_logprobs=5
    )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    model = Reference(followed)
    tokens = model.greedy(ids)
    assert_same_text(model.model, tokenizer, ids, answer.choices[0].message.content, tokens)
    steered = model.logprobs(ids + tokens)[len(ids) - 1 :]
    shown = [result.logprob for result in answer.choices[0].logprobs.content]
    assert len(shown) == len(tokens)
    for index, value in enumerate(shown):
        assert abs(value - steered[index, tokens[index]].item()) < TOLERANCE


def test_prompt_logprobs_are_steered(post, followed, prompts):
    model = Reference(followed)
    for ids in prompts[10:20:3]:
        shown = echoed(post, ids)
        assert (shown - expected(model.logprobs(ids), ids)).abs().max() < TOLERANCE
        assert (shown - expected(model.own_logprobs(ids), ids)).abs().max() > 1
        response = post("/v1/completions", prompt=ids, prompt_logprobs=4, max_tokens=4, temperature=0, logprobs=5)
        result = response.json()["choices"][0]
        steered = model.logprobs(ids)
        for index, table in enumerate(result["prompt_logprobs"][1:]):
            for token, entry in table.items():
                assert abs(entry["logprob"] - steered[index, int(token)].item()) < TOLERANCE


def test_request_fields_cannot_change_steering(post, followed, prompts, tokenizer):
    model = Reference(followed)
    ids = prompts[12]
    tokens = model.greedy(ids)
    fields = {"alpha": 0, "steering": "linear:0", "additional_config": {"divdec": {"verify": False}}, "steer": False}
    fields |= {"vllm_xargs": {"alpha": 0}}
    response = post("/v1/completions", prompt=ids, max_tokens=16, temperature=0, **fields)
    plain = post("/v1/completions", prompt=ids, max_tokens=16, temperature=0)
    for answer in [plain] if response.status_code == 400 else [plain, response]:
        assert_same_text(model.model, tokenizer, ids, answer.json()["choices"][0]["text"], tokens)


def test_endpoints_exposing_or_changing_models_are_disabled(post, prompts, models):
    for path in ("/pooling", "/classify", "/score", "/rerank", "/v1/embeddings", "/collective_rpc", "/sleep"):
        assert post(path, input="text", method="load_model").status_code in (403, 404, 405), path
    for path in ("/v1/load_lora_adapter", "/update_weights", "/init_weight_transfer_engine", "/inference/v1/generate"):
        assert post(path, lora_path="x", token_ids=prompts[3]).status_code in (403, 404, 405), path
    embedded = post("/v1/completions", prompt=None, prompt_embeds="AAAA", max_tokens=1)
    assert 400 <= embedded.status_code < 500
    target = post("/v1/completions", model=str(models / "target"), prompt=prompts[3], max_tokens=1)
    assert target.status_code == 404
    assert post("/v1/completions", headers={}, prompt=prompts[3], max_tokens=1).status_code == 401


def test_takedown_applies_to_next_tokens(post, followed, registry, texts, tokenizer):
    """Also for a prompt whose keys and values are cached."""
    text = texts[50]
    ids = tokenizer(text)["input_ids"][:40]
    before = echoed(post, ids)
    assert (before - expected(Reference(followed).logprobs(ids), ids)).abs().max() < TOLERANCE
    Registry(registry).add("second", texts_of("texts", [text]))
    after = echoed(post, ids)
    model = Reference(followed)
    assert (after - expected(model.logprobs(ids), ids)).abs().max() < TOLERANCE
    assert (after - before).abs().max() > 0.1
    answer = post("/v1/completions", prompt=ids[:20], max_tokens=16, temperature=0).json()["choices"][0]["text"]
    assert_same_text(model.model, tokenizer, ids[:20], answer, model.greedy(ids[:20]))
