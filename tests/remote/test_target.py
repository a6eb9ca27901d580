"""A steered remote target, against the same model steered in this process."""

import dataclasses
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from divdec.endpoint import Endpoint
from divdec.errors import FailedClosed, UsageError
from divdec.model.loading import Bundle
from divdec.remote.experts import LoadedExperts
from divdec.remote.settings import RemoteSettings
from divdec.remote.target import RemoteAnswer, RemoteTarget
from divdec.steering import Steering
from support.exactness import assert_same_answer

TOKENS = 10


@pytest.fixture
def remote(opened):
    def make(url, bundle, steering="linear:1.5", tries=60, retries=2, **settings):
        experts = LoadedExperts.load(Bundle.open(bundle, target=False))
        endpoint = Endpoint(f"{url}/v1", "plain", retries=retries)
        settings = RemoteSettings(tries=tries, **settings)
        return opened(RemoteTarget(endpoint, experts, Steering.parse(steering), settings))

    return make


def greedy(local, steering, prompt, tokens=TOKENS):
    local.steering = steering
    answer = local.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False)
    return answer[0, len(prompt) :].tolist()


def tokens_of(answer):
    return [choice.token for choice in answer.choices]


def no_logprobs(body):
    return (400, "logprobs are not offered") if body.get("logprobs") is not None else None


def text_only(body):
    """As llama.cpp's server is: no ids in either direction."""
    if isinstance(body["prompt"], list) or "return_tokens_as_token_ids" in body:
        return 422, "prompt must be a text"
    return None


@pytest.mark.parametrize(("steering", "block"), [("linear:1.5", 1), ("rank:20", 1), ("linear:0.5", 8), ("rank:20", 8)])
def test_greedy_output_matches_local_model(remote, url, bundle, local, prompts, steering, block):
    target = remote(url, bundle, steering, block=block)
    for prompt in prompts[:3]:
        answer = target.generate(prompt, TOKENS)
        assert_same_answer(local, prompt, tokens_of(answer), greedy(local, steering, prompt))
        assert answer.exact_tokens == len(answer.choices)
    assert target.capabilities.prompt_ids
    assert target.capabilities.answer_ids
    assert target.capabilities.raw_logprobs
    assert all(choice.exact for choice in target.choices)
    assert len(target.choices) > TOKENS


def test_multi_token_block_uses_fewer_requests(remote, url, bundle, prompts):
    requests = []
    for block in (1, 8):
        target = remote(url, bundle, "linear:0.5", block=block)
        target.generate(prompts[0], 16)
        requests.append(target.completions.usage.requests)
    assert requests[1] < requests[0]


@pytest.mark.parametrize("steering", ["linear:1.5", "linear:1.5:0.5", "rank:20"])
def test_a_provider_without_log_probabilities(remote, provider, bundle, local, prompts, steering):
    target = remote(provider(request=no_logprobs).url, bundle, steering, bias_entries=600, tries=2)
    answer = target.generate(prompts[0], TOKENS)
    assert target.capabilities.top_logprobs == 0
    assert not target.capabilities.answer_ids  # without log-probabilities no token is named
    assert_same_answer(local, prompts[0], tokens_of(answer), greedy(local, steering, prompts[0]))
    assert answer.exact_tokens == len(answer.choices)  # all 512 tokens have an entry


def test_few_bias_entries_without_logprobs_are_exact_with_more_requests(remote, provider, bundle, local, prompts):
    there = provider(request=no_logprobs)
    target = remote(there.url, bundle, "linear:0.5", bias_entries=60, tries=60)
    answer = target.generate(prompts[1], 6)
    assert_same_answer(local, prompts[1], tokens_of(answer), greedy(local, "linear:0.5", prompts[1], 6))
    assert answer.exact_tokens == len(answer.choices)
    assert target.completions.usage.requests > 4 + len(answer.choices)
    assert all(len(body.get("logit_bias", {})) <= 60 for _, body in there.seen)


