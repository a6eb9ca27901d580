"""No logits processor brings back a token that the rule suppresses, in any way of decoding."""

import asyncio
import inspect

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from divdec import DivergenceForCausalLM, UsageError
from divdec.data.formatting import left_padded
from divdec.errors import FailedClosed
from divdec.serving.request import Request, SamplingParams
from support import reference
from support.tiny import make_parts

VOCAB, END, NEW = 32, 0, 8
PROMPTS = [[5, 9, 20, 31], [7, 8, 30, 2], [4, 4, 4, 4]]
TIMES = GenerationConfig(eos_token_id=3)
TIMES.no_timestamps_token_id = 20

# How each is made; of what is made for other inputs than a text, whether it is refused.
PROCESSORS = {
    "AlternatingCodebooksLogitsProcessor": lambda model: (4, 8, 12),
    "BarkEosPrioritizerLogitsProcessor": lambda model: (END, 0.01),
    "ClassifierFreeGuidanceLogitsProcessor": lambda model: (1.5,),
    "DiaClassifierFreeGuidanceLogitsProcessor": lambda model: (1.5, 4),
    "DiaEOSChannelFilterLogitsProcessor": lambda model: (1, 24),
    "DiaEOSDelayPatternLogitsProcessor": lambda model: ([0], END, 10),
    "EncoderNoRepeatNGramLogitsProcessor": lambda model: (2, torch.tensor(PROMPTS)),
    "EncoderRepetitionPenaltyLogitsProcessor": lambda model: (1.3, torch.tensor(PROMPTS)),
    "EpsilonLogitsWarper": lambda model: (0.05,),
    "EtaLogitsWarper": lambda model: (0.05,),
    "ExponentialDecayLengthPenalty": lambda model: ((1, 1.5), END, 4),
    "ForcedBOSTokenLogitsProcessor": lambda model: (6,),
    "ForcedEOSTokenLogitsProcessor": lambda model: (4 + NEW, END),
    "InfNanRemoveLogitsProcessor": lambda model: (),
    "LogitNormalization": lambda model: (),
    "MinLengthLogitsProcessor": lambda model: (8, END),
    "MinNewTokensLengthLogitsProcessor": lambda model: (4, 4, END),
    "MinPLogitsWarper": lambda model: (0.2,),
    "NoBadWordsLogitsProcessor": lambda model: ([[7], [8, 9]], END),
    "NoRepeatNGramLogitsProcessor": lambda model: (2,),
    "PrefixConstrainedLogitsProcessor": lambda model: (lambda row, text: [3, 4, 5], 1),
    "RepetitionPenaltyLogitsProcessor": lambda model: (1.3,),
    "SequenceBiasLogitsProcessor": lambda model: ({(token,): 50.0 for token in range(16)},),
    "SuppressTokensAtBeginLogitsProcessor": lambda model: (list(range(4, 20)), 4),
    "SuppressTokensLogitsProcessor": lambda model: (list(range(4, 10)),),
    "SynthIDTextWatermarkLogitsProcessor": lambda model: (3, [4, 5, 6], 1024, 0, 16, torch.device("cpu")),
    "TemperatureLogitsWarper": lambda model: (0.7,),
    "TopHLogitsWarper": lambda model: (0.5,),
    "TopKLogitsWarper": lambda model: (30,),
    "TopPLogitsWarper": lambda model: (0.9,),
    "TypicalLogitsWarper": lambda model: (0.9,),
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": lambda model: (1.5, model),
    "WatermarkLogitsProcessor": lambda model: (VOCAB, "cpu"),
    "WhisperNoSpeechDetection": lambda model: (3, 99),
    "WhisperTimeStampLogitsProcessor": lambda model: (TIMES, 4),
}
# These read a batch twice as long as the text's, with and without a condition.
OTHER_INPUTS = {"ClassifierFreeGuidanceLogitsProcessor", "DiaClassifierFreeGuidanceLogitsProcessor"}
REMEMBERING = {"UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor"}


@pytest.fixture(scope="module")
def model():
    """Twelve of 32 tokens are suppressed at every place."""
    return DivergenceForCausalLM.from_parts(*make_parts("llama", VOCAB), "rank:12")


