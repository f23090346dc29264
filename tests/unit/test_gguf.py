"""GGUF headers, written here byte by byte: what a whole file says, that a damaged one is told, what loading takes."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dmconfig.errors import Code, Problem, SourceError
from dmconfig.footprint import fp32_patterns
from dmconfig.gguf import GGML_TYPES, LOADABLE_TYPES, GGUFMetadata, loaded_bytes, read_gguf, read_gguf_metadata
from dmconfig.weights import TensorInfo
from tests.gguf_files import (
    ARRAY,
    BITS,
    BOOL,
    F64,
    FORMS,
    NUMBERS,
    STRING,
    U8,
    U32,
    U64,
    Tensors,
    gguf,
    head,
    info,
    nbytes,
    padding,
    pair,
    text,
)  # fmt: skip


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    """Write bytes as a file in a folder of its own."""
    file = tmp_path / "transformer" / "flux.gguf"
    file.parent.mkdir()

    def write_bytes(data: bytes) -> Path:
        file.write_bytes(data)
        return file

    return write_bytes


def problem_of(file: Path) -> Problem:
    with pytest.raises(SourceError) as raised:
        read_gguf(file)
    (problem,) = raised.value.problems
    return problem


TWO: Tensors = {"a.weight": ("Q4_K", (3, 512)), "a.bias": ("F32", (3,))}
NAMED = [pair("general.architecture", STRING, "flux"), pair("general.file_type", U32, 15)]


# Whole files


def test_read_gguf_names_types_shapes_and_bytes(write: Callable[[bytes], Path]) -> None:
    """Shapes read as torch has them, bytes are those of the blocks, and the file says what it is."""
    file = write(gguf(TWO, NAMED))
    assert read_gguf(file) == (
        TensorInfo("a.weight", "Q4_K", (3, 512), 3 * 2 * 144),
        TensorInfo("a.bias", "F32", (3,), 12),
    )
    assert read_gguf_metadata(file) == GGUFMetadata(architecture="flux", file_type=15)


@pytest.mark.parametrize("dtype", BITS)
def test_read_gguf_every_type_has_its_published_bits(write: Callable[[bytes], Path], dtype: str) -> None:
    """Bytes of 5 rows of 512 elements, from the bits per element that are published of the type."""
    (tensor,) = read_gguf(write(gguf({"w": (dtype, (5, 512))})))
    assert (tensor.dtype, tensor.nbytes) == (dtype, 5 * 512 * BITS[dtype] / 8)


def test_read_gguf_knows_the_types_of_the_format() -> None:
    """The table is complete but for the numbers that the format has removed."""
    assert {name for name, _, _ in GGML_TYPES.values()} == set(BITS)
    assert set(range(40)) - set(GGML_TYPES) == {4, 5, 31, 32, 33, 36, 37, 38}
    assert set(BITS) > LOADABLE_TYPES


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [1, 8, 32, 4096])
def test_read_gguf_other_versions_and_alignments(write: Callable[[bytes], Path], version: int, alignment: int) -> None:
    """Versions 2 and 3 read alike, at the alignment that the file names."""
    pairs = [pair("general.alignment", U32, alignment)]
    file = write(gguf(TWO, pairs, version=version, alignment=alignment))
    assert [tensor.name for tensor in read_gguf(file)] == ["a.weight", "a.bias"]


def test_read_gguf_steps_over_values_of_every_type(write: Callable[[bytes], Path]) -> None:
    """Whatever stands before them, the tensors are found; the types that are asked for are read."""
    scalars = [pair(f"x.{kind}", kind, 1) for kind in FORMS]
    arrays = [pair(f"y.{kind}", ARRAY, (kind, [1, 0, 1])) for kind in FORMS]
    others = [
        pair("z.text", STRING, "ü" * 1000),
        pair("z.texts", ARRAY, (STRING, ["", "one", "two"])),
        pair("z.nested", ARRAY, (ARRAY, [(U8, [1, 2]), (ARRAY, [(STRING, ["deep"])]), (F64, [])])),
        pair("z.empty", ARRAY, (STRING, [])),
    ]
    file = write(gguf(TWO, [*scalars, *arrays, *others, *NAMED]))
    assert [tensor.nbytes for tensor in read_gguf(file)] == [864, 12]
    assert read_gguf_metadata(file).architecture == "flux"


def test_read_gguf_is_in_the_order_of_the_bytes(write: Callable[[bytes], Path]) -> None:
    """The header may name tensors in any order; a scalar and an empty one are tensors too."""
    infos = [info("last", 0, (4,), 64), info("first", 0, (), 0), info("none", 0, (0, 8), 32), info("mid", 24, (7,), 32)]
    header = head(4, 0) + b"".join(infos)
    file = write(header + padding(len(header)) + bytes(64 + 16))
    assert [(tensor.name, tensor.shape, tensor.nbytes) for tensor in read_gguf(file)] == [
        ("first", (), 4), ("none", (0, 8), 0), ("mid", (7,), 7), ("last", (4,), 16),
    ]  # fmt: skip


def test_read_gguf_without_tensors_says_nothing(write: Callable[[bytes], Path]) -> None:
    """A file of metadata alone is whole; what it does not say is None."""
    file = write(head(0, 0))
    assert read_gguf(file) == ()
    assert read_gguf_metadata(file) == GGUFMetadata(architecture=None, file_type=None)


def test_read_gguf_takes_five_dimensions(write: Callable[[bytes], Path]) -> None:
    """The kernel of a 3D convolution, which converters of video models write although ggml computes with 4."""
    (tensor,) = read_gguf(write(gguf({"patch_embedding.weight": ("F16", (8, 4, 1, 2, 2))})))
    assert tensor == TensorInfo("patch_embedding.weight", "F16", (8, 4, 1, 2, 2), 256)


def test_read_gguf_reads_no_weight(write: Callable[[bytes], Path]) -> None:
    """The header of a file of 60 GB takes no more memory than that of a small one."""
    tensors: Tensors = {f"blocks.{number}.weight": ("Q8_0", (1 << 15, 1 << 15)) for number in range(53)}
    infos, offset = b"", 0
    for name, (dtype, shape) in tensors.items():
        infos += info(name, NUMBERS[dtype], shape, offset)
        offset += nbytes(dtype, shape)
    header = head(len(tensors), 0) + infos
    file = write(header)
    with file.open("r+b") as stream:
        stream.truncate(len(header) + len(padding(len(header))) + offset)
    tracemalloc.start()
    found = read_gguf(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(tensor.nbytes for tensor in found) == offset > 60_000_000_000
    assert peak < 500_000


# Damaged files


def test_read_gguf_of_a_file_cut_anywhere_says_truncated(write: Callable[[bytes], Path]) -> None:
    """Whichever byte a download ended at, short of the filling after the last tensor, it is told, never taken."""
    whole = gguf(TWO, NAMED)
    file = write(whole)
    for length in reversed(range(len(whole))):
        os.truncate(file, length)
        if length >= len(whole) - len(padding(12)):
            assert len(read_gguf(file)) == 2
            continue
        problem = problem_of(file)
        assert problem.code is Code.WEIGHTS_CORRUPT
        assert "is truncated" in problem.what


def test_read_gguf_of_a_file_with_any_byte_changed_never_breaks(write: Callable[[bytes], Path]) -> None:
    """A changed byte is told as damage, or leaves a file that can be read: no other error, no long search."""
    whole = gguf(TWO, [*NAMED, pair("a", ARRAY, (ARRAY, [(STRING, ["x", "y"])])), pair("b", BOOL, 1)])
    file = write(whole)
    header_bytes = len(whole) - 864 - 32
    codes = []
    with file.open("r+b", buffering=0) as stream:
        for position, original in enumerate(whole[:header_bytes]):
            for change in (0x01, 0x80, 0xFF):
                os.pwrite(stream.fileno(), bytes([original ^ change]), position)
                try:
                    read_gguf(file)
                except SourceError as error:
                    codes.append(error.problems[0].code)
            os.pwrite(stream.fileno(), bytes([original]), position)
    assert set(codes) == {Code.WEIGHTS_CORRUPT}
    assert len(codes) > header_bytes


ONE = info("w", 0, (8,), 0)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"PK\x03\x04 a zip", r"is no GGUF file, or corrupt: it begins with b'PK\x03\x04', not b'GGUF'"),
        (b"", "is truncated: it ends within its first 4 bytes"),
        (b"version https://git-lfs.github.com/spec/v1", "is a Git LFS pointer, not the weights themselves"),
        (head(0, 0, version=1), "is a GGUF file of version 1; versions 2 and 3 are read"),
        (head(0, 0, version=3 << 24), "is a big-endian GGUF file; little-endian ones are read"),
        (head(2**63, 0), f"is corrupt: its header claims {2**63} tensors, at most 65536 make sense"),
        (head(0, 2**32), f"is corrupt: its header claims {2**32} keys, at most 65536 make sense"),
        (
            head(0, 1) + pair("k" * 65536, U8, 1),
            "is corrupt: a key in its header has 65536 bytes, at most 65535 make sense",
        ),
        (head(0, 1) + pair(b"\xff", U8, 1), "is corrupt: a key in its header is not UTF-8 text"),
        (head(0, 1) + pair("k", STRING, b"\xff"), "is corrupt: the value of 'k' in its header is not UTF-8 text"),
        (head(0, 1) + text("k") + struct.pack("<I", 13), "is corrupt: 'k' in its header has the unknown type 13"),
        (head(0, 1) + pair("k", BOOL, 2), "is corrupt: 'k' in its header is neither true nor false but 2"),
        (head(0, 2) + pair("k", U8, 1) * 2, "is corrupt: its header has the key 'k' twice"),
        (
            head(0, 1) + text("k") + struct.pack("<IIQ", ARRAY, 13, 1),
            "is corrupt: the array 'k' in its header has items of the unknown type 13",
        ),
        (
            head(0, 1) + text("k") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 100,
            "is corrupt: the array 'k' in its header nests too deep",
        ),
        (
            head(0, 1) + pair("general.alignment", U32, 24),
            "is corrupt: general.alignment in its header is 24, not a power of two",
        ),
        (
            head(0, 1) + pair("general.alignment", STRING, "32"),
            "is corrupt: general.alignment in its header is '32', not a power of two",
        ),
        (
            head(0, 1) + pair("general.architecture", U8, 1),
            "is corrupt: general.architecture in its header is no text, or general.file_type no number",
        ),
        (head(1, 0) + info("w", 4, (8,), 0), "is corrupt: tensor 'w' has the unknown ggml type 4"),
        (head(1, 0) + info("w", 0, (1,) * 9, 0), "is corrupt: tensor 'w' has 9 dimensions"),
        (
            head(1, 0) + info("w", 12, (2, 128), 0),
            "is corrupt: tensor 'w' has rows of 128 elements, Q4_K has blocks of 256",
        ),
        (head(1, 0) + info(b"\xff", 0, (8,), 0), "is corrupt: the name of a tensor in its header is not UTF-8 text"),
        (head(2, 0) + ONE + ONE, "is corrupt: its header has the tensor 'w' twice"),
        (
            head(2, 0) + ONE + info("v", 0, (8,), 0) + bytes(64),
            "is corrupt: tensor 'v' begins at byte 0 of its data, before the place of tensor 'w' ends at 32",
        ),
        (
            head(2, 0) + ONE + info("v", 0, (8,), 96) + bytes(192),
            "is corrupt: bytes 32 to 96 of its data belong to no tensor",
        ),
        (head(1, 0) + info("w", 0, (8,), 16) + bytes(96), "is corrupt: bytes 0 to 16 of its data belong to no tensor"),
        (
            head(1, 0) + info("w", 0, (2**40, 2**63), 0) + bytes(64),
            "is truncated: its header describes 36893488147419103232.0 TiB, the file holds 129 B",
        ),
        (gguf({"w": ("F32", (8,))}) + b"\0", "is corrupt: its header describes 96 B, the file holds 97 B"),
        (gguf({"w": ("F32", (8,))})[:-1], "is truncated: its header describes 96 B, the file holds 95 B"),
        (head(0, 0) + bytes(9), "is corrupt: its header describes 24 B, the file holds 33 B"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)  # fmt: skip
def test_read_gguf_says_what_is_wrong(write: Callable[[bytes], Path], data: bytes, what: str) -> None:
    """Every rule of the format that a file can break, in words."""
    file = write(data)
    problem = problem_of(file)
    assert problem.code is Code.WEIGHTS_CORRUPT
    assert problem.what == f"weights file transformer/flux.gguf {what}"
    assert problem.origin == str(file)


def test_read_gguf_says_what_to_do(write: Callable[[bytes], Path], tmp_path: Path) -> None:
    """A broken download, a file of another kind, a pointer and a file that is absent have each a remedy."""
    interrupted = problem_of(write(gguf(TWO)[:100]))
    assert interrupted.why == "the download was interrupted, or is still running"
    assert interrupted.fix == "download it again"
    assert problem_of(write(head(0, 0, version=1))).fix == "convert it to GGUF version 3, little endian"
    assert problem_of(write(b"version https://git-lfs")).fix == "run git lfs pull, or download it again"
    absent = problem_of(tmp_path / "nothing.gguf")
    assert absent.code is Code.WEIGHTS_MISSING
    assert absent.what.endswith("nothing.gguf cannot be read: No such file or directory")


@pytest.mark.parametrize(
    "claim",
    [
        head(0, 1) + text("k") + struct.pack("<IQ", STRING, 2**62),
        head(0, 1) + text("k") + struct.pack("<IIQ", ARRAY, U64, 2**60),
        head(0, 1) + text("k") + struct.pack("<IIQQ", ARRAY, STRING, 2**62, 2**62),
        head(0, 1) + struct.pack("<Q", 2**63),
        head(65536, 0) + struct.pack("<Q", 65535),
    ],
    ids=["text", "array", "texts", "key", "tensor"],
)
def test_read_gguf_claims_take_no_memory(write: Callable[[bytes], Path], claim: bytes) -> None:
    """Lengths without the bytes behind them are refused before reading, also in a file that is long enough on paper."""
    file = write(claim)
    for file_bytes in (len(claim), 1 << 40):
        with file.open("r+b") as stream:
            stream.truncate(file_bytes)
        tracemalloc.start()
        problem = problem_of(file)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert problem.code is Code.WEIGHTS_CORRUPT
        assert peak < 5_000_000


def test_read_gguf_of_a_header_without_end_is_refused(write: Callable[[bytes], Path]) -> None:
    """A file that is long enough for a header of gigabytes is no reason to step through one."""
    claim = head(0, 1) + text("k") + struct.pack("<IIQ", ARRAY, U64, 2**32)
    file = write(claim)
    os.truncate(file, len(claim) + 8 * 2**32)
    what = "weights file transformer/flux.gguf is corrupt: its header would take more than 67108864 bytes"
    assert problem_of(file).what == what


# What loading takes


def test_loaded_bytes_casts_what_is_not_quantized() -> None:
    """By hand: blocks and BF16 as stored, F32 and F16 in the dtype asked for, what is kept in float32 decoded to it."""
    tensors = [
        TensorInfo("a.weight", "Q4_K", (2, 256), 288),
        TensorInfo("b.weight", "BF16", (10,), 20),
        TensorInfo("c.weight", "F32", (100,), 400),
        TensorInfo("d.weight", "F16", (1000,), 2000),
        TensorInfo("norm.weight", "Q8_0", (1, 32), 34),
        TensorInfo("norm.bias", "F16", (5,), 10),
    ]
    assert loaded_bytes(tensors, dtype="float16") == 288 + 20 + 200 + 2000 + 34 + 10
    assert loaded_bytes(tensors, dtype="float32") == 288 + 20 + 400 + 4000 + 34 + 20
    patterns = fp32_patterns(library="diffusers", dtype="bfloat16", keep=["norm"], keep_strict=None)
    assert loaded_bytes(tensors, dtype="bfloat16", keep_in_fp32=patterns) == 288 + 20 + 200 + 2000 + 128 + 20


def test_loaded_bytes_refuses_what_diffusers_refuses() -> None:
    """Types that diffusers has no decoder for are named, all of them."""
    tensors = [TensorInfo("a", "Q8_K", (256,), 292), TensorInfo("b", "I32", (1,), 4), TensorInfo("c", "F32", (1,), 4)]
    with pytest.raises(ValueError, match=r"^diffusers does not load tensors of ggml type I32, Q8_K$"):
        loaded_bytes(tensors, dtype="float16")


def test_reading_imports_no_torch() -> None:
    """Reading GGUF stays light."""
    code = (
        "import sys, dmconfig.gguf\n"
        "assert not {'torch', 'diffusers', 'transformers', 'numpy', 'gguf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Held against the gguf package and diffusers, where they are


def test_types_equal_those_of_the_gguf_package() -> None:
    """Numbers, names and blocks are those of ggml's own reader."""
    package = pytest.importorskip("gguf")
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in package.GGML_QUANT_SIZES.items()}
    assert {number: theirs[number] for number in GGML_TYPES} == GGML_TYPES


