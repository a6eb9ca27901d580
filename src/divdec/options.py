"""Options that several commands share, as dataclasses that settings nest.

On the command line and in configuration files their fields are flat: `--epochs 3`, not `--optimization.epochs 3`.
Common options are in the default help group, rare ones under "Less common options".
"""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from divdec.errors import UsageError
from divdec.runs import check_output_file

MAX_NUMBER = 1e35  # of rates, epochs and temperatures: beyond it a step of float32 overflows
DECODING = Parameter(group=Group("Decoding", sort_key=2))
TRAINING = Parameter(group=Group("Training", sort_key=3))
LEARNING_RATE = Parameter(name="lr", show_choices=False)
LOADING = Parameter(group=Group("Model loading", sort_key=4))
OUTPUT = Parameter(group=Group("Output", sort_key=5))
RARE = Parameter(group=Group("Less common options", sort_key=10))
Flag = Annotated[bool, RARE]


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelLoading:
    """Where models run, and in which precision."""

    device: Annotated[str, LOADING] = "auto"
    """Where the models run: auto, cpu, cuda, cuda:1, mps; 'spread' distributes them over all GPUs."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], LOADING] = "auto"
    """Dtype of the weights. 'auto' uses the checkpoints' dtype, or float32 on a CPU without bfloat16 instructions,
    which reads prompts several times as fast there but needs twice the memory."""
    no_verify: Flag = False
    """Do not compare weight files with the digests in the bundle."""


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SteeringChoice:
    """Override of the bundle's rule."""

    steering: str | None = None
    """Use this rule instead of the bundle's: linear:ALPHA or rank:K. With linear:ALPHA:MARGIN or rank:K:MARGIN
    it lowers only tokens whose log-probability under p exceeds that under q by MARGIN. linear:ALPHA:MARGIN:full also
    moves all others, where one of these is the target's first choice."""


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """How an answer is decoded."""

    max_new_tokens: Annotated[int, DECODING] = 256
    """Maximum length of an answer in tokens."""
    temperature: Annotated[float, DECODING] = 0.0
    """0 decodes greedily; above 0 samples."""
    stop: Annotated[tuple[str, ...], DECODING] = ()
    """Stop before any of these strings."""
    seed: Annotated[int, DECODING] = 0
    """Seed of the samples."""

    def __post_init__(self) -> None:
        check_at_least("max_new_tokens", self.max_new_tokens, 1)
        if not 0 <= self.temperature <= MAX_NUMBER:
            raise UsageError(f"--temperature is {self.temperature:g}; accepted: 0 (greedy) or above")
        check_seed(self.seed)
        if "" in self.stop:
            raise UsageError("--stop is empty; accepted: a text before which the answer ends")


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling(Decoding):
    """How tokens are sampled."""

    top_p: Annotated[float, DECODING] = 1.0
    """Sample from the smallest set of most likely tokens whose total probability is at least this value."""
    top_k: Annotated[int, DECODING] = 0
    """Sample from the k most likely tokens. 0 means all tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.top_p <= 1 or self.top_k < 0:
            raise UsageError(f"--top-p is {self.top_p:g}, --top-k {self.top_k}; accepted: 0 < top-p ≤ 1, top-k ≥ 0")
        if self.temperature == 0 and (self.top_p, self.top_k) != (1.0, 0):
            raise UsageError("--top-p and --top-k choose among samples: give --temperature above 0")


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeDecoding:
    """Speculative decoding."""

    speculative: Annotated[str | None, DECODING] = None
    """Draft with q and verify several tokens in one pass of the target: 'auto', or the number of tokens to draft.
    Several sequences that decode together have no drafts. Greedy answers do not change, and sampled answers keep their
    distribution."""

    def __post_init__(self) -> None:
        if self.speculative not in (None, "auto") and not (self.speculative.isdecimal() and int(self.speculative) > 0):
            raise UsageError(f"--speculative is {self.speculative!r}; accepted: 'auto', or a number of at least 1")

    @property
    def draft_length(self) -> int | bool | None:
        """Tokens to draft, as `generate(speculative=…)` takes it; True chooses, None does not speculate."""
        if self.speculative is None:
            return None
        return True if self.speculative == "auto" else int(self.speculative)


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimization:
    """How weights are trained."""

    epochs: Annotated[float, TRAINING] = 10.0
    """Number of epochs."""
    batch_size: Annotated[int, TRAINING] = 16
    """Sequences per step and process."""
    gradient_accumulation: Annotated[int, TRAINING] = 1
    """Steps whose gradients are added before the weights are updated."""
    precision: Annotated[Literal["auto", "float32", "bfloat16"], TRAINING] = "auto"
    """Precision of training. 'auto' uses bfloat16 if the GPU has instructions for it, or the CPU if the model has 30
    million parameters or more; otherwise float32."""
    seed: Annotated[int, TRAINING] = 0
    """Seed of the data order and of the adapters' initial weights."""
    lora_rank: Annotated[int, RARE] = 0
    """Train low-rank adapters of this rank and merge them; 0 trains every weight."""
    gradient_checkpointing: Flag = False
    """Recompute activations in the backward pass. Saves memory and takes about a third more time."""
    loggers: Annotated[tuple[str, ...], RARE] = ()
    """Experiment trackers to report to, such as wandb, or tensorboard if TENSORBOARD_LOGGING_DIR is set: its default
    folder is deleted after training."""

    def __post_init__(self) -> None:
        check_positive("epochs", self.epochs)
        for name, least in (("batch_size", 1), ("gradient_accumulation", 1), ("lora_rank", 0)):
            check_at_least(name, getattr(self, name), least)
        check_seed(self.seed)


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Printing:
    """Format of what is printed."""

    json: Annotated[bool, OUTPUT] = False
    """Print JSON, and everything else to standard error."""


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Overwriting:
    """Whether an earlier result is replaced."""

    overwrite: Annotated[bool, OUTPUT] = False
    """Overwrite the existing output."""


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputFile(Overwriting):
    """A file to write."""

    output: Annotated[str | None, OUTPUT] = None
    """Write to this file instead of standard output."""

    def prepare(self) -> Path | None:
        """Return the file's path, in a folder that exists.

        Raises:
            UsageError: the file exists and `--overwrite` is not given, or it cannot be written.
        """
        if self.output is None:
            return None
        path = Path(self.output).expanduser()
        check_output_file(path, self.overwrite)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputFolder(Overwriting):
    """A folder to write."""

    output: str
    """Folder for the results."""


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class BundleArgument:
    """A bundle as the first argument; the last base class, so that its field comes first."""

    bundle: str = dataclasses.field(kw_only=False)
    """The bundle: a folder or hub id."""


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ForgetData:
    """The forget set, and how records are laid out as tokens."""

    forget: str
    """Forget set: a .jsonl, .json, .txt file, a folder, or a Hugging Face dataset 'org/name:config:split'."""
    max_length: int = 1024
    """Maximum sequence length in tokens. Longer answers are truncated, longer texts are split."""
    system_prompt: str | None = None
    """System prompt of every conversation."""
    chat_template_kwargs: Annotated[str | None, RARE] = None
    """Variables of the chat template as a JSON object, such as '{"enable_thinking": false}'."""

    def __post_init__(self) -> None:
        check_at_least("max_length", self.max_length, 2)
        read_template_kwargs(self.chat_template_kwargs)


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingData(ForgetData):
    """The forget set and the retain set."""

    retain: str
    """Retain set, in the same formats."""


