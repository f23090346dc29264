"""What safetensors files hold, read from their headers alone: names, dtypes, shapes, sizes; never a weight.

Strict on purpose. A plan is only as true as the headers it was made from, and a damaged download must be told
before gigabytes are read, so every rule of the format is checked here and every index is held against its files.
What the figures mean in memory is the business of ``footprint``.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dmconfig.errors import Code, Problem, SourceError
from dmconfig.files import read_once
from dmconfig.units import format_bytes

DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits per element of every dtype of the format, under the names that safetensors 0.8 accepts."""

LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 100_000_000
LFS_POINTER = b"version https://git-lfs"
_NAMES_SHOWN = 5
_MAX_DIMENSIONS, _MAX_SIZE = 64, 2**63  # torch's own limits
_SPARE = 1000  # brackets in names and metadata


_VARIANT = re.compile(r"(?:diffusion_pytorch_)?model\.(?!safetensors)([\w-]+?)(?:-\d+-of-\d+)?\.safetensors")


class TensorInfo(NamedTuple):
    """One tensor as its file describes it. ``dtype`` is the format's own name (``F16``)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files that hold one component: all of its shards, by name, and the index that lists them, if any."""

    folder: Path
    files: tuple[Path, ...]
    index: Path | None
    variant: str | None
    is_pickle: bool = False


class BadFileError(Exception):
    """Carries the sentence about what is wrong with a file out of its parsing; ``read_header`` and the like turn it."""


class TruncatedError(BadFileError):
    """The file ends before what its header describes."""


@read_once
def read_header(file: Path) -> tuple[TensorInfo, ...]:
    """Return the tensors of a safetensors file, in the order of their bytes.

    Guarantees that the file is exactly as long as its header says, that every byte belongs to one tensor, and that
    every tensor has the bytes its dtype and shape call for. Reads the header only.

    Raises: SourceError: WEIGHTS_MISSING when the file cannot be read, WEIGHTS_CORRUPT when it breaks the format;
        one problem, the first found.
    Source: https://github.com/huggingface/safetensors, README "Format" and src/tensor.rs (read_metadata, validate).
    """
    try:
        return _read_header(file)
    except OSError as error:
        raise SourceError([unreadable(file, error)]) from error
    except BadFileError as error:
        raise SourceError([corrupt(file, error)]) from error


def find_weights(folder: Path, *, library: str, variant: str | None, pickled: bool = False) -> WeightFiles | None:
    """Return the safetensors files that the loaders of library would read in folder; None when there are none.

    Exact: with a variant only files of that variant count, and pickles only with ``pickled``. A library that
    is neither ``diffusers`` nor ``transformers`` (a pipeline's own module) may follow the names of either; those of
    diffusers go first. When one file and an index both exist, the one that the library prefers is returned.

    Raises: SourceError: WEIGHTS_MISSING when an index lists files that are absent (all are named),
        WEIGHTS_CORRUPT when the index itself is not one.
    Source: diffusers ModelMixin.from_pretrained, utils/hub_utils.py (_add_variant, _get_checkpoint_shard_files);
        transformers modeling_utils.py (_add_variant, _get_resolved_checkpoint_files).
    """
    for name in weight_names(library, variant, pickled=pickled):
        file = folder / name
        if not file.is_file():
            continue
        if file.suffix == ".json":
            return WeightFiles(folder, _shards(file), file, variant, pickled)
        return WeightFiles(folder, (file,), None, variant, pickled)
    return None


def pickles_in(folder: Path) -> tuple[Path, ...]:
    """Return the weights in folder that are pickles, sorted."""
    return tuple(sorted(file for end in ("bin", "pt", "pth", "ckpt") for file in folder.glob(f"*.{end}")))


def variants_in(folder: Path) -> tuple[str, ...]:
    """Return the variants of which folder has weights, sorted: ``fp16`` for ``model.fp16.safetensors``."""
    names = (_VARIANT.fullmatch(file.name) for file in folder.glob("*.safetensors"))
    return tuple(sorted({name.group(1) for name in names if name}))


