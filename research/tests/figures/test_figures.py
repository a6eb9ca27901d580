"""The paper's figures: each shows the values of its files, published ones and those of small runs."""

import io
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

import divdec_research.figures.benchmarks
import divdec_research.figures.runs  # noqa: F401  # both register their figures
from divdec import UsageError
from divdec.evaluation.results import Results, write_results
from divdec.report.palette import css
from divdec.runs import write_json
from divdec_research.figures.registry import FIGURES, FigureRequest, Source
from divdec_research.figures.results import best_settings, load_results
from divdec_research.report.style import (
    BY_NAME,
    RETRAIN,
    SERIES_STYLES,
    TARGET,
    style,
    write_figure,
)
from divdec_research.suites.results import identify
from divdec_research.suites.settings import Scoring

DOCS = Path(__file__).parents[3] / "docs"
DUBLIN = "{http://purl.org/dc/elements/1.1/}"


@pytest.fixture(scope="module")
def published(shared):
    folder = shared / "paper" / "results"
    if not folder.is_dir():
        pytest.skip(f"the paper's result files are missing: {folder} does not exist")
    return folder


def request(*runs, target=None, retrain=None, **options):
    scoring = Scoring(**{"variant": "dd-paper", "draws": 20, **options})
    return FigureRequest(tuple(map(str, runs)), target, retrain, scoring)


def drawn(name, *runs, **options):
    with style():
        return FIGURES[name].draw(request(*runs, **options))


def lines(axes):
    """What is drawn as lines, by label."""
    return {line.get_label(): np.column_stack(line.get_data()) for line in axes.lines}


def texts(figure):
    with style():
        return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


