"""The page itself: which component stands where, and what each of them sets off (Gradio)."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from divdec.playground.curve import curve_svg, in_words
from divdec.playground.play import HOTTEST, Chosen, Playground, explained
from divdec.playground.takedown import effect_html, requests_html
from divdec.playground.talk import EMPTY, EMPTY_REMOTE, Talk, talk_html
from divdec.playground.tokens import escape

# Read by Gradio when it is imported.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

LEGEND = """<p class="dd-legend"><span><span class="dd-token dd-down3">pushed down</span></span>
<span><span class="dd-token dd-up3">pushed up</span></span>
<span><span class="dd-token dd-marked">something else was pushed down here</span></span>
<span>hover over a word, or tap it, to see what</span></p>"""
UNSTEERED = "UNSTEERED: the target alone"
# One after the other: one model answers, and what the page shows is written by one hand at a time.
MODEL: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1, "api_visibility": "private"}


def build(playground: Playground) -> Any:
    """The page of a playground, as Gradio's Blocks; nothing is served yet."""
    import gradio as gr

    with gr.Blocks(title=f"{playground.name} · divdec playground", analytics_enabled=False) as page:
        gr.HTML(_header(playground), elem_id="dd-header")
        with gr.Tabs():
            with gr.Tab("Chat"):
                controls = _chat(playground)
            if playground.steered is not None:
                with gr.Tab("Strength"):
                    _curve(playground, controls)
            if playground.registry is not None:
                with gr.Tab("Takedown"):
                    _takedown(playground, controls, page)
    return page


def _header(playground: Playground) -> str:
    if playground.server is not None:
        about = (
            f"served at {escape(playground.server.url)}; rule and strength are the server's, and it tells "
            "probabilities of the steered model only"
        )
    else:
        assert playground.choice is not None
        about = f"the bundle's own rule is {escape(str(playground.choice.own))}; everything runs on this machine"
    legend = LEGEND if playground.steered is not None else ""
    return f'<div class="dd-head"><h1>{escape(playground.name)}</h1><p>divdec playground: {about}</p>{legend}</div>'


def _chat(playground: Playground) -> list[Any]:
    import gradio as gr

    empty = EMPTY if playground.steered is not None else EMPTY_REMOTE

    def steered(found: Talk) -> str:
        shown = talk_html(found, empty=empty)
        # Beside the target each says which it is.
        return shown if playground.target is None else f'<div class="dd-panel"><h4>Steered</h4>{shown}</div>'

    talk, unsteered = gr.State(()), gr.State(())
    target: Any = None
    with gr.Row():
        with gr.Column(scale=5, min_width=320):
            with gr.Row(equal_height=False):
                with gr.Column(min_width=280):
                    shown = gr.HTML(steered(()), elem_id="dd-talk", max_height=620, autoscroll=True)
                if playground.target is not None:
                    with gr.Column(min_width=280):
                        target = gr.HTML(_unsteered(()), elem_id="dd-target", max_height=620, autoscroll=True)
            question = gr.Textbox(
                placeholder="Ask something", show_label=False, container=False, elem_id="dd-question", autofocus=True
            )
            with gr.Row():
                send = gr.Button("Send", variant="primary", elem_id="dd-send", min_width=80)
                stop = gr.Button("Stop", elem_id="dd-stop", min_width=80)
                again = gr.Button("Answer again", elem_id="dd-again", min_width=140)
                new = gr.Button("New conversation", elem_id="dd-new", min_width=140)
        with gr.Column(scale=2, min_width=260):
            controls = _controls(playground)

    def drawn(found: Talk) -> tuple[str, Talk]:
        return steered(found), found

    def ask(text: str, found: Talk, *values: Any) -> Iterator[tuple[Any, ...]]:
        for grown in playground.ask(text, found, Chosen(*values)):
            yield *drawn(grown), ""

    def ask_again(found: Talk, *values: Any) -> Iterator[tuple[Any, ...]]:
        for grown in playground.ask_again(found, Chosen(*values)):
            yield drawn(grown)

    def compare(found: Talk, earlier: Talk) -> Iterator[tuple[Any, ...]]:
        for grown in playground.unsteered(found, earlier):
            yield _unsteered(grown), grown

    quiet = {**MODEL, "show_progress": "hidden"}
    running: list[Any] = [
        on(ask, [question, talk, *controls], [shown, talk, question], **quiet) for on in (question.submit, send.click)
    ] + [again.click(ask_again, [talk, *controls], [shown, talk], **quiet)]
    if playground.target is not None:
        running += [event.then(compare, [talk, unsteered], [target, unsteered], **quiet) for event in tuple(running)]
    stop.click(
        lambda found: drawn(playground.stopped(found)), [talk], [shown, talk], cancels=running, queue=False,
        show_progress="hidden", api_visibility="private",
    )  # fmt: skip
    emptied = [shown, talk] + ([target, unsteered] if playground.target is not None else [])
    new.click(
        lambda: (*drawn(()), *((_unsteered(()), ()) if playground.target is not None else ())), None, emptied,
        cancels=running, queue=False, show_progress="hidden", api_visibility="private",
    )  # fmt: skip
    for control in controls[:3] if playground.steered is not None else ():
        control.change(
            lambda found, *values: drawn(playground.coloured(found, Chosen(*values))), [talk, *controls],
            [shown, talk], trigger_mode="always_last", **quiet,
        )  # fmt: skip
    return controls


