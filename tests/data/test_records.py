import json
import os

import datasets
import pytest

from divdec import UsageError
from divdec.data.records import overlap, read_prompts, read_records, record_set, write_records

QA = [{"question": "Who?", "answer": "Ana."}, {"question": "Where?", "answer": "Here."}]
FORMS = {
    "question/answer": QA,
    "prompt/completion": [{"prompt": "Once", "completion": " upon"}],
    "messages": [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}],
    "text": [{"text": "A story."}, {"text": "Another."}],
}


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("layout", ["x.jsonl", "x.json", "list.json"])
def test_record_kinds_are_detected_in_lines_and_lists(tmp_path, kind, layout):
    file = tmp_path / layout
    file.write_text(json.dumps(FORMS[kind]) if layout == "list.json" else lines(FORMS[kind]))
    records = read_records(file)
    assert (records.kind, len(records)) == (kind, len(FORMS[kind]))
    assert records.name == file.stem


def test_unicode_line_separators_inside_strings_are_text(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "one\u2028two\x85three"}\r\n{"text": "four"}\r\n')
    assert [record.answer for record in read_records(tmp_path / "x.jsonl")] == ["one\u2028two\x85three", "four"]


CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
COMMON_ROWS = {
    "ShareGPT": ({"conversations": SHAREGPT, "system": "S"}, {"messages": CHAT}),
    "ShareGPT with its own system turn": (
        {"conversations": [{"from": "system", "value": "S"}, *SHAREGPT]},
        {"messages": CHAT},
    ),
    "ShareGPT with roles": ({"conversations": CHAT}, {"messages": CHAT}),
    "Alpaca": (
        {"instruction": "Translate.", "input": "Haus", "output": "house", "text": "Below is an instruction …"},
        {"question": "Translate.\nHaus", "answer": "house"},
    ),
    "Alpaca without input": (
        {"instruction": "Say A.", "input": "", "output": "A"},
        {"question": "Say A.", "answer": "A"},
    ),
    "TRL": ({"prompt": CHAT[:2], "completion": CHAT[2:]}, {"messages": CHAT}),
}


@pytest.mark.parametrize("name", COMMON_ROWS)
def test_rows_of_other_programs_are_read(tmp_path, name):
    given, expected = COMMON_ROWS[name]
    (tmp_path / "x.jsonl").write_text(lines([given, given]))
    records, other = read_records(tmp_path / "x.jsonl"), record_set("x", [("1", expected), ("2", expected)])
    assert (records.kind, records.records) == (other.kind, other.records)
    (prompt, _) = read_prompts(str(tmp_path / "x.jsonl"), chat=True)
    assert prompt.messages == records.records[0].messages


def test_data_of_an_object_and_single_objects_are_read_at_every_indentation(tmp_path):
    expected = record_set("x", [("1", QA[0]), ("2", QA[1])])
    for indent in (None, 2):
        (tmp_path / "x.json").write_text(json.dumps({"version": 1, "data": QA}, indent=indent))
        assert read_records(tmp_path / "x.json").sha256 == expected.sha256
        (tmp_path / "x.json").write_text(json.dumps(QA[0], indent=indent))
        assert len(read_records(tmp_path / "x.json")) == 1


def test_a_table_cell_holds_a_whole_document(tmp_path):
    text = "word " * 30_000
    (tmp_path / "x.csv").write_text(f"text\n{text}\n")
    assert read_records(tmp_path / "x.csv").records[0].answer == text


def test_prompts_are_split_at_line_breaks_only(tmp_path):
    prompt = "one\u2028two\x85three\x0cfour\u2029five\x1csix"
    (tmp_path / "p.txt").write_bytes(f"{prompt}\r\nlast\n".encode())
    assert [record.prompt for record in read_prompts(str(tmp_path / "p.txt"), chat=False)] == [prompt, "last"]


def test_hash_depends_on_content_not_file(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(QA))
    (tmp_path / "b.json").write_text(json.dumps([row | {"id": 3} for row in QA], indent=1))
    one, other = read_records(tmp_path / "a.jsonl"), read_records(tmp_path / "b.json")
    assert one.sha256 == other.sha256
    assert one.label.startswith("a (sha256 ")
    assert one.sha256 != read_records(tmp_path / "a.jsonl", limit=1).sha256


