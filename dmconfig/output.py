"""Writing what a command made: pictures or films of a pipeline, drawings and pages; whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dmconfig.errors import Code, Problem, RunError, SpecError
from dmconfig.files import replacing

STILL = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"})
MOVING = frozenset({".gif", ".webp"})
_FRAME_MS = 62


def check_output(path: Path) -> None:
    """Check, before anything is loaded, that a picture can be written to path.

    Raises: SpecError: the ending is no picture's, or the folder cannot be written to.
    """
    check_writable(path, *sorted(STILL | MOVING))


def check_writable(path: Path | None, *suffixes: str) -> None:
    """Check that a file with one of these endings can be written to path; None is none to write.

    Raises: SpecError: with all that is wrong.
    """
    if path is not None and (problems := [*file_problems(path, *suffixes)]):
        raise SpecError(problems)


def file_problems(path: Path, *suffixes: str) -> Iterator[Problem]:
    """Yield why a file of one of these suffixes cannot be written to path, as far as can be known before."""
    parent = next((folder for folder in path.absolute().parents if folder.exists()), Path("/"))
    if path.suffix.lower() not in suffixes:
        fix = f"write --out {path.with_suffix(suffixes[0])}" if path.stem and len(suffixes) == 1 else ""
        yield _bad_output(f"{path} does not end in {', '.join(suffixes)}", fix)
    if path.is_dir():
        yield _bad_output(f"{path} is a folder", f"name a file in it: --out {path / f'plan{suffixes[0]}'}")
    elif not parent.is_dir() or not os.access(parent, os.W_OK):
        yield _bad_output(f"{path} cannot be written: {parent} is not a folder one may write to")


def write_text(text: str, path: Path) -> None:
    """Write a text, whole or not at all; its folder is made.

    Raises: RunError: it cannot be written.
    """
    try:
        with replacing(path) as draft:
            draft.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise RunError([_not_written(path, error)]) from error


def save(result: Any, path: Path) -> list[Path]:
    """Write the pictures or films in a pipeline's result and return the files.

    One goes to ``path``; of several each goes to a numbered file beside it. A file is there whole or not at all.

    Raises: RunError: the result has neither images nor frames, or a file cannot be written.
    """
    sequences = _sequences(result)
    if not sequences:
        what = f"the pipeline returned {type(result).__name__}, which has no images and no frames"
        raise RunError([Problem(code=Code.OUTPUT_NOT_WRITTEN, what=what)])
    if len(sequences[0]) > 1 and path.suffix.lower() not in MOVING:
        what = f"the pipeline made a film of {len(sequences[0])} frames; {path.suffix} holds one picture"
        fix = f"write it to a file ending in {' or '.join(sorted(MOVING))}"
        raise RunError([Problem(code=Code.OUTPUT_NOT_WRITTEN, what=what, fix=fix, origin="--out")])
    several = len(sequences) > 1
    files = [path.with_stem(f"{path.stem}-{n}") if several else path for n in range(1, len(sequences) + 1)]
    for file, frames in zip(files, sequences, strict=True):
        _write(frames, file)
    return files


def _sequences(result: Any) -> list[list[Any]]:
    """The result as one list of PIL pictures per still (of one picture) or film."""
    if (images := getattr(result, "images", None)) is not None:
        return [[picture] for picture in _pictures(images)]
    for name in ("frames", "videos"):  # modular pipelines say videos
        if (films := getattr(result, name, None)) is not None:
            return [_pictures(film) for film in films]
    return []


def _pictures(images: Any) -> list[Any]:
    """PIL pictures of a list of them, or of an array or tensor [n, height, width, channels] or [n, c, h, w] in 0..1."""
    from PIL import Image

    if isinstance(images, list) and all(isinstance(image, Image.Image) for image in images):
        return images
    from diffusers.image_processor import VaeImageProcessor

    if hasattr(images, "cpu"):
        images = VaeImageProcessor.pt_to_numpy(images)
    return list(VaeImageProcessor.numpy_to_pil(images))


def _write(frames: list[Any], file: Path) -> None:
    try:
        more = {"save_all": True, "append_images": frames[1:], "duration": _FRAME_MS} if len(frames) > 1 else {}
        with replacing(file) as draft:
            frames[0].save(draft, **more)
    except (OSError, ValueError) as error:
        raise RunError([_not_written(file, error)]) from error


def _bad_output(what: str, fix: str = "") -> Problem:
    return Problem(code=Code.BAD_COMMAND_LINE, what=what, fix=fix, origin="--out")


def _not_written(path: Path, error: Exception) -> Problem:
    return Problem(code=Code.OUTPUT_NOT_WRITTEN, what=f"{path} could not be written: {error}", origin="--out")
