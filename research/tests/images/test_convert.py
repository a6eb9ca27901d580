"""Converted models against a plain forward of the architecture that was published, and files that cannot be used."""

import dataclasses
import json
import os
import sys
import types
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from divdec import DivergenceForCausalLM, UsageError
from divdec.checkpoint import check_weights, load_model
from divdec_research.images import taming
from divdec_research.images.codecs import FOLDER, load_codec, vq_config
from divdec_research.images.models import load_layout
from divdec_research.images.taming import convert_taming
from support.taming_reference import Model, Shape, random_model

SHAPES = {
    "published": Shape(),
    "no attention": Shape(width=32, heads=4, widths=(32, 32, 64), blocks=2, attention=()),
    "attention at all levels": Shape(width=64, heads=1, layers=3, raster=(3, 3), attention=(0, 1), channels=1),
}
CLASSES = ("tench", "goldfish", "shark")
SMALL = Shape(width=32, layers=1, heads=4, raster=(2, 2), latent=4, entry=4)


def quiet(line):
    pass


def lightning(weights):
    """What PyTorch Lightning saves."""
    return {"epoch": 3, "global_step": 100, "state_dict": weights, "optimizer_states": [{"lr": 1e-4}], "callbacks": {}}


def options(shape):
    return {
        "classes": CLASSES,
        "heads": None if shape.width == 64 * shape.heads else shape.heads,
        "report": quiet,
    }


@dataclasses.dataclass
class Converted:
    shape: Shape
    reference: torch.nn.Module
    folder: Path


@pytest.fixture(scope="module", params=SHAPES)
def converted(request, tmp_path_factory):
    shape = SHAPES[request.param]
    reference = random_model(shape)
    folder = tmp_path_factory.mktemp("converted")
    torch.save(lightning(reference.state_dict()), folder / "published.ckpt")
    convert_taming(folder / "published.ckpt", folder / "model", **options(shape))
    return Converted(shape, reference, folder / "model")


@pytest.fixture(scope="module")
def weights():
    """Of a checkpoint so small that each test can write its own."""
    return random_model(SMALL).state_dict()


def convert_weights(weights, folder, shape=SMALL, **arguments):
    torch.save(lightning(weights), folder / "published.ckpt")
    return convert_taming(folder / "published.ckpt", folder / "model", **{**options(shape), **arguments})


def tokens_of(shape, length, rows=3):
    return torch.randint(shape.codes, (rows, length), generator=torch.Generator().manual_seed(5))


def test_converted_logits_match_published_architecture(converted):
    model = AutoModelForCausalLM.from_pretrained(converted.folder)
    block = converted.shape.raster[0] * converted.shape.raster[1]
    for length in (1, 2, block):
        tokens = tokens_of(converted.shape, length)
        expected = converted.reference.transformer(tokens)
        torch.testing.assert_close(model(tokens).logits, expected, rtol=0, atol=1e-4)
        assert expected.std() > 0.1


def test_converted_step_by_step_logits_match(converted):
    model = load_model(converted.folder)
    block = converted.shape.raster[0] * converted.shape.raster[1]
    tokens, cache = tokens_of(converted.shape, block), None
    result = []
    for token in tokens.split(1, dim=1):
        answer = model(token, past_key_values=cache, use_cache=True)
        result.append(answer.logits)
        cache = answer.past_key_values
    torch.testing.assert_close(torch.cat(result, 1), converted.reference.transformer(tokens), rtol=0, atol=1e-4)


def test_class_and_all_codes_fit_in_one_forward_pass(converted):
    model, layout = load_model(converted.folder), load_layout(converted.folder)
    assert model.config.n_positions == layout.length + 1
    assert not model.transformer.wpe.weight[-1].any()
    assert model.transformer.wpe.weight[:-1].any(dim=1).all()
    tokens = tokens_of(converted.shape, layout.length + 1)
    expected = converted.reference.transformer(tokens[:, :-1])
    torch.testing.assert_close(model(tokens).logits[:, :-1], expected, rtol=0, atol=1e-4)


