import pytest
import torch

from divdec.data.records import texts_of
from divdec.errors import UsageError
from divdec.evaluation.verbatim import longest_run
from divdec.playground.choice import Choice
from divdec.playground.play import Chosen, Playground
from divdec.playground.steered import Manner, Steered
from divdec.playground.takedown import effect_html, requests_html
from divdec.steering import Steering
from served import trained

ARTICLE = (
    "The lighthouse of Calvessa burned for nine nights before the harbour council sent a single boat, "
    "and when the keeper came down the stairs with his violin he asked for nothing but a cup of salt."
)


@pytest.fixture(scope="module")
def reciting(tmp_path_factory, tokenizer):
    """A model that knows an article by heart."""
    folder = tmp_path_factory.mktemp("reciting")
    model = trained(tokenizer, [ARTICLE] * 8, 0, 48, 3).train()
    ids = torch.tensor([tokenizer(ARTICLE).input_ids])
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(60):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def following(reciting, tmp_path, world):
    """A playground of it, steered by a registry alone, which is empty."""
    from divdec import DivergenceForCausalLM, write_bundle
    from divdec.model.checkpoint import load_tokenizer
    from divdec.takedowns.registry import Registry

    registry = Registry.create(tmp_path / "takedowns", texts_of("retain", world.corpus[:200:2]), reciting)
    bundle = write_bundle(tmp_path / "bundle", target=str(reciting), registry=registry.folder)
    model, tokenizer = DivergenceForCausalLM.from_pretrained(bundle), load_tokenizer(bundle)
    steered = Steered(model, tokenizer, Manner(max_new_tokens=100))
    return Playground("tiny", steered, Choice(model.steering, model.vocab_size, rank=False), registry=registry)


def test_a_text_is_recited_before_and_not_after(following):
    effect = following.take_down("case-1", ARTICLE, "a letter", Chosen())
    assert effect.before.run > effect.length // 2, "the model did not know the article"
    assert effect.after.run < effect.before.run / 2
    assert ARTICLE.startswith(effect.beginning)
    assert [(entry.id, entry.reference) for entry in following.registry.entries()] == [("case-1", "a letter")]
    made = effect_html(effect)
    assert f"{effect.before.run} of {effect.length} tokens" in made
    assert "case-1" in requests_html(following.registry)


def test_a_request_that_is_withdrawn_is_no_longer_in_force(following):
    following.registry.add("case-1", texts_of("case-1", [ARTICLE]))
    following.withdraw("case-1")
    assert following.registry.entries() == []
    assert "No request is in force" in requests_html(following.registry)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [("case-1", "short", "paste at least"), ("  ", ARTICLE, "no id"), ("a\nb", ARTICLE, "request id")],
)
def test_what_cannot_be_taken_down_changes_nothing(following, name, text, said):
    with pytest.raises(UsageError, match=said):
        following.take_down(name, text, "", Chosen())
    assert following.registry.entries() == []


def test_no_takedown_by_a_rule_that_steers_nothing(following):
    with pytest.raises(UsageError, match="would steer nothing"):
        following.take_down("case-1", ARTICLE, "", Chosen(alpha=0))
    with pytest.raises(UsageError, match="accepted here: linear"):
        following.take_down("case-1", ARTICLE, "", Chosen("rank", k=5))
    assert following.registry.entries() == []


def test_requests_are_escaped(registry):
    registry.add("<img>", texts_of("x", [ARTICLE]), "<script>")
    made = requests_html(registry)
    assert "&lt;img&gt;" in made
    assert "<img>" not in made
    assert "<script>" not in made


def test_no_rank_rule_without_experts(following):
    with pytest.raises(UsageError, match="needs no rule"):
        following.steered.check(Steering("rank", k=5))


def test_without_a_registry_nothing_is_taken_down(playground):
    with pytest.raises(UsageError, match="--registry"):
        playground.take_down("case-1", ARTICLE, "", Chosen())
    with pytest.raises(UsageError, match="--registry"):
        playground.withdraw("case-1")


def test_the_longest_passage_by_hand():
    assert longest_run([1, 2, 3, 9, 4], [0, 1, 2, 3, 4]) == 3
    assert longest_run([], [1]) == 0
    assert longest_run([5], [1]) == 0
