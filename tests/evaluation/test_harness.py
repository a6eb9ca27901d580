"""lm-eval's model `hf` on a bundle: the real command, and log-likelihoods equal to ours."""

import json
import subprocess
import sys

import pytest
import torch

from divdec import UsageError
from divdec.data.formatting import Example
from divdec.evaluation.scoring import score

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'divdec[lm-eval]'")

TASK = """
task: world
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""


def test_lm_eval_log_likelihoods_match_divdec(bundle):
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    lm = get_model("hf")(pretrained=str(bundle), trust_remote_code=True, device="cpu", batch_size=2)
    assert type(lm.model).__name__ == "DivergenceForCausalLM"
    pairs = [("Where was Ana born?", " In Velmora."), ("Who?", " Ana."), ("What does she write?", " Crime fiction.")]
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    measured = lm.loglikelihood(requests)
    for (context, continuation), (value, greedy) in zip(pairs, measured, strict=True):
        before, after = lm._encode_pair(context, continuation)
        (item,) = score(lm.model, [Example([*before, *after], [-100] * len(before) + after)])
        assert value == pytest.approx(sum(item.log_probabilities), abs=1e-4)
        assert greedy == all(item.hits)
    target = lm.model.target
    with torch.no_grad():
        ids = torch.tensor([lm._encode_pair(*pairs[0])[0]])
        assert not torch.allclose(target(ids).logits, lm.model(input_ids=ids).logits)


def test_lm_eval_command_loads_bundle(bundle, world, tmp_path):
    rows = [{"question": q.question, "choices": [q.answer, "Nobody knows."]} for q in world.retain[:4]]
    (tmp_path / "data.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "world.yaml").write_text(TASK.format(data=tmp_path / "data.json"))
    command = [
        sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={bundle},trust_remote_code=True",
        "--tasks", "world", "--include_path", str(tmp_path), "--device", "cpu",
        "--output_path", str(tmp_path / "out.json"),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "|world|" in result.stdout.replace(" ", "")


def test_lm_eval_rejects_changed_bundle(bundle, own_checkpoints):
    from lm_eval.api.registry import get_model

    (own_checkpoints / "retain/model.safetensors").unlink()
    with pytest.raises(UsageError, match="no weights"):
        get_model("hf")(pretrained=str(bundle), trust_remote_code=True, device="cpu")


def test_lm_eval_local_completions_match_divdec(bundle, tmp_path):
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from divdec import DivergenceForCausalLM
    from support.served import engine_of, serving

    with serving([engine_of(bundle, "bundle")]) as url:
        lm = LocalCompletionsAPI(
            base_url=f"{url}/v1/completions", model="bundle", tokenizer=str(bundle), tokenizer_backend="huggingface",
            batch_size=2, max_length=256,
        )  # fmt: skip
        pairs = [
            ("Where was Ana born?", " In Velmora."),
            ("Who?", " Ana."),
            ("What does she write?", " Crime fiction."),
        ]
        measured = lm.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
        (text,) = lm.generate_until([Instance("generate_until", {}, ("Who?", {"until": ["\n"], "max_gen_toks": 4}), 0)])
    model = DivergenceForCausalLM.from_pretrained(bundle)
    for pair, (value, greedy) in zip(pairs, measured, strict=True):
        before, after = lm._encode_pair(*pair)
        (item,) = score(model, [Example([*before, *after], [-100] * len(before) + after)])
        assert value == pytest.approx(sum(item.log_probabilities), abs=1e-4)
        assert greedy == all(item.hits)
    ids = torch.tensor([lm.tok_encode("Who?")])
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    expected = lm.tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True)
    assert text == expected.split("\n")[0]