def test_converted_vqgan_matches_published_images_and_codes(converted):
    shape, first_stage = converted.shape, converted.reference.first_stage_model
    codec = load_codec(converted.folder / FOLDER)
    assert (codec.codes, codec.grid, codec.size, codec.channels) == (40, shape.raster, shape.size, shape.channels)
    images = torch.rand(4, shape.channels, *shape.size, generator=torch.Generator().manual_seed(6))
    codes = first_stage.encode(images)
    assert len(codes.unique()) > 4
    assert torch.equal(codec.encode(images), codes)
    codes = torch.randint(40, (4, *shape.raster), generator=torch.Generator().manual_seed(7))
    expected = first_stage.decode(codes)
    torch.testing.assert_close(codec.decode(codes), expected, rtol=0, atol=1e-4)
    assert 0.1 < expected.mean() < 0.9
    assert expected.std() > 0.05


def test_converted_layout_describes_tokens(converted):
    layout = load_layout(converted.folder)
    assert (layout.codes, layout.vocab_size, layout.padding, layout.first_class, layout.no_class) == (
        40,
        40,
        39,
        0,
        None,
    )
    assert (layout.height, layout.width, layout.classes) == (*converted.shape.raster, CLASSES)
    assert layout.no_codes == []


def test_converted_tokenizer_round_trips(converted):
    tokenizer, layout = AutoTokenizer.from_pretrained(converted.folder), load_layout(converted.folder)
    codes = torch.arange(2 * layout.length).reshape(2, layout.height, layout.width) % 40
    records = layout.records("all", codes, [2, 0])
    for record, row, index in zip(records.records, codes, [2, 0], strict=True):
        expected = [index, *row.flatten().tolist()]
        tokens = tokenizer(record.prompt + record.answer, add_special_tokens=False)["input_ids"]
        assert tokens == expected
        assert [int(text) for text in tokenizer.decode(tokens).split()] == expected
    everything = " ".join(map(str, range(40)))
    assert tokenizer(everything)["input_ids"] == list(range(40))


