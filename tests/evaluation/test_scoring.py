"""Scores against logits that can be checked by eye, and against the slow way."""

import dataclasses
import math

import pytest
import torch
import transformers
from transformers.modeling_outputs import CausalLMOutputWithPast

from divdec import DivergenceForCausalLM, Steering, UsageError
from divdec.data.formatting import IGNORED, Example, encode, encode_prompts
from divdec.data.records import Message, Record
from divdec.evaluation import scoring
from divdec.evaluation.generation import answers, continuations, without_padding
from divdec.evaluation.metrics import rouge_l_recall
from divdec.evaluation.scoring import (
    EvaluatedModel,
    ItemScore,
    score,
    score_settings,
    unchanged_answers,
)
from divdec_research.suites.metrics import gradient_norm
from support import reference
from support.exactness import LOGITS, assert_same_answer
from support.tiny import FAMILIES, make_parts

EXAMPLES = [
    Example([5, 9, 200, 31, 7], [IGNORED, IGNORED, 200, 31, 7]),
    Example([77, 8, 300], [IGNORED, IGNORED, 300]),
    Example([2, 45, 6, 250, 12, 33, 9], [IGNORED, 45, 6, 250, 12, 33, 9]),
]


class ByEye(torch.nn.Module):
    """After any token, gives the next id a logit of log 3 and all others 0: probability 3/5 among three tokens."""

    device = torch.device("cpu")

    def forward(self, input_ids, attention_mask, use_cache):
        logits = torch.nn.functional.one_hot((input_ids + 1) % 3, 3) * math.log(3)
        return CausalLMOutputWithPast(logits=logits)


def test_scores_match_hand_computed_values():
    result = score(ByEye(), [Example([0, 1, 2], [IGNORED, 1, 2]), Example([0, 2], [IGNORED, 2])])
    assert result[0].log_probabilities == pytest.approx((math.log(3 / 5), math.log(3 / 5)))
    assert result[0].hits == (True, True)
    assert result[0].probability == pytest.approx(3 / 5)
    assert result[1].hits == (False,)
    assert result[1].loss == pytest.approx(math.log(5))
    two = ItemScore((-1.0, -3.0), (True, False))
    assert two.loss == 2.0
    assert ItemScore((0.0, 0.0, 0.0, 0.0), (True, False, True, True)).token_accuracy == 0.75


@pytest.fixture(scope="module")
def model():
    return DivergenceForCausalLM.from_parts(*make_parts("llama"), steering="linear:1.5")


def test_long_answers_are_scored_in_smaller_batches(model, monkeypatch):
    settings, kept = [Steering.parse("linear:1.5"), Steering.parse("rank:2")], []
    prompt, answer = [5, 9, 7], list(range(10, 40))
    ids = [*prompt, *answer]
    examples = [*EXAMPLES, Example(ids, [IGNORED] * 3 + answer), Example(ids, [IGNORED] * 3 + answer)]
    expected = score_settings(model, examples, settings)
    components = model.components

    def counted(input_ids, mask, positions, cache, logits_to_keep):
        kept.append(len(input_ids) * logits_to_keep)
        return components(input_ids, mask, positions, cache, logits_to_keep)

    monkeypatch.setattr(model, "components", counted)
    monkeypatch.setattr(scoring, "MAX_POSITIONS", 12)
    for own, other in zip(score_settings(model, examples, settings), expected, strict=True):
        for item, whole in zip(own, other, strict=True):
            assert item.log_probabilities == pytest.approx(whole.log_probabilities, rel=1e-4)
    # The short answers without the shared prompt's, and the long ones one by one.
    assert kept == [1, 12, 1, 30, 30]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_scores_match_reference_for_any_batch_size(model, batch_size):
    result = score(model, EXAMPLES, batch_size=batch_size)
    for example, item in zip(EXAMPLES, result, strict=True):
        logits = reference.steered_logits(
            model.target, model.experts.retain, model.experts.forget, example.input_ids, model.steering
        ).log_softmax(-1)
        positions = [index for index, label in enumerate(example.labels) if label != IGNORED]
        expected = [logits[index - 1, example.labels[index]].item() for index in positions]
        assert item.log_probabilities == pytest.approx(expected, abs=LOGITS)
        assert item.hits == tuple(int(logits[index - 1].argmax()) == example.labels[index] for index in positions)


