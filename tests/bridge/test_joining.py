"""Rows of a pair with another tokenizer join and leave a batch, and go on as if alone."""

import torch

from divdec import DivergenceForCausalLM
from divdec.serving.batches import join
from support.tiny import tiny_model

TEXTS = ("The author of The Hollow Orchard lives", "In", "Großmutter aß in Köln ein")


def test_bridged_rows_are_independent_when_batch_changes(make_pair, tokenizers):
    pair = make_pair("bpe", "small")
    model = DivergenceForCausalLM.from_experts(tiny_model("llama", pair.vocab_size, 0, 64, 2), pair, "linear:1")
    prompts = [tokenizers["bpe"](text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    with torch.inference_mode():
        expected = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            found = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None)
            expected.append(found[0].tolist())
        cache, mask, texts = None, None, []
        for prompt in prompts:  # one joins after each step
            added = model.new_cache()
            logits = model(torch.tensor([prompt]), past_key_values=added).logits[:, -1]
            texts.append(prompt + logits.argmax(-1).tolist())
            new_mask = torch.ones(1, len(prompt), dtype=torch.long)
            if cache is None:
                cache, mask = added, new_mask
            else:
                left, right = join(cache, added)
                mask = torch.cat([torch.nn.functional.pad(m, (n, 0)) for m, n in ((mask, left), (new_mask, right))])
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            last = torch.tensor([[text[-1]] for text in texts])
            logits = model(last, attention_mask=mask, past_key_values=cache).logits[:, -1]
            texts = [[*text, token] for text, token in zip(texts, logits.argmax(-1).tolist(), strict=True)]
        keep = torch.tensor([1, 2])
        cache.batch_select_indices(keep)
        mask, texts = torch.nn.functional.pad(mask[keep], (0, 1), value=1), texts[1:]
        last = torch.tensor([[text[-1]] for text in texts])
        logits = model(last, attention_mask=mask, past_key_values=cache).logits[:, -1]
        texts = [[*text, token] for text, token in zip(texts, logits.argmax(-1).tolist(), strict=True)]
    for text, whole in zip(texts, expected[1:], strict=True):
        assert text == whole[: len(text)]
        assert len(text) >= 4