def test_converted_model_is_plain_checkpoint(converted):
    check_weights(converted.folder)
    config = json.loads((converted.folder / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert (config["activation_function"], config["tie_word_embeddings"], config["dtype"]) == ("gelu", False, "float32")
    assert config["bos_token_id"] is None
    assert config["eos_token_id"] is None
    assert not [file for file in converted.folder.rglob("*") if file.suffix in (".bin", ".pt", ".ckpt")]
    run = json.loads((converted.folder / "run.json").read_text())
    reference = converted.reference.transformer
    assert run["transformer_parameters"] == sum(weight.numel() for weight in reference.parameters())
    first_stage = dict(converted.reference.first_stage_model.named_parameters())
    assert run["vq_parameters"] == sum(w.numel() for name, w in first_stage.items() if not name.startswith("loss."))


def test_converted_models_can_be_steered(tmp_path):
    parts, references = [], []
    for seed in range(3):
        reference = random_model(SMALL, seed)
        (tmp_path / str(seed)).mkdir()
        convert_weights(reference.state_dict(), tmp_path / str(seed))
        parts.append(load_model(tmp_path / str(seed) / "model"))
        references.append(reference.transformer)
    model = DivergenceForCausalLM.from_parts(*parts, steering="linear:1.5")
    tokens = tokens_of(SMALL, 4)
    target, retain, forget = (reference(tokens) for reference in references)
    torch.testing.assert_close(
        model(tokens).logits, target + 1.5 * (retain.log_softmax(-1) - forget.log_softmax(-1)), rtol=0, atol=1e-4
    )


def bare(weights, path):
    torch.save(weights, path)


def of_lightning(weights, path):
    torch.save(lightning(weights), path)


def of_old_torch(weights, path):
    torch.save(lightning(weights), path, _use_new_zipfile_serialization=False)


def safetensors(weights, path):
    from safetensors.torch import save_file

    save_file(weights, path)


def with_callback(weights, path, name="ModelCheckpoint"):
    """As old versions of Lightning do, which name the class of each callback; it is not installed when read."""
    module = types.ModuleType("pytorch_lightning.callbacks.model_checkpoint")
    callback = type(name, (), {"__module__": module.__name__})
    setattr(module, name, callback)
    with pytest.MonkeyPatch.context() as patch:
        for package in ("pytorch_lightning", "pytorch_lightning.callbacks", module.__name__):
            patch.setitem(sys.modules, package, module)
        torch.save({**lightning(weights), "callbacks": {callback: {"best_model_score": torch.tensor(0.5)}}}, path)


@pytest.mark.parametrize("save", [bare, of_old_torch, safetensors, with_callback])
def test_every_checkpoint_format_gives_same_result(weights, tmp_path, save):
    convert_weights(weights, tmp_path)
    path = tmp_path / ("other.safetensors" if save is safetensors else "other.ckpt")
    save(weights, path)
    convert_taming(path, tmp_path / "other", **options(SMALL))
    for file in ("model.safetensors", "config.json", f"{FOLDER}/diffusion_pytorch_model.safetensors", "image.json"):
        assert (tmp_path / "other" / file).read_bytes() == (tmp_path / "model" / file).read_bytes()


def test_sharded_conversion_gives_same_weights(weights, tmp_path, monkeypatch):
    convert_weights(weights, tmp_path)
    monkeypatch.setattr(taming, "SHARD_BYTES", 20_000)
    convert_taming(tmp_path / "published.ckpt", tmp_path / "shards", **options(SMALL))
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    check_weights(tmp_path / "shards")
    whole, parts = load_model(tmp_path / "model").state_dict(), load_model(tmp_path / "shards").state_dict()
    assert all(torch.equal(weight, parts[name]) for name, weight in whole.items())


def test_transformer_half_precision_is_preserved(weights, tmp_path):
    convert_weights({name: weight.half() for name, weight in weights.items()}, tmp_path)
    model, codec = load_model(tmp_path / "model"), load_codec(tmp_path / "model" / FOLDER)
    assert model.dtype == torch.float16
    assert codec.model.dtype == torch.float32


def test_tied_embedding_and_head_are_converted(weights, tmp_path):
    shared = {**weights, "transformer.head.weight": weights["transformer.tok_emb.weight"]}
    convert_weights(shared, tmp_path)
    model = load_model(tmp_path / "model")
    assert torch.equal(model.lm_head.weight, model.transformer.wte.weight)
    assert model.lm_head.weight is not model.transformer.wte.weight


def test_unused_weights_are_ignored(weights, tmp_path):
    added = {
        "cond_stage_model.encoder.weight": torch.ones(2),
        "loss.logvar": torch.ones(2),
        "first_stage_model.loss.perceptual_loss.net.slice1.0.weight": torch.ones(2),
        "first_stage_model.encoder.down.0.block.0.temb_proj.weight": torch.ones(2),
    }
    lines = []
    answer = convert_weights({**weights, **added}, tmp_path, report=lines.append)
    run = json.loads((tmp_path / "model" / "run.json").read_text())
    assert answer == {
        "output": str(tmp_path / "model"),
        "transformer_parameters": run["transformer_parameters"],
        "vq_parameters": run["vq_parameters"],
        "codes": 40,
        "classes": 3,
        "size": [4, 4],
    }
    assert [line.split()[0] for line in lines] == ["transformer:", "VQGAN:", "writing"]
    others = {name: weight for name, weight in weights.items() if ".loss." not in name and "mask" not in name}
    (tmp_path / "bare").mkdir()
    convert_weights(others, tmp_path / "bare")
    for file in ("model.safetensors", f"{FOLDER}/diffusion_pytorch_model.safetensors"):
        assert (tmp_path / "bare" / "model" / file).read_bytes() == (tmp_path / "model" / file).read_bytes()


def refused(weights, folder, match, **arguments):
    """The conversion says why in one line, names the file and leaves nothing behind."""
    with pytest.raises(UsageError, match=match) as caught:
        convert_weights(weights, folder, **arguments)
    assert "\n" not in str(caught.value)
    assert [path.name for path in folder.iterdir()] == ["published.ckpt"]
    return str(caught.value)


def without(weights, *endings):
    return {name: weight for name, weight in weights.items() if not name.endswith(endings)}


@pytest.mark.parametrize(
    ("endings", "named"),
    [
        ("transformer.pos_emb", r"\(1\): transformer\.pos_emb; give"),
        ("attn.key.bias", r"\(1\): transformer\.blocks\.0\.attn\.key\.bias; give"),
        (("ln_f.weight", "ln_f.bias", "ln1.weight", "head.weight"), r"\(4\): .*, …; give the whole checkpoint"),
        ("quantize.embedding.weight", r"\(1\): first_stage_model\.quantize\.embedding\.weight"),
        ("down.0.downsample.conv.weight", r"\(1\): first_stage_model\.encoder\.down\.0\.downsample\.conv\.weight"),
        ("up.0.block.0.nin_shortcut.bias", r"\(1\): first_stage_model\.decoder\.up\.0\.block\.0\.nin_shortcut\.bias"),
        ("decoder.mid.attn_1.q.weight", r"\(1\): first_stage_model\.decoder\.mid\.attn_1\.q\.weight"),
    ],
)
def test_missing_weights_are_named(weights, tmp_path, endings, named):
    endings = (endings,) if isinstance(endings, str) else endings
    refused(without(weights, *endings), tmp_path, rf"published\.ckpt: lacks weights that it needs {named}")


@pytest.mark.parametrize(("prefix", "what"), [("transformer.", "transformer"), ("first_stage_model.", "VQGAN")])
def test_checkpoint_missing_a_component_is_rejected(weights, tmp_path, prefix, what):
    others = {name: weight for name, weight in weights.items() if not name.startswith(prefix)}
    refused(others, tmp_path, f"holds no {what}: .*cin_transformer")


@pytest.mark.parametrize(
    "name",
    [
        "transformer.blocks.0.mlp.4.weight",
        "first_stage_model.encoder.down.0.block.0.conv_shortcut.weight",
        "first_stage_model.colorize",
        "model_ema.decay",
    ],
)
def test_unknown_weights_are_named(weights, tmp_path, name):
    refused({**weights, name: torch.ones(2)}, tmp_path, rf"1 weight\(s\) that this version does not know: {name};")


@pytest.mark.parametrize(
    ("name", "shape", "match"),
    [
        ("transformer.head.weight", (39, 32), r"lm_head\.weight.*\[39, 32\]"),
        ("transformer.blocks.0.attn.key.weight", (31, 32), r"attn\.c_attn\.weight"),
        ("transformer.blocks.0.mlp.2.weight", (32, 64), r"mlp\.c_proj\.weight"),
        ("transformer.tok_emb.weight", (40,), "of shape 40; 2 axes are expected"),
        ("transformer.pos_emb", (1, 0, 32), "of shape 1×0×32; 3 axes are expected, none of them empty"),
        ("transformer.pos_emb", (2, 4, 32), "shapes do not fit each other"),
        ("transformer.pos_emb", (1, 5, 32), "5 positions; accepted: a square raster"),
        ("first_stage_model.quantize.embedding.weight", (41, 4), "vocabulary of 40 tokens and a codebook of 41"),
        ("first_stage_model.quant_conv.weight", (4, 4, 3, 3), r"quant_conv\.weight.*\[4, 4, 3, 3\]"),
        ("first_stage_model.encoder.conv_in.weight", (64, 3, 3, 3), r"conv_in\.weight.*\[64, 3, 3, 3\]"),
        ("first_stage_model.decoder.conv_out.weight", (1, 32, 3, 3), r"conv_out\.weight.*\[1, 32, 3, 3\]"),
        ("first_stage_model.encoder.down.1.block.0.conv1.weight", (48, 32, 3, 3), "shapes do not fit each other"),
    ],
)
def test_contradictory_shapes_are_rejected(weights, tmp_path, name, shape, match):
    refused({**weights, name: torch.ones(shape)}, tmp_path, match)


def test_attention_of_encoder_and_decoder_must_agree(weights, tmp_path):
    others = {name: weight for name, weight in weights.items() if "decoder.up.1.attn" not in name}
    refused(others, tmp_path, r"lacks weights that it needs .*decoder\.up\.1\.attn")


def test_non_causal_transformer_is_rejected(weights, tmp_path):
    mask = weights["transformer.blocks.0.attn.mask"].clone()
    mask[..., :2, :2] = 1
    refused({**weights, "transformer.blocks.0.attn.mask": mask}, tmp_path, r"attn\.mask, which is not causal")


def test_integer_weights_are_rejected(weights, tmp_path):
    others = {**weights, "transformer.ln_f.bias": torch.ones(32, dtype=torch.long)}
    refused(others, tmp_path, r"ln_f\.bias of type torch\.int64")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"heads": None}, "32 wide, which is no multiple of 64: give the number"),
        ({"heads": 5}, "32 wide, which 5 attention heads do not divide"),
        ({"heads": 0}, "32 wide, which 0 attention heads do not divide"),
        ({"classes": None}, "40 tokens, too few for 1000 classes"),
        ({"classes": tuple(map(str, range(40)))}, "40 tokens, too few for 40 classes"),
        ({"classes": ("a", "b", "a")}, "3 names of classes are given, 2 of them different"),
        ({"classes": ()}, "0 names of classes are given"),
    ],
)
def test_incompatible_conversion_options_are_rejected(weights, tmp_path, arguments, match):
    refused(weights, tmp_path, match, **arguments)


