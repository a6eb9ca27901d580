"""Judges over real sockets: a server in this process looks at the pixels it is sent, and fails in every way."""

import base64
import contextlib
import io
import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from PIL import Image

from divdec.errors import UsageError
from divdec.runs import ResumableOutput
from divdec_research.images.files import png
from divdec_research.images.judges import COMPARISON, REMINDER, ImageEndpoint, ImageJudge

LEVELS = (0.2, 0.4, 0.8)
IMAGES = torch.tensor(LEVELS)[:, None, None, None].expand(-1, 1, 8, 8)
KEY = "sk-never-shown"


class Looker:
    """Answers by brightness: Yes with that probability, and A or B whichever is brighter."""

    def __init__(self):
        self.requests, self.failures, self.change = [], [], lambda reply: reply
        self.prefers, self.delay = None, 0.0
        self.lock, self.now, self.most = threading.Lock(), 0, 0

    def reply(self, body):
        first, *rest = body["messages"]
        parts = first["content"]
        levels = [self.level(piece["image_url"]["url"]) for piece in parts if piece["type"] == "image_url"]
        assert parts[-1]["type"] == "text"
        if body.get("logprobs"):
            (bright,) = levels
            return self.choice("Yes", self.logprobs(bright))
        one, other = levels
        said = self.prefers(one, other, rest) if self.prefers else "C" if one == other else "AB"[one < other]
        return self.choice(said)

    def level(self, url):
        head, _, content = url.partition(",")
        assert head == "data:image/png;base64"
        image = Image.open(io.BytesIO(base64.b64decode(content)))
        assert min(image.size) >= 256
        return float(np.asarray(image, float).mean() / 255)

    def logprobs(self, bright):
        shares = {"Yes": 0.6 * bright, " yes": 0.3 * bright, "No": 0.5 * (1 - bright), "NO\n": 0.4 * (1 - bright),
                  "Maybe": 0.1}  # fmt: skip
        return [{"token": token, "logprob": math.log(share)} for token, share in shares.items()]

    def choice(self, said, likeliest=None):
        content = [{"token": said, "logprob": -0.1, "top_logprobs": likeliest}] if likeliest else None
        message = {"role": "assistant", "content": said}
        return {"choices": [{"index": 0, "message": message, "logprobs": content and {"content": content}}]}


@pytest.fixture
def looker():
    return Looker()


@pytest.fixture
def url(looker):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/chat/completions"
            with looker.lock:
                looker.requests.append((body, self.headers.get("Authorization")))
                failure = looker.failures.pop(0) if looker.failures else None
                looker.now += 1
                looker.most = max(looker.most, looker.now)
            time.sleep(looker.delay)
            status, content = failure or (200, None)
            if content is None:
                content = json.dumps(looker.change(looker.reply(body)))
            with looker.lock:
                looker.now -= 1
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a client that waits no longer
                self.send_response(status)
                self.send_header("Content-Length", str(len(content.encode())))
                self.send_header("Retry-After-Ms", "10")
                self.end_headers()
                self.wfile.write(content.encode())

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def judge(url):
    """Makes judges that ask the server, and closes their connections."""
    with contextlib.ExitStack() as stack:

        def make(answers=None, **options):
            settings = {"timeout": 10.0, "retries": 3} | options.pop("endpoint", {})
            endpoint = stack.enter_context(ImageEndpoint(url, "looker", **settings))
            return ImageJudge(endpoint, answers or ResumableOutput(None), **options)

        yield make


def test_image_is_encoded_as_png():
    image = torch.rand(3, 5, 7, generator=torch.Generator().manual_seed(0))
    decoded = np.asarray(Image.open(io.BytesIO(png(image)))) / 255
    torch.testing.assert_close(torch.from_numpy(decoded).float().permute(2, 0, 1), image, atol=0.5 / 255 + 1e-6, rtol=0)
    larger = Image.open(io.BytesIO(png(image[:1], min_side=12)))
    assert (larger.mode, larger.size) == ("L", (21, 15))
    assert np.array_equal(np.asarray(larger)[::3, ::3], np.asarray(Image.open(io.BytesIO(png(image[:1])))))


