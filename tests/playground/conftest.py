"""A small trained bundle whose forget auxiliary has seen more than its retain auxiliary, so that it pushes."""

import pytest

from served import trained


@pytest.fixture(scope="session")
def played_models(tmp_path_factory, tokenizer, world):
    folder = tmp_path_factory.mktemp("played")
    halves = {"target": world.corpus, "retain": world.corpus[::2], "forget": world.corpus}
    for seed, (name, texts) in enumerate(halves.items()):
        size = (48, 3) if name == "target" else (32, 2)
        trained(tokenizer, texts, seed, *size).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="session")
def played_bundle(played_models):
    from divdec import write_bundle

    return write_bundle(
        played_models / "tiny",
        target=str(played_models / "target"),
        retain_auxiliary=str(played_models / "retain"),
        forget_auxiliary=str(played_models / "forget"),
        steering="linear:1.5",
    )


@pytest.fixture(scope="session")
def loaded(played_bundle):
    """Model and tokenizer, for tests that leave both as they are."""
    from divdec import DivergenceForCausalLM
    from divdec.model.checkpoint import load_tokenizer

    return DivergenceForCausalLM.from_pretrained(played_bundle), load_tokenizer(played_bundle)


@pytest.fixture(scope="session")
def steered(loaded):
    from divdec.playground.steered import Manner, Steered

    return Steered(*loaded, Manner(max_new_tokens=24))


@pytest.fixture(scope="session")
def playground(steered):
    from divdec.playground.choice import Choice
    from divdec.playground.play import Playground

    return Playground("tiny", steered, Choice(steered.model.steering, steered.model.vocab_size))


@pytest.fixture
def registry(tmp_path, played_models, world):
    """A registry that knows a part of the world."""
    from divdec.data.records import texts_of
    from divdec.serving.registry import Registry

    return Registry.create(tmp_path / "takedowns", texts_of("retain", world.corpus[:200:2]), played_models / "target")
