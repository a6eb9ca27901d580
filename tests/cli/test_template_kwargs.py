"""`--chat-template-kwargs` reaches the chat template in every verb that lays out conversations."""

import json

import pytest

from divdec.cli import main

SETS = ["--forget", "{data}/forget.jsonl", "--retain", "{data}/retain.jsonl"]
VERBS = {
    "generate": ["{bundle}", "--prompt", "Who?"],
    "chat": ["{bundle}"],
    "playground": ["{bundle}", "--port", "0"],
    "serve": ["{bundle}", "--port", "0"],
    "calibrate": ["{bundle}", *SETS, "--holdout", "{data}/holdout.jsonl"],
    "train": ["--base", "{models}/retain", *SETS, "--output", "{output}"],
    "distill": ["{bundle}", *SETS, "--output", "{output}", "--steering", "linear:1"],
    "gradient-depth": ["{bundle}", *SETS, "--output", "{output}", "--steering", "linear:1"],
    "baseline": ["npo", "--target", "{models}/target", *SETS, "--output", "{output}"],
    "eval": ["leak", "{bundle}", "--data", "{data}/forget.jsonl", "--attacks", "1", "--output", "{output}"],
}


def run(verb, tmp_path, bundle, checkpoints, kwargs):
    if verb == "playground":
        pytest.importorskip("gradio")
    for name in ("forget", "retain", "holdout"):
        records = [{"question": f"Who is {name} {n}?", "answer": f"The {n} of {name}."} for n in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    folders = {"bundle": bundle, "models": checkpoints, "data": tmp_path, "output": tmp_path / "output"}
    arguments = [argument.format(**folders) for argument in VERBS[verb]]
    return main([verb, *arguments, "--chat-template-kwargs", kwargs])


@pytest.mark.parametrize("verb", VERBS)
def test_variable_that_the_template_lacks_is_refused(verb, tmp_path, bundle, checkpoints, capsys):
    assert run(verb, tmp_path, bundle, checkpoints, '{"enable_thinking": false}') == 2
    said = capsys.readouterr().err
    assert "'enable_thinking', which is no variable of the model's chat template; it has none" in said


@pytest.mark.parametrize("verb", VERBS)
def test_text_that_is_no_object_is_refused(verb, tmp_path, bundle, checkpoints, capsys):
    assert run(verb, tmp_path, bundle, checkpoints, "[1]") == 2
    assert "--chat-template-kwargs is '[1]'; accepted: a JSON object" in capsys.readouterr().err
