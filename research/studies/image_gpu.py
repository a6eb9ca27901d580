"""Images at 32×32 from models that need a GPU: letters, digits and shapes in many fonts and colours.

A target of 55 million parameters and auxiliaries of 5 million are trained from random weights on rendered images; half
of the forty classes are forgotten. Prints the paper's two tables, and writes the report with samples.

    python -m research.studies.image_gpu [--seed 0] [--images 1500] [--epochs 30] [--count 25] [--output runs/image-gpu]
    python -m research.studies.image_gpu --small      a smoke test on a CPU, in minutes
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import string
import time
from pathlib import Path

SIDE, PATCH, CODES = 32, 4, 1024
SHAPES = ("disc", "square", "triangle", "star")
# Few colours: each pair needs its own codes for the same edge.
PAPERS = ((245, 245, 240), (28, 28, 36))
INKS = ((214, 60, 50), (40, 120, 210), (60, 165, 85), (235, 165, 30), (150, 80, 190), (128, 128, 128))
FONTS = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSerif",
    "DejaVuSerif-Bold", "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic",
)  # fmt: skip


def render(name, generator):
    """Render one image of a class: a random font, size, tilt, position and two colours."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    large = 4 * SIDE
    paper, ink = generator.choice(PAPERS), generator.choice(INKS)
    image = Image.new("RGB", (large, large), paper)
    mask = Image.new("L", (large, large), 0)
    draw = ImageDraw.Draw(mask)
    middle, radius = large / 2, large * generator.uniform(0.28, 0.4)
    if name in SHAPES:
        if name == "disc":
            draw.ellipse((middle - radius, middle - radius, middle + radius, middle + radius), fill=255)
        else:
            corners = {"square": 4, "triangle": 3, "star": 10}[name]
            reach = [radius * (0.45 if name == "star" and corner % 2 else 1.0) for corner in range(corners)]
            turns = [2 * math.pi * corner / corners - math.pi / 2 for corner in range(corners)]
            draw.polygon(
                [(middle + r * math.cos(t), middle + r * math.sin(t)) for r, t in zip(reach, turns, strict=True)],
                fill=255,
            )
    else:
        fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
        font = ImageFont.truetype(fonts / f"{generator.choice(FONTS)}.ttf", round(2.2 * radius))
        draw.text((middle, middle), name, fill=255, font=font, anchor="mm")
    tilt = generator.uniform(-15, 15)
    shift = (generator.uniform(-0.08, 0.08) * large, generator.uniform(-0.08, 0.08) * large)
    mask = mask.rotate(tilt, resample=Image.Resampling.BILINEAR, translate=shift)
    image.paste(Image.new("RGB", (large, large), ink), mask=mask)
    return image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def material_of(given):
    """Rendered images with their codes; half of the classes are forgotten."""
    import numpy
    import torch

    from divdec_research.images.codecs import PatchCodec
    from divdec_research.images.demo import ImageMaterial

    names = [*string.ascii_uppercase, *string.digits, *SHAPES]
    generator = random.Random(given.seed)
    labels = [index for index in range(len(names)) for _ in range(given.images)]
    arrays = [numpy.asarray(render(names[index], generator)) for index in labels]
    images = torch.from_numpy(numpy.stack(arrays)).permute(0, 3, 1, 2).float() / 255
    codec = PatchCodec.fit(images, PATCH, CODES, given.seed)
    return ImageMaterial.of(images, labels, names, codec, given.seed)


def recipe_of(given):
    """Sizes and training: the pair takes a tenth of the base's rate for ten passes, as in the paper."""
    from divdec.training.settings import TrainingSettings
    from divdec_research.images.demo import ImageRecipe
    from divdec_research.images.training import PAPER_SHARE
    from divdec_research.world.models import Shape

    target, auxiliary = Shape(640, 11, 10, 2560), Shape(256, 6, 8, 1024)
    if given.small:
        target, auxiliary = Shape(96, 2, 4, 384), Shape(48, 2, 4, 192)
    large, small = (3e-4, 1e-3) if not given.small else (2e-3, 3e-3)
    common = {"batch_size": 64, "warmup": 0.05, "weight_decay": 0.05}
    return ImageRecipe(
        target=target,
        auxiliary=auxiliary,
        target_training=TrainingSettings(epochs=given.epochs, learning_rate=large, **common),
        retain_training=TrainingSettings(epochs=given.epochs, learning_rate=small, **common),
        forget_training=TrainingSettings(epochs=10.0, learning_rate=PAPER_SHARE * small, batch_size=64, warmup=0.05),
    )


def main():
    """Render, train, draw, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=1500, help="of each class")
    parser.add_argument("--epochs", type=float, default=30.0)
    parser.add_argument("--count", type=int, default=25, help="images drawn of each class and setting")
    parser.add_argument("--output", default="runs/image-gpu")
    parser.add_argument("--small", action="store_true", help="models of a CPU's size, few images")
    given = parser.parse_args()
    if given.small:
        given.images, given.epochs, given.count = 40, 4.0, 4

    import torch

    from divdec.cli.loading import quiet
    from divdec.runs import write_json
    from divdec.steering import Steering
    from divdec_research.images.demo import accuracy, train_images
    from divdec_research.images.report import evaluate_candidates, write_results
    from divdec_research.images.results import tabulate
    from divdec_research.images.settings import SamplingSettings

    quiet()
    started = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    output = Path(given.output) / f"seed-{given.seed}"
    output.mkdir(parents=True, exist_ok=True)
    material = material_of(given)
    error = (material.codec.decode(material.codec.encode(material.images[:512])) - material.images[:512]).square()
    print(f"{len(material.images)} images rendered, codec's error {error.mean().sqrt():.3f}; {name}")
    models = train_images(material, recipe_of(given), given.seed, output / "models", print)
    rules = [Steering(alpha=alpha) for alpha in (0.5, 1.0, 2.0, 5.0)]
    rules += [Steering("rank", k=k) for k in (20, 100, 250, 512)]
    benchmark = material.benchmark(given.count, SamplingSettings(batch_size=500, seed=given.seed))
    candidates = models.candidates(material.layout, rules, device)
    results = evaluate_candidates(benchmark, candidates, output)
    held_out = benchmark.classifier.held_out
    lead = (
        f"Letters, digits and shapes of {SIDE}×{SIDE} pixels; {material.forgotten} are forgotten. {name}. The "
        f"classifier is right on {held_out.accuracy:.1%} of {held_out.images} images that it has not seen."
    )
    print(write_results(benchmark, candidates, results, output, lead))
    models.write_bundle(material, output / "bundle", Steering(alpha=1.0))
    content = {
        "device": name,
        "training_seconds": models.seconds,
        "held_out": dataclasses.asdict(held_out),
        "forget_accuracy": {setting.name: accuracy(setting, "forget") for setting in results},
        "retain_accuracy": {setting.name: accuracy(setting, "retain") for setting in results},
        "results": tabulate(results).json(),
        "seconds": time.perf_counter() - started,
    }
    write_json(output / "run.json", content)
    print(json.dumps({key: content[key] for key in ("device", "training_seconds", "seconds")}))


if __name__ == "__main__":
    main()