def test_one_try_has_error_bounds(remote, provider, bundle, local, prompts):
    target = remote(provider(request=no_logprobs).url, bundle, "linear:1.5", bias_entries=20, tries=1)
    answer = target.generate(prompts[0], TOKENS)
    assert target.completions.usage.requests == 4 + len(answer.choices)
    assert answer.exact_tokens < len(answer.choices)
    assert 0 < max(choice.gap for choice in target.choices) < math.inf
    # Each token's steered logit lies within its bound of the best.
    local.steering = "linear:1.5"
    ids = [*prompts[0], *tokens_of(answer)]
    with torch.no_grad():
        logits = local(torch.tensor([ids])).logits[0, len(prompts[0]) - 1 : -1].double()
    for scores, choice in zip(logits, answer.choices, strict=True):
        assert float(scores.max() - scores[choice.token]) <= choice.gap + 1e-4


def test_a_provider_that_penalises_repetition_by_default(remote, provider, bundle, local, prompts):
    def penalise(body):
        # llama.cpp's field is repeat_penalty, 1.1 by default; vLLM takes its default from the checkpoint.
        penalties = [body.pop(field, 3.0) for field in ("repetition_penalty", "repeat_penalty")]
        body["repetition_penalty"] = max(penalties)

    target = remote(provider(request=penalise).url, bundle, "linear:0.5")
    for prompt in prompts[:4]:
        assert_same_answer(
            local, prompt, tokens_of(target.generate(prompt, TOKENS)), greedy(local, "linear:0.5", prompt)
        )


def test_a_provider_that_accepts_only_fields_of_openai(remote, provider, bundle, local, prompts):
    def strict(body):
        others = body.keys() & {"top_k", "min_p", "repetition_penalty", "repeat_penalty"}
        return (400, f"unrecognized: {sorted(others)}") if others else None

    target = remote(provider(request=strict).url, bundle)
    assert_same_answer(
        local, prompts[0], tokens_of(target.generate(prompts[0], TOKENS)), greedy(local, "linear:1.5", prompts[0])
    )
    assert not target.capabilities.neutral


@pytest.mark.parametrize("block", [1, 4])
def test_a_provider_that_ignores_unknown_fields(remote, provider, bundle, local, prompts, block):
    def ignore(body):
        for field in ("logprobs", "return_tokens_as_token_ids"):
            body.pop(field, None)

    target = remote(provider(request=ignore).url, bundle, bias_entries=600, block=block)
    assert_same_answer(
        local, prompts[0], tokens_of(target.generate(prompts[0], TOKENS)), greedy(local, "linear:1.5", prompts[0])
    )
    assert (target.capabilities.answer_ids, target.capabilities.top_logprobs) == (False, 0)


def test_logprobs_are_not_used_where_they_may_contain_the_bias(remote, provider, bundle, prompts):
    def silent(content, body):
        # The probe's answer under the bias ends at once, without a name of the end.
        if "logit_bias" in body:
            content["choices"][0].update(text="", finish_reason="stop")
            content["choices"][0]["logprobs"] = {"tokens": [], "top_logprobs": []}

    target = remote(provider(reply=silent).url, bundle)
    target.generate(prompts[0], 1)
    assert target.capabilities.top_logprobs == 0


def test_all_samples_of_the_last_try_are_bounded(remote, url, bundle, prompts):
    target = remote(url, bundle, bias_entries=20, tries=1)
    answer = target.generate(prompts[0], TOKENS, temperature=1.0)
    # None counts as exact because it would have been accepted: the others would then exceed their bounds.
    assert all(0 < choice.total_variation <= 1 for choice in answer.choices)


@pytest.mark.parametrize("steering", ["linear:1.5", "rank:20"])
def test_text_only_provider(remote, provider, bundle, local, prompts, steering):
    target = remote(provider(request=text_only).url, bundle, steering)
    answer = target.generate(prompts[2], TOKENS)
    assert not target.capabilities.prompt_ids
    assert not target.capabilities.answer_ids
    assert target.capabilities.top_logprobs == 20
    assert_same_answer(local, prompts[2], tokens_of(answer), greedy(local, steering, prompts[2]))


