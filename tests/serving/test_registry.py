"""Takedown requests: in force at once, crash-safe, tamper-evident, and never a copy of what they forget."""

import copy
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from conftest import loads_torch
from divdec import DivergenceForCausalLM, write_bundle
from divdec.cli import main
from divdec.data.records import texts_of
from divdec.errors import FailedClosed, UsageError
from divdec.experts.ngram import NgramPair, StupidBackoff
from divdec.experts.ngram_counts import NgramCounts
from divdec.experts.ngram_fit import count
from divdec.model.checkpoint import load_model
from divdec.serving.overlap import overlap
from divdec.takedowns.live import Takedowns
from divdec.takedowns.log import LOG_FILE
from divdec.takedowns.registry import STRENGTH, Registry

ORDER = 3


@pytest.fixture(scope="module")
def articles(world):
    texts = list(dict.fromkeys(text for text in world.corpus if len(text) > 40))
    return [" ".join(texts[start : start + 4]) for start in range(0, 160, 4)]


@pytest.fixture(scope="module")
def empty(tmp_path_factory, checkpoints, articles):
    folder = tmp_path_factory.mktemp("registries") / "empty"
    Registry.create(folder, texts_of("retain", articles[:10]), checkpoints / "target", order=ORDER)
    return folder


@pytest.fixture
def folder(empty, tmp_path):
    return shutil.copytree(empty, tmp_path / "registry")


@pytest.fixture
def registry(folder):
    return Registry(folder)


def documents_of(registry, texts):
    return [registry.tokenizer()(text, add_special_tokens=False)["input_ids"] for text in texts]


def reference(registry, retain, taken_down):
    """The takedowns that counting all texts in the open gives."""
    documents = documents_of(registry, retain)
    q = count(documents, registry.vocab_size, ORDER)
    p = count([*documents, *documents_of(registry, taken_down)], registry.vocab_size, ORDER)
    return Open(NgramPair(q, p))


class Open:
    def __init__(self, pair):
        self.pair = pair

    def correction(self, ids):
        return STRENGTH * self.pair.divergence(ids)


def ids_of(registry, text, length=24):
    return torch.tensor([registry.tokenizer()(text, add_special_tokens=False)["input_ids"][:length]])


def test_sealed_counts_equal_counts_in_the_open(registry, folder, articles):
    for number in range(10, 16):
        registry.add(f"case {number}", texts_of("texts", articles[number : number + 2]), "a letter")
    registry.remove("case 12")
    experts = Takedowns(folder)
    taken = [text for number in (10, 11, 13, 14, 15) for text in articles[number : number + 2]]
    expected = reference(registry, articles[:10], taken)
    for text in (articles[11], articles[12], articles[3], articles[30]):
        ids = ids_of(registry, text)
        assert torch.equal(experts.correction(ids), expected.correction(ids))
    registry.compact()
    ids = ids_of(registry, articles[14])
    assert torch.equal(experts.correction(ids), expected.correction(ids))
    assert torch.equal(Takedowns(folder).correction(ids), expected.correction(ids))
    assert len(list((folder / "entries").iterdir())) == 1


@pytest.mark.parametrize("order", [2, 4, 5])
def test_every_order(tmp_path, checkpoints, articles, order):
    registry = Registry.create(tmp_path / "r", texts_of("retain", articles[:5]), checkpoints / "target", order=order)
    registry.add("one", texts_of("t", articles[10:12]))
    sealed = Takedowns(tmp_path / "r").snapshot().pair.forget.counts
    retain, taken = (documents_of(registry, texts) for texts in (articles[:5], articles[10:12]))
    expected = StupidBackoff(count([*retain, *taken], registry.vocab_size, order))
    contexts = np.lib.stride_tricks.sliding_window_view(np.array(taken[0]), order - 1)
    assert torch.equal(StupidBackoff(sealed).scores(contexts), expected.scores(contexts))


def test_without_requests_the_divergence_is_zero(folder, registry, articles):
    assert not Takedowns(folder).correction(ids_of(registry, articles[20])).any()


