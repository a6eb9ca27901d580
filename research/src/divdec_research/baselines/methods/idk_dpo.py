"""IdkDPO: prefer "I don't know" to the true answer."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

from divdec.data.records import RecordSet
from divdec.errors import UsageError
from divdec_research.baselines.annotations import Batch, Job, Loss, PerSequence, PreTrainedModel, Tensor
from divdec_research.baselines.method import METHODS, Method
from divdec_research.baselines.methods.npo import NPO, NPOSettings


@dataclasses.dataclass(frozen=True)
class IdkDPOSettings(NPOSettings):
    """Training with DPO towards "I don't know"."""


IDK_ANSWERS = tuple(Path(__file__).with_name("idk_answers.txt").read_text("utf-8").splitlines())


class IdkDPO(NPO):
    """DPO of "I don't know" over the true answer; both reference log-probabilities are computed before training."""

    idk_reference: Tensor

    def __init__(self, job: Job, settings: IdkDPOSettings) -> None:
        """Draw the "I don't know" answers.

        Raises:
            UsageError: the forget set is plain text.
        """
        from divdec.data.formatting import encode_records

        super().__init__(job, settings)
        answers = draw_idk_answers(job.forget, IDK_ANSWERS, job.seed)
        self.companions = {"idk": encode_records(answers.records, job.tokenizer, job.form)}
        self.key = answers.sha256

    def prepare(self, model: PreTrainedModel) -> None:
        """Compute the reference log-probabilities."""
        super().prepare(model)
        self.idk_reference = self.untrained_log_probabilities(model, self.companions["idk"])

    def forget_loss(self, model: PreTrainedModel, batch: Batch) -> Loss:
        """See `idk_dpo`."""
        return idk_dpo(
            chosen=self.log_probabilities(model, batch, "idk"),
            rejected=self.log_probabilities(model, batch),
            chosen_reference=self.idk_reference[batch["index"]],
            rejected_reference=self.forget_reference[batch["index"]],
            beta=self.settings.beta,
        )


def draw_idk_answers(forget: RecordSet, answers: tuple[str, ...], seed: int) -> RecordSet:
    """Pair each question of the forget set with a random one of the answers.

    Raises:
        UsageError: the forget set is plain text.
    """
    if forget.kind == "text":
        raise UsageError(
            f"forget set {forget.name} is plain text, which asks nothing that 'I don't know' could answer; "
            "give questions with answers, prompts with completions or messages"
        )
    rng = random.Random(seed)
    records = tuple(dataclasses.replace(record, answer=rng.choice(answers)) for record in forget)
    return RecordSet(f"idk for {forget.name}", forget.kind, records)


def idk_dpo(
    chosen: PerSequence, rejected: PerSequence, chosen_reference: PerSequence, rejected_reference: PerSequence,
    beta: float,
) -> Loss:  # fmt: skip
    """(2/β) · mean of −log σ(β · (log(π/π_ref)(chosen) − log(π/π_ref)(rejected))).

    Rafailov et al. 2023, eq. 7, with "I don't know" chosen over the true answer as in Maini et al. 2024. The factor
    2/β is NPO's (Zhang et al. 2024, which compares both), so that γ and α weigh the same in all methods.
    """
    from torch.nn.functional import logsigmoid

    advantage = (chosen - chosen_reference) - (rejected - rejected_reference)
    return -2 / beta * logsigmoid(beta * advantage).mean()


METHODS["idk-dpo"] = Method(
    "IdkDPO", IdkDPOSettings, objective=IdkDPO,
    source=(
        "Rafailov et al. 2023, Direct Preference Optimization, eq. 7; Maini et al. 2024, TOFU, Preference Optimization"
    ),
    summary='prefer "I don\'t know" to the true answer',
)  # fmt: skip
