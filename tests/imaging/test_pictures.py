"""Images as files."""

import numpy
import pytest
import torch
from PIL import Image

from divdec import UsageError
from divdec.imaging.pictures import grid, read_folder, write_png


@pytest.fixture
def folder(digits, tmp_path):
    images, labels = digits
    for row in (0, 1, 40, 80):
        (tmp_path / f"digit {labels[row]}").mkdir(exist_ok=True)
        write_png(images[row], tmp_path / f"digit {labels[row]}" / f"{row}.png")
    return tmp_path


def test_images_are_read_as_they_were_written(folder, digits):
    images, classes, names = read_folder(folder, 1, (8, 8))
    assert names == ("digit 0", "digit 1", "digit 2")
    assert classes == [0, 0, 1, 2]
    assert torch.allclose(images, digits[0][[0, 1, 40, 80]], atol=0.5 / 255)
    coloured, _, _ = read_folder(folder, 3, (8, 8))
    assert torch.equal(coloured, images.expand(-1, 3, -1, -1))


def test_sizes(folder):
    Image.fromarray(numpy.arange(40 * 20, dtype=numpy.uint8).reshape(40, 20)).save(folder / "digit 0" / "large.png")
    with pytest.raises(UsageError, match=r"large\.png has 40×20 pixels; accepted: 8×8, or any with --resize"):
        read_folder(folder, 1, (8, 8))
    images, _, _ = read_folder(folder, 1, (8, 8), resize=True)
    assert images.shape == (5, 1, 8, 8)


def test_what_is_no_folder_of_images(folder, tmp_path):
    with pytest.raises(UsageError, match="is no folder"):
        read_folder(tmp_path / "absent", 1, (8, 8))
    (tmp_path / "empty" / "class").mkdir(parents=True)
    with pytest.raises(UsageError, match="holds no images"):
        read_folder(tmp_path / "empty", 1, (8, 8))
    (folder / "digit 0" / "broken.png").write_bytes(b"\x89PNG\r\n")
    with pytest.raises(UsageError, match=r"broken\.png cannot be read as an image"):
        read_folder(folder, 1, (8, 8))


def test_a_grid_holds_every_image_in_its_place(digits):
    rows = [digits[0][:3], digits[0][40:42]]
    whole = grid(rows, scale=2)
    assert whole.shape == (1, 2 * (2 * 9 - 1), 2 * (3 * 9 - 1))
    second = whole[:, 18:34:2, 18:34:2]
    assert torch.equal(second, digits[0][41])
    assert (whole[:, 18:34, 36:] == 1).all()  # the second row has no third image