def test_a_request_is_in_force_for_the_next_answer_and_not_for_a_running_one(folder, registry, articles):
    experts = Takedowns(folder)
    ids = ids_of(registry, articles[20])
    running = experts.new_cache()
    assert not experts.correction(ids[:, :8], cache=running).any()
    registry.add("case", texts_of("t", [articles[20]]))
    assert not experts.correction(ids[:, 8:], cache=running).any()
    following = experts.new_cache()
    during = experts.correction(ids, cache=following)
    assert during.min() < -0.5 * STRENGTH
    during_pair = Open(following.snapshot.pair)
    registry.remove("case")
    expected = during_pair.correction(torch.cat([ids, ids[:, :4]], dim=1))[:, -4:]
    assert expected.any()
    assert torch.equal(experts.correction(ids[:, :4], cache=following), expected)
    assert not experts.correction(ids, cache=experts.new_cache()).any()


def test_a_steered_model_follows_the_registry(folder, registry, checkpoints, tmp_path, articles):
    bundle = write_bundle(tmp_path / "bundle", target=str(checkpoints / "target"), registry=folder)
    model = DivergenceForCausalLM.from_pretrained(bundle)
    ids = ids_of(registry, articles[25], 12)
    with torch.no_grad():
        before = model(ids).logits
        assert torch.equal(before, model.target(ids).logits.float())
        cache = model.new_cache()
        model(ids[:, :6], past_key_values=cache)
        registry.add("case", texts_of("t", [articles[25]]))
        assert torch.allclose(model(ids[:, 6:], past_key_values=cache).logits, before[:, 6:], atol=1e-4)
        after = model(ids).logits
    fallen = [(before - after)[0, place, ids[0, place + 1]].item() for place in range(11)]
    assert max(fallen) > 5  # where the sentences of the world are not those that the retain set begins with too
    cached = model.generate(ids[:, :6], max_new_tokens=8, do_sample=False)
    beams = model.generate(ids[:, :6], max_new_tokens=8, num_beams=2, do_sample=False)
    assert 6 < cached.shape[1] <= 14
    assert 6 < beams.shape[1] <= 14
    with pytest.raises(UsageError, match="leave use_cache on"):
        model.generate(ids[:, :6], max_new_tokens=2, use_cache=False)


def test_nothing_readable_is_kept(folder, registry, articles):
    entry = registry.add("case", texts_of("t", [articles[22]]), "a letter")
    tokens = documents_of(registry, [articles[22]])[0]
    words = {word for word in articles[22].split() if len(word) > 5 and word not in " ".join(articles[:10])}
    assert words
    content = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file() and "retain" not in str(path)
                       and "tokenizer" not in str(path))  # fmt: skip
    assert not any(word.encode() in content for word in words)
    for kind in (np.int32, np.int64, np.uint32):
        for start in range(0, len(tokens) - 3, 3):
            assert np.array(tokens[start : start + 3], dtype=kind).tobytes() not in content
    # The same text under another nonce and in another registry gives another file and another hash.
    registry.remove("case")
    other = registry.add("case", texts_of("t", [articles[22]]))
    assert (other.text_hash, other.ngrams) == (entry.text_hash, entry.ngrams)
    assert other.file != entry.file
    assert (folder / "secret.key").stat().st_mode & 0o777 == 0o600


def kill_at(folder, texts, action, line):
    """Do an action in a process that dies before the given line of the modules that write; its exit code."""
    sources = ("serving/registry.py", "takedowns/log.py", "divdec/runs.py")

    def child():
        seen = 0

        def trace(frame, event, _):
            nonlocal seen
            if not frame.f_code.co_filename.endswith(sources):
                return None
            if event == "line":
                seen += 1
                if seen == line:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        registry = Registry(folder)
        sys.settrace(trace)
        act(registry, texts, action)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    return process.exitcode


def act(registry, texts, action):
    if action == "add":
        registry.add("new", texts_of("t", texts))
    elif action == "remove":
        registry.remove("old 1")
    else:
        registry.compact()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("action", ["add", "remove", "compact"])
