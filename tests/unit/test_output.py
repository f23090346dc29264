"""Writing pictures and films."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dmconfig.errors import Code, RunError, SpecError
from dmconfig.output import check_output, file_problems, save, write_text


def still(shade: int = 0) -> Image.Image:
    """Return a small grey picture."""
    return Image.new("RGB", (8, 8), (shade, shade, shade))


def test_one_picture_goes_to_the_path(tmp_path: Path) -> None:
    """A single image is written where asked, with its folder made."""
    file = tmp_path / "new" / "a.png"

    assert save(SimpleNamespace(images=[still(7)]), file) == [file]
    assert Image.open(file).getpixel((0, 0)) == (7, 7, 7)
    assert [entry.name for entry in file.parent.iterdir()] == ["a.png"]


def test_several_pictures_are_numbered(tmp_path: Path) -> None:
    """Of several images none is lost: each goes to a numbered file beside the path."""
    files = save(SimpleNamespace(images=[still(1), still(2)]), tmp_path / "a.png")

    assert [file.name for file in files] == ["a-1.png", "a-2.png"]
    assert [Image.open(file).getpixel((0, 0))[0] for file in files] == [1, 2]


def test_arrays_are_pictures_too(tmp_path: Path) -> None:
    """An array in 0..1 is written as the picture it holds."""
    save(SimpleNamespace(images=np.full((1, 4, 6, 3), 0.2)), tmp_path / "a.png")

    picture = Image.open(tmp_path / "a.png")
    assert picture.size == (6, 4)
    assert picture.getpixel((0, 0)) == (51, 51, 51)


@pytest.mark.parametrize(
    "frames", [[[still(n * 40) for n in range(5)]], np.random.default_rng(0).random((1, 5, 8, 8, 3))]
)
def test_a_film_keeps_its_frames(tmp_path: Path, frames: Any) -> None:
    """The frames of a film, pictures or an array, are all in the file."""
    save(SimpleNamespace(frames=frames), tmp_path / "a.webp")

    assert Image.open(tmp_path / "a.webp").n_frames == 5


def test_a_film_does_not_fit_a_still(tmp_path: Path) -> None:
    """Writing a film to a png is refused instead of keeping its first frame."""
    with pytest.raises(RunError, match=r"5 frames.*\.png holds one picture"):
        save(SimpleNamespace(frames=[[still()] * 5]), tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    """A file that cannot be written whole leaves the former one, and nothing half written."""
    file = tmp_path / "a.jpg"
    file.write_bytes(b"before")

    with pytest.raises(RunError):
        save(SimpleNamespace(images=[Image.new("RGBA", (2, 2))]), file)  # jpeg has no alpha

    assert file.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [file]


def test_a_result_without_pictures_is_refused(tmp_path: Path) -> None:
    """A pipeline that makes something else is told so."""
    with pytest.raises(RunError, match="no images and no frames"):
        save(SimpleNamespace(audios=[1]), tmp_path / "a.png")


@pytest.mark.parametrize("name", ["a", "a.mp4", "a.yaml", "folder.png", "file/a.png"])
def test_a_path_that_cannot_be_a_picture_is_refused_early(tmp_path: Path, name: str) -> None:
    """A wrong ending, a folder, and a file in the place of a folder are found before anything is loaded."""
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("")

    with pytest.raises(SpecError):
        check_output(tmp_path / name)


def test_write_text_is_whole_or_not_at_all(tmp_path: Path) -> None:
    """A new text takes the old one's place, its folder is made, and nothing else is left behind."""
    file = tmp_path / "plans" / "plan.svg"
    write_text("one", file)
    write_text("other", file)
    assert file.read_bytes() == b"other"
    assert [*file.parent.iterdir()] == [file]


def test_write_text_that_fails_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    """A folder in the file's place is an error of the output."""
    (tmp_path / "plan.svg").mkdir()
    with pytest.raises(RunError) as error:
        write_text("one", tmp_path / "plan.svg")
    (problem,) = error.value.problems
    assert (problem.code, problem.origin) == (Code.OUTPUT_NOT_WRITTEN, "--out")
    assert [*tmp_path.iterdir()] == [tmp_path / "plan.svg"]


def test_file_problems_are_all_that_is_wrong_with_a_path(tmp_path: Path) -> None:
    """An ending, a folder, and a place below a file are each refused; a new folder is not."""
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.svg").mkdir()
    assert [*file_problems(tmp_path / "new" / "plan.SVG", ".svg")] == []
    assert [problem.what for problem in file_problems(tmp_path / "folder.svg", ".svg")] == [
        f"{tmp_path / 'folder.svg'} is a folder"
    ]
    wrong = tmp_path / "file" / "plan.png"
    assert [(problem.what, problem.fix) for problem in file_problems(wrong, ".svg")] == [
        (f"{wrong} does not end in .svg", f"write --out {tmp_path / 'file' / 'plan.svg'}"),
        (f"{wrong} cannot be written: {tmp_path / 'file'} is not a folder one may write to", ""),
    ]
