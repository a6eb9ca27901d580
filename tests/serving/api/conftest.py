"""A small trained bundle, and the server that most tests ask."""

import httpx
import openai
import pytest

from served import bundle_of, engine_of, serving


@pytest.fixture(scope="session")
def served_bundle(models):
    return bundle_of(models, "tiny", "linear:1.5")


@pytest.fixture(scope="session")
def model(served_bundle):
    """The same bundle in the library, which says what answers must be."""
    from divdec import DivergenceForCausalLM

    return DivergenceForCausalLM.from_pretrained(served_bundle)


@pytest.fixture(scope="session")
def url(served_bundle):
    """Where the server is that most tests ask."""
    with serving([engine_of(served_bundle)], shutdown_timeout=0.0) as found:
        yield found


@pytest.fixture(scope="session")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture(scope="session")
def http(url):
    with httpx.Client(base_url=url, timeout=60) as found:
        yield found
