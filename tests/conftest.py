"""What the tests share: a real tokenizer, tiny models of several families, and the folder with real data."""

import gc
import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

# A first call that loads torch, and a noisy machine, say nothing about a property.
hypothesis.settings.register_profile("divdec", deadline=None, derandomize=True)
hypothesis.settings.load_profile("divdec")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SHARED = Path(os.environ.get("DIVDEC_SHARED", Path(__file__).parents[2] / "shared"))


def pytest_configure(config):
    # A shell starts what runs in the background with Ctrl-C ignored; tests of Ctrl-C would wait for ever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "DIVDEC_TEST_ROUNDING" in os.environ:
        import rounding

        rounding.install(float(os.environ["DIVDEC_TEST_ROUNDING"]))
    # Shapes in signatures are checked while tests run, and only then. The hook compiles anew, in every process, what
    # one of these modules is the first to import; so the large libraries are imported before.
    from jaxtyping import install_import_hook

    for name in ("beartype", "datasets", "peft", "transformers.trainer", "transformers.generation"):
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    install_import_hook(shaped_modules(), "beartype.beartype")


def pytest_collection_finish():
    # accelerate collects garbage before and after each training; what was imported until now is none, and takes most
    # of the time of a search.
    gc.collect()
    gc.freeze()


def shaped_modules():
    """The modules whose signatures name shapes, where checks have something to check: every call pays for them.

    Not the batch of speculation: its bookkeeping is called for every token, and would take longer than the models.
    """
    (root,) = importlib.util.find_spec("divdec").submodule_search_locations
    found = [path.relative_to(root) for path in Path(root).rglob("*.py") if "jaxtyping" in path.read_text()]
    names = {".".join(("divdec", *path.with_suffix("").parts)).removesuffix(".__init__") for path in found}
    return sorted(names - {"divdec.decoding.batch"})


@pytest.fixture(scope="session")
def shared():
    """The folder with real TOFU and MUSE data; tests that need it are skipped where it is absent."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"real data not at hand: {SHARED} does not exist (set DIVDEC_SHARED to its place)")
    return SHARED


@pytest.fixture(scope="session")
def world():
    from divdec.data.world import WorldSettings, build_world

    return build_world(WorldSettings())


@pytest.fixture(scope="session")
def tokenizer(world):
    from divdec.demo.models import train_tokenizer

    return train_tokenizer(world.corpus[:500], 512)


@pytest.fixture(scope="session")
def models(tmp_path_factory, tokenizer, world):
    """A folder with `target`, `retain` and `forget`, trained for a second each; `retain` has read half of the world."""
    from served import trained

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
    from served import bundle_of

    return bundle_of(models, "tiny", "linear:1.5")


@pytest.fixture(scope="session")
def served_model(served_bundle):
    """The same bundle in the library, which says what answers must be."""
    from divdec import DivergenceForCausalLM

    return DivergenceForCausalLM.from_pretrained(served_bundle)


def tiny_model(family, vocab_size, seed, width=32, layers=2, **settings):
    """A random model of a family; weights large enough that its preferences are not all alike."""
    import torch
    import transformers

    torch.manual_seed(seed)
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
    if family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=vocab_size,
            n_embd=width,
            n_layer=layers,
            n_head=4,
            n_positions=256,
            initializer_range=0.2,
            **ends,
        )
    else:
        kind = {
            "llama": transformers.LlamaConfig,
            "qwen": transformers.Qwen2Config,
            "mistral": transformers.MistralConfig,
            "gemma2": transformers.Gemma2Config,
        }
        config = kind[family](
            vocab_size=vocab_size,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.2,
            **({"sliding_window": 8} if family == "mistral" else {}),
            **ends,
            **settings,
        )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


FAMILIES = ("llama", "gpt2", "qwen")


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def make_parts(family, vocab_size=512):
    """Target, retain auxiliary and forget auxiliary, which differ in width and depth."""
    return (
        tiny_model(family, vocab_size, seed=0, width=64, layers=3),
        tiny_model(family, vocab_size, seed=1),
        tiny_model(family, vocab_size, seed=2),
    )


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


def loads_torch(*commands):
    """Whether one of several commands of divdec, in a process of their own, loads torch."""
    code = (
        f"import sys; from divdec.cli import main; print(all([main(one) == 0 for one in {list(commands)!r}]), "
        "'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    answer = result.stdout.strip().splitlines()[-1:]
    assert answer in (["True True"], ["True False"]), result.stderr
    return answer == ["True True"]
