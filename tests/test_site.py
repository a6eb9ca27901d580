"""The documentation as a site: it builds strictly, has every page, command and public name, and needs no network."""

import contextlib
import html.parser
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# The build alone, which shows the same errors, is part of `make check`.
pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[1]
LOADED = ("script", "link", "img", "iframe", "source")  # by the browser, without a click


class Tags(html.parser.HTMLParser):
    """Ids of a page, and the addresses that it loads."""

    def __init__(self, page):
        super().__init__()
        self.ids, self.loaded = set(), []
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids.add(attrs.get("id"))
        if tag in LOADED:
            self.loaded += [attrs[name] for name in ("src", "href") if attrs.get(name)]


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install divdec[docs]")
    output = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(output)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return output


def test_site_has_every_page(site):
    pages = [path.stem for path in (ROOT / "docs").glob("*.md")]
    pages += [f"api/{path.stem}" for path in (ROOT / "docs" / "api").glob("*.md")]
    pages += [f"{path.parent.relative_to(ROOT)}/index" for path in (ROOT / "examples").glob("*/README.md")]
    missing = {page for page in ("index", *pages) if not (site / f"{page}.html").is_file()}
    assert missing == set()
    assert not (site / "site" / "hooks.py").exists()


def test_site_has_the_markdown_of_every_page(site):
    pages = [path for path in site.rglob("*.html") if path.name != "404.html"]
    # README.md is index.html; links between Markdown pages lead to Markdown.
    sources = {
        path.with_suffix(".md") if path.with_suffix(".md").exists() else path.with_name("README.md") for path in pages
    }
    assert [path for path in sources if not path.is_file()] == []
    assert "](serving.md)" in (site / "README.md").read_text()
    assert [path for path in site.rglob("*.md") if re.search(r"^:::", path.read_text(), re.MULTILINE)] == []
    page = (site / "api" / "model.md").read_text()
    assert "### divdec.DivergenceForCausalLM.from_pretrained" in page
    assert "FailedClosed" in page


def test_llms_txt_leads_to_markdown(site):
    links = re.findall(r"\]\((\S+)\)", (site / "llms.txt").read_text())
    assert [link for link in links if not (link.endswith(".md") and (site / link).is_file())] == []


def test_site_has_every_command_and_its_options(site):
    from divdec.cli.app import app

    overview = (site / "commands" / "index.html").read_text()
    for name in app:
        if name.startswith("-"):
            continue
        page = site / "commands" / f"{name}.html"
        tags, text = Tags(page), page.read_text()
        assert f'href="{name}.html"' in overview
        assert f"divdec-{name}" in tags.ids
        for command in app[name]:
            assert command.startswith("-") or f"divdec-{name}-{command}" in tags.ids
        assert "--no-json" not in text, name  # an option that the command does not have
    assert "<code>--retain-auxiliary" in (site / "commands" / "bundle.html").read_text()


def test_site_has_every_public_name(site):
    import divdec

    ids = set().union(*(Tags(page).ids for page in (site / "api").glob("*.html")))
    assert {f"divdec.{name}" for name in divdec.__all__} <= ids


def test_site_loads_nothing_from_the_network(site):
    for page in site.rglob("*.html"):
        assert [address for address in Tags(page).loaded if re.match(r"(https?:)?//", address)] == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", sheet.read_text()), sheet


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_site_opens_from_disk(site, browser, width, scheme):
    with opened(browser, site / "benchmarks.html", width, scheme) as page:
        # A wide table scrolls, the page does not.
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        wide = (
            "[...document.querySelectorAll('.md-typeset__scrollwrap')].some(box => box.scrollWidth > box.clientWidth)"
        )
        assert page.evaluate(wide) or width > 390  # at 1280 every table fits
        dark = page.evaluate("document.body.dataset.mdColorScheme") == "slate"
        assert dark == (scheme == "dark")


def test_no_page_is_wider_than_a_phone(site, browser):
    wide = []
    for path in sorted(site.rglob("*.html")):
        with opened(browser, path, 390, "light") as page:
            if page.evaluate("document.documentElement.scrollWidth - innerWidth") > 0:
                wide.append(path.name)
    assert wide == []


def test_search_works_from_disk(site, browser):
    with opened(browser, site / "index.html", 1280, "light") as page:
        page.click(".md-search__input")
        page.keyboard.type("takedown")
        page.wait_for_selector(".md-search-result__item a[href*='takedown']")


@contextlib.contextmanager
def opened(browser, path, width, scheme):
    """A page; it may load nothing from elsewhere, and no script of it may fail."""
    page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
    asked, failed = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.goto(path.as_uri())
    try:
        yield page
        assert [address for address in asked if not address.startswith(("file:", "data:", "blob:"))] == []
        assert failed == []
    finally:
        page.close()