@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_line_it_is_as_before_or_as_after(folder, registry, articles, action, step, tmp_path):
    for number in range(3):
        registry.add(f"old {number}", texts_of("t", [articles[10 + number]]))
    registry.remove("old 2")
    ids = ids_of(registry, articles[11])
    before = {entry.id for entry in registry.entries()}
    after = before | {"new"} if action == "add" else before - {"old 1"} if action == "remove" else before
    expected = {
        names: reference(registry, articles[:10], texts).correction(ids)
        for names, texts in (
            (frozenset(before), articles[10:12]),
            (frozenset(after), {"add": [*articles[10:12], articles[20]], "remove": articles[10:11]}.get(
                action, articles[10:12])),
        )
    }  # fmt: skip
    outcomes, line = set(), 1
    while True:
        copy = shutil.copytree(folder, tmp_path / "copy")
        code = kill_at(copy, articles[20:21], action, line)
        again = Registry(copy)
        found = frozenset(entry.id for entry in again.entries())
        outcomes.add((found, code))
        assert again.verify() == []
        assert torch.equal(Takedowns(copy).correction(ids), expected[found])
        again.add("next", texts_of("t", articles[30:31]))
        again.compact()
        assert again.verify() == []
        assert len(list((copy / "entries").iterdir())) == 1
        assert len(list((copy / "ids").iterdir())) == len(found) + 1
        shutil.rmtree(copy)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        line += step if line < 30 else 4
    assert line > 30
    assert (frozenset(after), 0) in outcomes
    assert (frozenset(before), -signal.SIGKILL) in outcomes
    assert (frozenset(after), -signal.SIGKILL) in outcomes


def test_a_torn_line_has_not_happened(folder, registry, articles):
    registry.add("one", texts_of("t", articles[10:11]))
    log = folder / LOG_FILE
    whole, head = log.read_bytes(), (folder / "head.json").read_bytes()
    registry.add("two", texts_of("t", articles[11:12]))
    grown = log.read_bytes()
    (folder / "head.json").write_bytes(head)
    for end in (len(whole) + 1, len(grown) - 1):
        log.write_bytes(grown[:end])
        assert [entry.id for entry in registry.entries()] == ["one"]
        Takedowns(folder)
    registry.add("three", texts_of("t", articles[12:13]))
    assert [entry.id for entry in registry.entries()] == ["one", "three"]
    assert registry.verify() == []


def test_two_writers_at_once_lose_nothing(folder, articles):
    failures = []

    def add(first):
        try:
            registry = Registry(folder)
            for number in range(6):
                registry.add(f"{first}-{number}", texts_of("t", [articles[10 + number]]))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=add, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    experts = Takedowns(folder)
    while any(thread.is_alive() for thread in threads):
        experts.snapshot()  # a reader is never in the way, and never sees half a change
    for thread in threads:
        thread.join()
    assert not failures
    assert len(Registry(folder).entries()) == len(experts.snapshot().state.entries) == 12
    assert Registry(folder).verify() == []


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "foreign"])
def test_a_damaged_entry_fails_closed(folder, registry, articles, damage):
    first = registry.add("one", texts_of("t", articles[10:11]))
    experts = Takedowns(folder)
    second = registry.add("two", texts_of("t", articles[11:12]))
    path = folder / "entries" / second.file
    content = path.read_bytes()
    if damage == "changed":
        path.write_bytes(content[:300] + bytes([content[300] ^ 1]) + content[301:])
    elif damage == "cut":
        path.write_bytes(content[:-20])
    elif damage == "gone":
        path.unlink()
    else:
        shutil.copyfile(folder / "entries" / first.file, path)
    for attempt in (experts.new_cache, lambda: Takedowns(folder), registry.compact):
        with pytest.raises(FailedClosed, match=second.file):
            attempt()
    (problem,) = registry.verify()
    assert second.file in problem
    path.write_bytes(content)
    assert registry.verify() == []
    experts.new_cache()


@pytest.mark.parametrize("damage", ["word", "seal", "removed line", "removed end", "swapped", "all gone", "no head"])
def test_a_tampered_log_fails_closed(folder, registry, articles, damage):
    for number in range(3):
        registry.add(f"case {number}", texts_of("t", [articles[10 + number]]), "letter")
    experts = Takedowns(folder)
    log = folder / LOG_FILE
    lines = log.read_text().splitlines(keepends=True)
    if damage == "word":
        lines[1] = lines[1].replace("letter", "better")
    elif damage == "seal":
        fields = json.loads(lines[1])
        lines[1] = json.dumps(fields | {"seal": "0" * 32}) + "\n"
    elif damage == "removed line":
        del lines[1]
    elif damage == "removed end":
        del lines[2]
    elif damage == "swapped":
        lines[0], lines[1] = lines[1], lines[0]
    elif damage == "all gone":
        lines = []
    if damage == "no head":
        (folder / "head.json").unlink()
    else:
        log.write_text("".join(lines))
    os.utime(log, (1, 1))
    with pytest.raises(FailedClosed):
        Takedowns(folder)
    if damage in ("removed line", "removed end", "all gone", "no head"):
        with pytest.raises(FailedClosed):
            experts.new_cache()
    assert registry.verify()
    assert main(["takedown", "verify", str(folder)]) == 1


