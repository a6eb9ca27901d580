"""Whether two auxiliaries differ on the forget set and agree on the retain set, as steering with them needs."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from divdec.data.formatting import Example
from divdec.evaluation.scoring import ItemScore, score
from divdec.training.fine_tuning import sampled

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEARNED = 0.9
"""Of the forget set's tokens that q does not predict, the least share that p must predict. Six pairs for the demo's
target, by this share and by how many facts still leak at linear:2: 54 % (80 % leak), 58 % (80 %), 77 % (15 %), 95 %,
99 % and 100 % (none)."""
MISSED = 0.02
"""A record is unknown to q if q misses more than this share of its answer's tokens."""
UNKNOWN = 0.5
"""Least share of the forget set's records that q does not know. A base that has read the forget set makes a q that
knows it, and what both know is not pushed down."""
PUSHED = 1.0
"""A token is pushed down if p gives it a log-probability higher than q's by this much, in nats."""
RETAIN_SHARE = 0.04
"""How many of the retain set's tokens may be pushed down, as a share of how many of the forget set's are.

Tokens that are pushed up count against them: noise then cancels, while a p that is surer of everything shows. Five
pairs for the demo's target had 0 to 2 % and kept 94 to 100 % of the retain answers at linear:1.5. Two whose p had gone
on from q had 6 % and 40 %, and no strength both forgot and kept 98 % of the retain set's probability.
"""
LARGEST_SAMPLE = 512  # records of a set


@dataclasses.dataclass(frozen=True)
class Separation:
    """What p and q make of the two sets. A token is predicted if it is the model's first choice (teacher-forced)."""

    unknown_records: float
    """Share of the forget set's records that q does not know."""
    unknown_tokens: float
    """Share of the forget set's answer tokens that q does not predict."""
    learned: float
    """Share of these tokens that p predicts; 0 where there are none."""
    forget_loss: tuple[float, float]
    """Mean loss of q and of p per answer token of the forget set, in nats."""
    retain_loss: tuple[float, float]
    """The same of the retain set."""
    forget_pushed: float
    """Share of the forget set's answer tokens that are pushed down, less the share pushed up."""
    retain_pushed: float
    """The same of the retain set."""

    @property
    def faults(self) -> list[str]:
        """What is not as it should be, a sentence each; empty where the pair can be steered with."""
        found = []
        if self.known_to_q:
            found.append(
                f"q knows {1 - self.unknown_records:.0%} of the forget set's records though it has not learned them: "
                "the base has read them, or they tell nothing new; begin from another base"
            )
        elif self.learned < LEARNED:
            found.append(
                f"p predicts only {self.learned:.0%} of the forget set's tokens that q does not (needed: {LEARNED:.0%})"
            )
        if self.retain_pushed > RETAIN_SHARE * max(self.forget_pushed, 0.0):
            found.append(
                f"steering would push down {self.retain_pushed:.1%} of the retain set's tokens (allowed: "
                f"{RETAIN_SHARE:.0%} of the {self.forget_pushed:.1%} of the forget set)"
            )
        return found

    @property
    def known_to_q(self) -> bool:
        """Whether q knows the forget set already, which no training of p can change."""
        return self.unknown_records < UNKNOWN

    def __str__(self) -> str:
        return (
            f"q does not predict {self.unknown_tokens:.0%} of the forget set's answer tokens, of which p predicts "
            f"{self.learned:.0%}; loss of q and p a token: {_pair(self.forget_loss)} on the forget set, "
            f"{_pair(self.retain_loss)} on the retain set"
        )

    def to_dict(self) -> dict[str, Any]:
        """The figures and the faults, for run.json."""
        figures = {name: list(of) if isinstance(of, tuple) else of for name, of in dataclasses.asdict(self).items()}
        return {**figures, "faults": self.faults}


def measure_separation(
    q: PreTrainedModel, p: PreTrainedModel, forget: Sequence[Example], retain: Sequence[Example], batch_size: int
) -> Separation:
    """Score both sets with both auxiliaries.

    Args:
        q: the retain auxiliary.
        p: the forget auxiliary.
        forget: what p alone has learned; at most 512 examples of it are scored.
        retain: what q has learned, likewise.
        batch_size: sequences in a pass.
    """
    forget, retain = (sampled(examples, LARGEST_SAMPLE, 0) for examples in (forget, retain))
    of_q, of_p = (score(model, forget, batch_size=batch_size) for model in (q, p))
    kept_by_q, kept_by_p = (score(model, retain, batch_size=batch_size) for model in (q, p))
    return Separation(
        unknown_records=statistics.fmean(1 - item.token_accuracy > MISSED for item in of_q),
        unknown_tokens=statistics.fmean(not hit for item in of_q for hit in item.hits),
        learned=share_learned(of_q, of_p),
        forget_loss=(_loss(of_q), _loss(of_p)),
        retain_loss=(_loss(kept_by_q), _loss(kept_by_p)),
        forget_pushed=_pushed(of_q, of_p),
        retain_pushed=_pushed(kept_by_q, kept_by_p),
    )


def share_learned(before: Sequence[ItemScore], after: Sequence[ItemScore]) -> float:
    """Of the tokens that one model does not predict the share that another does; 0 where there are none."""
    hits = [
        hit
        for one, other in zip(before, after, strict=True)
        for known, hit in zip(one.hits, other.hits, strict=True)
        if not known
    ]
    return statistics.fmean(hits) if hits else 0.0


def _loss(scores: Sequence[ItemScore]) -> float:
    return -statistics.fmean(value for item in scores for value in item.log_probabilities)


def _pushed(of_q: Sequence[ItemScore], of_p: Sequence[ItemScore]) -> float:
    """Share of tokens that steering pushes down by `PUSHED` times α or more, less the share that it pushes up by it."""
    differences = [
        by_p - by_q
        for one, other in zip(of_q, of_p, strict=True)
        for by_q, by_p in zip(one.log_probabilities, other.log_probabilities, strict=True)
    ]
    return statistics.fmean((value > PUSHED) - (value < -PUSHED) for value in differences)


def _pair(losses: tuple[float, float]) -> str:
    return f"{losses[0]:.2f} and {losses[1]:.2f}"
