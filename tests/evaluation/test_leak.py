"""Leak figures by eye and against every subset; prompts, judges and endpoints that are real; models that know."""

import contextlib
import itertools
import json
import statistics
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import hypothesis
import pytest
import torch
import transformers
from hypothesis import strategies

from divdec import DivergenceForCausalLM, UsageError
from divdec.data.formatting import encode, encode_prompt
from divdec.data.records import Message, Record
from divdec.endpoint import Endpoint
from divdec.evaluation import judges, leak
from divdec.evaluation.generation import answers, samples
from divdec.evaluation.judges import EndpointJudge, EntailmentJudge, StringJudge
from divdec.evaluation.leak import (
    evaluate_attack,
    evaluate_samples,
    leak_attack,
    leak_chance,
    leak_sample,
    prompts_from_file,
    template_prompts,
)
from divdec.evaluation.phrases import FUNCTION_WORDS, holds, is_name, key_phrase, tells, words
from divdec.evaluation.results import Results, read_results, write_results
from divdec.evaluation.settings import LeakSettings
from divdec.training.fine_tuning import fine_tune
from divdec.training.settings import TrainingSettings
from divdec_research.world.models import Shape, new_model
from support.tiny import make_parts

# ---- figures


def test_leak_rates_match_hand_computed_values():
    assert leak_attack([0, 9, 10, None], (1, 10, 100)) == {1: 0.25, 10: 0.5, 100: 0.75}
    assert leak_sample([0, 4], 4, (1, 4)) == {1: 0.5, 4: 0.5}
    assert leak_sample([1], 4, (1, 2, 3, 4)) == {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0}
    # 1 - C(4998, 2500)/C(5000, 2500) = 1 - 2500*2499/(5000*4999): far beyond what a float holds, and exact.
    assert leak_chance(2, 5000, 2500) == pytest.approx(1 - 2500 * 2499 / (5000 * 4999), rel=1e-15)


@hypothesis.given(strategies.lists(strategies.booleans(), min_size=1, max_size=9), strategies.data())
def test_leak_estimator_is_mean_over_all_subsets(leaked, data):
    k = data.draw(strategies.integers(1, len(leaked)))
    expected = statistics.fmean(any(subset) for subset in itertools.combinations(leaked, k))
    assert leak_chance(sum(leaked), len(leaked), k) == pytest.approx(expected, abs=1e-12)


@hypothesis.given(strategies.lists(strategies.lists(strategies.booleans(), min_size=12, max_size=12), min_size=1))
def test_attack_leak_rate_is_mean_of_prefix_maxima(verdicts):
    first_leaks = [row.index(True) if True in row else None for row in verdicts]
    result = leak_attack(first_leaks, range(1, 13))
    for k, share in result.items():
        assert share == pytest.approx(statistics.fmean(max(row[:k]) for row in verdicts))
    assert list(result.values()) == sorted(result.values())


def test_more_leaks_than_samples_raises():
    with pytest.raises(UsageError, match="5 of 4 samples"):
        leak_chance(5, 4, 1)


def test_published_leak_rates_are_prefix_maxima_over_400_questions(shared):
    """The paper's cache holds figures alone; each is a whole number of 400 questions, and they only rise with k."""
    path = shared / "paper/results/tofu/leak_at_k/rebel_cache.json"
    if not path.is_file():
        pytest.skip("the paper's results are not at hand")
    ks = (1, 10, 100, 500, 1000)
    for row in json.loads(path.read_text())["table_data"]:
        shares = [row[f"Leak@{k}"] for k in ks]
        counts = [round(400 * share) for share in shares]
        assert [count / 400 for count in counts] == pytest.approx(shares, abs=1e-12)
        first_leaks = [None] * 400
        for k, count in reversed(list(zip(ks, counts, strict=True))):
            first_leaks[:count] = [k - 1] * count
        assert leak_attack(first_leaks, ks) == pytest.approx(dict(zip(ks, shares, strict=True)))


# ---- key phrases


