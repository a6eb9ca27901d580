"""How far results may differ that are computed in another order.

Equal inputs of equal shapes give equal bits in one process. Other batch sizes, paddings, caches, pieces, threads and
processors let BLAS libraries choose other kernels, which add up in another order: such results agree within a
tolerance, and a greedy answer may take either of two tokens whose logits are closer than that.
"""

import functools

import torch

LOGITS = 1e-4
"""Of float32 logits: about a hundred times what rounding does to the tests' models, whose logits are of order 10."""

LOSSES = 1e-5
"""Of losses and other means, relative to them."""


def assert_close(found, expected):
    """Logits, log-probabilities, or keys and values, computed in another order."""
    torch.testing.assert_close(found, expected, rtol=0, atol=LOGITS)


def assert_same_answers(model, prompts, found, expected, padding=1, **options):
    """Greedy answers to left-padded prompts, as `generate` returns them, and what changed their scores."""
    start = max(map(len, prompts))
    assert len(found) == len(expected) == len(prompts)
    assert torch.equal(found[:, :start], expected[:, :start])
    for prompt, *rows in zip(prompts, found[:, start:].tolist(), expected[:, start:].tolist(), strict=True):
        assert_same_answer(model, prompt, *(unpadded(row, padding) for row in rows), **options)


def unpadded(answer, padding):
    while answer and answer[-1] == padding:
        answer = answer[:-1]
    return answer


def assert_same_answer(model, prompt, found, expected, **options):
    """The tokens of two greedy answers to one prompt, equal up to a first choice that is a near tie."""
    if found == expected:
        return
    place = next((place for place, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
    assert place is not None, f"{found} and {expected} end at different places"
    tokens = found[place], expected[place]
    scores = scores_after(model, [*prompt, *expected[:place]], place, **options)
    assert all(may_be_chosen(model, [*prompt, *expected[:place]], scores, token) for token in tokens), (
        f"{found} is not {expected}: at {place} they take {tokens}, of scores {scores[list(tokens)].tolist()}"
    )


def assert_same_text(model, tokenizer, prompt, found, expected, **options):
    """The text of a greedy answer against the tokens that another path gave."""
    assert_text(functools.partial(scores_after, model, **options), tokenizer, prompt, found, expected)


def assert_text(scores_after, tokenizer, prompt, found, expected, tolerance=LOGITS):
    """The same for a reference that gives the scores of the next token after some ids."""
    if found == tokenizer.decode(expected, skip_special_tokens=True):
        return
    for place in range(len(expected)):
        text = tokenizer.decode(expected[: place + 1], skip_special_tokens=True).rstrip("\ufffd")
        if not found.startswith(text):
            best = scores_after([*prompt, *expected[:place]]).topk(2).values
            assert best[0] - best[1] <= tolerance, f"{found!r} leaves the answer {expected} at token {place}"
            return
    raise AssertionError(f"{found!r} ends elsewhere than the answer {expected}")


@torch.no_grad()
def scores_after(model, ids, answered=0, **options):
    """Scores of the token after `ids`, read in one pass without padding, as greedy decoding compares them."""
    ids = torch.tensor([ids], device=model.device)
    given = {"pad_token_id": 1, **options, "max_new_tokens": 1, "do_sample": False}
    if "min_new_tokens" in options:
        given["min_new_tokens"] = max(0, options["min_new_tokens"] - answered)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_scores=True, **given
    )  # fmt: skip
    return output.scores[0][0].cpu()


@torch.no_grad()
def may_be_chosen(model, ids, scores, token):
    """Whether a token is greedy decoding's choice up to rounding."""
    if scores[token] >= scores.max() - LOGITS:
        return True
    steering = getattr(model, "steering", None)
    if steering is None or steering.rule != "rank":
        return False
    # Divergences that are nearly equal may change places too, and with them the last token that is suppressed.
    parts = model.components(torch.tensor([ids], device=model.device), logits_to_keep=1)[1:]
    target, divergence = (values[0, -1].cpu() for values in parts)
    allowed = steering.eligible(len(divergence))
    if allowed is not None:
        divergence = divergence.masked_fill(~allowed, torch.inf)
    suppressed, kept = divergence.sort().values[steering.k - 1 : steering.k + 1]
    surely_kept = target[divergence > suppressed + LOGITS]
    return bool(divergence[token] >= kept - LOGITS and target[token] >= surely_kept.max() - LOGITS)