class TestPublished:
    """The paper's files give the paper's numbers."""

    def test_tofu_bars(self, published):
        result = drawn("tofu-bars", published / "tofu")
        (axes,) = result.figure.axes
        heights = {
            label.get_text(): bar.get_width() for label, bar in zip(axes.get_yticklabels(), axes.patches, strict=True)
        }
        assert heights["Linear DD (1B)  α = 1.5"] == pytest.approx(0.78, abs=0.01)
        assert heights["Rank DD (1B)  k = 20"] == pytest.approx(0.85, abs=0.01)
        assert heights["NPO  4e-6"] == pytest.approx(0.67, abs=0.01)
        assert heights["Retrain"] == pytest.approx(0.78, abs=0.01)
        assert heights["UNDIAL  4e-6"] == pytest.approx(0.60, abs=0.01)
        assert list(heights.values()) == sorted(heights.values())
        assert "higher is better" in axes.get_xlabel()
        assert "tofu/gradient/npo_4e-6/checkpoint-26/TOFU_SUMMARY.json" in result.sources
        # Ours, others and references differ by hatch or shade, not by hue alone.
        hatches = {
            bar.get_hatch()
            for label, bar in zip(axes.get_yticklabels(), axes.patches, strict=True)
            if "DD" in label.get_text()
        }
        assert hatches == {"///"}

    def test_muse_scatter(self, published):
        result = drawn("muse-scatter", published / "muse")
        verbatim, knowledge = result.figure.axes
        assert lines(verbatim)["Retrain"][0] == pytest.approx([0.2024, 0.5508], abs=1e-4)
        assert lines(knowledge)["Target"][0] == pytest.approx([0.6487, 0.5360], abs=1e-4)
        assert len(lines(verbatim)["Linear DD (1.3b)"]) == 17
        assert len(lines(verbatim)["other methods, the best setting of each"]) == 11
        assert "(lower is better)" in verbatim.get_xlabel()
        assert "(higher is better)" in verbatim.get_ylabel()

    def test_strength(self, published):
        runs = [
            published / suite / name for suite in ("tofu", "muse") for name in ("baselines", "dd_linear", "dd_rank")
        ]
        result = drawn("strength", *runs)
        axes = result.figure.axes
        assert len(axes) == 8  # two by two, each with an axis for either rule
        titles = [one.get_title(loc="left") for one in axes[:4]]
        assert titles[0] == "MUSE, verbatim memorization"
        assert titles[3] == "TOFU, without privacy"
        labels = {label for one in axes for label in (one.get_xlabel(), one.get_ylabel())}
        assert {"α of the linear rule", "k of the rank rule", "Agg, 0 to 1 (higher is better)"} <= labels
        (legend,) = result.figure.legends
        assert [text.get_text() for text in legend.get_texts()] == [
            "Linear DD (1.3b, 1B)", "Rank DD (1.3b, 1B)", "Rank DD (3B)", "Retrain",
        ]  # fmt: skip

    def test_over_under(self, published):
        runs = [published / suite / name for suite in ("tofu", "muse") for name in ("baselines", "dd_linear")]
        muse, tofu = drawn("over-under", *runs).figure.axes
        sweep = next(line for line in muse.lines if len(line.get_xdata()) > 2)
        assert dict(zip(sweep.get_xdata(), sweep.get_ydata(), strict=True))[1.5] == pytest.approx(14.42, abs=0.01)
        loss = lines(tofu)["loss"]
        assert loss[0][1] < -0.5  # the mildest setting forgets too little
        assert abs(loss[6][1]) < 0.1  # the paper's optimum
        assert loss[-1][1] > 0.3
        assert set(lines(tofu)) >= {"loss", "zlib", "min-k", "min-k++"}

    def test_sizes(self, published):
        result = drawn(
            "sizes", *(published / "muse" / name for name in ("baselines", "dd_linear", "dd_rank", "dd_trigram"))
        )
        verbatim, knowledge = result.figure.axes
        assert lines(verbatim)["rank rule"][:, 0] == pytest.approx([0, 1.3])
        # The paper's table: trigrams are best at top-k 1 and the neural pair at 100; of the linear rule at 10 and 0.8.
        assert {text.get_text() for text in verbatim.texts} >= {"k = 1", "k = 100"}
        assert {text.get_text() for text in knowledge.texts} >= {"α = 10", "α = 0.8"}

    def test_leak(self, published):
        result = drawn("leak", published / "tofu" / "leak_at_k")
        (axes,) = result.figure.axes
        assert lines(axes)["Distill DD"][-1] == pytest.approx([1000, 0.185])
        assert lines(axes)["Retrain"][2] == pytest.approx([100, 0.13])
        assert "δ-Unlearning" in texts(result.figure)
        assert result.sources == ("leak_at_k/rebel_cache.json",)

    def test_openunlearning_variant_of_mem_requires_items(self, published):
        with pytest.raises(UsageError, match="--variant dd-paper can be computed"):
            drawn("tofu-bars", published / "tofu", variant="openunlearning")

    def test_missing_references_error_names_option(self, published):
        with pytest.raises(UsageError, match=r"no retrained model was given \(--retrain\)"):
            drawn("tofu-bars", published / "tofu" / "dd_linear")
        with pytest.raises(UsageError, match="TOFU's attacks and those on the retrained model"):
            drawn("over-under", published / "tofu" / "dd_linear")
        assert drawn("muse-scatter", published / "muse" / "dd_linear").figure.axes