def test_the_key_is_needed_and_must_be_the_registrys(folder, registry, articles, monkeypatch):
    key = (folder / "secret.key").read_text().strip()
    (folder / "secret.key").chmod(0o644)
    with pytest.raises(UsageError, match="can be read by others"):
        Registry(folder)
    (folder / "secret.key").unlink()
    with pytest.raises(UsageError, match="DIVDEC_REGISTRY_KEY"):
        Takedowns(folder)
    monkeypatch.setenv("DIVDEC_REGISTRY_KEY", "0" * 64)
    with pytest.raises(UsageError, match="another registry"):
        Registry(folder)
    monkeypatch.setenv("DIVDEC_REGISTRY_KEY", "abc")
    with pytest.raises(UsageError, match="64 hexadecimal digits"):
        Registry(folder)
    monkeypatch.setenv("DIVDEC_REGISTRY_KEY", key)
    entry = Registry(folder).add("case", texts_of("t", articles[10:11]))
    assert Takedowns(folder).snapshot().state.entries.keys() == {entry.nonce}


def test_a_registry_made_with_a_key_from_the_environment_holds_none(tmp_path, checkpoints, articles, monkeypatch):
    monkeypatch.setenv("DIVDEC_REGISTRY_KEY", "ab" * 32)
    Registry.create(tmp_path / "r", texts_of("retain", articles[:3]), checkpoints / "target", order=2)
    assert not (tmp_path / "r" / "secret.key").exists()
    monkeypatch.delenv("DIVDEC_REGISTRY_KEY")
    with pytest.raises(UsageError, match="key is neither"):
        Registry(tmp_path / "r")


def test_the_log_tells_who_and_when(registry, articles):
    registry.add("one", texts_of("t", articles[10:11]), "letter of 3 May")
    registry.remove("one")
    made, *events = registry.history()
    assert (made["action"], made["strength"]) == ("strength", STRENGTH)
    assert [(event["action"], event["id"], event["sequence"]) for event in events] == [
        ("add", "one", 2), ("remove", "one", 3),
    ]  # fmt: skip
    assert events[0]["reference"] == "letter of 3 May"
    assert all(event["time"].endswith("+00:00") for event in events)


def test_bad_requests_change_nothing(folder, registry, checkpoints, articles, tmp_path, capsys):
    registry.add("one", texts_of("t", articles[10:11]))
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "text.txt").write_text(articles[12])
    anew = ["init", "--retain", str(tmp_path / "text.txt"), "--target", str(checkpoints / "target")]
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for arguments, words in (
        (["add", "--id", "one", "--file", str(tmp_path / "text.txt")], "already"),
        (["add", "--id", "two", "--file", str(tmp_path / "empty.txt")], "empty"),
        (["add", "--id", "two", "--file", str(tmp_path / "nowhere.txt")], "nowhere.txt"),
        (["add", "--id", " two", "--file", str(tmp_path / "text.txt")], "cannot be used"),
        (["add", "--file", str(tmp_path / "text.txt")], "needs --id"),
        (["remove", "--id", "three"], "no request 'three'"),
        (["remove", "--id", "one", "--file", "x"], "--file has no meaning for remove"),
        (["burn"], "burn"),
        (anew, "is a registry already; add requests to it"),
    ):
        action, *rest = arguments
        assert main(["forget", action, str(folder), *rest]) == 2
        error = capsys.readouterr().err.strip().splitlines()
        assert len(error) == 1
        assert words in error[0]
    assert main(["takedown", "init", str(tmp_path), *anew[1:]]) == 2
    assert "is not empty; give the name of an empty or absent one" in capsys.readouterr().err
    changed = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
    assert changed == {path: content for path, content in before.items() if path.name != "lock"}


