"""What a GGUF file holds, read from its header alone: names, ggml types, shapes, sizes; never a weight.

As strict as ``weights`` is with safetensors, and for the same reasons; damage is told in the same words. A header is
read piece by piece, and what is not needed is stepped over: however large the counts and lengths that a file claims,
no more memory is taken than a header of a sane size could need.

Source: https://github.com/ggml-org/ggml, docs/gguf.md, and the layouts of the blocks in src/ggml-common.h.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from dmconfig.errors import Problem, SourceError
from dmconfig.files import read_once
from dmconfig.footprint import kept_in_fp32
from dmconfig.weights import (
    LFS_POINTER,
    BadFileError,
    TensorInfo,
    TruncatedError,
    check_file_length,
    corrupt,
    unreadable,
)

_K = 256  # elements of a super-block, the unit of the K, IQ and TQ types

GGML_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 28: ("F64", 1, 8),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", _K, 84), 11: ("Q3_K", _K, 110), 12: ("Q4_K", _K, 144), 13: ("Q5_K", _K, 176), 14: ("Q6_K", _K, 210),
    15: ("Q8_K", _K, 292),
    16: ("IQ2_XXS", _K, 66), 17: ("IQ2_XS", _K, 74), 22: ("IQ2_S", _K, 82), 18: ("IQ3_XXS", _K, 98),
    21: ("IQ3_S", _K, 110), 19: ("IQ1_S", _K, 50), 29: ("IQ1_M", _K, 56), 20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", _K, 136), 34: ("TQ1_0", _K, 54), 35: ("TQ2_0", _K, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
"""Of every ggml type of a file, by its number: name, elements of a block, bytes of a block. Gaps are removed types."""

_CAST = frozenset({"F32", "F16"})
LOADABLE_TYPES = _CAST | {
    "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
}  # fmt: skip
"""The types that diffusers 0.42 loads; it refuses a file with another.

Source: diffusers quantizers/gguf/utils.py (SUPPORTED_GGUF_QUANT_TYPES), models/model_loading_utils.py
(load_gguf_checkpoint).
"""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
_DEFAULT_ALIGNMENT = 32

MAX_HEADER_BYTES = 2**26  # three times what the largest vocabularies of language models take
_MAX_ENTRIES = 2**16  # keys, or tensors; the largest files have a few thousand
_MAX_NAME_BYTES = 2**16 - 1
_MAX_DIMENSIONS = 8  # ggml has 4, but converters of video models write the 5 of a 3D convolution
_MAX_NESTING = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFMetadata:
    """What a file says of itself: ``general.architecture`` (``flux``) and the number in ``general.file_type``."""

    architecture: str | None
    file_type: int | None


class Stream(Protocol):
    """The bytes of a file, read forwards: an open file, or one that is elsewhere."""

    def read(self, count: int, /) -> bytes:
        """Return the next count bytes."""

    def seek(self, count: int, whence: int, /) -> int:
        """Step over count bytes; ``whence`` is 1."""


class _OtherFormatError(BadFileError):
    """The file is whole, as far as one can tell, but of a kind that is not read here."""


def read_gguf(file: Path) -> tuple[TensorInfo, ...]:
    """Return the tensors of a GGUF file (version 2 or 3, little endian), in the order of their bytes.

    ``dtype`` of a tensor is the name of its ggml type (``Q4_K``), ``shape`` is as torch has it, the fastest dimension
    last. Guarantees that the file is as long as its header says, and that tensors follow one another with no more
    between them than the alignment asks for. Reads the header only.

    Raises: SourceError: WEIGHTS_MISSING when the file cannot be read, WEIGHTS_CORRUPT when it breaks the format;
        one problem, the first found.
    """
    return _read(file)[0]


def read_gguf_metadata(file: Path) -> GGUFMetadata:
    """Return what a GGUF file says of itself. Checks and raises as ``read_gguf`` does."""
    return _read(file)[1]


def parse_gguf(stream: Stream, file_bytes: int) -> tuple[TensorInfo, ...]:
    """Return the tensors of a GGUF file of so many bytes, at whose start stream is; see ``read_gguf``.

    Raises: BadFileError: it breaks the format; ``gguf_problem`` has the words for it.
    """
    return _parse(_Header(stream, file_bytes), file_bytes)[0]


def gguf_problem(file: Path, error: BadFileError) -> Problem:
    """Return the problem of a GGUF file that breaks its format, or is of a kind that is not read."""
    problem = corrupt(file, error)
    if isinstance(error, _OtherFormatError):
        return replace(problem, fix="convert it to GGUF version 3, little endian")
    return problem


def loaded_bytes(tensors: Sequence[TensorInfo], *, dtype: str, keep_in_fp32: tuple[str, ...] = ()) -> int:
    """Return what the tensors of a GGUF file take once diffusers has loaded them.

    Quantized tensors, BF16 ones among them, stay as they are stored and are decoded layer by layer as they are used;
    F32 and F16 are cast to dtype. What the class keeps in float32 is decoded to float32 at once.

    Args:
        tensors: what ``read_gguf`` returned.
        dtype: the dtype to compute in: ``float32``, ``float16`` or ``bfloat16``.
        keep_in_fp32: what ``footprint.fp32_patterns`` returned for the class and dtype.

    Raises: ValueError: a tensor is of a type that diffusers does not load.
    Source: diffusers quantizers/gguf/gguf_quantizer.py (create_quantized_param), models/model_loading_utils.py
        (load_gguf_checkpoint, load_model_dict_into_meta).
    """
    refused = sorted({tensor.dtype for tensor in tensors} - LOADABLE_TYPES)
    if refused:
        raise ValueError(f"diffusers does not load tensors of ggml type {', '.join(refused)}")
    return sum(size for _, size in loaded_sizes_of_gguf(tensors, dtype=dtype, keep_in_fp32=keep_in_fp32))


def loaded_sizes_of_gguf(
    tensors: Sequence[TensorInfo], *, dtype: str, keep_in_fp32: tuple[str, ...] = ()
) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of every tensor once diffusers has loaded it; see ``loaded_bytes``."""
    element_bytes = {"float32": 4, "float16": 2, "bfloat16": 2}[dtype]
    return ((tensor.name, _loaded_bytes(tensor, element_bytes, keep_in_fp32)) for tensor in tensors)