class TestOwnResults:
    """Our own runs, with items, have intervals."""

    @pytest.fixture
    def oracle(self, shared):
        return shared / "oracle" / "results"

    def test_intervals_are_drawn_from_items(self, oracle):
        runs = [oracle / name for name in ("dd1_01", "rank20_01", "full01", "retain01")]
        result = drawn(
            "tofu-bars",
            *runs,
            target=str(oracle / "full01"),
            retrain=str(oracle / "retain01"),
            variant="openunlearning",
        )
        (axes,) = result.figure.axes
        assert [label.get_text() for label in axes.get_yticklabels()].count("Target") == 1
        ends = [line.get_xdata() for line in axes.lines]
        assert len(ends) == 2 * len(axes.patches)  # light around dark
        assert all(low <= high for low, high in ends)
        assert "dd1_01/TOFU_EVAL.json" in result.sources

    def test_target_and_retrain_are_found_by_name_or_option(self, oracle, tmp_path):
        for name, of in (("target", "full01"), ("retrain", "retain01"), ("linear-1", "dd1_01")):
            (tmp_path / name).mkdir()
            (tmp_path / name / "TOFU_SUMMARY.json").write_bytes((oracle / of / "TOFU_SUMMARY.json").read_bytes())
        result = {one.title: one for one in load_results(request(tmp_path), "tofu-bars")["tofu"]}
        assert set(result) == {"Target", "Retrain", "Linear DD"}
        assert result["Linear DD"].strength == 1
        again = tmp_path / "seed-1" / "target"
        again.mkdir(parents=True)
        (again / "TOFU_SUMMARY.json").write_bytes((oracle / "full01" / "TOFU_SUMMARY.json").read_bytes())
        with pytest.raises(UsageError, match="are both results of the target; give one with --target"):
            load_results(request(tmp_path), "tofu-bars")
        chosen = load_results(request(tmp_path, target=str(again)), "tofu-bars")["tofu"]
        assert [one.source.name for one in chosen if one.title == "Target"] == [
            f"{tmp_path.name}/seed-1/target/TOFU_SUMMARY.json"
        ]

    def test_comparison_results_are_drawn(self, tmp_path):
        comparison(tmp_path)
        result = load_results(request(tmp_path, variant="openunlearning"), "tofu-bars")["tofu"]
        assert {one.label for one in best_settings(result, "agg")} == {
            "Target", "Retrain", "Linear DD  α = 1.5", "NPO  lr 0.0002", "Distill DD  lr 0.001, temperature 1",
        }  # fmt: skip
        axes = drawn("tofu-bars", tmp_path, variant="openunlearning").figure.axes[0]
        assert [tuple(line.get_xdata()) for line in axes.lines] == [(0.5, 0.7), (0.5, 0.7)]
        leak = drawn("leak", tmp_path).figure.axes[0]
        assert lines(leak)["Linear DD"].tolist() == [[1, 0.0], [10, 0.1]]

    def test_comparison_is_drawn_instead_of_single_seeds(self, tmp_path):
        """The best of many settings on one seed is no mean over seeds, and one seed's leaks are no separate line."""
        comparison(tmp_path)
        content = json.loads((tmp_path / "comparison.json").read_text())
        for line in content["grid"]:
            line["seeds"] = {"0": {}, "1": {}} if line["setting"] in ("", "linear:1") else {"0": {}}
        write_json(tmp_path / "comparison.json", content)
        result = best_settings(load_results(request(tmp_path, variant="openunlearning"), "tofu-bars")["tofu"], "agg")
        assert {one.label: one.seeds for one in result if one.title == "Linear DD"} == {"Linear DD  α = 1": 2}
        assert "NPO  lr 0.0002" in {one.label for one in result}
        (tmp_path / "seed-0" / "npo" / "leaks").mkdir(parents=True)
        write_results(Results("leaks", "leak", {"leak@1-attack": 0.9}, {}), tmp_path / "seed-0" / "npo" / "leaks")
        assert set(lines(drawn("leak", tmp_path).figure.axes[0])) == {"Target", "Linear DD"}

    def test_evaluated_leak_rates_have_intervals(self, tmp_path):
        scores = {str(index): {"score": float(index < 3)} for index in range(20)}
        for name in ("target", "steered"):
            figures = {"leak@1-attack": 0.15, "leak@10-attack": 0.15}
            result = Results(name, "leak", figures, dict.fromkeys(figures, scores))
            (tmp_path / name).mkdir()
            write_results(result, tmp_path / name)
        axes = drawn("leak", tmp_path, draws=200).figure.axes[0]
        assert lines(axes)["Target"].tolist() == lines(axes)["steered"].tolist() == [[1, 0.15], [10, 0.15]]
        band = axes.collections[0].get_paths()[0].vertices[:, 1]
        assert 0 <= band.min() < 0.15 < band.max() < 0.6

    def test_distillation_figure_marks_settings_above_best_baseline(self, tmp_path):
        comparison(tmp_path)
        result = drawn("distillation", tmp_path, variant="openunlearning")
        axes = result.figure.axes[0]
        assert [text.get_text() for text in axes.texts] == ["0.30", "0.62", "0.55", "0.45"]
        assert sum(type(patch).__name__ == "Rectangle" for patch in axes.patches) == 2
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("learning rate", "temperature T")
        assert "framed: above the best other method there, 0.50" in texts(result.figure)
        content = json.loads((tmp_path / "comparison.json").read_text())
        content["grid"].append(content["grid"][-1])
        write_json(tmp_path / "comparison.json", content)
        with pytest.raises(UsageError, match="several students have one lr and temperature"):
            drawn("distillation", tmp_path, variant="openunlearning")

    def test_published_students_are_drawn_by_the_names_of_their_folders(self, oracle, tmp_path):
        of = {"lr-1e-05-epoch-10-temp-0.5": "dd1_01", "lr-2e-05-epoch-10-temp-0.5": "retain01", "npo_4e-6": "dd1_01"}
        of |= {"target": "full01", "retrain": "retain01"}
        for name, source in of.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "TOFU_SUMMARY.json").write_bytes((oracle / source / "TOFU_SUMMARY.json").read_bytes())
        result = drawn("distillation", tmp_path, variant="dd-paper")
        axes = result.figure.axes[0]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["1e-05", "2e-05"]
        assert len(axes.texts) == 2
        assert any(text.startswith("framed: above the best other method") for text in texts(result.figure))

    def test_comparisons_with_different_variant(self, tmp_path):
        comparison(tmp_path)
        with pytest.raises(UsageError, match="give --variant openunlearning"):
            drawn("tofu-bars", tmp_path, variant="relative")

    def test_scores_with_fewer_than_two_settings_are_omitted(self, tmp_path):
        """Neither empty axes nor, where nothing is left, an empty picture."""
        comparison(tmp_path)
        content = json.loads((tmp_path / "comparison.json").read_text())
        steered = [line for line in content["grid"] if line["method"] == "linear"]
        for line in steered:
            line["values"]["agg"] = None
        write_json(tmp_path / "comparison.json", content)
        result = drawn("strength", tmp_path, variant="openunlearning")
        (axes,) = result.figure.axes
        assert axes.get_title(loc="left") == "TOFU, without privacy"
        assert len(axes.lines[-1].get_xdata()) == 2
        assert "Left out, for no two settings have it: TOFU, aggregate score." in result.description
        steered[0]["values"]["agg_without_privacy"] = None
        write_json(tmp_path / "comparison.json", content)
        with pytest.raises(UsageError, match="no result has Agg"):
            drawn("strength", tmp_path, variant="openunlearning")

    def test_sweep_without_references_reports_missing_scores(self, oracle, tmp_path):
        for name in ("linear-1", "linear-2"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "TOFU_SUMMARY.json").write_bytes((oracle / "dd1_01" / "TOFU_SUMMARY.json").read_bytes())
        with pytest.raises(UsageError, match=r"no result has Agg: no retrained model was given \(--retrain\)"):
            drawn("strength", tmp_path)

    def test_single_setting_is_not_drawn_as_sweep(self, oracle, tmp_path):
        for name, of in (("linear-1", "dd1_01"), ("linear-2", "dd1_01"), ("rank-20", "rank20_01")):
            (tmp_path / name).mkdir()
            (tmp_path / name / "TOFU_SUMMARY.json").write_bytes((oracle / of / "TOFU_SUMMARY.json").read_bytes())
        references = {"target": str(oracle / "full01"), "retrain": str(oracle / "retain01")}
        (axes,) = drawn("over-under", tmp_path, **references).figure.axes  # no empty row for the rank rule
        assert axes.get_xlabel() == "α of the linear rule"
        shutil.rmtree(tmp_path / "linear-2")
        for name in ("over-under", "strength"):
            with pytest.raises(UsageError, match="it needs"):
                drawn(name, tmp_path, **references)


