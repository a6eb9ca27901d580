"""A small trained bundle whose forget auxiliary has seen more than its retain auxiliary, so that it pushes."""

import pytest

from support.served import bundle_of


@pytest.fixture(scope="session")
def played_bundle(models):
    return bundle_of(models, "played", "linear:1.5")


@pytest.fixture(scope="session")
def loaded(played_bundle):
    """Model and tokenizer, for tests that leave both as they are."""
    from divdec import DivergenceForCausalLM
    from divdec.checkpoint import load_tokenizer

    return DivergenceForCausalLM.from_pretrained(played_bundle), load_tokenizer(played_bundle)


@pytest.fixture(scope="session")
def steered(loaded):
    from divdec.playground.models import ChatOptions, SteeredModel

    return SteeredModel(*loaded, ChatOptions(max_new_tokens=24))


@pytest.fixture(scope="session")
def controller(steered):
    from divdec.playground.controller import Controller

    return Controller("tiny", steered)


@pytest.fixture
def registry(tmp_path, models, world):
    """A registry that knows a part of the world."""
    from divdec.data.records import texts_of
    from divdec.takedowns.registry import Registry

    return Registry.create(tmp_path / "takedowns", texts_of("retain", world.corpus[:200:2]), models / "target")
