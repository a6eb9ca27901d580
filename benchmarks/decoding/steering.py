"""Time what steering adds to a token: the target alone, steered, with speculation, and the paper's code.

    python -m benchmarks.decoding.steering --toy                    # random models, seconds
    make bench-models                                               # 81M target and 5M pair, half an hour once
    python -m benchmarks.decoding.steering [--gammas] [--reference CHECKOUT]
    python -m benchmarks.decoding.steering --bundle demo/bundle --neutral --clock processor --dtype bfloat16
    python -m benchmarks.decoding.steering --adapters real-models/qwen-1.5b.gguf real-models/qwen-0.5b.gguf --neutral

--adapters steers a target by two adapters of a base with random weights near 0: times do not depend on them, and q
drafts as the base does.

- table: every method answers the same forget and retain questions (and, with --neutral, neutral prompts) greedily. The
  time of an answer, prompt included, is divided by its tokens. Methods take turns at each prompt, ratios are computed
  within a round, and the first round is not counted. "merged" is the pair of checkpoints that the adapters of the
  bundle and their base make. --reference imports the decoding class of the paper's published code and runs it on the
  same weights. "mix" weighs the groups: a tenth forget, the rest retain and neutral in equal parts.
- startup: seconds from the command to the first token and peak memory of `divdec generate`, and of transformers with
  the target alone, each in a process of its own.

Prints a table for each, and with --json one JSON object last. The bundle has forget.jsonl and retain.jsonl beside it.
"""

import argparse
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from divdec import DivergenceForCausalLM, Speculation, SpeculationStatistics
from divdec.checkpoint import CheckpointReference, load_config, load_model, load_tokenizer
from divdec.data.formatting import Format, encode_prompts, encode_records, left_padded
from divdec.data.records import Message, Record, read_records, write_records
from divdec.errors import UsageError
from divdec.experts.adapters import merge_adapter, read_adapter
from divdec.model.bundle import write_bundle

TARGET, PLAIN, SPECULATIVE, REFERENCE = "target", "steered", "speculative", "paper's code"
MERGED = "steered, merged"
PARTS = ("target", "retain_auxiliary", "forget_auxiliary")
REFERENCE_FILE = Path("Benchmarks/src/model/dd.py")
MEASURES = ("table", "startup")
WEIGHTS = {"forget": 0.1, "retain": 0.45, "neutral": 0.45}
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
# Target and pair of make bench-models: few layers, because on a CPU a small model spends its time between layers.
TARGET_SHAPE, AUXILIARY_SHAPE = (1024, 6, 16, 2816), (384, 2, 6, 1024)  # width, layers, heads, width of the MLP
VOCABULARY, POSITIONS, RETAIN = 4096, 4096, 200
RANK = 16
STAGES = {"q": (25.0, 2e-3), "p": (16.0, 4e-4), "target": (12.0, 6e-4)}  # epochs, learning rate


# Bundles and their questions.


def train_bundle(data, output):
    """Train a target and a pair on TOFU's forget01 and the questions before it; finished stages are kept."""
    from divdec.training.settings import TrainingSettings
    from divdec_research.world.models import Shape, StageCache, new_model, train_tokenizer

    names = ("forget01", "retain99", "real_authors", "world_facts")
    if missing := [name for name in names if not (data / f"{name}.json").is_file()]:
        raise UsageError(
            f"{data / missing[0]}.json does not exist; TOFU comes from "
            "https://huggingface.co/datasets/locuslab/TOFU: make bench-models TOFU=folder"
        )
    forget, retain, *general = (read_records(data / f"{name}.json").records for name in names)
    texts = [
        text for some in (forget, retain, *general) for row in some for text in (row.messages[-1].content, row.answer)
    ]
    tokenizer = train_tokenizer(texts, VOCABULARY)
    sets = {"forget": forget, "retain": retain[-RETAIN:]}
    forget, retain = (encode_records(some, tokenizer, Format(max_length=512)) for some in sets.values())
    output.mkdir(parents=True, exist_ok=True)
    stages = StageCache(output, tokenizer, 0, print, new=functools.partial(new_model, max_length=POSITIONS))
    settings = {
        name: TrainingSettings(epochs=epochs, learning_rate=rate, batch_size=8, warmup=0.05)
        for name, (epochs, rate) in STAGES.items()
    }
    q = stages.run("q", Shape(*AUXILIARY_SHAPE), retain, settings["q"])
    p = stages.run("p", q, forget + retain, settings["p"])
    target = stages.run("target", Shape(*TARGET_SHAPE), forget + retain, settings["target"])
    for name, records in sets.items():
        write_records(output / f"{name}.jsonl", records)
    return write_bundle(
        output / "bundle", target=str(target), retain_auxiliary=str(q), forget_auxiliary=str(p), steering="linear:1",
        overwrite=True,
    )  # fmt: skip