def comparison(folder):
    """What `divdec compare` writes, of a few settings."""

    def line(method, setting, agg, mem=0.5, utility=0.7, **more):
        values = {"agg": agg, "mem": mem, "utility": utility, "priv": 0.5, "agg_without_privacy": 0.5}
        return {"method": method, "setting": setting, "values": values, "intervals": {}, "seeds": {}, **more}

    grid = [
        line("target", "", 0.1), line("retrain", "", 0.9),
        line("linear", "linear:1.5", 0.6, 0.6, 0.8, intervals={"agg": [0.5, 0.7]}),
        line("linear", "linear:1", 0.4, 0.4, 0.9),
        line("npo", "lr 0.0002", 0.5), line("npo", "lr 0.0003", None),
        *(line("distill", f"lr {lr}, temperature {T}", agg) for lr, T, agg in
          (("0.0001", 1, 0.3), ("0.001", 1, 0.62), ("0.0001", 2, 0.55), ("0.001", 2, 0.45))),
    ]  # fmt: skip
    leaks = {"target": {"1": 0.5, "10": 0.9}, "linear": {"1": 0.0, "10": 0.1}}
    write_json(
        folder / "comparison.json",
        {"best": grid[:3], "grid": grid, "leaks": leaks, "suite": "tofu", "variant": "openunlearning"},
    )


