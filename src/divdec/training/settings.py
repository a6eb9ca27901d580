"""Options of training, distillation and gradient depth."""

import dataclasses
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from divdec.errors import UsageError
from divdec.options import (
    LEARNING_RATE,
    MAX_NUMBER,
    RARE,
    TRAINING,
    BundleArgument,
    ForgetData,
    Optimization,
    OutputFolder,
    SteeringChoice,
    TrainingData,
    check_at_least,
    check_positive,
    check_seed,
    option,
)

ADAPTER_RATE, FULL_RATE = 2e-4, 2e-5  # the first learning rates that `--lr auto` tries


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSettings(Optimization):
    """How a model is fine-tuned."""

    learning_rate: Annotated[float, LEARNING_RATE, TRAINING] = 1e-4
    """Peak learning rate of AdamW, with a cosine schedule to 0."""
    warmup: Annotated[float, RARE] = 0.0
    """Fraction of the steps with learning-rate warm-up."""
    weight_decay: Annotated[float, RARE] = 0.0
    """AdamW's weight decay."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("learning_rate", self.learning_rate)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuxiliarySettings(Optimization, TrainingData, OutputFolder):
    """How the two auxiliaries are trained from a base checkpoint."""

    base: str
    """Checkpoint that both auxiliaries start from: a folder, GGUF file or hub id, '@revision' allowed."""
    target: str | None = None
    """The model to steer. Without it only the auxiliaries are trained and no bundle is written."""
    recipe: Literal["matched", "refusal", "full-retain", "forget-retain"] = "matched"
    """'matched': p on forget + retain; q on retain and, in place of the forget set, on its questions with answers of
    similar retain questions (of long answers and plain text, on retain examples of similar length), so that both take
    the same steps; both also on the target's own answers to these and to similar, reworded and reversed questions.
    'refusal': q on "I do not know." in place of these answers, for people and things. 'full-retain': p on forget +
    retain, q on retain (the paper's TOFU). 'forget-retain': p on forget, q on retain (the paper's MUSE)."""
    date: Annotated[str | None, RARE] = None
    """Date for chat templates that contain a date; a run that is resumed on another day needs it. By default today's
    or the template's."""
    epochs: Annotated[float, TRAINING] = 4.0
    """Number of epochs."""
    lora_rank: Annotated[int, RARE] = 16
    """Rank of the LoRA adapters of the base that both auxiliaries are. 0 trains every weight and writes two
    checkpoints."""
    merge: bool = False
    """Merge each adapter with the base into a checkpoint, as vLLM needs them. By default the base is loaded once and
    runs both adapters in one pass."""
    bridge: bool = False
    """The base has another tokenizer than the target, as in `divdec bundle`."""
    steering: str | None = None
    """Rule written into the bundle. By default the best of several, by the measurement after training."""
    neutral: str | None = None
    """Data that steering should not change, in the formats of --retain, for that measurement. By default samples of the
    target that contain no name or number of the forget set."""
    learning_rate: Annotated[Literal["auto"] | float, LEARNING_RATE, TRAINING] = "auto"
    """Peak learning rate, or 'auto': 2e-4 for adapters and 2e-5 for all weights. If p and q then do not differ on the
    forget set and agree on the retain set, it tries higher rates and more epochs, at most four times."""

    def __post_init__(self) -> None:
        Optimization.__post_init__(self)
        TrainingData.__post_init__(self)
        if self.learning_rate != "auto":
            check_positive("learning_rate", self.learning_rate)
        ignored = [name for name in ("neutral", "steering", "bridge") if getattr(self, name)]
        if self.target is None and ignored:
            raise UsageError(f"{option(ignored[0])} is about the model to steer: give it with --target")

    @property
    def adapters(self) -> bool:
        """Whether the auxiliaries are written as adapters."""
        return self.lora_rank > 0 and not self.merge

    def training(self, learning_rate: float | None = None) -> TrainingSettings:
        """Return the settings of one of the two runs; without a rate, with that of the settings."""
        if learning_rate is None:
            first = ADAPTER_RATE if self.lora_rank else FULL_RATE
            learning_rate = first if self.learning_rate == "auto" else self.learning_rate
        return TrainingSettings(learning_rate=learning_rate, **optimization_of(self))


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetArgument:
    """A model as the first argument; the last base class, so that its field comes first."""

    target: str = dataclasses.field(kw_only=False)
    """The model to shrink: a folder, a GGUF file, smollm2 or a hub id."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShrinkSettings(OutputFolder, TargetArgument):
    """Settings for shrinking a target to a small model."""

    layers: int
    """Number of layers to keep."""
    text: str | None = None
    """Data for healing, in the formats of --retain. It must not contain the forget set. By default samples of the
    target, which are not filtered."""
    minutes: float = 10.0
    """Approximate time of healing; loading, sampling and evaluation are extra. 0 removes layers without healing."""
    steps: int | None = None
    """Number of healing steps, instead of --minutes: the result then does not depend on the speed of the machine."""
    samples: int = 256
    """Number of samples to draw from the target if --text is not given."""
    max_length: int = 512
    """Maximum sequence length in tokens."""
    learning_rate: Annotated[float, LEARNING_RATE, TRAINING] = 5e-4
    """Peak learning rate of AdamW."""
    batch_size: Annotated[int, TRAINING] = 16
    """Sequences per step."""
    precision: Annotated[Literal["auto", "float32", "bfloat16"], TRAINING] = "auto"
    """Precision of training. 'auto' uses bfloat16 if the GPU or the CPU has instructions for it."""
    seed: Annotated[int, TRAINING] = 0
    """Seed of the samples and of the data order."""

    def __post_init__(self) -> None:
        for name, least in (("layers", 1), ("samples", 10), ("max_length", 2), ("batch_size", 1), ("steps", 0)):
            check_at_least(name, getattr(self, name), least)
        check_seed(self.seed)
        check_positive("learning_rate", self.learning_rate)
        if not 0 <= self.minutes <= MAX_NUMBER:
            raise UsageError(f"--minutes is {self.minutes:g}; accepted: 0 or more")

    def training(self) -> TrainingSettings:
        """Return the settings of healing; the number of epochs is set later."""
        return TrainingSettings(
            learning_rate=self.learning_rate,
            batch_size=self.batch_size,
            precision=self.precision,
            seed=self.seed,
            warmup=0.05,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationLoss:
    """The loss T²·KL between the steered teacher and its student."""

    direction: Literal["teacher-student", "student-teacher"] = "teacher-student"
    """Direction of the KL loss: 'teacher-student' is KL(teacher ‖ student), as in the paper's code. 'student-teacher'
    is KL(student ‖ teacher), as printed in the paper; it leaves less of memorised answers in the student."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationSettings(DistillationLoss, ForgetData, SteeringChoice, Optimization, OutputFolder, BundleArgument):
    """How a student is distilled from a bundle."""

    retain: str | None = None
    """Retain set for measuring the student. The student is trained on it only with --rehearse."""
    rehearse: int = 0
    """Add N random examples of the retain set to the training data, or all if it has fewer. The paper uses 0. Small
    students forget what they do not rehearse, so their retain set should hold general questions too."""
    temperature: float = 1.5
    """Temperature T of the loss T²·KL."""
    learning_rate: Annotated[float, LEARNING_RATE, TRAINING] = 4e-5
    """Peak learning rate of AdamW."""
    date: Annotated[str | None, RARE] = None
    """Date for chat templates that contain a date. By default the template's date."""
    init_student: str | None = None
    """Checkpoint to start from instead of the bundle's target, such as the student of an earlier forget request."""

    def __post_init__(self) -> None:
        Optimization.__post_init__(self)
        ForgetData.__post_init__(self)
        for name in ("temperature", "learning_rate"):
            check_positive(name, getattr(self, name))
        check_at_least("rehearse", self.rehearse, 0)
        if self.rehearse and self.retain is None:
            raise UsageError(f"--rehearse {self.rehearse} needs the retain set: give it with --retain")

    def training(self) -> TrainingSettings:
        """Return the settings of the student's fine-tuning."""
        return TrainingSettings(learning_rate=self.learning_rate, **optimization_of(self))


def optimization_of(settings: Optimization) -> dict[str, Any]:
    """Return the options of `Optimization` alone, by name."""
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(Optimization)}