def test_logprobs_including_bias_are_detected(remote, provider, bundle, local, prompts, models):
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(models / "target")

    def show(content, body):
        # Some servers return log-probabilities after their samplers.
        with torch.no_grad():
            logits = plain(torch.tensor([body["prompt"]])).logits[0, -1].double()
        for token, value in body.get("logit_bias", {}).items():
            logits[int(token)] += value
        values, ids = logits.log_softmax(0).topk(body["logprobs"])
        names = [f"token_id:{token}" for token in ids.tolist()]
        content["choices"][0]["logprobs"]["top_logprobs"] = [dict(zip(names, values.tolist(), strict=True))]

    for steering in ("linear:1.5", "rank:20"):
        target = remote(provider(reply=show).url, bundle, steering)
        answer = target.generate(prompts[0], TOKENS)
        assert not target.capabilities.raw_logprobs
        assert_same_answer(local, prompts[0], tokens_of(answer), greedy(local, steering, prompts[0]))
        assert answer.exact_tokens == len(answer.choices)


@pytest.mark.parametrize(
    ("entries", "steering"),
    [
        pytest.param(600, "linear:1.5", marks=pytest.mark.slow),
        (100, "linear:1.0"),
        pytest.param(40, "rank:20", marks=pytest.mark.slow),
    ],
)
def test_samples_follow_the_steered_distribution(remote, url, bundle, local, prompts, entries, steering):
    from scipy.stats import chisquare

    target = remote(url, bundle, steering, bias_entries=entries, tries=200)
    temperature, number = 0.8, 200
    drawn = torch.zeros(512, dtype=torch.float64)
    with ThreadPoolExecutor(8) as pool:
        tasks = [
            pool.submit(target.generate, prompts[0], 1, temperature=temperature, seed=seed) for seed in range(number)
        ]
    for task in tasks:
        assert task.result().exact_tokens == 1
        drawn[tokens_of(task.result())[0]] += 1
    local.steering = steering
    with torch.no_grad():
        expected = (local(torch.tensor([prompts[0]])).logits[0, -1].double() / temperature).softmax(0) * number
    likely = expected >= 5
    observed = torch.cat([drawn[likely], drawn[~likely].sum()[None]])
    wanted = torch.cat([expected[likely], expected[~likely].sum()[None]])
    assert len(observed) > 3
    assert chisquare(observed, wanted * (observed.sum() / wanted.sum())).pvalue > 1e-3


def test_seed_gives_reproducible_remote_output(remote, url, bundle, prompts):
    target = remote(url, bundle)
    answers = [tokens_of(target.generate(prompts[0], TOKENS, temperature=1.0, seed=7)) for _ in range(2)]
    assert answers[0] == answers[1]


def test_threads_do_not_change_answers(remote, url, bundle, local, prompts):
    target = remote(url, bundle, block=4)
    answers = {}

    def ask(index):
        answers[index] = tokens_of(target.generate(prompts[index], TOKENS))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for index in range(4):
        assert_same_answer(local, prompts[index], answers[index], greedy(local, "linear:1.5", prompts[index]))


