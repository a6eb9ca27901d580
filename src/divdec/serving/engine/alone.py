"""One sequence that has the models to itself, and speculates: several tokens a pass of the target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import GenerationConfig, StoppingCriteriaList

from divdec.decoding.speculative import Speculation, SpeculativeDecoder
from divdec.model.modeling import DivergenceForCausalLM
from divdec.serving.engine.batch import Told, follow_registry
from divdec.serving.engine.sequence import Running


class Alone:
    """An answer that grows by as many tokens a step as are drafted and accepted."""

    is_open = False

    def __init__(self, model: DivergenceForCausalLM, sequence: Running, speculation: Speculation, part: int) -> None:
        """Prepare; `part` tokens of the prompt are read in a pass."""
        self.sequences = [sequence]
        self._model = model
        self._cache = model.new_cache()
        ids = torch.tensor([sequence.tokens], device=model.device)
        self._known = ids.shape[1]
        config = GenerationConfig(
            do_sample=sequence.sampling.temperature > 0,
            max_length=self._known + sequence.most - len(sequence.answer),
        )
        config.prefill_chunk_size = part
        config._pad_token_tensor = None  # pyright: ignore[reportAttributeAccessIssue]
        self._decoding = SpeculativeDecoder(
            model,
            ids,
            sequence.processors,
            StoppingCriteriaList(),
            config,
            {"past_key_values": self._cache},
            speculation,
            seed=sequence.chance(),
        )
        self._begun = False

    @staticmethod
    def suits(sequence: Running) -> bool:
        """Whether a request can be answered so: nothing is told of places, and no seed promises another answer."""
        sampling = sequence.sampling
        told = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        return not told and (sampling.temperature == 0 or sampling.seed is None) and sequence.most > 1

    def step(self) -> Told:
        """Draft, judge, and add what stands."""
        follow_registry(self._model, self._cache)
        if self._begun:
            self._decoding.step()
        else:
            self._decoding.prefill()
            self._begun = True
        sequence = self.sequences[0]
        told: Told = []
        rows = self._decoding.batch.sequences
        for token in rows.ids[0, self._known : rows.lengths[0]].tolist():
            piece = sequence.take(token, None)
            told.append((sequence, piece))
            if piece.finish_reason:
                break
        self._known = rows.lengths[0]
        return told

    def drop(self, sequences: Sequence[Running]) -> None:
        """Let the sequence leave."""
        if any(sequence is self.sequences[0] for sequence in sequences if self.sequences):
            self.sequences = []
