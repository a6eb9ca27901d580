"""What processes of a steered model do in tests/experts/test_placed.py: one script for all of them.

`placed_ranks.py rank SCENARIO FOLDER` is one process, as torchrun starts it. `placed_ranks.py all FOLDER SCENARIO…`
starts the processes of each scenario itself, with the variables that torchrun would set but nobody who ends the others
when one is gone, and prints their exit codes and what they said. It loads torch once for all of them.
"""

import atexit
import copy
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import torch
from transformers import DynamicCache  # noqa: F401  (before forking: what it imports takes seconds)

from divdec import DivergenceForCausalLM, Speculation, Steering, UsageError
from divdec.errors import FailedClosed
from divdec.experts.placed import Placement
from divdec.model.generation import SteeredGeneration  # noqa: F401
from exactness import assert_same_answers

PROMPTS = [[5, 9, 200, 31], [77, 8, 300, 2, 45, 6, 250, 12, 33], [400]]
WIDTH = max(map(len, PROMPTS))
IDS = torch.tensor([[1] * (WIDTH - len(prompt)) + prompt for prompt in PROMPTS])
MASK = torch.tensor([[0] * (WIDTH - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
OPTIONS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}


def load(folder, name="bundle", **options):
    options = {"timeout": 60.0, **options}
    return DivergenceForCausalLM.from_pretrained(
        folder / name, verify=False, experts_placement=Placement("processes", **options)
    )


def generate(model, ids=IDS, mask=MASK, **options):
    return model.generate(input_ids=ids, attention_mask=mask, **{**OPTIONS, **options})


def fails(error, words, action):
    """The action must raise an error that says this; how long that took, in seconds."""
    started, found = time.monotonic(), None
    try:
        action()
    except error as raised:
        found = raised
    assert found is not None, f"no {error.__name__}"
    assert words in str(found), f"{words!r} is not in {found!r}"
    return time.monotonic() - started


def pid_of(folder, rank):
    return int((folder / f"pid.{rank}").read_text())


class Stopper:
    """A streamer that does something to another process when the third token comes."""

    def __init__(self, action):
        self.action, self.left = action, 3

    def put(self, value):
        self.left -= 1
        if not self.left:
            self.action()

    def end(self):
        pass


@torch.no_grad()
def same(folder):
    """Everything as in one process, bit for bit where the arithmetic is the same."""
    ours, local = load(folder), DivergenceForCausalLM.from_pretrained(folder / "bundle", verify=False)
    logits_are_the_same(ours, local)
    caches_are_changed_alike(ours, local)
    answers_are_the_same(ours, local)
    bounds_hold(ours, local)


def logits_are_the_same(ours, local):
    vocabulary = tuple(range(0, 512, 3))
    for setting in ("linear:1.5", "rank:7", Steering("rank", k=40, fill="soft", vocabulary=vocabulary), "linear:0.3"):
        ours.steering = local.steering = setting
        found, wanted = (model(input_ids=IDS, attention_mask=MASK, use_cache=False).logits for model in (ours, local))
        assert torch.equal(found[MASK.bool()], wanted[MASK.bool()]), setting
        # Whoever takes the parts may apply any rule.
        ours.steering = local.steering = "rank:3"
        for one, other in zip(ours.components(IDS[1:2]), local.components(IDS[1:2]), strict=True):
            assert torch.equal(one, other)
        kept = [model(input_ids=IDS[1:2], logits_to_keep=2).logits for model in (ours, local)]
        assert torch.equal(*kept)


def caches_are_changed_alike(ours, local):
    ours.steering = local.steering = "linear:1.5"
    caches = [model.new_cache() for model in (ours, local)]

    def step(columns, rows=slice(None), length=None, on=caches):
        mask = MASK[rows, : columns.stop if length is None else length]
        found = [
            model(input_ids=IDS[rows, columns], attention_mask=mask, past_key_values=cache).logits
            for model, cache in zip((ours, local), on, strict=True)
        ]
        real = MASK[rows, columns].bool()
        assert torch.equal(found[0][real], found[1][real])

    step(slice(0, 7))
    for cache in caches:
        cache.crop(-3)
        assert cache.check_length() == 4
    step(slice(4, 6))
    forks = copy.deepcopy(caches)
    for cache in caches:
        cache.reorder_cache(torch.tensor([2, 1, 1]))
        cache.batch_select_indices(torch.tensor([1]))
        cache.batch_repeat_interleave(2)
    step(slice(6, 9), rows=[1, 1])
    step(slice(6, 8), on=forks)
    for cache in caches:
        cache.reset()
        assert cache.check_length() == 0
    step(slice(0, 9))
    # What fails there fails here, and leaves the other caches as they are.
    broken = ours.new_cache()
    broken.experts.layer._order("nonsense")
    fails(FailedClosed, "nonsense", lambda: ours(input_ids=IDS, past_key_values=broken))
    fails(FailedClosed, "different numbers of tokens", lambda: ours(input_ids=IDS, past_key_values=broken))
    lost = broken.experts
    fails(FailedClosed, "this cache was lost", lambda: ours.experts.divergence(IDS, cache=lost))
    step(slice(8, 9), on=forks)
    # The target fails while the experts run.
    fails(IndexError, "", lambda: ours(input_ids=torch.tensor([[600]])))
    caches = [model.new_cache() for model in (ours, local)]
    step(slice(0, 9), on=caches)


def answers_are_the_same(ours, local):
    for setting in ("linear:1.5", "rank:20"):
        ours.steering = local.steering = setting
        plain = generate(local)
        assert_same_answers(local, PROMPTS, generate(ours), plain)
        told = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 4}
        found, wanted = generate(ours, **told), generate(local, **told)
        assert torch.equal(found.sequences, wanted.sequences)
        assert all(torch.equal(one, other) for one, other in zip(found.logits, wanted.logits, strict=True))
        assert torch.equal(
            generate(ours, num_beams=3, max_new_tokens=5), generate(local, num_beams=3, max_new_tokens=5)
        )
        statistics = []
        for drafter in ("auto", "lookup"):
            speculation = Speculation(gamma=3, drafter=drafter)
            statistics.append(speculation)
            assert_same_answers(local, PROMPTS, generate(ours, speculative=speculation), plain)
    repeated = IDS[1:2].repeat(1, 3)
    whole = torch.ones_like(repeated)
    looked_up = generate(ours, repeated, whole, prompt_lookup_num_tokens=3)
    assert_same_answers(local, repeated.tolist(), looked_up, generate(local, repeated, whole))
    drawn = []
    for model in (ours, local):
        torch.manual_seed(3)
        drawn.append(generate(model, do_sample=True, num_return_sequences=2, max_new_tokens=4))
    assert torch.equal(*drawn)
    uncached = generate(ours, use_cache=False, max_new_tokens=3)
    assert_same_answers(local, PROMPTS, uncached, generate(ours, max_new_tokens=3))


def bounds_hold(ours, local):
    """With fewer entries no distribution is further from the whole one than the bound says."""
    ours.steering = local.steering = "linear:1.5"
    wanted = local(input_ids=IDS, attention_mask=MASK).logits[MASK.bool()].softmax(-1)
    for entries, tolerance in ((8, 1.0), (200, 1.0), (200, 0.0)):
        experts = ours.experts
        experts.entries, experts.tolerance = entries, tolerance
        experts.statistics = type(experts.statistics)()
        found = ours(input_ids=IDS, attention_mask=MASK).logits[MASK.bool()].softmax(-1)
        distance = float((found - wanted).abs().sum(-1).max() / 2)
        told = experts.statistics
        if tolerance == 0:
            assert (told.whole, told.positions) == (1, 0)
            assert torch.equal(found, wanted)
        else:
            assert 1e-5 < distance <= told.largest_bound + 1e-6
            assert told.mean_bound <= told.largest_bound < 1
            assert told.whole == 0
    ours.steering = "rank:20"
    before = experts.statistics.bytes
    ours(input_ids=IDS[1:2], logits_to_keep=1)
    assert experts.statistics.bytes - before < 512  # 20 token ids and their wrapping; the divergence has 2,048
    experts.entries = None


def lost(folder):
    """The process that answers is killed in the middle of an answer."""
    model = load(folder)
    killed = Stopper(lambda: os.kill(pid_of(folder, 1), signal.SIGKILL))
    seconds = fails(FailedClosed, "process 1 (", lambda: generate(model, IDS[:1], MASK[:1], streamer=killed))
    assert seconds < 30
    fails(FailedClosed, "process 1 (", lambda: generate(model))
    fails(FailedClosed, "process 1 (", lambda: model(input_ids=IDS))


def silent(folder):
    """The process that answers stops without being gone."""
    model = load(folder, timeout=3.0)
    stopped = Stopper(lambda: os.kill(pid_of(folder, 1), signal.SIGSTOP))
    try:
        seconds = fails(
            FailedClosed, "did not answer within 3 s", lambda: generate(model, IDS[:1], MASK[:1], streamer=stopped)
        )
    finally:
        os.kill(pid_of(folder, 1), signal.SIGCONT)
    assert 2.5 < seconds < 60
    fails(FailedClosed, "did not answer", lambda: generate(model))


def nan(folder):
    """An auxiliary's weights are not numbers."""
    model = load(folder, "nan", entries=16)
    for setting in ("linear:1.5", "rank:7", "rank:7:soft"):
        model.steering = setting
        fails(FailedClosed, "not finite", lambda: generate(model))
    model.experts.entries = None
    model.steering = "linear:1"
    fails(FailedClosed, "not finite", lambda: generate(model))


def another(folder):
    """The other process is given another bundle."""
    name = "other" if os.environ["RANK"] == "1" else "bundle"
    fails(UsageError, "another bundle: the digest of forget_auxiliary", lambda: load(folder, name))


def absent(folder):
    """The other process cannot load its part."""
    name = "absent" if os.environ["RANK"] == "1" else "bundle"
    fails(UsageError, "does not exist", lambda: load(folder, name))


def ended(folder):
    """The target's process is killed."""
    model = load(folder)
    generate(model, max_new_tokens=2)
    os.kill(os.getpid(), signal.SIGKILL)


@torch.no_grad()
def three(folder):
    """p and q in a process each."""
    ours, local = load(folder), DivergenceForCausalLM.from_pretrained(folder / "bundle", verify=False)
    logits_are_the_same(ours, local)
    caches_are_changed_alike(ours, local)
    answers_are_the_same(ours, local)
    bounds_hold(ours, local)


def lost_q(folder):
    """Of three processes the one that holds q is killed."""
    model = load(folder)
    killed = Stopper(lambda: os.kill(pid_of(folder, 2), signal.SIGKILL))
    fails(FailedClosed, "process 2 (", lambda: generate(model, IDS[:1], MASK[:1], streamer=killed))
    fails(FailedClosed, "process 2 (", lambda: generate(model))


def counted(folder):
    """n-grams beside the pair, in the other process."""
    ours, local = load(folder, "counted"), DivergenceForCausalLM.from_pretrained(folder / "counted", verify=False)
    assert_same_answers(local, PROMPTS, generate(ours), generate(local))
    assert torch.equal(generate(ours, num_beams=2), generate(local, num_beams=2))


def windowed(folder):
    """Auxiliaries with a sliding window, longer ago than which nothing can be taken back unless it was recorded."""
    ours, local = load(folder, "windowed"), DivergenceForCausalLM.from_pretrained(folder / "windowed", verify=False)
    plain = generate(local)
    assert_same_answers(local, PROMPTS, generate(ours), plain)
    found = generate(ours, speculative=Speculation(gamma=3, drafter="lookup"))
    assert_same_answers(local, PROMPTS, found, plain)
    repeated = IDS[1:2].repeat(1, 3)
    whole = torch.ones_like(repeated)
    looked_up = generate(ours, repeated, whole, prompt_lookup_num_tokens=3)
    assert_same_answers(local, repeated.tolist(), looked_up, generate(local, repeated, whole))
    caches = [model.new_cache() for model in (ours, local)]
    for model, cache in zip((ours, local), caches, strict=True):
        model(input_ids=repeated, past_key_values=cache)
        fails(RuntimeError, "cannot be rolled back", lambda cache=cache: cache.crop(-2))
        assert cache.check_length() == 27


def bridged(folder):
    """Auxiliaries with another tokenizer, in the other process."""
    ours, local = load(folder, "bridged"), DivergenceForCausalLM.from_pretrained(folder / "bridged", verify=False)
    assert_same_answers(local, PROMPTS, generate(ours), generate(local))


SCENARIOS = {
    "same": (same, 2), "lost": (lost, 2), "silent": (silent, 2), "nan": (nan, 2), "another": (another, 2),
    "absent": (absent, 2), "ended": (ended, 2), "counted": (counted, 2), "bridged": (bridged, 2),
    "windowed": (windowed, 2), "three": (three, 3),
    "lost_q": (lost_q, 3), "counted_in_three": (counted, 3), "alone": (same, 1),
}  # fmt: skip


def run(scenario, folder):
    """Be one process; its exit code is 0 where all was as it should be."""
    (folder / f"pid.{os.environ['RANK']}").write_text(str(os.getpid()))
    try:
        SCENARIOS[scenario][0](folder)
    except SystemExit as error:
        return error.code
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except BaseException:
        traceback.print_exc()
        return 70
    return 0


def start(scenario, folder):
    """Start a scenario's processes, and wait for them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    number, pids, said = SCENARIOS[scenario][1], [], []
    for rank in range(number):
        said.append(folder / f"said.{scenario}.{rank}")
        pid = os.fork()
        if not pid:
            os.environ.update(
                RANK=str(rank), WORLD_SIZE=str(number), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )  # fmt: skip
            output = os.open(said[-1], os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            code = run(scenario, folder)
            atexit._run_exitfuncs()
            sys.stderr.flush()
            os._exit(code)
        pids.append(pid)
    codes, started = dict.fromkeys(pids), time.monotonic()
    while None in codes.values() and time.monotonic() - started < 240:
        for pid in [pid for pid, code in codes.items() if code is None]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for pid in [pid for pid, code in codes.items() if code is None]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return {
        "codes": list(codes.values()), "said": [path.read_text() for path in said],
        "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "rank":
        sys.exit(run(sys.argv[2], Path(sys.argv[3])))
    print(json.dumps({scenario: start(scenario, Path(sys.argv[2])) for scenario in sys.argv[3:]}))