def test_read_gguf_equals_the_reader_of_the_gguf_package(write: Callable[[bytes], Path]) -> None:
    """Names, types, shapes and bytes are those of ggml's own reader, on a tensor of every type."""
    package = pytest.importorskip("gguf")
    shapes = {f"{dtype}.weight": (dtype, (3, 512)) for dtype in BITS}
    file = write(gguf(shapes, NAMED))
    theirs = [
        TensorInfo(each.name, each.tensor_type.name, tuple(reversed(each.shape.tolist())), int(each.n_bytes))
        for each in package.GGUFReader(file).tensors
    ]
    assert list(read_gguf(file)) == theirs


def stored_as(position: int, shape: Sequence[int]) -> str:
    """Choose a type for a tensor: blocks where rows and rank allow, each kind in turn."""
    blocks = ("Q8_0", "Q4_0", "Q5_1", "IQ4_NL", "BF16", "F16", "F32")
    plain = ("BF16", "F16", "F32")
    kinds = blocks if len(shape) == 2 and shape[-1] % 32 == 0 else plain
    return kinds[position % len(kinds)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("class_name", ["FluxTransformer2DModel", "WanTransformer3DModel"])
def test_loaded_bytes_equals_what_diffusers_holds(
    write: Callable[[bytes], Path], tmp_path: Path, class_name: str, dtype: str
) -> None:
    """To the byte what from_single_file leaves in memory, for a class without and one with layers kept in float32."""
    pytest.importorskip("gguf")
    diffusers = pytest.importorskip("diffusers")
    torch = pytest.importorskip("torch")
    configs: dict[str, dict[str, Any]] = {
        "FluxTransformer2DModel": {
            "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
            "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32,
            "axes_dims_rope": [4, 4, 8], "guidance_embeds": True,
        },
        "WanTransformer3DModel": {
            "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "text_dim": 32,
            "freq_dim": 32, "ffn_dim": 64, "num_layers": 1, "rope_max_seq_len": 32,
        },
    }  # fmt: skip
    cls = getattr(diffusers, class_name)
    shapes = {name: tuple(tensor.shape) for name, tensor in cls(**configs[class_name]).state_dict().items()}
    tensors = {name: (stored_as(position, shape), shape) for position, (name, shape) in enumerate(shapes.items())}
    file = write(gguf(tensors, NAMED))
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": class_name, **configs[class_name]}))
    compute = getattr(torch, dtype)
    quantization = diffusers.GGUFQuantizationConfig(compute_dtype=compute)
    module = cls.from_single_file(
        str(file), config=str(tmp_path), quantization_config=quantization, torch_dtype=compute
    )
    held = sum(tensor.nbytes for tensor in module.state_dict().values())
    keep = cls._keep_in_fp32_modules
    patterns = fp32_patterns(library="diffusers", dtype=dtype, keep=keep, keep_strict=None)
    read = read_gguf(file)
    assert loaded_bytes(read, dtype=dtype, keep_in_fp32=patterns) == held
    assert (loaded_bytes(read, dtype=dtype) < held) is (class_name == "WanTransformer3DModel")
