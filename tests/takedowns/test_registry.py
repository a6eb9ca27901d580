"""Takedown requests: in force at once, crash-safe, tamper-evident, and never a copy of what they forget."""

import contextlib
import copy
import io
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from divdec import DivergenceForCausalLM, write_bundle
from divdec.checkpoint import load_model
from divdec.cli import main
from divdec.data.records import texts_of
from divdec.errors import FailedClosed, UsageError
from divdec.experts.ngram import NgramPair, StupidBackoff
from divdec.experts.ngram_counts import CountDifference, NgramCounts
from divdec.experts.ngram_fit import count
from divdec.model.loading import answer_digests
from divdec.takedowns.canonical import canonical_text
from divdec.takedowns.correction import TakedownCorrection
from divdec.takedowns.counts import PackedCounts, find_retained_passages, sum_counts
from divdec.takedowns.registry import STRENGTH, Registry
from divdec.takedowns.store import DATABASE, Store
from support.tiny import loads_torch

ORDER = 3


@pytest.fixture(scope="module")
def articles(world):
    texts = list(dict.fromkeys(text for text in world.corpus if len(text) > 40))
    return [" ".join(" ".join(texts[start : start + 4]).split()) for start in range(0, 160, 4)]


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
    """A text begins as if after a space."""
    return [registry.tokenizer()(f" {text}", add_special_tokens=False)["input_ids"] for text in texts]


def entries_of(registry, texts):
    """What a registry counts: the texts as they are, token t as 2t, and in lower case, as 2t + 1."""
    readings = [documents_of(registry, each) for each in (texts, [text.lower() for text in texts])]
    return [2 * np.array(ids) + lower for lower, documents in enumerate(readings) for ids in documents]


def reference(registry, retain, taken_down):
    """The takedowns that counting all texts in the open gives."""
    documents = entries_of(registry, retain)
    q = count(documents, 2 * registry.vocab_size, ORDER)
    p = count([*documents, *entries_of(registry, taken_down)], 2 * registry.vocab_size, ORDER)
    return Open(registry, NgramPair(q, p))


class Open:
    def __init__(self, registry, pair):
        self.tokenizer, self.pair = registry.tokenizer(), pair
        texts = [self.tokenizer.decode(token) for token in range(registry.vocab_size)]
        self.in_lower_case = [self.source(token, texts) for token in range(len(texts))]

    def source(self, token, texts):
        """The token that begins a token's text in lower case."""
        lowered = texts[token].lower()
        if lowered in texts:
            return token if lowered == texts[token] else texts.index(lowered)
        head = self.tokenizer(lowered, add_special_tokens=False)["input_ids"][0]
        return head if lowered.startswith(" ") and any(map(str.isalnum, texts[head])) else token

    def correction(self, ids):
        rows = [self.pair.divergence(2 * ids)[0, :, 0::2]]
        texts = [self.tokenizer.decode(ids[0, :end]) for end in range(1, ids.shape[1] + 1)]
        lowered = [
            torch.tensor([self.tokenizer(text.lower(), add_special_tokens=False)["input_ids"]]) for text in texts
        ]
        rows.append(torch.stack([self.pair.divergence(2 * each + 1)[0, -1, 1::2] for each in lowered]))
        rows[1] = torch.minimum(rows[1], rows[1][:, self.in_lower_case])
        return STRENGTH * torch.minimum(*rows)[None]


def ids_of(registry, text, length=24):
    return torch.tensor([registry.tokenizer()(f" {text}", add_special_tokens=False)["input_ids"][:length]])


def comparable(registry, ids, correction):
    """The part that folding leaves as it is: after a space, and for other spellings of a token, more is lowered."""
    tokenizer = registry.tokenizer()
    positions = [not tokenizer.decode(token).endswith(" ") for token in ids[0]]
    canonical = [canonical_text(text) == text for text in map(tokenizer.decode, range(registry.vocab_size))]
    return correction[:, positions][..., canonical]


def test_encrypted_counts_equal_unencrypted_counts(registry, folder, articles):
    for number in range(10, 16):
        registry.add(f"case {number}", texts_of("texts", articles[number : number + 2]), "a letter")
    registry.remove("case 12")
    experts = TakedownCorrection(folder)
    registry.add("case 16", texts_of("texts", articles[16:17]))
    registry.remove("case 16")
    registry.add("case 17", texts_of("texts", articles[17:18]))
    taken = [articles[17], *[text for number in (10, 11, 13, 14, 15) for text in articles[number : number + 2]]]
    expected = reference(registry, articles[:10], taken)
    for text in (articles[11], articles[12], articles[3], articles[30]):
        ids = ids_of(registry, text)
        assert torch.equal(
            *(comparable(registry, ids, each) for each in (experts.correction(ids), expected.correction(ids)))
        )
        assert torch.equal(
            *(
                comparable(registry, ids, each)
                for each in (TakedownCorrection(folder).correction(ids), expected.correction(ids))
            )
        )


def test_a_special_token_whose_name_is_written_in_capitals_is_not_counted(folder, registry):
    names = [token for token in registry.tokenizer().all_special_tokens if token != token.upper()]
    assert names
    text = f"The ferry left the harbour {' '.join(names).upper()} at half past four, and nobody on the quay could say."
    registry.add("case", texts_of("t", [text]))
    counted = TakedownCorrection(folder).snapshot().pair[1].counts.unigrams
    assert not counted[
        [2 * token + reading for token in registry.tokenizer().all_special_ids for reading in (0, 1)]
    ].any()


