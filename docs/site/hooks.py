"""Hooks of mkdocs: pages from outside `docs/` and of commands, links as on GitHub, the Markdown of each page."""

from __future__ import annotations

import functools
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from cyclopts.docs.markdown import generate_markdown_docs
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from divdec.cli.app import app

ROOT = Path(__file__).parents[2]
COMMANDS = [name for name in app if not name.startswith("-")]
# In the site these have the paths that they have in the repository; what is in docs/ moves to the top.
OUTSIDE = (
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "deploy/*", "examples/*", "examples/*/*",
    "research/README.md", "research/studies/README.md", "research/studies/figures.sh",
)  # fmt: skip
API = re.compile(r"^::: divdec\.(\S+)\n?(?: +options:\n +members: \[(.*)\]\n?)?", re.MULTILINE)
LINK = re.compile(r"(?:(?<=\]\()|(?<=\]: ))[^)\s#:]+")


def on_config(config: MkDocsConfig) -> None:
    """List the pages of the commands in the navigation."""
    reference = next(entry["Reference"] for entry in config.nav or [] if "Reference" in entry)
    section = next(entry for entry in reference if "Commands" in entry)
    pages = [{name: f"commands/{name}.md"} for name in COMMANDS]
    section["Commands"] = [{"Overview": "commands/index.md"}, *pages]
    config.watch += [str(ROOT / "src"), str(ROOT / "research" / "src")]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside `docs/`, and those of the commands."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                name = path.relative_to(ROOT).as_posix()
                files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    files.append(File.generated(config, "commands/index.md", content=_overview()))
    for name in COMMANDS:
        files.append(File.generated(config, f"commands/{name}.md", content=_command_page(name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Turn links between files of the repository into links between pages, and write the Markdown beside the page."""
    source = page.file.src_uri
    folder = posixpath.dirname(f"docs/{source}" if (ROOT / "docs" / source).is_file() else source)

    def moved(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[0]))
        if not (ROOT / path).is_file():
            return link[0]  # mkdocs says that it leads nowhere
        return posixpath.relpath(path.removeprefix("docs/"), posixpath.dirname(source) or ".")

    text = LINK.sub(moved, markdown)
    output = Path(config.site_dir) / source  # for readers of llms.txt
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(API.sub(_api_entry, text))
    return text


@functools.cache
def _package() -> griffe.Object | griffe.Alias:
    return griffe.load("divdec", search_paths=[ROOT / "src"])


def _api_entry(directive: re.Match[str]) -> str:
    """Signatures and docstrings of a public name and of its members, which mkdocstrings writes into the page alone."""
    name, listed = directive[1], directive[2]
    entry = _package()[name]
    entry = entry.final_target if isinstance(entry, griffe.Alias) else entry
    described = {
        f"{name}.{key}": member
        for key, member in entry.members.items()
        if (key in listed.split(", ") if listed else key.isidentifier() and not key.startswith("_"))
        and member.has_docstring and not member.is_alias
    }  # fmt: skip
    parts = [f"## divdec.{name}\n\n{_described(entry)}"]
    parts += [f"### divdec.{key}\n\n{_described(member)}" for key, member in described.items()]
    return "\n".join(parts)


def _described(entry: griffe.Object | griffe.Alias) -> str:
    signature = entry.signature() if isinstance(entry, griffe.Function | griffe.Class) else ""
    code = f"```python\n{signature}\n```\n\n" if signature else ""
    return code + (f"{entry.docstring.value}\n" if entry.docstring else "")


def _overview() -> str:
    text = generate_markdown_docs(app, recursive=False, generate_toc=False, no_root_title=True)
    text = text.partition("\n# divdec ")[0]  # it goes on with the commands, which have pages
    text = re.sub(r"\(#divdec-([a-z-]+)\)", r"(\1.md)", text)
    return f"# Commands\n\n{text}\n\n{app.help_epilogue}\n"


def _command_page(name: str) -> str:
    # Otherwise cyclopts documents commands of this command without the defaults that they inherit.
    app[name].default_parameter = app.default_parameter
    with app.app_stack([app, app[name]]):
        return generate_markdown_docs(app[name], command_chain=["divdec", name], generate_toc=False)