class Harm:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def test_pickled_objects_are_rejected_without_execution(weights, tmp_path):
    marker = tmp_path / "made"
    torch.save({**lightning(weights), "hyper_parameters": Harm(marker)}, tmp_path / "bad.ckpt")
    with pytest.raises(UsageError, match=r"holds \w+\.mkdir beside tensors.*torch\.save\(torch\.load\(FILE") as caught:
        convert_taming(tmp_path / "bad.ckpt", tmp_path / "model", **options(SMALL))
    assert "\n" not in str(caught.value)
    assert not marker.exists()
    assert not (tmp_path / "model").exists()


def test_unknown_lightning_classes_are_rejected(weights, tmp_path):
    with_callback(weights, tmp_path / "bad.ckpt", "Other")
    before = set(torch.serialization.get_safe_globals())
    with pytest.raises(UsageError, match=r"holds pytorch_lightning\.callbacks\.model_checkpoint\.Other beside"):
        convert_taming(tmp_path / "bad.ckpt", tmp_path / "model", **options(SMALL))
    assert set(torch.serialization.get_safe_globals()) == before


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ([1, 2], "holds no state_dict"),
        ({}, "holds no state_dict"),
        ({"state_dict": {}}, "holds no state_dict"),
        ({"state_dict": {"a": 1}}, "'a', which is no tensor"),
        ({"epoch": 1}, "'epoch', which is no tensor"),
    ],
)
def test_unexpected_checkpoint_content_is_rejected(tmp_path, content, match):
    torch.save(content, tmp_path / "bad.ckpt")
    with pytest.raises(UsageError, match=match):
        convert_taming(tmp_path / "bad.ckpt", tmp_path / "model", **options(SMALL))


