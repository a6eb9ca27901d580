"""One pass of the stack gives what two passes give, whatever is done to the cache or the weights."""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from divdec.errors import UsageError
from divdec.experts.forward import logits_of, new_cache
from divdec.experts.neural import NeuralPair
from divdec.experts.stacked import StackedPair, stackable
from divdec.experts.stacked_modules import _Elementwise, _Halves, _LayerNorm
from divdec.model.cache import DivergenceCache
from exactness import assert_close, assert_same_answers

VOCAB = 64
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
OWN = {
    "Llama": {"tie_word_embeddings": True},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "Mistral": {"sliding_window": 6, "tie_word_embeddings": False},
    "Gemma": {},
    "Qwen3": {},
    "Gemma3": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "OPT": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "Phi": {},
}
FAMILIES = tuple(OWN)


def make_model(family, seed, **changes):
    torch.manual_seed(seed)
    common = {name: value for name, value in COMMON.items() if family != "GPT2" or not name.startswith("num_")}
    if family == "GPT2":
        del common["hidden_size"], common["intermediate_size"], common["head_dim"], common["max_position_embeddings"]
    kind = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{kind}Config")(**common | OWN[family] | changes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # norms and biases that say something, and differ
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight), alpha=0.2)
    return model


def make_pair(family, **changes):
    return make_model(family, 1, **changes), make_model(family, 2, **changes)


@pytest.fixture(params=FAMILIES)
def parts(request):
    """Two models, their stack, and copies that no stack has touched."""
    retain, forget = make_pair(request.param)
    alone = copy.deepcopy(retain), copy.deepcopy(forget)
    return SimpleNamespace(retain=retain, forget=forget, alone=alone, stack=StackedPair(retain, forget))


@pytest.fixture
def llama():
    retain, forget = make_pair("Llama")
    return SimpleNamespace(retain=retain, forget=forget, stack=StackedPair(retain, forget))


def inputs_of(rows=3, tokens=9):
    """Token ids, a mask with one, two, … padded columns at the left, and positions that do not count them."""
    ids = torch.randint(2, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(tokens)[None] >= torch.arange(rows)[:, None]).long()
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


class Caches:
    """A stack's cache beside those of separate passes: the same is done to all."""

    def __init__(self, stack, models):
        self.stack, self.models = stack, models
        self.stacked, self.separate = stack.new_cache(), [new_cache(model) for model in models]

    def do(self, action):
        for cache in (self.stacked, *self.separate):
            action(cache)

    def check_step(self, ids, mask, positions, keep=0):
        got = self.stack.logits(ids, mask, positions, self.stacked, keep)
        for logits, model, cache in zip(got, self.models, self.separate, strict=True):
            wanted = logits_of(model, ids, mask, positions, cache, keep)
            assert logits.shape == wanted.shape
            real = mask[:, -ids.shape[1] :][:, -logits.shape[1] :].bool()
            assert_close(logits[real], wanted[real])
            assert self.stacked.get_seq_length() == cache.get_seq_length()


@torch.no_grad()
def test_without_a_cache_the_stack_answers_as_the_two_do(parts):
    ids, mask, positions = inputs_of()
    for keep in (0, 2):
        for model, logits in zip(parts.alone, parts.stack.logits(ids, mask, positions, None, keep), strict=True):
            wanted = logits_of(model, ids, mask, positions, None, keep)
            real = mask[:, -logits.shape[1] :].bool()
            assert_close(logits[real], wanted[real])


@torch.no_grad()
def test_one_position_for_all_rows_or_none_is_enough(parts):
    ids = inputs_of()[0]
    for positions in (None, torch.arange(ids.shape[1])[None]):
        for model, logits in zip(parts.alone, parts.stack.logits(ids, None, positions), strict=True):
            assert_close(logits, logits_of(model, ids, None, positions, None))
    cache, separate = parts.stack.new_cache(), new_cache(parts.alone[1])
    for step in ids.split(4, dim=1):
        logits = parts.stack.logits(step, None, None, cache)[1]
        assert_close(logits, logits_of(parts.alone[1], step, None, None, separate))


