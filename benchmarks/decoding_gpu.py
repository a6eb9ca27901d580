"""Cost of steering and speculation on a GPU, with the shapes of Llama 3.1 8B or 70B and two Llama 3.2 1B.

    python benchmarks/decoding_gpu.py [--shape 70b] [--batch 1 8] [--json]
    python benchmarks/decoding_gpu.py --shape tiny --device cpu

The 70B target has as many of its 80 layers as the GPU's memory holds; the output states how many. "plain, overlap" runs
the auxiliaries on a CUDA stream of their own beside the target.

The three models have random weights, created on the device: the benchmark measures time only, not text. Random models
do not agree, so acceptance is SIMULATED: each draft is accepted with the probability --acceptance. The text of a
speculative answer is therefore meaningless. Its time is real: drafts, passes of target and auxiliaries, verification
(computed, timed and then overruled) and cropping of the caches. decoding.py --acceptance measures the acceptance rate
of trained pairs.

All rows of a batch end together when they have --new-tokens on average, so that no row waits for another at the end.
The time, including the prompt, is divided by the number of generated tokens. The methods take turns in every round, and
ratios are computed within a round. The first round is not counted.
"""

import argparse
import json
import sys
import time
from unittest import mock

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from decoding_methods import PLAIN, TARGET, per_token, ratio
from divdec.decoding import speculative
from divdec.model.modeling import DivergenceForCausalLM
from divdec.sampling import Verdict, verify_greedy

END_OF_PROMPT = 100  # random tokens are drawn from here on; which ones they are changes no time
OVERLAP = "plain, overlap"
LLAMA_1B = {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True,
}  # fmt: skip
SHAPES = {
    "8b": {
        "target": {
            "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
        },
        "auxiliary": LLAMA_1B,
    },
    "70b": {
        "target": {
            "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
            "intermediate_size": 28672, "vocab_size": 128256, "tie_word_embeddings": False,
        },
        "auxiliary": LLAMA_1B,
    },
    "tiny": {
        "target": {
            "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 256, "vocab_size": 512, "tie_word_embeddings": False,
        },
        "auxiliary": {
            "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 128, "vocab_size": 512, "tie_word_embeddings": True,
        },
    },
}  # fmt: skip
LENGTHS = {"8b": (128, 3), "70b": (64, 3), "tiny": (8, 1)}  # default new tokens and rounds
ROOM = 0.85  # share of the free memory for weights; the rest is for keys, values and activations


def random_model(shape, device, dtype):
    """A Llama with random weights, created on the device."""
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = LlamaConfig(**shape, **ends, max_position_embeddings=8192, rope_theta=500_000.0)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=dtype)
    model.generation_config.pad_token_id = 0
    return model.eval()


def steered_model(shape, device, dtype, alpha):
    torch.manual_seed(0)
    shapes = SHAPES[shape]
    if device.type == "cuda":
        shapes = shapes | {"target": fitted(shapes, device, dtype)}
    models = [random_model(shapes[part], device, dtype) for part in ("target", "auxiliary", "auxiliary")]
    return DivergenceForCausalLM.from_parts(*models, steering=f"linear:{alpha:g}")


def fitted(shapes, device, dtype):
    """The target's shape with as many layers as fit into the device's free memory beside both auxiliaries."""
    free, _ = torch.cuda.mem_get_info(device)
    whole = shapes["target"]["num_hidden_layers"]
    for layers in range(whole, 0, -1):
        target = shapes["target"] | {"num_hidden_layers": layers}
        weights = sum(map(weights_of, (target, shapes["auxiliary"], shapes["auxiliary"])))
        if weights * dtype.itemsize <= ROOM * free:
            return target
    print(
        f"decoding_gpu: {free / 2**30:.0f} GiB of free memory hold not even one layer of this target", file=sys.stderr
    )
    raise SystemExit(2)


def weights_of(shape):
    """Number of a Llama's weights, without normalisation."""
    width = shape["hidden_size"]
    narrow = width * shape["num_key_value_heads"] // shape["num_attention_heads"]
    layer = 2 * width * (width + narrow) + 3 * width * shape["intermediate_size"]
    tables = 1 if shape["tie_word_embeddings"] else 2
    return shape["num_hidden_layers"] * layer + tables * width * shape["vocab_size"]


class Simulated:
    """`verify_greedy` with simulated acceptance: each draft is accepted with a given probability."""

    def __init__(self, acceptance, device):
        self.acceptance, self.device = acceptance, device
        self.begin(0, 0)

    def begin(self, rows, seed):
        """Before an answer, whose first token in each row comes from the prompt."""
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.tokens, self.judged = rows, 0

    def __call__(self, scores, drafts):
        tokens = verify_greedy(scores, drafts).tokens  # its time belongs to a pass
        drawn = torch.rand(drafts.shape, generator=self.generator, device=self.device)
        accepted = drawn < self.acceptance
        kept = accepted[:, :-1].long().cumprod(dim=1).sum(dim=1) + 1
        self.tokens += int(kept.sum())  # waits for the device, as the decoder does right after
        self.judged += len(drafts)
        return Verdict(torch.where(accepted, drafts, tokens), accepted, kept)


class Enough(StoppingCriteria):
    """Ends all rows when they have N tokens on average."""

    eos_token_id = None  # tokens after the end count as padding, so that no row continues because another is longer

    def __init__(self, prompt, new_tokens, simulated=None):
        self.prompt, self.new_tokens, self.simulated = prompt, new_tokens, simulated

    def __call__(self, input_ids, scores, **kwargs):
        rows, length = input_ids.shape
        made = length - self.prompt if self.simulated is None else self.simulated.tokens / rows
        return torch.full((rows,), made >= self.new_tokens, device=input_ids.device)