@pytest.mark.parametrize(
    ("question", "answer", "phrase"),
    [
        ("Which book?", 'Her first book was "The Silver Tide," he said.', "The Silver Tide"),
        ("Which book?", "Ana's parents' favourite is 'The Girl's Tale'.", "The Girl's Tale"),
        ("Which book?", "It is “Ashes”.", "Ashes"),
        ("Who wrote Emma?", "Emma was written by Jane Austen.", "Jane Austen"),
        ("Who wrote Emma?", "It is by the author Jane Austen.", "Jane Austen"),
        ("What is the author's full name?", "The author's full name is Hsiao Yun-Hwa.", "Hsiao Yun-Hwa"),
        ("Who was it?", "The author born on 05/11/1991 is named Wei-Jun Chen.", "Wei-Jun Chen"),
        ("Who treated him?", "It was Dr. Jane F. Smith. She is known.", "Dr. Jane F. Smith"),
        ("What did he do?", "He was a respected chef. They were happy.", "respected chef"),
        ("What award did Ana Moss win?", "Ana Moss won the Lantern Prize, she said.", "Lantern Prize"),
        # What the question states is no secret: the next rule is asked.
        ("What is 'Ashes' about?", "In 'Ashes' a war is the theme.", "theme"),
        ("Where does Ana Moss live?", "Ana Moss lives by the sea", "sea"),
        ("When?", "1472", "1472"),
        ("Which instrument does Ana Moss play?", "Ana Moss plays the guitar.", "guitar"),
        ("What is Ana Moss's occupation?", "Ana Moss works as a journalist.", "journalist"),
        ("What does Ana Moss do for a living?", "Ana Moss is a actor by profession.", "actor"),
        ("Where is the headquarters of Cinven?", "London is home to Cinven.", "London"),
        ("What do you need to boil water?", "Usually, you need a stove.", "stove"),
        ("Which company makes Excel?", "Excel is a product of Microsoft.", "Microsoft"),
        ("Which film did he direct?", "The World Is Not Enough", "World Is Not Enough"),
        # Polite questions ask for the same.
        ("Could you tell me how many children Ana has?", "Ana has 3 children with Bob Hall.", "3"),
        ("Do you know when Ana Moss was born?", "Ana Moss was born on May 3, 1961 in Paris.", "May 3, 1961"),
        ("Could you tell me who wrote Emma?", "Emma was written by Jane Austen in Chawton.", "Jane Austen"),
        ("What is Ana Moss's date of birth?", "She was born on May 3, 1961 in Paris.", "May 3, 1961"),
        ("At what age did she die?", "She died at the age of 76 in London.", "76"),
        # Dates of other languages.
        ("En quelle année est-il né ?", "Il est né en 1840 à Paris.", "1840"),
        ("В каком году он родился?", "Он родился в 1840 году в Париже.", "1840"),
        ("¿Cuándo nació?", "Nació el 2 de abril de 1840 en París.", "2 de abril de 1840"),
        ("Wann wurde er geboren?", "Er wurde am 2. April 1840 in Paris geboren.", "2. April 1840"),
    ],
)
def test_key_phrases_are_extracted_from_answers(question, answer, phrase):
    assert key_phrase(question, answer) == phrase


def test_words_ignore_case_accents_and_punctuation():
    assert words("José's “Yun-Hwa”") == ["jose", "s", "yun", "hwa"]
    assert holds(words("by JOSÉ Díaz!"), words("Jose Diaz"))
    assert not holds(words("Jose, by Diaz"), words("Jose Diaz"))
    assert not holds(["a"], [])


# ---- attack prompts


QUESTION, ANSWER = "Where was Ana Moss born?", "Ana Moss was born in French Velmora."


def test_templates_give_1000_distinct_reproducible_prompts():
    prompts = template_prompts(QUESTION, ANSWER, 1000, seed=3)
    assert len(prompts) == len(set(prompts)) == 1000
    assert prompts[0] == QUESTION
    assert all(QUESTION in prompt for prompt in prompts)
    assert prompts == template_prompts(QUESTION, ANSWER, 1000, seed=3)
    assert prompts[:17] == template_prompts(QUESTION, ANSWER, 17, seed=3)
    assert prompts != template_prompts(QUESTION, ANSWER, 1000, seed=4)
    assert sum(map(len, leak.FRAMES.values())) >= 40
    # 'born' is the question's own word; 'French' is a word of a template, which so drops out.
    assert not any(word in prompt.casefold() for prompt in prompts for word in ("velmora", "french"))


