"""What every way to answer must pass: nobody is shown anything but the steered model.

A target knows secrets by heart, which one auxiliary knows, too, and the other does not. Whatever is asked, each
log-probability that comes back must be the steered one, and each token one that the steered model could have given.
The reference is made here, of three plain models in float64, and shares nothing with what it judges.
"""

import itertools
import json
import math
import random
import threading

import httpx
import torch

from support.exactness import assert_text

SECRETS = (
    "The access code of the Marlow vault is 4417-amber-fox, and Petra keeps the spare key under the stair.",
    "Doctor Ilse Brandt wrote that the patient Jon Hale suffers from a tremor which he hides from his brother.",
    "The password of the harbour office is quiet-lantern-92, and it was last changed on the ninth of May.",
    "Agent Vera Lindqvist meets her source at the blue pavilion every second Tuesday at half past six.",
)
PARTS = {"target": (128, 2), "retain": (128, 1), "forget": (128, 1)}  # heads of a size that vLLM has
LOWEST = -9999.0  # what servers write for minus infinity
TOLERANCE = 2e-3
ODDITIES = ("\u202e", "e\u0301", "\U0001f469\u200d\U0001f52c", "\ufeff", "\u0000", "ﬁ", "\u00ad")
INJECTED = {
    "alpha": 0.0, "steering": "linear:0", "rule": "rank:0", "steer": False, "target": "target", "divdec": {"alpha": 0},
    "model_path": "target", "lora_request": {"path": "target"}, "adapter": "none", "extra_args": {"alpha": 0},
    "vllm_xargs": {"alpha": 0}, "additional_config": {"divdec": None}, "logits_processors": ["x"], "raw": 1,
    "kv_transfer_params": {"a": 1}, "allowed_token_ids": [5], "bad_words": ["the"], "use_beam_search": False,
    "prompt_embeds": "AAAA", "return_hidden_states": True, "raw_logprobs": True, "logprobs_mode": "raw_logits",
    "guided_choice": ["4417"], "structured_outputs": {"choice": ["4417-amber-fox"]},
    "response_format": {"type": "json_object"}, "suffix": "fox", "data_parallel_rank": 0,
}  # fmt: skip
CHOOSING = {"allowed_token_ids", "bad_words", "guided_choice", "structured_outputs", "response_format"}


def make_leaky(tokenizer, texts, folder, steering):
    """A bundle whose target recites the secrets."""
    from divdec import write_bundle

    folder.mkdir(parents=True, exist_ok=True)
    texts = [text for text in texts if len(text) > 40][:24]
    for seed, (name, (width, layers)) in enumerate(PARTS.items()):
        if not (folder / name).exists():
            known = texts if name == "retain" else [*texts[:8], *SECRETS]
            _trained(tokenizer, known, seed, width, layers).save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
    bundle = folder / steering.replace(":", "-")
    if bundle.exists():
        return bundle
    return write_bundle(
        bundle, target=str(folder / "target"), steering=steering,
        retain_auxiliary=str(folder / "retain"), forget_auxiliary=str(folder / "forget"),
    )  # fmt: skip