def test_a_registry_of_another_tokenizer_is_refused(folder, checkpoints, tmp_path, articles):
    from divdec.demo.models import train_tokenizer

    target = shutil.copytree(checkpoints / "target", tmp_path / "target")
    train_tokenizer(articles, 500).save_pretrained(target)
    with pytest.raises(UsageError, match="another tokenizer"):
        write_bundle(tmp_path / "b", target=str(target), registry=folder)
    shutil.copytree(target, folder / "tokenizer", dirs_exist_ok=True)
    assert any("tokenizer.json is missing or has changed" in problem for problem in Registry(folder).verify())
    with pytest.raises(UsageError, match="another tokenizer"):
        Registry(folder).add("one", texts_of("t", ["a text"]))
    (tmp_path / "other").mkdir()
    with pytest.raises(UsageError, match=r"no registry\.json"):
        write_bundle(tmp_path / "b", target=str(checkpoints / "target"), registry=tmp_path / "other")


def test_what_the_registry_says_of_itself_is_sealed(folder, registry, articles, tmp_path, checkpoints):
    registry.add("one", texts_of("t", articles[10:11]))
    about = json.loads((folder / "registry.json").read_text())
    for field, value in (("order", 4), ("tokenizer", "0" * 64), ("retain", "0" * 64), ("created", "yesterday")):
        (folder / "registry.json").write_text(json.dumps(about | {field: value}))
        for attempt in (Registry, Takedowns):
            with pytest.raises(FailedClosed, match="has been changed"):
                attempt(folder)
    (folder / "registry.json").write_text(json.dumps(about))
    # A retain side that knows what is to be forgotten would say the same as p.
    other = Registry.create(tmp_path / "o", texts_of("r", articles[10:11]), checkpoints / "target", order=ORDER)
    shutil.rmtree(folder / "retain")
    shutil.copytree(other.folder / "retain", folder / "retain")
    assert any("holds other counts" in problem for problem in registry.verify())
    with pytest.raises(FailedClosed, match="holds other counts"):
        Takedowns(folder)
    shutil.rmtree(folder / "retain")
    with pytest.raises(FailedClosed, match="is missing or holds other"):
        Takedowns(folder)


