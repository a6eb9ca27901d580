"""What is drawn is judged: every figure is that of the images, and the verb writes them whole."""

import json
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from divdec.cli import main
from divdec.runs import write_bytes
from divdec.steering import Steering
from divdec_research.images.demo import digits as demo_digits
from divdec_research.images.demo import reaches_aims, recommend
from divdec_research.images.evaluation import rule_name
from divdec_research.images.features import EFFICIENTNET
from divdec_research.images.files import png
from divdec_research.images.results import SettingResult
from support.tiny import tiny_model


@pytest.fixture(scope="module")
def pictures(image_world, tmp_path_factory):
    """Real images as files."""
    folder = tmp_path_factory.mktemp("real")
    for row, label in enumerate(image_world.labels):
        if row % 2 == 0:
            (folder / f"digit {label}").mkdir(exist_ok=True)
            write_bytes(folder / f"digit {label}" / f"{row:03}.png", png(image_world.images[row]))
    return folder


def command(image_world, pictures, output, *more):
    options = ["--images", pictures, "--output", output, "--forget", "digit 1", "4", "7"]
    options += [] if "--count" in more else ["--count", "4"]
    return ["image", "eval", *map(str, (image_world.bundle, *options, *more))]


def test_image_evaluation_measures_settings_and_resumes(image_world, pictures, tmp_path, capsys):
    output, retrained = tmp_path / "measured", tmp_path / "retrained"
    shutil.copytree(image_world.folder / "target", retrained)
    rules = ("--settings", "linear:0", "linear:2", "rank:16", "--retrain", retrained, "--json")
    assert main(command(image_world, pictures, output, *rules)) == 0
    content = json.loads(capsys.readouterr().out)
    names = [(row["method"], row["config"]) for row in content["results"]]
    assert names == [("Baseline", ""), ("Retrain", ""), ("Linear", "α=0"), ("Linear", "α=2"), ("Rank", "k=16")]
    baseline, reference, still, moved, _ = content["results"]
    # With a strength of 0, and as its own reference, the target draws the same images.
    for same in (reference, still):
        assert {**same, "method": "", "config": ""} == {**baseline, "method": "", "config": ""}
    assert moved["content"]["forget"]["value"] < baseline["content"]["forget"]["value"]
    assert (baseline["content"]["retain"]["images"], baseline["content"]["forget"]["images"]) == (28, 12)
    for name in ("table.md", "results.json", "run.json", "grids/baseline.png", "grids/linear-2.png"):
        assert (output / name).stat().st_size > 0
    table = (output / "table.md").read_text()
    assert table.startswith(
        "40 images a setting from bundle; 3 of 10 classes are to be forgotten. Content is judged by"
    )
    assert "FID(B_R, G_R)" in table
    # Few images: the distances are too high, and the table says so.
    assert "Compare Fréchet distances within one column only" in table
    for warning in baseline["distances"]["classifier"]["warnings"]:
        assert f"classifier: {warning}\n" in table
    assert "digit 9, digit 1 (forget), digit 4 (forget), digit 7 (forget).\n" in table
    real, drawn = (Image.open(output / "grids" / f"{name}.png") for name in ("real", "baseline"))
    assert real.size == drawn.size  # the classes of one row are the same
    assert main(command(image_world, pictures, output, *rules)) == 2
    assert "--overwrite" in capsys.readouterr().err

    def stop():
        record = json.loads((output / "run.json").read_text())
        (output / "run.json").write_text(json.dumps({**record, "status": "running"}))

    # Stopped before the last setting was drawn, while the first was written: only these two are drawn again.
    stop()
    (output / "codes" / "rank-16.safetensors").unlink()
    (output / "codes" / "linear-0.safetensors").write_bytes(b"half")
    stored = load_file(output / "codes" / "linear-2.safetensors")
    changed = {**stored, "codes": torch.zeros_like(stored["codes"])}
    save_file(changed, output / "codes" / "linear-2.safetensors")
    assert main(command(image_world, pictures, output, *rules)) == 0
    again = json.loads(capsys.readouterr().out)["results"]
    assert [again[row] for row in (2, 4)] == [content["results"][row] for row in (2, 4)]
    assert again[3] != content["results"][3]
    # --overwrite draws all.
    stop()
    assert main(command(image_world, pictures, output, *rules, "--overwrite")) == 0
    assert json.loads(capsys.readouterr().out)["results"] == content["results"]
    # Other weights are another run.
    stop()
    weights = {name: 1.1 * tensor for name, tensor in load_file(retrained / "model.safetensors").items()}
    save_file(weights, retrained / "model.safetensors", {"format": "pt"})
    assert main(command(image_world, pictures, output, *rules)) == 2
    assert "unfinished run with other settings or data" in capsys.readouterr().err