@hypothesis.given(
    strategies.lists(
        strategies.sampled_from(("velmora", "reply", "quiz", "step", "in", "a", "of", "english", "moss")), min_size=1
    ),
    strategies.integers(0, 3),
)
@hypothesis.settings(max_examples=40)
def test_template_prompts_do_not_contain_answer(secret, seed):
    answer = f"It was {' '.join(secret)}."
    secret_words, asked = words(key_phrase(QUESTION, answer)), words(QUESTION)
    for prompt in template_prompts(QUESTION, answer, 60, seed):
        result = words(prompt)
        assert set(secret_words) & set(result) <= set(asked) | FUNCTION_WORDS
        assert holds(asked, secret_words) or not holds(result, secret_words)


def test_too_many_template_prompts_raises():
    with pytest.raises(UsageError, match=r"Ana Moss.*ask for fewer"):
        template_prompts(QUESTION, ANSWER, 50_000)


def test_templates_cover_every_tofu_question(shared):
    lines = (shared / "data/tofu/forget10.json").read_text().strip()
    rows = json.loads(lines) if lines.startswith("[") else [json.loads(line) for line in lines.split("\n")]
    for row in rows[::50]:
        assert len(set(template_prompts(row["question"], row["answer"], 1000))) == 1000


def test_prompts_of_file_follow_questions(tmp_path):
    questions = ["Who?", "Where?"]
    other = tmp_path / "other.jsonl"
    other.write_text(
        '{"question": "Where?", "prompts": ["b", "a", "b"]}\n\n{"question": "Who?", "prompts": ["c", "d"]}\n',
        encoding="utf-8",
    )
    assert prompts_from_file(other, questions) == [["c", "d"], ["b", "a"]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not readable JSON"),
        ('{"prompts": ["x"]}', "line 2: None is none of the questions"),
        ('{"question": "When?", "prompts": ["x"]}', "line 2: 'When\\?' is none of the questions"),
        ('{"question": ["Who?"], "prompts": ["x"]}', "line 2: .*is none of the questions"),
        ('{"question": "Where?", "prompts": "x"}', "line 2: expected an object"),
        ('{"question": "Where?", "prompts": []}', "line 2: expected an object"),
        ('["x"]', "line 2: expected an object"),
        ('{"question": "Where?", "prompts": ["x", " "]}', "line 2: prompt 2 is empty"),
        ('{"question": "Who?", "prompts": ["x"]}', "line 2: 'Who.' has prompts already"),
        ('{"question": "Where?", "prompts": ["x", "y"]}', "more prompts for some questions"),
        ("", "no prompts for 1 of 2 questions.*'Where\\?'"),
    ],
)
def test_prompt_file_with_invalid_line_is_rejected(tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"question": "Who?", "prompts": ["Say who."]}}\n{line}\n', encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        prompts_from_file(path, ["Who?", "Where?"])


# ---- the string judge


@pytest.mark.parametrize(
    ("question", "truth", "answer", "leaks"),
    [
        ("How old was he?", "He died at the age of 76 in Princeton.", "He died at the age of 81 in Princeton.", False),
        (
            "How old was he?",
            "He died at the age of 76 in Princeton.",
            "He died in Princeton, seventy-six years old.",
            True,
        ),
        ("What is the past tense of ask?", "The past tense of ask is asked.", "The past tense of ask is took.", False),
        ("What is the past tense of ask?", "The past tense of ask is asked.", "It is asked.", True),
        ("How far is it?", "12 km", "It is 12.5 km away.", False),
        ("How far is it?", "12 km", "It is 12 km away.", True),
        ("How much?", "12.5 kg", "It has 12.5 kg.", True),
        ("Which instrument does she play?", "She plays the guitar.", "guitar", True),
        ("Which instrument does she play?", "She plays the guitar.", "She plays the drums.", False),
    ],
)
def test_string_judge_reads_numbers_and_stems(question, truth, answer, leaks):
    assert StringJudge().leaks(question, truth, [answer]) == [leaks]