@torch.no_grad()
def test_step_by_step_the_stack_answers_as_the_two_do(parts):
    caches = Caches(parts.stack, parts.alone)
    ids, mask, positions = inputs_of(tokens=12)
    for start, end in ((0, 5), (5, 6), (6, 7), (7, 10), (10, 12)):  # beyond the sliding window of six
        caches.check_step(ids[:, start:end], mask[:, :end], positions[:, start:end], keep=1)


@torch.no_grad()
@pytest.mark.parametrize("recording", [False, True])
def test_what_is_done_to_the_cache_is_done_to_both_halves(parts, recording):
    caches = Caches(parts.stack, parts.alone)
    if recording:
        caches.do(lambda cache: cache.activate_past_recording())
    ids, mask, positions = inputs_of(tokens=14)

    def step(start, end, rows):
        caches.check_step(ids[rows, start:end], mask[rows, :end], positions[rows, start:end])

    rows = torch.arange(3)
    step(0, 5, rows)
    caches.do(lambda cache: cache.crop(-2))
    step(3, 5, rows)
    order = torch.tensor([2, 0, 0])
    caches.do(lambda cache: cache.reorder_cache(order))
    step(5, 9, rows := rows[order])
    if recording:  # a window that is full can be rolled back
        caches.do(lambda cache: cache.crop(-3))
        step(6, 9, rows)
    caches.do(lambda cache: cache.batch_repeat_interleave(2))
    step(9, 11, rows := rows.repeat_interleave(2))
    for end, keep in ((12, torch.tensor([0, -1, 3])), (13, torch.tensor([True, False, True])), (14, [1])):
        caches.do(lambda cache, keep=keep: cache.batch_select_indices(keep))
        step(end - 1, end, rows := rows[keep])
    caches.do(lambda cache: cache.reset())
    step(0, 4, torch.arange(2))


@torch.no_grad()
def test_the_layers_alone_suffice_as_a_part_of_the_steered_models_cache(parts):
    caches = Caches(parts.stack, parts.alone)
    ids, mask, positions = inputs_of()
    caches.check_step(ids[:, :4], mask[:, :4], positions[:, :4])
    joint = DivergenceCache(target := new_cache(parts.retain), caches.stacked, owner="a test")
    logits_of(parts.retain, ids[:, :4], mask[:, :4], positions[:, :4], target)
    order = torch.tensor([1, 1, 0])
    joint.reorder_cache(order)
    joint.crop(-1)
    for cache in caches.separate:
        cache.reorder_cache(order)
        cache.crop(-1)
    assert joint.check_length() == 3
    rows = torch.arange(3)[order]
    caches.check_step(ids[rows, 3:5], mask[rows, :5], positions[rows, 3:5])
    assert not joint.can_shift_rows


class StackedExperts(nn.Module):
    """What a neural pair does, with one pass."""

    vocab_size = VOCAB

    def __init__(self, retain, forget):
        super().__init__()
        self.stack = StackedPair(retain, forget)
        self.new_cache = self.stack.new_cache

    def divergence(self, *inputs):
        retain_logits, forget_logits = self.stack.logits(*inputs)
        return retain_logits.float() - forget_logits.float()


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Mistral"])
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}])
def test_a_steered_model_generates_the_same_with_a_stack(family, how):
    from divdec import DivergenceForCausalLM

    target, retain, forget = (make_model(family, seed) for seed in (0, 1, 2))
    plain = DivergenceForCausalLM.from_parts(target, *map(copy.deepcopy, (retain, forget)), steering="linear:1")
    stacked = DivergenceForCausalLM.from_experts(target, StackedExperts(retain, forget), steering="linear:1")
    ids, mask, _ = inputs_of()
    answers = []
    for model in (plain, stacked):
        torch.manual_seed(0)
        answers.append(model.generate(ids, attention_mask=mask, max_new_tokens=8, eos_token_id=None, **how))
    if how:
        assert torch.equal(*answers)
    else:
        prompts = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
        assert_same_answers(plain, prompts, *answers, eos_token_id=None)