@pytest.mark.parametrize("change", [str.upper, str.title, str.lower, str])
def test_a_text_is_taken_down_in_lower_case_too(folder, registry, change):
    """In capitals a text has other tokens, so that lowering them would leave its words in lower case."""
    text = "The ferry left the harbour at half past four, and nobody on the quay could say who was aboard."
    registry.add("case", texts_of("t", [change(text)]))
    experts = TakedownCorrection(folder)
    for written in (change(text), text.lower()):
        ids = ids_of(registry, written)
        following = experts.correction(ids)[0, :-1].gather(1, ids[0, 1:, None])[3:]
        assert (following < -0.2 * STRENGTH).float().mean() > 0.7


@pytest.mark.parametrize("order", [2, 4, 5])
def test_encrypted_counts_match_for_every_ngram_order(tmp_path, checkpoints, articles, order):
    registry = Registry.create(tmp_path / "r", texts_of("retain", articles[:5]), checkpoints / "target", order=order)
    registry.add("one", texts_of("t", articles[10:12]))
    sealed = TakedownCorrection(tmp_path / "r").snapshot().pair[1].counts
    retain, taken = (entries_of(registry, texts) for texts in (articles[:5], articles[10:12]))
    expected = StupidBackoff(count([*retain, *taken], 2 * registry.vocab_size, order))
    contexts = np.lib.stride_tricks.sliding_window_view(taken[0], order - 1)
    assert torch.equal(StupidBackoff(sealed).scores(contexts), expected.scores(contexts))


def test_divergence_is_zero_without_takedown_requests(folder, registry, articles):
    assert not TakedownCorrection(folder).correction(ids_of(registry, articles[20])).any()


def test_takedown_applies_to_next_generation_not_running_one(folder, registry, articles):
    experts = TakedownCorrection(folder)
    ids = ids_of(registry, articles[20])
    running = experts.new_cache()
    assert not experts.correction(ids[:, :8], cache=running).any()
    registry.add("case", texts_of("t", [articles[20]]))
    assert not experts.correction(ids[:, 8:], cache=running).any()
    following = experts.new_cache()
    during = experts.correction(ids, cache=following)
    assert during.min() < -0.5 * STRENGTH
    during_pair = Open(registry, NgramPair(*(each.counts for each in following.snapshot.pair)))
    registry.remove("case")
    expected = during_pair.correction(torch.cat([ids, ids[:, :4]], dim=1))[:, -4:]
    assert expected.any()
    again = experts.correction(ids[:, :4], cache=following)
    assert torch.equal(*(comparable(registry, ids[:, :4], each) for each in (again, expected)))
    assert not experts.correction(ids, cache=experts.new_cache()).any()


def test_steered_model_applies_registry_changes(folder, registry, checkpoints, tmp_path, articles):
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
    fallen = [(before - after)[0, position, ids[0, position + 1]].item() for position in range(11)]
    assert max(fallen) > 5  # where the sentences of the world are not those that the retain set begins with too
    cached = model.generate(ids[:, :6], max_new_tokens=8, do_sample=False)
    beams = model.generate(ids[:, :6], max_new_tokens=8, num_beams=2, do_sample=False)
    assert 6 < cached.shape[1] <= 14
    assert 6 < beams.shape[1] <= 14
    with pytest.raises(UsageError, match="leave use_cache on"):
        model.generate(ids[:, :6], max_new_tokens=2, use_cache=False)


def test_registry_stores_no_plaintext(folder, registry, articles):
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
    # The same text under another nonce is encrypted to other bytes.
    (sealed,) = rows(folder, "SELECT own FROM counts")
    registry.remove("case")
    assert sealed[0] not in (folder / DATABASE).read_bytes()
    other = registry.add("case", texts_of("t", [articles[22]]))
    assert (other.text_hash, other.ngrams) == (entry.text_hash, entry.ngrams)
    assert rows(folder, "SELECT own FROM counts") != [sealed]
    assert (folder / "secret.key").stat().st_mode & 0o777 == 0o600


def rows(folder, statement, *values):
    """Read or change the database as somebody without the key would."""
    with contextlib.closing(sqlite3.connect(folder / DATABASE, isolation_level=None)) as connection:
        return connection.execute(statement, values).fetchall()


def kill_at(folder, texts, action, line):
    """Do an action in a process that dies before the given line of the modules that write; return its exit code."""
    sources = ("takedowns/registry.py", "takedowns/store.py")

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
    else:
        registry.remove("old 1")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("action", ["add", "remove"])
