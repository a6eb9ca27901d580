"""What README and docs say can be typed: every command parses, the Python runs, every link leads somewhere."""

import itertools
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from research.studies import tables

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(text):
    """The commands of a page, without those that leave something out or are part of a shell's loop."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text.replace("\\\n", " "), flags=re.DOTALL | re.MULTILINE)
    lines = [line.removeprefix("$ ").strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("divdec ") and "…" not in line and " $" not in line]


def test_readme_contains_commands():
    assert {shlex.split(command)[1] for command in commands(README)} >= {"train", "bundle", "generate", "chat"}


@pytest.mark.parametrize(
    "command",
    [command for page in (*PAGES, *ROOT.glob("examples/*/README.md")) for command in commands(page.read_text())],
)
def test_documented_commands_parse(command):
    from divdec.cli.app import app

    app.parse_args(shlex.split(command)[1:], exit_on_error=False, print_error=False)


def test_readme_python_runs(bundle, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()
    Path("demo/bundle").symlink_to(bundle)
    Path("demo/questions.txt").write_text("What is the capital of Hungary?\n")
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names = {}
    exec(block, names)
    assert str(names["model"].steering) == "rank:20:3"
    printed = capsys.readouterr().out
    assert printed.strip()
    assert "What is the capital of Hungary?" not in printed  # the answer without the prompt


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_readme_links_resolve(page):
    for link in re.findall(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)", page.read_text(), flags=re.MULTILINE):
        target = "".join(link)
        if target.startswith("http"):
            continue
        path, _, section = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not section or section in sections(linked), target


def sections(page):
    """Anchors that GitHub gives to a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_have_one_width(page):
    """A table whose second line is shorter than its head is shown as text."""
    lines = page.read_text().splitlines()
    pairs = [(head, line) for head, line in itertools.pairwise(lines) if re.fullmatch(r"\|(?: *:?-+:? *\|)+", line)]
    assert [head for head, line in pairs if len(re.findall(r"(?<!\\)\|", head)) != line.count("|")] == []


def test_llms_txt_lists_every_page():
    text = (ROOT / "docs" / "llms.txt").read_text()
    assert text.startswith("# divdec\n\n> ")
    assert set(re.findall(r"\]\((\w+\.md)\)", text)) >= {page.name for page in (ROOT / "docs").glob("*.md")}


def test_public_pages_stay_short():
    """CONTRIBUTING.md has the limits."""
    assert len(README.splitlines()) <= 150
    pages = [page for page in PAGES if page.name != "CONTRIBUTING.md"]
    assert len(pages) - 1 <= 14
    assert sum(len(page.read_text().split()) for page in pages) <= 25_000


def test_tables_equal_their_result_files(capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr().out


@pytest.fixture
def copied_pages(tmp_path):
    """A copy of README, docs, the examples' pages and the result files."""
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")):
        copy = tmp_path / page.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, copy)
    shutil.copytree(ROOT / tables.RESULTS, tmp_path / tables.RESULTS)
    return tmp_path


@pytest.mark.parametrize("name", tables.TABLES)
def test_wrong_figure_in_a_table_is_reported_and_corrected(copied_pages, capsys, name):
    start = f"<!--table:{name}-->\n"
    (page,) = (path for path in copied_pages.rglob("*.md") if start in path.read_text())
    right = page.read_text()
    before, after = right.split(start)
    wrong = before + start + re.sub(r"\d\.\d\d", "7.77", after, count=1)
    page.write_text(wrong)
    assert tables.main(["--check"], copied_pages) == 1
    changed = re.findall(r"^[-+]\|.*$", capsys.readouterr().out, re.MULTILINE)
    assert ["7.77" in line for line in changed] == [True, False]
    assert page.read_text() == wrong
    assert tables.main([], copied_pages) == 0
    assert page.read_text() == right


@pytest.mark.parametrize("comment", ["", "<!--table:unknown-->\n"])
def test_table_without_its_comment_is_refused(copied_pages, capsys, comment):
    page = copied_pages / "docs" / "benchmarks.md"
    page.write_text(page.read_text().replace("<!--table:attacks-->\n", comment))
    with pytest.raises(SystemExit) as exit_info:
        tables.main([], copied_pages)
    assert exit_info.value.code == 2
    assert "attacks" in capsys.readouterr().err


def test_documented_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"`make ([a-z0-9-]+)", page.read_text()):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"{page.name}: make {target}"


def test_every_command_is_in_readme():
    from divdec.cli.app import app

    assert all(f"`divdec {verb}`" in README for verb in app if not verb.startswith("-"))
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
