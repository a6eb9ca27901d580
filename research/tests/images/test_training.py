"""From a folder of images to a bundle, drawn images and a distilled student, by the verbs."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from divdec import DivergenceForCausalLM, UsageError
from divdec.cli import main
from divdec.runs import file_sha256, write_bytes
from divdec_research.images.files import png, read_folder
from divdec_research.images.models import load_image_model, write_image_files
from divdec_research.images.sampling import sample_to_folder
from divdec_research.images.settings import ImageSampleSettings, ImageTrainSettings
from divdec_research.images.training import select_classes, train_image_auxiliaries


@pytest.fixture(scope="module")
def pictures(image_world, tmp_path_factory):
    """Images as files, in a folder a class."""
    folder = tmp_path_factory.mktemp("pictures")
    for row, label in enumerate(image_world.labels):
        if row % 4 == 0:
            (folder / f"digit {label}").mkdir(exist_ok=True)
            write_bytes(folder / f"digit {label}" / f"{row:03}.png", png(image_world.images[row]))
    return folder


@pytest.fixture(scope="module")
def trained(image_world, pictures, tmp_path_factory):
    output = tmp_path_factory.mktemp("trained") / "run"
    options = ("--target", image_world.folder / "target", "--images", pictures, "--output", output)
    quick = ("--epochs", "3", "--base-lr", "0.02", "--steering", "rank:8", "--forget", "digit 1", "4", "--json")
    assert main(["image", "train", *map(str, (*options, *quick))]) == 0
    return output


def test_auxiliaries_are_trained_on_image_folder(trained, image_world):
    content = json.loads((trained / "run.json").read_text())
    assert content["classes_to_forget"] == ["digit 1", "digit 4"]
    for result in content["auxiliaries"].values():
        assert result["learning_rate"] == pytest.approx(0.002)  # a tenth of the base's
        assert result["loss_after"] < result["loss_before"]
    rows = [json.loads(line) for line in (trained / "data" / "forget.jsonl").read_text().splitlines()]
    assert len(rows) == 22  # 10 of each, and a tenth of them without their class
    assert {row["prompt"] for row in rows} == {"33", "36", "42"}
    opened = load_image_model(str(trained / "pair" / "bundle"))
    assert (opened.steering.rule, opened.steering.k) == ("rank", 8)
    assert opened.steering.vocabulary == tuple(range(image_world.layout.codes))


def test_forget_classes_are_sampled_by_seed_by_default(image_world):
    drawn = set()
    for seed in (0, 1):
        settings = ImageTrainSettings(target="t", images="i", output="o", base_lr=1e-2, seed=seed)
        drawn.add(frozenset(select_classes(settings, image_world.layout, range(10))))
    assert len(drawn) == 2
    assert {len(classes) for classes in drawn} == {5}


def test_image_sample_command_writes_images(trained, tmp_path, capsys):
    bundle, output = str(trained / "pair" / "bundle"), tmp_path / "drawn"
    command = ["image", "sample", bundle, "--output", str(output), "--count", "3", "--classes", "2", "digit 4"]
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steering"].startswith("rank:8")
    assert sorted(file.relative_to(output).as_posix() for file in output.rglob("*.png")) == [
        *(f"digit {digit}/00000{number}.png" for digit in (2, 4) for number in range(3)), "grid.png",
    ]  # fmt: skip
    saved = load_file(output / "codes.safetensors")
    assert saved["classes"].tolist() == [2, 2, 2, 4, 4, 4]
    opened = load_image_model(bundle)
    images, _, _ = read_folder(output, 1, (8, 8))
    assert torch.allclose(images, opened.codec.decode(saved["codes"]), atol=0.5 / 255 + 1e-6)
    assert main(command) == 2  # nothing is written over
    assert "--overwrite" in capsys.readouterr().err
    again = tmp_path / "again"
    assert main([*command[:3], "--output", str(again), *command[5:], "--speculative", "auto"]) == 0
    assert len(list(again.rglob("*.png"))) == 7


def test_a_distilled_student_is_an_image_model(trained, tmp_path, capsys):
    bundle, data = trained / "pair" / "bundle", trained / "data"
    command = ["distill", str(bundle), "--forget", str(data / "forget.jsonl"), "--output", str(tmp_path / "student")]
    assert main([*command, "--steering", "linear:2", "--epochs", "1", "--lr", "1e-3"]) in (0, 3)
    student = open_image_model_like(tmp_path / "student", bundle)
    assert not isinstance(student, DivergenceForCausalLM)


def open_image_model_like(student, bundle):
    from transformers import AutoModelForCausalLM

    from divdec_research.images.models import load_image_files
    from divdec_research.images.sampling import sample

    model = AutoModelForCausalLM.from_pretrained(student).eval()
    layout, _ = load_image_files(bundle)
    assert sample(model, layout, [0, 4]).shape == (2, 4, 4)
    return model


def test_unsafe_class_names_are_escaped_in_paths(image_world, tmp_path):
    names = ["../../out", "/tmp/out", "a/b", "grid.png", "long " * 80, "tail.", "nul\0", "digit 7", "ä, (ö)", ".hidden"]
    model = tmp_path / "model"
    shutil.copytree(image_world.folder / "target", model)
    write_image_files(model, dataclasses.replace(image_world.layout, classes=tuple(names)), image_world.codec)
    output = tmp_path / "deep" / "er" / "drawn"
    assert main(["image", "sample", str(model), "--output", str(output), "--count", "1"]) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["deep", "model"]
    assert len(list(output.glob("*/000000.png"))) == 10
    assert {"digit 7", "ä, (ö)", "0000 ______out"} <= {folder.name for folder in output.iterdir()}


def test_duplicate_class_is_sampled_once(image_world, tmp_path):
    settings = ImageSampleSettings(
        model=str(image_world.bundle), output=str(tmp_path / "out"), classes=("1", "digit 1"), count=2
    )
    assert sample_to_folder(settings)["images"] == 2
    with pytest.raises(UsageError, match="lie one within the other"):
        sample_to_folder(dataclasses.replace(settings, output=str(image_world.folder / "target" / "x")))


def test_image_training_resumes_after_auxiliaries_without_touching_other_runs(image_world, pictures, tmp_path):
    settings = ImageTrainSettings(
        target=str(image_world.folder / "target"), images=str(pictures), output=str(tmp_path / "run"),
        forget=("digit 2",), epochs=0.5, lora_rank=2, base_lr=1e-2, steering="rank:8",
    )  # fmt: skip
    whole = train_image_auxiliaries(settings, lambda line: None)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps({**record, "status": "running"}))
    weights = file_sha256(tmp_path / "run" / "pair" / "forget_auxiliary" / "model.safetensors")
    assert train_image_auxiliaries(settings, lambda line: None)["bundle"] == whole["bundle"]
    assert file_sha256(tmp_path / "run" / "pair" / "forget_auxiliary" / "model.safetensors") == weights
    data = (tmp_path / "run" / "data" / "forget.jsonl").read_bytes()
    with pytest.raises(UsageError, match="--overwrite"):
        train_image_auxiliaries(dataclasses.replace(settings, forget=("digit 3",)), lambda line: None)
    assert (tmp_path / "run" / "data" / "forget.jsonl").read_bytes() == data
    mine = tmp_path / "mine"
    (mine / "data").mkdir(parents=True)
    (mine / "data" / "forget.jsonl").write_text("mine")
    for output in (mine, image_world.folder / "target", pictures / "out"):
        with pytest.raises(UsageError):
            train_image_auxiliaries(dataclasses.replace(settings, output=str(output)), lambda line: None)
    assert (mine / "data" / "forget.jsonl").read_text() == "mine"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"forget": ("digit 12",)}, "class 'digit 12' is not known"),
        ({"forget": tuple(f"digit {digit}" for digit in range(10))}, "10 of 10 classes are to be forgotten"),
        ({"target": "absent/model"}, "absent/model"),
        ({"images": "absent"}, "absent is no folder"),
        ({"steering": "rank:32"}, "k is 32"),
    ],
)
def test_training_errors(image_world, pictures, tmp_path, changed, message):
    arguments = {
        "target": str(image_world.folder / "target"), "images": str(pictures), "output": str(tmp_path / "run"),
            "base_lr": 1e-2,
    }  # fmt: skip
    with pytest.raises(UsageError, match=message):
        train_image_auxiliaries(ImageTrainSettings(**{**arguments, **changed}), lambda line: None)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["image", "frob"], 'Unknown command "frob". Available commands: demo, train'),
        (["image", "sample", "BUNDLE", "--output", "OUT", "--classes", "11"], "class '11' is not known"),
        (["image", "sample", "BUNDLE", "--output", "OUT", "--speculative", "0"], "speculative is '0'"),
        (["image", "sample", "BUNDLE", "--output", "OUT", "--steering", "rank:99"], "k is 99"),
        (["image", "sample", "NOWHERE", "--output", "OUT"], "NOWHERE"),
    ],
)
def test_invalid_arguments_give_one_line_error(image_world, tmp_path, capsys, command, message):
    places = {"BUNDLE": str(image_world.bundle), "OUT": str(tmp_path / "out")}
    assert main([places.get(word, word) for word in command]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