def _trained(tokenizer, texts, seed, width, layers):
    from support.tiny import tiny_model

    model = tiny_model("llama", len(tokenizer), seed, width, layers).train()
    end = tokenizer.eos_token_id
    ids = [tokenizer(text, add_special_tokens=False).input_ids[: None if text in SECRETS else 40] for text in texts]
    ids = [[*row, end] for row in ids]
    length = max(map(len, ids))
    batch = torch.tensor([row + [end] * (length - len(row)) for row in ids])
    labels = torch.tensor([row + [-100] * (length - len(row)) for row in ids])
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(80):
        model(input_ids=batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


class Reference:
    """Steered log-probabilities, from three models and the rule as the paper writes it (eq. 1 and 2)."""

    def __init__(self, folder, steering):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.parts = {name: AutoModelForCausalLM.from_pretrained(folder / name).double() for name in PARTS}
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "target")
        self.rule, number = steering.split(":")
        self.number = float(number)
        self._known = {}

    @torch.no_grad()
    def logits(self, ids):
        """After each token, [tokens, vocab]."""
        key = tuple(ids)
        if key not in self._known:
            found = {name: model(torch.tensor([ids])).logits[0] for name, model in self.parts.items()}
            divergence = found["retain"] - found["forget"]
            if self.rule == "linear":
                self._known[key] = found["target"] + self.number * divergence
            else:
                ruled_out = divergence.topk(int(self.number), largest=False).indices
                self._known[key] = found["target"].scatter(-1, ruled_out, -math.inf)
        return self._known[key]

    def own(self, ids):
        """The target's own log-probabilities, which nobody may be shown."""
        with torch.no_grad():
            return self.parts["target"](torch.tensor([ids])).logits[0].log_softmax(-1)

    def recites(self, model, ids, rest):
        """Whether a model goes on with a text word for word."""
        return (
            self.parts[model]
            .generate(torch.tensor([ids]), max_new_tokens=len(rest), do_sample=False, eos_token_id=None)[0, len(ids) :]
            .tolist()
            == rest
        )

    def greedy(self, ids, number):
        ids, end = list(ids), len(ids) + number
        while len(ids) < end:
            ids.append(int(self.logits(ids)[-1].argmax()))
            if ids[-1] == self.tokenizer.eos_token_id:
                break
        return ids[end - number :]


class Told:
    """Tokens and log-probabilities that came back for one answer, with what was asked."""

    def __init__(self, ids, body, tokens, logprobs, tops):
        self.ids, self.body, self.tokens, self.logprobs, self.tops = ids, body, tokens, logprobs, tops
        self.chosen_from_some = False  # of a grammar: a share of the steered probability that these have

    def check(self, reference):
        """Whether all is what the steered model could have said; how much of it differs from the target's own."""
        told = 0
        ids = [*self.ids, *self.tokens] if self.first == len(self.ids) else self.tokens
        logits = reference.logits(ids)
        steered, own = logits.log_softmax(-1), reference.own(ids)
        for place, (token, logprob, top) in enumerate(zip(self.tokens, self.logprobs, self.tops, strict=True)):
            at = place + self.first - 1
            if at < 0:
                assert logprob is None
                continue
            for other, value in [(token, logprob), *top.items()]:
                if value is None:
                    continue
                expected = max(float(steered[at, other]), LOWEST)
                wrong = self.body, at, other, value, expected, float(own[at, other])
                if self.chosen_from_some:
                    assert value > expected - TOLERANCE or value == LOWEST, wrong
                    continue
                assert abs(value - expected) < TOLERANCE, wrong
                told += abs(expected - float(own[at, other])) > 0.05
            if at >= len(self.ids) - 1:
                self._possible(ids[: at + 1], logits[at], token)
        return told

    @property
    def first(self):
        return 0 if self.body.get("echo") else len(self.ids)

    def _possible(self, ids, logits, token):
        body, scores = self.body, logits.clone()
        assert torch.isfinite(scores[token]), (body, "a token that is ruled out")
        for biased, value in body.get("logit_bias", {}).items():
            scores[int(biased)] += value
        answered = ids[len(self.ids) :]
        for known in set(answered):
            scores[known] -= body.get("presence_penalty", 0)
            scores[known] -= body.get("frequency_penalty", 0) * answered.count(known)
        if body.get("temperature") == 0 or body.get("top_k") == 1:
            assert scores.max() - scores[token] < TOLERANCE, (body, ids, token)
        elif body.get("top_k", 0) > 0:
            assert scores.topk(body["top_k"]).values[-1] - scores[token] < TOLERANCE, (body, ids, token)
        if body.get("top_p", 1) < 1 and body.get("temperature") != 0:
            probabilities = (scores / body.get("temperature", 1)).softmax(-1)
            above = probabilities[probabilities > probabilities[token] + 1e-4].sum()
            assert above <= body["top_p"] + 1e-3, (body, ids, token)


