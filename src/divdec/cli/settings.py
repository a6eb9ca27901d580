"""Options of the verbs that answer with a bundle.

They stand apart from the verbs because jsonargparse imports all that a module imports for type checkers, and help
must not load torch.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from divdec.errors import UsageError

SWEEP = ("linear:0.25,0.5,0.75,1,1.25,1.5,1.75,2,2.5,3,4", "rank:1,2,5,10,20,50,100,200,500")
"""What `divdec calibrate` chooses from by default, mild before strong."""


@dataclasses.dataclass(frozen=True)
class LoadSettings:
    """Options of every verb that answers with a bundle."""

    bundle: str
    """The bundle: a folder or hub id."""
    steering: str | None = None
    """Another rule than the bundle's: linear:ALPHA, rank:K or rank:K:soft."""
    allow_negative: bool = False
    """Accept a negative alpha, which steers towards the forget set."""
    no_verify: bool = False
    """Load although a weight file has changed since the bundle was written."""
    device: str = "auto"
    """Where the models run: auto, cpu, cuda, cuda:1, mps; 'spread' places them over all GPUs."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights; 'auto' takes what the checkpoints hold."""
    place: tuple[str, ...] = ()
    """Run the experts while the target runs: experts=cuda:1 (or retain_auxiliary=cuda:1 forget_auxiliary=cuda:2) on
    other GPUs, experts=thread on a CPU."""


@dataclasses.dataclass(frozen=True)
class GenerateSettings(LoadSettings):
    """Options of `divdec generate`."""

    prompt: tuple[str, ...] = ()
    """One or more prompts; without --prompt and --file they are read from standard input, one a line."""
    file: str | None = None
    """Prompts from a file: .txt (one a line), or .jsonl with question, prompt or messages."""
    chat: bool = False
    """Lay prompts out as a user's turn with the tokenizer's chat template."""
    system_prompt: str | None = None
    """System turn before every conversation (with --chat)."""
    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    temperature: float = 0.0
    """0 answers greedily; above 0 samples."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that hold this much probability."""
    top_k: int = 0
    """Sample among so many of the likeliest tokens; 0 means all."""
    seed: int = 0
    """Seed of the samples."""
    batch_size: int = 16
    """Prompts answered at once."""
    speculative: str | None = None
    """Draft with q and let the target judge several tokens at once: 'auto', or how many tokens to draft. The answers
    follow the same distribution, and are the same where they are greedy."""
    statistics: bool = False
    """Say on standard error what speculation did (with --speculative)."""
    logprobs: bool = False
    """Add each token's log-probability under the steered model, before temperature (implies --json)."""
    json: bool = False
    """Print one JSON object a prompt."""
    output: str | None = None
    """Write to this file instead of standard output."""
    overwrite: bool = False
    """Replace the output file of an earlier run."""

    def __post_init__(self) -> None:
        _check_sampling(self.temperature, self.max_new_tokens, self.seed)
        _check_speculation(self.speculative, self.statistics)
        if not 0 < self.top_p <= 1 or self.top_k < 0:
            raise UsageError(f"top-p is {self.top_p:g}, top-k {self.top_k}; accepted: 0 < top-p ≤ 1, top-k ≥ 0")
        if self.batch_size < 1:
            raise UsageError(f"batch-size is {self.batch_size}; accepted: at least 1")
        if self.prompt and self.file:
            raise UsageError("give --prompt or --file, not both")


