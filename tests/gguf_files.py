"""GGUF files written byte by byte, free to write nonsense; by the format's description and not by our reader."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from dmconfig.gguf import GGML_TYPES

# Bits per element as the authors of the types publish them, the scales of the blocks included
BITS = {
    "F32": 32, "F16": 16, "BF16": 16, "F64": 64, "I8": 8, "I16": 16, "I32": 32, "I64": 64,
    "Q4_0": 4.5, "Q4_1": 5, "Q5_0": 5.5, "Q5_1": 6, "Q8_0": 8.5, "Q8_1": 10,
    "Q2_K": 2.625, "Q3_K": 3.4375, "Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625, "Q8_K": 9.125,
    "IQ1_S": 1.5625, "IQ1_M": 1.75, "IQ2_XXS": 2.0625, "IQ2_XS": 2.3125, "IQ2_S": 2.5625, "IQ3_XXS": 3.0625,
    "IQ3_S": 3.4375, "IQ4_NL": 4.5, "IQ4_XS": 4.25, "TQ1_0": 1.6875, "TQ2_0": 2.0625, "MXFP4": 4.25,
}  # fmt: skip
NUMBERS = {name: number for number, (name, _, _) in GGML_TYPES.items()}
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMS = {U8: "<B", I8: "<b", U16: "<H", I16: "<h", U32: "<I", I32: "<i", F32: "<f", BOOL: "<B", U64: "<Q", I64: "<q"}
FORMS[F64] = "<d"

Tensors = Mapping[str, tuple[str, Sequence[int]]]  # ggml type and shape as torch has it


# A writer, small and free to write nonsense


def text(value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value(kind: int, content: Any) -> bytes:
    if kind == STRING:
        return text(content)
    if kind == ARRAY:
        item_kind, items = content
        return struct.pack("<IQ", item_kind, len(items)) + b"".join(value(item_kind, item) for item in items)
    return struct.pack(FORMS[kind], content)


def pair(key: bytes | str, kind: int, content: Any) -> bytes:
    return text(key) + struct.pack("<I", kind) + value(kind, content)


def info(name: bytes | str, number: int, shape: Sequence[int], offset: int) -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", number, offset)


def head(tensors: int, pairs: int, *, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def padding(length: int, alignment: int = 32) -> bytes:
    return b"\0" * (-length % alignment)


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    count = BITS[dtype]
    for size in shape:
        count *= size
    assert count % 8 == 0
    return int(count) // 8


def gguf(tensors: Tensors, pairs: Sequence[bytes] = (), *, version: int = 3, alignment: int = 32) -> bytes:
    """Return a whole file; the data of its tensors are zeros."""
    infos, offset = [], 0
    for name, (dtype, shape) in tensors.items():
        infos.append(info(name, NUMBERS[dtype], shape, offset))
        offset += nbytes(dtype, shape)
        offset += len(padding(offset, alignment))
    header = head(len(tensors), len(pairs), version=version) + b"".join(pairs) + b"".join(infos)
    return header + padding(len(header), alignment) + b"\0" * offset
