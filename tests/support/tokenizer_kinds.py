"""Small tokenizers of the kinds that models have, trained on the spot."""

import functools
import json

SCRIPTS = [
    "Die naïve Großmutter aß in Köln ein Törtchen für 3,50 €.",
    "Ещё одна строка о море, о людях и о книгах.",
    "日本の作家は静かな庭について書いた。",
    "작가는 바다에 관한 책을 썼다.",
    "كتب المؤلف كتابا عن البحر.",
    "Emoji 😀 family 👨‍👩‍👧 and flags 🇩🇪!",
]
SPECIAL = ["<|pad|>", "<s>", "</s>", "<|head|>", "<|/head|>", "<|eot|>", "<|im|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


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
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=["<unk>", *SPECIAL, *BYTES], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return wrapped(_with_bytes(tokenizer), bos_token="<s>", unk_token="<unk>", **options)


def sentence_piece(texts, size, prefix):
    """BPE with byte fallback as Llama 2 has it (`prefix`: a space before every text), or as Gemma does."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>", *SPECIAL, *BYTES], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return wrapped(_with_bytes(tokenizer), bos_token="<s>", unk_token="<unk>")


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


def _with_bytes(tokenizer):
    """The same tokenizer with its byte tokens as SentencePiece has them, and a token that begins a text."""
    from tokenizers import Tokenizer, processors

    description = json.loads(tokenizer.to_str())
    description["model"]["byte_fallback"] = True
    description["added_tokens"] = [a for a in description["added_tokens"] if not a["content"].startswith("<0x")]
    found = Tokenizer.from_str(json.dumps(description))
    found.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", found.token_to_id("<s>"))]
    )
    return found


def _words(texts):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", *SPECIAL], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return wrapped(tokenizer, bos_token="<s>", unk_token="<unk>")


def _trimmed(texts):
    from tokenizers import processors

    found = byte_level(texts, 600)
    found.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return found


_MAKERS = {
    "byte-level": _trimmed,  # GPT-2, Llama 3, Qwen
    "llama": functools.partial(sentence_piece, size=900, prefix=True),
    "gemma": functools.partial(sentence_piece, size=900, prefix=False),
    "unigram": functools.partial(unigram, size=1000),
    "wordpiece": functools.partial(word_piece, size=700),
    "words": _words,  # openai-gpt
}
KINDS = tuple(_MAKERS)


@functools.cache
def trained(kind, texts):
    """A tokenizer of a kind that has seen these texts and a little of other scripts."""
    return _MAKERS[kind]([*texts, *SCRIPTS * 5])
