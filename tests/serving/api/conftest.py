"""The server that most tests ask, and its clients."""

import httpx
import openai
import pytest

from support.served import engine_of, serving


@pytest.fixture(scope="session")
def model(served_model):
    return served_model


@pytest.fixture(scope="session")
def url(served_bundle):
    """Where the server is that most tests ask."""
    with serving([engine_of(served_bundle)], shutdown_timeout=0.0) as url:
        yield url


@pytest.fixture(scope="session")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def http(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client