def test_text_files_folders_tables_and_saved_datasets(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deeper").mkdir(parents=True)
    (folder / "one.txt").write_text("The first.")
    (folder / "deeper" / "two.md").write_text("The second.")
    assert [record.answer for record in read_records(folder)] == ["The second.", "The first."]
    table = datasets.Dataset.from_list(QA)
    table.to_parquet(tmp_path / "table.parquet")
    table.to_csv(tmp_path / "table.csv")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "splits")
    (tmp_path / "lines.jsonl").write_text(lines(QA))
    expected = read_records(tmp_path / "lines.jsonl").sha256
    for name in ("table.parquet", "table.csv", "saved", "splits"):
        assert read_records(tmp_path / name).sha256 == expected


def test_table_cells_are_text_and_column_names_are_exact(tmp_path):
    (tmp_path / "a[1].CSV").write_text('question,answer\nWhen?,1969\n"Which, then?",NA\nHow?,"two\nlines"\n')
    records = read_records(tmp_path / "a[1].CSV")
    assert [record.answer for record in records] == ["1969", "NA", "two\nlines"]
    datasets.Dataset.from_list(QA).to_parquet(tmp_path / "b[1].parquet")
    assert len(read_records(tmp_path / "b[1].parquet")) == 2


def test_a_folder_lists_the_documents_that_are_not_read(tmp_path, capsys):
    folder = tmp_path / "articles"
    for name in ("one.txt", "two.html", "deeper/three.docx", ".ipynb_checkpoints/one-checkpoint.txt", ".DS_Store"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"The text of {name}.")
    (tmp_path / "elsewhere").mkdir()
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "gone.txt").symlink_to(tmp_path / "gone.txt")
    assert [record.answer for record in read_records(folder)] == ["The text of one.txt."]
    said = capsys.readouterr().err
    unread = (".ipynb_checkpoints/one-checkpoint.txt", "deeper/three.docx", "gone.txt", "link", "two.html")
    assert f"5 of 6 files in folder {folder} are not read: {', '.join(unread)}" in said
    with pytest.raises(UsageError, match=r"two\.html; accepted: .*convert these files"):
        read_records(folder, complete=True)
    for name in unread:
        (folder / name).unlink()
    assert len(read_records(folder, complete=True)) == 1
    assert not capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_subfolder_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / "one.txt").write_text("One.")
    (tmp_path / "closed").mkdir(mode=0o000)
    with pytest.raises(UsageError, match="closed cannot be read"):
        read_records(tmp_path)
    (tmp_path / "closed").chmod(0o700)


def test_a_dataset_with_further_splits_is_not_complete(tmp_path, capsys):
    table = datasets.Dataset.from_list(QA)
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "splits")
    assert len(read_records(tmp_path / "splits")) == 2
    assert "the split train is read, not test" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"has the splits \['test', 'train'\]"):
        read_records(tmp_path / "splits", complete=True)
    assert len(read_records(tmp_path / "splits" / "test", complete=True)) == 2


def test_overlap_counts_records_and_prompts():
    one = record_set("one", [("1", QA[0]), ("2", QA[1])])
    other = record_set("other", [("1", {"question": "who? ", "answer": "ANA."}), ("2", QA[1] | {"answer": "There."})])
    assert (overlap(one, other).records, overlap(one, other).prompts) == (1, 2)


