"""Which texts does a pretrained model recite? It reads the beginning of each, and continues it greedily.

    python examples/copyright/screen.py --target real-models/qwen-1.5b.gguf FILE ...

For each file the number of tokens is printed that continue the text, of the 40 after the first 40.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that `steps` is found from any working directory
from divdec.checkpoint import CheckpointReference, dtype_for_passes, load_model, load_tokenizer
from divdec.data.records import read_text
from divdec.errors import UsageError
from divdec.evaluation.generation import continuations
from steps import run_main


def screen(target: str, files: list[Path], length: int) -> list[tuple[int, str]]:
    """Count the tokens of each file that the target recites; the most recited file comes first."""
    place = CheckpointReference.parse(target).resolve(Path(), weights=True)
    tokenizer = load_tokenizer(place)
    texts = {file: tokenizer(read_text(file))["input_ids"][: 2 * length] for file in files}
    for file in [file for file, ids in texts.items() if len(ids) < 2 * length]:
        print(f"{file.name} is left out: it has fewer than {2 * length} tokens", file=sys.stderr)
        del texts[file]
    if not texts:
        raise UsageError(f"no file has {2 * length} tokens; give longer texts or a smaller --tokens")
    model = load_model(place, dtype=dtype_for_passes()).eval()
    prompts = [ids[:length] for ids in texts.values()]
    replies = continuations(model, tokenizer, prompts, max_new_tokens=length, batch_size=8, title="texts")
    counts = []
    for (file, ids), reply in zip(texts.items(), replies, strict=True):
        equal = [a == b for a, b in zip(ids[length:], reply, strict=False)]
        counts.append(([*equal, False].index(False), file.name))
    return sorted(counts, reverse=True)


def main(arguments: list[str] | None = None) -> list[tuple[int, str]]:
    """Parse the command line, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="texts in UTF-8")
    parser.add_argument("--target", default="real-models/qwen-1.5b.gguf")
    parser.add_argument("--tokens", type=int, default=40, help="tokens of the prompt, and of the continuation")
    options = parser.parse_args(arguments)
    counts = screen(options.target, options.files, options.tokens)
    for count, name in counts:
        print(f"{count:3} of {options.tokens}  {name}")
    return counts


if __name__ == "__main__":
    run_main(main)