def read_tensors(files: WeightFiles) -> tuple[TensorInfo, ...]:
    """Return the tensors of all files, file by file; every name occurs once, and the index agrees with the files.

    Raises: SourceError: with the problems of all files together.
    """
    problems: list[Problem] = []
    by_file: dict[Path, tuple[TensorInfo, ...]] = {}
    for file in files.files:
        try:
            by_file[file] = read_header(file)
        except SourceError as error:
            problems += error.problems
    problems += repeated_names(by_file)
    if files.index is not None:
        problems += _differences(files.index, by_file)
    if problems:
        raise SourceError(problems)
    return tuple(tensor for file in files.files for tensor in by_file[file])


# The header of one file


def _read_header(file: Path) -> tuple[TensorInfo, ...]:
    file_bytes = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            raise BadFileError("is a Git LFS pointer, not the weights themselves")
        if len(start) < LENGTH.size:
            raise TruncatedError(
                f"is truncated: a safetensors file has at least {LENGTH.size} bytes, this one has {file_bytes}"
            )
        (header_bytes,) = LENGTH.unpack_from(start)
        check_header_length(header_bytes, file_bytes)
        stream.seek(LENGTH.size)
        tensors = parse_header(stream.read(header_bytes))
    check_file_length(LENGTH.size + header_bytes + sum(tensor.nbytes for tensor in tensors), file_bytes)
    return tensors


def check_header_length(header_bytes: int, file_bytes: int) -> None:
    """Raise BadFileError or TruncatedError unless a header of this length is possible in a file of this length."""
    if header_bytes == 0:
        raise BadFileError("is corrupt: its header is empty")
    if header_bytes > MAX_HEADER_BYTES:
        raise BadFileError(
            f"is no safetensors file, or corrupt: its header would take {format_bytes(header_bytes)}, "
            f"the format allows {format_bytes(MAX_HEADER_BYTES)}"
        )
    if LENGTH.size + header_bytes > file_bytes:
        described, held = _two_sizes(LENGTH.size + header_bytes, file_bytes)
        raise TruncatedError(f"is truncated: its header alone ends at {described}, the file holds {held}")


def check_file_length(described_bytes: int, file_bytes: int) -> None:
    """Raise unless a file is exactly as long as it says: BadFileError, or TruncatedError where it is shorter."""
    described, held = _two_sizes(described_bytes, file_bytes)
    if file_bytes < described_bytes:
        raise TruncatedError(f"is truncated: its header describes {described}, the file holds {held}")
    if file_bytes > described_bytes:
        raise BadFileError(f"is corrupt: its header describes {described}, the file holds {held}")


def parse_header(text: bytes) -> tuple[TensorInfo, ...]:
    """Return the tensors that the text of a header describes. Raises: BadFileError."""
    _check_structure(text)
    header = _parse_object(text, "its header")
    _check_metadata(header.pop("__metadata__", None))
    placed = sorted(
        ((*_parse_offsets(name, entry), _parse_tensor(name, entry)) for name, entry in header.items()),
        key=lambda item: item[:2],
    )
    _check_coverage(placed)
    return tuple(tensor for _, _, tensor in placed)


def _check_structure(text: bytes) -> None:
    """Refuse a header with more lists and objects than its tensors need: each takes memory many times its text's."""
    tensors = text.count(b'"dtype"')
    if text.count(b"[") > 2 * tensors + _SPARE or text.count(b"{") > tensors + _SPARE:
        raise BadFileError("is corrupt: its header has lists or objects that belong to no tensor")