def test_an_answer_with_a_kept_cache_follows_the_registry(folder, registry, checkpoints, articles):
    target = load_model(checkpoints / "target")
    model = DivergenceForCausalLM.from_experts(target, None, takedowns=Takedowns(folder, strength=20.0))
    ids = ids_of(registry, articles[20], 16)
    options = {"max_new_tokens": 1, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    kept = model.new_cache()
    model.generate(ids[:, :8], past_key_values=kept, **options)
    copied = copy.deepcopy(kept)
    registry.add("case", texts_of("t", articles[20:21]))
    expected = model.generate(ids, **options).logits[0]
    assert not torch.allclose(expected, target(ids).logits[:, -1].float(), atol=1e-3)
    for cache in (kept, copied):
        torch.testing.assert_close(model.generate(ids, past_key_values=cache, **options).logits[0], expected)
    kept.reset()
    torch.testing.assert_close(model(ids, past_key_values=kept).logits[:, -1], expected)


def test_one_id_for_another_text_between_two_looks(folder, registry, articles):
    for name, number in (("A", 20), ("B", 21)):
        registry.add(name, texts_of("t", [articles[number]]))
    registry.compact()
    experts = Takedowns(folder)
    registry.remove("A")
    registry.add("A", texts_of("t", [articles[22]]))
    ids = ids_of(registry, articles[20])
    assert torch.equal(experts.correction(ids), Takedowns(folder).correction(ids))
    assert torch.equal(experts.correction(ids), reference(registry, articles[:10], articles[21:23]).correction(ids))


@pytest.mark.parametrize("others", [0, 1])
def test_a_text_that_the_retain_set_holds_is_taken_down_all_the_same(folder, registry, articles, others):
    """As if the retain set had never held it: else q would know it as well as p, and nothing would be forgotten."""
    for number in range(others):
        assert not registry.add(f"other {number}", texts_of("t", [articles[20 + number]])).held
    assert registry.add("held", texts_of("t", articles[4:5])).held
    retain, taken = [*articles[:4], *articles[5:10]], articles[20 : 20 + others]
    q = count(documents_of(registry, retain), registry.vocab_size, ORDER)
    p = count(documents_of(registry, [*articles[:10], articles[4], *taken]), registry.vocab_size, ORDER)
    expected = Open(NgramPair(q, p))
    experts = Takedowns(folder)
    for text in (articles[4], articles[5], articles[20]):
        ids = ids_of(registry, text)
        assert torch.equal(experts.correction(ids), expected.correction(ids))
    assert experts.correction(ids_of(registry, articles[4])).min() < -0.3 * STRENGTH
    registry.remove("held")
    registry.compact()
    assert not experts.new_cache().snapshot.pair or others


def test_a_passage_that_the_retain_set_holds_is_all_that_is_left_out_of_it(tmp_path, checkpoints, articles):
    passage = " ".join(articles[4].split()[:60])
    retain = [*articles[:3], f"{articles[3]} {passage}", f"{passage} {articles[5]}"]
    registry = Registry.create(tmp_path / "r", texts_of("r", retain), checkpoints / "target", order=4)
    tokens = documents_of(registry, [articles[20], f"{articles[21]} {passage}"])
    found = overlap(NgramCounts.load(tmp_path / "r" / "retain"), map(np.array, tokens))
    assert found.copies == len(found.held) == 2
    for held in found.held:
        assert registry.tokenizer().decode(held).strip() in f"{articles[21]} {passage}"
        assert len(held) >= len(documents_of(registry, [passage])[0]) - 2
    registry.add("one", texts_of("t", [articles[20], f"{articles[21]} {passage}"]))
    q = Takedowns(tmp_path / "r").snapshot().pair.retain.counts
    whole = count(documents_of(registry, retain), registry.vocab_size, 4)
    assert (whole.unigrams - q.unigrams).sum() == sum(map(len, found.held))
    before = registry.entries()
    registry.compact()
    assert registry.verify() == []
    assert [entry.nonces for entry in registry.entries()] == [entry.nonces for entry in before]
    again = Takedowns(tmp_path / "r").snapshot().pair.retain.counts
    assert np.array_equal(again.unigrams, q.unigrams)


def test_lost_markers_do_no_harm(folder, registry, articles):
    registry.add("A", texts_of("t", [articles[20]]))
    for marker in (folder / "ids").iterdir():
        marker.unlink()
    registry.add("A", texts_of("t", [articles[21]]))
    ids = ids_of(registry, articles[20])
    expected = reference(registry, articles[:10], articles[20:22]).correction(ids)
    assert torch.equal(Takedowns(folder).correction(ids), expected)
    registry.compact()
    assert len(list((folder / "ids").iterdir())) == 1
    registry.remove("A")
    assert registry.entries() == []
    assert registry.verify() == []


def test_a_bundle_that_moves_with_its_registry_follows_the_one_beside_it(tmp_path, folder, checkpoints, articles,
                                                                         monkeypatch):  # fmt: skip
    project = tmp_path / "project"
    project.mkdir()
    shutil.copytree(folder, project / "takedowns")
    monkeypatch.chdir(project)
    write_bundle("bundle", target=str(checkpoints / "target"), registry="takedowns")
    shutil.copytree(project, tmp_path / "copy")
    Registry(tmp_path / "copy" / "takedowns").add("case", texts_of("t", articles[20:21]))
    model = DivergenceForCausalLM.from_pretrained(tmp_path / "copy" / "bundle")
    assert model.takedowns.correction(ids_of(Registry(folder), articles[20])).any()
    assert not DivergenceForCausalLM.from_pretrained("bundle").takedowns.snapshot().state.entries
    # Another registry in its place, though of the same tokenizer, is not the one that was meant.
    shutil.rmtree(project / "takedowns")
    Registry.create(project / "takedowns", texts_of("r", articles[:3]), checkpoints / "target", order=ORDER)
    with pytest.raises(UsageError, match="another registry"):
        DivergenceForCausalLM.from_pretrained("bundle")


def test_a_registry_alone_has_no_rule(folder, checkpoints, tmp_path):
    target = str(checkpoints / "target")
    for steering in ("rank:5", "linear:5"):
        with pytest.raises(UsageError, match="needs no rule"):
            write_bundle(tmp_path / "b", target=target, registry=folder, steering=steering)
    bundle = write_bundle(tmp_path / "b", target=target, registry=folder)
    with pytest.raises(UsageError, match="needs no rule"):
        DivergenceForCausalLM.from_pretrained(bundle, steering="rank:5")
    assert DivergenceForCausalLM.from_pretrained(bundle).rule == "takedowns"


def test_models_that_follow_a_registry_are_copied_but_not_pickled(folder, registry, checkpoints, articles):
    registry.add("case", texts_of("t", articles[20:21]))
    model = DivergenceForCausalLM.from_experts(load_model(checkpoints / "target"), None, takedowns=Takedowns(folder))
    ids = ids_of(registry, articles[20])
    assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)
    with pytest.raises((UsageError, TypeError)):
        pickle.dumps(model)