@dataclasses.dataclass(frozen=True)
class ChatSettings(LoadSettings):
    """Options of `divdec chat`."""

    system_prompt: str | None = None
    """System turn before the conversation."""
    single_turn: bool | None = None
    """Ask every line by itself, without what was said before; true or false. By default as the bundle says, which
    knows whether its models have learned single questions alone."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    temperature: float = 0.0
    """0 answers greedily; above 0 samples."""
    seed: int = 0
    """Seed of the samples."""
    speculative: str | None = None
    """Draft with q and let the target judge several tokens at once: 'auto', or how many tokens to draft. The answers
    follow the same distribution, and are the same where they are greedy."""
    statistics: bool = False
    """Say on standard error what speculation did (with --speculative)."""

    def __post_init__(self) -> None:
        _check_sampling(self.temperature, self.max_new_tokens, self.seed)
        _check_speculation(self.speculative, self.statistics)


@dataclasses.dataclass(frozen=True)
class ServeSettings(LoadSettings):
    """Options of `divdec serve`."""

    name: str | None = None
    """What clients call the bundle; its folder's name by default."""
    also: tuple[str, ...] = ()
    """Further bundles, as name=path; clients choose by name."""
    registry: str | None = None
    """Folder of a registry of takedown requests (`divdec forget`), which every bundle follows while it changes."""
    engine: str = "embedded"
    """What answers: embedded (this process), or vllm."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is open to other machines."""
    port: int = 8000
    """Port to listen on; 0 takes any that is free."""
    api_key: str | None = None
    """What clients must send as a bearer token, at least 16 characters; better in the environment, as DIVDEC_API_KEY,
    which other users of the machine do not see."""
    ssl_certfile: str | None = None
    """Certificate for HTTPS (PEM)."""
    ssl_keyfile: str | None = None
    """Its private key (PEM, without a password)."""
    rows: int = 32
    """Answers that are made at the same time at most."""
    queue: int = 128
    """Answers that wait for their turn at most; further requests are refused (429)."""
    max_tokens: int = 4096
    """Longest answer that a client may ask for, in tokens."""
    max_seconds: float = 300.0
    """Longest time for a request, the wait in the queue included."""
    max_body_bytes: int = 2097152
    """Largest body of a request."""
    grace: float = 30.0
    """Seconds that running answers have to end when the server is stopped."""
    speculative: str | None = None
    """Speculate while a single request runs: 'auto', or how many tokens to draft."""
    log_prompts: bool = False
    """Write prompts into the log."""
    vllm_options: str = ""
    """Options of vLLM's own server in one text, such as --vllm-options='--tensor-parallel-size 2'."""

    def __post_init__(self) -> None:
        _check_speculation(self.speculative, False)
        if self.engine not in ("embedded", "vllm"):
            raise UsageError(f"engine is {self.engine!r}; accepted: embedded, vllm")
        if not 0 <= self.port < 2**16:
            raise UsageError(f"port is {self.port}; accepted: 0 to {2**16 - 1}")
        for name in ("rows", "queue", "max_tokens", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name.replace('_', '-')} is {getattr(self, name)}; accepted: at least 1")
        if not 0 < self.max_seconds < 1e6 or not 0 <= self.grace < 1e6:
            raise UsageError("max-seconds must be above 0, grace at least 0 seconds, both below a million")


@dataclasses.dataclass(frozen=True)
class CalibrateSettings(LoadSettings):
    """Options of `divdec calibrate`."""

    forget: str = dataclasses.field(kw_only=True)
    """Forget set: a .jsonl, .json, .txt file, a folder, or a Hugging Face dataset."""
    retain: str = dataclasses.field(kw_only=True)
    """Retain set, likewise."""
    holdout: str = dataclasses.field(kw_only=True)
    """Records like the forget set's that none of the three models has seen."""
    sweep: tuple[str, ...] = ()
    """Settings to choose from, such as 'linear:1,1.5,2' and 'rank:5,20'. By default twenty, and further ones where the
    best of them is the strongest or mildest."""
    max_retain_drop: str = "2%"
    """How much of the retain set's probability may be lost: a percentage, or a share such as 0.02."""
    system_prompt: str | None = None
    """System turn before every conversation."""
    max_length: int = 1024
    """Longest sequence in tokens."""
    limit: int | None = None
    """Take only the first so many records of each set."""
    batch_size: int = 32
    """Sequences in a pass."""
    write: bool = False
    """Write the choice into the bundle, unless what was measured says that it does not forget; exit code 3 then."""
    force: bool = False
    """Write it even then; the model card says so."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UsageError(f"batch-size is {self.batch_size}; accepted: at least 1")


def _check_sampling(temperature: float, max_new_tokens: int, seed: int) -> None:
    if not temperature >= 0:
        raise UsageError(f"temperature is {temperature:g}; accepted: 0 (greedy) or above")
    if max_new_tokens < 1:
        raise UsageError(f"max-new-tokens is {max_new_tokens}; accepted: at least 1")
    if not 0 <= seed < 2**32:
        raise UsageError(f"seed is {seed}; accepted: 0 to {2**32 - 1}")


def _check_speculation(speculative: str | None, statistics: bool) -> None:
    if speculative not in (None, "auto") and not (speculative.isdecimal() and int(speculative) > 0):
        raise UsageError(f"speculative is {speculative!r}; accepted: 'auto', or a number of tokens of at least 1")
    if statistics and speculative is None:
        raise UsageError("--statistics are speculation's: give --speculative auto")
