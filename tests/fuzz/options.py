"""Which options of `generate` are drawn, and how. Every field of `GenerationConfig` is listed here."""

import transformers

from fuzz.models import END, FEW, PAD, VOCAB


def some(chance, count):
    return sorted(chance.sample(range(4, VOCAB - 20), count))


def often(chance):
    """Tokens of which most occur in the texts that are drawn."""
    return chance.sample(FEW, 4)


# The percentage of cases that have an option, and its value. `chance` is a random.Random.
ALWAYS_POSSIBLE = {
    "min_new_tokens": (8, lambda chance: chance.randint(1, 4)),
    "min_length": (4, lambda chance: chance.randint(1, 20)),
    "repetition_penalty": (10, lambda chance: chance.choice((0.8, 1.1, 1.5))),
    "no_repeat_ngram_size": (8, lambda chance: chance.randint(1, 3)),
    "bad_words_ids": (8, lambda chance: [[token] for token in often(chance)] + [some(chance, 2)]),
    "sequence_bias": (8, lambda chance: [[[token], chance.choice((-4.0, 6.0))] for token in often(chance)]),
    "suppress_tokens": (8, lambda chance: some(chance, 60)),
    "begin_suppress_tokens": (5, lambda chance: some(chance, 60)),
    "forced_eos_token_id": (4, lambda chance: chance.choice((END, 3))),
    "forced_bos_token_id": (2, lambda chance: 3),
    "exponential_decay_length_penalty": (5, lambda chance: (chance.randint(0, 3), chance.choice((1.5, 3.0)))),
    "remove_invalid_values": (8, lambda chance: True),
    "renormalize_logits": (10, lambda chance: True),
    "eos_token_id": (15, lambda chance: chance.choice((END, [END, *often(chance)], some(chance, 80)))),
    "pad_token_id": (5, lambda chance: chance.choice((PAD, END))),
    "bos_token_id": (2, lambda chance: 3),
    "decoder_start_token_id": (1, lambda chance: 3),
    "max_time": (3, lambda chance: 1e6),
    "stop_strings": (3, lambda chance: [chance.choice("abcde") for _ in range(3)]),
    "prefill_chunk_size": (8, lambda chance: chance.choice((1, 2, 5))),
    "use_cache": (6, lambda chance: False),
    "cache_implementation": (4, lambda chance: chance.choice(CACHES)),
    "cache_config": (1, lambda chance: {"nbits": 4}),
    "max_cache_len": (3, lambda chance: chance.choice((4, 64))),
    "disable_compile": (100, lambda chance: True),
    "return_dict_in_generate": (55, lambda chance: True),
    "output_scores": (45, lambda chance: True),
    "output_logits": (30, lambda chance: True),
    "output_attentions": (0.5, lambda chance: True),
    "output_hidden_states": (0.5, lambda chance: True),
    # Of other methods of decoding; most are refused.
    "low_memory": (0.5, lambda chance: True),
    "penalty_alpha": (0.5, lambda chance: 0.6),
    "dola_layers": (0.5, lambda chance: chance.choice(("low", "high", [0]))),
    "constraints": (0.5, lambda chance: [[7]]),
    "force_words_ids": (0.5, lambda chance: [[7]]),
    "use_mtp": (0.5, lambda chance: True),
    "assistant_early_exit": (0.5, lambda chance: 1),
    "speculation_type": (0.5, lambda chance: "dflash"),
    "is_assistant": (2, lambda chance: True),
}
CACHES = ["dynamic"] * 4 + ["static", "offloaded", "offloaded_static", "quantized", "paged"]
# With one answer for each prompt only: transformers counts prompts by row here, and guidance and SynthID remember rows.
ONE_ANSWER = {
    "encoder_repetition_penalty": (5, lambda chance: chance.choice((0.8, 1.3))),
    "encoder_no_repeat_ngram_size": (4, lambda chance: chance.randint(1, 2)),
    "guidance_scale": (6, lambda chance: chance.choice((0.5, 1.5, 3.0))),
    "watermarking_config": (6, lambda chance: watermark(chance)),
}
SAMPLED = {
    "temperature": (40, lambda chance: chance.choice((0.05, 0.5, 1.5))),
    "top_k": (60, lambda chance: chance.choice((0, 1, 5, 40))),
    "top_p": (20, lambda chance: chance.choice((0.3, 0.9))),
    "min_p": (12, lambda chance: chance.choice((0.05, 0.5))),
    "top_h": (8, lambda chance: chance.choice((0.3, 0.9))),
    "typical_p": (12, lambda chance: chance.choice((0.3, 0.9))),
    "epsilon_cutoff": (10, lambda chance: 3e-3),
    "eta_cutoff": (10, lambda chance: 3e-3),
}
BEAMS = {
    "length_penalty": (30, lambda chance: chance.choice((-1.0, 0.5, 2.0))),
    "early_stopping": (30, lambda chance: chance.choice((True, "never"))),
    "num_beam_groups": (2, lambda chance: 2),
    "diversity_penalty": (4, lambda chance: 0.5),
}
ASSISTED = {
    "num_assistant_tokens": (50, lambda chance: chance.randint(1, 4)),
    "num_assistant_tokens_schedule": (40, lambda chance: chance.choice(SCHEDULES)),
    "assistant_confidence_threshold": (30, lambda chance: chance.choice((0.0, 0.2))),
    "assistant_ensemble_weight": (8, lambda chance: chance.choice((0.2, 0.8))),
    "max_matching_ngram_size": (30, lambda chance: chance.randint(1, 3)),
}
SCHEDULES = ("constant", "heuristic", "heuristic_transient")
# Drawn in `cases.draw`.
DRAWN_APART = {
    "do_sample", "num_beams", "num_return_sequences", "max_new_tokens", "max_length", "prompt_lookup_num_tokens",
}  # fmt: skip
LEFT_OUT = {
    "compile_config": "only static caches are compiled, which a steered model refuses",
    "continuous_batching_config": "deprecated: GenerationConfig itself warns, and generate_batch is refused",
    "assistant_lookbehind": "only read where the assistant has another tokenizer",
    "target_lookbehind": "only read where the assistant has another tokenizer",
    "token_healing": "refused: it changes the prompt",
    "transformers_version": "a note, not an option",
    "_from_model_config": "a note, not an option",
}
FUZZED = DRAWN_APART.union(ALWAYS_POSSIBLE, ONE_ANSWER, SAMPLED, BEAMS, ASSISTED)


def watermark(chance):
    if chance.random() < 0.5:
        return transformers.WatermarkingConfig(bias=2.5, seeding_scheme=chance.choice(("lefthash", "selfhash")))
    keys = [chance.randrange(1 << 20) for _ in range(5)]
    return transformers.SynthIDTextWatermarkingConfig(ngram_len=3, keys=keys, context_history_size=16)


def draw_options(chance, tables):
    """Some of the options in the tables, each with the frequency that stands there."""
    options = {}
    for table in tables:
        for name, (percent, value) in table.items():
            if chance.random() * 100 < percent:
                options[name] = value(chance)
    return options
