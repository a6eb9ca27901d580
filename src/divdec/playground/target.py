"""The target alone, UNSTEERED: the only place of the playground that answers so.

It exists for `--show-target` on this machine, where somebody who may see the target compares. Whoever builds a page
without it cannot show the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from divdec.decoding.text import AnswerText
from divdec.errors import UsageError
from divdec.experts.neural import device_of
from divdec.playground.steered import Steered
from divdec.serving import is_local


class Target:
    """Answers as the target does; for a page that marks it as unsteered."""

    def __init__(self, steered: Steered, host: str) -> None:
        """Take the target of a bundle.

        Raises:
            UsageError: the page could be reached from other machines.
        """
        if not is_local(host):
            raise UsageError(f"--show-target shows unsteered answers; it is refused for host {host}: only 127.0.0.1")
        self._steered = steered

    def answer(self, prompt: list[int]) -> Iterator[str]:
        """The target's own greedy answer, text that grows; it is UNSTEERED."""
        steered, target = self._steered, self._steered.model.target
        text, read, cache = AnswerText(steered.tokenizer, (), prompt), prompt, None
        whole = ""
        longest = steered.manner.max_new_tokens
        positions = steered.model.config.max_position_embeddings or longest + len(prompt)
        for _ in range(min(longest, positions - len(prompt))):
            chosen, cache = _step(target, read, cache)
            if chosen in steered.ends:
                break
            whole, read = whole + text.add(chosen), [chosen]
            yield whole
        yield whole + text.end()


@torch.inference_mode()
def _step(target: Any, read: list[int], cache: Any) -> tuple[int, Any]:
    output = target(torch.tensor([read], device=device_of(target)), past_key_values=cache, use_cache=True)
    return int(output.logits[0, -1].argmax()), output.past_key_values
