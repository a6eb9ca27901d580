"""A pair with another tokenizer: at each position exactly what its text so far says, through every door."""

import copy
import functools
import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from divdec import DivergenceForCausalLM, Steering, UsageError
from divdec.bridge.alignment import AlignedSequence
from divdec.bridge.pair import BridgedPair
from divdec.configuration import DivergenceConfig
from divdec.data.formatting import IGNORED, Example
from divdec.evaluation.scoring import score
from support.architectures import tiny_architecture
from support.exactness import LOGITS, assert_same_answers
from support.exactness import assert_close as close
from support.tiny import tiny_model

PAIRS = [
    ("bpe", "small"),
    ("small", "bpe"),
    ("bpe", "unigram"),
    ("unigram", "small"),
]
TEXTS = (
    "The author Basil Mahfouz Al-Kuwaiti was born in Kuwait City, and his 2nd novel won prizes.",
    "Großmutter aß 😀 日本の庭",
    "море",
)
LONG = (
    "The author was born in a small town by the sea, and the first novel that was written there is about the "
    "people who live between the hills; critics wrote 'it doesn't end', and ещё одна строка о море и людях."
)


def left_padded(rows):
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def ids_of(tokenizer, text):
    return tokenizer(text)["input_ids"]


@torch.no_grad()
def teacher_forced(pair, ids):
    return pair.divergence(torch.tensor([ids]))[0]


@torch.no_grad()
def stepwise(pair, ids, start=1):
    """What generation uses: the prompt, then a token at a time."""
    cache, found = pair.new_cache(), []
    for place in range(start, len(ids) + 1):
        added = ids[:start] if place == start else ids[place - 1 : place]
        found.append(pair.divergence(torch.tensor([added]), cache=cache, logits_to_keep=1)[0, -1])
    return torch.stack(found)


@torch.no_grad()
def slow_reference(pair, ids):
    """Each prefix by itself: its bytes, tokenised as a whole, through models without a cache."""
    reader, found = pair.retokenizer, []
    for place in range(1, len(ids) + 1):
        text = b"".join(reader.bytes[token] or b"" for token in ids[:place]).decode(errors="ignore")
        own = reader.auxiliary.tokenizer(text)["input_ids"]
        logits = [model(input_ids=torch.tensor([own])).logits[0, -1] for model in (pair.retain, pair.forget)]
        real = [token for token, text in enumerate(reader.auxiliary.bytes) if text is not None]
        q, p = (each - each[real].logsumexp(-1) for each in logits)
        difference = q - p
        found.append(torch.where(pair.source < 0, difference[real].median(), difference[pair.source.clamp(min=0)]))
    return torch.stack(found)


def random_tokens(tokenizer, generator, count):
    """Tokens that text never gives in this order; characters begin and do not end."""
    return [generator.randrange(len(tokenizer)) for _ in range(count)]


def test_divergence_is_computed_per_position(make_pair, tokenizers):
    pair = make_pair("bpe", "small")
    ids = ids_of(tokenizers["bpe"], LONG.split("ещё")[0])
    found = teacher_forced(pair, ids)
    close(found, slow_reference(pair, ids))
    # What would be given if every position were answered from the end of the text.
    assert (found[:-1] - found[-1]).abs().amax(dim=-1).min() > 0.1