def read_template_kwargs(text: str | None) -> dict[str, Any]:
    """Read the value of `--chat-template-kwargs`."""
    return read_json_object("chat_template_kwargs", text, '{"enable_thinking": false}')


def read_json_object(name: str, text: str | None, example: str) -> dict[str, Any]:
    """Read the value of an option; an option that is not given is an empty object.

    Raises:
        UsageError: it is not a JSON object.
    """
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"{option(name)} is {text!r}; accepted: a JSON object such as '{example}'")
    return value


def check_positive(name: str, value: float) -> None:
    """Refuse a number that is not above 0, or so large that a step would overflow."""
    if not 0 < value <= MAX_NUMBER:
        raise UsageError(f"{option(name)} is {value:g}; accepted: a number above 0, at most {MAX_NUMBER:g}")


def check_at_least(name: str, value: int | None, least: int) -> None:
    """Refuse a number below `least`; None is accepted."""
    if value is not None and value < least:
        raise UsageError(f"{option(name)} is {value}; accepted: a whole number of at least {least}")


def check_seed(seed: int) -> None:
    """Refuse a seed that numpy does not accept."""
    if not 0 <= seed < 2**32:
        raise UsageError(f"--seed is {seed}; accepted: 0 to {2**32 - 1}")


def option(name: str) -> str:
    """Spell a field as it is typed on the command line."""
    return "--lr" if name == "learning_rate" else f"--{name.replace('_', '-')}"
