"""Options of `divdec remote`; apart from the verb, so that its help loads no torch (see `divdec.cli.settings`)."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from divdec.errors import UsageError


@dataclasses.dataclass(frozen=True)
class RemoteVerbSettings:
    """Options of `divdec remote`."""

    endpoint: str
    """What stands before '/completions', such as http://localhost:8000/v1."""
    model: str
    """The model's name there."""
    bundle: str | None = None
    """Experts, tokenizer and rule from a bundle; its target's weights are not loaded."""
    tokenizer: str | None = None
    """Without a bundle: the provider's tokenizer, a folder or hub id."""
    retain: str | None = None
    """Without a bundle: the auxiliary that has not seen the forget set."""
    forget: str | None = None
    """Without a bundle: the auxiliary that has."""
    bridge: bool = False
    """The auxiliaries have another tokenizer than the provider."""
    ngram: str | None = None
    """Without a bundle: folder of an n-gram pair (`divdec ngram`)."""
    registry: str | None = None
    """Without a bundle: folder of a registry of takedown requests (`divdec forget`)."""
    steering: str | None = None
    """The rule: linear:ALPHA or rank:K; the bundle's by default. A registry alone needs none."""
    key_variable: str | None = None
    """Environment variable that holds the API key."""
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
    seed: int = 0
    """Seed of the samples."""
    stop: tuple[str, ...] = ()
    """Texts before which an answer ends."""
    method: Literal["bias", "candidates"] = "bias"
    """'bias' steers with logit_bias; 'candidates' sends none and chooses among the likeliest tokens that are told."""
    bias_entries: int = 300
    """Most entries of logit_bias that the provider accepts."""
    bias_largest: float = 100.0
    """Largest value of an entry."""
    block: int = 1
    """Tokens asked for at once; those are kept for which the steered choice is proved to be the same."""
    tries: int = 4
    """Requests for one token at most until its choice is proved; 1 takes every answer, with its error's bound."""
    concurrency: int = 4
    """Prompts that are answered at the same time."""
    retries: int = 5
    """How often a request is repeated after a timeout, a dropped connection, or status 429 or 5xx."""
    timeout: float = 120.0
    """Longest wait for one answer of the provider, in seconds."""
    extra: str | None = None
    """Further fields of every request, as JSON, such as '{"top_k": 0}' for a server that samples among few."""
    device: str = "auto"
    """Where the auxiliaries run: auto, cpu, cuda, …"""
    json: bool = False
    """Print one JSON object a prompt, with what is proved of each token."""
    output: str | None = None
    """Write to this file instead of standard output; what a stopped run has answered is kept and not asked again."""
    overwrite: bool = False
    """Replace the output file of an earlier run."""

    def __post_init__(self) -> None:
        if (self.bundle is None) == (self.tokenizer is None):
            raise UsageError("give either --bundle, or --tokenizer with experts (--retain and --forget, --ngram, …)")
        if self.bundle is None and self.steering is None and any((self.retain, self.forget, self.ngram)):
            raise UsageError("--steering is required without a bundle: linear:ALPHA or rank:K")
        if self.bundle is not None and any((self.retain, self.forget, self.ngram, self.registry, self.bridge)):
            raise UsageError("a bundle names its experts: leave out --retain, --forget, --ngram, --registry, --bridge")
        if not 0 <= self.temperature < math.inf or self.max_new_tokens < 1 or not 0 <= self.seed < 2**32:
            raise UsageError("accepted: temperature at least 0, max-new-tokens at least 1, seed from 0 to 4294967295")
        if self.concurrency < 1:
            raise UsageError(f"concurrency is {self.concurrency}; accepted: at least 1")
        if self.prompt and self.file:
            raise UsageError("give --prompt or --file, not both")
