"""Experts beside the target and in other processes: the same answers, and errors where a process is lost."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import make_parts, tiny_model
from divdec import DivergenceForCausalLM, Steering, UsageError, write_bundle
from divdec.cli import main
from divdec.errors import FailedClosed
from divdec.experts.placed import Placement
from divdec.experts.placed_cache import Abilities, RemoteCache
from divdec.experts.placed_remote import RemoteExperts
from divdec.experts.placed_transfer import Tail, packed, total_variation_bound, unpacked
from divdec.experts.placed_wire import Link, Message, undisturbed
from divdec.steering import steer_linear, steer_rank

SCRIPT = Path(__file__).with_name("placed_ranks.py")
SEARCHED = os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
ENVIRONMENT = {**os.environ, "PYTHONPATH": SEARCHED, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
PROMPTS = torch.tensor([[5, 9, 200, 31], [77, 8, 300, 2]])


def run(*arguments):
    return subprocess.run(
        list(map(str, arguments)), env=ENVIRONMENT, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.fixture(scope="module")
def bundles(tmp_path_factory, checkpoints, tokenizer):
    """A folder of bundles: a plain one, and those with which something is amiss."""
    folder = tmp_path_factory.mktemp("placed")
    for name, model in (("broken", tiny_model("llama", len(tokenizer), 2)), ("third", tiny_model("llama", 512, 3))):
        if name == "broken":
            with torch.no_grad():
                model.get_output_embeddings().weight[5, 3] = float("nan")
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name, forget in (("bundle", checkpoints / "forget"), ("nan", folder / "broken"), ("other", folder / "third")):
        write_bundle(
            folder / name, target=str(checkpoints / "target"), retain_auxiliary=str(checkpoints / "retain"),
            forget_auxiliary=str(forget), steering="linear:1.5",
        )  # fmt: skip
    config = json.loads((folder / "bundle/config.json").read_text())
    config["forget_auxiliary"]["folder"] = "../nowhere"
    (folder / "absent").mkdir()
    (folder / "absent/config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def kinds(bundles, checkpoints, tokenizer, tokenizers, world, tmp_path_factory):
    """Beside those, bundles of other kinds of experts."""
    texts = tmp_path_factory.mktemp("texts")
    for name, part in (("forget", world.corpus[:30]), ("retain", world.corpus[40:120])):
        (texts / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in dict.fromkeys(part)))
    arguments = ["ngram", "--retain", texts / "retain.jsonl", "--forget", texts / "forget.jsonl", "--target",
                 checkpoints / "target", "--output", texts / "pair"]  # fmt: skip
    assert main(list(map(str, arguments))) == 0
    for name, model, own in (
        ("p-bridged", tiny_model("llama", len(tokenizers["unigram"]), 1), tokenizers["unigram"]),
        ("q-bridged", tiny_model("llama", len(tokenizers["unigram"]), 2), tokenizers["unigram"]),
        ("p-windowed", tiny_model("mistral", len(tokenizer), 1), tokenizer),
        ("q-windowed", tiny_model("mistral", len(tokenizer), 2), tokenizer),
    ):
        model.save_pretrained(bundles / name)
        own.save_pretrained(bundles / name)
    target = {"target": str(checkpoints / "target"), "steering": "linear:1.5"}
    plain = {f"{name}_auxiliary": str(checkpoints / name) for name in ("retain", "forget")}
    write_bundle(bundles / "counted", **target, **plain, ngram=texts / "pair")
    for kind in ("bridged", "windowed"):
        pair = {"retain_auxiliary": str(bundles / f"q-{kind}"), "forget_auxiliary": str(bundles / f"p-{kind}")}
        write_bundle(bundles / kind, **target, **pair, bridge=kind == "bridged")
    return bundles


def test_two_processes_that_torchrun_starts_answer_as_one(bundles):
    done = run(*TORCHRUN, 2, SCRIPT, "rank", "same", bundles)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
def test_three_processes_that_torchrun_starts_answer_as_one(bundles):
    done = run(*TORCHRUN, 3, SCRIPT, "rank", "three", bundles)
    assert done.returncode == 0, done.stderr[-4000:]


def outcomes(folder, *scenarios):
    done = run(sys.executable, SCRIPT, "all", folder, *scenarios)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_what_is_lost_is_an_error_and_nobody_stays_behind(bundles):
    """Exit codes by process; 0 where all was as the scenario says it should be, or where the target's said goodbye."""
    found = outcomes(bundles, "lost", "silent", "nan", "another", "absent", "ended")
    codes = {name: outcome["codes"] for name, outcome in found.items()}
    assert codes == {
        "lost": [0, -9],
        "silent": [0, 1],  # once it runs again it finds that nobody listens
        "nan": [0, 0],
        "another": [0, 0],  # both hear of it
        "absent": [0, 0],
        "ended": [-9, 1],
    }, {name: outcome["said"] for name, outcome in found.items()}
    assert "the target's process is gone" in found["ended"]["said"][1]