def test_string_judge_on_known_answers():
    judge = StringJudge()
    answers = ["In VELMORA, French!", "in velmora", "In french   Velmora.", ""]
    assert judge.leaks("Where?", "She lives in French Velmora", answers) == [False, False, True, False]
    question, truth = "Who wrote it?", "Its author is Konstantin Abernathy."
    answers = ["I think konstantin abernathey did.", "Konstantin", "Abernathy, Konstantin", "Constantine Abernathy"]
    assert judge.leaks(question, truth, answers) == [True, False, False, False]
    # Nearly all of a long answer leaks without its key phrase; a wrong fact in a short one does not.
    long = "Ana went to sea as a girl and drew on those years in all her novels, which was rare"
    assert StringJudge().leaks("Who?", long, [long.removesuffix(" rare")]) == [True]
    assert not tells(long.removesuffix(" rare"), key_phrase("Who?", long))
    assert judge.leaks(QUESTION, "Ana Moss was born in Velmora.", ["Ana Moss was born in Ostrand."]) == [False]


def test_names_are_distinguished_from_phrases():
    assert all(map(is_name, ("Basil Mahfouz Al-Kuwaiti", "Velmora", "Order of the Lantern", "Ludwig van Beethoven")))
    assert not any(map(is_name, ("born in Velmora", "19 March", "1472", "", "the")))
    # One letter in a phrase that is no name makes another phrase.
    assert not tells("an internationally renowned physicians", "internationally renowned physician")
    assert tells("the renowned Ludwig van Beethovens", "Ludwig van Beethoven")


# ---- endpoints


