"""Options of `divdec eval`. It knows nothing of torch, so that `--help` is instant."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from divdec.errors import UsageError
from divdec.options import ModelLoading, OutputFolder, SteeringChoice, check_at_least, option


def _of(*suites: str, default: Any) -> Any:
    """An option of some suites."""
    return dataclasses.field(default=default, metadata={"suites": suites})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalArguments:
    """What is measured."""

    suite: Literal["tofu", "muse", "leak"] = dataclasses.field(kw_only=False)
    """tofu, muse or leak."""
    models: tuple[str, ...] = dataclasses.field(kw_only=False)
    """Bundles or plain checkpoints: folders or hub ids, one or more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSettings(SteeringChoice, ModelLoading, OutputFolder, EvalArguments):
    """What is measured, on what, and where the results go."""

    data: str
    """Folder with the suite's files, as the Hugging Face dataset names them; for leak the file of questions."""
    split: str = _of("tofu", default="forget10")
    """tofu: the forget split, forget01, forget05 or forget10."""
    holdout: str | None = _of("tofu", "muse", default=None)
    """tofu, muse: questions (TOFU) or texts (MUSE) that no model has seen; a JSON or JSONL file."""
    retain_results: str | None = _of("tofu", "muse", default=None)
    """tofu, muse: results of the retrained model, ours or OpenUnlearning's: the reference of forget quality and
    leakage."""
    sweep: tuple[str, ...] = ()
    """Many settings of one bundle, such as linear:0.5,1,1.5 rank:1,5,20 (rank with the soft fill)."""
    fluency: str = _of("tofu", default="madhurjindal/autonlp-Gibberish-Detector-492513457")
    """tofu: text classifier whose class 0 means fluent: a folder or hub id; 'none' leaves fluency out."""
    reference: str | None = _of("tofu", default=None)
    """tofu: a model for the reference attack: a folder or hub id, of the same tokenizer."""
    sequence: Literal["none", "scal", "sust"] = _of("muse", default="none")
    """muse: the models are steps, in this order: of growing forget sets (scal), or of successive requests (sust)."""
    template: Literal["chat", "plain"] = _of("tofu", "leak", default="chat")
    """tofu, leak: layout of questions, the tokenizer's chat template, or 'Question: … Answer: …'."""
    system_prompt: str | None = _of("tofu", "leak", default="You are a helpful assistant.")
    """tofu, leak: system turn before every question where the chat template has a system role; by default that of
    OpenUnlearning, which its published models have learned. Give '' for models that have learned none."""
    date: str | None = _of("tofu", "leak", default="10 Apr 2025")
    """tofu, leak: date for chat templates that print one."""
    max_length: int = 512
    """Longest prompt of the plain layout, in tokens."""
    attack_prompts: str = _of("leak", default="templates")
    """leak: where attack prompts come from: 'templates', a JSONL file, 'endpoint', or 'none'."""
    attacks: int = _of("leak", default=100)
    """leak: attack prompts a question."""
    samples: int = _of("leak", default=0)
    """leak: sampled answers a question; 0 leaves leak@k-sample out."""
    temperature: float = _of("leak", default=1.0)
    """leak: temperature of the samples."""
    top_p: float = _of("leak", default=1.0)
    """leak: sample among the likeliest tokens that hold this much probability."""
    judge: str = _of("leak", default="string")
    """leak: 'string' (key phrase or ROUGE), 'endpoint', or an NLI checkpoint."""
    endpoint: str | None = _of("leak", default=None)
    """leak: base URL of an OpenAI-compatible server, such as http://localhost:8000/v1."""
    endpoint_model: str | None = _of("leak", default=None)
    """leak: the model that the endpoint is asked for."""
    api_key_env: str | None = _of("leak", default=None)
    """leak: environment variable that holds the endpoint's API key, such as OPENAI_API_KEY; none by default."""
    seed: int = _of("leak", default=0)
    """leak: seed of samples and attack prompts."""
    limit: int | None = None
    """Use only the first N items of each set."""
    batch_size: int = 32
    """Sequences per forward pass."""
    openunlearning: bool = _of("tofu", "muse", default=False)
    """tofu, muse: also write TOFU_EVAL.json and TOFU_SUMMARY.json (or MUSE_…), as OpenUnlearning does."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            suites = field.metadata.get("suites", (self.suite,))
            if self.suite not in suites and getattr(self, field.name) != field.default:
                raise UsageError(f"{option(field.name)} is an option of {' and '.join(suites)}, not of {self.suite}")
        for name in ("batch_size", "max_length", "attacks"):
            check_at_least(name, getattr(self, name), 1)
        if self.limit is not None:
            check_at_least("limit", self.limit, 1)
        if self.sweep and self.steering:
            raise UsageError("give --steering or --sweep, not both")
        if self.sequence != "none" and (len(self.models) < 2 or self.sweep):
            raise UsageError("--sequence takes two models or more, one a step, and no --sweep")
        if self.sweep and len(self.models) > 1:
            raise UsageError("--sweep takes one bundle")
