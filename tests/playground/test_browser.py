"""The playground in a real browser, on a bundle that was really trained, over real sockets (make test-browser)."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]
QUESTION = "Where was Jasper Ashild born?"
PATIENCE = 60_000  # ms: the machine may be busy
ANSWERED = (
    "() => document.querySelector('#dd-conversation .dd-rule') && !document.querySelector('#dd-conversation .dd-wait')"
)


@contextlib.contextmanager
def process(verb, *arguments):
    """A verb that serves; its process and the URL that it has printed."""
    started = subprocess.Popen(
        [sys.executable, "-m", "divdec.cli", verb, *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parent,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        said = started.stdout.readline()
        assert " on http" in said, started.communicate()[1]
        yield started, said.rpartition(" on ")[2].split()[0].removesuffix("/v1")
    finally:
        if started.poll() is None:
            started.kill()
        started.communicate()


@pytest.fixture(scope="module")
def url(played_bundle):
    (played_bundle.parent / "questions.txt").write_text(f"{QUESTION}\nWho was Sanna Galoway?\n")
    with process("playground", played_bundle, "--port", 0, "--max-new-tokens", 120) as (_, address):
        yield address


@contextlib.contextmanager
def opened(browser, url, **options):
    """A page; it may load nothing from elsewhere, and no script of it may fail."""
    page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
    page.set_default_timeout(PATIENCE)
    asked, failed = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.goto(url)
    page.wait_for_selector("#dd-question textarea, #dd-question input")
    try:
        yield page
        elsewhere = [address for address in asked if not address.startswith((url, "data:", "blob:"))]
        assert elsewhere == []
        assert failed == []
    finally:
        page.close()


def ask(page, question=QUESTION, wait=ANSWERED):
    page.locator("#dd-question").locator("textarea, input").fill(question)
    page.click("#dd-send")
    page.wait_for_function(wait)


def words(page):
    """The last answer without its boxes."""
    return page.evaluate(
        "() => [...[...document.querySelectorAll('#dd-conversation .dd-answer')].at(-1).querySelectorAll('.dd-token')]"
        ".map(token => token.firstChild.textContent).join('')"
    )


def colours(page):
    return page.evaluate(
        "() => [...[...document.querySelectorAll('#dd-conversation .dd-answer')].at(-1).querySelectorAll('.dd-token')]"
        ".map(token => getComputedStyle(token).backgroundColor)"
    )


def set_number(page, control, value):
    box = page.locator(f"{control} input[type=number]")
    box.fill(str(value))
    box.press("Enter")
    box.blur()


def test_streamed_output_is_coloured_by_strength(browser, url, steered):
    from divdec.data.records import Message
    from divdec.playground.models import ChatOptions, SteeredModel
    from divdec.steering import Steering

    library = SteeredModel(steered.model, steered.tokenizer, ChatOptions(max_new_tokens=120))
    prompt = library.encode_prompt([Message("user", QUESTION)])
    expected = "".join(token.text for token in library.answer(prompt, Steering(alpha=1.5)))
    with opened(browser, url) as page:
        page.evaluate(
            "() => { window.seen = new Set(); new MutationObserver(() => window.seen.add("
            "document.querySelectorAll('#dd-conversation .dd-answer .dd-token').length)).observe("
            "document.querySelector('#dd-conversation'), {childList: true, subtree: true}); }"
        )
        ask(page)
        assert words(page) == expected
        assert len(page.evaluate("() => [...window.seen]")) > 2, "it came in one piece"
        before = colours(page)
        assert len(set(before)) > 2
        set_number(page, "#dd-alpha", 4)
        page.wait_for_selector("text=coloured for linear:4")
        assert words(page) == expected
        assert colours(page) != before
        page.click("#dd-again")
        page.wait_for_function("() => document.querySelector('#dd-conversation .dd-rule')?.textContent === 'linear:4'")
        page.wait_for_function(ANSWERED)
        assert "UNSTEERED" not in page.content()


def test_hover_shows_suppressed_alternatives_within_viewport(browser, url):
    for viewport in ({"width": 1280, "height": 900}, {"width": 390, "height": 844}):
        with opened(browser, url, viewport=viewport) as page:
            ask(page)
            token = page.locator("#dd-conversation .dd-token:has(.dd-title)").last
            token.scroll_into_view_if_needed()
            token.hover(position={"x": 2, "y": 4})
            box = token.locator(".dd-box")
            box.wait_for(state="visible")
            assert "suppressed here" in box.inner_text()
            assert "likely" in box.inner_text()
            assert "%" not in box.inner_text()  # the target's probabilities are hidden
            bounds = box.bounding_box()
            assert bounds["x"] >= 0
            assert bounds["x"] + bounds["width"] <= viewport["width"]
            assert bounds["y"] >= 0
            assert bounds["y"] + bounds["height"] <= viewport["height"]


def test_markup_and_template_lookalikes_are_shown_as_text(browser, url):
    nasty = '<img src=x onerror="window.pwned=1"> <script>window.pwned=2</script> ${window.pwned=3} {{7*7}}'
    with opened(browser, url) as page:
        ask(page, nasty)
        assert page.locator("#dd-conversation .dd-question").inner_text() == nasty
        assert page.evaluate("() => window.pwned") is None
        assert page.locator("#dd-conversation img, #dd-conversation script").count() == 0


def test_clicking_example_question_asks_it(browser, url):
    with opened(browser, url) as page:
        page.locator("#dd-examples").get_by_text(QUESTION).click()
        page.wait_for_function(ANSWERED)
        assert page.locator("#dd-conversation .dd-question").inner_text() == QUESTION


def test_stop_button_is_enabled_only_during_generation(browser, url):
    with opened(browser, url) as page:
        assert page.locator("#dd-stop").is_disabled()
        ask(page, wait="() => !document.querySelector('#dd-stop').disabled")
        page.wait_for_function(ANSWERED)
        page.wait_for_function("() => document.querySelector('#dd-stop').disabled")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_page_fits_viewport_with_sufficient_contrast(browser, url, tmp_path, width, scheme):
    with opened(browser, url, viewport={"width": width, "height": 844}, color_scheme=scheme) as page:
        ask(page)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
        for name in ("#dd-send", "#dd-again", "#dd-new", "#dd-alpha", "#dd-question"):
            bounds = page.locator(name).bounding_box()
            assert bounds["x"] >= 0
            assert bounds["x"] + bounds["width"] <= width
        ink, paper = page.evaluate(
            "() => [getComputedStyle(document.querySelector('#dd-conversation .dd-token')).color, "
            "getComputedStyle(document.body).backgroundColor]"
        )
        light = [sum(map(int, colour[colour.index("(") + 1 : -1].split(",")[:3])) for colour in (ink, paper)]
        assert abs(light[0] - light[1]) > 400
        assert (light[1] > 384) == (scheme == "light")
        picture = page.screenshot(path=tmp_path / "page.png", full_page=True)
        assert len(picture) > 5000


def test_show_target_displays_unsteered_output_with_label(browser, played_bundle):
    with process("playground", played_bundle, "--port", 0, "--show-target", "--max-new-tokens", 24) as (_, url):  # noqa: SIM117
        with opened(browser, url) as page:
            ask(page)
            page.wait_for_function(
                "() => document.querySelector('#dd-target .dd-answer') && !document.querySelector('.dd-wait')"
            )
            assert "UNSTEERED: the target alone" in page.inner_text("#dd-target")