def test_scoring_many_settings_in_one_pass_matches_separate_passes(model):
    settings = [Steering(alpha=0.5), Steering(alpha=2.0), Steering("rank", k=9, fill="soft")]
    together = score_settings(model, EXAMPLES, settings)
    for setting, items in zip(settings, together, strict=True):
        model.steering = setting
        for one, other in zip(score(model, EXAMPLES), items, strict=True):
            assert one.log_probabilities == pytest.approx(other.log_probabilities, abs=LOGITS)
    model.steering = "linear:1.5"


def test_likelihoods_have_the_soft_fill_and_answers_their_own(model, tokenizer):
    hard = Steering("rank", k=400)  # masks a token of an answer
    evaluated = EvaluatedModel(model, tokenizer, (hard,))
    result = evaluated.scores(EXAMPLES, moments=False, batch_size=32, title=None)
    assert result == score_settings(model, EXAMPLES, [dataclasses.replace(hard, fill="soft")])
    assert evaluated.under(evaluated.settings[0]).steering == hard
    with pytest.raises(UsageError, match=r"item \d: .*soft one"):
        score(model, EXAMPLES)  # its logits are used as they are
    model.steering = "linear:1.5"


SHARED_PROMPTS = [
    Example([*prompt, *answer], [IGNORED] * len(prompt) + answer)
    for prompt, answers_to_it in (
        ([5, 9, 200, 31, 7, 8, 44, 3, 17, 260, 91, 12], ([6, 250], [12, 33, 9, 4, 77], [3])),
        ([77, 8], ([300, 12], [301, 5, 6])),
        ([1], ([4, 4], [9, 2, 4])),
        ([60, 61, 62], ([63],)),
    )
    for answer in answers_to_it
]


@pytest.mark.parametrize("family", [*FAMILIES, "mistral"])
@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_shared_prompt_prefix_gives_same_scores(family, batch_size):
    model = DivergenceForCausalLM.from_parts(*make_parts(family), steering="linear:1.5")
    settings = [Steering(alpha=1.5), Steering("rank", k=9, fill="soft")]
    result = score_settings(model, SHARED_PROMPTS, settings, moments=True, batch_size=batch_size)
    plain = score(model.target, SHARED_PROMPTS, batch_size=batch_size)
    steered = score(model, SHARED_PROMPTS, batch_size=batch_size)
    parts = model.target, model.experts.retain, model.experts.forget
    for index, example in enumerate(SHARED_PROMPTS):
        for steering, items in zip([*settings, settings[0], None], [*result, steered, plain], strict=True):
            steering = steering or Steering(alpha=0.0)
            logits = reference.steered_logits(*parts, example.input_ids, steering).log_softmax(-1)
            positions = range(example.prompt_length, len(example.labels))
            expected = [logits[t - 1, example.labels[t]].item() for t in positions]
            assert items[index].log_probabilities == pytest.approx(expected, abs=LOGITS)
            assert items[index].hits == tuple(int(logits[t - 1].argmax()) == example.labels[t] for t in positions)


def other_model(kind):
    """Architectures whose caches or positions are of another kind."""
    torch.manual_seed(0)
    small = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    encoder = {name: value for name, value in small.items() if name != "num_key_value_heads"}
    config = {
        "lfm2": lambda: transformers.Lfm2Config(**small, layer_types=["conv", "full_attention"]),  # states
        "roberta": lambda: transformers.RobertaConfig(**encoder, is_decoder=True),  # positions begin at 2
        "bart": lambda: transformers.BartConfig(  # positions that cannot be given
            vocab_size=400, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64,
            max_position_embeddings=64,
        ),
        "bloom": lambda: transformers.BloomConfig(vocab_size=400, hidden_size=32, n_layer=2, n_head=4),  # no positions
    }[kind]()  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", ["lfm2", "roberta", "bart", "bloom"])
def test_scores_match_unbatched_for_other_cache_types(kind):
    model = other_model(kind)
    for batch_size in (3, 16):
        result = score(model, SHARED_PROMPTS, batch_size=batch_size)
        for example, item in zip(SHARED_PROMPTS, result, strict=True):
            with torch.no_grad():
                log_p = model(torch.tensor([example.input_ids]), use_cache=False).logits[0].log_softmax(-1)
            positions = range(example.prompt_length, len(example.labels))
            expected = [log_p[t - 1, example.labels[t]].item() for t in positions]
            assert item.log_probabilities == pytest.approx(expected, abs=LOGITS)


