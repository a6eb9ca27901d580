"""The page of steered images: what stands in it, and that its pictures are the samples."""

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image

from divdec.report.style import themed
from divdec_research.images.report import Samples, content_plot, write_images
from divdec_research.images.results import Distances, SettingResult, tabulate

CLASSES = ("cat", "dog <b>", "emu")
ASKED = [0, 1, 2, 0, 1, 0]
IMAGES = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def setting(method, config, retain, forget, distances=Distances(1.0, 2.0, 3.0)):  # noqa: B008
    accuracy = {"retain": [1.0, 1.0], "forget": [0.0, 1.0]}
    return SettingResult(method, config, {"retain": retain, "forget": forget}, accuracy, {"classifier": distances})


SETTINGS = [
    setting("Baseline", "", [0.9, 1.0], [0.9, 1.0]),
    setting("Linear", "α=1", [0.9, 0.8], [0.2, 0.3], Distances(1.5, 9.0, 2.0, ("G_F has 2 images for 64 features",))),
    setting("Linear", "α=2", [0.8, 0.8], [0.1, 0.1]),
    setting("Retrain", "", [0.9, 0.9], [0.1, 0.0]),
]


class Page(HTMLParser):
    """Open elements, pictures, and the text of cells."""

    def __init__(self, text):
        super().__init__()
        self.open, self.images, self.cells, self.addresses = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.addresses += [value for name, value in attrs.items() if name in ("src", "href", "xlink:href")]
        if tag == "img":
            self.images.append(attrs)
        elif tag not in ("meta", "br", "link"):
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "images.html"
    write_images(
        path,
        title="Digits & more",
        lead="What was generated.",
        tables={"All": tabulate(SETTINGS, ["content", "distances"]), "Content": tabulate(SETTINGS, ["content"])},
        samples=[Samples.of("Linear α=1", IMAGES, ASKED, CLASSES, {1}, each=2)],
    )
    return path.read_text()


def test_image_report_is_self_contained(text):
    page = Page(text)
    assert page.open == []
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    # A name space is no address, nor is what a plot says of its format.
    assert "http" not in re.sub(
        r'xmlns(:\w+)?="[^"]*"|<metadata>.*?</metadata>|<!DOCTYPE[^>]*>', "", text, flags=re.DOTALL
    )
    assert "Digits &amp; more" in text
    assert "Compare Fréchet distances within one column only" in text
    assert "classifier: G_F has 2 images for 64 features" in text


def test_tables(text):
    cells = Page(text).cells
    heads = ["Content", "classifier", "method", "config", "Retain\xa0↑", "Forget\xa0↓"]
    start = cells.index("Content")
    assert cells[start : start + 6] == heads
    index = cells.index("α=1")
    assert cells[index : index + 6] == ["α=1", "85% ± 5.0", "25% ± 5.0", "1.50", "9.00", "2.00"]
    # A table of one group needs no row that says which.
    assert cells.count("Content") == 1
    assert text.count('<tr class="reference') == 4


def test_report_samples_belong_to_their_class(text):
    images = Page(text).images
    assert [image["alt"] for image in images] == [
        "Linear α=1, dog <b> (to be forgotten): 2 samples",
        "Linear α=1, cat: 2 samples",
        "Linear α=1, emu: 1 samples",
    ]
    decoded = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(image["src"].partition(",")[2])))) / 255 for image in images
    ]
    first, second = (IMAGES[index, 0].numpy() for index in (1, 4))
    assert decoded[0].shape == (8, 17)
    assert np.abs(decoded[0][:, :8] - first).max() < 0.003
    assert np.abs(decoded[0][:, 9:] - second).max() < 0.003
    assert np.abs(decoded[1][:, 9:] - IMAGES[3, 0].numpy()).max() < 0.003
    assert decoded[2].shape == (8, 8)
    assert {image["class"] for image in images} == {"tiny"}


def ticks(svg):
    return re.findall(r">([^<>]+)</text>", svg)


def test_content_plot_includes_every_setting(text):
    svg = content_plot(SETTINGS)
    labels = ticks(svg)
    assert [name for name in labels if name in {setting.name for setting in SETTINGS}] == [
        "Baseline", "Linear α=1", "Linear α=2", "Retrain",
    ]  # fmt: skip
    assert labels[:6] == ["0", "20", "40", "60", "80", "100"]
    assert "probability of the class asked for, %" in labels
    assert themed(svg) in text


def test_large_images_are_downscaled():
    samples = Samples.of("Baseline", torch.rand(2, 3, 256, 256), [0, 0], CLASSES, {0})
    (row,) = samples.rows
    assert (row.width, row.tiny, row.forget) == (256, False, True)