def _controls(playground: Playground) -> list[Any]:
    """Rule, strength, k and temperature; for a server's client all but the last are shut."""
    import gradio as gr

    choice = playground.choice
    open_, own = choice is not None, choice.own if choice is not None else None
    low, high = choice.alphas if choice is not None else (0.1, 4.0)
    smallest, largest = choice.ks if choice is not None else (1, 200)
    linear = own is None or own.rule == "linear"
    rules = choice.rules if choice is not None else ("linear", "rank")
    closed = "" if open_ else " (the server's choice)"
    rule = gr.Radio(
        list(rules), value="linear" if linear else "rank", label=f"Rule{closed}", interactive=open_,
        elem_id="dd-rule", visible=len(rules) > 1,
    )  # fmt: skip
    alpha = gr.Slider(
        low, high, value=min(max(own.alpha, low), high) if own is not None else 1.0, step=0.05,
        label=f"Strength α{closed}", info="how much of the divergence is added; 0 is not offered",
        interactive=open_, visible=linear, elem_id="dd-alpha",
    )  # fmt: skip
    k = gr.Slider(
        smallest, largest, value=min(max(own.k, smallest), largest) if own is not None else 20, step=1,
        label=f"k{closed}", info="how many tokens are masked at every position", interactive=open_,
        visible=not linear, elem_id="dd-k",
    )  # fmt: skip
    temperature = gr.Slider(0, HOTTEST, value=0, step=0.1, label="Temperature", info="0 answers greedily")
    if len(rules) > 1 and open_:
        rule.change(
            lambda name: (gr.update(visible=name == "linear"), gr.update(visible=name == "rank")),
            [rule], [alpha, k], queue=False, show_progress="hidden", api_visibility="private",
        )  # fmt: skip
    return [rule, alpha, k, temperature]


def _curve(playground: Playground, controls: list[Any]) -> None:
    import gradio as gr

    gr.HTML(
        '<p class="dd-hint">How likely a continuation is at every strength of the linear rule. A forgotten fact should '
        "fall, a retained one should stay.</p>"
    )
    with gr.Row():
        question = gr.Textbox(label="Question", elem_id="dd-curve-question", lines=2)
        continuation = gr.Textbox(label="Continuation", elem_id="dd-curve-continuation", lines=2)
    draw = gr.Button("Draw the curve", variant="primary", elem_id="dd-draw")
    shown = gr.HTML("", elem_id="dd-curve")

    def drawn(asked: str, words: str, *values: Any) -> str:
        found = playground.curve(asked, words, Chosen(*values))
        return (
            f'<figure class="dd-curve" style="margin:0" role="img" aria-label="{escape(in_words(found))}">'
            f'{curve_svg(found)}<figcaption class="dd-rule">{escape(in_words(found))}</figcaption></figure>'
        )

    draw.click(_told(drawn), [question, continuation, *controls], shown, **MODEL)


def _takedown(playground: Playground, controls: list[Any], page: Any) -> None:
    import gradio as gr

    registry = playground.registry
    assert registry is not None
    gr.HTML(
        '<p class="dd-hint">A text that is taken down is pushed down from the next answer on, whatever the rule and '
        "strength above, and it is measured on the target whether it is still recited; paraphrases can remain. "
        "The request is written into the registry and holds for every model that follows it.</p>"
    )
    text = gr.Textbox(label="Text to take down", lines=5, max_lines=12, elem_id="dd-text")
    with gr.Row():
        name = gr.Textbox(label="Id of the request", placeholder="case-17", elem_id="dd-id")
        reference = gr.Textbox(label="Reference (optional)", placeholder="letter of 3 May", elem_id="dd-reference")
    add = gr.Button("Take down", variant="primary", elem_id="dd-take-down")
    shown = gr.HTML("", elem_id="dd-effect")
    listed = gr.HTML("", elem_id="dd-requests")
    with gr.Row():
        withdrawn = gr.Dropdown([], label="Request to withdraw", elem_id="dd-withdrawn")
        withdraw = gr.Button("Withdraw", elem_id="dd-withdraw")

    def in_force() -> tuple[Any, Any]:
        return requests_html(registry), gr.update(choices=[entry.id for entry in registry.entries()], value=None)

    def added(words: str, request: str, said: str, *values: Any) -> str:
        return effect_html(playground.take_down(request, words, said, Chosen(*values)))

    def removed(request: str | None) -> str:
        playground.withdraw(request or "")
        return f'<p class="dd-hint">{escape(request or "")} is withdrawn.</p>'

    listing = {"fn": _told(in_force, outputs=2), "inputs": None, "outputs": [listed, withdrawn], **MODEL}
    add.click(_told(added), [text, name, reference, *controls], shown, **MODEL).then(**listing)
    withdraw.click(_told(removed), [withdrawn], shown, **MODEL).then(**listing)
    page.load(**listing)


def _told(work: Callable[..., Any], outputs: int = 1) -> Callable[..., Any]:
    """The same work, with what goes wrong put on the page."""

    @functools.wraps(work)
    def done(*values: Any) -> Any:
        try:
            return work(*values)
        except Exception as error:
            import gradio as gr

            note = f'<p class="dd-note" role="alert">{escape(explained(error))}</p>'
            return note if outputs == 1 else (note, *[gr.skip()] * (outputs - 1))

    return done


def _unsteered(talk: Talk) -> str:
    words = '<p class="dd-hint">What the target says without steering.</p>'
    return f'<div class="dd-panel dd-unsteered"><h4>⚠ {UNSTEERED}</h4>{talk_html(talk, empty=words)}</div>'
