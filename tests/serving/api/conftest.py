"""A small trained bundle, and the server that most tests ask."""

import httpx
import openai
import pytest

from served import engine_of, serving, trained


@pytest.fixture(scope="session")
def models(tmp_path_factory, tokenizer, world):
    """A folder with `target`, `retain` and `forget`; the retain auxiliary has read one half of the world."""
    folder = tmp_path_factory.mktemp("served")
    halves = {"target": world.corpus, "retain": world.corpus[::2], "forget": world.corpus}
    for seed, (name, texts) in enumerate(halves.items()):
        size = (48, 3) if name == "target" else (32, 2)
        trained(tokenizer, texts, seed, *size).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="session")
def served_bundle(models):
    from divdec import write_bundle

    return write_bundle(
        models / "tiny",
        target=str(models / "target"),
        retain_auxiliary=str(models / "retain"),
        forget_auxiliary=str(models / "forget"),
        steering="linear:1.5",
    )


@pytest.fixture(scope="session")
def model(served_bundle):
    """The same bundle in the library, which says what answers must be."""
    from divdec import DivergenceForCausalLM

    return DivergenceForCausalLM.from_pretrained(served_bundle)


@pytest.fixture(scope="session")
def url(served_bundle):
    """Where the server is that most tests ask."""
    with serving([engine_of(served_bundle)], grace=0.0) as found:
        yield found


@pytest.fixture(scope="session")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture(scope="session")
def http(url):
    with httpx.Client(base_url=url, timeout=60) as found:
        yield found