@pytest.mark.parametrize("name", ["bad.ckpt", "bad.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "folder", "empty", "text", "cut"])
def test_damaged_files_are_rejected(weights, tmp_path, name, damage):
    path = tmp_path / name
    if damage == "folder":
        path.mkdir()
    elif damage == "cut":
        (safetensors if path.suffix == ".safetensors" else of_lightning)(weights, path)
        path.write_bytes(path.read_bytes()[:5000])
    elif damage != "missing":
        path.write_bytes(b"hello" if damage == "text" else b"")
    with pytest.raises(UsageError, match=name) as caught:
        convert_taming(path, tmp_path / "model", **options(SMALL))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "model").exists()


def test_converted_model_is_replaced_only_with_overwrite(weights, tmp_path):
    convert_weights(weights, tmp_path)
    before = (tmp_path / "model" / "run.json").read_bytes()
    with pytest.raises(UsageError, match="not empty; give --overwrite"):
        convert_weights(weights, tmp_path)
    with pytest.raises(UsageError, match="lacks weights"):
        convert_weights(without(weights, "ln_f.bias"), tmp_path, overwrite=True)
    assert (tmp_path / "model" / "run.json").read_bytes() == before
    convert_weights(weights, tmp_path, overwrite=True, classes=("one",))
    assert load_layout(tmp_path / "model").classes == ("one",)


def test_unrelated_files_are_never_replaced(weights, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "image.json").write_text("{}")
    with pytest.raises(UsageError, match="not an earlier result of divdec"):
        convert_weights(weights, tmp_path, overwrite=True)


def test_source_checkpoint_is_never_replaced(weights, tmp_path):
    convert_weights(weights, tmp_path)
    (tmp_path / "published.ckpt").rename(tmp_path / "model" / "published.ckpt")
    with pytest.raises(UsageError, match="lie one within the other"):
        convert_taming(tmp_path / "model" / "published.ckpt", tmp_path / "model", overwrite=True, **options(SMALL))
    assert (tmp_path / "model" / "published.ckpt").is_file()


def test_failed_conversion_leaves_no_files(weights, tmp_path, monkeypatch):
    from divdec_research.images.codecs import VQCodec

    def fail(self, folder):
        assert (folder.parent / "model.safetensors").is_file()
        raise OSError("no space left on device")

    monkeypatch.setattr(VQCodec, "save", fail)
    with pytest.raises(OSError, match="no space"):
        convert_weights(weights, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["published.ckpt"]


def test_missing_diffusers_error_names_install_command(weights, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    refused(weights, tmp_path, r"needs diffusers: pip install 'divdec-research\[image\]'")


def published_models():
    """Transformer and VQGAN of ImageNet's published checkpoint, on the meta device."""
    codes = 16_384
    transformer = taming.transformer_model(taming.mingpt_config(codes, 256 + 1, 1536, 48, 24, 4 * 1536))
    return transformer, taming.codec_model(vq_config(3, (128, 128, 256, 256, 512), 2, [4], 256, (codes, 256)))


def test_published_layout_matches_published_parameter_count():
    transformer, codec = published_models()
    assert {parameter.device.type for parameter in transformer.parameters()} == {"meta"}
    additional = transformer.config.n_embd
    assert sum(parameter.numel() for parameter in transformer.parameters()) - additional == 1_410_640_896
    assert sum(parameter.numel() for parameter in codec.parameters()) == 76_073_859


def test_configurations_are_derived_from_the_published_shapes():
    """The reference architecture at full size, on the meta device, has exactly the weights that are needed."""
    published = Shape(
        width=1536, layers=48, heads=24, codes=16_384, raster=(16, 16), widths=(128, 128, 256, 256, 512), blocks=2,
        attention=(4,), latent=256, entry=256,
    )  # fmt: skip
    with torch.device("meta"):
        weights = taming.select_used(Model(published).state_dict())
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    transformer, codec = published_models()
    assert taming.transformer_config(shapes).to_dict() == transformer.config.to_dict()
    config = taming.codec_config(shapes)
    assert {name: codec.config[name] for name in config} == config
    sources = {**taming.transformer_weights(transformer), **taming.codec_weights(codec)}.values()
    assert sorted(source for weight in sources for source in weight.sources) == sorted(shapes)
