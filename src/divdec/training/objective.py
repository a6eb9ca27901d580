"""What a run of fine-tuning minimises where that is not the cross entropy, and the rows that it reads.

A row is an example with its companions: another text of the retain set beside each text of the forget set, or another
answer to the same question. It knows nothing of any method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import Dataset
from transformers import DataCollatorForSeq2Seq

from divdec.data.formatting import IGNORED, Example
from divdec.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

INDEX = "index"
"""The column of a batch that says which examples it holds."""


@runtime_checkable
class Objective(Protocol):
    """A loss in place of the cross entropy. Models that it holds beside the trained one stay as they are."""

    counts_tokens: bool
    """Whether the loss is a mean over labelled tokens. Then `loss` is given their number in all micro-batches of the
    step, and divides by it, so that accumulated gradients equal those of one large batch; otherwise it is a mean over
    the micro-batch, and micro-batches weigh the same."""

    def to(self, device: torch.device) -> object:
        """Move what the objective holds to where the trained model is."""
        ...

    def loss(
        self, model: PreTrainedModel, batch: Mapping[str, Tensor], labelled: Tensor | int | None
    ) -> Float[Tensor, ""]:
        """The loss of a batch, with gradient.

        Args:
            model: the model that is trained, perhaps wrapped by accelerate or peft.
            batch: `input_ids`, `attention_mask` and `labels` [batch, tokens], right-padded; the same with each
                companion's name and an underscore before; `index` [batch].
            labelled: number of labelled tokens that the step's mean is taken over, where `counts_tokens`.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Companion:
    """What a batch holds beside the examples."""

    examples: Sequence[Example]
    drawn: bool = True
    """Another one for each example and epoch, at random and each as often as any other; False takes the i-th with the
    i-th."""


class Rows(Dataset[dict[str, Any]]):
    """Examples with their companions, the same again for the same seed and epoch."""

    def __init__(self, examples: Sequence[Example], companions: Mapping[str, Companion], seed: int) -> None:
        for name, companion in companions.items():
            if not companion.examples:
                raise UsageError(f"the {name} set is empty; this method needs one")
            if not companion.drawn and len(companion.examples) != len(examples):
                raise UsageError(f"there are {len(companion.examples)} {name} examples for {len(examples)}")
        self.examples = examples
        self.companions = dict(companions)
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw this epoch's companions."""
        generator = torch.Generator().manual_seed(self.seed * 100_003 + epoch + 50_021)
        self._drawn = {
            name: _places(len(companion.examples), len(self.examples), generator)
            if companion.drawn
            else range(len(self.examples))
            for name, companion in self.companions.items()
        }

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = {INDEX: index, **dataclasses.asdict(self.examples[index])}
        for name, companion in self.companions.items():
            example = companion.examples[self._drawn[name][index]]
            row |= {f"{name}_{field}": value for field, value in dataclasses.asdict(example).items()}
        return row


class Collator:
    """Pads examples and companions, each to its own longest."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, companions: Sequence[str] = ()) -> None:
        self._pad = DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED, padding=True)
        self._companions = tuple(companions)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Rows as a batch: see `Objective.loss`."""
        batch = {INDEX: torch.tensor([row[INDEX] for row in rows])} if INDEX in rows[0] else {}
        for prefix in ("", *(f"{name}_" for name in self._companions)):
            fields = [{name: row[prefix + name] for name in ("input_ids", "labels")} for row in rows]
            batch |= {prefix + name: tensor for name, tensor in self._pad(fields).items()}
        return batch


def part(batch: Mapping[str, Tensor], companion: str = "") -> dict[str, Tensor]:
    """A batch's examples, or one companion's, as a model takes them: input_ids, attention_mask and labels."""
    prefix = f"{companion}_" if companion else ""
    return {name: batch[prefix + name] for name in ("input_ids", "attention_mask", "labels")}


def _places(available: int, wanted: int, generator: torch.Generator) -> list[int]:
    """Places in random order; after all have come, all in another order."""
    rounds = [torch.randperm(available, generator=generator) for _ in range(-(-wanted // available))]
    return torch.cat(rounds)[:wanted].tolist()