@pytest.mark.parametrize(("target", "auxiliary"), PAIRS)
def test_teacher_forced_divergence_matches_generation(make_pair, tokenizers, target, auxiliary):
    pair = make_pair(target, auxiliary)
    for text in TEXTS:
        ids = ids_of(tokenizers[target], text)[:36]
        whole = teacher_forced(pair, ids)
        assert whole.shape == (len(ids), pair.vocab_size)
        assert whole.isfinite().all()
        close(stepwise(pair, ids), whole)
        close(stepwise(pair, ids, start=max(len(ids) // 2, 1)), whole[max(len(ids) // 2, 1) - 1 :])


@pytest.mark.parametrize("family", ["gpt2", "qwen", "mistral"])
def test_families_with_and_without_auxiliary_cache(make_pair, tokenizers, family):
    pair = make_pair("bpe", "small", family=family)
    assert pair._supports_cache == (family != "mistral")
    ids = ids_of(tokenizers["bpe"], TEXTS[0])[:30]
    close(stepwise(pair, ids), teacher_forced(pair, ids))
    if family != "mistral":
        close(teacher_forced(pair, ids), slow_reference(pair, ids))


@pytest.mark.parametrize("model_type", ["olmo_hybrid", "falcon_h1"])
def test_recurrent_auxiliaries_disable_cache(tokenizers, model_type):
    """A view in the middle of a text would have to take tokens back; shorter rows are padded."""
    size = len(tokenizers["small"])
    pair = BridgedPair(
        *(tiny_architecture(model_type, seed, vocab_size=size) for seed in (1, 2)), target_tokenizer=tokenizers["bpe"],
        auxiliary_tokenizer=tokenizers["small"], target_width=len(tokenizers["bpe"]),
    )  # fmt: skip
    assert not pair._supports_cache
    ids = ids_of(tokenizers["bpe"], TEXTS[0])[:8]
    whole = teacher_forced(pair, ids)
    torch.testing.assert_close(stepwise(pair, ids), whole, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        rows, mask = left_padded([ids, ids[:5]])
        torch.testing.assert_close(pair.divergence(rows, mask)[1, 3:], whole[:5], rtol=1e-3, atol=1e-3)


def test_gradient_checkpointing_disables_auxiliary_cache(make_pair, tokenizers):
    """Its layers fill no cache, from which the next views would go on."""
    pair = copy.deepcopy(make_pair("bpe", "small"))
    ids = ids_of(tokenizers["bpe"], TEXTS[0])[:12]
    expected = teacher_forced(pair, ids)
    for model in (pair.retain, pair.forget):
        model._set_gradient_checkpointing(
            gradient_checkpointing_func=functools.partial(checkpoint, use_reentrant=False)
        )
    pair.train()
    found = pair.divergence(torch.tensor([ids]))[0]
    close(found.detach(), expected)
    found[:, 20:].square().sum().backward()
    assert all(weight.grad is not None for weight in pair.retain.parameters())


SCRIPTS = st.text(
    alphabet=st.one_of(
        st.sampled_from(" \n.,'abcdeTh1"),
        st.sampled_from("éßñжмор日本の庭한글كتب"),
        st.sampled_from("😀👨‍👩‍👧🇩🇪\u0301"),
    ),
    max_size=24,
)


@given(data=st.data())
@settings(max_examples=8)
@pytest.mark.parametrize(("target", "auxiliary"), PAIRS)
def test_divergence_matches_reference_for_any_tokenization(make_pair, tokenizers, target, auxiliary, data):
    pair = make_pair(target, auxiliary)
    tokenizer = tokenizers[target]
    single = pair.retokenizer.bytes
    byte_of = {text: token for token, text in reversed(list(enumerate(single))) if text and len(text) == 1}
    ids = []
    for part in data.draw(st.lists(SCRIPTS, min_size=1, max_size=3)):
        if data.draw(st.booleans()):  # byte by byte, through the middle of characters
            ids += [byte_of[bytes([byte])] for byte in part.encode() if bytes([byte]) in byte_of]
        else:
            ids += tokenizer(part, add_special_tokens=False)["input_ids"]
    ids += data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=4))
    ids = ids[:40] or [10]
    whole = teacher_forced(pair, ids)
    assert whole.isfinite().all()
    start = data.draw(st.integers(1, len(ids)))
    close(stepwise(pair, ids, start), whole[start - 1 :])


@pytest.mark.parametrize(("target", "auxiliary"), [("bpe", "small"), ("unigram", "bpe"), ("small", "unigram")])
def test_padded_batch_matches_unbatched(make_pair, tokenizers, target, auxiliary):
    pair = make_pair(target, auxiliary)
    rows = [ids_of(tokenizers[target], text)[:40] for text in TEXTS]
    alone = [teacher_forced(pair, row) for row in rows]
    ids, mask = left_padded(rows)
    width = ids.shape[1]
    with torch.no_grad():
        found = pair.divergence(ids, mask)
        flipped = torch.stack([row.roll(len(real)) for row, real in zip(ids, rows, strict=True)])
        right = torch.stack([row.roll(len(real)) for row, real in zip(mask, rows, strict=True)])
        close(pair.divergence(flipped, right)[right.bool()], torch.cat(alone))
        for row, expected in enumerate(alone):
            close(found[row, width - len(expected) :], expected)
        cache, parts = pair.new_cache(), []
        for start, stop in ((0, 3), (3, 4), (4, width - 5), *((at, at + 1) for at in range(width - 5, width))):
            parts.append(pair.divergence(ids[:, start:stop], mask[:, :stop], cache=cache))
        close(torch.cat(parts, 1)[mask.bool()], found[mask.bool()])
    assert cache.layer.get_seq_length() == width


def test_cropped_reordered_and_copied_caches_match_fresh_caches(make_pair, tokenizers):
    pair = make_pair("bpe", "small")
    rows = [ids_of(tokenizers["bpe"], text)[:24] for text in (*TEXTS[:1], LONG)]
    assert len(rows[0]) == len(rows[1])
    generator = random.Random(0)
    with torch.no_grad():
        cache = pair.new_cache()
        pair.divergence(torch.tensor(rows), cache=cache)
        for _ in range(6):
            cut = generator.randrange(1, 10)
            kept = copy.deepcopy(cache)
            cache.crop(-cut)
            order = [generator.randrange(len(rows)) for _ in rows]
            cache.reorder_cache(torch.tensor(order))
            new = [random_tokens(tokenizers["bpe"], generator, generator.randrange(1, 2) + cut) for _ in rows]
            new = [row[: len(new[0])] for row in new]
            former, rows = rows, [rows[row][:-cut] + added for row, added in zip(order, new, strict=True)]
            found = pair.divergence(torch.tensor(new), cache=cache)
            for row, ids in enumerate(rows):
                close(found[row], teacher_forced(pair, ids)[-found.shape[1] :])
            # The copy has kept what the cache was.
            more = pair.divergence(torch.tensor([[9], [300]]), cache=kept)
            for row, (ids, last) in enumerate(zip(former, (9, 300), strict=True)):
                close(more[row, -1], teacher_forced(pair, [*ids, last])[-1])
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        found = pair.divergence(torch.tensor([[7], [7]]), cache=cache)
        close(found[0, -1], teacher_forced(pair, [*rows[1], 7])[-1])
        close(found[1, -1], teacher_forced(pair, [*rows[0], 7])[-1])


def test_fragmented_auxiliary_cache_is_compacted(make_pair, tokenizers):
    pair = make_pair("bpe", "small")
    long, short = ids_of(tokenizers["bpe"], LONG)[:50], [20, 21]
    ids, mask = left_padded([long, short])
    cache = pair.new_cache()
    with torch.no_grad():
        pair.divergence(ids, mask, cache=cache)
        cache.batch_select_indices(torch.tensor([1]))
        mask = mask[1:]
        for step in range(6):
            mask = torch.cat([mask, torch.ones(1, 1, dtype=torch.long)], 1)
            short = [*short, long[step]]
            found = pair.divergence(torch.tensor([[long[step]]]), mask, cache=cache)
            close(found[0, -1], teacher_forced(pair, short)[-1])
    pair_cache = cache.layer.pair_cache
    assert pair_cache.layers[0].get_seq_length() <= 2 * len(pair_cache.ids[0])


def test_auxiliary_context_is_whole_text_retokenized(make_pair, tokenizers):
    for target, auxiliary in (("bpe", "small"), ("bpe", "unigram"), ("small", "ours")):
        reader = make_pair(target, auxiliary).retokenizer
        ids = tokenizers[target](LONG * 3, add_special_tokens=False)["input_ids"]
        views = AlignedSequence(reader).auxiliary_inputs(ids, range(1, len(ids) + 1))
        for place, view in enumerate(views, 1):
            text = b"".join(reader.bytes[token] for token in ids[:place])
            try:
                expected = tokenizers[auxiliary](text.decode())["input_ids"]
            except UnicodeDecodeError:
                continue
            assert view.ids == expected


def test_special_tokens_separate_texts_and_map_by_role(make_pair, tokenizers):
    reader = make_pair("bpe", "unigram").retokenizer
    target, own = tokenizers["bpe"], tokenizers["unigram"]
    begin, end, padding = target.bos_token_id, target.eos_token_id, target.pad_token_id
    first, second = (target(text, add_special_tokens=False)["input_ids"] for text in ("One day", "Two men"))
    dropped = target.convert_tokens_to_ids("<|im|>")
    (view,) = AlignedSequence(reader).auxiliary_inputs(
        [begin, *first, end, padding, *second, dropped, *first], [len(first) * 2 + len(second) + 4]
    )
    plain = lambda text: own(text, add_special_tokens=False)["input_ids"]
    assert view.ids == [own.bos_token_id, *plain("One day"), own.eos_token_id, *plain("Two men"), *plain("One day")]


def test_special_token_lookalikes_are_text(make_pair, tokenizers):
    reader = make_pair("bpe", "small").retokenizer
    target = tokenizers["bpe"]
    byte_of = {text: token for token, text in reversed(list(enumerate(reader.bytes))) if text}
    ids = [byte_of[bytes([byte])] for byte in b"a</s>b"]
    (view,) = AlignedSequence(reader).auxiliary_inputs(ids, [len(ids)])
    assert target.eos_token_id not in ids
    assert not set(view.ids) & set(tokenizers["small"].all_special_ids)


def test_unmapped_tokens_have_the_median_of_the_divergence(make_pair, tokenizers):
    pair = make_pair("bpe", "unigram")
    ids = ids_of(tokenizers["bpe"], TEXTS[0])
    found = teacher_forced(pair, ids)
    close(found, slow_reference(pair, ids))
    unmapped = [*tokenizers["bpe"].all_special_ids, *range(len(tokenizers["bpe"]), found.shape[1])]
    assert (found[:, unmapped] == found[:, unmapped[:1]]).all()
    assert found[:, 20:200].abs().max() > 0


@pytest.mark.parametrize("place", [100, 3])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_auxiliary_logits_make_every_token_nan(make_pair, tokenizers, value, place):
    pair = copy.deepcopy(make_pair("bpe", "small"))
    ids = ids_of(tokenizers["bpe"], TEXTS[0])[:10]
    with torch.no_grad():
        pair.forget.get_output_embeddings().weight[place] = value
    assert teacher_forced(pair, ids).isnan().all()


def test_only_special_tokens_may_be_masked_by_auxiliaries(make_pair, tokenizers, monkeypatch):
    pair = copy.deepcopy(make_pair("bpe", "small"))
    ids = ids_of(tokenizers["bpe"], TEXTS[0])[:4]
    ruled_out, plain = [3], teacher_forced(pair, ids)

    def forward(**inputs):
        found = type(pair.forget).forward(pair.forget, **inputs)
        found.logits[..., ruled_out] = -torch.inf
        return found

    monkeypatch.setattr(pair.forget, "forward", forward)
    close(teacher_forced(pair, ids), plain)
    ruled_out.append(100)
    assert teacher_forced(pair, ids).isnan().all()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failed_forward_pass_leaves_cache_consistent(make_pair, tokenizers, monkeypatch, error):
    pair = copy.deepcopy(make_pair("bpe", "small"))
    ids = ids_of(tokenizers["bpe"], TEXTS[0])[:12]
    cache, expected = pair.new_cache(), teacher_forced(pair, ids)

    def fail(*_, **__):
        raise error("out of memory")

    with torch.no_grad():
        pair.divergence(torch.tensor([ids[:6]]), cache=cache)
        with monkeypatch.context() as failing, pytest.raises(error):
            failing.setattr(pair.forget, "forward", fail)
            pair.divergence(torch.tensor([ids[6:9]]), cache=cache)
        cache.crop(-3)
        close(pair.divergence(torch.tensor([ids[6:9]]), cache=cache)[0], expected[6:9])
        close(pair.divergence(torch.tensor([ids[9:]]), cache=cache)[0], expected[9:])


@pytest.mark.parametrize("has_padding", [True, False])
def test_finished_row_is_padded_with_eos(make_pair, tokenizers, has_padding):
    from divdec.bridge.alignment import Retokenizer

    target = copy.deepcopy(tokenizers["bpe"])
    target.pad_token = target.eos_token if has_padding else None
    own = tokenizers["unigram"]
    text, end = target("One day", add_special_tokens=False)["input_ids"], target.eos_token_id
    context = AlignedSequence(Retokenizer(target, own))
    ended, filled, later = (
        context.auxiliary_inputs(ids, [len(ids)])[0]
        for ids in ([*text, end], [*text, *[end] * 300], [*text, end, end, *text])
    )
    assert filled == ended
    assert ended.ids[-1] == own.eos_token_id
    assert later.ids == [*ended.ids, *own("One day", add_special_tokens=False)["input_ids"]]


def without_ends(tokenizer, **changes):
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from divdec.bridge.token_bytes import describe_tokenizer

    description = describe_tokenizer(tokenizer) | {"post_processor": None} | changes
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(description)), unk_token=tokenizer.unk_token
    )


