"""Loading a bundle over two or three processes that torchrun has started: the target in one, its experts in the others.

Rank 0 holds the target; rank 1 the experts, or of two ranks the first p and the second q. They compare what they have
loaded before anything is answered.
"""

from __future__ import annotations

import atexit
import dataclasses
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.errors import FailedClosed, UsageError
from divdec.experts.neural import logit_width
from divdec.experts.placed import Placement
from divdec.experts.placed_cache import Abilities
from divdec.experts.placed_halves import JoinedPair, OneOfPair
from divdec.experts.placed_process import Worker, abilities_of
from divdec.experts.placed_remote import RemoteExperts
from divdec.experts.placed_wire import Link, Message
from divdec.model.checkpoint import CheckpointReference
from divdec.model.configuration import AUXILIARIES, PARTS, DivergenceConfig
from divdec.model.loading import load_experts, load_part, places_of
from divdec.model.processes import LOADING, Processes
from divdec.runs import settings_hash

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from divdec.experts.protocol import Experts

PROTOCOL = 1
_LOADED: list[RemoteExperts] = []  # at most one, for as long as this process runs


@dataclasses.dataclass(frozen=True)
class Apart:
    """A bundle that is to be loaded over several processes."""

    folder: Path
    config: DivergenceConfig
    placement: Placement
    verify: bool
    local_files_only: bool
    options: dict[str, Any]
    """What `AutoModelForCausalLM.from_pretrained` takes, perhaps by part."""

    def load(self) -> tuple[PreTrainedModel, Experts]:
        """Load the target, and join it with experts that the other processes hold.

        Returns:
            Target and experts, in the process of rank 0; in all others this does not return.

        Raises:
            UsageError: processes are missing, hold another bundle, or cannot load theirs.
            FailedClosed: a process ended while it loaded.
            SystemExit: in a process that holds experts, once it is not needed any longer.
        """
        if self.config.retain_auxiliary is None and self.config.ngram is None:
            raise UsageError("a registry of takedown requests runs with the target; there are no experts to place")
        if _LOADED:
            raise UsageError("other processes hold the experts of a model already; start anew for another one")
        processes = Processes.joined(self.placement)
        try:
            if processes.rank:
                self._serve(processes)
            target, experts = self._join(processes)
        except BaseException:
            processes.leave()
            raise

        _LOADED.append(experts)

        def end() -> None:
            experts.close()
            processes.leave()

        atexit.register(end)
        return target, experts

    def _model(self, part: str) -> PreTrainedModel:
        places = places_of(self.folder, self.config, self.verify, self.local_files_only, (part,))
        return load_part(part, places[part], self.options).eval()

    @property
    def _described(self) -> dict[str, Any]:
        """What all must agree on: what the bundle refers to, wherever that lies, and in which precision it is."""
        named = {part: dict(getattr(self.config, part) or {}) for part in (*PARTS, "bridge", "ngram", "registry")}
        for reference in named.values():
            reference.pop("folder", None)
        return {
            "protocol": PROTOCOL,
            "vocabulary": self.config.vocab_size,
            **{f"the digest of {part}": settings_hash(reference) for part, reference in named.items()},
            "dtype": str(self.options.get("dtype", self.options.get("torch_dtype"))),
        }

    def _join(self, processes: Processes) -> tuple[PreTrainedModel, RemoteExperts]:
        links = [processes.link(rank) for rank in range(1, processes.number)]
        target = self._model("target")
        greetings = [link.receive(LOADING) for link in links]
        refusal = self._refusal(target, links, greetings)
        for link in links:
            link.send(Message({"refusal": refusal}), LOADING)
        if refusal is not None:
            raise UsageError(refusal)
        abilities = [Abilities(**greeting.facts["abilities"]) for greeting in greetings]
        return target, RemoteExperts(
            links,
            self.config.vocab_size,
            abilities=Abilities(
                window=min((able.window for able in abilities if able.window is not None), default=None),
                croppable=all(able.croppable for able in abilities),
                shiftable=all(able.shiftable for able in abilities),
            ),
            timeout=self.placement.timeout,
            entries=self.placement.entries,
            tolerance=self.placement.tolerance,
        )

    def _refusal(self, target: PreTrainedModel, links: Sequence[Link], greetings: Sequence[Message]) -> str | None:
        """Why the others cannot be worked with, in one line."""
        for link, greeting in zip(links, greetings, strict=True):
            if greeting.facts.get("error"):
                return f"{link.name}: {greeting.facts['error']}"
            for name, here in self._described.items():
                if (there := greeting.facts["described"].get(name)) != here:
                    return (
                        f"{link.name} has loaded another bundle: {name} is {there} there and {here} here; give all "
                        "processes the same bundle and options"
                    )
        narrowest = min(logit_width(target), *(greeting.facts["vocab_size"] for greeting in greetings))
        if narrowest != self.config.vocab_size:
            return (
                f"{self.folder}: the bundle's common vocabulary has {self.config.vocab_size} tokens, that of its parts "
                f"{narrowest}; write the bundle again"
            )
        return None

    def _serve(self, processes: Processes) -> None:
        """Hold experts until the target's process ends; then leave.

        Raises:
            SystemExit: always, but for:
            UsageError: what is to be held cannot be loaded, or does not fit; the target's process says so too.
        """
        target = processes.link(0)
        try:
            try:
                experts = self._held(processes)
            except UsageError as error:
                target.send(Message({"error": str(error)}), LOADING)
                target.receive(LOADING)
                raise
            abilities = dataclasses.asdict(abilities_of(experts))
            facts = {"described": self._described, "vocab_size": experts.vocab_size, "abilities": abilities}
            target.send(Message(facts), LOADING)
            if (refusal := target.receive(LOADING).facts["refusal"]) is not None:
                raise UsageError(refusal)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # it stops an answer there; here it would end the model
            answers = processes.link(1) if processes.rank == 2 else target
            Worker(experts, target, answers, self.config.vocab_size).work()
        except FailedClosed as error:
            print(f"divdec: process {processes.rank} ends: {error}", file=sys.stderr)
            raise SystemExit(1) from None
        raise SystemExit(0)

    def _held(self, processes: Processes) -> Experts | OneOfPair:
        """What this process holds."""
        config = self.config
        counted = config.bridge or config.ngram
        if processes.number == 2:
            places = places_of(self.folder, config, self.verify, self.local_files_only, AUXILIARIES)
            models = {part: load_part(part, place, self.options) for part, place in places.items()}
            if counted:
                # For its tokenizer and width; its weights are not needed here.
                reference = CheckpointReference.from_dict(config.target, "target")
                places["target"] = reference.resolve(self.folder, weights=False, local_files_only=self.local_files_only)
            experts = load_experts(self.folder, config, places, models, self.verify)
            assert experts is not None
            return experts
        if counted or config.retain_auxiliary is None:
            raise UsageError(
                "three processes are for a pair of auxiliaries with the target's own tokens and nothing else; start "
                "two, of which one holds all experts"
            )
        if processes.rank == 2:
            return OneOfPair("retain auxiliary", self._model("retain_auxiliary"))
        return JoinedPair(self._model("forget_auxiliary"), processes.link(2), self.placement.timeout)