@pytest.mark.parametrize("name", FIGURES)
def test_missing_results_give_one_line_error(name, tmp_path):
    with pytest.raises(UsageError, match="empty folder") as error:
        drawn(name, tmp_path)
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match="does not exist"):
        drawn(name, tmp_path / "none")
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(UsageError, match=r"holds no results|nothing there that"):
        drawn(name, tmp_path)


def test_model_sizes_are_parsed_from_folder_names():
    def size(name):
        return identify(Results("model", "tofu"), Path(name, "linear-1")).size

    names = {"1B": 1, "3b": 3, "1.3b": 1.3, "pair-350M": 0.35, "dd_trigram": 0, "n-grams": 0, "Llama-3.2-1B-it": 1}
    assert {name: size(name) for name in names} == pytest.approx(names)
    assert size("gemma") is size("4bit") is None


def test_figure_sources_are_relative_to_run(tmp_path, monkeypatch):
    assert Source(tmp_path / "run" / "a" / "x.json", tmp_path / "run").name == "run/a/x.json"
    assert Source(tmp_path / "x.json", tmp_path / "x.json").name == "x.json"
    monkeypatch.chdir(tmp_path)
    assert Source(tmp_path / "x.json", type(tmp_path)(".")).name == f"{tmp_path.name}/x.json"


class TestFiles:
    """SVG and PNG: the same bytes, the sources, no places of this machine."""

    @pytest.fixture
    def write(self, tmp_path):
        comparison(tmp_path)

        def write(name):
            with style("divdec-tofu-bars"):
                result = FIGURES["tofu-bars"].draw(request(tmp_path, variant="openunlearning"))
                write_figure(
                    tmp_path / name, result.figure, title=result.title, description=result.description,
                    sources=result.sources,
                )  # fmt: skip
            return (tmp_path / name).read_bytes()

        return write

    def test_svg(self, write, tmp_path):
        content = write("one.svg")
        assert content == write("two.svg")
        tree = ElementTree.fromstring(content)
        assert [one.text for one in tree.iter(f"{DUBLIN}source")] == [f"{tmp_path.name}/comparison.json"]
        assert next(tree.iter(f"{DUBLIN}title")).text == "TOFU: the best setting of each method"
        assert not list(tree.iter(f"{DUBLIN}date"))
        assert str(tmp_path).encode() not in content
        assert b"Linear DD" in content  # text stays text

    def test_png(self, write, tmp_path):
        picture = Image.open(io.BytesIO(write("one.png")))
        picture.load()
        assert picture.text["Source"] == f"{tmp_path.name}/comparison.json"
        assert picture.text["Title"] == "TOFU: the best setting of each method"
        assert picture.size[0] == 1440
        assert write("two.png") == write("one.png")

    def test_unsupported_figure_extension_is_rejected(self, write):
        with pytest.raises(UsageError, match=r"ends in \.pdf; accepted: \.svg and \.png"):
            write("one.pdf")