@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_writer_leaves_state_before_or_after_change(folder, registry, articles, action, step, tmp_path):
    for number in range(3):
        registry.add(f"old {number}", texts_of("t", [articles[10 + number]]))
    registry.remove("old 2")
    ids = ids_of(registry, articles[11])
    before = frozenset(entry.id for entry in registry.entries())
    after = before | {"new"} if action == "add" else before - {"old 1"}
    texts = {before: articles[10:12], after: [*articles[10:12], articles[20]] if action == "add" else articles[10:11]}
    expected = {names: reference(registry, articles[:10], texts[names]).correction(ids) for names in (before, after)}
    outcomes = []
    lines = count_lines(shutil.copytree(folder, tmp_path / "dry"), articles[20:21], action)
    # The last lines, where the change is committed, one by one.
    for line in sorted({*range(1, lines, step), *range(lines - 8, lines + 2)}):
        copy = shutil.copytree(folder, tmp_path / "copy")
        code = kill_at(copy, articles[20:21], action, line)
        again = Registry(copy)
        result = frozenset(entry.id for entry in again.entries())
        outcomes.append((result, code))
        assert again.verify() == []
        assert torch.equal(
            *(comparable(registry, ids, each) for each in (TakedownCorrection(copy).correction(ids), expected[result]))
        )
        again.add("next", texts_of("t", articles[30:31]))
        assert again.verify() == []
        assert len(rows(copy, "SELECT id FROM counts")) == len(result) + 1
        shutil.rmtree(copy)
        assert code == (0 if line > lines else -signal.SIGKILL)
    assert {(after, 0), (before, -signal.SIGKILL), (after, -signal.SIGKILL)} == set(outcomes)
    states = [result for result, _ in outcomes]
    assert states == sorted(states, key=[before, after].index), "once changed, it stays changed"


def count_lines(folder, texts, action):
    """Number of lines that an action executes in the modules that write."""
    registry, seen = Registry(folder), 0

    def trace(frame, event, _):
        nonlocal seen
        if not frame.f_code.co_filename.endswith(("takedowns/registry.py", "takedowns/store.py")):
            return None
        seen += event == "line"
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        act(registry, texts, action)
    finally:
        sys.settrace(earlier)
    return seen


def test_incomplete_transaction_is_rolled_back(folder, registry, articles, tmp_path):
    registry.add("one", texts_of("t", articles[10:11]))
    with contextlib.closing(sqlite3.connect(folder / DATABASE, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM head").fetchall()  # keeps the change in the write-ahead log
        registry.add("two", texts_of("t", articles[11:12]))
        copies = [shutil.copytree(folder, tmp_path / str(cut)) for cut in (0, 1, 5000)]
    for cut, copied in zip((0, 1, 5000), copies, strict=True):
        log = copied / f"{DATABASE}-wal"
        log.write_bytes(log.read_bytes()[: -cut or None])
        again = Registry(copied)
        assert [entry.id for entry in again.entries()] == (["one"] if cut else ["one", "two"])
        assert again.verify() == []
        again.add("three", texts_of("t", articles[12:13]))
        assert [entry.id for entry in again.entries()][-1] == "three"
    assert [entry.id for entry in registry.entries()] == ["one", "two"]


def test_change_is_checkpointed_from_write_ahead_log(folder, registry, articles, tmp_path):
    experts = TakedownCorrection(folder)  # an open connection: the log is not deleted
    registry.add("one", texts_of("t", articles[10:11]))
    (tmp_path / "copy").mkdir()
    for name in (DATABASE, "secret.key"):
        shutil.copy(folder / name, tmp_path / "copy")
    assert [entry.id for entry in Registry(tmp_path / "copy").entries()] == ["one"]
    assert experts.snapshot().state.entries


def test_concurrent_writers_lose_no_changes(folder, articles):
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
    experts = TakedownCorrection(folder)
    while any(thread.is_alive() for thread in threads):
        experts.snapshot()  # a reader is never in the way, and never sees half a change
    for thread in threads:
        thread.join()
    assert not failures
    assert len(Registry(folder).entries()) == len(experts.snapshot().state.entries) == 12
    assert Registry(folder).verify() == []


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "foreign", "older"])
def test_corrupted_counts_fail_closed(folder, registry, articles, damage):
    registry.add("two", texts_of("t", articles[12:13]))
    older = rows(folder, "SELECT own FROM counts")[0][0]
    registry.remove("two")
    first = registry.add("one", texts_of("t", articles[10:11]))
    experts = TakedownCorrection(folder)
    second = registry.add("two", texts_of("t", articles[11:12]))
    ((content,),) = rows(folder, "SELECT own FROM counts WHERE id = ?", second.counts_id)
    if damage == "gone":
        rows(folder, "DELETE FROM counts WHERE id = ?", second.counts_id)
    else:
        changed = {
            "changed": content[:300] + bytes([content[300] ^ 1]) + content[301:],
            "cut": content[:-20],
            "foreign": rows(folder, "SELECT own FROM counts WHERE id = ?", first.counts_id)[0][0],
            "older": older,
        }[damage]
        rows(folder, "UPDATE counts SET own = ? WHERE id = ?", changed, second.counts_id)
    for attempt in (experts.new_cache, lambda: TakedownCorrection(folder)):
        with pytest.raises(FailedClosed, match="'two'"):
            attempt()
    (problem,) = registry.verify()
    assert "'two'" in problem
    rows(folder, "INSERT OR REPLACE INTO counts VALUES (?, ?, NULL)", second.counts_id, content)
    assert registry.verify() == []
    experts.new_cache()