def test_remote_stop_strings_and_streaming(remote, url, bundle, tokenizer, prompts):
    target = remote(url, bundle)
    whole = target.generate(prompts[0], TOKENS)
    assert whole.text == tokenizer.decode(tokens_of(whole), skip_special_tokens=True)
    stop = whole.text[len(whole.text) // 2 :][:3]
    answer = RemoteAnswer()
    pieces = list(target.stream(prompts[0], TOKENS, stop=[stop], answer=answer))
    assert "".join(pieces) == answer.text == whole.text[: whole.text.index(stop)]
    assert answer.finish_reason == "stop"
    assert len(answer.choices) < len(whole.choices) + 1


def test_experts_with_another_tokenizer_are_bridged(opened, url, models, tmp_path, world, prompts, local):
    from divdec import write_bundle
    from divdec_research.world.models import train_tokenizer
    from support.served import trained

    other = train_tokenizer(world.corpus[:200], 300)
    for seed, name in enumerate(("retain", "forget")):
        trained(other, world.corpus[seed::2], seed, 32, 2).save_pretrained(tmp_path / name)
        other.save_pretrained(tmp_path / name)
    pair = {f"{name}_auxiliary": str(tmp_path / name) for name in ("retain", "forget")}
    rule, target = "rank:20", str(models / "target")
    bridged = write_bundle(tmp_path / "bridged", target=target, **pair, steering=rule, bridge=True)
    written = Bundle.open(bridged, target=False)
    loaded, endpoint = LoadedExperts.load(written), Endpoint(f"{url}/v1", "plain")
    target = opened(RemoteTarget(endpoint, loaded, written.steering, RemoteSettings(block=4)))

    from divdec import DivergenceForCausalLM

    steered = DivergenceForCausalLM.from_experts(local.target, loaded.experts, "rank:20")
    answer = steered.generate(torch.tensor([prompts[3]]), max_new_tokens=TOKENS, do_sample=False)
    tokens = tokens_of(target.generate(prompts[3], TOKENS))
    assert_same_answer(steered, prompts[3], tokens, answer[0, len(prompts[3]) :].tolist())


class TestNeverUnsteered:
    def test_provider_ignoring_logit_bias(self, remote, provider, bundle, prompts):
        def ignore(body):
            body.pop("logit_bias", None)

        with pytest.raises(FailedClosed, match="ignores logit_bias"):
            remote(provider(request=ignore).url, bundle).generate(prompts[0], TOKENS)

    def test_a_provider_that_ignores_positive_biases(self, remote, provider, bundle, prompts):
        def ignore(body):
            body["logit_bias"] = {token: value for token, value in body.get("logit_bias", {}).items() if value < 0}

        with pytest.raises(FailedClosed, match="obeys no positive logit_bias"):
            remote(provider(request=ignore).url, bundle).generate(prompts[0], TOKENS)

    @pytest.mark.parametrize("change", [int, lambda value: max(-0.1, min(value, 0.1)) if abs(value) < 50 else value])
    def test_a_provider_that_rounds_or_limits_biases(self, remote, provider, bundle, prompts, change):
        def alter(body):
            body["logit_bias"] = {token: change(value) for token, value in body.get("logit_bias", {}).items()}

        with pytest.raises(FailedClosed, match="cannot be steered"):
            for prompt in prompts:
                remote(provider(request=alter).url, bundle, "linear:1.5").generate(prompt, 40)

    def test_provider_dropping_bias_mid_run(self, remote, provider, bundle, local, prompts):
        asked = []

        def forget(body):
            asked.append(body)
            if len(asked) > 4:
                body.pop("logit_bias", None)

        answer = RemoteAnswer()
        # The rule suppresses the plain target's choices, so that the loss of the bias shows.
        with pytest.raises(FailedClosed, match=r"cannot be steered|does not do as"):
            for _ in remote(provider(request=forget).url, bundle, "rank:400", bias_entries=500).stream(
                prompts[0], 40, answer=answer
            ):
                pass
        tokens = [choice.token for choice in answer.choices]
        assert_same_answer(local, prompts[0], tokens, greedy(local, "rank:400", prompts[0], 40)[: len(tokens)])

    def test_a_provider_that_returns_suppressed_tokens(self, remote, provider, bundle, prompts):
        asked = []

        def insist(content, body):
            asked.append(body)
            if len(asked) > 3:
                token = next(iter(body["logit_bias"]))
                logprobs = content["choices"][0]["logprobs"]
                logprobs["tokens"], logprobs["token_logprobs"] = [f"token_id:{token}"], [-0.1]

        with pytest.raises(FailedClosed, match="suppressed by a bias"):
            remote(provider(reply=insist).url, bundle, "rank:20").generate(prompts[0], TOKENS)

    def test_more_tokens_are_suppressed_than_fit_a_request(self, remote, provider, bundle, prompts, local):
        # Two entries for 400 tokens: no try gives a token that is allowed.
        target = remote(provider(request=no_logprobs).url, bundle, "rank:400", bias_entries=2, tries=3)
        with pytest.raises(FailedClosed, match="bias-entries"):
            target.generate(prompts[0], 40)

    def test_overflowing_experts(self, remote, url, bundle, prompts):
        target = remote(url, bundle)
        with torch.no_grad():
            next(target.experts.experts.retain.parameters()).fill_(float("nan"))
        with pytest.raises(FailedClosed, match="not finite"):
            target.generate(prompts[0], TOKENS)

    def test_token_ids_unknown_to_tokenizer(self, remote, provider, bundle, prompts):
        def strange(content, body):
            content["choices"][0]["logprobs"]["tokens"] = ["token_id:99999"]

        with pytest.raises(UsageError, match="no token of the given tokenizer"):
            remote(provider(reply=strange).url, bundle).generate(prompts[0], TOKENS)

    def test_provider_returning_too_many_tokens(self, remote, provider, bundle, prompts):
        def more(body):
            body["max_tokens"] += 1

        with pytest.raises(UsageError, match="with 2 tokens; the request allows 1"):
            remote(provider(request=more).url, bundle).generate(prompts[0], TOKENS)

    @pytest.mark.parametrize(
        ("rule", "other"),
        [
            ("rank:20:3:soft", "rank:20:3"),
            ("rank:20:soft", "rank:20"),
            ("linear:1:3:full", "linear:1:3, or linear:1 if q refuses"),
        ],
    )
    def test_rule_that_needs_target_logits_is_refused(self, remote, url, bundle, rule, other):
        with pytest.raises(UsageError, match=f"{rule.rpartition(':')[2]} needs the target's logits.*; use {other}$"):
            remote(url, bundle, rule)


def test_provider_rejecting_logit_bias(remote, provider, bundle, prompts):
    there = provider(request=lambda body: (400, "logit_bias is not supported") if "logit_bias" in body else None)
    with pytest.raises(UsageError, match="logit_bias is not accepted; use another provider"):
        remote(there.url, bundle).generate(prompts[0], TOKENS)


def test_temporarily_overloaded_provider_is_retried(remote, provider, bundle, local, prompts):
    asked = []

    def busy(body):
        asked.append(body)
        return (429, "slow down") if len(asked) % 3 == 0 else None

    target = remote(provider(request=busy).url, bundle)
    assert_same_answer(
        local, prompts[0], tokens_of(target.generate(prompts[0], TOKENS)), greedy(local, "linear:1.5", prompts[0])
    )
    assert target.completions.usage.retries >= 2


def test_answer_ends_where_the_context_is_full(remote, url, bundle, prompts):
    target = remote(url, bundle)
    target.experts = dataclasses.replace(target.experts, max_length=len(prompts[0]) + 2)
    answer = target.generate(prompts[0], 40)
    assert (len(answer.choices), answer.finish_reason) == (2, "length")
    target.experts = dataclasses.replace(target.experts, max_length=len(prompts[0]))
    with pytest.raises(UsageError, match=f"read fewer than {len(prompts[0])}"):
        target.generate(prompts[0], 40)


def test_provider_failing_mid_stream_raises(remote, provider, bundle, prompts):
    there = provider()
    target = remote(there.url, bundle, retries=0)
    stream = target.stream(prompts[0], 40)
    next(stream)
    there.stop()
    with pytest.raises(UsageError, match=r"cannot be reached|gave no answer"):
        for _ in stream:
            pass
