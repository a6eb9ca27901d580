"""The attack of benchmarks/attacks/shadow_models.py on losses whose cause is known."""

import numpy as np
import pytest

from benchmarks.attacks.shadow_models import attacked, halves, power

FORGET = 40
FACTS = [(f"author {number}", "home") for number in range(2 * FORGET)]


@pytest.fixture(scope="module")
def shadows():
    """Losses and membership of eight shadow models: facts differ in difficulty, and a fact that was read loses 3."""
    generator = np.random.default_rng(0)
    difficulty = generator.uniform(0, 20, len(FACTS))
    members = np.array([[fact in half for fact in FACTS] for half in halves(FACTS, 8, seed=0)])
    losses = difficulty - 3 * members + generator.normal(0, 0.3, members.shape)
    return difficulty, losses, members


def test_two_shadow_models_in_a_row_share_no_fact_and_have_all():
    chosen = halves(FACTS, 8, seed=1)
    assert len(chosen) == 8
    for first, second in zip(chosen[::2], chosen[1::2], strict=True):
        assert not first & second
        assert first | second == set(FACTS)
    assert chosen[0] not in chosen[1:]


def test_attack_finds_what_the_loss_alone_hides(shadows):
    difficulty, losses, members = shadows
    read = np.arange(len(FACTS)) < FORGET
    alone, attack, found = attacked(difficulty - 3 * read, losses, members, FORGET)
    assert alone < 0.75
    assert attack == 1
    assert found == 1


def test_attack_finds_nothing_in_a_model_that_read_neither_set(shadows):
    difficulty, losses, members = shadows
    noise = np.random.default_rng(1).normal(0, 0.3, len(FACTS))
    _, attack, found = attacked(difficulty + noise, losses, members, FORGET)
    assert 0.3 < attack < 0.7
    assert found < 0.25


def test_shadow_models_that_read_their_facts_are_told_from_the_others(shadows):
    _, losses, members = shadows
    assert power(losses, members) > 0.99
    assert 0.4 < power(losses + 3 * members, members) < 0.6