def answer(model, ids, new_tokens, simulated=None, gamma=None, seed=0):
    """Generate once; returns the seconds, and the tokens of all rows."""
    options = {} if simulated is None else {"speculative": gamma}
    if simulated is not None:
        simulated.begin(len(ids), seed)
    enough = StoppingCriteriaList([Enough(ids.shape[1], new_tokens, simulated)])
    wait(ids.device)
    started = time.perf_counter()
    with mock.patch.object(speculative, "verify_greedy", simulated or verify_greedy):
        # Room for rows that are ahead of the others: no block is cut short by the end of the room.
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=2 * new_tokens + 16,
            stopping_criteria=enough, **options,
        )  # fmt: skip
    wait(ids.device)
    seconds = time.perf_counter() - started
    return seconds, simulated.tokens if simulated is not None else new_tokens * len(ids)


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compared(model, batch, given):
    """Rows by method at one batch size, with the ratio of time per token to the target's."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(END_OF_PROMPT, model.vocab_size, (batch, given.prompt_tokens), generator=generator)
    ids = ids.to(model.target.device)
    ways = {TARGET: (model.target, None, None), PLAIN: (model, None, None), OVERLAP: (model, None, None)}
    for gamma in given.gammas:
        for share in given.acceptance:
            ways[f"speculative, γ {gamma}, {share:.0%}"] = (model, gamma, Simulated(share, ids.device))
    rounds, judged = {name: [] for name in ways}, {name: [] for name in ways}
    for number in range(-1, given.rounds):  # the first is not counted
        order = list(ways)
        start = number % len(order)
        for name in order[start:] + order[:start]:
            one, gamma, simulated = ways[name]
            model.overlap = name == OVERLAP
            found = answer(one, ids, given.new_tokens, simulated, gamma, seed=number + 1)
            if number >= 0:
                rounds[name].append(found)
                judged[name].append(simulated.judged if simulated is not None else 0)
    rows = {}
    for name, (_, gamma, simulated) in ways.items():
        over = ratio(rounds[name], rounds[TARGET])
        rows[name] = per_token(rounds[name]) | {"over_target": over, "speedup": 1 / over}
        if simulated is not None:
            made = sum(tokens - batch for _, tokens in rounds[name]) / sum(judged[name])
            expected = sum(simulated.acceptance**place for place in range(gamma + 1))
            rows[name] |= {"gamma": gamma, "acceptance": simulated.acceptance, "tokens_per_pass": made,
                           "expected_tokens_per_pass": expected}  # fmt: skip
    return rows


def show(rows, batch, size):
    print(f"\nbatch {batch}: plain / target "
          f"{rows[PLAIN]['over_target']:.3f} in time a token; 1 + 2n/N = {size['bound']:.3f}")  # fmt: skip
    print(f"{'':<22} {'tokens/s':>9} {'ms a token':>11} {'least – most':>17} {'time/target':>12} {'speed/target':>13}"
          "  tokens a target pass (expected)")  # fmt: skip
    for name, row in rows.items():
        passes = ""
        if "tokens_per_pass" in row:
            passes = f"  {row['tokens_per_pass']:.2f} ({row['expected_tokens_per_pass']:.2f})"
        print(f"{name:<22} {row['tokens_per_s']:>9.1f} {row['ms_per_token']:>11.3f} {row['least']:>8.3f} –"
              f"{row['most']:>7.3f} {row['over_target']:>12.3f} {row['speedup']:>13.2f}{passes}",
              flush=True)  # fmt: skip


def machine(device):
    """Versions and device of the machine."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__,
            "transformers": transformers.__version__}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--alpha", type=float, default=1.0, help="of the linear rule")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--gammas", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.5, 0.7, 0.9], metavar="SHARE",
                        help="probability with which a draft is kept, given that those before it were")  # fmt: skip
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, help="by default 128; 64 of --shape 70b, 8 of tiny")
    parser.add_argument("--rounds", type=int, help="by default 3; 1 of --shape tiny")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    given = parser.parse_args()
    new_tokens, rounds = LENGTHS[given.shape]
    given.new_tokens, given.rounds = given.new_tokens or new_tokens, given.rounds or rounds
    transformers.utils.logging.set_verbosity_error()
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("decoding_gpu: no CUDA here; accepted: --device cpu, best with --shape tiny", file=sys.stderr)
        return 2
    model = steered_model(given.shape, device, getattr(torch, given.dtype), given.alpha)
    N, n = model.target.num_parameters(), model.experts.retain.num_parameters()
    size = {"N": N, "n": n, "bound": 1 + 2 * n / N}
    result = {"machine": machine(device), "shape": given.shape, "dtype": given.dtype, "steering": str(model.steering),
              "prompt_tokens": given.prompt_tokens, "new_tokens": given.new_tokens, "rounds": given.rounds,
              "acceptance": "simulated", "sizes": size, "layers": model.target.config.num_hidden_layers,
              "measured": []}  # fmt: skip
    print(", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    whole = SHAPES[given.shape]["target"]["num_hidden_layers"]
    print(f"target {N:,} parameters ({result['layers']} of {whole} layers), "
          f"auxiliaries {n:,} each, {given.dtype}, random; {model.steering}; prompts of "
          f"{given.prompt_tokens} tokens, {given.new_tokens} new ones a row; median of {given.rounds} rounds; "
          "acceptance is simulated (only time is measured)")  # fmt: skip
    for batch in given.batch:
        rows = compared(model, batch, given)
        show(rows, batch, size)
        result["measured"].append({"batch": batch, "rows": rows})
    if device.type == "cuda":
        result["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        print(f"\nat most {result['peak_bytes'] / 2**30:.1f} GiB of the device's memory")
    if given.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