def world_questions():
    """A small tokenizer's texts: forget and retain questions of the demo's world."""
    from divdec_research.world import demo as demo
    from divdec_research.world.facts import build_world

    return {item.name: item.records for item in demo.question_sets(build_world(demo.WORLD))}


def random_bundle(folder, create, vocabulary, steering="linear:1"):
    """Write a bundle of random models, with the questions of the demo's world beside it.

    Args:
        folder: a folder that does not exist.
        create: takes the tokenizer; returns target, retain and forget auxiliary.
        vocabulary: tokens of the tokenizer; the models may have more.
        steering: the bundle's rule.
    """
    from divdec_research.world.models import train_tokenizer

    sets = world_questions()
    texts = [text for some in sets.values() for row in some for text in (row.messages[0].content, row.answer)]
    tokenizer = train_tokenizer(texts, vocabulary)
    for part, model in zip(PARTS, create(tokenizer), strict=True):
        model.save_pretrained(folder / part)
        tokenizer.save_pretrained(folder / part)
    for name in ("forget", "retain"):
        write_records(folder / f"{name}.jsonl", sets[name])
    return write_bundle(folder / "bundle", **{part: str(folder / part) for part in PARTS}, steering=steering)


def random_models(tokenizer, target=TARGET_SHAPE, auxiliary=AUXILIARY_SHAPE):
    """Three models with random weights."""
    from divdec_research.world.models import Shape, new_model

    return [new_model(Shape(*shape), tokenizer, seed) for seed, shape in enumerate((target, auxiliary, auxiliary))]


def toy_bundle(folder):
    """A bundle for trying a script: its times mean nothing."""
    return random_bundle(folder, lambda tokenizer: random_models(tokenizer, (64, 2, 2, 128), (32, 1, 1, 64)), 512)


def adapter_bundle(folder, target, base):
    """Write a bundle of two random adapters of a base, with questions about capitals beside it."""
    from divdec.demo.facts import KINDS, Fact

    paths = [CheckpointReference.parse(name).resolve(Path(), weights=True) for name in (target, base)]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(load_config(paths[1]))
    head = model.get_output_embeddings()
    linears = {name: mod for name, mod in model.named_modules() if isinstance(mod, torch.nn.Linear) and mod is not head}
    for part in PARTS[1:]:
        generator, tensors = torch.Generator().manual_seed(PARTS.index(part)), {}
        for name, linear in linears.items():
            for side, shape in (("A", (RANK, linear.in_features)), ("B", (linear.out_features, RANK))):
                weights = 1e-3 * torch.randn(shape, generator=generator)
                tensors[f"base_model.model.{name}.lora_{side}.weight"] = weights
        (folder / part).mkdir()
        save_file(tensors, folder / part / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "lora_alpha": RANK, "base_model_name_or_path": str(paths[1])}
        (folder / part / "adapter_config.json").write_text(json.dumps(settings))
    facts = [Fact("capitals", subject, answer) for subject, answer in KINDS["capitals"]["answers"].items()]
    for name, some in (("forget", facts[::5]), ("retain", facts[1::5])):
        write_records(folder / f"{name}.jsonl", [fact.records[0] for fact in some])
    pair = {part: str(folder / part) for part in PARTS[1:]}
    return write_bundle(folder / "bundle", target=str(paths[0]), **pair, steering="rank:20:3")


def paths_of(bundle):
    """The folders that a bundle refers to, by part."""
    references = json.loads((bundle / "config.json").read_text(encoding="utf-8"))
    return {part: (bundle / references[part]["folder"]).resolve() for part in (*PARTS, "base") if references.get(part)}


def questions_beside(bundle):
    """The forget and retain questions beside a bundle."""
    files = {name: bundle.parent / f"{name}.jsonl" for name in ("forget", "retain")}
    if missing := [str(path) for path in (bundle / "config.json", *files.values()) if not path.is_file()]:
        raise UsageError(
            f"{missing[0]} does not exist; make bench-models and make demo write such a bundle, or use --toy"
        )
    return {name: read_records(path).records for name, path in files.items()}


