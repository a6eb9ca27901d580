"""Options of `divdec eval`. It does not import torch, so that `--help` starts fast."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from divdec.errors import UsageError
from divdec.options import (
    ModelLoading,
    OutputFolder,
    SteeringChoice,
    check_at_least,
    option,
    read_template_kwargs,
)


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
    """Folder with the benchmark's files, named as in the Hugging Face dataset. For leak: the file of questions."""
    split: str = _of("tofu", default="forget10")
    """tofu: the forget split, forget01, forget05 or forget10."""
    holdout: str | None = _of("tofu", "muse", default=None)
    """tofu, muse: questions (TOFU) or texts (MUSE) that no model has seen; a JSON or JSONL file."""
    retain_results: str | None = _of("tofu", "muse", default=None)
    """tofu, muse: result folder of the retrained model, from divdec or OpenUnlearning. It is the reference for forget
    quality and privacy leakage."""
    sweep: tuple[str, ...] = ()
    """Evaluate several settings of one bundle, such as linear:0.5,1,1.5 rank:1,5,20."""
    fluency: str | None = _of("tofu", default=None)
    """tofu: text classifier for fluency, whose class 0 means fluent: a folder or hub id. 'none' skips fluency. By
    default OpenUnlearning's (madhurjindal/autonlp-Gibberish-Detector-492513457), if it can be loaded."""
    reference: str | None = _of("tofu", default=None)
    """tofu: reference model for the reference attack, with the same tokenizer: a folder or hub id."""
    sequence: Literal["none", "scal", "sust"] = _of("muse", default="none")
    """muse: treat the models, in the given order, as steps with growing forget sets (scal) or with successive requests
    (sust)."""
    template: Literal["chat", "plain"] = _of("tofu", "leak", default="chat")
    """tofu, leak: layout of questions, the tokenizer's chat template, or 'Question: … Answer: …'."""
    system_prompt: str | None = _of("tofu", "leak", default="You are a helpful assistant.")
    """tofu, leak: system prompt before every question, if the chat template has a system role. The default is
    OpenUnlearning's, with which its published models were trained. Pass '' for models trained without a system
    prompt."""
    chat_template_kwargs: str | None = _of("tofu", "leak", default=None)
    """tofu, leak: variables of the chat template as a JSON object, such as '{"enable_thinking": false}'."""
    date: str | None = _of("tofu", "leak", default="10 Apr 2025")
    """tofu, leak: date for chat templates that contain a date."""
    max_length: int = 512
    """Maximum prompt length of the plain layout, in tokens."""
    attack_prompts: str = _of("leak", default="templates")
    """leak: source of the attack prompts: 'templates', a JSONL file, 'endpoint', or 'none'."""
    attacks: int = _of("leak", default=100)
    """leak: number of attack prompts per question."""
    samples: int = _of("leak", default=0)
    """leak: number of sampled answers per question. 0 skips leak@k-sample."""
    temperature: float = _of("leak", default=1.0)
    """leak: temperature of the samples."""
    top_p: float = _of("leak", default=1.0)
    """leak: sample from the smallest set of most likely tokens whose total probability is at least this value."""
    judge: str = _of("leak", default="string")
    """leak: 'string' (key phrase or ROUGE), 'endpoint', or an NLI checkpoint."""
    endpoint: str | None = _of("leak", default=None)
    """leak: base URL of an OpenAI-compatible server, such as http://localhost:8000/v1."""
    endpoint_model: str | None = _of("leak", default=None)
    """leak: name of the model at the endpoint."""
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
        if read_template_kwargs(self.chat_template_kwargs) and self.template != "chat":
            raise UsageError("--chat-template-kwargs are for --template chat: leave out one of them")
        if self.sweep and self.steering:
            raise UsageError("give --steering or --sweep, not both")
        if self.sequence != "none" and (len(self.models) < 2 or self.sweep):
            raise UsageError("--sequence takes two models or more, one a step, and no --sweep")
        if self.sweep and len(self.models) > 1:
            raise UsageError("--sweep takes one bundle")