def test_auxiliaries_without_eos_and_texts_normalized_to_nothing(tokenizers):
    normalizers = [{"type": "NFD"}, {"type": "StripAccents"}]
    own = without_ends(
        tokenizers["unigram"],
        normalizer={"type": "Sequence", "normalizers": normalizers},
        pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": True},
    )
    models = [tiny_model("llama", len(own), seed) for seed in (1, 2)]
    for model in models:  # as padding often is
        model.get_input_embeddings().weight.data[tokenizers["unigram"].pad_token_id] = 0
    own.pad_token = "<|pad|>"
    pair = BridgedPair(*models, target_tokenizer=tokenizers["small"], auxiliary_tokenizer=own, target_width=512).eval()
    byte_of = {text: token for token, text in enumerate(pair.retokenizer.bytes) if text and len(text) == 1}
    ids = [byte_of[b"\xcc"], byte_of[b"\x81"]]  # an accent: as a whole it is nothing
    found = teacher_forced(pair, ids)
    close(stepwise(pair, ids), found)
    assert (found.abs().amax(dim=-1) > 0.1).all()
    assert teacher_forced(pair, [tokenizers["small"].eos_token_id]).abs().max() > 0.1


def test_auxiliary_with_different_script(tokenizers):
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import Metaspace
    from transformers import PreTrainedTokenizerFast

    letters = {letter: place for place, letter in enumerate(["[UNK]", *"日本の作家は静かな庭", *"etaoin"])}
    tokenizer = Tokenizer(BPE(letters, [], unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Metaspace()
    own = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    models = [tiny_model("llama", len(own), seed) for seed in (1, 2)]
    options = {"target_tokenizer": tokenizers["bpe"], "target_width": 2000}
    with pytest.raises(UsageError, match=r"has tokens for \d+% of the target's vocabulary, at least 50%"):
        BridgedPair(*models, auxiliary_tokenizer=own, **options)


def test_text_exceeding_auxiliary_context_raises(make_pair, tokenizers):
    ids = ids_of(tokenizers["bpe"], LONG * 10)
    with pytest.raises(UsageError, match=r"the text has \d+ tokens .* 256 positions"):
        teacher_forced(make_pair("bpe", "small"), ids)


def test_incompatible_auxiliaries_raise(tokenizers, retokenized):
    model, other = tiny_model("llama", 600, seed=1), tiny_model("llama", 600, seed=2)
    options = {"target_tokenizer": tokenizers["bpe"], "target_width": 2000}
    with pytest.raises(UsageError, match="the same model"):
        BridgedPair(model, model, auxiliary_tokenizer=tokenizers["small"], **options)
    with pytest.raises(UsageError, match="has 700 tokens, but they have logits for 600"):
        BridgedPair(model, other, auxiliary_tokenizer=tokenizers["newlines"], **options)
    small = retokenized(tokenizers["unigram"], normalizer={"type": "Lowercase"})
    with pytest.raises(UsageError, match="reads capitals as small letters"):
        BridgedPair(model, other, auxiliary_tokenizer=small, **options)


class TestSteered:
    """The whole model, as transformers sees it."""

    @pytest.fixture
    def steered(self, make_pair, tokenizers):
        target = tiny_model("llama", len(tokenizers["bpe"]), seed=0, width=64)
        pair = make_pair("bpe", "small")
        configs = {
            "target": target.config,
            "retain_auxiliary": pair.retain.config,
            "forget_auxiliary": pair.forget.config,
        }
        config = DivergenceConfig.from_parts(configs, Steering.parse("linear:1.5"), len(tokenizers["bpe"]))
        return DivergenceForCausalLM(config, target, pair).eval()

    @pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}])
    def test_bridged_generation_matches_with_and_without_cache(self, steered, tokenizers, options):
        ids, mask = left_padded([ids_of(tokenizers["bpe"], text)[:12] for text in TEXTS])
        answers = []
        for use_cache in (True, False):
            torch.manual_seed(0)
            answers.append(
                steered.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=12,
                    pad_token_id=0,
                    use_cache=use_cache,
                    **{"do_sample": False, **options},
                )
            )
        if options:
            assert torch.equal(*answers)
        else:
            prompts = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
            assert_same_answers(steered, prompts, *answers, padding=0)

    @pytest.mark.parametrize("rule", ["linear:2", "rank:20"])
    def test_right_padding_does_not_expose_target(self, steered, tokenizers, rule):
        steered.steering = rule
        ids, mask = left_padded(
            [ids_of(tokenizers["bpe"], text)[:length] for text, length in zip(TEXTS, (12, 9, 5), strict=False)]
        )
        shifts = (mask == 0).sum(1).tolist()
        ids, mask = (torch.stack([row.roll(-n) for row, n in zip(t, shifts, strict=True)]) for t in (ids, mask))
        with torch.no_grad():
            logits = steered(ids, attention_mask=mask).logits
        assert logits[mask == 0].unique(dim=0).shape[0] == 1
        assert set(logits[mask == 0].unique().tolist()) <= {0.0, -torch.inf}
        with pytest.raises(UsageError, match="prompt 1 ends in padding"):
            steered.generate(ids, attention_mask=mask, max_new_tokens=2, pad_token_id=0)

    def test_prompt_lookup_rolls_back_bridged_cache(self, steered, tokenizers):
        ids = torch.tensor([ids_of(tokenizers["bpe"], TEXTS[0])[:12] * 2])
        options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
        found = steered.generate(input_ids=ids, prompt_lookup_num_tokens=3, **options)
        assert_same_answers(steered, ids.tolist(), found, steered.generate(input_ids=ids, **options), padding=0)

    def test_auxiliaries_with_different_tokenizer_cannot_draft(self, steered):
        with pytest.raises(UsageError, match="needs a retain auxiliary with the target's own tokens"):
            steered.generate(torch.tensor([[5, 9]]), max_new_tokens=2, speculative=3)


def test_shared_prompts_give_same_scores(make_pair, tokenizers):
    """A prompt that several answers share is read once, and each answer goes on from its rows of the cache."""
    pair = make_pair("bpe", "small")
    model = DivergenceForCausalLM.from_experts(tiny_model("llama", pair.vocab_size, 0, 64, 2), pair, "linear:1.5")
    answers = (" Kuwait City", " Köln 😀", "море и", ".")
    examples = [
        Example([*prompt, *answer], [IGNORED] * len(prompt) + answer)
        for prompt in (ids_of(tokenizers["bpe"], text) for text in (TEXTS[0], TEXTS[1]))
        for answer in (ids_of(tokenizers["bpe"], text) for text in answers)
    ]
    read = []
    handle = model.target.register_forward_pre_hook(
        lambda module, arguments, given: read.append(given["input_ids"].numel()), with_kwargs=True
    )
    together = score(model, examples)
    handle.remove()
    assert sum(read) < sum(len(example.input_ids) for example in examples)
    for example, item in zip(examples, together, strict=True):
        (alone,) = score(model, [example])
        assert item.log_probabilities == pytest.approx(alone.log_probabilities, abs=LOGITS)
        assert item.hits == alone.hits