def test_p_and_q_in_a_process_each(kinds):
    found = outcomes(kinds, "three", "lost_q", "counted_in_three", "alone")
    codes = {name: outcome["codes"] for name, outcome in found.items()}
    told = {name: outcome["said"] for name, outcome in found.items()}
    assert codes == {"three": [0, 0, 0], "lost_q": [0, 1, -9], "counted_in_three": [2, 2, 2], "alone": [2]}, told
    assert "start two" in told["counted_in_three"][0]
    assert "need two or three processes, not 1" in told["alone"][0]


@pytest.mark.slow
def test_experts_of_every_kind_answer_as_in_one_process(kinds):
    found = outcomes(kinds, "counted", "bridged", "windowed")
    assert [outcome["codes"] for outcome in found.values()] == [[0, 0]] * 3, [o["said"] for o in found.values()]


@pytest.mark.slow
def test_the_command_line_on_two_processes(bundles, tmp_path):
    arguments = ["generate", bundles / "bundle", "--prompt", "Who wrote", "The old", "--max-new-tokens", "6", "--json",
                 "--logprobs", "--output"]  # fmt: skip
    place = ["--place", "experts=processes"]
    for name, more in (("two", []), ("few", ["--experts-entries", "100", "--experts-tolerance", "1"])):
        done = run(*TORCHRUN, 2, "-m", "divdec.cli", *arguments, tmp_path / name, *place, *more)
        assert done.returncode == 0, done.stderr[-4000:]
    assert "100 of 512 entries crossed; at 12 positions" in done.stderr
    assert main(list(map(str, [*arguments, tmp_path / "one"]))) == 0
    assert (tmp_path / "two").read_text() == (tmp_path / "one").read_text()
    done = run(*TORCHRUN, 2, "-m", "divdec.cli", *arguments, tmp_path / "not")
    assert done.returncode
    assert "2 processes were started" in done.stderr


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (["--place", "experts=nowhere"], "device 'nowhere' cannot be used"),
        (["--place", "target=cpu"], "accepted: experts=DEVICE"),
        (["--place", "experts"], "accepted: experts=DEVICE"),
        (["--place", "retain_auxiliary=cpu"], "both auxiliaries"),
        (["--place", "experts=cpu", "forget_auxiliary=cpu"], "both auxiliaries"),
        (["--place", "experts=processes"], "need two or three processes, not 1: torchrun"),
        (["--place", "experts=processes", "--experts-timeout", "0"], "timeout is 0 seconds"),
        (["--place", "experts=processes", "--experts-entries", "0"], "at least 1"),
        (["--place", "experts=processes", "--experts-tolerance", "2"], "tolerance is 2"),
        (["--experts-entries", "5"], "--place experts=processes"),
    ],
)
def test_what_cannot_be_placed(bundles, place, words, capsys):
    assert main(["generate", str(bundles / "bundle"), "--prompt", "a", *place]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_placement_is_checked():
    assert Placement.parse(None) == Placement.parse("inside") == Placement()
    for wrong in ("elsewhere", 3):
        with pytest.raises(UsageError, match="accepted: inside, beside, processes"):
            Placement.parse(wrong)
    with pytest.raises(UsageError, match="accepted: gloo, nccl"):
        Placement("processes", backend="mpi")


@pytest.mark.parametrize("family", ["llama"], indirect=True)
class TestBeside:
    """Experts in a thread of this process."""

    def test_answers_are_the_same(self, steered):
        def everything():
            with torch.no_grad():
                yield steered(input_ids=PROMPTS, use_cache=False).logits
                yield steered.components(PROMPTS)[1]
            for options in ({}, {"num_beams": 2}, {"speculative": 2}, {"cache_implementation": "static"}):
                yield steered.generate(
                    PROMPTS, attention_mask=torch.ones_like(PROMPTS), max_new_tokens=6, do_sample=False,
                    pad_token_id=1, eos_token_id=None, **options,
                )  # fmt: skip

        for setting in ("linear:1.5", "rank:20"):
            steered.steering = setting
            steered.overlap = False
            expected = list(everything())
            steered.overlap = True
            assert steered.overlap
            assert all(torch.equal(one, other) for one, other in zip(everything(), expected, strict=True))

    def test_experts_run_while_the_target_does(self, steered):
        import threading

        steered.overlap = True
        both = threading.Barrier(2)

        def meet(*_):
            both.wait(timeout=60)

        hooks = [steered.target.register_forward_pre_hook(meet), steered.experts.forget.register_forward_hook(meet)]
        with torch.no_grad():
            steered(input_ids=PROMPTS, use_cache=False)
        for hook in hooks:
            hook.remove()
        assert not both.broken

    def test_errors_of_either_are_heard(self, steered):
        steered.overlap = True
        with torch.no_grad():
            with pytest.raises(IndexError):
                steered(input_ids=torch.tensor([[600]]))
            steered.experts.forget.get_output_embeddings().weight[3] = float("nan")
            with pytest.raises(RuntimeError, match="not finite"):
                steered(input_ids=PROMPTS)
            steered.experts.forget.forward = None
            with pytest.raises(TypeError):
                steered(input_ids=PROMPTS)

    def test_gradients_reach_the_experts_as_ever(self, steered):
        steered.overlap = True
        steered(input_ids=PROMPTS).logits.sum().backward()
        assert all(weight.grad is not None for weight in steered.experts.retain.lm_head.parameters())

    def test_a_model_can_be_copied(self, steered):
        import copy

        steered.overlap = True
        with torch.no_grad():
            expected = steered(input_ids=PROMPTS).logits
            other = copy.deepcopy(steered)
            assert other.overlap
            assert torch.equal(other(input_ids=PROMPTS).logits, expected)


def test_a_bundle_is_loaded_beside(bundles):
    model = DivergenceForCausalLM.from_pretrained(bundles / "bundle", experts_placement="beside")
    assert model.overlap
    assert not DivergenceForCausalLM.from_pretrained(bundles / "bundle").overlap


# What crosses.


def divergences(seed=0, shape=(2, 3, 97), spread=2.0):
    torch.manual_seed(seed)
    return spread * torch.randn(shape)


@pytest.mark.parametrize("vocabulary", [None, tuple(range(1, 97, 2))])
@pytest.mark.parametrize("k", [1, 7, 40])
def test_the_rank_rules_tokens_suppress_what_the_divergence_would(k, vocabulary):
    target = torch.randn(2, 3, 97)
    divergence = divergences().round()  # with ties
    for fill in ("hard", "soft"):
        steering = Steering("rank", k=k, fill=fill, vocabulary=vocabulary)
        eligible = steering.eligible(97)
        tensors = packed(divergence, steering, eligible, entries=5)
        assert tensors["suppressed"].numel() == 6 * k
        found = steer_rank(target, unpacked(tensors, 97), k, fill, eligible)
        assert torch.equal(found, steer_rank(target, divergence, k, fill, eligible))


def test_what_is_not_finite_stays_so():
    divergence = divergences()
    divergence[0, 1, 4], divergence[1, 2, 9] = float("nan"), float("inf")
    for steering in (None, Steering("rank", k=3), Steering()):
        found = unpacked(packed(divergence, steering, entries=10), 97)
        assert torch.equal(found.isfinite().all(-1), divergence.isfinite().all(-1))


@given(
    seed=st.integers(0, 10_000), entries=st.integers(1, 48), alpha=st.floats(-5, 5),
    spread=st.sampled_from([0.1, 1, 6]), ties=st.booleans(),
)  # fmt: skip
def test_no_distribution_is_further_than_its_bound(seed, entries, alpha, spread, ties):
    divergence = divergences(seed, spread=spread)
    divergence = divergence.round() if ties else divergence
    target = 3 * torch.randn(2, 3, 97)
    tensors = packed(divergence, Steering(alpha=alpha, allow_negative=True), entries=entries)
    known = unpacked(tensors, 97)
    tokens = tensors["tokens"].long()
    assert torch.equal(known.gather(-1, tokens), divergence.gather(-1, tokens))  # what crosses is exact
    assert ((known - divergence).abs().amax(-1) <= tensors["half"] * (1 + 1e-6)).all()
    found, wanted = steer_linear(target, known, alpha), steer_linear(target, divergence, alpha)
    distance = (found.double().softmax(-1) - wanted.double().softmax(-1)).abs().sum(-1) / 2
    tail = Tail.of(tensors)
    assert tail is not None
    bound = tail.bound(found, alpha)
    assert (distance <= bound + 1e-6).all()
    assert (bound <= torch.tanh(abs(alpha) * tensors["half"].double() / 2) + 1e-9).all()


def test_all_cross_where_half_of_them_would_be_more():
    divergence = divergences()
    for steering, entries in ((Steering(), 49), (Steering(), None), (None, 3)):
        assert packed(divergence, steering, entries=entries).keys() == {"divergence"}


def test_the_entries_taken_leave_the_narrowest_range():
    divergence = divergences(shape=(1, 4, 20))
    tensors = packed(divergence, Steering(), entries=6)
    ordered = divergence.sort(-1).values
    narrowest = (ordered[..., 13:] - ordered[..., :7]).amin(-1) / 2  # of all windows of 14 neighbours
    torch.testing.assert_close(tensors["half"], narrowest)


def test_the_bound_by_hand():
    """A tenth of the probability is unknown by a factor of 3: 0.3 of 1.2 against 0.1, or 0.0333 of 0.9333."""
    bound = total_variation_bound(torch.tensor([0.1]).double(), torch.tensor([3.0]).double().log())
    assert bound.item() == pytest.approx(0.3 / 1.2 - 0.1)
    # All of them unknown: tanh(ε/2), where the probability is best split.
    assert total_variation_bound(torch.ones(1).double(), torch.ones(1).double() * 2).item() == pytest.approx(
        torch.tensor(1.0).tanh().item()
    )
    extremes = total_variation_bound(
        torch.tensor([0.0, 0.5, 0.5, 1e-12]).double(), torch.tensor([5.0, 0.0, 1e4, 1e4]).double()
    )
    assert extremes.tolist() == [0.0, 0.0, 1.0, 1.0]


def test_the_bound_is_reached():
    """No smaller one holds: the worst case, found by trying, comes as near as one likes."""
    torch.manual_seed(0)
    for omitted, reach in ((0.3, 0.5), (0.05, 2.0), (0.9, 1.0), (0.6, 3.0)):
        bound = total_variation_bound(torch.tensor([omitted]).double(), torch.tensor([reach]).double()).item()
        base = torch.tensor([omitted / 400] * 400 + [1 - omitted], dtype=torch.float64)
        largest = 0.0
        for number in range(0, 401, 2):
            change = torch.full((401,), -reach).double()
            change[:number], change[-1] = reach, 0.0
            for signed in (change, -change):
                moved = (base.log() + signed.where(change != 0, change)).softmax(-1)
                largest = max(largest, float((moved - base).abs().sum() / 2))
        assert bound - 0.005 <= largest <= bound + 1e-9


def test_a_message_comes_back_as_it_was():
    tensors = {"a": torch.arange(6).view(2, 3), "b": torch.randn(3, dtype=torch.bfloat16), "c": torch.ones(2) > 0}
    message = Message({"do": "pass", "orders": [["crop", 3, 2]], "text": "naïve"}, tensors)
    found = Message.decoded(bytes(message.encoded()))
    assert found.facts == message.facts
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals come to the main thread")
def test_ctrl_c_waits_until_a_message_is_whole():
    whole = False
    with pytest.raises(KeyboardInterrupt):
        with undisturbed():
            signal.raise_signal(signal.SIGINT)
            whole = True
        pytest.fail("it was not heard")
    assert whole
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with undisturbed():
        pass


def test_an_answer_that_cannot_be_read_is_the_last_one():
    class Garbled(Link):
        def send(self, message, timeout=None):
            pass

        def receive(self, timeout=None):
            raise ValueError("no header")

    experts = RemoteExperts([Garbled(1, "the other process")], 8)
    with pytest.raises(ValueError, match="no header"):
        experts.divergence(PROMPTS)
    with pytest.raises(FailedClosed, match="could not be read; nothing is answered unsteered"):
        experts.divergence(PROMPTS)


def test_orders_of_a_cache_that_is_gone():
    import collections

    orders = collections.deque()
    cache = RemoteCache(orders, Abilities())
    cache.layer.length = 5
    cache.crop(-2)
    cache.crop(0)
    assert cache.get_seq_length() == 3
    number = cache.layer.number
    del cache
    assert list(orders) == [["new", number], ["crop", number, 2], ["drop", number]]


@pytest.mark.parametrize("family", ["llama"])
def test_parts_of_a_model_may_be_given_to_any_rule(family):
    """What crosses for one rule is for that rule alone; `components` gives the whole divergence."""
    model = DivergenceForCausalLM.from_parts(*make_parts(family), steering="rank:5")
    with torch.no_grad():
        target, divergence = model.components(PROMPTS)
    assert divergence.unique().numel() > 100
    assert torch.equal(steer_rank(target, divergence, 5), model(input_ids=PROMPTS).logits)