DAMAGES = ["word", "code", "removed row", "removed end", "removed end and counts", "swapped", "renumbered", "added",
           "all gone", "no head", "no table", "replayed request"]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_tampered_database_fails_closed(folder, registry, articles, damage):
    registry.add("old", texts_of("t", [articles[14]]), "letter")
    old = rows(folder, "SELECT * FROM counts")[0]
    registry.remove("old")
    for number in range(3):
        registry.add(f"case {number}", texts_of("t", [articles[10 + number]]), "letter")
    experts = TakedownCorrection(folder)
    last = len(registry.history())
    if damage == "word":
        rows(folder, "UPDATE events SET content = replace(content, 'letter', 'better') WHERE sequence = ?", last - 1)
    elif damage == "code":
        rows(folder, "UPDATE events SET code = zeroblob(32) WHERE sequence = ?", last - 1)
    elif damage == "removed row":
        rows(folder, "DELETE FROM events WHERE sequence = ?", last - 1)
    elif damage == "removed end":
        rows(folder, "DELETE FROM events WHERE sequence = ?", last)
    elif damage == "removed end and counts":
        rows(folder, "DELETE FROM events WHERE sequence = ?", last)
        rows(folder, "UPDATE head SET sequence = ?", last - 1)
        rows(folder, "DELETE FROM counts WHERE id = ?", registry_id(experts, "case 2"))
    elif damage in ("swapped", "renumbered"):
        rows(folder, "UPDATE events SET sequence = 99 WHERE sequence = ?", last - 1)
        rows(folder, "UPDATE events SET sequence = ? WHERE sequence = ?", last - 1, last)
        if damage == "swapped":
            rows(folder, "UPDATE events SET sequence = ? WHERE sequence = 99", last)
    elif damage == "added":
        rows(folder, "INSERT INTO events SELECT ?, content, code FROM events WHERE sequence = ?", last + 1, last)
    elif damage == "all gone":
        rows(folder, "DELETE FROM events")
    elif damage == "no head":
        rows(folder, "DELETE FROM head")
    elif damage == "no table":
        rows(folder, "DROP TABLE counts")
    elif damage == "replayed request":
        rows(folder, "INSERT INTO counts VALUES (?, ?, ?)", *old)
    for attempt in (lambda: TakedownCorrection(folder), experts.new_cache):
        with pytest.raises(FailedClosed):
            attempt()
    assert registry.verify()
    assert main(["takedown", "verify", str(folder)]) == 1


def registry_id(experts, name):
    return experts._snapshot.state.find(name).counts_id


def test_running_model_rejects_registry_rollback(folder, registry, articles, tmp_path):
    registry.add("one", texts_of("t", articles[10:11]))
    older = (folder / DATABASE).read_bytes()
    registry.add("two", texts_of("t", articles[11:12]))
    newer = (folder / DATABASE).read_bytes()
    experts = TakedownCorrection(folder)
    for replace in (lambda path: path.write_bytes(older), lambda path: (tmp_path / "older").replace(path)):
        (tmp_path / "older").write_bytes(older)
        replace(folder / DATABASE)
        with pytest.raises(FailedClosed, match="older"):
            experts.new_cache()
        (folder / DATABASE).write_bytes(newer)
        assert len(experts.new_cache().snapshot.state.entries) == 2


def test_flipped_bytes_never_change_a_correction(folder, registry, articles):
    """Any byte of the file: what is read is what was written, or nothing is."""
    for number in range(3):
        registry.add(f"case {number}", texts_of("t", [articles[10 + number]]))
    registry.remove("case 1")
    path, ids = folder / DATABASE, ids_of(registry, articles[12])
    whole, experts = path.read_bytes(), TakedownCorrection(folder)
    expected, refused = experts.correction(ids), 0
    for offset in np.random.default_rng(0).integers(0, len(whole), 40).tolist():
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 255]) + whole[offset + 1 :])
        for read in (lambda: experts.correction(ids), lambda: TakedownCorrection(folder).correction(ids)):
            try:
                assert torch.equal(read(), expected)
            except FailedClosed:
                refused += 1
        path.write_bytes(whole)
    assert refused > 20  # most of a small database is unused space
    assert torch.equal(experts.correction(ids), expected)


def test_deleted_database_fails_closed(folder, registry, articles):
    registry.add("one", texts_of("t", articles[10:11]))
    experts = TakedownCorrection(folder)
    (folder / DATABASE).unlink()
    for attempt in (experts.new_cache, lambda: TakedownCorrection(folder), registry.entries):
        with pytest.raises(FailedClosed):
            attempt()
    with pytest.raises(FailedClosed, match="is gone"):
        Registry(folder)


def test_registry_requires_its_own_key(folder, registry, articles, monkeypatch):
    key = (folder / "secret.key").read_text().strip()
    (folder / "secret.key").chmod(0o644)
    with pytest.raises(UsageError, match="can be read by others"):
        Registry(folder)
    (folder / "secret.key").unlink()
    with pytest.raises(UsageError, match="DIVDEC_REGISTRY_KEY"):
        TakedownCorrection(folder)
    monkeypatch.setenv("DIVDEC_REGISTRY_KEY", "0" * 64)
    with pytest.raises(UsageError, match="another registry"):
        Registry(folder)
    monkeypatch.setenv("DIVDEC_REGISTRY_KEY", "abc")
    with pytest.raises(UsageError, match="64 hexadecimal digits"):
        Registry(folder)
    monkeypatch.setenv("DIVDEC_REGISTRY_KEY", key)
    entry = Registry(folder).add("case", texts_of("t", articles[10:11]))
    assert TakedownCorrection(folder).snapshot().state.entries.keys() == {entry.counts_id}


def test_registry_with_key_from_environment_stores_no_key(tmp_path, checkpoints, articles, monkeypatch):
    monkeypatch.setenv("DIVDEC_REGISTRY_KEY", "ab" * 32)
    Registry.create(tmp_path / "r", texts_of("retain", articles[:3]), checkpoints / "target", order=2)
    assert not (tmp_path / "r" / "secret.key").exists()
    monkeypatch.delenv("DIVDEC_REGISTRY_KEY")
    with pytest.raises(UsageError, match="key is neither"):
        Registry(tmp_path / "r")