def test_distances_of_second_network(image_world, pictures, tmp_path, capsys, monkeypatch):
    """The network's distances stand beside the classifier's; it sees the real images once, not once a setting."""
    seen = []

    class Pixels(nn.Flatten):
        def forward(self, input):
            seen.append(len(input))
            return super().forward(input)

    monkeypatch.setattr("divdec_research.images.report.load_network", {EFFICIENTNET: Pixels()}.get)
    options = ("--settings", "linear:0", "linear:2", "--features", EFFICIENTNET, "--json")
    assert main(command(image_world, pictures, tmp_path / "measured", *options)) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [list(row["distances"]) for row in rows] == [["classifier", EFFICIENTNET]] * 3
    assert rows[0]["distances"] == rows[1]["distances"] != rows[2]["distances"]
    assert rows[0]["distances"]["classifier"]["retain"] != rows[0]["distances"][EFFICIENTNET]["retain"]
    assert sum(seen) == 200 + 3 * 40


ONE = ("--settings", "linear:1")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--settings", "rank:5:soft"), "sample images with rank:5"),
        (("--settings", "rank:40"), "k is 40"),
        (("--settings", "linear:x"), "linear:x"),
        (("--settings", "linear:1", "linear:1.0"), "settings linear:1 and linear:1.0 are the same"),
        ((*ONE, "--content-judge", "gpt"), "give its --judge-url"),
        ((*ONE, "--judge-url", "http://127.0.0.1:9/v1"), "give --content-judge or --quality-judges"),
        ((*ONE, "--count", "1"), "count is 1"),
        ((*ONE, "--features", "nowhere"), "features is 'nowhere'; accepted: efficientnet-lite0"),
        ((*ONE, "--retrain", "nowhere/at"), "nowhere/at"),
        ((*ONE, "--retrain", "BUNDLE"), "is made of several checkpoints"),
        ((*ONE, "--forget", "digit 12"), "class 'digit 12' is not known"),
    ],
)
def test_invalid_arguments_give_one_line_error(image_world, pictures, tmp_path, capsys, more, message):
    more = tuple(str(image_world.bundle) if word == "BUNDLE" else word for word in more)
    assert main(command(image_world, pictures, tmp_path / "out", *more)) == 2
    printed = capsys.readouterr().err.strip().splitlines()
    assert message in printed[-1]
    assert not [line for line in printed if "Traceback" in line]
    assert not (tmp_path / "out").exists()


def test_image_evaluation_rejects_plain_model(image_world, pictures, tmp_path, capsys):
    options = command(image_world, pictures, tmp_path / "out")
    options[2] = str(image_world.folder / "target")
    assert main(options) == 2
    assert "is a plain gpt2 checkpoint, not a bundle" in capsys.readouterr().err
    tiny_model("gpt2", 45, 0).save_pretrained(tmp_path / "text")
    options[2] = str(tmp_path / "text")
    assert main(options) == 2


def test_rules_have_paper_names():
    assert rule_name(Steering(alpha=1.5)) == ("Linear", "α=1.5")
    assert rule_name(Steering("rank", k=20)) == ("Rank", "k=20")


def setting(method, config, retain, forget):
    figures = {"retain": retain, "forget": forget}
    return SettingResult(method, config, content=figures, accuracy=figures, distances={})


def test_mildest_setting_reaching_both_goals_is_recommended():
    baseline = setting("Baseline", "", [1.0] * 19 + [0.0], [1.0] * 20)
    weak = setting("Linear", "α=1", [1.0] * 20, [1.0] * 4 + [0.0] * 16)
    good = setting("Linear", "α=2", [1.0] * 19 + [0.0], [1.0] * 3 + [0.0] * 17)
    harsh = setting("Linear", "α=5", [1.0] * 18 + [0.0] * 2, [0.0] * 20)
    retrained = setting("Retrain", "", [1.0] * 20, [0.0] * 20)
    assert [reaches_aims(one, baseline) for one in (weak, good, harsh, retrained)] == [False, True, False, True]
    assert recommend([baseline, retrained, weak, harsh, good]) is good
    assert recommend([baseline, retrained, weak, harsh]) is None


def test_demo_digits_to_forget_depend_on_seed():
    result = {demo_digits(seed).forget for seed in range(3)}
    assert len(result) == 3
    for forget in result:
        assert len(forget) == 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_image_demo_forgets_half_of_the_digits_only(seed, capsys):
    assert main(["image", "demo", "--seed", str(seed), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reached"]