def generate(model, prompts=PROMPTS, **options):
    ids, mask = left_padded(prompts, 1)
    torch.manual_seed(0)
    given = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 1, **options}
    return model.generate(ids, attention_mask=mask, **given)


def suppressed_tokens(model, sequences, start=4):
    """What of some answers the rule suppresses, by the reference."""
    found = []
    for ids in sequences.tolist():
        answer = ids[start:]
        end = answer.index(END) + 1 if END in answer else len(answer)
        parts = model.target, model.experts.retain, model.experts.forget
        logits = reference.steered_logits(*parts, ids[: start + end - 1], model.steering)[start - 1 :]
        found += [token for token, row in zip(answer[:end], logits, strict=True) if row[token] == -torch.inf]
    return found


def test_every_transformers_processor_is_tested():
    """One that a later version brings must be added above."""
    kinds = {
        name for name, kind in vars(logits_process).items()
        if inspect.isclass(kind) and issubclass(kind, LogitsProcessor) and kind is not LogitsProcessor
    }  # fmt: skip
    assert kinds == set(PROCESSORS)


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"speculative": 3}],
    ids=lambda options: next(iter(options), "greedy"),
)
def test_no_processor_revives_a_suppressed_token(model, name, options):
    # Prompt lookup takes one text at a time.
    prompts = [PROMPTS[0] * 3] if "prompt_lookup_num_tokens" in options else PROMPTS
    if name.startswith("Encoder") and len(prompts) == 1:
        pytest.skip("made for three texts")
    processor = getattr(logits_process, name)(*PROCESSORS[name](model))
    if name == "PrefixConstrainedLogitsProcessor":
        processor._num_beams = options.get("num_beams", 1)
    found = outcome(model, prompts, logits_processor=LogitsProcessorList([processor]), **options)
    if name in OTHER_INPUTS:
        assert isinstance(found, Exception)
    elif isinstance(found, Exception):
        # These follow one answer token by token; others leave no token now and then.
        refused = name in REMEMBERING and options and "do_sample" not in options
        kind = UsageError if refused or name.startswith("Unbatched") else FailedClosed
        assert isinstance(found, kind), found
        assert "\n" not in str(found)
    else:
        assert suppressed_tokens(model, found, len(prompts[0])) == []
        assert found.shape[1] > len(prompts[0])


def outcome(model, prompts, **options):
    try:
        return generate(model, prompts, **options)
    except (ValueError, RuntimeError, AssertionError, IndexError) as error:
        return error


@pytest.mark.parametrize("speculative", [None, 3])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True}])
def test_sequence_without_allowed_token_raises(model, speculative, options):
    """transformers lets a constraint win over −inf; without it, `argmax` would name token 0."""
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        worst = (model(ids).logits[0, -1] == -torch.inf).nonzero().flatten().tolist()
    if speculative and "num_beams" in options:
        return
    for constraint in (
        {"prefix_allowed_tokens_fn": lambda row, text: worst},
        {"suppress_tokens": [token for token in range(VOCAB) if token not in worst]},
    ):
        with pytest.raises(FailedClosed, match=r"no token can be chosen|nothing to draw"):
            generate(model, PROMPTS[:1], speculative=speculative, **constraint, **options)


def test_beam_without_allowed_token_is_dropped(model):
    """What the rule suppresses in one beam is no error for the others."""
    with torch.no_grad():
        first, second = model(torch.tensor([PROMPTS[0]])).logits[0, -1].topk(2).indices.tolist()
        after = model(torch.tensor([[*PROMPTS[0], first]])).logits[0, -1]
    worst = (after == -torch.inf).nonzero().flatten().tolist()

    def allowed(row, text):
        if len(text) == 4:
            return [first, second]
        return worst if text[4] == first else [token for token in range(4, VOCAB) if token not in PROMPTS[0]]

    found = generate(model, PROMPTS[:1], num_beams=2, prefix_allowed_tokens_fn=allowed, max_new_tokens=4)
    assert found[0, 4] == second
    assert suppressed_tokens(model, found) == []