def test_shared_prompts_are_processed_once(model):
    read = []
    handle = model.target.register_forward_pre_hook(
        lambda module, arguments, given: read.append(given["input_ids"].numel()), with_kwargs=True
    )
    score_settings(model, SHARED_PROMPTS[:3], [Steering()])
    handle.remove()
    # The prompt without its last token, and each answer, padded to the longest, in place of its last.
    assert read == [11, 3 * 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hit_uses_lowest_token_id_among_ties(dtype):
    class Equals(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, input_ids, attention_mask, use_cache):
            row = torch.tensor([0.0, 2.0, 2.0, 1.0], dtype=dtype)
            return CausalLMOutputWithPast(logits=row.expand(*input_ids.shape, 4))

    (result,) = score(Equals(), [Example([0, 1, 2, 3, 0], [IGNORED, 1, 2, 3, 0])])
    assert result.hits == (True, False, False, False)  # of equals the lowest id is the first choice


def test_moments_with_zero_probability_tokens(model):
    log_p = torch.tensor([0.5, 0.25, 0.25]).log()
    mean = (log_p.exp() * log_p).sum()
    variance = (log_p.exp() * log_p.square()).sum() - mean.square()

    class Masked(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, input_ids, attention_mask, use_cache):
            row = torch.cat([log_p + 3, torch.tensor([-math.inf])])
            return CausalLMOutputWithPast(logits=row.expand(*input_ids.shape, 4))

    (result,) = score(Masked(), [Example([0, 1], [IGNORED, 1])], moments=True)
    assert result.vocabulary_moments[0] == pytest.approx((mean.item(), variance.item()), abs=1e-6)


def test_gradient_norm_of_single_token_answer_is_zero(model):
    assert gradient_norm(model, Example([5, 6], [IGNORED, 6])) == 0


def test_linear_and_rank_settings_are_scored_together(model):
    several = [Steering(alpha=1.0), Steering("rank", k=2, fill="soft", vocabulary=tuple(range(9)))]
    together = score_settings(model, EXAMPLES, several)
    for setting, items in zip(several, together, strict=True):
        (alone,) = score_settings(model, EXAMPLES, [setting])
        for one, other in zip(items, alone, strict=True):
            assert one.log_probabilities == pytest.approx(other.log_probabilities, abs=LOGITS)
            assert one.hits == other.hits
    assert score_settings(model, EXAMPLES, []) == []


def test_answers_that_stay_are_those_that_generation_repeats(model, tokenizer):
    """Teacher-forced = generated, under every setting, and only the others are generated."""
    prompts = [[5 + n, 9, 200 - n] for n in range(12)]
    expected = [
        without_padding(model, ids) for ids in continuations(model.target, tokenizer, prompts, max_new_tokens=6)
    ]
    settings = [Steering(alpha=0.0), Steering(alpha=0.01), Steering(alpha=0.3, margin=0.1), Steering("rank", k=5)]
    written = tuple(sorted({token for ids in expected for token in ids}))
    settings.append(Steering("rank", k=1, vocabulary=written))  # with the soft fill no first choice would change
    flags = unchanged_answers(model, prompts, expected, settings, batch_size=5)
    assert all(flags[0])
    assert unchanged_answers(model, [], [], settings) == [[]] * len(settings)
    assert 0 < sum(flags[1]) < len(prompts)
    for setting, row in zip(settings, flags, strict=True):
        model.steering = setting
        outputs = [without_padding(model, ids) for ids in continuations(model, tokenizer, prompts, max_new_tokens=6)]
        assert row == [ids == other for ids, other in zip(outputs, expected, strict=True)]
        known = [ids if stays else None for ids, stays in zip(expected, row, strict=True)]
        assert [
            without_padding(model, ids)
            for ids in continuations(model, tokenizer, prompts, max_new_tokens=6, known=known)
        ] == outputs


def test_batched_generation_matches_unbatched(model, tokenizer):
    records = [
        Record("", messages=(Message("user", text),)) for text in ("Who?", "Where was Ana Holway born?", "A b c")
    ]
    together = answers(model, tokenizer, records, max_new_tokens=6)
    prompts = encode_prompts(records, tokenizer)
    result = continuations(model, tokenizer, prompts, max_new_tokens=6)
    assert together == [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in result]
    for prompt, ids in zip(prompts, result, strict=True):
        alone = continuations(model, tokenizer, [prompt], max_new_tokens=6)[0]
        assert_same_answer(model, prompt, ids, alone)


def test_text_metrics_match_hand_computed_values(tokenizer, world):
    assert rouge_l_recall("the cat sat", "the cat sat down") == pytest.approx(3 / 4)
    assert rouge_l_recall("", "a b") == 0
    example = encode(Record("Ana."), tokenizer)
    assert example.labels
