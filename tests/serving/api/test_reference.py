"""Whatever is asked for, an answer is one that the slow reference could have given, or it is a described refusal.

Requests are made up by schemathesis from the server's own description, several are sent at a time, and every token of
every answer is looked up in logits that were computed anew, by one unpadded pass without a cache and the formula.
"""

import concurrent.futures
import dataclasses
import json
import math

import httpx
import hypothesis
import pytest
import schemathesis
import torch
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from divdec import DivergenceForCausalLM, write_bundle
from divdec.cli import main
from divdec.data.formatting import encode_prompt
from divdec.data.records import Message, Record
from divdec.decoding.speculative import Speculation
from divdec.decoding.text import AnswerText
from divdec.serving.schemas import ChatCompletionRequest, CompletionRequest
from support import tokenizer_kinds
from support.reference import linear, rank, steered_logits
from support.served import engine_of, serving
from support.tiny import tiny_model

NEAR = 5e-3  # nats by which logits may differ: batches, padding and caches round otherwise than one pass
LOWEST = -9999.0
TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}{{ '<|head|>' + m['role'] + '<|/head|>' + m['content'] + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>' }}{% endif %}"
)
RULES = {"linear": "linear:1.5", "rank": "rank:300", "bridged": "linear:1.5", "ngrams": "linear:4"}
TOKENIZERS = {"linear": "llama", "rank": "byte-level", "bridged": "gemma", "ngrams": "unigram"}
PATHS = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatCompletionRequest}


@dataclasses.dataclass
class Bundle:
    model: DivergenceForCausalLM
    tokenizer: object
    pair: tuple | None

    def logits(self, ids):
        """Steered logits after each token."""
        if self.pair is not None:
            return steered_logits(self.model.target, *self.pair, ids, self.model.steering, self.model.vocab_size)
        with torch.no_grad():
            target, divergence = (piece[0].float() for piece in self.model.components(torch.tensor([ids]))[1:])
        steering = self.model.steering
        if steering.rule == "linear":
            return linear(target, divergence, steering)
        return torch.stack([rank(*row, steering) for row in zip(target, divergence, strict=True)])


@pytest.fixture(scope="module")
def bundles(tmp_path_factory, world):
    folder = tmp_path_factory.mktemp("bundles")
    texts = tuple(world.corpus[:300])
    result = {}
    for name, kind in TOKENIZERS.items():
        tokenizer = tokenizer_kinds.trained(kind, texts)
        tokenizer.chat_template = TEMPLATE
        other = tokenizer_kinds.trained("byte-level", texts) if name == "bridged" else tokenizer
        parts = {}
        for seed, piece in enumerate(("target", "retain", "forget")):
            own = tokenizer if piece == "target" else other
            model = tiny_model("llama" if name != "rank" else "gpt2", len(own), seed)
            model.config.eos_token_id = model.generation_config.eos_token_id = own.eos_token_id
            parts[piece] = str(folder / name / piece)
            model.save_pretrained(parts[piece])
            own.save_pretrained(parts[piece])
        if name == "ngrams":
            given = {"target": parts["target"], "ngram": _ngrams(folder, parts["target"], world)}
        else:
            given = {
                "target": parts["target"],
                "retain_auxiliary": parts["retain"],
                "forget_auxiliary": parts["forget"],
            }
        write_bundle(folder / name / "bundle", **given, steering=RULES[name], bridge=name == "bridged")
        model = DivergenceForCausalLM.from_pretrained(folder / name / "bundle")
        pair = None
        if name in ("linear", "rank"):
            pair = tuple(AutoModelForCausalLM.from_pretrained(parts[piece]).eval() for piece in ("retain", "forget"))
        result[name] = (Bundle(model, tokenizer, pair), folder / name / "bundle")
    return result


def _ngrams(folder, target, world):
    for name, texts in (("retain", world.corpus[:200]), ("forget", world.corpus[200:300])):
        rows = dict.fromkeys(json.dumps({"text": text}) for text in texts if text.strip())
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    given = ["--retain", folder / "retain.jsonl", "--forget", folder / "forget.jsonl", "--target", target]
    assert main(["ngram", *map(str, given), "--output", str(folder / "pair")]) == 0
    return folder / "pair"


