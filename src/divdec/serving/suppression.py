"""How much of the target's probability steering took from a reply: `divdec serve --on-suppressed`.

Where the target's answer is forgotten, a steered model invents another one. The share that steering took is the total
variation distance between the target's and the steered distribution of the next token, at the token of the reply where
it is largest: 0 where steering changed nothing, near 1 where it took a token that the target was sure of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from divdec.model.modeling import DivergenceForCausalLM


@torch.inference_mode()
def suppressed_share(model: DivergenceForCausalLM, tokens: Sequence[int], prompt_length: int, chunk: int) -> float:
    """Return the largest share of probability that steering took at one token of a reply.

    Args:
        model: the steered model.
        tokens: prompt and reply.
        prompt_length: tokens of the prompt, at least 1.
        chunk: tokens in one pass.

    Raises:
        FailedClosed: a logit is not finite.
    """
    cache, eligible = model.new_cache(), model.steering.eligible(model.vocab_size)
    ids = torch.tensor([list(tokens[:-1])], device=model.device)
    largest = torch.zeros((), device=model.device)
    for start in range(0, ids.shape[1], chunk):
        end = min(start + chunk, ids.shape[1])
        keep = min(end - start, end - prompt_length + 1)  # after the prompt's last token comes the reply's first
        if model.takedowns is not None:
            assert cache.takedowns is not None
            model.takedowns.begin(cache.takedowns)
        target, corrected, divergence = model.unsteered_components(ids[:, start:end], cache, max(keep, 1))
        if keep > 0:
            if eligible is not None:
                eligible = eligible.to(corrected.device)
            steered = model.steering.apply(corrected, divergence, eligible)
            taken = (target.float().softmax(-1) - steered.float().softmax(-1)).clamp(min=0).sum(-1)
            largest = torch.maximum(largest, taken.max().to(largest.device))  # NaN stays NaN, which is refused
    return float(largest)
