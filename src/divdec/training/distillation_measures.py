"""How far a student is from its teacher, measured piece by piece as the loss is computed. It changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from divdec.data.formatting import Example
from divdec.training.distillation_loss import Pieces, measured, predicting
from divdec.training.distillation_objective import LiveTeacher, figures_at, through_head
from divdec.training.objective import INDEX, Collator

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from divdec.training.teacher_cache import CachedTeacher

SAMPLE = 256
"""How many examples of a set are looked at, the same ones at every measurement."""
Measures = dict[str, dict[str, float]]
"""By set: `kl`, `cross_entropy`, `teacher_cross_entropy`, all in nats per labelled token at temperature 1."""


@dataclasses.dataclass
class Gauge:
    """Measures students against one teacher on fixed samples of fixed sets."""

    teacher: LiveTeacher
    head: nn.Linear | None
    """The student's output layer, or None; see `divdec.training.distillation_objective.plain_head`."""
    tokenizer: PreTrainedTokenizerBase
    sets: Mapping[str, Sequence[Example]]
    """By role: 'forget', 'retain'."""
    batch_size: int
    parked: bool
    """Whether the teacher waits on the CPU between measurements, because training does without it."""

    def measure(self, model: PreTrainedModel) -> Measures:
        """KL(teacher ‖ student) at temperature 1 and both cross entropies, per set.

        The temperature and direction of the loss play no part, so that runs of different ones can be compared.
        """
        teacher = dataclasses.replace(self.teacher, temperature=1.0, direction="teacher-student")
        found: Measures = {}
        for role, examples in self.sets.items():
            sums, count = self._sums(model, examples, _sample(len(examples)), lambda batch: figures_at(teacher, batch))
            kl, student, own = (sums / count).tolist()
            found[role] = {"kl": kl, "cross_entropy": student, "teacher_cross_entropy": own}
        return found

    def error_of(self, cached: CachedTeacher, model: PreTrainedModel, examples: Sequence[Example]) -> dict[str, float]:
        """What a cache loses of the loss, measured on a sample for the student as it is now.

        Args:
            cached: answers of this gauge's teacher.
            model: the student.
            examples: all those that the cache was made for.

        Returns:
            The loss per labelled token with the teacher itself (`exact`) and with the cache (`cached`, never larger but
            for rounding), and the mean probability that the cache lumps together (`rest`).
        """
        places = _sample(len(examples))
        cached.to(model.device)
        exact, count = self._sums(model, examples, places, self.teacher.pieces)
        lumped, _ = self._sums(model, examples, places, cached.pieces)
        return {"exact": float(exact) / count, "cached": float(lumped) / count, "rest": cached.mean_rest}

    def _sums(
        self,
        model: PreTrainedModel,
        examples: Sequence[Example],
        places: Sequence[int],
        pieces: Callable[[Mapping[str, Tensor]], Pieces],
    ) -> tuple[Tensor, int]:
        """Sums of figures over the labelled positions of some examples, and how many positions there are."""
        was_training = model.training
        model.eval()
        self.teacher.to(model.device)
        sums, count = [], 0
        for batch in self._batches(examples, places, model.device):
            with torch.no_grad():
                sums.append(through_head(model, self.head, batch, pieces(batch), measured).double().cpu())
            count += int(predicting(batch["labels"]).sum())
        if self.parked:
            self.teacher.to(torch.device("cpu"))
        model.train(was_training)
        return torch.stack(sums).sum(dim=0), count

    def _batches(
        self, examples: Sequence[Example], places: Sequence[int], device: torch.device
    ) -> Iterator[dict[str, Tensor]]:
        collator = Collator(self.tokenizer)
        order = sorted(places, key=lambda place: len(examples[place].input_ids))
        for start in range(0, len(order), self.batch_size):
            rows: list[dict[str, Any]] = [
                {INDEX: place, **dataclasses.asdict(examples[place])}
                for place in order[start : start + self.batch_size]
            ]
            yield {name: tensor.to(device) for name, tensor in collator(rows).items()}


def _sample(size: int) -> list[int]:
    if size <= SAMPLE:
        return list(range(size))
    return torch.randperm(size, generator=torch.Generator().manual_seed(0))[:SAMPLE].tolist()