def most_common_type(tensors: Sequence[TensorInfo]) -> str:
    """Return the ggml type that most bytes are stored in (``Q4_K``)."""
    stored: dict[str, int] = {}
    for tensor in tensors:
        stored[tensor.dtype] = stored.get(tensor.dtype, 0) + tensor.nbytes
    return max(stored, key=lambda name: stored[name], default="F32")


def _loaded_bytes(tensor: TensorInfo, element_bytes: int, keep_in_fp32: tuple[str, ...]) -> int:
    elements = math.prod(tensor.shape)
    if kept_in_fp32(tensor.name, keep_in_fp32):
        return elements * 4
    return elements * element_bytes if tensor.dtype in _CAST else tensor.nbytes


# The header


class _Header:
    """The bytes of a header one after the other, never past the end of the file or of what a header may take."""

    def __init__(self, stream: Stream, file_bytes: int) -> None:
        self._stream = stream
        self._file_bytes = file_bytes
        self.position = 0

    def number(self, form: str) -> Any:
        """Return the next number, of a form of ``struct``."""
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return value

    def text(self, what: str, longest: int) -> str:
        """Return the next string; ``what`` it is, for the error."""
        length = self.number("<Q")
        if length > longest:
            raise BadFileError(f"is corrupt: {what} in its header has {length} bytes, at most {longest} make sense")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadFileError(f"is corrupt: {what} in its header is not UTF-8 text") from error

    def take(self, count: int) -> bytes:
        """Return the next count bytes."""
        self._check(count)
        self.position += count
        return self._stream.read(count)

    def skip(self, count: int) -> None:
        """Step over count bytes."""
        self._check(count)
        self.position += count
        self._stream.seek(count, 1)

    def _check(self, count: int) -> None:
        end = self.position + count
        if end > self._file_bytes:
            raise TruncatedError(f"is truncated: its header goes on after byte {self._file_bytes}, where it ends")
        if end > MAX_HEADER_BYTES:
            raise BadFileError(f"is corrupt: its header would take more than {MAX_HEADER_BYTES} bytes")


@read_once
def _read(file: Path) -> tuple[tuple[TensorInfo, ...], GGUFMetadata]:
    try:
        file_bytes = file.stat().st_size
        with file.open("rb") as stream:
            return _parse(_Header(stream, file_bytes), file_bytes)
    except OSError as error:
        raise SourceError([unreadable(file, error)]) from error
    except BadFileError as error:
        raise SourceError([gguf_problem(file, error)]) from error


def _parse(header: _Header, file_bytes: int) -> tuple[tuple[TensorInfo, ...], GGUFMetadata]:
    _check_magic(header, file_bytes)
    _check_version(header.number("<I"))
    tensor_count, key_count = header.number("<Q"), header.number("<Q")
    for count, what in ((tensor_count, "tensors"), (key_count, "keys")):
        if count > _MAX_ENTRIES:
            raise BadFileError(f"is corrupt: its header claims {count} {what}, at most {_MAX_ENTRIES} make sense")
    values = dict(_without_repeats("key", (_key_and_value(header) for _ in range(key_count))))
    placed = dict(_without_repeats("tensor", (_tensor(header) for _ in range(tensor_count))))
    alignment = _alignment(values)
    ordered = sorted(placed.values(), key=lambda each: each[0])
    _check_lengths(ordered, header.position, alignment, file_bytes)
    return tuple(tensor for _, tensor in ordered), _metadata(values)


def _check_magic(header: _Header, file_bytes: int) -> None:
    start = header.take(min(len(_MAGIC), file_bytes))
    if len(start) < len(_MAGIC) and _MAGIC.startswith(start):
        raise TruncatedError(f"is truncated: it ends within its first {len(_MAGIC)} bytes")
    if start == LFS_POINTER[: len(_MAGIC)]:
        raise BadFileError("is a Git LFS pointer, not the weights themselves")
    if start != _MAGIC:
        raise BadFileError(f"is no GGUF file, or corrupt: it begins with {start!r}, not {_MAGIC!r}")