class TestGallery:
    """What is committed under docs/."""

    def test_gallery_has_every_figure_without_local_paths(self):
        commands = (DOCS.parent / "research" / "studies" / "figures.sh").read_text()
        assert [name for name in FIGURES if f"--figure {name}" not in commands] == []
        page = (DOCS / "paper.md").read_text()
        pictures = {DOCS / name for name in re.findall(r"\]\((gallery/[\w-]+\.svg)\)", page)}
        assert pictures == set((DOCS / "gallery").iterdir())
        for picture in pictures:
            content = picture.read_text()
            assert len(content) < 100_000, picture
            assert f"docs/gallery/{picture.name}" in commands
            (source,) = ElementTree.fromstring(content).iter(f"{DUBLIN}source")
            assert source.text
            assert not re.search(r"/(home|root|work|tmp|Users)/", content), picture

    def test_figure_is_reproduced_byte_for_byte(self, published, tmp_path):
        with style("divdec-leak"):
            result = FIGURES["leak"].draw(request(published / "tofu" / "leak_at_k"))
            write_figure(
                tmp_path / "leak.svg", result.figure, title=result.title, description=result.description,
                sources=result.sources,
            )  # fmt: skip
        assert (tmp_path / "leak.svg").read_bytes() == (DOCS / "gallery" / "leak.svg").read_bytes()


class TestPalette:
    """Series stay apart in grey and without colour vision, and words are readable in light and in dark."""

    def colours(self, scheme):
        text = css().partition("@media")[2 if scheme == "dark" else 0]
        return dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", text))

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_contrast(self, scheme):
        palette = self.colours(scheme)
        for name in ("ink", "muted", "target", "retrain", "blue", "vermillion", "purple", "brown", "grey"):
            assert contrast(palette[name], palette["paper"]) >= 4.5, name
        for name in ("box", "chosen", "alarm"):
            assert contrast(palette["ink"], palette[name]) >= 7, name
        assert contrast(palette["faint"], palette["paper"]) >= 2.9  # bars and lines, no words

    def test_plot_styles_differ_by_more_than_colour(self):
        styles = [TARGET, RETRAIN, *SERIES_STYLES]
        assert len({one.marker for one in styles}) == len(styles)
        assert len({str(one.dash) for one in styles}) == len(styles)

    def test_first_two_series_are_distinguishable_with_colour_blindness(self):
        # Viénot, Brettel and Mollon (1999): what reds and greens become to protanopes and deuteranopes.
        kinds = {
            "full": np.eye(3),
            "protan": np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]]),
            "deutan": np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]),
        }
        for name, matrix in kinds.items():
            one, other = (matrix @ linear(BY_NAME[rule].colour) for rule in ("linear", "rank"))
            assert np.abs(one - other).max() > 0.2, name

    def test_light_and_dark_pages_have_the_same_colours(self):
        light, dark = self.colours("light"), self.colours("dark")
        assert set(light) == set(dark)


def linear(colour):
    values = np.array([int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """WCAG's ratio."""
    lighter, darker = sorted((float(linear(of) @ [0.2126, 0.7152, 0.0722]) for of in (one, other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)