def _parse_object(text: bytes, what: str) -> dict[str, Any]:
    """Return the JSON object in text; a key that occurs twice in any of its objects is refused."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=lambda pairs: _without_repeats(pairs, what))
    except UnicodeDecodeError as error:
        raise BadFileError(f"is corrupt: {what} is not UTF-8 text") from error
    except (ValueError, RecursionError) as error:  # the latter: a header of a million opening brackets
        raise BadFileError(f"is corrupt: {what} is not JSON") from error
    if not isinstance(value, dict):
        raise BadFileError(f"is corrupt: {what} is not a JSON object")
    return value


def _without_repeats(pairs: list[tuple[str, Any]], what: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise BadFileError(f"is corrupt: {what} has the name {key!r} twice")
        found[key] = value
    return found


def _check_metadata(metadata: object) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadFileError("is corrupt: __metadata__ in its header is not a map from text to text")


def _parse_offsets(name: str, entry: object) -> tuple[int, int]:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise BadFileError(f"is corrupt: tensor {name!r} lacks its dtype, shape or data_offsets")
    offsets = entry["data_offsets"]
    if not _are_whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise BadFileError(f"is corrupt: data_offsets of tensor {name!r} are {offsets!r}, not a begin and an end")
    return offsets[0], offsets[1]


def _parse_tensor(name: str, entry: dict[str, Any]) -> TensorInfo:
    dtype, shape = entry["dtype"], entry["shape"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise BadFileError(f"is corrupt: tensor {name!r} has the unknown dtype {dtype!r}")
    if not _are_whole_numbers(shape):
        raise BadFileError(f"is corrupt: tensor {name!r} has the shape {shape!r}, not a list of whole numbers")
    if len(shape) > _MAX_DIMENSIONS or any(size >= _MAX_SIZE for size in shape):
        raise BadFileError(f"is corrupt: tensor {name!r} has a shape that no tensor has")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    begin, end = entry["data_offsets"]
    if bits != (end - begin) * 8:
        needed = f"{bits // 8} bytes" if bits % 8 == 0 else f"{bits} bits"
        raise BadFileError(
            f"is corrupt: tensor {name!r} of dtype {dtype} and shape {shape!r} takes {needed}, "
            f"its data_offsets give it {end - begin} bytes"
        )
    return TensorInfo(name, dtype, tuple(shape), end - begin)


def _are_whole_numbers(value: object) -> bool:
    # type() and not isinstance: true and false are no numbers in JSON
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_coverage(placed: Iterable[tuple[int, int, TensorInfo]]) -> None:
    covered, before = 0, ""
    for begin, end, tensor in placed:
        if begin < covered:
            raise BadFileError(
                f"is corrupt: tensor {tensor.name!r} begins at byte {begin}, before tensor {before!r} ends at {covered}"
            )
        if begin > covered:
            raise BadFileError(f"is corrupt: bytes {covered} to {begin} of its data belong to no tensor")
        covered, before = end, tensor.name


# Files, shards and indexes


def weight_names(library: str, variant: str | None, *, pickled: bool = False) -> tuple[str, ...]:
    """Return the names under which the loaders of library look for weights or their index, the preferred one first."""
    # diffusers looks for an index first, transformers for the single file
    if pickled:
        diffusers = ("diffusion_pytorch_model.bin.index.json", "diffusion_pytorch_model.bin")
        transformers = ("pytorch_model.bin", "pytorch_model.bin.index.json")
    else:
        diffusers = ("diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.safetensors")
        transformers = ("model.safetensors", "model.safetensors.index.json")
    by_library = {"diffusers": diffusers, "transformers": transformers}
    return tuple(_with_variant(name, variant) for name in by_library.get(library, diffusers + transformers))


def _with_variant(name: str, variant: str | None) -> str:
    if variant is None:
        return name
    stem, _, suffix = name.rpartition(".")
    return f"{stem}.{variant}.{suffix}"


def _shards(index: Path) -> tuple[Path, ...]:
    names = sorted(set(_read_weight_map(index).values()))
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        files = "a file that is" if len(absent) == 1 else f"{len(absent)} files that are"
        problem = Problem(
            code=Code.WEIGHTS_MISSING,
            what=f"weights index {_short(index)} lists {files} not there: {', '.join(absent)}",
            fix="download the component again; an interrupted download leaves such gaps",
            origin=str(index),
        )
        raise SourceError([problem])
    return tuple(index.parent / name for name in names)


@read_once
def _read_weight_map(index: Path) -> Mapping[str, str]:
    try:
        return parse_weight_map(index.read_bytes())
    except OSError as error:
        raise SourceError([unreadable(index, error, kind="weights index")]) from error
    except BadFileError as error:
        raise SourceError([corrupt(index, error, kind="weights index")]) from error


def parse_weight_map(text: bytes) -> dict[str, str]:
    """Return file by tensor from the text of an index. Raises: BadFileError."""
    content = _parse_object(text, "its text")
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadFileError("is corrupt: it has no weight_map from tensors to files")
    if not isinstance(content.get("metadata"), dict):
        raise BadFileError("is corrupt: it has no metadata, which the loaders require")
    plain: set[str] = set()  # few files hold thousands of tensors
    for tensor, file in weight_map.items():
        if isinstance(file, str) and (file in plain or _is_plain_name(file)):
            plain.add(file)
        else:
            raise BadFileError(f"is corrupt: it places tensor {tensor!r} in {file!r}, not a file of its folder")
    return weight_map


def _is_plain_name(file: str) -> bool:
    """Tell whether a name is one of a file in the same folder: an index must not reach outside its own."""
    return bool(file) and Path(file).name == file and "\\" not in file and file != ".."


def _differences(index: Path, by_file: Mapping[Path, tuple[TensorInfo, ...]]) -> Sequence[Problem]:
    try:
        return index_differences(index, _read_weight_map(index), by_file)
    except SourceError as error:
        return error.problems


def repeated_names(by_file: Mapping[Path, tuple[TensorInfo, ...]]) -> list[Problem]:
    """Return a problem per pair of files that hold tensors of the same name."""
    owner: dict[str, Path] = {}
    repeated: dict[tuple[Path, Path], list[str]] = {}
    for file, tensors in by_file.items():
        for tensor in tensors:
            first = owner.setdefault(tensor.name, file)
            if first != file:
                repeated.setdefault((first, file), []).append(tensor.name)
    return [
        Problem(
            code=Code.WEIGHTS_CORRUPT,
            what=f"weights files {_short(first)} and {second.name} both hold {_tensors(names)}",
            why="a tensor has one value; the loaders would take one of the two",
            fix="download the component again, or save it anew",
            origin=str(second),
        )
        for (first, second), names in repeated.items()
    ]


def index_differences(
    index: Path, weight_map: Mapping[str, str], by_file: Mapping[Path, tuple[TensorInfo, ...]]
) -> list[Problem]:
    """Return a problem per file that lacks what an index lists there, or holds what it does not."""
    listed: dict[str, list[str]] = {}
    for tensor, name in weight_map.items():
        listed.setdefault(name, []).append(tensor)
    problems = []
    for file, tensors in by_file.items():
        held, expected = {tensor.name for tensor in tensors}, listed.get(file.name, [])
        lacking = [name for name in expected if name not in held]
        extra = [tensor.name for tensor in tensors if weight_map.get(tensor.name) != file.name]
        problems += [_differs(file, index, "lacks", "lists there", lacking)] if lacking else []
        problems += [_differs(file, index, "holds", "does not list there", extra)] if extra else []
    return problems


def _differs(file: Path, index: Path, has: str, says: str, names: Sequence[str]) -> Problem:
    return Problem(
        code=Code.WEIGHTS_CORRUPT,
        what=f"weights file {_short(file)} {has} {_tensors(names)} that {index.name} {says}",
        why="index and files come from different versions, or one of them was damaged",
        fix="download the component again",
        origin=str(file),
    )


# Words


def corrupt(file: Path, error: BadFileError, *, kind: str = "weights file") -> Problem:
    """Return the problem of a file that breaks its format."""
    why = "the download was interrupted, or is still running" if isinstance(error, TruncatedError) else ""
    fix = "run git lfs pull, or download it again" if "Git LFS" in str(error) else "download it again"
    return Problem(code=Code.WEIGHTS_CORRUPT, what=f"{kind} {_short(file)} {error}", why=why, fix=fix, origin=str(file))


def unreadable(file: Path, error: OSError, *, kind: str = "weights file") -> Problem:
    """Return the problem of a file that the system does not let us read."""
    return Problem(
        code=Code.WEIGHTS_MISSING,
        what=f"{kind} {_short(file)} cannot be read: {error.strerror or error}",
        fix="check that it exists and that you may read it",
        origin=str(file),
    )


def _short(file: Path) -> str:
    """Return the file with the folder of its component; the whole path stands in the problem's ``origin``."""
    return f"{file.parent.name}/{file.name}" if file.parent.name else file.name


def _tensors(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    rest = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"tensor {shown}" if len(names) == 1 else f"{len(names)} tensors ({shown}{rest})"


def _two_sizes(one: int, other: int) -> tuple[str, str]:
    """Return both sizes for reading, to the byte when rounding would make them look alike."""
    texts = format_bytes(one), format_bytes(other)
    return texts if texts[0] != texts[1] else (f"{one} bytes", f"{other} bytes")
