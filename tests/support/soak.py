"""Clients of mixed behaviour, and what each must get back; for benchmarks/serving/soak.py and test_soak.py."""

import asyncio
import collections
import contextlib
import json
import math
import random
import socket
import time

import httpx
import openai

from support.soak_answers import LONGEST, TOLERANCE, Choice, Ended, Full, GaveUp, Lost, Wrong, must_be_clean

PATIENCE = 120.0  # seconds after which an answer counts as lost
ROWS, QUEUE, MAX_BYTES = 32, 64, 1 << 16
SERVER = ("--max-num-seqs", ROWS, "--max-queue", QUEUE, "--max-body-bytes", MAX_BYTES, "--name", "tiny")
KEPT = 100  # sampled answers whose log-probabilities are looked at in the end
JSON = {"Content-Type": "application/json"}


class Tally:
    """What happened."""

    def __init__(self):
        self.kinds, self.statuses, self.ended = (collections.Counter() for _ in range(3))
        self.refused = self.tokens = self.compared = 0
        self.seconds, self.first, self.problems, self.sampled = [], [], [], []

    def problem(self, text):
        self.problems.append(text[:500])


class Load:
    """Clients against one server.

    Attributes:
        stopping: since when the server may refuse, because it was told to stop or was killed.
        killed: whether it may also break off what it has begun.
    """

    def __init__(self, url, references, tally, seed=0):
        self.url, self.references, self.tally = url, references, tally
        self.plain = [made for made in references if made.messages is None]
        self.chance = random.Random(seed)
        self.stopping, self.killed, self.over = math.inf, False, False

    async def run(self, clients=64):
        """Ask until `over`."""
        small = httpx.AsyncHTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)])
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=PATIENCE, limits=unlimited) as self.http,
            httpx.AsyncClient(base_url=self.url, timeout=PATIENCE, transport=small) as self.slow,
            openai.AsyncOpenAI(
                base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
            ) as self.openai,
        ):
            first = [*KINDS, *[None] * clients][:clients]  # each once, however short the load is
            await asyncio.gather(*map(self._client, first))

    async def _client(self, kind):
        kinds, weights = zip(*KINDS.items(), strict=True)
        while not self.over:
            kind = kind or self.chance.choices(kinds, weights)[0]
            self.tally.kinds[kind] += 1
            try:
                await getattr(self, kind)()
            except GaveUp:
                return
            except Wrong as error:
                self.tally.problem(f"{kind}: {error}")
            except Ended as error:
                self.tally.ended[str(error)] += 1
                if self.stopping == math.inf and str(error) != "timeout":
                    self.tally.problem(f"{kind}: ended by {error} while nobody had stopped the server")
            except Lost as error:
                self.tally.ended["connection"] += 1
                if not self.killed and error.began < self.stopping:
                    self.tally.problem(f"{kind}: {error}")
            kind = None
            if self.stopping < math.inf:
                await asyncio.sleep(0.05)

    # How requests are made

    async def ask(self, path, body, *, http=None, delay=0.0):
        """The choices of a whole answer, by index; a full queue is waited for."""
        while True:
            try:
                async with asyncio.timeout(PATIENCE):
                    return await self._once(path, {"model": "tiny", **body}, http or self.http, delay)
            except TimeoutError:
                raise Wrong(f"no answer within {PATIENCE:g} s") from None
            except Full as error:  # large requests may wait long for room; that loses no answer
                if self.over:
                    raise GaveUp from None
                await asyncio.sleep(error.seconds * self.chance.uniform(1, 1.5))

    async def _once(self, path, body, http, delay):
        began = time.monotonic()
        choices, usage, done = collections.defaultdict(Choice), None, False
        try:
            async with http.stream("POST", f"/v1/{path}", json=body) as response:
                self.tally.statuses[response.status_code] += 1
                if response.status_code != 200 or not body.get("stream"):
                    whole = json.loads(await response.aread())
                    must_be_clean(response, whole)
                    if response.status_code == 429:
                        self.tally.refused += 1
                        raise Full(int(response.headers["retry-after"]))
                    if response.status_code != 200:
                        raise Ended(whole["error"]["code"])
                    events = [whole]
                else:
                    events, done = await self._events(response, delay, began)
        except httpx.HTTPError as error:
            raise Lost(error, began) from None
        for event in events:
            if "error" in event:
                raise Ended(event["error"]["code"]) if event is events[-1] and not done else Wrong("error and [DONE]")
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                choices[choice["index"]].add(choice)
        if body.get("stream") and not done:
            raise Wrong("a stream ended with neither [DONE] nor an error")
        if sorted(choices) != list(range(len(choices))) or any(choice.reason is None for choice in choices.values()):
            raise Wrong(f"an answer is missing or has no end: {choices}")
        self.tally.seconds.append(time.monotonic() - began)
        self.tally.tokens += usage["completion_tokens"]
        return [choices[index] for index in sorted(choices)], usage

    async def _events(self, response, delay, began):
        events, done = [], False
        async for line in response.aiter_lines():
            if not line or line.startswith(":"):  # a comment keeps an idle connection open
                continue
            if done:
                raise Wrong(f"after [DONE]: {line[:200]}")
            if not events:
                self.tally.first.append(time.monotonic() - began)
            data = line.removeprefix("data: ")
            done = data == "[DONE]"
            if not done:
                events.append(json.loads(data))
            await asyncio.sleep(delay)
        return events, done

    async def refuse(self, status, code, *arguments, **options):
        """A request that must be refused, with this status and code (None: any)."""
        attempt = time.monotonic()
        try:
            response = await self.http.request(*arguments, **options)
        except httpx.HTTPError as error:
            raise Lost(error, attempt) from None
        self.tally.statuses[response.status_code] += 1
        if response.status_code == 503:
            raise Ended(response.json()["error"]["code"])
        must_be_clean(response, response.json())
        if response.status_code != status or code not in (None, response.json()["error"]["code"]):
            raise Wrong(f"{response.text[:200]} ({response.status_code}) instead of {code} ({status})")

    def compare(self, choice, made, most, *, stop=None, echo=False, logprobs=False):
        """A greedy answer with the one that the library gave."""
        ids, text, reason = made.answer(most, stop)
        text = made.prompt + text if echo else text
        if (choice.text, choice.reason) != (text, reason):
            raise Wrong(f"{choice.text!r} ({choice.reason}) instead of {text!r} ({reason})")
        if logprobs:
            known = made.prompt_ids + ids if echo else ids
            if choice.ids != known:
                raise Wrong(f"tokens {choice.ids} instead of {known}")
            start = 0 if echo else len(made.prompt_ids) - 1
            told = choice.logprobs[1:] if echo else choice.logprobs
            if any(abs(a - b) > TOLERANCE for a, b in zip(told, made.logprobs[start:], strict=False)):
                raise Wrong(f"log-probabilities {told} instead of {made.logprobs[start:]}")
        self.tally.compared += 1

    # Behaviours

    async def greedy(self):
        """Completions with whatever else can be asked; also as a sample of the likeliest token alone."""
        made = [self.chance.choice(self.plain) for _ in range(self.chance.choice([1, 1, 1, 3]))]
        most, n, logprobs = self.chance.randint(1, LONGEST), self.chance.choice([1, 1, 1, 2, 3]), self.flip()
        echo, stop = self.flip(0.2), None
        body = {"prompt": [one.prompt_ids if echo else one.prompt for one in made], "max_tokens": most, "n": n}
        body |= {"temperature": 0} if self.flip() else {"temperature": 1.5, "top_k": 1, "seed": 1}
        body |= {"echo": True} if echo else {}
        body |= {"logprobs": self.chance.choice([0, 5]), "return_tokens_as_token_ids": True} if logprobs else {}
        if self.flip(0.2) and len(made[0].texts[-1]) > 8:
            start = self.chance.randrange(len(made[0].texts[-1]) - 4)
            found = made[0].texts[-1][start : start + 3]
            if "\ufffd" not in found:  # of a character that is not whole, which may still become another
                stop = body["stop"] = found
        choices, usage = await self.ask("completions", self.streamed(body))
        if len(choices) != n * len(made) or usage["prompt_tokens"] != sum(len(one.prompt_ids) for one in made):
            raise Wrong(f"{len(choices)} answers to {len(made)} prompts, {n} each; {usage}")
        for index, choice in enumerate(choices):
            self.compare(choice, made[index // n], most, stop=stop, echo=echo, logprobs=logprobs)

    async def chat(self):
        made, most = self.chance.choice([one for one in self.references if one.messages]), self.chance.randint(1, 48)
        body = {"messages": made.messages, "max_tokens": most, "temperature": 0, "logprobs": self.flip()}
        body |= {"return_tokens_as_token_ids": True} if body["logprobs"] else {}
        (choice,), _ = await self.ask("chat/completions", self.streamed(body))
        self.compare(choice, made, most, logprobs=body["logprobs"])

    async def with_openai(self):
        """The library that most clients use."""
        made, most, attempt = self.chance.choice(self.plain), self.chance.randint(1, LONGEST), time.monotonic()
        asked, choice = {"model": "tiny", "prompt": made.prompt, "max_tokens": most, "temperature": 0}, Choice()
        try:
            if self.flip():
                async for event in await self.openai.completions.create(**asked, stream=True):
                    choice.add(event.choices[0].model_dump())
            else:
                found = await self.openai.completions.create(**asked)
                choice.add(found.choices[0].model_dump())
        except openai.RateLimitError:
            self.tally.refused += 1
            return
        except openai.APIConnectionError as error:
            raise Lost(error, attempt) from None
        except openai.APIError as error:
            raise Ended(error.code) from None
        except httpx.HTTPError as error:  # a stream that breaks off
            raise Lost(error, attempt) from None
        self.compare(choice, made, most)

    async def sampled(self):
        made, most = self.chance.choice(self.plain), self.chance.randint(1, 32)
        body = {"prompt": made.prompt, "max_tokens": most, "temperature": 0.9, "top_p": 0.95, "logprobs": 0}
        body |= {"seed": self.chance.randrange(1000)} if self.flip() else {}
        (choice,), usage = await self.ask("completions", self.streamed(body | {"return_tokens_as_token_ids": True}))
        if not usage["completion_tokens"] == len(choice.ids) == len(choice.logprobs) <= most:
            raise Wrong(f"{len(choice.ids)} tokens, {len(choice.logprobs)} log-probabilities; {usage}")
        if len(self.tally.sampled) < KEPT:
            self.tally.sampled.append((made.prompt_ids, choice.ids, choice.logprobs))

    async def burst(self):
        """More at once than can wait: some are refused, and come back when they were told to."""
        made = self.chance.choice(self.plain)
        asked = {"prompt": made.prompt, "max_tokens": 3, "temperature": 0}
        for choices, _ in await asyncio.gather(*(self.ask("completions", asked) for _ in range(ROWS + QUEUE + 16))):
            self.compare(choices[0], made, 3)

    async def slow_reader(self):
        made = self.chance.choice(self.plain)
        body = {"prompt": made.prompt, "max_tokens": LONGEST, "temperature": 0, "logprobs": 20, "stream": True}
        body |= {"return_tokens_as_token_ids": True, "stream_options": {"include_usage": True}}
        (choice,), _ = await self.ask("completions", body, http=self.slow, delay=self.chance.uniform(0.01, 0.1))
        self.compare(choice, made, LONGEST, logprobs=True)

    async def stops_reading(self):
        """An answer that no buffer holds, of which the client takes next to nothing before it goes."""
        prompt = (self.chance.choice(self.plain).prompt_ids * 3000)[:3000]
        body = {"prompt": prompt, "max_tokens": 500, "echo": True, "logprobs": 20, "temperature": 0, "ignore_eos": True}
        await self.leave(body | {"stream": True}, self.slow, self.chance.uniform(1, 10))

    async def leaves_stream(self):
        made = self.chance.choice(self.plain)
        body = {"prompt": made.prompt, "max_tokens": 400, "ignore_eos": True, "stream": True}
        await self.leave(body | {"n": self.chance.choice([1, 3])}, self.http, self.chance.uniform(0, 0.3))

    async def leave(self, body, http, after):
        attempt = time.monotonic()
        try:
            async with http.stream("POST", "/v1/completions", json={"model": "tiny", **body}) as response:
                if response.status_code == 200:
                    await anext(response.aiter_raw(1024), None)
                else:
                    must_be_clean(response, json.loads(await response.aread()))
                await asyncio.sleep(after)
        except httpx.HTTPError as error:
            raise Lost(error, attempt) from None

    async def leaves_waiting(self):
        body = {"prompt": self.chance.choice(self.plain).prompt, "max_tokens": 400, "ignore_eos": True, "n": 2}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.chance.uniform(0.02, 0.5)):
                await self.ask("completions", body)

    async def malformed(self):
        content = self.chance.choice(
            [b"", b"{", b"[]", b'{"prompt": NaN}', b'{"prompt": "\xff"}', b"[" * 5000, b'{"prompt": 1}',
             b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "a", "n": -1}', b'{"n": ' + b"9" * 5000 + b"}"]
        )  # fmt: skip
        path = self.chance.choice(["/v1/completions", "/v1/chat/completions"])
        await self.refuse(400, None, "POST", path, content=content, headers=JSON)
        kind = 415 if content else 400
        await self.refuse(kind, None, "POST", path, content=content, headers={"Content-Type": "text/plain"})

    async def oversized(self):
        body = json.dumps({"prompt": "a" * 2 * MAX_BYTES}).encode()

        async def parts():
            for start in range(0, len(body), 5000):
                yield body[start : start + 5000]

        await self.refuse(
            413, "body_too_large", "POST", "/v1/completions", content=body if self.flip() else parts(), headers=JSON
        )

    async def unknown(self):
        made = self.chance.choice(self.plain)
        body = {"model": "tiny", "prompt": made.prompt}
        await self.refuse(404, "model_not_found", "POST", "/v1/completions", json=body | {"model": "target"})
        await self.refuse(400, "unsupported_parameter", "POST", "/v1/completions", json=body | {"alpha": 0.0})
        await self.refuse(404, None, "GET", "/v1/nothing")
        await self.refuse(405, None, "GET", "/v1/completions")

    async def too_long(self):
        body = {"model": "tiny", "prompt": [5] * 5000}
        await self.refuse(400, "context_length_exceeded", "POST", "/v1/completions", json=body)

    def flip(self, share=0.5):
        return self.chance.random() < share

    def streamed(self, body):
        return {**body, "stream": True, "stream_options": {"include_usage": True}} if self.flip() else body


KINDS = {
    "greedy": 30, "chat": 12, "with_openai": 10, "sampled": 12, "leaves_stream": 6, "leaves_waiting": 6,
    "malformed": 6, "oversized": 4, "unknown": 4, "too_long": 3, "slow_reader": 3, "stops_reading": 0.2, "burst": 0.3,
}  # fmt: skip
