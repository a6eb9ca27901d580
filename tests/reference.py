"""The slow, obvious way: three independent forwards of one unpadded sequence, and the paper's formula."""

import torch


def steered_logits(target, retain, forget, ids, steering, vocab_size=None):
    """Steered logits after each token of one sequence, written from equations 1 and 2 alone."""
    with torch.no_grad():
        P, q, p = (model(input_ids=torch.tensor([ids])).logits[0].float() for model in (target, retain, forget))
    vocab_size = vocab_size or min(logits.shape[-1] for logits in (P, q, p))
    P, q, p = (logits[:, :vocab_size] for logits in (P, q, p))
    if steering.rule == "linear":
        return P + steering.alpha * (q - p)
    return torch.stack([rank(P[t], q[t] - p[t], steering) for t in range(len(ids))])


def rank(target, divergence, steering):
    """Equation 2 for one position: a stable sort by (divergence, token id)."""
    allowed = range(len(target)) if steering.vocabulary is None else steering.vocabulary
    worst = sorted(allowed, key=lambda token: (divergence[token].item(), token))[: steering.k]
    filling = -float("inf") if steering.fill == "hard" else sorted(target.tolist(), reverse=True)[steering.k - 1]
    steered = target.clone()
    steered[worst] = filling
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