def test_audit_trail_records_every_change(registry, articles):
    registry.add("one", texts_of("t", articles[10:11]), "letter of 3 May")
    registry.remove("one")
    made, *events = registry.history()
    assert (made["action"], made["strength"]) == ("strength", STRENGTH)
    assert [(event["action"], event["id"], event["sequence"]) for event in events] == [
        ("add", "one", 2), ("remove", "one", 3),
    ]  # fmt: skip
    assert events[0]["reference"] == "letter of 3 May"
    assert all(event["time"].endswith("+00:00") for event in events)


def test_invalid_takedown_requests_change_nothing(folder, registry, checkpoints, articles, tmp_path, capsys):
    registry.add("one", texts_of("t", articles[10:11]))
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "text.txt").write_text(articles[12])
    anew = ["init", "--retain", str(tmp_path / "text.txt"), "--target", str(checkpoints / "target")]
    before = contents(folder)
    for arguments, words in (
        (["add", "--id", "one", "--file", str(tmp_path / "text.txt")], "already"),
        (["add", "--id", "two", "--file", str(tmp_path / "empty.txt")], "empty"),
        (["add", "--id", "two", "--file", str(tmp_path / "nowhere.txt")], "nowhere.txt"),
        (["add", "--id", " two", "--file", str(tmp_path / "text.txt")], "cannot be used"),
        (["add", "--file", str(tmp_path / "text.txt")], "--id is required"),
        (["remove", "--id", "three"], "no request 'three'"),
        (["remove", "--id", "one", "--file", "x"], "--file"),
        (["burn"], "burn"),
        (anew, "is a registry already; add requests to it"),
    ):
        action, *rest = arguments
        assert main(["takedown", action, str(folder), *rest]) == 2
        error = capsys.readouterr().err.strip().splitlines()
        assert len(error) == 1
        assert words in error[0]
    assert main(["takedown", "init", str(tmp_path), *anew[1:]]) == 2
    assert "is not empty; give the name of an empty or absent one" in capsys.readouterr().err
    assert contents(folder) == before


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(f"{DATABASE}-"))
    return {path: path.read_bytes() for path in files}


def test_registry_of_another_tokenizer_is_rejected(folder, checkpoints, tmp_path, articles):
    from divdec_research.world.models import train_tokenizer

    target = shutil.copytree(checkpoints / "target", tmp_path / "target")
    train_tokenizer(articles, 500).save_pretrained(target)
    with pytest.raises(UsageError, match="another tokenizer"):
        write_bundle(tmp_path / "b", target=str(target), registry=folder)
    shutil.copytree(target, folder / "tokenizer", dirs_exist_ok=True)
    assert any("tokenizer.json is missing, new or has changed" in problem for problem in Registry(folder).verify())
    with pytest.raises(UsageError, match="another tokenizer"):
        Registry(folder).add("one", texts_of("t", ["a text"]))
    (tmp_path / "other").mkdir()
    with pytest.raises(UsageError, match=r"no registry\.db"):
        write_bundle(tmp_path / "b", target=str(checkpoints / "target"), registry=tmp_path / "other")


def test_registry_description_is_authenticated(folder, registry, articles, tmp_path, checkpoints):
    registry.add("one", texts_of("t", articles[10:11]))
    experts = TakedownCorrection(folder)
    ((content,),) = rows(folder, "SELECT content FROM description")
    description = json.loads(content)
    for field, value in (("order", 4), ("tokenizer", "0" * 64), ("retain", "0" * 64), ("created", "yesterday")):
        rows(folder, "UPDATE description SET content = ?", json.dumps(description | {field: value}))
        for attempt in (Registry, TakedownCorrection):
            with pytest.raises(FailedClosed, match="has been changed"):
                attempt(folder)
        with pytest.raises(FailedClosed, match="was replaced"):
            experts.new_cache()
    rows(folder, "UPDATE description SET content = ?", json.dumps(description | {"format": "divdec registry 4"}))
    with pytest.raises(UsageError, match="divdec takedown init NEW_FOLDER"):
        Registry(folder)
    for value in ("[]", "{", None):
        with contextlib.suppress(sqlite3.IntegrityError):
            rows(folder, "UPDATE description SET content = ?", value)
            with pytest.raises(FailedClosed):
                Registry(folder)
    rows(folder, "UPDATE description SET content = ?", content)
    # A retain side that knows what is to be forgotten would say the same as p.
    other = Registry.create(tmp_path / "o", texts_of("r", articles[10:11]), checkpoints / "target", order=ORDER)
    shutil.rmtree(folder / "retain")
    shutil.copytree(other.folder / "retain", folder / "retain")
    assert any("holds other counts" in problem for problem in registry.verify())
    with pytest.raises(FailedClosed, match="holds other counts"):
        TakedownCorrection(folder)
    shutil.rmtree(folder / "retain")
    with pytest.raises(FailedClosed, match="is missing or holds other"):
        TakedownCorrection(folder)