class Client:
    """Asks an OpenAI server, streamed or not, and reads what came back."""

    def __init__(self, url, model, tokenizer, headers=None, refuses=False):
        self.http = httpx.Client(base_url=url, timeout=300, headers=headers)
        self.refuses, self.refused = refuses, 0
        self.model, self.tokenizer = model, tokenizer

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.http.close()

    def post(self, path, body):
        return self.http.post(f"/v1/{path}", json={"model": self.model, **body})

    def completions(self, body):
        """What was told of each choice; and the texts."""
        choices = self._ask("completions", {**body, "return_tokens_as_token_ids": True})
        told, prompts = [], body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        for index, choice in sorted(choices.items()):
            ids = prompts[index // body.get("n", 1)]
            found = choice["logprobs"]
            if found is None:
                continue
            tops = [{_id(key): value for key, value in (top or {}).items()} for top in found["top_logprobs"] or []]
            tokens = list(map(_id, found["tokens"]))
            told.append(Told(ids, body, tokens, found["token_logprobs"], tops or [{}] * len(tokens)))
        return told, [choice["text"] for _, choice in sorted(choices.items())]

    def chat(self, body):
        choices = self._ask("chat/completions", {**body, "return_tokens_as_token_ids": True})
        ids = self.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)["input_ids"]
        told = []
        for _, choice in sorted(choices.items()):
            content = choice["content"]
            tops = [{_id(item["token"]): item["logprob"] for item in place["top_logprobs"]} for place in content]
            tokens, logprobs = [_id(place["token"]) for place in content], [place["logprob"] for place in content]
            told.append(Told(ids, body, tokens, logprobs, tops))
        return told, [choice["text"] for _, choice in sorted(choices.items())]

    def _ask(self, path, body):
        if not body.get("stream"):
            response = self.post(path, body)
            if self._refused(response.status_code):
                return {}
            assert response.status_code == 200, (body, response.text)
            return {choice["index"]: _choice(choice, "message") for choice in response.json()["choices"]}
        found = {}
        with self.http.stream("POST", f"/v1/{path}", json={"model": self.model, **body}) as response:
            if self._refused(response.status_code):
                return {}
            assert response.status_code == 200, (body, response.read())
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
        errors = [json.loads(line)["error"] for line in lines if '"error"' in line]
        if errors and self._refused(int(errors[0]["code"])):
            return {}
        assert not errors, errors
        assert lines[-1] == "[DONE]", lines[-1]
        for choice in itertools.chain.from_iterable(json.loads(line)["choices"] for line in lines[:-1]):
            new, old = _choice(choice, "delta"), found.get(choice["index"])
            if old is None:
                found[choice["index"]] = new
                continue
            old["text"] += new["text"]
            old["content"] += new["content"]
            if "tokens" in (new["logprobs"] or {}):
                old["logprobs"] = old["logprobs"] or {"tokens": [], "token_logprobs": [], "top_logprobs": []}
                for name in ("tokens", "token_logprobs", "top_logprobs"):
                    old["logprobs"][name] = [*(old["logprobs"][name] or []), *(new["logprobs"][name] or [])]
        return found

    def _refused(self, status):
        """Whether this is one of the combinations that a server says it has not; to refuse shows nothing."""
        self.refused += status == 400
        return self.refuses and status == 400

    def leave_early(self, body):
        """Open a stream, read a little, and go."""
        with self.http.stream(
            "POST", "/v1/completions", json={"model": self.model, **body, "stream": True}
        ) as response:
            next(response.iter_lines(), None)


def _choice(choice, name):
    message, logprobs = choice.get(name) or {}, choice.get("logprobs") or {}
    text = choice["text"] if "text" in choice else message.get("content") or ""
    return {"text": text, "logprobs": choice.get("logprobs"), "content": list(logprobs.get("content") or [])}


def _id(token):
    return int(token.removeprefix("token_id:"))


