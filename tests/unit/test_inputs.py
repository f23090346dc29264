"""What a file gives to a call by path: pictures, masks, films and seeds, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dmconfig.errors import SpecError
from dmconfig.inputs import arguments_at, call_with_files, opened
from dmconfig.spec import validate_spec
from tests.conftest import EXAMPLES, checked_from, document_from, resolve

HEAD = f"version: 1\npipeline: {{source: {EXAMPLES}/digits/pipeline, class: StableDiffusionInpaintPipeline}}\ncall:\n"


def picture(file: Path, colour: tuple[int, ...] = (200, 100, 50), mode: str = "RGB", **how: Any) -> Path:
    """Write a picture of one colour, 6 wide and 4 high."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (6, 4), colour if len(colour) > 1 else colour[0]).save(file, **how)
    return file


def film(file: Path, *shades: int) -> Path:
    """Write an animated picture, a frame for each shade."""
    first, *others = [Image.new("RGB", (6, 4), (shade,) * 3) for shade in shades]
    first.save(file, save_all=True, append_images=others, duration=50)
    return file


def read(call: str, folder: Path, overrides: Any = ()) -> dict[str, Any]:
    """Return the arguments of the call section in text, as a call takes them."""
    resolved = resolve(document_from(f"{HEAD}{call}", folder=folder), overrides)
    return opened(call_with_files(resolved, arguments_at(("call",), validate_spec(resolved).call)))


def problems(call: str) -> list[str]:
    """Return code, path and the first words of each problem of a call section."""
    with pytest.raises(SpecError) as raised:
        checked_from(f"{HEAD}{call}")
    return [f"{each.code} {each.path[1:]} {each.what}" for each in raised.value.problems]


def test_pictures_are_read_as_a_call_takes_them(tmp_path: Path) -> None:
    """A picture is RGB and a mask grey, whatever the file holds; words and numbers stay as they are."""
    picture(tmp_path / "in" / "a.png", (200, 100, 50, 0), "RGBA")
    picture(tmp_path / "mask.png", (255, 255, 255))
    call = read("  {image: in/a.png, mask_image: ./mask.png, prompt: mask.png, strength: 0.5}", tmp_path)
    assert (call["image"].mode, call["image"].getpixel((0, 0))) == ("RGB", (200, 100, 50))
    assert (call["mask_image"].mode, call["mask_image"].getpixel((0, 0))) == ("L", 255)
    assert (call["prompt"], call["strength"]) == ("mask.png", 0.5)


def test_a_picture_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    """A telephone writes a picture lying down, and beside it that it is to be turned."""
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    picture(tmp_path / "a.jpg", exif=exif)
    assert read("  {image: a.jpg}", tmp_path)["image"].size == (4, 6)


def test_lists_of_pictures_stay_lists(tmp_path: Path) -> None:
    """Pictures of a batch, and of several image prompts that have several pictures each."""
    for name in "abc":
        picture(tmp_path / f"{name}.png")
    call = read("  {image: [a.png, b.png], ip_adapter_image: [[a.png, b.png], c.png]}", tmp_path)
    assert [each.size for each in call["image"]] == [(6, 4), (6, 4)]
    assert [len(each) if isinstance(each, list) else 1 for each in call["ip_adapter_image"]] == [2, 1]


def test_a_film_is_its_frames_in_order(tmp_path: Path) -> None:
    """An animated picture, a folder by the names of its files, and a list of pictures are one film; others several."""
    film(tmp_path / "a.gif", 0, 120, 240)
    for index, shade in enumerate((10, 20)):
        picture(tmp_path / "frames" / f"{index:03}.png", (shade,) * 3)
    (tmp_path / "frames" / ".hidden").write_text("no picture")

    def shades(value: Any) -> Any:
        return [shades(each) if isinstance(each, list) else each.getpixel((0, 0))[0] for each in value]

    assert shades(read("  {video: a.gif}", tmp_path)["video"]) == [0, 120, 240]
    assert shades(read("  {video: frames}", tmp_path)["video"]) == [10, 20]
    assert shades(read("  {video: [frames/001.png, frames/000.png]}", tmp_path)["video"]) == [20, 10]
    assert shades(read("  {video: [a.gif, frames]}", tmp_path)["video"]) == [[0, 120, 240], [10, 20]]


