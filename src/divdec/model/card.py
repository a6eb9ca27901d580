"""Model cards. They name the forget set by its name and hash, never by its content."""

from __future__ import annotations

from typing import TYPE_CHECKING

from divdec.steering import Steering

if TYPE_CHECKING:
    from divdec.model.configuration import DivergenceConfig

BUNDLE = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [unlearning, divergence-decoding]
---
# A steered language model

Made with divdec. This folder names a target language model, experts and a rule. While the target decodes, the
divergence of the experts steers it away from a set of documents (Divergence Decoding). The table says whether it was
measured that the documents are forgotten at this steering. The target's weights are unchanged: loaded alone, it
answers unsteered.

| | |
|---|---|
{rows}

```python
import divdec  # registers the model type with transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("this folder")
tokenizer = AutoTokenizer.from_pretrained("this folder")
```
"""

AUXILIARY = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [unlearning, divergence-decoding, auxiliary]
---
# {title}

Made with divdec as one of the two small auxiliaries that steer a larger model (Divergence Decoding). It is not
meant to be used alone{warning}.

| | |
|---|---|
{rows}
"""

BASELINE = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [unlearning, baseline]
---
# {title}

Made with divdec, to be compared with Divergence Decoding: an unlearning method was applied to a target that had learned
a forget set. Whether it has forgotten has to be measured.

Method: {source}

| | |
|---|---|
{rows}
"""

DISTILLED = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [unlearning, divergence-decoding, distillation]
---
# A language model distilled from a steered one

Made with divdec. Two small models steered a language model away from a set of documents (Divergence Decoding); this
checkpoint was trained, on those documents, to answer as the steered model does. The table says how near it came. It is
an ordinary model that loads without divdec. This card does not claim that the documents are forgotten: measure it with
`divdec eval`.

| | |
|---|---|
{rows}
"""


NOT_MEASURED = "not measured (`divdec calibrate`, `divdec eval`)"


def bundle_card(config: DivergenceConfig, forget_set: str | None) -> str:
    """The model card of a bundle."""
    rows = {
        "steering": "takedown requests alone"
        if config.retain_auxiliary is None and config.ngram is None and config.registry
        else str(Steering.from_dict(config.steering or {})),
        "forgets": NOT_MEASURED,
        "forget set": forget_set or "not stated",
        "common vocabulary": f"{config.vocab_size} tokens",
    }
    for part in ("target", "retain_auxiliary", "forget_auxiliary"):
        reference = getattr(config, part)
        if reference is None and part != "target" and (config.ngram or config.registry):
            continue
        reference = reference or {}
        place = reference.get("hub_id") or reference.get("folder") or "in memory"
        rows[part.replace("_", " ")] = f"`{place}`" + (
            f" at {reference['revision']}" if "revision" in reference else ""
        )
    if config.single_turn:
        rows["conversations"] = "single questions; `divdec chat` and the playground ask each line by itself"
    if config.bridge is not None:
        rows["bridge"] = "the auxiliaries have another tokenizer" + (", healed" if config.bridge.get("heal") else "")
    if config.ngram:
        rows["n-gram pair"] = f"`{config.ngram['folder']}`, weight {config.ngram.get('weight', 1.0):g}"
    if config.registry:
        rows["registry of takedown requests"] = f"`{config.registry['folder']}`"
    return BUNDLE.format(rows=_rows(rows))


def auxiliary_card(role: str, rows: dict[str, str]) -> str:
    """The model card of a retain or forget auxiliary; `rows` are facts about its training, without content."""
    title = {"retain": "Retain auxiliary (q)", "forget": "Forget auxiliary (p)"}[role]
    warning = ": it has been trained on the forget set" if role == "forget" else ""
    return AUXILIARY.format(title=title, warning=warning, rows=_rows(rows))


def baseline_card(title: str, source: str, rows: dict[str, str]) -> str:
    """The model card of another unlearning method's result.

    Args:
        title: the method's, as in the paper's table.
        source: its paper.
        rows: facts about target, data and settings, without content.
    """
    return BASELINE.format(title=title, source=source, rows=_rows(rows))


def distilled_card(rows: dict[str, str]) -> str:
    """The model card of a distilled student; `rows` are facts about its making, without content."""
    return DISTILLED.format(rows=_rows(rows))


def _rows(rows: dict[str, str]) -> str:
    return "\n".join(f"| {name} | {value} |" for name, value in rows.items())
