"""Options of `divdec eval` and `divdec calibrate`. It does not import torch, so that `--help` starts fast."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from divdec.errors import UsageError
from divdec.options import (
    BundleArgument,
    ModelLoading,
    OutputFolder,
    SteeringChoice,
    TrainingData,
    check_at_least,
    check_positive,
    check_seed,
    read_template_kwargs,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalArguments:
    """Models to measure."""

    models: tuple[str, ...] = dataclasses.field(kw_only=False)
    """Bundles or plain checkpoints: folders or hub ids, one or more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSettings(SteeringChoice, ModelLoading, OutputFolder, EvalArguments):
    """Options of every suite: what is measured, and where the results go."""

    suite: ClassVar[str]
    files: ClassVar[tuple[str, ...]] = ()
    """Options that name files or checkpoints on which the figures depend, besides models and data."""

    data: str
    """Folder with the benchmark's files, named as in the Hugging Face dataset. For leak: the file of questions."""
    sweep: tuple[str, ...] = ()
    """Evaluate several settings of one bundle, such as linear:0.5,1,1.5 rank:1,5,20."""
    max_length: int = 512
    """Maximum prompt length of the plain layout, in tokens."""
    limit: int | None = None
    """Use only the first N items of each set."""
    batch_size: int = 32
    """Sequences per forward pass."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_length", "limit"):
            check_at_least(name, getattr(self, name), 1)
        if self.sweep and self.steering:
            raise UsageError("give --steering or --sweep, not both")
        if self.sweep and len(self.models) > 1:
            raise UsageError("--sweep takes one bundle")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionSettings(EvalSettings):
    """Layout of questions."""

    template: Literal["chat", "plain"] = "chat"
    """Layout of questions, the tokenizer's chat template, or 'Question: … Answer: …'."""
    system_prompt: str | None = "You are a helpful assistant."
    """System prompt before every question, if the chat template has a system role. The default is OpenUnlearning's,
    with which its published models were trained. Pass '' for models trained without a system prompt."""
    chat_template_kwargs: str | None = None
    """Variables of the chat template as a JSON object, such as '{"enable_thinking": false}'."""
    date: str | None = "10 Apr 2025"
    """Date for chat templates that contain a date."""

    def __post_init__(self) -> None:
        if read_template_kwargs(self.chat_template_kwargs) and self.template != "chat":
            raise UsageError("--chat-template-kwargs are for --template chat: leave out one of them")
        super().__post_init__()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeakSettings(QuestionSettings):
    """Options of `divdec eval leak`."""

    suite: ClassVar[str] = "leak"
    files: ClassVar[tuple[str, ...]] = ("attack_prompts", "judge")

    attack_prompts: str = "templates"
    """Source of the attack prompts: 'templates', a JSONL file, or 'none'."""
    attacks: int = 100
    """Number of attack prompts per question."""
    samples: int = 0
    """Number of sampled answers per question. 0 skips leak@k-sample."""
    temperature: float = 1.0
    """Temperature of the samples."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens whose total probability is at least this value."""
    judge: str = "string"
    """'string' (key phrase or ROUGE), 'endpoint', or an NLI checkpoint."""
    endpoint: str | None = None
    """Base URL of an OpenAI-compatible server, such as http://localhost:8000/v1."""
    endpoint_model: str | None = None
    """Name of the model at the endpoint."""
    api_key_env: str | None = None
    """Environment variable that holds the endpoint's API key, such as OPENAI_API_KEY; none by default."""
    seed: int = 0
    """Seed of samples and attack prompts."""

    def __post_init__(self) -> None:
        check_at_least("attacks", self.attacks, 1)
        check_at_least("samples", self.samples, 0)
        check_positive("temperature", self.temperature)
        check_seed(self.seed)
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p is {self.top_p:g}; accepted: above 0, at most 1")
        super().__post_init__()


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationSettings(TrainingData, BundleArgument):
    """Options of `divdec calibrate`."""

    holdout: str | None = None
    """With --reference q: records like those of the forget set that none of the three models has seen."""
    neutral: str | None = None
    """Text that steering should not change; required with --reference none."""
    reference: Literal["q", "none"] = "q"
    """q: choose the setting under which membership attacks succeed as often as on q, for pairs of
    `--recipe full-retain`. none: choose by answers, probability and perplexity, as `divdec train` does."""
    sweep: tuple[str, ...] = ()
    """Settings to choose from, such as 'linear:1,1.5,2' and 'rank:5,20'. The default is twenty settings, or those of
    `divdec train` with --reference none."""
    max_retain_drop: float | None = None
    """Maximum relative loss of retain probability, such as 0.02. The default is 0.02, or 0.05 with --reference none."""
    write: bool = False
    """Write the chosen setting into the bundle if the measurement shows that it forgets."""
    limit: int | None = None
    """Use only the first N records of each set."""
    batch_size: int = 32
    """Sequences per forward pass."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch_size", "limit"):
            check_at_least(name, getattr(self, name), 1)
        if self.reference == "q" and self.holdout is None:
            raise UsageError(
                "--holdout is required: records like those of the forget set that no model has seen; --reference none "
                "needs --neutral instead"
            )
        if self.reference == "none" and self.neutral is None:
            raise UsageError("--neutral is required with --reference none: text that steering should not change")
        if self.reference == "none" and self.holdout is not None:
            raise UsageError("--holdout is for --reference q: leave out one of --holdout and --reference none")
        if not 0 <= self.retain_drop() < 1:
            raise UsageError(
                f"--max-retain-drop is {self.max_retain_drop:g}; accepted: from 0 to below 1, such as 0.02"
            )

    def sets(self) -> dict[str, str]:
        """Return the sources of the given sets by name."""
        sources = {name: getattr(self, name) for name in ("forget", "retain", "holdout", "neutral")}
        return {name: source for name, source in sources.items() if source is not None}

    def retain_drop(self) -> float:
        """Return the largest relative loss of retain probability that is accepted."""
        default = 0.02 if self.reference == "q" else 0.05
        return default if self.max_retain_drop is None else self.max_retain_drop