@pytest.fixture(scope="module")
def described(bundles):
    """The description of a server of all the bundles; one speculates while a request is alone."""
    speculating = {"linear": {"speculation": Speculation(3)}}
    engines = [engine_of(path, name, **speculating.get(name, {})) for name, (_, path) in bundles.items()]
    with serving(engines, shutdown_timeout=0.0) as url:
        schema = schemathesis.openapi.from_dict(httpx.get(f"{url}/openapi.json").json())
        schema.config.update(base_url=url)
        yield schema, url


def usual(name):
    """What most requests must hold to be answered; schemathesis makes up all the rest, and sometimes these."""
    texts = st.sampled_from(["The tale is about", "She was born", " ", "x", "Größe 😀", "The", "日本 sea (and"])
    ids = st.lists(st.integers(0, 590), min_size=1, max_size=12)
    fields = {
        "model": st.sampled_from(sorted(RULES)),
        "max_tokens": st.integers(1, 6),
        "n": st.integers(1, 3),
        "temperature": st.sampled_from([0, 0, 0.3, 1, 2.5, 1e-6]),
        "logit_bias": st.dictionaries(st.integers(0, 590).map(str), st.sampled_from([-100, -3.5, 2, 100]), max_size=12),
        "stop": st.lists(st.sampled_from([" ", "e", "the", "\n", "😀", "a b"]), max_size=2),
        "top_k": st.sampled_from([0, -1, 1, 5, 50]),
        "seed": st.integers(0, 99),
        "return_tokens_as_token_ids": st.just(True),
    }
    if name == "/v1/completions":
        prompts = st.one_of(texts, ids, st.lists(texts, min_size=1, max_size=2), st.lists(ids, min_size=1, max_size=2))
        fields |= {"prompt": prompts, "logprobs": st.sampled_from([None, 0, 3])}
    else:
        turn = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": texts})
        fields |= {
            "messages": st.lists(turn, min_size=1, max_size=3),
            "logprobs": st.booleans(),
            "top_logprobs": st.none(),
            "max_completion_tokens": st.none(),
        }
    return st.fixed_dictionaries(
        {field: st.tuples(st.integers(0, 9).map(bool), values) for field, values in fields.items()}
    )


def check_requests(described, bundles, path, enough):
    """Return the bodies of the requests that were answered, and compared with the reference: at least `enough`."""
    schema, url = described
    answered = []
    (operation,) = schema[path].values()
    generated = operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)

    @hypothesis.settings(
        # Constants of the source are among the values that hypothesis draws, so that how many requests hold something
        # that is refused changes with every edit: drawing goes on until enough are answered.
        max_examples=4 * enough,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],  # to shrink what fails would take longer than a test may
    )
    @hypothesis.given(st.lists(st.tuples(generated, usual(path)), min_size=1, max_size=4))
    def check(requests):
        if len(answered) >= enough:
            return
        bodies = []
        for case, usually in requests:
            body = case.body if isinstance(case.body, dict) else {}
            bodies.append(body | {name: value for name, (taken, value) in usually.items() if taken})
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for body, (status, result) in zip(bodies, pool.map(lambda b: send(url + path, b), bodies), strict=True):
                if status != 200:
                    check_error(status, result)
                    continue
                answered.append(body)
                check_answer(url, path, bundles[body["model"]][0], body, result)

    check()
    assert len(answered) >= enough
    return answered


