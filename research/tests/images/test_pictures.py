"""Images as files."""

import shutil

import numpy
import pytest
import torch
from PIL import Image

from divdec import UsageError
from divdec.runs import write_bytes
from divdec_research.images.files import grid, png, read_folder


@pytest.fixture
def folder(digits, tmp_path):
    images, labels = digits
    for row in (0, 1, 40, 80):
        (tmp_path / f"digit {labels[row]}").mkdir(exist_ok=True)
        write_bytes(tmp_path / f"digit {labels[row]}" / f"{row}.png", png(images[row]))
    return tmp_path


def test_images_round_trip_through_files(folder, digits):
    images, classes, names = read_folder(folder, 1, (8, 8))
    assert names == ("digit 0", "digit 1", "digit 2")
    assert classes == [0, 0, 1, 2]
    assert torch.allclose(images, digits[0][[0, 1, 40, 80]], atol=0.5 / 255)
    coloured, _, _ = read_folder(folder, 3, (8, 8))
    assert torch.equal(coloured, images.expand(-1, 3, -1, -1))


def test_images_outside_the_class_folders_are_reported(folder, digits):
    write_bytes(folder / "loose.png", png(digits[0][0]))
    said = []
    images, _, _ = read_folder(folder, 1, (8, 8), report=said.append)
    assert len(images) == 4
    assert said == [f"note: 1 images of {folder} are left out: they are in no class's folder"]


def test_sizes(folder):
    Image.fromarray(numpy.arange(40 * 20, dtype=numpy.uint8).reshape(40, 20)).save(folder / "digit 0" / "large.png")
    with pytest.raises(UsageError, match=r"large\.png has 40×20 pixels; accepted: 8×8, or any with --resize"):
        read_folder(folder, 1, (8, 8))
    images, _, _ = read_folder(folder, 1, (8, 8), resize=True)
    assert images.shape == (5, 1, 8, 8)


def test_folders_without_images_are_rejected(folder, tmp_path):
    with pytest.raises(UsageError, match="is no folder"):
        read_folder(tmp_path / "absent", 1, (8, 8))
    (tmp_path / "empty" / "class").mkdir(parents=True)
    with pytest.raises(UsageError, match="holds no images"):
        read_folder(tmp_path / "empty", 1, (8, 8))
    shutil.rmtree(tmp_path / "empty")
    (folder / "digit 0" / "broken.png").write_bytes(b"\x89PNG\r\n")
    with pytest.raises(UsageError, match=r"broken\.png cannot be read as an image"):
        read_folder(folder, 1, (8, 8))


def test_grid_shows_every_image_in_order(digits):
    rows = [digits[0][:3], digits[0][40:42]]
    whole = grid(rows, scale=2)
    assert whole.shape == (1, 2 * (2 * 9 - 1), 2 * (3 * 9 - 1))
    second = whole[:, 18:34:2, 18:34:2]
    assert torch.equal(second, digits[0][41])
    assert (whole[:, 18:34, 36:] == 1).all()  # the second row has no third image


def test_sixteen_bit_transparent_and_rotated_images(tmp_path):
    inside = tmp_path / "one"
    inside.mkdir()
    ramp = numpy.linspace(0, 65535, 64).astype(numpy.uint16).reshape(8, 8)
    Image.fromarray(ramp).save(inside / "a.png")
    Image.fromarray(numpy.zeros((8, 8, 4), numpy.uint8)).save(inside / "b.png")  # black, and not to be seen
    turned = Image.fromarray(numpy.pad(numpy.full((4, 8), 255, numpy.uint8), ((0, 4), (0, 0))))
    exif = turned.getexif()
    exif[0x0112] = 3  # upside down
    turned.save(inside / "c.png", exif=exif)
    for channels in (1, 3):
        images, _, _ = read_folder(tmp_path, channels, (8, 8))
        assert torch.allclose(images[0, 0], torch.from_numpy(ramp.astype(numpy.float32) / 65535), atol=1 / 255)
        assert (images[1] == 1).all()
        assert (images[2, :, :4] == 0).all()
        assert (images[2, :, 4:] == 1).all()


def test_class_without_images_is_rejected_and_other_files_are_reported(folder, capsys):
    (folder / "digit 0" / "notes.txt").write_text("no image")
    said = []
    read_folder(folder, 1, (8, 8), report=said.append)
    assert len(said) == 1
    assert "1 files of" in said[0]
    (folder / "digit 9").mkdir()
    with pytest.raises(UsageError, match="digit 9 holds no images"):
        read_folder(folder, 1, (8, 8))


def test_very_long_image_is_cropped_before_resizing(folder):
    Image.new("L", (1, 40000), 7).save(folder / "digit 0" / "long.png")
    images, _, _ = read_folder(folder, 1, (8, 8), resize=True)
    assert images.shape == (5, 1, 8, 8)