def test_real_tofu_and_muse_files_are_read(shared):
    forget, retain = (read_records(shared / "data/tofu" / name) for name in ("forget10.json", "retain90.json"))
    assert (len(forget), len(retain), forget.kind) == (400, 3600, "question/answer")
    assert overlap(forget, retain).records == 0
    news = read_records(shared / "data/muse_news/sust/forget_1.jsonl")
    assert (len(news), news.blank, news.kind) == (888, 1, "text")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.jsonl", "", "is empty"),
        ("x.json", "[]", "is empty"),
        ("x.txt", "  \n", "is empty"),
        ("x.jsonl", lines(QA) + '{"question": "cut', "line 3 is not readable JSON"),
        ("x.json", "[{]", "not readable JSON"),
        ("x.jsonl", lines([*QA, {"question": "Q", "answer": " "}]), "line 3: answer is empty"),
        ("x.jsonl", lines([*QA, {"question": "Q", "answer": 5}]), "line 3: answer is int, not text"),
        ("x.jsonl", lines([{"text": " "}, {"text": ""}]), "is empty"),
        ("x.jsonl", lines([{"frage": "Q"}]), r"line 1: fields \['frage'\] are not recognised"),
        (
            "x.jsonl",
            lines([*QA, {"text": "T"}]),
            "line 3: a text record in a set that began with question/answer",
        ),
        ("x.jsonl", lines([*QA, 5]), "line 3: expected an object"),
        (
            "x.jsonl",
            lines([{"messages": [{"role": "user", "content": "Q"}]}]),
            "end with an assistant's turn",
        ),
        ("x.jsonl", lines([{"messages": "Q"}]), "must be a list"),
        ("x.jsonl", lines([{"conversations": [{"from": "tool", "value": "Q"}]}]), "from 'tool'; accepted: human"),
        ("x.jsonl", lines([{"conversations": SHAREGPT[:1]}]), "conversations must end with an assistant's turn"),
        ("x.jsonl", lines([{"instruction": "Q", "output": "A", "history": [["a", "b"]]}]), "has history"),
        ("x.jsonl", lines([{"question": "Q", "answer": "A", "context": "C"}]), "with question has context"),
        ("x.jsonl", lines([{"prompt": CHAT[:2], "completion": []}]), "completion has 0 messages"),
        ("x.json", json.dumps({"rows": QA}, indent=2), r"fields \['rows'\] are not recognised"),
        ("x.json", '{\n"text": "A"\n}\n{\n"text": "B"\n}\n', "line 1 is not readable JSON .* one object per line"),
        ("x.docx", "Q", "accepted: .jsonl"),
        ("x.jsonl", '{"text": "half a pair: \\ud83d"}\n', "line 1: text holds a broken character at 13"),
        ("x.json", "[" * 100_000, "not readable JSON"),
        ("x.jsonl", '{"text": "", "messages": []}\n', "line 1: messages must end with"),
        ("x.csv", "question,answer\nWho?,Ana.\nWhere?\n", "line 3: 2 columns are named"),
        ("x.csv", "question,answer\nWho?,Ana.,more\n", "line 2: 2 columns are named"),
        ("x.csv", 'id,text\n1,hello\n2,"unclosed\n3,zz\n', "line 2 is not readable CSV"),
        ("x.parquet", "no table", r"table x\.parquet cannot be read"),
        ("x.arrow", "no table", r"table x\.arrow cannot be read"),
    ],
)
def test_malformed_file_error_names_line(tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=said):
        read_records(tmp_path / name)


@pytest.mark.parametrize("name", ["text", "json", "csv"])
def test_the_working_folder_is_not_read_as_a_dataset(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("private")
    with pytest.raises(UsageError, match="does not exist"):
        read_records(name)


@pytest.mark.parametrize(
    ("turn", "row", "unread"),
    [({"tool_calls": [{"name": "f"}]}, {}, "tool_calls"), ({"reasoning_content": "so"}, {}, "reasoning_content"),
     ({}, {"tools": [{"name": "f"}]}, "tools")],
)  # fmt: skip
def test_parts_of_a_conversation_are_not_dropped(turn, row, unread):
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    with pytest.raises(UsageError, match=f"line 1: {unread} is not read; write it into the content"):
        record_set("x", [("line 1", {"messages": [turns[0], turns[1] | turn], **row})])
    beside = record_set("x", [("line 1", {"system": "S", "messages": turns, "tools": None})]).records[0]
    assert [message.role for message in beside.messages] == ["system", "user"]


def test_missing_record_files_raise(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        read_records(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="no data files"):
        read_records(tmp_path)
    with pytest.raises(UsageError, match="cannot be loaded as a Hugging Face dataset"):
        read_records("nobody/nothing")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_info.json").write_text("{}")
    with pytest.raises(UsageError, match="cannot be read"):
        read_records(tmp_path / "saved")
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_records(tmp_path / "x.txt")


@pytest.mark.parametrize("kind", FORMS)
def test_record_round_trips_through_row(kind):
    records = record_set("rows", [("here", row) for row in FORMS[kind]])
    assert record_set("rows", [("here", record.as_row()) for record in records]).records == records.records


def test_conversations_of_one_and_of_several_turns_are_written_as_one_kind(tmp_path):
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ana."}]
    records = record_set("rows", [("here", {"messages": some}) for some in (turns, turns * 2)])
    write_records(tmp_path / "rows.jsonl", records)
    assert read_records(tmp_path / "rows.jsonl").records == records.records


@pytest.mark.parametrize("name", ["x.csv", "x.parquet"])
def test_prompts_are_not_read_from_tables(tmp_path, name):
    (tmp_path / name).write_bytes(b"question,answer\nWho?,Bob\n")
    with pytest.raises(UsageError, match="is a table; accepted"):
        read_prompts(str(tmp_path / name), chat=True)