def send(url, body):
    """Status, and the answer as one that was not streamed."""
    response = httpx.post(url, json=body, timeout=120)
    if not response.is_success or not body.get("stream"):
        return response.status_code, response.json()
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    if events[-1] != "[DONE]":
        result = json.loads(events[-1])
        return 400 if result["error"]["type"] == "invalid_request_error" else 500, result
    choices, usage = {}, None
    for event in map(json.loads, events[:-1]):
        usage = event.get("usage") or usage
        for piece in event["choices"]:
            whole = choices.setdefault(piece["index"], {"text": "", "finish_reason": None, "logprobs": None})
            assert whole["finish_reason"] is None  # nothing comes behind the end
            whole["text"] += piece.get("text") or piece.get("delta", {}).get("content") or ""
            whole["finish_reason"] = piece["finish_reason"]
            for name, values in (piece["logprobs"] or {}).items():
                whole["logprobs"] = whole["logprobs"] or {}
                whole["logprobs"][name] = whole["logprobs"].get(name, []) + (values or [])
    return 200, {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def check_error(status, result):
    error = result["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 400 <= status < 500 or (status, error["code"]) == (500, "steering_failed"), result


def check_answer(url, path, bundle, body, result):
    request = PATHS[path].model_validate(body)
    chat = path != "/v1/completions"
    if chat and (
        (request.response_format and request.response_format.type != "text")
        or request.tool_choice not in (None, "none", "auto")
        or request.continue_final_message
    ):
        return  # a grammar decides, or the prompt is an answer's beginning, which the reference does not know
    prompts = prompts_of(bundle, request, chat)
    assert len(result["choices"]) == len(prompts) * request.n
    generated = 0
    for index, choice in enumerate(result["choices"]):
        answer = read(choice, chat)
        echoed = not chat and request.echo
        if answer["tokens"] is None:
            continue
        ids, text = prompts[index // request.n]
        generated += check_choice(bundle, request, ids, text if echoed else None, answer)
    reported = request.logprobs if chat else request.logprobs is not None
    if reported and request.return_tokens_as_token_ids and result["usage"] is not None:
        assert result["usage"]["completion_tokens"] == generated
    if not reported and (request.temperature == 0 or request.seed is not None):
        # The same request with log-probabilities has the same answer, which is then looked up.
        more = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        more |= {"logprobs": True if chat else 0, "return_tokens_as_token_ids": True}
        status, again = send(url + path, more)
        assert status == 200
        check_answer(url, path, bundle, more, again)
        if not (request.temperature == 0 and near_tie(bundle, request, prompts, again, chat)):
            texts = [[read(choice, chat)["text"] for choice in answers["choices"]] for answers in (result, again)]
            assert texts[0] == texts[1]


def prompts_of(bundle, request, chat):
    """The prompts as tokens, and as they are echoed."""
    if chat:
        turns = tuple(
            Message("system" if turn.role == "developer" else turn.role, turn.content) for turn in request.messages
        )
        return [(encode_prompt(Record("", messages=turns), bundle.tokenizer), None)]
    given = request.prompt
    if isinstance(given, str) or isinstance(given[0], int):
        given = [given]
    return [
        (encode_prompt(Record("", prompt=one), bundle.tokenizer), one)
        if isinstance(one, str)
        else (one, written(bundle.tokenizer, one))
        for one in given
    ]


def read(choice, chat):
    """A choice in one form for both endpoints; tokens None where they are not told by id."""
    reported = choice.get("logprobs") or {}
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    answer = {"text": text, "finish_reason": choice["finish_reason"], "tokens": None, "offsets": None}
    if chat and reported.get("content"):
        content = reported["content"]
        answer |= {
            "tokens": [token["token"] for token in content],
            "logprobs": [token["logprob"] for token in content],
            "top": [{top["token"]: top["logprob"] for top in token["top_logprobs"]} for token in content],
        }
    elif not chat and reported:
        answer |= {
            "tokens": reported["tokens"],
            "logprobs": reported["token_logprobs"],
            "top": reported["top_logprobs"],
        }
        answer["offsets"] = reported["text_offset"]
    if answer["tokens"] and not all(name.startswith("token_id:") for name in answer["tokens"]):
        answer["tokens"] = None
    if answer["tokens"] is not None:
        answer["tokens"] = [int(name.removeprefix("token_id:")) for name in answer["tokens"]]
    return answer


def check_choice(bundle, request, prompt, echoed, answer):
    """One answer against the reference; gives its number of tokens."""
    tokens = answer["tokens"] if echoed is None else answer["tokens"][len(prompt) :]
    if echoed is not None:
        assert answer["tokens"][: len(prompt)] == prompt
        assert answer["logprobs"][0] is None
    logits = bundle.logits([*prompt, *tokens])
    logprobs = logits.log_softmax(-1)
    ids = [*prompt, *tokens]
    begin = 1 if echoed is not None else len(prompt)
    for position in range(begin, len(ids)):
        reported = position if echoed is not None else position - len(prompt)
        check_told(logprobs[position - 1], ids[position], answer["logprobs"][reported], answer["top"][reported])
    for position, token in enumerate(tokens):
        scores = logits[len(prompt) + position - 1]
        assert not scores[token].isneginf(), "a suppressed token was answered"
        if not has_grammar(request):
            check_token(request, scores, prompt, tokens[:position], token)
    check_text(bundle, request, prompt, tokens, echoed, answer)
    return len(tokens)


def has_grammar(request):
    """Whether a grammar excludes tokens before the request's own choice among them."""
    formed = getattr(request, "response_format", None)
    return (formed is not None and formed.schema_of_reply is not None) or getattr(request, "forces_call", False)


def check_told(expected, token, logprob, top):
    assert max(expected[token].item(), LOWEST) == pytest.approx(logprob, abs=NEAR)
    for name, value in (top or {}).items():
        other = int(name.removeprefix("token_id:"))
        assert max(expected[other].item(), LOWEST) == pytest.approx(value, abs=NEAR)


def check_token(request, scores, prompt, before, token):
    """The token is the first choice, or one that may be drawn, after what the request asks for."""
    scores = asked(request, scores, prompt, before)
    best = scores.max().item()
    if request.temperature < 1e-5:
        assert best - scores[token].item() <= NEAR * 10
        return
    scores = scores / request.temperature
    near = NEAR * max(1.0, 1 / request.temperature) * 10
    order = scores.sort(descending=True).values
    if request.min_p > 0:
        assert scores[token] >= order[0] + math.log(request.min_p) - near
    if request.top_k > 0:
        assert scores[token] >= order[min(request.top_k, len(order)) - 1] - near
    if request.top_p < 1:
        # Those that are likelier by more than rounding leave room for it.
        likelier = scores.softmax(-1)[scores > scores[token] + near].sum().item()
        assert likelier < request.top_p + 1e-3


def asked(request, scores, prompt, before):
    """Biases and penalties, written out."""
    scores = scores.double().clone()
    for token, bias in request.logit_bias.items():
        scores[token] += bias
    for token in {*prompt, *before}:
        penalty = request.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(before):
        scores[token] -= request.frequency_penalty * before.count(token) + request.presence_penalty
    return scores


def check_text(bundle, request, prompt, tokens, echoed, answer):
    text, pieces, starts = AnswerText(bundle.tokenizer, (), prompt), [], []
    for token in tokens:
        pieces.append(text.add(token))
        starts.append(text.start)
    whole = "".join(pieces) + text.end()
    places = [position for stop in request.stop if (position := whole.find(stop)) >= 0]
    expected = whole[: min(places)] if places else whole
    assert answer["text"] == (echoed or "") + expected
    end = not request.ignore_eos and bundle.tokenizer.eos_token_id in tokens
    # Stop strings are also looked for in the names of special tokens, which the text leaves out.
    decode = bundle.tokenizer.decode
    names = [decode([token]) for token in tokens if not decode([token], skip_special_tokens=True)]
    named = any(stop in name for stop in request.stop for name in names)
    assert answer["finish_reason"] == ("stop" if places or named or end else "length")
    if end:
        assert tokens.index(bundle.tokenizer.eos_token_id) == len(tokens) - 1
    if not places and "\ufffd" not in whole and len(prompt) and "\ufffd" not in decoded(bundle.tokenizer, prompt):
        # An answer is what stands behind the prompt in the text of both, but for a space where it begins a text.
        both = bundle.tokenizer.decode([*prompt, *tokens], skip_special_tokens=True)
        assert both.endswith(whole)
    if answer["offsets"] is not None:
        begin = 0 if echoed is None else len(echoed)
        assert answer["offsets"][-len(tokens) :] == [begin + start for start in starts] or not tokens
        assert answer["offsets"] == sorted(answer["offsets"])


def near_tie(bundle, request, prompts, result, chat):
    """Whether a greedy answer turns on logits that rounding may change."""
    for index, choice in enumerate(result["choices"]):
        ids, _ = prompts[index // request.n]
        answer = read(choice, chat)
        tokens = (answer["tokens"] or [])[len(ids) if not chat and request.echo else 0 :]
        logits = bundle.logits([*ids, *tokens])
        for position in range(len(tokens)):
            best = asked(request, logits[len(ids) + position - 1], ids, tokens[:position]).topk(2).values
            if best[0] - best[1] < NEAR * 10:
                return True
    return False


def written(tokenizer, ids):
    """The text of a prompt that was given as ids."""
    whole = decoded(tokenizer, ids)
    if "\ufffd" not in whole:
        return whole
    # The decoder doubts the whole characters before bytes that make none; the server does not take them back.
    text = AnswerText(tokenizer, skip_special=False)
    return "".join(map(text.add, ids)) + text.end()


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", RULES)
def test_prompt_and_completion_form_one_text(described, bundles, name, capsys):
    """Echoed, streamed, by offsets, and from the command line."""
    _, url = described
    bundle, path = bundles[name]
    prompt = "The tale is about"
    word = next(
        word for word in ("the", "of", "was", "a") if {f"Ġ{word}", f"▁{word}"} & bundle.tokenizer.get_vocab().keys()
    )
    token = bundle.tokenizer.convert_tokens_to_ids(f"{'Ġ' if TOKENIZERS[name] == 'byte-level' else '▁'}{word}")
    body = {"model": name, "prompt": prompt, "temperature": 0, "max_tokens": 8, "logprobs": 0, "echo": True}
    body["logit_bias"] = {str(token): 60}
    whole = send(f"{url}/v1/completions", body)[1]["choices"][0]
    if not bundle.logits(bundle.tokenizer(prompt).input_ids)[-1, token].isneginf():
        assert whole["text"].startswith(f"{prompt} {word}")
    assert send(f"{url}/v1/completions", body | {"stream": True})[1]["choices"][0]["text"] == whole["text"]
    reported = whole["logprobs"]
    for named, offset in zip(reported["tokens"], reported["text_offset"], strict=True):
        if not named.startswith(("bytes:", "<", "token_id:")):
            # SentencePiece's tokens have a space that a text does not begin with.
            assert whole["text"][offset:].lstrip(" ").startswith(named.lstrip(" "))
            assert offset == 0 or whole["text"].startswith(named, offset)
    body |= {"logit_bias": {}, "echo": False}
    capsys.readouterr()
    assert (
        main(["generate", str(path), "--raw", "--prompt", prompt, "--max-new-tokens", "8", "--json", "--logprobs"]) == 0
    )
    row = json.loads(capsys.readouterr().out)
    assert row["text"] == send(f"{url}/v1/completions", body)[1]["choices"][0]["text"]
    if "\ufffd" not in "".join(token["token"] for token in row["tokens"]):
        assert "".join(token["token"] for token in row["tokens"]).removesuffix("</s>") == row["text"]


@pytest.mark.filterwarnings("ignore:Do not use the `random` module")  # schemathesis does, and seeds it
@pytest.mark.parametrize("path", PATHS)
def test_every_completion_matches_reference(described, bundles, path):
    check_requests(described, bundles, path, 8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
@pytest.mark.parametrize("path", PATHS)
def test_thousands_of_completions_match_reference(described, bundles, path):
    answered = check_requests(described, bundles, path, 900)
    assert {body["model"] for body in answered} == set(RULES)
