"""OpenUnlearning as a peer: its own evaluation of a local checkpoint on TOFU, whole process, on the CPU.

It needs a checkout and a separate environment (its requirements, with lm-eval). This module imports none of it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

# The default list leaves these out.
MORE = "exact_memorization,mia_loss,mia_zlib,mia_min_k,mia_min_k_plus_plus,mia_gradnorm,mia_reference"


def summary(checkout: Path, python: Path, model: Path, retain: Path, data: Path, holdout: Path, split: str) -> dict:
    """Run OpenUnlearning and return the content of TOFU_SUMMARY.json."""
    with tempfile.TemporaryDirectory() as folder:
        work, held_out = Path(folder), split.replace("forget", "holdout")
        # It asks for the data set "locuslab/TOFU", which a folder of that name answers.
        questions = work / "locuslab" / "TOFU"
        questions.mkdir(parents=True)
        for file in data.glob("*.json"):
            shutil.copyfile(file, questions / file.name)
        shutil.copyfile(holdout, questions / f"{held_out}.json")
        names = sorted(file.stem for file in questions.glob("*.json"))
        configs = "".join(f"- config_name: {name}\n  data_files: {name}.json\n" for name in names)
        (questions / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
        settings = {
            "experiment": "eval/tofu/default",
            "task_name": "benchmark",
            "forget_split": split,
            "holdout_split": held_out,
            "model.model_args.device_map": "cpu",
            "model.model_args.attn_implementation": "sdpa",
            "model.model_args.torch_dtype": "float32",
            "model.model_args.pretrained_model_name_or_path": model,
            "model.tokenizer_args.pretrained_model_name_or_path": model,
            "+eval/tofu_metrics": f"[{MORE}]",
            "eval.tofu.metrics.mia_reference.reference_model_path": retain,
            "paths.output_dir": work / "out",
        }
        command = [python, checkout / "src" / "eval.py", *(f"{name}={value}" for name, value in settings.items())]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"OpenUnlearning did not run:\n{done.stderr[-3000:]}")
        return json.loads((work / "out" / "TOFU_SUMMARY.json").read_text())


def python_of(checkout: Path, given: Path | None) -> Path:
    """The Python interpreter of its environment: the given one, or that of a virtual environment in the checkout."""
    for candidate in [given] if given else [checkout / name / "bin" / "python" for name in (".venv", "venv")]:
        if candidate.is_file():
            return candidate.absolute()
    raise SystemExit(f"{checkout} has no .venv with OpenUnlearning's requirements; give --openunlearning-python")