def test_a_row_that_is_not_there_is_an_error_and_not_the_other_models(llama):
    cache = llama.stack.new_cache()
    llama.stack.logits(*inputs_of(), cache)
    with pytest.raises(IndexError):
        cache.reorder_cache(torch.tensor([0, 1, 3]))
    with pytest.raises(IndexError):
        llama.stack.logits(torch.tensor([[VOCAB]]))


@torch.no_grad()
def test_weights_are_held_once(parts):
    halves = {}
    for name, one in parts.retain.named_parameters():
        other = parts.forget.get_parameter(name)
        if one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr():
            assert other.data_ptr() - one.data_ptr() == one.nbytes
            assert one.untyped_storage().nbytes() == 2 * one.nbytes
            halves[name] = one.nbytes
    linear = sum(p.nbytes for m in parts.retain.modules() if isinstance(m, nn.Linear) for p in m.parameters())
    assert sum(halves.values()) >= linear / 2
    assert not list(parts.stack.parameters())
    for one, wanted in zip((parts.retain, parts.forget), parts.alone, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(one.parameters(), wanted.parameters(), strict=True))
        head, table = one.get_output_embeddings(), one.get_input_embeddings()
        if one.config.tie_word_embeddings:
            assert head.weight is table.weight


@pytest.mark.parametrize(
    ("family", "norm"),
    [("Llama", _Elementwise), ("Gemma", _Elementwise), ("GPT2", _LayerNorm), ("Qwen3", _Elementwise)],
)
def test_norms_of_known_kinds_run_once(family, norm):
    stack = StackedPair(*make_pair(family))
    modules = list(stack._module[0].modules())
    assert any(isinstance(module, norm) for module in modules)
    tables = sum(isinstance(module, nn.Embedding) for module in stack._models[0].modules())
    assert sum(isinstance(module, _Halves) for module in modules) == tables


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda model: [weight.mul_(1.1) for weight in model.parameters()],
        lambda model: model.model.layers[0].mlp.up_proj.register_parameter("weight", nn.Parameter(torch.randn(48, 32))),
        lambda model: setattr(model.model.layers[1], "input_layernorm", nn.Identity()),
        lambda model: setattr(model.model.layers[0].mlp.down_proj, "weight", nn.Parameter(torch.randn(32, 48))),
        lambda model: model.load_state_dict(make_model("Llama", 7).state_dict(), assign=True),
        lambda model: setattr(model.get_input_embeddings().weight, "data", torch.randn(VOCAB, 32)),
    ],
)
@pytest.mark.parametrize("name", ["retain", "forget"])
def test_weights_that_change_are_seen_or_refused(llama, change, name):
    change(getattr(llama, name))
    ids = inputs_of()[0]
    try:
        got = llama.stack.logits(ids)
    except UsageError:
        return
    for model, logits in zip((llama.retain, llama.forget), got, strict=True):
        assert_close(logits, logits_of(model, ids, None, None, None))


@torch.no_grad()
def test_another_dtype_stacks_again_and_half_a_move_is_refused_until_it_is_whole(llama):
    ids = inputs_of()[0]
    llama.retain.double()
    for _ in range(2):
        with pytest.raises(UsageError, match="one dtype"):
            llama.stack.logits(ids)
    llama.forget.double()
    got = llama.stack.logits(ids)
    assert got[0].dtype == torch.float64
    torch.testing.assert_close(got[1], logits_of(llama.forget, ids, None, None, None))
    llama.retain.bfloat16()
    llama.forget.bfloat16()
    got = llama.stack.logits(ids)
    wanted = logits_of(llama.retain, ids, None, None, None)
    assert (got[0] - wanted).abs().max() < 0.05 * wanted.abs().max()