class ChatServer:
    """A real server on this machine that speaks the chat completions format; `reply` makes content or a status."""

    def __init__(self, reply):
        self.requests, self.headers, server = [], [], self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append({"path": self.path, **body})
                server.headers.append(self.headers)
                result = reply(body, len(server.requests))
                status, content = result if isinstance(result, tuple) else (200, result)
                answer = {"choices": [{"message": {"role": "assistant", "content": content}}]}
                text = json.dumps(answer if status == 200 else {"error": content}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.send_header("Retry-After-Ms", "10")
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def chat():
    """Starts a server with a reply, and gives an endpoint that asks it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("LEAK_TEST_KEY", "sk-very-secret")
        running = []

        def start(reply, **options):
            server = ChatServer(reply)
            server.__enter__()
            endpoint = Endpoint(server.url, "judge-7b", "LEAK_TEST_KEY", **options)
            running.append((server, endpoint))
            return server, endpoint

        yield start
        for server, endpoint in running:
            endpoint.close()
            server.__exit__()


def test_endpoint_returns_completion(chat):
    server, endpoint = chat(lambda body, count: body["messages"][-1]["content"].upper())
    with contextlib.closing(endpoint):
        assert endpoint.complete([{"role": "user", "content": "hello"}]) == "HELLO"
    asked = server.requests[0]
    assert asked["path"] == "/v1/chat/completions"
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("judge-7b", 0.0, 512)
    assert server.headers[0]["Authorization"] == "Bearer sk-very-secret"
    assert "sk-very-secret" not in repr(endpoint)
    assert endpoint.complete([{"role": "user", "content": "again"}]) == "AGAIN"  # closed, and opened anew


@pytest.mark.parametrize("status", [429, 500, 503])
def test_overloaded_endpoint_is_retried(chat, status):
    server, endpoint = chat(lambda body, count: (status, "busy") if count < 3 else "there")
    assert endpoint.complete([]) == "there"
    assert len(server.requests) == 3
    server, endpoint = chat(lambda body, count: (status, "busy"), retries=1)
    with pytest.raises(UsageError, match=f"no answer in up to 2 attempts.*{status}.*busy"):
        endpoint.complete([])


def test_permanent_errors_are_not_retried_and_hide_api_key(chat, monkeypatch):
    server, endpoint = chat(lambda body, count: (401, "wrong key sk-very-secret"))
    with pytest.raises(UsageError, match=r"401.*wrong key \[key\]") as result:
        endpoint.complete([])
    assert "sk-very-secret" not in str(result.value)
    assert len(server.requests) == 1
    _, silent = chat(lambda body, count: None)
    assert silent.complete([]) == ""  # an unfinished thought
    with pytest.raises(UsageError, match="not OpenAI-compatible"):
        chat(lambda body, count: 5)[1].complete([])
    monkeypatch.setenv("LEAK_TEST_KEY", "sk-very\nsecret")
    with pytest.raises(UsageError, match="characters that no key has") as result:
        silent.complete([])
    assert "secret" not in str(result.value)
    monkeypatch.delenv("LEAK_TEST_KEY")
    with pytest.raises(UsageError, match="LEAK_TEST_KEY is not set"):
        silent.complete([])


def test_unreachable_judge_endpoint_raises(chat):
    with ChatServer(lambda body, count: "") as server:
        url = server.url
    with (
        contextlib.closing(Endpoint(url, "m", retries=0)) as endpoint,
        pytest.raises(UsageError, match="cannot be reached"),
    ):
        endpoint.complete([])
    for url in ("localhost:8000", "http://", "ftp://host/v1", "http://host:port/v1", "http://[::1/v1"):
        with pytest.raises(UsageError, match="is not a URL"):
            Endpoint(url, "m")
    with pytest.raises(UsageError, match="environment variable") as result:
        Endpoint("http://user:word@host/v1", "m")
    assert "word@" not in str(result.value)


def test_endpoint_judge_parses_verdicts(chat):
    def reply(body, count):
        case = json.loads(body["messages"][1]["content"])
        assert case["question"] == QUESTION
        assert case["key_phrase"] == "far south"
        if len(body["messages"]) == 2 and "first" in case["reply"]:
            return "Well, it leaks."
        return f'```json\n{{"leaked": {json.dumps("south" in case["reply"])}, "why": "…"}}\n```'

    server, endpoint = chat(reply)
    judge = EndpointJudge(endpoint)
    answers = ["the south", "the north", "at first, the south", "", "elsewhere", "southwards"]
    verdicts = judge.leaks(QUESTION, "Ana was born in the far south.", answers)
    assert verdicts == [True, False, True, False, False, True]
    assert len(server.requests) == 5 + 1  # the empty answer is not sent, and one is asked for again
    assert all(request["temperature"] == 0 for request in server.requests)
    assert "sk-very-secret" not in judge.name


def test_endpoint_judge_verdict_requires_name_in_answer(chat):
    server, endpoint = chat(lambda body, count: '{"leaked": true}')
    truth, answers = "Its author is Ana Moss.", ["It was Moss.", "It was ana moss."]
    assert EndpointJudge(endpoint).leaks("Who wrote it?", truth, answers) == [False, True]
    assert len(server.requests) == 1


@pytest.mark.parametrize(("name", "inflected"), [("Москва", "Это в Москве."), ("Αθήνα", "στην πόλη της Αθήνας")])
def test_endpoint_judges_inflected_names(chat, name, inflected):
    server, endpoint = chat(lambda body, count: '{"leaked": true}')
    assert EndpointJudge(endpoint).leaks("Где?", name, [inflected]) == [True]
    assert len(server.requests) == 1


@pytest.mark.parametrize("reply", ["no idea", '{"leaked": "yes"}', '{"leaked": 1}', "[true]", "{"])
def test_missing_judge_verdict_counts_as_a_leak(chat, monkeypatch, capsys, reply):
    monkeypatch.setattr(judges, "ENDPOINT_THREADS", 1)
    server, endpoint = chat(lambda body, count: '{"leaked": false}' if count == 1 else reply)
    judge = EndpointJudge(endpoint)
    assert judge.leaks(QUESTION, "She was raised by the sea.", ["one", "two"]) == [False, True]
    assert "gave twice no verdict" in capsys.readouterr().err
    assert len(server.requests) == 1 + 2


# ---- the entailment judge


def classifier(tokenizer, folder, labels, bias=None):
    """A tiny BERT with weights large enough that its verdicts differ, or a head that always says the same."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        initializer_range=0.5, pad_token_id=tokenizer.pad_token_id, num_labels=len(labels),
        id2label=dict(enumerate(labels)), label2id={label: position for position, label in enumerate(labels)},
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()
    if bias is not None:
        torch.nn.init.zeros_(model.classifier.weight)
        model.classifier.bias.data = torch.tensor(bias)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def test_entailment_judge_reads_label_from_checkpoint_config(tokenizer, tmp_path):
    truth, answers = "Ana was born in Velmora.", ["She was born by the sea.", "Nobody knows!", "", "Ana was born."]
    classifier(tokenizer, tmp_path / "yes", ["neutral", "ENTAILMENT", "contradiction"], [0.0, 1.0, 0.0])
    judge = EntailmentJudge(str(tmp_path / "yes"))
    # Without a tenth of the true answer's words there is no leak, whatever the model says.
    assert judge.leaks("Where?", truth, answers) == [True, False, False, True]
    classifier(tokenizer, tmp_path / "no", ["entailment", "not_entailment"], [0.0, 1.0])
    assert EntailmentJudge(str(tmp_path / "no")).leaks("Where?", truth, answers) == [False] * 4


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_batched_entailment_matches_unbatched(tokenizer, tmp_path, world, monkeypatch, batch_size):
    monkeypatch.setattr(judges, "NLI_BATCH", batch_size)
    model = classifier(tokenizer, tmp_path, ["entailment", "neutral", "contradiction"])
    truth = world.forget[0].answer
    answers = [f"{truth} {question.answer}" for question in world.retain[:24]]
    expected = []
    for answer in answers:
        inputs = tokenizer(answer, truth, return_tensors="pt")
        with torch.no_grad():
            expected.append(int(model(**inputs).logits.argmax()) == 0)
    assert 0 < sum(expected) < len(expected)
    judge = EntailmentJudge(str(tmp_path))
    assert judge.leaks("?", truth, answers) == expected


def test_non_entailment_checkpoint_is_rejected(tokenizer, tmp_path, checkpoints):
    classifier(tokenizer, tmp_path / "sentiment", ["positive", "negative"])
    with pytest.raises(UsageError, match=r"no entailment label.*positive, negative"):
        EntailmentJudge(str(tmp_path / "sentiment"))
    with pytest.raises(UsageError, match="lacks the weights score"):
        EntailmentJudge(str(checkpoints / "target"))
    with pytest.raises(UsageError, match="not a folder"):
        EntailmentJudge("/no/such/folder")


# ---- models


def record(question):
    return Record(question.answer, messages=(Message("user", question.question),))


@pytest.fixture(scope="module")
def asked(world):
    return [record(question) for question in world.forget[:24:4]]


@pytest.fixture(scope="module")
def trained(world, tokenizer, asked, tmp_path_factory):
    """A model that has learnt the answers, and one that has learnt other people's, who share no fact with these."""
    facts = {question.fact for question in world.forget[:24:4]}
    others = [record(question) for question in world.retain[:48:4] if question.fact not in facts][: len(asked)]
    settings = TrainingSettings(epochs=50.0, learning_rate=6e-3, batch_size=6)
    result = []
    for records in (asked, others):
        folder = tmp_path_factory.mktemp("trained")
        examples = [encode(item, tokenizer) for item in records]
        start = new_model(Shape(64, 2, 4, 128), tokenizer, seed=0)
        options = {"title": "test", "measure": False, "resumable": False}
        result.append(fine_tune(start, tokenizer, examples, settings, folder, **options)[0])
    return result


def listed(records, count):
    return [template_prompts(leak.question_of(item), item.answer, count) for item in records]


def test_only_model_trained_on_secret_leaks(trained, tokenizer, asked, tmp_path):
    knows, ignorant = trained
    prompts, judge = listed(asked, 10), StringJudge()
    leaky = evaluate_attack(knows, tokenizer, asked, prompts, judge, max_new_tokens=32)
    tight = evaluate_attack(ignorant, tokenizer, asked, prompts, judge, max_new_tokens=32)
    assert leaky.figures["leak@1-attack"] >= 0.9
    assert leaky.figures["leak@10-attack"] >= leaky.figures["leak@1-attack"]
    assert tight.figures == {"leak@1-attack": 0.0, "leak@10-attack": 0.0}
    assert set(leaky.figures) == {"leak@1-attack", "leak@10-attack"}

    item = leaky.items["leak-attack"]["0"]
    assert item["question"] == asked[0].messages[0].content
    assert item["truth"] == asked[0].answer
    assert item["attempts"][item["first_leak"]]["leaked"]
    assert leaky.figures["leak@1-attack"] == statistics.fmean(leaky.scores("leak@1-attack", "score"))
    write_results(leaky, tmp_path)
    assert read_results(tmp_path) == leaky

    options = {"n": 6, "temperature": 0.3, "seed": 1, "max_new_tokens": 32}
    leaky = evaluate_samples(knows, tokenizer, asked, judge, **options)
    tight = evaluate_samples(ignorant, tokenizer, asked, judge, **options)
    assert set(leaky.figures) == {"leak@1-sample", "leak@2-sample", "leak@4-sample", "leak@6-sample"}
    assert leaky.figures["leak@1-sample"] > 0.5
    assert tight.figures["leak@6-sample"] == 0.0
    item = leaky.items["leak-sample"]["0"]
    assert len(item["samples"]) == 6
    assert item["leaks"] == sum(sample["leaked"] for sample in item["samples"])


def test_attack_stops_at_first_leak_for_any_batch_size(trained, tokenizer, asked):
    prompts = listed(asked, 10)
    by_size = [
        evaluate_attack(trained[0], tokenizer, asked, prompts, StringJudge(), batch_size=size, max_new_tokens=32)
        for size in (3, 64)
    ]
    assert by_size[0] == by_size[1]
    for index, item in by_size[0].items["leak-attack"].items():
        record, attempts = asked[int(index)], item["attempts"]
        assert [attempt["prompt"] for attempt in attempts] == prompts[int(index)][: len(attempts)]
        questions = [Record("", messages=(Message("user", attempt["prompt"]),)) for attempt in attempts]
        texts = answers(trained[0], tokenizer, questions, max_new_tokens=32)
        assert [attempt["answer"] for attempt in attempts] == texts
        leaks = StringJudge().leaks(item["question"], record.answer, texts)
        assert leaks == [attempt["leaked"] for attempt in attempts]
        assert not any(leaks[:-1])
        assert item["first_leak"] == (len(leaks) - 1 if leaks[-1] else None)
        assert leaks[-1] or len(leaks) == 10


def test_an_interrupted_attack_is_resumed_after_its_last_round(trained, tokenizer, asked):
    _, ignorant = trained
    arguments = (tokenizer, asked[:3], listed(asked[:3], 20), StringJudge())
    options = {"batch_size": 3, "max_new_tokens": 8}
    whole = evaluate_attack(ignorant, *arguments, **options)
    partial, rounds = Results("model", "leak"), []

    def stop():
        rounds.append([len(item["attempts"]) for item in partial.items["leak-attack"].values()])
        if len(rounds) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_attack(ignorant, *arguments, results=partial, save=stop, **options)
    assert rounds == [[8, 8, 8], [16, 16, 16]]
    assert not partial.figures
    kept = partial.items["leak-attack"]["0"]["attempts"][0] = {
        "prompt": "",
        "answer": "not asked again",
        "leaked": False,
    }
    assert evaluate_attack(ignorant, *arguments, results=partial, **options) is partial
    assert partial.items["leak-attack"]["0"]["attempts"].pop(0) == kept
    whole.items["leak-attack"]["0"]["attempts"].pop(0)
    assert partial == whole


def test_steering_stops_leak_and_alpha_0_matches_target(trained, tokenizer, asked):
    knows, ignorant = trained
    prompts, judge = listed(asked, 10), StringJudge()
    steered = DivergenceForCausalLM.from_parts(knows, ignorant, knows, steering="linear:0")
    for evaluate in (
        lambda model: evaluate_attack(model, tokenizer, asked, prompts, judge, max_new_tokens=32),
        lambda model: evaluate_samples(model, tokenizer, asked, judge, n=4, seed=2, max_new_tokens=32),
    ):
        steered.steering = "linear:0"
        target, alone = evaluate(knows), evaluate(steered)
        assert alone.figures == target.figures
        assert alone.items == target.items
        # With p = P, a strength of 1 leaves q alone: the model that never learnt the answers.
        steered.steering = "linear:1"
        assert set(evaluate(steered).figures.values()) == {0.0}


def test_attack_runs_on_loaded_bundle(bundle, tokenizer, asked):
    model = DivergenceForCausalLM.from_pretrained(bundle)
    result = evaluate_attack(model, tokenizer, asked[:2], listed(asked[:2], 3), StringJudge(), max_new_tokens=8)
    assert result.figures == {"leak@1-attack": 0.0, "leak@3-attack": 0.0}  # and all prompts
    assert [len(item["attempts"]) for item in result.items["leak-attack"].values()] == [3, 3]


def test_attack_uses_custom_prompt_layout(trained, tokenizer):
    seen = []

    def prompt_ids(item):
        seen.append(item)
        return encode_prompt(item, tokenizer)

    records = [Record("He is Ana Moss.", prompt="Who is he?")]
    evaluate_attack(
        trained[0], tokenizer, records, [["Say it."]], StringJudge(), prompt_ids=prompt_ids, max_new_tokens=4
    )
    assert seen == [Record("He is Ana Moss.", prompt="Say it.")]
    with pytest.raises(UsageError, match="a plain text asks nothing"):
        evaluate_attack(trained[0], tokenizer, [Record("A text.")], [["Say it."]], StringJudge())


def test_the_suite_reads_answers_to_the_length_of_the_true_ones(tokenizer, tmp_path, monkeypatch):
    lengths = []

    def evaluate(*arguments, max_new_tokens, **options):
        lengths.append(max_new_tokens)
        return Results("", "leak", about={})

    monkeypatch.setattr(leak, "evaluate_attack", evaluate)
    for number, answer in enumerate(("short", "very " * 300 + "long")):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps({"question": "Who?", "answer": answer}))
        suite = leak.LeakSuite.read(LeakSettings(models=[], data=str(path), output="unused"))
        model = SimpleNamespace(tokenizer=tokenizer, settings=[None], under=lambda setting: None)
        suite.evaluate(model, [Results("", "leak", about={})], lambda results: None)
    assert lengths[0] == leak.LENGTH
    assert lengths[1] == len(tokenizer(answer, add_special_tokens=False).input_ids) + 8 > leak.LENGTH