def _check_version(version: int) -> None:
    if version & 0xFFFF == 0:  # a small number, read from the wrong end
        raise _OtherFormatError("is a big-endian GGUF file; little-endian ones are read")
    if version not in _VERSIONS:
        raise _OtherFormatError(f"is a GGUF file of version {version}; versions 2 and 3 are read")


def _without_repeats(what: str, pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    found: set[str] = set()
    for name, value in pairs:
        if name in found:
            raise BadFileError(f"is corrupt: its header has the {what} {name!r} twice")
        found.add(name)
        yield name, value


def _key_and_value(header: _Header) -> tuple[str, Any]:
    key = header.text("a key", _MAX_NAME_BYTES)
    kind = header.number("<I")
    value = _value(header, key, kind)
    # what is asked for later is all that is kept
    return key, (kind, value) if key.startswith("general.") else None


def _value(header: _Header, key: str, kind: int) -> Any:
    """Return a number, a bool or a text; None for an array, which is stepped over."""
    if kind == _STRING:
        return header.text(f"the value of {key!r}", MAX_HEADER_BYTES)
    if kind == _ARRAY:
        return _skip_array(header, key, 1)
    if kind not in _SCALARS:
        raise BadFileError(f"is corrupt: {key!r} in its header has the unknown type {kind}")
    value = header.number(_SCALARS[kind])
    if kind == _BOOL and value > 1:
        raise BadFileError(f"is corrupt: {key!r} in its header is neither true nor false but {value}")
    return value


def _skip_array(header: _Header, key: str, depth: int) -> None:
    kind, count = header.number("<I"), header.number("<Q")
    if kind in _SCALARS:
        header.skip(count * struct.calcsize(_SCALARS[kind]))
        return
    if kind not in (_STRING, _ARRAY) or depth == _MAX_NESTING:
        why = "nests too deep" if kind == _ARRAY else f"has items of the unknown type {kind}"
        raise BadFileError(f"is corrupt: the array {key!r} in its header {why}")
    for _ in range(count):
        if kind == _STRING:
            header.skip(header.number("<Q"))
        else:
            _skip_array(header, key, depth + 1)


def _tensor(header: _Header) -> tuple[str, tuple[int, TensorInfo]]:
    name = header.text("the name of a tensor", _MAX_NAME_BYTES)
    dimensions = header.number("<I")
    if dimensions > _MAX_DIMENSIONS:
        raise BadFileError(f"is corrupt: tensor {name!r} has {dimensions} dimensions")
    sizes = [header.number("<Q") for _ in range(dimensions)]
    kind, offset = header.number("<I"), header.number("<Q")
    if kind not in GGML_TYPES:
        raise BadFileError(f"is corrupt: tensor {name!r} has the unknown ggml type {kind}")
    dtype, block, block_bytes = GGML_TYPES[kind]
    row = sizes[0] if sizes else 1
    if row % block:
        raise BadFileError(f"is corrupt: tensor {name!r} has rows of {row} elements, {dtype} has blocks of {block}")
    nbytes = math.prod(sizes) // block * block_bytes
    return name, (offset, TensorInfo(name, dtype, tuple(reversed(sizes)), nbytes))


def _alignment(values: dict[str, Any]) -> int:
    kind, alignment = values.get("general.alignment", (4, _DEFAULT_ALIGNMENT))
    if _SCALARS.get(kind) != "<I" or alignment == 0 or alignment & (alignment - 1):
        raise BadFileError(f"is corrupt: general.alignment in its header is {alignment!r}, not a power of two")
    return int(alignment)


def _check_lengths(
    ordered: Sequence[tuple[int, TensorInfo]], header_bytes: int, alignment: int, file_bytes: int
) -> None:
    end, before = 0, ""
    for offset, tensor in ordered:
        begin = _aligned(end, alignment)
        if offset < begin:
            raise BadFileError(
                f"is corrupt: tensor {tensor.name!r} begins at byte {offset} of its data, "
                f"before the place of tensor {before!r} ends at {begin}"
            )
        if offset > begin:
            raise BadFileError(f"is corrupt: bytes {begin} to {offset} of its data belong to no tensor")
        end, before = offset + tensor.nbytes, tensor.name
    data_begins = _aligned(header_bytes, alignment) if ordered else header_bytes
    # writers may or may not fill up the place of the last tensor
    if not data_begins + end <= file_bytes <= _aligned(data_begins + end, alignment):
        check_file_length(data_begins + end, file_bytes)


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _metadata(values: dict[str, Any]) -> GGUFMetadata:
    _, architecture = values.get("general.architecture", (_STRING, None))
    _, file_type = values.get("general.file_type", (4, None))
    if not isinstance(architecture, str | None) or not isinstance(file_type, int | None):
        raise BadFileError("is corrupt: general.architecture in its header is no text, or general.file_type no number")
    return GGUFMetadata(architecture=architecture, file_type=file_type)
