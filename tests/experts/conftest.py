"""Tokenizers of every kind, trained on real text, and pairs of auxiliaries for them."""

import json

import pytest

SCRIPTS = [
    "Die naïve Großmutter aß in Köln ein Törtchen für 3,50 €.",
    "Ещё одна строка о море, о людях и о книгах.",
    "日本の作家は静かな庭について書いた。",
    "작가는 바다에 관한 책을 썼다.",
    "كتب المؤلف كتابا عن البحر.",
    "Emoji 😀 family 👨‍👩‍👧 and flags 🇩🇪!",
]
LLAMA3 = (
    "{{ '<s>' }}{% for m in messages %}{{ '<|head|>' + m['role'] + '<|/head|>\n\n' + m['content'] | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
NEWLINES = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    "{{ '<|im|>' + m['role'] + '\n' + m['content'] + '<|eot|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|pad|>", "<s>", "</s>", "<|head|>", "<|/head|>", "<|eot|>", "<|im|>"]


def wrapped(tokenizer, **options):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, pad_token="<|pad|>", eos_token="</s>", **options
    )


def byte_level(texts, size, regex=None, **options):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    levels = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex is None)
    if regex is not None:
        levels = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), "isolated"), levels])
    tokenizer.pre_tokenizer = levels
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return wrapped(tokenizer, **options)


def unigram(texts, size, **options):
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    every_byte = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=["<unk>", *SPECIAL, *every_byte], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    description = json.loads(tokenizer.to_str())
    description["model"]["byte_fallback"] = True
    description["added_tokens"] = [a for a in description["added_tokens"] if not a["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return wrapped(tokenizer, bos_token="<s>", unk_token="<unk>", **options)


def word_piece(texts, size):
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=["[UNK]", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    )
    return wrapped(tokenizer, bos_token="<s>", unk_token="[UNK]")


@pytest.fixture(scope="session")
def retokenized():
    """Makes a tokenizer of the same vocabulary with other parts."""
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
    from divdec.experiments.small_models import train_tokenizer

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
        "wordpiece": word_piece(texts, 900),
    }


@pytest.fixture(scope="session")
def make_pair(tokenizers, tmp_path_factory):
    """A pair of tiny auxiliaries with one tokenizer for a target with another."""
    from conftest import tiny_model
    from divdec.experts.bridge import BridgedPair

    folder = tmp_path_factory.mktemp("maps")
    made = {}

    def make(target, auxiliary, family="llama", **options):
        key = (target, auxiliary, family, *sorted(options.items()))
        if key not in made:
            target_tokenizer, tokenizer = tokenizers[target], tokenizers[auxiliary]
            made[key] = BridgedPair(
                tiny_model(family, len(tokenizer), seed=1),
                tiny_model(family, len(tokenizer), seed=2),
                target_tokenizer=target_tokenizer,
                auxiliary_tokenizer=tokenizer,
                target_width=len(target_tokenizer) + 5,
                cache_dir=folder,
                **options,
            ).eval()
        return made[key]

    return make
