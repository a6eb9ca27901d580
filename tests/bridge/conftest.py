"""Fixtures: tokenizers of every kind, trained on real text, and pairs of auxiliaries for them."""

import json

import pytest

from support.tokenizer_kinds import SCRIPTS, byte_level, unigram, wrapped

LLAMA3 = (
    "{{ '<s>' }}{% for m in messages %}{{ '<|head|>' + m['role'] + '<|/head|>\n\n' + m['content'] | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
NEWLINES = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    "{{ '<|im|>' + m['role'] + '\n' + m['content'] + '<|eot|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def retokenized():
    """Return a function that changes parts of a tokenizer but not its vocabulary."""
    from tokenizers import Tokenizer

    def make(tokenizer, **changes):
        description = json.loads(tokenizer.backend_tokenizer.to_str()) | changes
        return wrapped(Tokenizer.from_str(json.dumps(description)), bos_token="<s>", unk_token=tokenizer.unk_token)

    return make


@pytest.fixture(scope="session")
def texts(world):
    return [*world.corpus[:600], *SCRIPTS * 5]


@pytest.fixture(scope="session")
def tokenizers(texts):
    from divdec_research.world.models import train_tokenizer

    llama3 = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return {
        "bpe": byte_level(texts, 2000, llama3, bos_token="<s>", chat_template=LLAMA3),
        "small": byte_level(texts[:200] + SCRIPTS, 512),
        "newlines": byte_level(texts, 700, chat_template=NEWLINES),
        "ours": train_tokenizer(texts, 600),
        "unigram": unigram(texts, 1200),
    }


@pytest.fixture(scope="session")
def make_pair(tokenizers):
    """Return a function that builds a pair of tiny auxiliaries with one tokenizer for a target with another."""
    from divdec.bridge.pair import BridgedPair
    from support.tiny import tiny_model

    pairs = {}

    def make(target, auxiliary, family="llama", **options):
        key = (target, auxiliary, family, *sorted(options.items()))
        if key not in pairs:
            target_tokenizer, tokenizer = tokenizers[target], tokenizers[auxiliary]
            pairs[key] = BridgedPair(
                tiny_model(family, len(tokenizer), seed=1),
                tiny_model(family, len(tokenizer), seed=2),
                target_tokenizer=target_tokenizer,
                auxiliary_tokenizer=tokenizer,
                target_width=len(target_tokenizer) + 5,
                **options,
            ).eval()
        return pairs[key]

    return make