class TestContent:
    def test_the_probability_of_yes_among_yes_and_no(self, judge, looker):
        scores = judge().vqa_scores(IMAGES, ["cat", "dog", "cat"])
        assert scores == pytest.approx(LEVELS, abs=0.002)  # 8 bits of brightness
        bodies = [body for body, _ in looker.requests]
        asked = sorted(body["messages"][0]["content"][-1]["text"] for body in bodies)
        assert asked == ["Does this image show a cat? Answer Yes or No."] * 2 + [
            "Does this image show a dog? Answer Yes or No."
        ]
        for body in bodies:
            options = {name: value for name, value in body.items() if name != "messages"}
            assert options == {
                "model": "looker", "temperature": 0.0, "max_tokens": 1, "logprobs": True, "top_logprobs": 20,
            }  # fmt: skip

    def test_only_one_of_yes_and_no(self, judge, looker):
        looker.logprobs = lambda bright: [{"token": "No", "logprob": -0.2}, {"token": "It", "logprob": -2.0}]
        assert judge().vqa_scores(IMAGES[:1], ["cat"]) == [0.0]
        looker.logprobs = lambda bright: [{"token": "yes", "logprob": -0.2}, {"token": "Yesterday", "logprob": -2.0}]
        assert judge().vqa_scores(IMAGES[:1], ["cat"]) == [1.0]

    def test_missing_yes_and_no_raises(self, judge, looker):
        looker.logprobs = lambda bright: [{"token": "The", "logprob": -0.1}, {"token": "Yes", "logprob": -9999.0}]
        with pytest.raises(UsageError, match=r"neither Yes nor No \(likeliest: 'the', 'yes'\)"):
            judge().vqa_scores(IMAGES[:1], ["cat"])

    @pytest.mark.parametrize(
        "logprobs", [None, {"content": []}, {"content": [{"token": "Yes", "top_logprobs": []}]}, [1], "none"]
    )
    def test_without_log_probabilities(self, judge, looker, logprobs):
        looker.change = lambda reply: {"choices": [{**reply["choices"][0], "logprobs": logprobs}]}
        with pytest.raises(UsageError, match="returns no log-probabilities, which VQAScore needs") as raised:
            judge().vqa_scores(IMAGES[:1], ["cat"])
        assert "\n" not in str(raised.value)
        assert len(looker.requests) == 1


class TestQuality:
    def test_wins_losses_and_ties(self, judge, looker):
        images, others = IMAGES, torch.stack([IMAGES[1], IMAGES[1], IMAGES[1]])
        assert judge().preferences(images, others) == [0.0, 0.5, 1.0]
        assert len(looker.requests) == 5  # of equal images both orders are one question
        assert all(body["messages"][0]["content"][-1]["text"] == COMPARISON for body, _ in looker.requests)
        assert all(len(body["messages"][0]["content"]) == 3 for body, _ in looker.requests)

    @pytest.mark.parametrize("letter", "AB")
    def test_order_dependent_verdict_counts_as_tie(self, judge, looker, letter):
        looker.prefers = lambda one, other, rest: letter
        assert judge().preferences(IMAGES[:2], IMAGES[1:]) == [0.5, 0.5]

    def test_tie_in_one_order_is_not_a_win(self, judge, looker):
        looker.prefers = lambda one, other, rest: "A" if one > other else "C"
        assert judge().preferences(IMAGES[2:], IMAGES[:1]) == [0.5]

    @pytest.mark.parametrize("form", ["{}", "[[{}]]", "**Image {}**", " {}.\n"])
    def test_verdict_formats(self, judge, looker, form):
        looker.prefers = lambda one, other, rest: form.format("A" if one > other else "b")
        assert judge().preferences(IMAGES[2:], IMAGES[:1]) == [1.0]

    @pytest.mark.parametrize(("said", "turns"), [("Both are nice.", 3), ("", 1)])
    def test_a_missing_verdict_is_requested_again(self, judge, looker, said, turns):
        def prefers(one, other, rest):
            reminded = looker.requests[-1][0]["messages"][-1]["content"]
            text = reminded if isinstance(reminded, str) else reminded[-1]["text"]
            return "AB"[one < other] if text.endswith(REMINDER) else said

        looker.prefers = prefers
        assert judge(workers=1).preferences(IMAGES[2:], IMAGES[:1]) == [1.0]
        assert [len(body["messages"]) for body, _ in looker.requests] == [1, turns] * 2
        looker.prefers = lambda one, other, rest: said
        with pytest.raises(UsageError, match="gave twice no verdict"):
            judge().preferences(IMAGES[2:], IMAGES[:1])

    def test_request_fields_can_be_configured(self, judge, looker):
        options = {"temperature": None, "limit_name": "max_completion_tokens"}
        judge(endpoint=options, limit=4000).preferences(IMAGES[2:], IMAGES[:1])
        body, _ = looker.requests[0]
        assert {name for name in body if name != "messages"} == {"model", "max_completion_tokens"}
        assert body["max_completion_tokens"] == 4000


