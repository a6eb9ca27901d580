"""The page of `divdec results report`: scores, the figures that the runs hold data for, and answers side by side."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

from markupsafe import Markup

from divdec.errors import UsageError
from divdec.report.page import write_page
from divdec_research.figures import benchmarks, runs  # noqa: F401  # they register their figures
from divdec_research.figures.registry import FIGURES, FigureRequest
from divdec_research.figures.results import COMPARISON, MethodResult, load_results
from divdec_research.report.scores import MEASURES, SCORES, group_remarks
from divdec_research.report.style import style, svg_text, themed
from divdec_research.report.tables import score_title
from divdec_research.suites.results import read_results

# Stands in every report, so that --overwrite replaces no other file.
GENERATOR = "<!-- divdec results report -->"
# Metrics whose items hold answers, with the names of their questions.
ANSWERS = {
    "tofu": {"forget_Q_A_ROUGE": "forget set", "retain_Q_A_ROUGE": "retain set"},
    "muse": {
        "forget_verbmem_ROUGE": "forget set, verbatim", "forget_knowmem_ROUGE": "forget set, knowledge",
        "retain_knowmem_ROUGE": "retain set, knowledge",
    },
}  # fmt: skip
ANSWER = "text-align: left; white-space: pre-wrap"
MAX_PROMPT = 400  # characters of a prompt that are shown, from its end


def write_report(
    path: Path, request: FigureRequest, examples: int
) -> tuple[dict[str, dict[str, MethodResult]], list[str]]:
    """Write the page atomically, with the answers to some questions of each set.

    Returns:
        The results by suite and name, and for each figure that is not on the page the reason.

    Raises:
        UsageError: a run holds no results, none is of TOFU or MUSE, or a suite has several references.
    """
    suites = {suite: _by_name(results) for suite, results in load_results(request, "report").items()}
    if not suites:
        raise UsageError(f"{', '.join(request.runs)}: no results of {' or '.join(SCORES)}, which a report shows")
    drawn, left_out = _draw_figures(request)
    sections = [section for suite, results in suites.items() for section in _score_sections(suite, results, request)]
    sections += [
        Markup("<h2>{}</h2><figure>{}<figcaption>{}</figcaption></figure>").format(*figure) for figure in drawn
    ]
    for suite, results in suites.items():
        answers = list(_answer_sections(suite, results, examples))
        if examples and not answers:
            left_out.append(f"answers: {suite.upper()}'s results have no items with answers to the same questions")
        sections += answers
    sections.append(Markup("<h2>Not on this page</h2>{}").format(_list(left_out)))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_page(
        path,
        "base.html",
        title=f"Unlearning on {' and '.join(map(str.upper, suites))}",
        lead=f"{sum(map(len, suites.values()))} results.",
        content=Markup(f"{GENERATOR}\n") + Markup("\n").join(sections),
    )
    return suites, left_out


def _by_name(results: Sequence[MethodResult]) -> dict[str, MethodResult]:
    """Results by label. A label that several have is followed by the folder, or by a number too."""
    labels, names = Counter(result.label for result in results), {}
    for result in results:
        folder = str(Path(result.source.name).parent)
        name = f"{result.label} ({folder})" if labels[result.label] > 1 else result.label
        names[f"{name} {len(names) + 1}" if name in names else name] = result
    return names


def _draw_figures(request: FigureRequest) -> tuple[list[tuple[str, Markup, str]], list[str]]:
    """Title, SVG element and description of each figure that can be drawn, and why the others cannot."""
    figures, left_out, named = [], [], f"{', '.join(request.runs)}: "
    for name, spec in FIGURES.items():
        try:
            with style(f"divdec-{name}"):  # each figure has other ids
                result = spec.draw(request)
                svg = themed(svg_text(result.figure))
        except UsageError as error:
            left_out.append(f"{name}: {str(error).removeprefix(named)}")
            continue
        # Groups have the same ids in all figures; metadata contains addresses.
        svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
        svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
        label = Markup('<svg role="img" aria-label="{}" ').format(result.title)
        figures.append((result.title, Markup(svg.replace("<svg ", label, 1)), result.description))
    return figures, left_out


def _score_sections(suite: str, results: Mapping[str, MethodResult], request: FigureRequest) -> Iterator[Markup]:
    """The table of `divdec results score`, and one of all other figures, with the remarks on both."""
    columns = [name for name in MEASURES if any(result.values.get(name) is not None for result in results.values())]
    scores = [name for name in columns if name in SCORES[suite]]
    computed = [result for result in results.values() if result.source.path.name != COMPARISON]
    title = score_title(suite, request.scoring, any(result.intervals for result in computed))
    title = title if computed else title.partition("\n")[0]  # a comparison's intervals are its own
    yield Markup("<h2>Scores</h2><p style='white-space: pre-line'>{}</p>").format(title)
    for names in filter(None, (scores, [name for name in columns if name not in scores])):
        heads = [f"{MEASURES[name].short} {MEASURES[name].arrow}" for name in names]
        rows = [[label, *(_cell(result, name) for name in names)] for label, result in results.items()]
        yield _table(["result", *heads], rows)
    remarks = group_remarks((name, result.remarks) for name, result in results.items())
    yield _list(
        f"{line} ({'all' if len(names) == len(results) else ', '.join(names)})" for line, names in remarks.items()
    )


def _cell(result: MethodResult, name: str) -> Markup:
    text, interval = MEASURES[name].text, result.intervals.get(name)
    ends = Markup(" <small>[{}, {}]</small>").format(*map(text, interval)) if interval else ""
    return Markup("{}{}").format(text(result.values.get(name)), ends)


def _answer_sections(suite: str, results: Mapping[str, MethodResult], count: int) -> Iterator[Markup]:
    """Answers to questions that all results with items have in common, spread over each set."""
    read = {
        name: read_results(result.source.path.parent).items
        for name, result in results.items()
        if count and result.source.path.name != COMPARISON
    }
    for metric, title in ANSWERS[suite].items():
        answers = {name: _by_question(items.get(metric) or {}) for name, items in read.items()}
        answers = {name: by_question for name, by_question in answers.items() if by_question}
        first, *others = answers.values() or [{}]
        shared = [question for question in first if all(question in other for other in others)]
        number = min(count, len(shared))
        for index in (step * len(shared) // number for step in range(number)):
            prompt, truth = (str(first[shared[index]].get(name) or "") for name in ("input", "ground_truth"))
            shown = prompt.strip() if len(prompt) <= MAX_PROMPT else f"… {prompt.strip()[-MAX_PROMPT:]}"
            rows = [[name, by_question[shared[index]]["generation"].strip()] for name, by_question in answers.items()]
            yield Markup(
                "<h2>Answers, {} {}</h2><p style='white-space: pre-wrap'>{}</p><p>True answer: {}</p>{}"
            ).format(title, shared[index][0], shown, truth, _table(["model", ""], rows, ANSWER))


def _by_question(items: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Items with texts by index and true answer, without white space, which differs between tokenizers."""
    return {
        (index, re.sub(r"\s", "", item["ground_truth"])): item
        for index, item in items.items()
        if all(isinstance(item.get(name), str) for name in ("ground_truth", "generation"))
    }


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], layout: str = "white-space: nowrap") -> Markup:
    cell, line, join = Markup("<td style='{}'>{}</td>").format, Markup("<tr>{}</tr>\n").format, Markup("").join
    head, body = join(map(Markup("<th>{}</th>").format, heads)), (join(map(cell, repeat(layout), row)) for row in rows)
    table = Markup(
        '<div class="scroll" style="margin-bottom: 1rem"><table><thead>{}</thead><tbody>{}</tbody></table></div>'
    )
    return table.format(line(head), join(map(line, body)))


def _list(lines: Iterable[str]) -> Markup:
    return Markup("<ul>{}</ul>").format(Markup("").join(map(Markup("<li>{}</li>").format, lines)))