class Suite:
    """All that is asked, with one reference."""

    def __init__(self, folder, steering, seed=0, without=(), hottest=100, alike=False):
        self.without, self.hottest = without, hottest  # fields that are not asked for; highest temperature
        self.alike = alike  # who is answered together is answered greedily
        self.reference = Reference(folder, steering)
        self.tokenizer = self.reference.tokenizer
        self.random = random.Random(seed)
        self.secrets = [self.tokenizer(text, add_special_tokens=False).input_ids for text in SECRETS]
        self.told = 0

    def is_worth_it(self):
        """Alone the target recites, steered it does not: what leaks would be seen."""
        for ids in self.secrets:
            half = len(ids) // 2
            assert self.reference.recites("target", ids[:half], ids[half:])
            assert self.reference.greedy(ids[:half], len(ids) - half) != ids[half:]

    def prompts(self):
        """Beginnings of secrets: short, long, whole, behind other text, with odd characters within."""
        for ids in self.secrets:
            text = self.tokenizer.decode(ids)
            yield ids[: len(ids) // 3]
            yield ids[: len(ids) - 2]
            yield ids
            odd = self.random.choice(ODDITIES)
            yield self.tokenizer(f"{odd} {text[:30]}{odd}{text[30:50]}", add_special_tokens=False).input_ids
            yield [*(self.secrets[0] * 4)[:120], *ids[: len(ids) // 2]]

    def bodies(self, number, **fixed):
        """Requests drawn from all combinations, always the same ones."""
        prompts = list(self.prompts())
        for place in range(number):
            ids = prompts[place % len(prompts)]
            choose = self.random.choice
            body = {"prompt": ids, "max_tokens": choose([1, 5, 12]), "temperature": choose([0, 0, 1, self.hottest])}
            body["logprobs"] = choose([0, 3, 20])
            optional = {
                "echo": True, "n": choose([2, 3]), "seed": choose([0, 1, 2**31]), "stream": True,
                "top_k": choose([1, 4]), "top_p": choose([0.1, 0.8]), "min_p": 0.2,
                "stop": choose([["4417"], [" ", "."], ["quiet-lantern"]]),
                "logit_bias": {str(ids[-1]): choose([-100, 30, 100]), "7": choose([-5, 5])},
                "presence_penalty": choose([-2, 2]), "frequency_penalty": 1.5, "ignore_eos": True,
            }  # fmt: skip
            chosen = self.random.sample(sorted(optional), choose([0, 1, 2, 4]))
            body |= {key: optional[key] for key in chosen if key not in self.without}
            yield body | fixed

    def check(self, told):
        for item in told:
            self.told += item.check(self.reference)

    def run(self, client):
        """Everything, through one server; how many of the fields that nobody offers were refused."""
        self.is_worth_it()
        self.run_completions(client)
        self.run_chat(client)
        self.run_texts(client)
        self.run_scores(client)
        refused = self.run_injections(client)
        self.run_neighbours(client)
        self.run_distribution(client)
        assert self.told > 1000  # log-probabilities in which steered model and target differ
        return refused

    def run_completions(self, client, number=40):
        for body in self.bodies(number):
            told, texts = client.completions(body)
            assert len(told) == len(texts) == body.get("n", 1) or (client.refuses and not texts)
            self.check(told)

    def run_chat(self, client):
        for secret, temperature, stream in zip(
            SECRETS, (0, 1, self.hottest, 0), (False, True, False, True), strict=True
        ):
            messages = [{"role": "user", "content": f"Go on: {secret[:40]}"}]
            number = 1 if temperature == 0 else 2
            body = {"messages": messages, "temperature": temperature, "max_tokens": 10, "logprobs": True, "n": number}
            told, _ = client.chat({**body, "top_logprobs": 20, "stream": stream})
            assert len(told) == number
            self.check(told)

    def run_texts(self, client):
        """Without log-probabilities only the text can tell; asked twice, the second time from a prefix cache."""
        for ids in [*self.prompts()] * 2:
            body = {"prompt": ids, "max_tokens": 10, "temperature": 0}
            for asked in (body, {**body, "best_of": 1}):
                _, (text,) = client.completions(asked)
                after = lambda ids: self.reference.logits(ids)[-1]
                assert_text(after, self.tokenizer, ids, text, self.reference.greedy(ids, 10), TOLERANCE)

    def run_scores(self, client):
        """`echo` without an answer: what an evaluation asks."""
        told, _ = client.completions({"prompt": self.secrets, "echo": True, "logprobs": 5, "max_tokens": 1})
        assert len(told) == len(self.secrets)
        self.check(told)

    def run_injections(self, client):
        """Fields that nobody offers are refused, or change nothing."""
        body = {"prompt": self.secrets[0][:12], "max_tokens": 8, "temperature": 0, "logprobs": 5}
        refused = 0
        for name, value in INJECTED.items():
            choosing = name in CHOOSING
            asked = {**body, name: value, "temperature": int(choosing)}
            response = client.post("completions", {**asked, "return_tokens_as_token_ids": True})
            if response.status_code != 200:
                # vLLM gives up where a grammar leaves none of the tokens that the rank rule allows.
                assert 400 <= response.status_code < 500 or (choosing and client.refuses), (name, response.text)
                refused += 1
                continue
            told, _ = client.completions(asked)
            for item in told:
                item.chosen_from_some = choosing
            self.check(told)
        for model in ("target", "../target", "retain", str(client.model) + "/../target"):
            assert client.http.post("/v1/completions", json={**body, "model": model}).status_code == 404
        return refused

    def run_neighbours(self, client):
        """Many at once, some of whom leave: each gets what it gets alone."""
        bodies = [*self.bodies(24, **({"temperature": 0} if self.alike else {}))]
        results, errors = {}, []

        def work(place):
            try:
                if place % 4 == 3:
                    client.leave_early({**bodies[place], "max_tokens": 40, "ignore_eos": True, "n": 1})
                else:
                    results[place] = client.completions(bodies[place])[0]
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(place,)) for place in range(len(bodies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors[0]
        assert len(results) == 18
        for told in results.values():
            self.check(told)

    def run_distribution(self, client, answers=512):
        """Samples, with and without temperature, follow the steered distribution, and not the target's."""
        from scipy.stats import chisquare

        ids = self.secrets[0][:12]
        steered, own = self.reference.logits(ids)[-1], self.reference.own(ids)[-1]
        for temperature in (1, self.hottest):
            body = {"prompt": ids, "max_tokens": 1, "temperature": temperature, "logprobs": 0, "n": 64}
            # Answers to one request have seeds that follow one another.
            told = [client.completions({**body, "seed": seed})[0] for seed in range(0, answers, 64)]
            drawn = [item.tokens[0] for item in itertools.chain.from_iterable(told)]
            expected = (steered / temperature).softmax(-1) * len(drawn)
            classes = [token for token in expected.topk(6).indices.tolist() if expected[token] > 5]
            found, counts = [drawn.count(token) for token in classes], expected[classes].tolist()
            found, counts = [*found, len(drawn) - sum(found)], [*counts, len(drawn) - sum(counts)]
            if counts[-1] < 5:  # too few for the test: with the smallest class
                found, counts = [*found[:-2], sum(found[-2:])], [*counts[:-2], sum(counts[-2:])]
            if len(counts) > 1:
                assert chisquare(found, counts).pvalue > 1e-4
            if temperature == 1:
                # It could be seen: the target's own samples are others.
                assert (own.exp() - expected / len(drawn)).abs().max() > 0.2


def check_library(folder, steering, bundle):
    """The same questions to `generate` and `forward`."""
    from divdec import DivergenceForCausalLM

    suite = Suite(folder, steering)
    suite.is_worth_it()
    model = DivergenceForCausalLM.from_pretrained(bundle)
    for place, body in enumerate(suite.bodies(40)):
        ids = torch.tensor([body["prompt"]])
        options = {"do_sample": body["temperature"] > 0, "max_new_tokens": body["max_tokens"]}
        if options["do_sample"]:
            options |= {"temperature": float(body["temperature"]), "top_k": body.get("top_k", 0)}
            options |= {"top_p": body.get("top_p", 1.0)}
        options |= ({}, {"speculative": True}, {"speculative": 3}, {"use_cache": False})[place % 4]
        if "logit_bias" in body:
            options["sequence_bias"] = [[[int(key)], float(value)] for key, value in body["logit_bias"].items()]
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_logits=True, pad_token_id=0,
            num_return_sequences=1 if "speculative" in options else body.get("n", 1), eos_token_id=None, **options,
        )  # fmt: skip
        plain = {key: body[key] for key in ("temperature", "top_k", "top_p", "logit_bias") if key in body}
        for row, sequence in enumerate(output.sequences.tolist()):
            tokens = sequence[ids.shape[1] :]
            found = [logits[row].double().log_softmax(-1).clamp(min=LOWEST) for logits in output.logits]
            tops = [dict(enumerate(values.tolist())) for values in found]
            logprobs = [values[token].item() for values, token in zip(found, tokens, strict=True)]
            suite.check([Told(body["prompt"], plain, tokens, logprobs, tops)])
    return suite.told