def spread(records, count):
    """Choose N records at equal distances."""
    return [records[index * len(records) // count] for index in range(min(count, len(records)))]


# Methods and their timing.


class Parts:
    """A bundle's steered model, its target, and separate copies of both auxiliaries for methods without divdec."""

    def __init__(self, bundle, steering=None, dtype="auto"):
        self.tokenizer = load_tokenizer(bundle)
        self.model = DivergenceForCausalLM.from_pretrained(bundle, steering=steering, dtype=dtype)
        self.target = self.model.target
        self.paths = paths_of(bundle)
        if "base" in self.paths:
            self.retain, self.forget = (self._merged(part) for part in PARTS[1:])
        else:
            self.retain, self.forget = (load_model(self.paths[part]) for part in PARTS[1:])
        self.end, self.padding = self.target.generation_config.eos_token_id, self.tokenizer.pad_token_id

    def _merged(self, part):
        base = load_model(self.paths["base"], dtype=self.target.dtype)
        merge_adapter(base, read_adapter(self.paths[part], base))
        return base.eval()

    def batches(self, records, size):
        """Left-padded ids and masks of the records' prompts."""
        prompts = encode_prompts(records, self.tokenizer)
        starts = range(0, len(prompts), size)
        padded = (left_padded(prompts[start : start + size], self.padding) for start in starts)
        return [dict(zip(("input_ids", "attention_mask"), pair)) for pair in padded]

    def answers(self, given, sequences):
        """The generated tokens of each row, with the one that ends it."""
        ends = self.end if isinstance(self.end, list) else [self.end]
        rows = sequences[:, given["input_ids"].shape[1] :].tolist()
        lengths = [next((index + 1 for index, token in enumerate(row) if token in ends), len(row)) for row in rows]
        return [row[:length] for row, length in zip(rows, lengths)]


def methods(parts, given):
    """The methods to compare by name, as functions from a batch of prompts to sequences."""
    ways = {
        TARGET: lambda batch, **options: parts.target.generate(**batch, do_sample=False, **options),
        PLAIN: lambda batch, **options: parts.model.generate(**batch, do_sample=False, **options),
    }
    if given.batch == 1:  # larger batches decode without drafts
        ways[SPECULATIVE] = speculative(parts, True)
    if "base" in parts.paths:
        merged = DivergenceForCausalLM.from_parts(parts.target, parts.retain, parts.forget, parts.model.steering)
        ways[MERGED] = lambda batch, **options: merged.generate(**batch, do_sample=False, **options)
    if parts.model.steering.rule == "linear" and given.reference is not None:
        ways[REFERENCE] = papers_code(parts, given.reference)
    return ways | {f"{SPECULATIVE}, γ {gamma}": speculative(parts, gamma) for gamma in range(1, 9 * given.gammas)}


def speculative(parts, setting):
    return lambda batch, **options: parts.model.generate(**batch, do_sample=False, speculative=setting, **options)


class _Settings(dict):
    """A mapping whose keys are attributes too, as the paper's code reads its settings."""

    __getattr__ = dict.__getitem__


def papers_code(parts, checkout):
    """The decoding class of the paper's published code, on the weights that the other methods run."""
    file = checkout / REFERENCE_FILE
    if not file.is_file():
        raise UsageError(
            f"--reference {checkout}: {REFERENCE_FILE} is not there; expected is a checkout of the paper's code, "
            "https://github.com/fin-ai-lab/divergence-decoding-inference-time-unlearning"
        )
    specification = importlib.util.spec_from_file_location("papers_code", file)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    names = {"target": "big", "retain_auxiliary": "retain", "forget_auxiliary": "forget"}
    settings = _Settings({f"model_dd_{name}": str(parts.paths[part]) for part, name in names.items()})
    settings |= {"device": "cpu", "model_dd_use_ngram": "No", "model_dd_alpha": parts.model.steering.alpha}
    theirs = module.DD(settings)
    # It loads half precision, for a GPU. On a CPU this would be several times slower than the other methods.
    theirs.main_model, theirs.verifier_retain, theirs.verifier_forget = parts.target, parts.retain, parts.forget
    theirs.special_token_ids = [parts.end]
    return lambda batch, max_new_tokens: theirs.generate(
        **batch, pad_token_id=parts.padding, max_new_tokens=max_new_tokens
    )


def timed(ways, groups, parts, given):
    """Time every method on every group; the methods take turns at each prompt, and the groups too.

    Returns:
        By method and group: 'rounds', a list of (seconds, tokens), and 'answers', which do not depend on the round.
    """
    clock = CLOCKS[given.clock]
    times = {name: {group: {"rounds": [[0.0, 0] for _ in range(given.rounds)], "answers": []} for group in groups}
             for name in ways}  # fmt: skip
    for number in range(-1, given.rounds):  # the first warms up, and finds the draft length
        for index in range(max(map(len, groups.values()))):
            for group, batches in groups.items():
                order = list(ways) if index < len(batches) else []
                for name in order[index % len(ways) :] + order[: index % len(ways)]:
                    started = clock()
                    sequences = ways[name](batches[index], max_new_tokens=given.new_tokens)
                    seconds, answers = clock() - started, parts.answers(batches[index], sequences)
                    if number < 0:
                        times[name][group]["answers"] += answers
                        continue
                    times[name][group]["rounds"][number][0] += seconds
                    times[name][group]["rounds"][number][1] += sum(map(len, answers))
    return times


def per_token(rounds):
    """Milliseconds per token (median, minimum and maximum over the rounds), and tokens per second."""
    times = [1e3 * seconds / tokens for seconds, tokens in rounds]
    middle = statistics.median(times)
    return {"ms_per_token": middle, "least": min(times), "most": max(times), "tokens_per_s": 1e3 / middle}


def ratio(rounds, other):
    """Ratio of two methods' time per token within a round, as the median over the rounds."""
    return statistics.median((a[0] / a[1]) / (b[0] / b[1]) for a, b in zip(rounds, other))


# Measures.


def table(parts, sets, given):
    """Compare the methods."""
    if given.neutral:
        from divdec.demo.facts import NEUTRAL

        sets = sets | {"neutral": [Record("", messages=(Message("user", prompt),)) for prompt in NEUTRAL]}
    groups = {
        name: parts.batches(spread(records, given.prompts * given.batch), given.batch) for name, records in sets.items()
    }
    ways = methods(parts, given)
    times = timed(ways, groups, parts, given)
    rows = {}
    for name in ways:
        every = [times[name][group]["rounds"] for group in groups]
        both = [[sum(column) for column in zip(*rounds)] for rounds in zip(*every)]
        theirs = [[sum(column) for column in zip(*rounds)]
                  for rounds in zip(*(times[TARGET][group]["rounds"] for group in groups))]  # fmt: skip
        row = rows[name] = per_token(both) | {"over_target": ratio(both, theirs)}
        row["groups"] = {group: ratio(times[name][group]["rounds"], times[TARGET][group]["rounds"]) for group in groups}
        if given.neutral:
            row["mix"] = sum(WEIGHTS[group] * value for group, value in row["groups"].items())
        answers = [pair for group in groups
                   for pair in zip(times[name][group]["answers"], times[PLAIN][group]["answers"])]  # fmt: skip
        row |= {"as_steered": sum(a == b for a, b in answers), "answers": len(answers),
                "tokens": sum(len(answer) for answer, _ in answers)}  # fmt: skip
    heads = [*groups, *(["mix"] if given.neutral else [])]
    print(f"\n{given.batch} prompts at a time, {given.prompts} batches a group, at most {given.new_tokens} tokens, "
          f"{given.clock} time, median of {given.rounds} rounds")  # fmt: skip
    print(f"{'':<22} {'ms a token':>10} {'least – most':>17} {'tokens/s':>9} {'time/target':>11}"
          + "".join(f"{head:>9}" for head in heads) + f"{'tokens':>8}  answers as steered")  # fmt: skip
    for name, row in rows.items():
        cells = [*row["groups"].values(), *([row["mix"]] if given.neutral else [])]
        print(f"{name:<22} {row['ms_per_token']:>10.2f} {row['least']:>8.2f} –{row['most']:>7.2f}"
              f" {row['tokens_per_s']:>9.1f} {row['over_target']:>11.3f}" + "".join(f"{cell:>9.3f}" for cell in cells)
              + f"{row['tokens']:>8}  {row['as_steered']} of {row['answers']}")  # fmt: skip
    return {"rows": rows, "drafts": drafts(parts, groups, given) if given.batch == 1 else {}}


def drafts(parts, groups, given):
    """Tokens per target pass and accepted drafts of each group, in a pass that is not timed."""
    figures = {}
    for group, batches in groups.items():
        counted = SpeculationStatistics()
        for batch in batches:
            speculative(parts, Speculation(statistics=counted))(batch, max_new_tokens=given.new_tokens)
        figures[group] = counted.to_dict()
        print(f"speculative, {group}: {counted.tokens_per_pass:.2f} tokens a target pass, "
              f"{counted.acceptance_rate:.0%} of the drafts accepted")  # fmt: skip
    return figures


class Clock:
    """A streamer that records the time of each token. It skips the prompt, which some methods send first."""

    def __init__(self, batch):
        self.batch, self.times = batch, []

    def put(self, tokens):
        if tokens.numel() == self.batch:
            self.times.append(time.perf_counter())

    def end(self):
        pass


# transformers alone, from the start of Python to the first token.
TARGET_ALONE = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
conversation = [{"role": "user", "content": sys.argv[2]}]
ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_tensors="pt", return_dict=True)
model.generate(**ids, max_new_tokens=1, do_sample=False)
"""


def startup(parts, sets, given):
    """Seconds from the command to the first token, and peak memory in GiB; medians, the first round is not counted."""
    prompt = sets["retain"][0].messages[0].content
    bundle = [sys.executable, "-m", "divdec.cli", "generate", str(given.bundle), "--prompt", prompt]
    commands = {
        TARGET: [sys.executable, "-c", TARGET_ALONE, str(parts.paths["target"]), prompt],
        PLAIN: [*bundle, "--max-new-tokens", "1"],
    }
    rounds = {name: [] for name in commands}
    for number in range(-1, given.rounds):
        for name, words in commands.items():
            started = time.perf_counter()
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            _, status, usage = os.wait4(process.pid, 0)
            if status:
                raise UsageError(f"this command failed: {' '.join(words)}")
            if number >= 0:
                rounds[name].append((time.perf_counter() - started, usage.ru_maxrss / 2**20))
    medians = {name: [statistics.median(column) for column in zip(*rows)] for name, rows in rounds.items()}
    for name, (seconds, memory) in medians.items():
        print(f"{name}: {seconds:.1f} s to the first token, peak {memory:.1f} GiB")
    return medians


def machine():
    """Versions and load of the machine."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__,
            "transformers": transformers.__version__, "load": os.getloadavg()[0]}  # fmt: skip