def test_generation_with_reused_cache_applies_registry_changes(folder, registry, checkpoints, articles):
    target = load_model(checkpoints / "target")
    model = DivergenceForCausalLM.from_experts(target, None, takedowns=TakedownCorrection(folder, strength=20.0))
    ids = ids_of(registry, articles[20], 16)
    options = {"max_new_tokens": 1, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    stored = model.new_cache()
    model.generate(ids[:, :8], past_key_values=stored, **options)
    copied = copy.deepcopy(stored)
    registry.add("case", texts_of("t", articles[20:21]))
    expected = model.generate(ids, **options).logits[0]
    assert not torch.allclose(expected, target(ids).logits[:, -1].float(), atol=1e-3)
    for cache in (stored, copied):
        torch.testing.assert_close(model.generate(ids, past_key_values=cache, **options).logits[0], expected)
    stored.reset()
    torch.testing.assert_close(model(ids, past_key_values=stored).logits[:, -1], expected)


def test_reused_request_id_with_new_text_is_detected(folder, registry, articles):
    for name, number in (("A", 20), ("B", 21)):
        registry.add(name, texts_of("t", [articles[number]]))
    experts = TakedownCorrection(folder)
    registry.remove("A")
    registry.add("A", texts_of("t", [articles[22]]))
    ids = ids_of(registry, articles[20])
    assert torch.equal(
        *(
            comparable(registry, ids, each)
            for each in (experts.correction(ids), TakedownCorrection(folder).correction(ids))
        )
    )
    assert torch.equal(
        *(
            comparable(registry, ids, each)
            for each in (experts.correction(ids), reference(registry, articles[:10], articles[21:23]).correction(ids))
        )
    )


@pytest.mark.parametrize("others", [0, 1])
def test_takedown_of_text_in_retain_set_is_effective(folder, registry, articles, others):
    """As if the retain set had never held it: else q would know it as well as p, and nothing would be forgotten."""
    for number in range(others):
        assert not registry.add(f"other {number}", texts_of("t", [articles[20 + number]])).has_retained_passages
    assert registry.add("held", texts_of("t", articles[4:5])).has_retained_passages
    retain, taken = [*articles[:4], *articles[5:10]], articles[20 : 20 + others]
    q = count(entries_of(registry, retain), 2 * registry.vocab_size, ORDER)
    p = count(entries_of(registry, [*articles[:10], articles[4], *taken]), 2 * registry.vocab_size, ORDER)
    expected = Open(registry, NgramPair(q, p))
    experts = TakedownCorrection(folder)
    for text in (articles[4], articles[5], articles[20]):
        ids = ids_of(registry, text)
        assert torch.equal(
            *(comparable(registry, ids, each) for each in (experts.correction(ids), expected.correction(ids)))
        )
    assert experts.correction(ids_of(registry, articles[4])).min() < -0.3 * STRENGTH
    registry.remove("held")
    assert not experts.new_cache().snapshot.pair or others


def test_only_shared_passages_are_removed_from_retain_set(tmp_path, checkpoints, articles):
    passage = " ".join(articles[4].split()[:60])
    retain = [*articles[:3], f"{articles[3]} {passage}", f"{passage} {articles[5]}"]
    registry = Registry.create(tmp_path / "r", texts_of("r", retain), checkpoints / "target", order=4)
    entries = entries_of(registry, [articles[20], f"{articles[21]} {passage}"])
    result = find_retained_passages(NgramCounts.load(tmp_path / "r" / "retain"), entries)
    assert (result.max_copies, len(result.passages)) == (2, 4)
    for held in result.passages:
        written = f"{articles[21]} {passage}"
        assert registry.tokenizer().decode(held // 2).strip() in (written.lower() if held[0] % 2 else written)
        assert len(held) >= len(documents_of(registry, [passage])[0]) - 2
    registry.add("one", texts_of("t", [articles[20], f"{articles[21]} {passage}"]))
    q = TakedownCorrection(tmp_path / "r").snapshot().pair[0].counts
    whole = count(entries_of(registry, retain), 2 * registry.vocab_size, 4)
    assert (whole.unigrams - q.unigrams).sum() == sum(map(len, result.passages))
    assert registry.verify() == []
    again = TakedownCorrection(tmp_path / "r").snapshot().pair[0].counts
    assert np.array_equal(again.unigrams, q.unigrams)


def test_a_file_added_to_the_tokenizer_is_noticed(folder, registry, articles):
    """transformers reads it beside the others: special tokens that it names have no text."""
    (folder / "tokenizer" / ".DS_Store").write_text("")  # transformers does not read it
    assert registry.verify() == []
    (folder / "tokenizer" / "special_tokens_map.json").write_text('{"eos_token": "the"}')
    assert ["special_tokens_map.json is missing, new" in problem for problem in registry.verify()] == [True]
    with pytest.raises(UsageError, match="another tokenizer"):
        TakedownCorrection(folder)


def test_a_text_requested_twice_is_one_copy_of_the_retain_set(folder, registry, articles):
    experts = TakedownCorrection(folder)
    registry.add("publisher", texts_of("t", articles[4:5]))
    once = experts.snapshot().pair[0].counts.unigrams
    registry.add("author", texts_of("t", articles[4:5]))
    for each in (experts, TakedownCorrection(folder)):
        assert np.array_equal(each.snapshot().pair[0].counts.unigrams, once)
    registry.remove("publisher")
    assert np.array_equal(experts.snapshot().pair[0].counts.unigrams, once)


def test_an_excerpt_beside_its_text_is_no_second_copy(tmp_path, checkpoints, articles):
    Registry.create(tmp_path / "r", texts_of("r", articles[:6]), checkpoints / "target")
    retain = NgramCounts.load(tmp_path / "r" / "retain")
    whole, _ = entries_of(Registry(tmp_path / "r"), articles[4:5])
    alone = find_retained_passages(retain, [whole])
    unknown = np.full(2 * len(whole), 7)
    quoting = np.concatenate([unknown, whole[10:-10]])  # longer than what it quotes
    for documents in ([whole, whole[10:-10]], [whole[10:-10], whole], [quoting, whole], [whole, whole]):
        found = find_retained_passages(retain, documents)
        assert sorted(map(len, found.passages)) == sorted(map(len, alone.passages))


def test_further_copies_of_a_quoted_passage_leave_the_retain_set(tmp_path, checkpoints, articles):
    sentence = " ".join(articles[4].split()[10:40])
    Registry.create(tmp_path / "r", texts_of("r", [*articles[:6], *[sentence] * 9]), checkpoints / "target")
    retain = NgramCounts.load(tmp_path / "r" / "retain")
    whole, quoted, *_ = entries_of(Registry(tmp_path / "r"), [articles[4], sentence])
    found = find_retained_passages(retain, [whole, quoted])
    order = retain.order
    removed = count(found.passages, retain.vocab_size, order)
    inner = quoted[2:-2][:order][None]
    assert removed.frequencies(inner) == retain.frequencies(inner) >= 10


def test_counts_never_fall_below_zero():
    whole, removed = (count([np.array(ids)], 9, 3) for ids in ([1, 2, 3], [1, 2, 3, 1, 2, 3]))
    packed = sum_counts([PackedCounts.from_counts(removed)], 9)  # as a registry holds them
    followers = CountDifference(whole, packed).followers(np.array([[1, 2]]))
    assert followers.totals.tolist() == [0]


def test_a_request_that_cannot_be_measured_says_that_it_is_in_force(
    folder, registry, articles, tmp_path, monkeypatch, capsys
):
    def load_model(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("divdec.checkpoint.load_model", load_model)
    (tmp_path / "t.txt").write_text(articles[20])
    assert main(["takedown", "add", str(folder), "--id", "a", "--file", str(tmp_path / "t.txt")]) == 2
    assert "a is in force, but could not be measured: CUDA out of memory" in capsys.readouterr().err
    assert [entry.id for entry in registry.entries()] == ["a"]


def test_a_short_sentence_of_everybody_stays_in_the_retain_set(tmp_path, checkpoints, articles):
    retain = texts_of("r", [*articles[:3], "Ana said so."] * 9)
    registry = Registry.create(tmp_path / "r", retain, checkpoints / "target")
    registry.add("one", texts_of("t", [articles[20], "Ana said so."]))
    (entry,) = registry.entries()
    assert not entry.has_retained_passages


@pytest.mark.parametrize(("code", "advice"), [("SQLITE_BUSY", "try again"), ("SQLITE_FULL", "make room")])
def test_an_intact_database_is_not_to_be_restored(registry, code, advice):
    error = sqlite3.OperationalError("it is not damaged")
    error.sqlite_errorcode = getattr(sqlite3, code)
    store = Store(registry.folder)
    with pytest.raises(FailedClosed, match=advice) as raised, store.failing_closed():
        raise error
    assert "backup" not in str(raised.value)


def test_key_of_a_registry_in_the_home_folder_is_named(tmp_path, checkpoints, articles, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "retain.txt").write_text("\n".join(articles[:3]))
    given = ["--target", str(checkpoints / "target"), "--retain", "~/retain.txt"]
    assert main(["takedown", "init", "~/registry", *given]) == 0
    assert f"key: {tmp_path / 'registry'}" in capsys.readouterr().out


def test_moved_bundle_uses_registry_moved_with_it(tmp_path, folder, checkpoints, articles,
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


def test_registry_only_bundle_rejects_steering(folder, checkpoints, tmp_path, monkeypatch, capsys):
    target = str(checkpoints / "target")
    for steering in ("rank:5", "linear:5"):
        with pytest.raises(UsageError, match="needs no rule"):
            write_bundle(tmp_path / "b", target=target, registry=folder, steering=steering)
    bundle = write_bundle(tmp_path / "b", target=target, registry=folder)
    with pytest.raises(UsageError, match="needs no rule"):
        DivergenceForCausalLM.from_pretrained(bundle, steering="rank:5")
    assert DivergenceForCausalLM.from_pretrained(bundle).rule == "takedowns"
    monkeypatch.setattr(sys, "stdin", io.StringIO("/alpha 5\n/alpha 0\n/alpha 1\n"))
    assert main(["chat", str(bundle)]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("steering takedowns") == 2  # at the start and after the last command
    assert "linear:5: a registry" in printed.out
    assert "the target's own" not in printed.err
    assert main(["generate", str(bundle), "--prompt", "Who?", "--raw", "--max-new-tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steering"] == "takedowns"


def test_models_with_registry_can_be_copied_but_not_pickled(folder, registry, checkpoints, articles):
    registry.add("case", texts_of("t", articles[20:21]))
    model = DivergenceForCausalLM.from_experts(
        load_model(checkpoints / "target"), None, takedowns=TakedownCorrection(folder)
    )
    ids = ids_of(registry, articles[20])
    assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)
    with pytest.raises((UsageError, TypeError)):
        pickle.dumps(model)


@pytest.mark.parametrize("reference", ["caf\udce9", "a\x1b[31m", "a\0b"])
def test_invalid_references_are_rejected(registry, articles, reference):
    with pytest.raises(UsageError, match="reference"):
        registry.add("one", texts_of("t", articles[10:11]), reference)
    assert registry.entries() == []


def test_references_may_be_persian(registry, articles):
    registry.add("one", texts_of("t", articles[10:11]), "نامه\u200cی ۳ مه")
    assert registry.entries()[0].reference == "نامه\u200cی ۳ مه"


def test_digests_of_a_bundle_depend_on_the_requests_and_the_parts(registry, folder, checkpoints, articles, tmp_path):
    parts = {name: shutil.copytree(checkpoints / name, tmp_path / name) for name in ("target", "retain", "forget")}
    bundle = write_bundle(
        tmp_path / "bundle", target=str(parts["target"]), retain_auxiliary=str(parts["retain"]),
        forget_auxiliary=str(parts["forget"]), registry=str(folder), steering="linear:1",
    )  # fmt: skip

    def digests():
        return [answer_digests(bundle, verified=verified) for verified in (True, False)]

    first = digests()
    assert digests() == first
    registry.add("case", texts_of("t", articles[20:21]))
    second = digests()
    registry.remove("case")
    third = digests()
    assert len({one["registry"] for one, _ in (first, second, third)}) == 3
    (parts["forget"] / "generation_config.json").write_text('{"top_k": 1}')
    assert digests()[0] == third[0]  # the bundle names its parts' digests, which loading compares
    assert digests()[1] != third[1]


def test_ids_that_differ_in_normalisation_are_the_same_request(folder, registry, articles, capsys):
    composed, decomposed = "Andr\u00e9", "Andre\u0301"
    assert registry.add(decomposed, texts_of("t", articles[20:21])).id == composed
    for spelling in (composed, decomposed):
        with pytest.raises(UsageError, match="already"):
            registry.add(spelling, texts_of("t", articles[21:22]))
        assert registry.find(spelling).id == composed
    assert main(["takedown", "remove", str(folder), "--id", decomposed]) == 0
    assert registry.history()[-1]["id"] == composed
    assert not registry.entries()


def test_takedown_of_a_folder_with_unread_documents_is_refused(folder, registry, articles, tmp_path, capsys):
    case = tmp_path / "case"
    case.mkdir()
    (case / "one.txt").write_text(articles[20])
    (case / "two.html").write_text(f"<p>{articles[21]}")
    arguments = ["takedown", "add", str(folder), "--id", "case", "--file", str(case), "--no-measure"]
    assert main(arguments) == 2
    assert "1 of 2 files" in (said := capsys.readouterr().err)
    assert "two.html" in said
    assert not registry.entries()
    (case / "two.html").rename(case / "two.txt")
    (case / "three.txt").write_text("\n")
    assert main(arguments) == 0
    assert "1 of 3 texts are blank" in capsys.readouterr().out
    assert registry.find("case").documents == 2


def test_takedown_list_shows_brackets_literally(folder, registry, articles, capsys):
    registry.add("case[/x]", texts_of("t", articles[10:11]), "see [/b] letter")
    for options in ([], ["--history"]):
        assert main(["takedown", "list", str(folder), *options]) == 0
        assert "case[/x]" in capsys.readouterr().out


def test_takedown_command_end_to_end(tmp_path, checkpoints, articles, capsys):
    """A request is withdrawn by another process than the one whose model follows it."""
    (tmp_path / "retain.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in articles[:10]))
    (tmp_path / "article.txt").write_text(articles[20])

    def in_another_process(*arguments):
        command = [sys.executable, "-m", "divdec.cli", "takedown", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    def here(*arguments, code=0):
        assert main(["takedown", *arguments]) == code
        return capsys.readouterr().out

    registry, target = str(tmp_path / "takedowns"), str(checkpoints / "target")
    here("init", registry, "--target", target, "--retain", str(tmp_path / "retain.jsonl"), "--order", "3")
    bundle = write_bundle(tmp_path / "bundle", target=target, registry=registry)
    model = DivergenceForCausalLM.from_pretrained(bundle)
    ids = ids_of(Registry(registry), articles[20], 12)
    before = model(ids).logits
    # The target recites nothing before either.
    added = json.loads(here("add", registry, "--id", "x", "--file", str(tmp_path / "article.txt"), "--json", code=3))
    assert (added["measured"]["passages"], added["measured"]["recited_after"]) == (4, 0)
    assert added["tokens"] == len(documents_of(Registry(registry), articles[20:21])[0])
    following = ids[0, 7]
    assert model(ids).logits[0, 6, following] < before[0, 6, following] - 2.5
    assert "1 request in force, at strength 10" in here("list", registry)
    assert "intact" in here("verify", registry)
    in_another_process("remove", registry, "--id", "x")
    assert torch.equal(model(ids).logits, before)
    assert "remove" in here("list", registry, "--history")


def test_takedown_commands_do_not_import_torch(folder, registry, articles):
    registry.add("one", texts_of("t", articles[10:11]))
    actions = ["list"], ["verify"], ["remove", "--id", "one"]
    assert not loads_torch(*(["takedown", action, str(folder), *options] for action, *options in actions))


def test_packed_counts_round_trip(articles, registry):
    counts = count(documents_of(registry, articles[:2]), registry.vocab_size, 4)
    packed = PackedCounts.from_bytes(PackedCounts.from_counts(counts).to_bytes())
    for one, other in zip((*packed.keys[1:], *packed.counts[1:]), (*counts.keys, *counts.counts), strict=True):
        assert np.array_equal(one, other)
    assert np.array_equal(packed.keys[0], np.flatnonzero(counts.unigrams))