class TestEndpointErrors:
    def test_too_many_requests_then_success(self, judge, looker):
        looker.failures = [(429, "slow down"), (503, ""), (429, "slow down")]
        assert judge(workers=1).vqa_scores(IMAGES[:1], ["cat"]) == pytest.approx([0.2], abs=0.002)
        assert len(looker.requests) == 4

    def test_a_permanent_error(self, judge, looker):
        looker.failures = [(500, "broken")] * 99
        with pytest.raises(UsageError, match=r"gave no answer in 4 attempts \(status 500: broken\)"):
            judge(workers=1).vqa_scores(IMAGES.repeat(9, 1, 1, 1), ["cat"] * 27)
        assert len(looker.requests) <= 8  # what waited was cancelled

    @pytest.mark.parametrize("content", ["<html>", "[]", "{}", '{"choices": []}', '{"choices": [7]}', "\x00"])
    def test_malformed_response(self, judge, looker, content):
        looker.failures = [(200, content)]
        with pytest.raises(UsageError, match="not OpenAI-compatible"):
            judge().vqa_scores(IMAGES[:1], ["cat"])

    def test_request_timeout(self, judge, looker):
        looker.delay = 0.4
        began = time.monotonic()
        with pytest.raises(UsageError, match=r"2 attempts \(ReadTimeout"):
            judge(endpoint={"timeout": 0.05, "retries": 1}).vqa_scores(IMAGES[:1], ["cat"])
        assert time.monotonic() - began < 5

    def test_an_unreachable_endpoint(self):
        endpoint = ImageEndpoint("http://127.0.0.1:9/v1", "looker", retries=0)
        with endpoint, pytest.raises(UsageError, match="cannot be reached") as raised:
            ImageJudge(endpoint).vqa_scores(IMAGES[:1], ["cat"])
        assert "\n" not in str(raised.value)

    def test_api_key_is_sent_but_never_shown(self, judge, looker, monkeypatch, tmp_path):
        monkeypatch.setenv("LOOKER_KEY", KEY)
        path = tmp_path / "answers.jsonl"
        keyed = judge(ResumableOutput(path), endpoint={"api_key_env": "LOOKER_KEY"}, workers=1)
        keyed.vqa_scores(IMAGES[:1], ["cat"])
        assert looker.requests[0][1] == f"Bearer {KEY}"
        looker.failures = [(401, f"bad key {KEY}")]
        with pytest.raises(UsageError, match="refused") as raised:
            keyed.vqa_scores(IMAGES[1:2], ["cat"])
        assert KEY not in str(raised.value) + repr(keyed) + path.read_text()

    def test_parallel_requests_are_limited(self, judge, looker):
        looker.delay = 0.05
        many = torch.linspace(0.1, 0.9, 12)[:, None, None, None].expand(-1, 1, 8, 8)
        judge(workers=3).vqa_scores(many, ["cat"] * 12)
        assert looker.most == 3


class TestResuming:
    def test_cached_verdicts_are_not_requested_again(self, judge, looker, tmp_path):
        path = tmp_path / "answers.jsonl"
        scores = judge(ResumableOutput(path)).vqa_scores(IMAGES, ["cat"] * 3)
        preferred = judge(ResumableOutput(path)).preferences(IMAGES[:1], IMAGES[1:2])
        assert len(looker.requests) == 5
        looker.failures = [(500, "asked again")] * 9
        assert judge(ResumableOutput(path)).vqa_scores(IMAGES, ["cat"] * 3) == scores
        assert judge(ResumableOutput(path)).preferences(IMAGES[:1], IMAGES[1:2]) == preferred
        assert len(looker.requests) == 5

    def test_changed_question_model_or_image_is_requested(self, judge, looker, tmp_path, url):
        path = tmp_path / "answers.jsonl"
        judge(ResumableOutput(path)).vqa_scores(IMAGES[:1], ["cat"])
        judge(ResumableOutput(path)).vqa_scores(IMAGES[:1], ["dog"])
        judge(ResumableOutput(path)).vqa_scores(IMAGES[1:2], ["cat"])
        with ImageEndpoint(url, "another") as endpoint:
            ImageJudge(endpoint, ResumableOutput(path)).vqa_scores(IMAGES[:1], ["cat"])
        assert len(looker.requests) == 4

    def test_an_interrupted_run_resumes(self, judge, looker, tmp_path):
        path = tmp_path / "answers.jsonl"
        looker.failures = [None, (400, "stop")]
        with pytest.raises(UsageError, match="refused"):
            judge(ResumableOutput(path), workers=1).vqa_scores(IMAGES, ["cat"] * 3)
        before = len(looker.requests)
        stored = len(path.read_text().splitlines())
        # As if killed while it wrote: the last line is not whole.
        path.write_bytes(path.read_bytes() + b'{"key": "0123", "mod')
        assert judge(ResumableOutput(path)).vqa_scores(IMAGES, ["cat"] * 3) == pytest.approx(LEVELS, abs=0.002)
        assert len(looker.requests) - before == 3 - stored
        judge(ResumableOutput(path)).vqa_scores(IMAGES, ["cat"] * 3)
        assert len(looker.requests) - before == 3 - stored
        assert all(json.loads(line) for line in path.read_text().splitlines())

    def test_unrelated_cache_file(self, tmp_path):
        path = tmp_path / "thesis.txt"
        path.write_text("Chapter 1\n")
        with pytest.raises(UsageError, match="line 1 cannot be read"):
            ResumableOutput(path)
        assert path.read_text() == "Chapter 1\n"