def test_every_picture_that_cannot_be_read_is_named_with_its_place() -> None:
    """All at once, before anything is loaded; a folder is a film and not a picture."""
    assert problems("  image: [./digits.png, digits.yaml, digits]\n  mask_image: 5\n  control_image: x.png") == [
        f"DM350 ('image', 0) {EXAMPLES}/digits.png is not there",
        f"DM350 ('image', 1) {EXAMPLES}/digits.yaml is not a picture that can be read",
        f"DM350 ('image', 2) {EXAMPLES}/digits is a folder",
        "DM204 ('mask_image',) mask_image takes the path of a picture, not 5",
        "DM309 ('control_image',) StableDiffusionInpaintPipeline takes no argument 'control_image'",
    ]


def test_a_picture_of_nearly_that_name_is_offered(tmp_path: Path) -> None:
    """The advice is the name that is there; else where a relative path starts."""
    picture(tmp_path / "lighthouse.png")
    for name, fix in (("lighthose.png", "did you mean 'lighthouse.png'?"), ("zzz.png", f"starts in {tmp_path}")):
        with pytest.raises(SpecError) as raised:
            checked_from(f"{HEAD}  {{image: {tmp_path}/{name}, mask_image: {tmp_path}/lighthouse.png}}")
        assert fix in raised.value.problems[0].fix


def test_a_damaged_frame_of_a_film_is_named(tmp_path: Path) -> None:
    """Of a folder, each file has to be a picture; an empty one is no film."""
    picture(tmp_path / "frames" / "0.png")
    (tmp_path / "frames" / "1.png").write_bytes(b"no picture")
    (tmp_path / "none").mkdir()
    head = HEAD.replace("digits/pipeline, class: StableDiffusionInpaintPipeline", "digits/pipeline, class: %s")
    for name, what in (("frames", f"{tmp_path}/frames/1.png is not"), ("none", f"{tmp_path}/none holds no pictures")):
        with pytest.raises(SpecError, match="DM350") as raised:
            checked_from(head % "VideoToVideoSDPipeline" + f"  {{video: {tmp_path}/{name}}}")
        assert any(problem.what.startswith(what) for problem in raised.value.problems)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("seed: [1, -2, x]", ["DM204 ('seed', 1)", "DM204 ('seed', 2)"]),
        ("seed: []", ["DM204 ('seed',)"]),
        ("{seed: [1, 2], prompt: a}", ["DM308 ('seed',) there are 2 seeds, and the call of"]),
        ("{seed: [1, 2], prompt: [a, b], num_images_per_prompt: 2}", ["DM308 ('seed',) there are 2 seeds"]),
    ],
)
def test_seeds_are_checked(call: str, expected: list[str]) -> None:
    """One for all, or one for each picture."""
    found = problems(f"  {call}")
    assert [each[: len(start)] for each, start in zip(found, expected, strict=True)] == expected


@pytest.mark.parametrize("call", ["{seed: [1, 2], prompt: [a, b]}", "{seed: [1, 2], num_images_per_prompt: 2}"])
def test_a_seed_for_each_picture_is_accepted(call: str) -> None:
    """Where the file says how many there are, they agree; where the prompt comes later, nobody can tell."""
    assert checked_from(f"{HEAD}  {call}").spec.call["seed"] == [1, 2]


def test_pictures_are_read_anew_for_each_call(tmp_path: Path) -> None:
    """What a pipeline does to its input does not reach the next call."""
    picture(tmp_path / "a.png")
    resolved = resolve(document_from(f"{HEAD}  {{image: a.png}}", folder=tmp_path), ())
    call = call_with_files(resolved, arguments_at(("call",), validate_spec(resolved).call))
    first, second = opened(call)["image"], opened(call)["image"]
    assert first is not second
    assert np.array_equal(first, second)