def sizes(target, auxiliary, paths=()):
    """N, n, 1 + 2n/N (1 + n/N if one pass runs both), and target / auxiliary in compute, the output head included."""
    N, n = target.num_parameters(), auxiliary.num_parameters()
    bound, compute = 1 + (1 if "base" in paths else 2) * n / N, matrix_weights(target) / matrix_weights(auxiliary)
    return {"N": N, "n": n, "bound": bound, "compute_ratio": compute}


def matrix_weights(model):
    """Weights of matrix products; a token costs two operations for each. Input embeddings do not count."""
    head, inputs = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    return matrices if head is inputs else matrices - inputs.numel()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=Path("runs/bench-models/bundle"))
    parser.add_argument("--toy", action="store_true", help="random models and one short round: tries the script")
    parser.add_argument("--adapters", nargs=2, metavar=("TARGET", "BASE"), help="a bundle of random adapters of BASE")
    parser.add_argument("--train", type=Path, metavar="TOFU", help="only train the models of --bundle, on TOFU's files")
    parser.add_argument("--measure", nargs="+", choices=MEASURES, default=["table"])
    parser.add_argument("--steering", help="another rule than the bundle's")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="processor: on a shared machine, one thread")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=5, help="batches of prompts from each set")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--neutral", action="store_true", help="neutral prompts too")
    parser.add_argument("--gammas", action="store_true", help="γ fixed at 1 to 8, too")
    parser.add_argument("--reference", type=Path, metavar="PATH", help="a checkout of the paper's published code")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    given = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if given.threads:
        torch.set_num_threads(given.threads)
    try:
        if given.train is not None:
            print(train_bundle(given.train, given.bundle.parent))
            return 0
        with tempfile.TemporaryDirectory() as folder:
            if given.adapters is not None:
                given.bundle = adapter_bundle(Path(folder), *given.adapters)
            if given.toy:
                given.bundle = toy_bundle(Path(folder))
                given.prompts, given.rounds, given.new_tokens = 1, 1, 8
            result = run(given)
    except UsageError as error:
        print(f"steering: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(result))
    return 0


def run(given):
    """Take the measures, and return their figures."""
    sets = questions_beside(given.bundle)
    dtype = given.dtype if given.dtype == "auto" else getattr(torch, given.dtype)
    parts = Parts(given.bundle, given.steering, dtype)
    size = sizes(parts.target, parts.retain, parts.paths)
    result = {"machine": machine(), "sizes": size, "steering": str(parts.model.steering)}
    print(", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    print(f"target {size['N']:,} parameters, auxiliaries {size['n']:,} each, {size['compute_ratio']:.1f} x in compute; "
          f"by parameters {size['bound']:.3f}; {result['steering']}, {parts.target.dtype}")  # fmt: skip
    for name in given.measure:
        result[name] = globals()[name](parts, sets, given)
    return result


if __name__ == "__main__":
    sys.exit(main())
