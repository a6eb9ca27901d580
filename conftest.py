"""What the tests share: a real tokenizer, tiny models of several families, and the folder with real data."""

import gc
import importlib
import importlib.util
import os
import shutil
import signal
from pathlib import Path

import hypothesis
import jaxtyping
import pytest

from support.tiny import FAMILIES, SHARED, make_parts

# A first call that loads torch, and a noisy machine, say nothing about a property.
hypothesis.settings.register_profile("divdec", deadline=None, derandomize=True)
hypothesis.settings.load_profile("divdec")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_configure(config):
    # A shell starts what runs in the background with Ctrl-C ignored; tests of Ctrl-C would wait for ever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "DIVDEC_TEST_ROUNDING" in os.environ:
        from support import rounding

        rounding.install(float(os.environ["DIVDEC_TEST_ROUNDING"]))


def pytest_collection_finish():
    # accelerate collects garbage before and after each training; what was imported until now is none, and takes most
    # of the time of a search.
    gc.collect()
    gc.freeze()


def shaped_modules():
    """The modules whose signatures name shapes, where checks have something to check: every call pays for them."""
    names = set()
    for package in ("divdec", "divdec_research"):
        for folder in importlib.util.find_spec(package).submodule_search_locations:
            paths = [path.relative_to(folder) for path in Path(folder).rglob("*.py") if "jaxtyping" in path.read_text()]
            names |= {".".join((package, *path.with_suffix("").parts)).removesuffix(".__init__") for path in paths}
    return sorted(names)


# Shapes in signatures are checked while tests run, and only then: from here on, because the conftest.py of a folder may
# import modules before `pytest_configure`. The hook compiles anew, in every process, what one of these modules is the
# first to import; so the large libraries are imported before.
for name in ("beartype", "datasets", "peft", "transformers.trainer", "transformers.generation"):
    if importlib.util.find_spec(name.partition(".")[0]):
        importlib.import_module(name)
jaxtyping.install_import_hook(shaped_modules(), "beartype.beartype")


@pytest.fixture(scope="session")
def shared():
    """The folder with real TOFU and MUSE data; tests that need it are skipped where it is absent."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"real data not at hand: {SHARED} does not exist (set DIVDEC_SHARED to its place)")
    return SHARED


@pytest.fixture(scope="session")
def world():
    from divdec_research.world.facts import WorldSettings, build_world

    return build_world(WorldSettings())


@pytest.fixture(scope="session")
def tokenizer(world):
    from divdec_research.world.models import train_tokenizer

    return train_tokenizer(world.corpus[:500], 512)


@pytest.fixture(scope="session")
def models(tmp_path_factory, tokenizer, world):
    """A folder with `target`, `retain` and `forget`, trained for a second each; `retain` has read half of the world."""
    from support.served import trained

    folder = tmp_path_factory.mktemp("models")
    halves = {"target": world.corpus, "retain": world.corpus[::2], "forget": world.corpus}
    for seed, (name, texts) in enumerate(halves.items()):
        size = (48, 3) if name == "target" else (32, 2)
        trained(tokenizer, texts, seed, *size).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="session")
def served_bundle(models):
    """A bundle of these models, which the tests of servers and of providers share."""
    from support.served import bundle_of

    return bundle_of(models, "tiny", "linear:1.5")


@pytest.fixture(scope="session")
def served_model(served_bundle):
    """The same bundle in the library, which says what answers must be."""
    from divdec import DivergenceForCausalLM

    return DivergenceForCausalLM.from_pretrained(served_bundle)


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def steered(family):
    from divdec import DivergenceForCausalLM

    return DivergenceForCausalLM.from_parts(*make_parts(family), steering="linear:1.5")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory, tokenizer):
    """A folder with `target`, `retain` and `forget`, Llama-style checkpoints with their tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, model in zip(("target", "retain", "forget"), make_parts("llama", len(tokenizer)), strict=True):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def own_checkpoints(checkpoints, tmp_path):
    """A copy of the checkpoints that a test may damage."""
    import shutil

    return Path(shutil.copytree(checkpoints, tmp_path / "models"))


@pytest.fixture
def bundle(own_checkpoints, tmp_path):
    """A bundle that refers to the test's own copy of the checkpoints."""
    from divdec import write_bundle

    return write_bundle(
        tmp_path / "bundle",
        target=str(own_checkpoints / "target"),
        retain_auxiliary=str(own_checkpoints / "retain"),
        forget_auxiliary=str(own_checkpoints / "forget"),
        steering="linear:1.5",
    )


@pytest.fixture(scope="module")
def browser():
    """The system's chromium."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install divdec[browser]"
    )
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("there is no chromium to test in: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        # Without a sandbox, which root cannot have.
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield started
        started.close()