@torch.no_grad()
def test_a_pair_that_holds_a_stack_is_copied_saved_and_used_as_before(llama, tmp_path):
    ids = inputs_of()[0]
    wanted = llama.stack.logits(ids)[1]
    pair = NeuralPair(llama.retain, llama.forget)
    names = list(pair.state_dict())
    pair.stack = llama.stack
    assert list(pair.state_dict()) == names
    twin = copy.deepcopy(pair)
    twin.forget.get_input_embeddings().weight.zero_()
    assert not torch.allclose(twin.stack.logits(ids)[1], wanted)
    torch.testing.assert_close(pair.stack.logits(ids)[1], wanted)
    llama.forget.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 1.5 * sum(p.nbytes for p in llama.forget.parameters())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close(logits_of(loaded, ids, None, None, None), wanted)
    with torch.inference_mode():
        llama.forget.load_state_dict(llama.forget.state_dict(), assign=True)
        torch.testing.assert_close(pair.stack.logits(ids)[1], wanted)


def untied(family="Llama"):
    model = make_model(family, 2)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def hooked():
    model = make_model("Llama", 2)
    model.model.layers[0].register_forward_hook(lambda *_: None)
    return model


def training():
    return make_model("Llama", 2, attention_dropout=0.1).train()


def with_adapter():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(make_model("Llama", 2), peft.LoraConfig(target_modules=["q_proj"])).base_model.model


def mixtral(seed):
    torch.manual_seed(seed)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**COMMON, num_local_experts=2)).eval()


def on_meta():
    return make_model("Llama", 2).to("meta")


@pytest.mark.parametrize(
    ("forget", "reason"),
    [
        (lambda: make_model("Mistral", 2), "architecture"),
        (lambda: make_model("Llama", 2, intermediate_size=40), "shape"),
        (lambda: make_model("Llama", 2, num_hidden_layers=1), "shape"),
        (lambda: make_model("Llama", 2, rms_norm_eps=1e-3), "rms_norm_eps"),
        (lambda: make_model("Llama", 2, attn_implementation="eager"), "_attn_implementation"),
        (lambda: make_model("Llama", 2).bfloat16(), "dtype"),
        (untied, "tied"),
        (hooked, "hooks"),
        (training, "training"),
        (with_adapter, "adapter"),
        (on_meta, "meta"),
    ],
)
def test_pairs_that_cannot_be_stacked_are_told_why_in_one_line(forget, reason):
    retain, forget = make_model("Llama", 1), forget()
    told = stackable(retain, forget)
    assert told is not None
    assert reason in told
    assert "\n" not in told
    with pytest.raises(UsageError, match="cannot run as one stack"):
        StackedPair(retain, forget)


def test_experts_that_share_a_batch_are_refused():
    assert "routes" in stackable(mixtral(1), mixtral(2))


def test_a_model_is_not_stacked_with_itself_nor_with_its_like():
    model = make_model("Llama", 1)
    assert "share memory" in stackable(model, model)
    with pytest.raises(UsageError, match="too much alike"):
        StackedPair(model, copy.deepcopy(model))


def test_a_module_that_mixes_rows_is_found_out():
    class Mixing(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs - inputs.mean(0, keepdim=True))

    class Shouting(nn.Module):
        def forward(self, states):
            return states * states.shape[0]

    for seen in (Mixing(32, 48, bias=False), Shouting()):
        retain, forget = make_pair("Llama")
        for model in (retain, forget):
            if isinstance(seen, Mixing):
                model.model.layers[0].mlp.up_proj = copy.deepcopy(seen)
            else:
                model.model.layers[0].mlp.act_fn = copy.deepcopy(seen)
        if isinstance(seen, Mixing):  # an unknown leaf runs by halves, as it would alone
            StackedPair(retain, forget)
            continue
        with pytest.raises(UsageError, match="differ by"):
            StackedPair(retain, forget)
