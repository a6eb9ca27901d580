"""The slow, obvious way: three independent forwards of one unpadded sequence, and the paper's formula."""

import collections

import numpy as np
import torch


def steered_logits(target, retain, forget, ids, steering, vocab_size=None):
    """Steered logits after each token of one sequence, written from equations 1 and 2 alone."""
    with torch.no_grad():
        P, q, p = (model(input_ids=torch.tensor([ids])).logits[0].float() for model in (target, retain, forget))
    shared = min(q.shape[-1], p.shape[-1])
    q, p = (logits[:, :shared].log_softmax(-1) for logits in (q, p))
    vocab_size = vocab_size or min(P.shape[-1], shared)
    P, q, p = (logits[:, :vocab_size] for logits in (P, q, p))
    if steering.rule == "linear":
        return torch.stack([linear(P[t], q[t] - p[t], steering) for t in range(len(ids))])
    return torch.stack([rank(P[t], q[t] - p[t], steering) for t in range(len(ids))])


def linear(target, divergence, steering):
    """Equation 1 for one position; with a margin, only what p prefers over q by it is lowered.

    A full rule is equation 1 where that holds for the first choice.
    """
    if steering.margin is not None and not (steering.full and -divergence[target.argmax()] >= steering.margin):
        divergence = torch.where(divergence <= -steering.margin, divergence, 0.0)
    return target + steering.alpha * divergence


def rank(target, divergence, steering):
    """Equation 2 for one position: a stable sort by (divergence, token id)."""
    allowed = range(len(target)) if steering.vocabulary is None else steering.vocabulary
    worst = sorted(allowed, key=lambda token: (divergence[token].item(), token))[: steering.k]
    filling = -float("inf") if steering.fill == "hard" else sorted(target.tolist(), reverse=True)[steering.k - 1]
    steered = target.clone()
    for token in worst:
        if steering.margin is None:
            steered[token] = filling
        elif -divergence[token] >= steering.margin:
            steered[token] = min(filling, target[token].item())
    return steered


def greedy(target, retain, forget, ids, steering, new_tokens, end):
    """Greedy decoding that computes every prefix anew."""
    ids, answer = list(ids), []
    for _ in range(new_tokens):
        token = int(steered_logits(target, retain, forget, ids, steering)[-1].argmax())
        ids.append(token)
        answer.append(token)
        if token == end:
            break
    return answer


class SlowNgrams:
    """Counts in a dictionary, and the recursion as Brants et al. write it."""

    def __init__(self, documents, vocab_size, order):
        self.vocab_size, self.order = vocab_size, order
        self.counts = collections.Counter(
            tuple(document[start : start + length])
            for document in documents
            for length in range(1, order + 1)
            for start in range(len(document) - length + 1)
        )
        self.total = sum(map(len, documents))

    def score(self, context, token):
        context = tuple(context)[max(len(context) - self.order + 1, 0) :]
        if not context:
            return self.counts[(token,)] / self.total
        if count := self.counts[(*context, token)]:
            return count / self.counts[context]
        return 0.4 * self.score(context[1:], token)

    def scores(self, context):
        return np.float32([self.score(context, token) for token in range(self.vocab_size)])


class StepByStep:
    """What a steered model says after a text: one uncached, unpadded pass of each part for every text anew.

    Attributes:
        divergence: a function of a text (a list of token ids) that gives log q − log p after its last token.
        takedowns: a registry whose correction is added to the target's logits, or None.
    """

    def __init__(self, target, divergence, steering, vocab_size, takedowns=None):
        self.target, self.divergence, self.takedowns = target, divergence, takedowns
        self.steering, self.vocab_size = steering, vocab_size
        self._known = {}

    def parts(self, ids):
        """ℓ_P (corrected by takedowns) and the divergence after the last token, both float32 [vocab]."""
        if tuple(ids) not in self._known:
            target = last_logits(self.target, ids)[: self.vocab_size]
            if self.takedowns is not None:
                target = target + self.takedowns.correction(torch.tensor([ids]))[0, -1, : self.vocab_size]
            self._known[tuple(ids)] = target, self.divergence(ids)[: self.vocab_size].float()
        return self._known[tuple(ids)]

    def logits(self, ids):
        """Steered logits after the last token, by equation 1 or 2."""
        target, divergence = self.parts(ids)
        if self.steering.rule == "linear":
            return linear(target, divergence, self.steering)
        return rank(target, divergence, self.steering)

    def undecided(self, ids, tolerance):
        """Whether rounding decides if a full rule moves all tokens here."""
        if not self.steering.full:
            return False
        target, divergence = self.parts(ids)
        firsts = divergence[target >= target.max() - 2 * tolerance] + self.steering.margin
        return bool(firsts.min() < tolerance and firsts.max() > -tolerance)

    def surely_suppressed(self, ids, tolerance):
        """Tokens that the hard rank rule suppresses however the divergence was rounded, bool [vocab]."""
        if self.steering.rule != "rank" or self.steering.fill != "hard":
            return torch.zeros(self.vocab_size, dtype=torch.bool)
        _, divergence = self.parts(ids)
        allowed = torch.zeros(self.vocab_size, dtype=torch.bool)
        allowed[list(self.steering.vocabulary or range(self.vocab_size))] = True
        following = divergence[allowed].sort().values[self.steering.k]
        limit = following if self.steering.margin is None else min(following, torch.tensor(-self.steering.margin))
        return allowed & (divergence < limit - tolerance)


@torch.no_grad()
def last_logits(model, ids):
    """Logits after the last token of one sequence, float32, from one pass without a cache."""
    options = {} if model.config.model_type == "recurrent_gemma" else {"use_cache": False}
    return model(input_ids=torch.tensor([ids]), **options).logits[0, -1].float()
