"""Requests and replies of a completions endpoint, and the patience with which it is asked."""

import pytest

from divdec.errors import UsageError
from divdec.remote.completions import Abilities, Completions
from divdec.remote.endpoint import Endpoint, Refused, Unavailable


@pytest.fixture
def asking(url, tokenizer, opened):
    def make(at=url, key=None, **options):
        endpoint = Endpoint(f"{at}/v1", "plain", key, retries=1, pause=0.01)
        found = Completions(endpoint, tokenizer, tokenizer.eos_token_id, **options)
        opened(found.endpoint)
        return found

    return make


def test_a_position_holds_what_was_told(asking, prompts):
    (position,) = asking().ask(prompts[0], Abilities(top_logprobs=5), {})
    assert len(position.told) == 5
    assert position.token in position.told
    assert position.floor == min(position.told.values())


def test_names_by_text_are_the_same_tokens(asking, prompts):
    by_id = asking().ask(prompts[1], Abilities(), {}, tokens=4)
    by_text = asking().ask(prompts[1], Abilities(prompt_ids=False, answer_ids=False), {}, tokens=4)
    assert [position.token for position in by_id] == [position.token for position in by_text]
    both = set(by_id[0].told) & set(by_text[0].told)
    assert len(both) >= 18  # what reads alike cannot be told apart
    assert all(by_id[0].told[token] == pytest.approx(by_text[0].told[token], abs=1e-5) for token in both)


def test_the_chosen_token_below_the_others_does_not_lower_the_floor(provider, asking, prompts):
    def choose_another(content, body):
        told = content["choices"][0]["logprobs"]
        told["tokens"], told["top_logprobs"][0]["token_id:3"] = ["token_id:3"], -30.0

    (position,) = asking(provider(reply=choose_another).url).ask(prompts[0], Abilities(top_logprobs=5), {})
    assert position.token == 3
    assert position.floor > -30


def test_too_few_told_tell_nothing_of_the_others(provider, asking, prompts):
    def fewer(content, body):
        top = content["choices"][0]["logprobs"]["top_logprobs"][0]
        top.pop(min(top, key=top.get))

    (position,) = asking(provider(reply=fewer).url).ask(prompts[0], Abilities(top_logprobs=5), {})
    assert position.told is None


def test_the_end_is_a_token_also_where_it_is_not_told(provider, asking, prompts, tokenizer):
    def end(content, body):
        content["choices"][0].update(text="", finish_reason="stop", logprobs=None)

    (position,) = asking(provider(reply=end).url).ask(prompts[0], Abilities(True, False, 0), {})
    assert position.token == tokenizer.eos_token_id


def test_a_part_of_a_character_needs_ids(provider, asking, prompts):
    def nothing(content, body):
        content["choices"][0].update(text="", finish_reason="length", logprobs=None)

    with pytest.raises(UsageError, match="no token that can be read"):
        asking(provider(reply=nothing).url).ask(prompts[0], Abilities(True, False, 0), {})


def test_a_prompt_that_is_no_text_is_refused(asking, tokenizer):
    ids = tokenizer("author").input_ids
    split = [token for letter in "author" for token in tokenizer(letter).input_ids]
    assert split != ids
    with pytest.raises(UsageError, match="cannot be sent as text"):
        asking().ask(split, Abilities(prompt_ids=False), {})


def test_text_is_read_as_the_provider_reads_it(asking, tokenizer, prompts):
    split = [token for letter in " author" for token in tokenizer(letter).input_ids]
    found = asking().canonical([*prompts[0], *split], len(prompts[0]))
    assert tokenizer.decode(found) == tokenizer.decode([*prompts[0], *split])
    assert len(found) < len(prompts[0]) + len(split)


def test_further_fields_go_with_every_request(provider, asking, prompts):
    there = provider()
    asking(there.url, extra={"top_k": 7}).ask(prompts[0], Abilities(), {}, temperature=0.5, seed=3)
    ((_, body),) = there.seen
    assert (body["top_k"], body["top_p"], body["seed"], body["temperature"]) == (7, 1, 3, 0.5)


def test_something_else_answers(provider, asking, prompts):
    def other(content, body):
        content.clear()

    with pytest.raises(UsageError, match="no completions API"):
        asking(provider(reply=other).url).ask(prompts[0], Abilities(), {})


def test_errors_say_which_status(provider, asking, prompts):
    with pytest.raises(Refused, match="status 403") as refused:
        asking(provider(request=lambda body: (403, "not you")).url).ask(prompts[0], Abilities(), {})
    assert refused.value.status == 403
    there = provider(request=lambda body: (503, "busy"))
    with pytest.raises(Unavailable, match="2 attempts") as unavailable:
        asking(there.url).ask(prompts[0], Abilities(), {})
    assert unavailable.value.status == 503
    assert len(there.seen) == 2


def test_the_key_goes_out_and_is_never_shown(provider, asking, prompts, monkeypatch):
    monkeypatch.setenv("A_KEY", "very-secret-key")
    there = provider(request=lambda body: (401, "the key very-secret-key is not known"))
    completions = asking(there.url, "A_KEY")
    with pytest.raises(Refused) as refused:
        completions.ask(prompts[0], Abilities(), {})
    assert there.seen[0][0]["authorization"] == "Bearer very-secret-key"
    assert "very-secret-key" not in str(refused.value)
    assert "very-secret-key" not in repr(completions.endpoint)
