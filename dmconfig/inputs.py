"""What a file can give to a pipeline's call beside words and numbers: pictures and films by path, and seeds.

Which parameters take pictures is not in any signature in a form that can be read, so it is a table here, of the names
that diffusers uses. The files are looked at when a spec is checked, and read anew for each call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dmconfig.errors import Code, Problem, nearest
from dmconfig.paths import ConfigPath
from dmconfig.resolve import Resolved

SEED = "seed"
"""The one key under ``call`` that is ours: it becomes the generator, or, as a list, one for each picture."""

PICTURES = frozenset({
    "image", "images", "input_images", "init_image", "control_image", "conditioning_image", "condtioning_image",
    "cond_image", "example_image", "original_image", "reference_image", "reference_images", "image_reference",
    "ref_image", "last_image", "ip_adapter_image", "negative_ip_adapter_image", "gligen_images", "gligen_inpaint_image",
})  # fmt: skip
MASKS = frozenset({"mask", "mask_image", "control_mask", "user_mask"})
FILMS = frozenset({
    "video", "control_video", "mask_video", "conditioning_frames", "pose_video", "face_video", "background_video",
})  # fmt: skip
BY_PATH = PICTURES | MASKS | FILMS
"""The parameters of calls that take pictures, and so a path, or a list of them, in a file."""


class Argument(NamedTuple):
    """An argument of a call, and where the file gives it."""

    path: ConfigPath
    value: Any


def arguments_at(path: ConfigPath, call: Mapping[str, Any]) -> dict[str, Argument]:
    """Return the arguments of a call section that stands at path of the file."""
    return {name: Argument((*path, name), value) for name, value in call.items()}


def call_with_files(resolved: Resolved, arguments: Mapping[str, Argument]) -> dict[str, Any]:
    """Return the values of a call's arguments, paths of pictures in full, as ``Path``; see ``opened``."""
    return {
        name: _in_folder(argument.value, resolved, argument.path) if name in BY_PATH else argument.value
        for name, argument in arguments.items()
    }


def opened(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``call_with_files`` as a call takes them: pictures and films read.

    A picture is in RGB, turned as its camera says; a mask is in grey, white where something is to be drawn; a film is
    the list of its pictures.

    Raises: OSError: a file is gone, or is no picture any more.
    """
    return {name: _opened(name, value) if name in BY_PATH else value for name, value in call.items()}


def unreadable_inputs(resolved: Resolved, arguments: Mapping[str, Argument]) -> Iterator[Problem]:
    """Yield a problem for every picture among a call's arguments that cannot be read."""
    for name, value in call_with_files(resolved, arguments).items():
        if name in BY_PATH:
            yield from _unreadable(resolved, arguments[name].path, name, value)


def _in_folder(value: Any, resolved: Resolved, path: ConfigPath) -> Any:
    """Each path starts in the folder of the file that says it: the parts of a list may come from several."""
    if isinstance(value, str):
        return resolved.folder_of(path) / Path(value).expanduser()
    is_list = isinstance(value, list)
    return [_in_folder(each, resolved, (*path, index)) for index, each in enumerate(value)] if is_list else value


def _opened(name: str, value: Any) -> Any:
    if isinstance(value, list):
        films = [_opened(name, each) for each in value]
        return [picture for film in films for picture in film] if name in FILMS and _is_pictures(value) else films
    if not isinstance(value, Path):
        return value
    return list(_frames(value, name)) if name in FILMS else _picture(value, name)


def _is_pictures(paths: list[Any]) -> bool:
    """Whether a list under a film's name is the frames of one film, not several films."""
    return all(isinstance(each, Path) and not each.is_dir() and _frame_count(each) == 1 for each in paths)


def _frames(path: Path, name: str) -> Iterator[Any]:
    """The frames of a film: of an animated picture, or of a folder, by the names of its files."""
    from PIL import Image, ImageSequence

    if path.is_dir():
        yield from (_picture(file, name) for file in _files_in(path))
        return
    with Image.open(path) as film:
        for frame in ImageSequence.Iterator(film):
            yield frame.convert("RGB")


def _picture(path: Path, name: str) -> Any:
    from PIL import Image, ImageOps

    with Image.open(path) as picture:
        return ImageOps.exif_transpose(picture).convert("L" if name in MASKS else "RGB")


def _frame_count(path: Path) -> int:
    from PIL import Image

    with Image.open(path) as picture:
        return getattr(picture, "n_frames", 1)


def _files_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))


def _unreadable(resolved: Resolved, path: ConfigPath, name: str, value: Any) -> Iterator[Problem]:
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from _unreadable(resolved, (*path, index), name, each)
        if not value:
            yield resolved.problem(Code.BAD_VALUE, path, f"{name} is an empty list", fix="name a picture, or remove it")
    elif isinstance(value, Path):
        yield from _unreadable_file(resolved, path, name, value)
    elif value is not None:
        yield resolved.problem(Code.WRONG_TYPE, path, f"{name} takes the path of a picture, not {value!r}")


def _unreadable_file(resolved: Resolved, path: ConfigPath, name: str, file: Path) -> Iterator[Problem]:
    if name in FILMS and file.is_dir():
        files = _files_in(file)
        if not files:
            yield resolved.problem(Code.INPUT_UNREADABLE, path, f"{file} holds no pictures", fix="put the frames there")
        for frame in files:
            yield from _unreadable_file(resolved, path, "", frame)
        return
    why = _why_unreadable(file)
    if why:
        takes = "a picture, an animated one, or a folder of frames" if name in FILMS else "a picture"
        yield resolved.problem(Code.INPUT_UNREADABLE, path, f"{file} {why}", fix=_advice(file, takes))


def _why_unreadable(file: Path) -> str:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file):
            return ""
    except FileNotFoundError:
        return "is not there"
    except IsADirectoryError:
        return "is a folder"
    except UnidentifiedImageError:
        return "is not a picture that can be read"
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        return f"cannot be read: {error}"


def _advice(file: Path, takes: str) -> str:
    beside = [each.name for each in file.parent.iterdir()] if file.parent.is_dir() else []
    meant = None if file.exists() else nearest(file.name, beside)
    return f"did you mean {meant!r}?" if meant else f"name {takes}; a relative path starts in {file.parent}"
