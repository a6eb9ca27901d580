"""On a GPU everything is what it is on the CPU, and a broken auxiliary is never answered for (make test-gpu).

With DIVDEC_TEST_DEVICE=cpu the tests themselves can be tried where there is no GPU.
"""

import copy
import os
import subprocess
import sys

import pytest
import torch

from divdec import DivergenceForCausalLM, Steering, steer_rank
from divdec.data.formatting import IGNORED, Example
from divdec.evaluation.generation import continuations, samples
from divdec.evaluation.scoring import score, score_settings
from divdec.experts.adapters import AdapterPair
from divdec_research.suites.metrics import gradient_norm
from support import reference
from support.exactness import assert_same_answer
from support.tiny import make_parts

pytestmark = pytest.mark.gpu
DEVICE = os.environ.get("DIVDEC_TEST_DEVICE", "cuda")
PROMPTS = [[5, 9, 200, 31], [77, 8], [1, 2, 3, 4, 5, 6, 7]]
EXAMPLES = [
    Example([*prompt, *answer], [IGNORED] * len(prompt) + answer)
    for prompt in PROMPTS
    for answer in ([6, 250], [12, 33, 9, 4, 77], [3, 2])
]
SETTINGS = [Steering(alpha=0.5), Steering(alpha=1.5), *(Steering("rank", k=k, fill="soft") for k in (1, 20, 100))]


@pytest.fixture(scope="module", autouse=True)
def cuda():
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA")
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture
def pair(family):
    """The same steered model on the CPU and on the GPU, in float32."""
    on_cpu = DivergenceForCausalLM.from_parts(*make_parts(family), steering="linear:1.5")
    parts = (on_cpu.target, on_cpu.experts.retain, on_cpu.experts.forget)
    return on_cpu, DivergenceForCausalLM.from_parts(*(copy.deepcopy(part).to(DEVICE) for part in parts), "linear:1.5")


@pytest.mark.parametrize("steering", ["linear:1.5", "rank:20"])
def test_gpu_generation_matches_slow_reference(pair, tokenizer, steering):
    on_cpu, on_gpu = pair
    on_gpu.steering = steering
    found = continuations(on_gpu, tokenizer, PROMPTS, max_new_tokens=8)
    parts = on_cpu.target, on_cpu.experts.retain, on_cpu.experts.forget
    for prompt, ids in zip(PROMPTS, found, strict=True):
        expected = reference.greedy(*parts, prompt, Steering.parse(steering), 8, on_cpu.generation_config.eos_token_id)
        on_cpu.steering = steering
        assert_same_answer(on_cpu, prompt, ids[: len(expected)], expected)


def test_gpu_scores_match_cpu(pair):
    on_cpu, on_gpu = pair
    ours, theirs = (score_settings(model, EXAMPLES, SETTINGS, moments=True) for model in (on_gpu, on_cpu))
    for some, others in zip(ours, theirs, strict=True):
        for one, other in zip(some, others, strict=True):
            assert one.log_probabilities == pytest.approx(other.log_probabilities, abs=1e-4)
            for moments, expected in zip(one.vocabulary_moments, other.vocabulary_moments, strict=True):
                assert moments == pytest.approx(expected, abs=1e-3)
    plain, expected = score(on_gpu.target, EXAMPLES), score(on_cpu.target, EXAMPLES)
    assert [item.loss for item in plain] == pytest.approx([item.loss for item in expected], abs=1e-4)
    assert gradient_norm(on_gpu, EXAMPLES[1]) == pytest.approx(gradient_norm(on_cpu, EXAMPLES[1]), rel=1e-3)


def test_gpu_adapters_match_cpu(tokenizer):
    torch.manual_seed(0)
    target, base, other = make_parts("llama")
    linear = {
        name: layer for name, layer in base.named_modules() if isinstance(layer, torch.nn.Linear) and name != "lm_head"
    }

    def factors():
        sizes = {name: (layer.in_features, layer.out_features) for name, layer in linear.items()}
        return {name: (torch.randn(4, n), 0.1 * torch.randn(m, 4)) for name, (n, m) in sizes.items()}

    given = factors(), factors()
    models = []
    for device in ("cpu", DEVICE):
        own, of_base = (copy.deepcopy(model).to(device) for model in (target, base))
        moved = [{name: (a.to(device), b.to(device)) for name, (a, b) in some.items()} for some in given]
        config = DivergenceForCausalLM.from_parts(target, base, other, "linear:1.5").config
        models.append(DivergenceForCausalLM(config, own, AdapterPair(of_base, *moved)).eval())
    ours, theirs = (continuations(model, tokenizer, PROMPTS, max_new_tokens=8) for model in reversed(models))
    for prompt, ids, expected in zip(PROMPTS, ours, theirs, strict=True):
        assert_same_answer(models[0], prompt, ids, expected)


def test_rank_ties_match_cpu():
    torch.manual_seed(0)
    target, divergence = torch.randn(16, 300), torch.randint(-2, 3, (16, 300)).float()
    divergence[3, 7] = float("nan")
    for k in (1, 50, 299):
        for fill in ("hard", "soft"):
            ours, theirs = (
                steer_rank(target.to(DEVICE), divergence.to(DEVICE), k, fill).cpu(),
                steer_rank(target, divergence, k, fill),
            )
            assert torch.equal(ours.nan_to_num(9e9), theirs.nan_to_num(9e9))
            assert ours[3].isnan().all()


def test_bfloat16_cached_decoding_matches_uncached(family, tokenizer):
    parts = [part.to(DEVICE, torch.bfloat16) for part in make_parts(family)]
    model = DivergenceForCausalLM.from_parts(*parts, steering="linear:1")
    ids = torch.tensor([PROMPTS[2]], device=DEVICE)
    cache = model.new_cache()
    steps = [model(ids[:, t : t + 1], past_key_values=cache).logits[:, -1] for t in range(ids.shape[1])]
    whole = model(ids, use_cache=False).logits
    assert whole.dtype == torch.float32
    torch.testing.assert_close(torch.stack(steps, dim=1), whole, atol=0.3, rtol=0.1)


def test_seeded_samples_are_reproducible(pair, tokenizer):
    _, on_gpu = pair
    one, other = (samples(on_gpu, tokenizer, PROMPTS, 3, seed=7, max_new_tokens=6) for _ in range(2))
    assert one == other


def test_broken_auxiliary_raises_without_output():
    # The assertion on the device ends the process's use of it, so that it has a process of its own.
    program = """
import os; DEVICE = os.environ.get("DIVDEC_TEST_DEVICE", "cuda")
import sys; sys.path.insert(0, "tests")
import torch
from support.tiny import make_parts
from divdec import DivergenceForCausalLM
parts = [part.to(DEVICE) for part in make_parts("llama")]
with torch.no_grad():
    parts[2].get_output_embeddings().weight[5, 5] = float("nan")
model = DivergenceForCausalLM.from_parts(*parts, steering="rank:5")
ids = model.generate(torch.tensor([[5, 9, 31]], device=DEVICE), max_new_tokens=4, do_sample=False)
print("ANSWERED", ids.tolist())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "ANSWERED" not in done.stdout
    assert "not finite" in done.stderr or "assert" in done.stderr.lower()
