"""The model that a suite looks at: plain, or steered under one or many settings that share their forward passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from divdec.data.formatting import Example
from divdec.errors import UsageError
from divdec.evaluation.generation import continuations
from divdec.evaluation.scoring import ItemScore, score, score_settings
from divdec.model.modeling import DivergenceForCausalLM
from divdec.steering import Steering

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model with its tokenizer, and the settings it is measured under."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    settings: tuple[Steering | None, ...] = ()
    """What a steered model is steered with; (None,) for a plain one. By default the model's own."""

    def __post_init__(self) -> None:
        steered = isinstance(self.model, DivergenceForCausalLM)
        if not self.settings:
            own = self.model.steering if isinstance(self.model, DivergenceForCausalLM) else None
            object.__setattr__(self, "settings", (own,))
        if steered != all(setting is not None for setting in self.settings):
            raise UsageError("a plain model has no steering, and a steered one is never measured without")

    def scores(
        self, examples: Sequence[Example], *, moments: bool, batch_size: int, title: str | None
    ) -> list[list[ItemScore]]:
        """Teacher-forced scores by setting, from one pass of every model for all of them."""
        if isinstance(self.model, DivergenceForCausalLM):
            settings = [setting for setting in self.settings if setting is not None]
            return score_settings(self.model, examples, settings, moments=moments, batch_size=batch_size, title=title)
        return [score(self.model, examples, moments=moments, batch_size=batch_size, title=title)]

    def under(self, setting: Steering | None) -> PreTrainedModel:
        """The model, steered by this setting."""
        if isinstance(self.model, DivergenceForCausalLM):
            assert setting is not None
            self.model.steering = setting
        return self.model

    def continuations(self, setting: Steering | None, prompts: Sequence[Sequence[int]], **options: Any) -> list[Any]:
        """Greedy continuations under one setting; see `divdec.evaluation.generation.continuations`."""
        return continuations(self.under(setting), self.tokenizer, prompts, **options)