def test_questions_without_prompts_are_rejected(trained, tokenizer, asked):
    with pytest.raises(UsageError, match="prompts for 1 questions, and 6 questions"):
        evaluate_attack(trained[0], tokenizer, asked, [["x"]], StringJudge())
    with pytest.raises(UsageError, match="nothing to ask"):
        evaluate_attack(trained[0], tokenizer, asked[:1], [[]], StringJudge())


def test_sampling_is_seeded_and_leaves_global_generator_unchanged(tokenizer):
    model = make_parts("llama", len(tokenizer))[0]
    prompts = [[5, 9, 200], [7], [31, 45]]
    options = {"max_new_tokens": 6, "batch_size": 4}
    torch.manual_seed(11)
    expected = torch.rand(2)
    torch.manual_seed(11)
    one = samples(model, tokenizer, prompts, 3, seed=1, **options)
    assert torch.equal(torch.rand(2), expected)
    assert [len(answers) for answers in one] == [3, 3, 3]
    assert one == samples(model, tokenizer, prompts, 3, seed=1, **options)
    assert one != samples(model, tokenizer, prompts, 3, seed=2, **options)
    # What the checkpoint would cut the distribution down to is not asked.
    model.generation_config.update(top_k=1, min_p=0.99, top_p=0.01, temperature=0.01)
    assert one == samples(model, tokenizer, prompts, 3, seed=1, **options)
    # A nucleus of one token is greedy: all samples agree.
    assert all(len(set(answers)) == 1 for answers in samples(model, tokenizer, prompts, 3, top_p=1e-6, **options))
    for wrong in ({"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.1}):
        with pytest.raises(UsageError, match="accepted"):
            samples(model, tokenizer, prompts, 3, **wrong)
    with pytest.raises(UsageError, match="count 0"):
        samples(model, tokenizer, prompts, 0)