@pytest.mark.parametrize("speculative", [None, 3])
def test_finished_sequence_needs_no_allowed_token(model, speculative):
    """The row of a finished answer stays in the batch: what it allows is of no interest."""
    model.generation_config.eos_token_id = ends = generate(model, PROMPTS[:1])[0, 5].item()
    try:

        def allowed(row, text):
            return [3] if ends in text[4:] else list(range(VOCAB))

        found = generate(model, suppress_tokens=[3], prefix_allowed_tokens_fn=allowed, speculative=speculative)
        assert found[0, 5:7].tolist() == [ends, 1]
    finally:
        model.generation_config.eos_token_id = END


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("options", [{}, {"speculative": 2}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}])
def test_processor_returning_nan_raises(model, value, options):
    with torch.no_grad():
        best = model(torch.tensor([PROMPTS[0]])).logits[0, -1].argmax()

    class Broken(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.index_fill(1, best, value)

    with pytest.raises(FailedClosed, match="no token can be chosen"):
        generate(model, PROMPTS[:1], logits_processor=LogitsProcessorList([Broken()]), **options)


@pytest.mark.parametrize("speculative", [None, 2])
def test_processor_returning_wrong_shape_is_rejected(model, speculative):
    class First(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores[:1]

    with pytest.raises(UsageError, match=r"shape \(1, 32\); a steered model needs \(3, 32\)"):
        generate(model, logits_processor=LogitsProcessorList([First()]), speculative=speculative)


def test_guidance_is_not_offered_with_a_rule_that_suppresses(model):
    assert model.steering.rule == "rank"
    with pytest.raises(UsageError, match="guidance_scale is not offered with the rank rule"):
        generate(model, guidance_scale=1.5)


@pytest.mark.parametrize("rule", ["rank:5:soft", "linear:1.5", "linear:1.5:0.5", "linear:1.5:0.5:full"])
@pytest.mark.parametrize("negative", [None, [[9, 3], [30, 4], [6, 6]]])
def test_guidance_uses_steered_logits(model, rule, negative):
    before, model.steering = model.steering, rule
    parts = model.target, model.experts.retain, model.experts.forget
    try:
        options = {"negative_prompt_ids": torch.tensor(negative)} if negative else {}
        found = generate(model, guidance_scale=1.5, **options)
        for number, ids in enumerate(found.tolist()):
            answer, start = [], (negative or [prompt[-1:] for prompt in PROMPTS])[number]
            while len(answer) < NEW and END not in answer:
                given, free = (
                    reference.steered_logits(*parts, [*text, *answer], model.steering)[-1].log_softmax(-1)
                    for text in (PROMPTS[number], start)
                )
                answer.append(int((free + 1.5 * (given - free)).argmax()))
            assert ids[4 : 4 + len(answer)] == answer
    finally:
        model.steering = before


def test_server_never_samples_suppressed_token(model, tokenizer):
    """Its processors are those of a request, in `Running.choose`."""
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        logits = model(ids).logits[0, -1]
    worst = (logits == -torch.inf).nonzero().flatten().tolist()
    others = [token for token in range(VOCAB) if token not in worst]

    loop = asyncio.new_event_loop()

    def choose(**options):
        sampling = SamplingParams(max_tokens=4, **options)
        return Request(PROMPTS[0], sampling, tokenizer, frozenset([END]), 64, loop).sample(logits)

    for temperature in (0.0, 1.0):
        favoured = choose(temperature=temperature, logit_bias=dict.fromkeys(worst, 100.0))
        assert favoured in others
        with pytest.raises(FailedClosed):
            choose(temperature=temperature, logit_bias=dict.fromkeys(others, -torch.inf))
        with pytest.raises(FailedClosed):
            choose(temperature=temperature, logit_bias={others[0]: torch.inf})
    loop.close()


def test_constraint_sees_only_text_that_it_allowed():
    model = DivergenceForCausalLM.from_parts(*make_parts("llama", VOCAB), "linear:0.2")

    def allowed(row, text):
        assert row == 0
        seen.add(tuple(text.tolist()))
        return [END, *range(2, VOCAB, 3)]

    seen = set()
    options = {"prefix_allowed_tokens_fn": allowed, "max_new_tokens": 16}
    plain = generate(model, [[5, 9, 20, 31]], **options)
    every_text, seen = seen, set()
    assert torch.equal(generate(model, [[5, 9, 20, 31]], speculative=3, **options), plain)
    assert every_text <= seen