def test_a_full_disk_after_the_line_is_no_failure(folder, registry, articles, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("divdec.takedowns.log.write_durably", full)
    registry.add("one", texts_of("t", articles[10:11]))
    registry.add("two", texts_of("t", articles[11:12]))
    monkeypatch.undo()
    assert [entry.id for entry in registry.entries()] == ["one", "two"]
    registry.add("three", texts_of("t", articles[12:13]))
    assert registry.verify() == []


@pytest.mark.parametrize("reference", ["caf\udce9", "a\x1b[31m", "a\0b"])
def test_references_that_cannot_be_kept_are_refused(registry, articles, reference):
    with pytest.raises(UsageError, match="reference"):
        registry.add("one", texts_of("t", articles[10:11]), reference)
    assert registry.entries() == []


def test_the_list_shows_brackets_as_they_are(folder, registry, articles, capsys):
    registry.add("case[/x]", texts_of("t", articles[10:11]), "see [/b] letter")
    for options in ([], ["--history"]):
        assert main(["takedown", "list", str(folder), *options]) == 0
        assert "case[/x]" in capsys.readouterr().out


def test_the_verb_from_nothing_to_a_model_that_no_longer_repeats(tmp_path, checkpoints, articles):
    """The whole way in processes of their own, as a user goes it."""
    (tmp_path / "retain.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in articles[:10]))
    (tmp_path / "article.txt").write_text(articles[20])

    def divdec(*arguments):
        result = subprocess.run(
            [sys.executable, "-m", "divdec.cli", *arguments], capture_output=True, text=True, timeout=120, check=True
        )
        return result.stdout

    registry, target = str(tmp_path / "takedowns"), str(checkpoints / "target")
    divdec("takedown", "init", registry, "--target", target, "--retain", str(tmp_path / "retain.jsonl"), "--order", "3")
    bundle = write_bundle(tmp_path / "bundle", target=target, registry=registry)
    model = DivergenceForCausalLM.from_pretrained(bundle)
    ids = ids_of(Registry(registry), articles[20], 12)
    before = model(ids).logits
    added = json.loads(
        divdec("takedown", "add", registry, "--id", "x", "--file", str(tmp_path / "article.txt"), "--json")
    )
    assert (added["measured"]["passages"], added["measured"]["recited_after"]) == (4, 0)
    assert added["tokens"] == len(documents_of(Registry(registry), articles[20:21])[0])
    following = ids[0, 6]
    assert model(ids).logits[0, 5, following] < before[0, 5, following] - 2.5
    assert "1 request in force, at strength 10" in divdec("takedown", "list", registry)
    assert "whole" in divdec("takedown", "verify", registry)
    divdec("takedown", "remove", registry, "--id", "x")
    assert torch.equal(model(ids).logits, before)
    assert "remove" in divdec("takedown", "list", registry, "--history")


@pytest.mark.parametrize("action", ["list", "compact", "add", "remove"])
def test_requests_wait_for_no_torch(folder, registry, articles, tmp_path, action):
    registry.add("one", texts_of("t", articles[10:11]))
    (tmp_path / "text.txt").write_text(articles[12])
    add = ["--id", "two", "--file", str(tmp_path / "text.txt"), "--no-measure"]
    options = {"add": add, "remove": ["--id", "one"]}
    assert not loads_torch(["forget", action, str(folder), *options.get(action, [])])
