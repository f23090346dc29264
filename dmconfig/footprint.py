"""How many bytes a component takes in memory, at the dtype it will be loaded in.

Measured, not estimated: from the headers of its weights, or, where there are none, from its configs built on the
meta device. The rules by which the two libraries keep layers in float32 live here, because they decide the size.
torch is imported by ``measure_configs`` alone.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from dmconfig.errors import Code, Problem, SourceError
from dmconfig.weights import DTYPE_BITS, TensorInfo

_DTYPE_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F6_E2M3": "float6_e2m3fn",
    "F6_E3M2": "float6_e3m2fn",
    "F4": "float4_e2m1fn",
}
_FLOAT_BITS = {name: DTYPE_BITS[stored] for stored, name in _DTYPE_NAMES.items()}
FLOATS = frozenset(_FLOAT_BITS)
"""The floating dtypes of weights, by torch's names."""
_FALLBACK_DTYPE = "float32"  # what both libraries build in when nothing says otherwise

MeasuredFrom = Literal["weights", "hub", "catalogue", "configs"]


class Sizes(TypedDict):
    """The sizes of a ``Footprint``."""

    nbytes: int
    largest_leaf_bytes: int
    largest_block_bytes: int
    outside_blocks_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The memory of one component.

    ``nbytes`` counts parameters and buffers at ``dtype``, tied ones once. ``stored_dtype`` is the floating dtype
    that most bytes of the source have; ``needs_cast`` says that loading changes the dtype of some tensor, which then
    has no file to rest in; ``comes_whole``, that it can be brought neither layer by layer nor from a disk.

    The rest says what must be on a device at once when not everything is. ``largest_leaf_bytes``: the largest module's
    own tensors, without its children, beside those that the component itself owns. ``largest_block_bytes``: the
    largest member of a list of modules directly under the component (``transformer_blocks.7``), 0 without any;
    ``outside_blocks_bytes``: all that is in no such list. Buffers that are in no file come on top.
    """

    nbytes: int
    dtype: str
    stored_dtype: str
    largest_leaf_bytes: int
    largest_block_bytes: int
    outside_blocks_bytes: int
    needs_cast: bool
    measured_from: MeasuredFrom
    comes_whole: bool = False


def measure_tensors(
    tensors: Sequence[TensorInfo],
    *,
    dtype: str | None,
    keep_in_fp32: tuple[str, ...] = (),
    tied: tuple[str, ...] = (),
    measured_from: MeasuredFrom = "weights",
) -> Footprint:
    """Return what stored tensors take once loaded.

    Floating tensors are cast to dtype, float8 ones too; integers, bools and complex ones keep theirs. Buffers that
    are not stored cannot be seen here; in the pipelines of the catalogue they stay under 20 MB.

    Args:
        tensors: all tensors of the component.
        dtype: the dtype to load in; None means the one most floating bytes are stored in.
        keep_in_fp32: what ``fp32_patterns`` returned for the class and dtype.
        tied: names, or patterns of whole names, that are second names of another tensor. One is left out only if a
            tensor of the same dtype and shape under another name is stored too.

    Raises: ValueError: dtype is not a floating dtype.
    """
    stored = dominant_dtype(tensors)
    target = dtype or stored
    bits = bits_of(target)
    loaded = loaded_sizes(tensors, dtype=target, keep_in_fp32=keep_in_fp32, tied=tied)
    cast = any(_loaded_bytes(tensor, bits, keep_in_fp32) != tensor.nbytes for tensor in tensors) or target != stored
    return Footprint(
        dtype=target, stored_dtype=stored, needs_cast=cast, measured_from=measured_from, **group_sizes(loaded)
    )


def loaded_sizes(
    tensors: Sequence[TensorInfo], *, dtype: str, keep_in_fp32: tuple[str, ...] = (), tied: tuple[str, ...] = ()
) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of every stored tensor once it is loaded in dtype, tied ones once; see ``measure_tensors``.

    Raises: ValueError: dtype is not a floating dtype.
    """
    bits = bits_of(dtype)
    return ((tensor.name, _loaded_bytes(tensor, bits, keep_in_fp32)) for tensor in _without_ties(tensors, tied))


def group_sizes(tensors: Iterable[tuple[str, int]]) -> Sizes:
    """Return the sizes of a ``Footprint``, from the name and bytes of each tensor, each counted once."""
    leaves: dict[str, int] = {}
    blocks: dict[str, int] = {}
    for name, nbytes in tensors:
        leaf = name.rpartition(".")[0]
        leaves[leaf] = leaves.get(leaf, 0) + nbytes
        block = _block_of(name)
        blocks[block] = blocks.get(block, 0) + nbytes
    outside = blocks.pop("", 0)
    return {
        "nbytes": sum(leaves.values()),
        "largest_leaf_bytes": leaves.pop("", 0) + max(leaves.values(), default=0),
        "largest_block_bytes": max(blocks.values(), default=0),
        "outside_blocks_bytes": outside,
    }


def _block_of(name: str) -> str:
    """The block a tensor is in, or nothing: a member of a list of modules that the component holds directly.

    Source: diffusers hooks/group_offloading.py (_apply_group_offloading_block_level).
    """
    parts = name.split(".")
    return f"{parts[0]}.{parts[1]}" if len(parts) > 2 and parts[1].isdigit() else ""


def dominant_dtype(tensors: Iterable[TensorInfo]) -> str:
    """Return the floating dtype that most bytes are stored in (``float16``); float32 when none is floating."""
    stored_bytes: dict[str, int] = {}
    for tensor in tensors:
        if tensor.dtype in _DTYPE_NAMES:
            stored_bytes[tensor.dtype] = stored_bytes.get(tensor.dtype, 0) + tensor.nbytes
    if not stored_bytes:
        return _FALLBACK_DTYPE
    return _DTYPE_NAMES[max(stored_bytes, key=lambda name: stored_bytes[name])]


def fp32_patterns(
    *, library: str, dtype: str, keep: Iterable[str] | None, keep_strict: Iterable[str] | None
) -> tuple[str, ...]:
    """Return the patterns, for ``kept_in_fp32``, of the tensors that stay float32 when loading in dtype.

    diffusers keeps a tensor when one dotted part of its name equals an entry of keep, at every dtype. transformers
    searches an entry anywhere in the name (``*`` matches anything); keep counts for float16 only, keep_strict for
    float16 and bfloat16. Every other library's modules are built on transformers and follow its rule.

    Args:
        library: as in model_index.json.
        dtype: the dtype to load in.
        keep: the class's ``_keep_in_fp32_modules``, with those of its sub-models.
        keep_strict: likewise ``_keep_in_fp32_modules_strict``; diffusers has none.

    Source: diffusers models/model_loading_utils.py (load_model_dict_into_meta); transformers modeling_utils.py
        (PreTrainedModel._get_dtype_plan) and core_model_loading.py (build_glob_alternation).
    """
    entries = sorted(keep or ())
    if library == "diffusers":
        return tuple(rf"(?:^|\.){re.escape(entry)}(?:\.|$)" for entry in entries)
    entries = entries if dtype == "float16" else []
    if dtype in ("float16", "bfloat16"):
        entries = entries + sorted(keep_strict or ())
    return tuple(entry.replace("*", ".*") for entry in entries)


def kept_in_fp32(name: str, patterns: Iterable[str]) -> bool:
    """Return whether the tensor of this name stays float32, given what ``fp32_patterns`` returned."""
    return any(re.search(pattern, name) for pattern in patterns)


def measure_configs(folder: Path, library: str, class_name: str, dtype: str | None) -> Footprint:
    """Return what the component in folder will take, from its config.json alone.

    Builds it on the meta device: no weight is read or allocated, no code from the folder runs. Ties count once, by
    identity. Imports torch and the library. dtype None means the one config.json names, else float32; so
    ``stored_dtype`` is what the config claims and no more.

    Raises: SourceError: SIZES_UNKNOWN when the class cannot be built from the config.
        ValueError: dtype is not a floating dtype.
    """
    claimed = _claimed_dtype(folder)
    target = dtype or claimed
    bits_of(target)
    if not (folder / "config.json").is_file():
        # transformers would build its default model instead, and measure that
        raise SourceError([_not_built(folder, class_name, "there is no such file")])
    try:
        module = build_on_meta(folder, library, class_name, target)
    except Exception as error:  # code of other libraries, on a config nobody has checked: anything may come
        raise SourceError([_not_built(folder, class_name, f"{type(error).__name__}: {error}")]) from error
    sizes = group_sizes(module_bytes(module, target))
    cast = target != claimed
    return Footprint(dtype=target, stored_dtype=claimed, needs_cast=cast, measured_from="configs", **sizes)


# From tensors


def bits_of(dtype: str) -> int:
    """Return the bits of an element of a floating dtype. Raises: ValueError: it is none."""
    if dtype not in _FLOAT_BITS:
        raise ValueError(f"{dtype!r} is not a floating dtype; expected one of {', '.join(_FLOAT_BITS)}")
    return _FLOAT_BITS[dtype]


def _loaded_bytes(tensor: TensorInfo, bits: int, keep_in_fp32: tuple[str, ...]) -> int:
    if tensor.dtype not in _DTYPE_NAMES:
        return tensor.nbytes
    kept = kept_in_fp32(tensor.name, keep_in_fp32)
    return math.ceil(math.prod(tensor.shape) * (32 if kept else bits) / 8)


def _without_ties(tensors: Sequence[TensorInfo], tied: tuple[str, ...]) -> list[TensorInfo]:
    """Return the tensors that have memory of their own.

    Some files store only the second name (``lm_head.weight`` without the embedding), so a tie is believed only
    when something it can be a copy of is there.
    """
    seconds = {tensor.name for tensor in tensors if any(_is_named(tensor.name, key) for key in tied)}
    originals = {(tensor.dtype, tensor.shape) for tensor in tensors if tensor.name not in seconds}
    return [tensor for tensor in tensors if tensor.name not in seconds or (tensor.dtype, tensor.shape) not in originals]


def _is_named(name: str, key: str) -> bool:
    return name == key or re.fullmatch(key, name) is not None


# From configs


def _claimed_dtype(folder: Path) -> str:
    """Return the dtype that config.json names, or float32; a config that cannot be read is the builder's to tell."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return _FALLBACK_DTYPE
    claimed = (config.get("dtype") or config.get("torch_dtype")) if isinstance(config, dict) else None
    return claimed if isinstance(claimed, str) and claimed in _FLOAT_BITS else _FALLBACK_DTYPE


def build_on_meta(config: Path | Mapping[str, Any], library: str, class_name: str, dtype: str) -> Any:
    """Return a component as its class builds it from its config, on the meta device: without a weight.

    ``config`` is the folder that it is in, or, of classes of diffusers, the config itself.

    Raises: whatever the class raises on a config it does not understand.
    """
    return build_class_on_meta(getattr(import_library(library), class_name), config, dtype)


def build_class_on_meta(cls: Any, config: Path | Mapping[str, Any], dtype: str) -> Any:
    """Return what a class builds from a config, as ``build_on_meta``."""
    import torch

    folder = config
    with _default_dtype(dtype), torch.device("meta"):
        if not isinstance(folder, Path):
            return cls.from_config(folder)
        if hasattr(cls, "load_config"):
            return cls.from_config(cls.load_config(str(folder)))
        config = cls.config_class.from_pretrained(str(folder))
        _set_dtype(config, getattr(torch, dtype, torch.float32))
        return cls(config)


def mapped_config(
    original: Mapping[str, Any], tensors: Sequence[TensorInfo], ancestors: frozenset[str]
) -> dict[str, Any]:
    """Return the config that diffusers makes for a class from that of a model's authors. Imports diffusers.

    Args:
        original: what the authors' file says.
        tensors: those of the weights, of which diffusers looks at the shapes.
        ancestors: of the class, of which diffusers makes one.
    """
    import torch
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    mapped = next(name for name in SINGLE_FILE_LOADABLE_CLASSES if name in ancestors)
    make = SINGLE_FILE_LOADABLE_CLASSES[mapped]["config_mapping_fn"]
    shapes = {each.name: torch.empty(each.shape, device="meta") for each in tensors}
    return dict(make(original_config=copy.deepcopy(original), checkpoint=shapes))


def _set_dtype(config: Any, dtype: Any) -> None:
    """Make config and its parts ask for dtype; sub-models are built in what their config says, not in the default.

    Source: transformers modeling_utils.py (_get_dtype), which does the same before it builds.
    """
    config.dtype = dtype
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            part.dtype = dtype


_REMARKING = ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao")
"""Loggers that remark, while torchao is imported beside diffusers, on what it lacks for some kinds of card."""


def quiet_imports() -> None:
    """Keep what is remarked while the libraries are imported off the screen, for the life of the process."""
    import logging

    for name in _REMARKING:
        logging.getLogger(name).setLevel(logging.ERROR)


def import_library(library: str) -> Any:
    """Return the module that an index means by a library: one of the two, or a folder of diffusers' pipelines.

    Raises: ImportError: there is no such module.

    Source: diffusers pipelines/pipeline_loading_utils.py (get_class_obj_and_candidates): "stable_diffusion" is
    diffusers.pipelines.stable_diffusion. What has moved to ``deprecated`` is looked up there too.
    """
    quiet_imports()
    if library in ("diffusers", "transformers"):
        return importlib.import_module(library)
    places = (f"diffusers.pipelines.{library}", f"diffusers.pipelines.deprecated.{library}")
    found = next((place for place in places if importlib.util.find_spec(place) is not None), places[0])
    return importlib.import_module(found)


@contextlib.contextmanager
def _default_dtype(dtype: str) -> Iterator[None]:
    """Build under dtype, as both libraries do, so that buffers made by the constructor get it too."""
    import torch

    before = torch.get_default_dtype()
    wanted = getattr(torch, dtype, before)
    # torch refuses float8 as a default; diffusers then builds in float32 and casts afterwards
    torch.set_default_dtype(wanted if wanted.itemsize >= 2 else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def module_bytes(module: Any, dtype: str) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of every parameter and buffer, tied ones once.

    Stored tensors are cast by diffusers; transformers leaves those that the constructor made in a dtype of their
    own. Neither touches buffers that are not stored.

    Source: transformers core_model_loading.py (convert_and_load_state_dict_in_model, "Handle dtype casting").
    """
    is_diffusers = hasattr(module, "load_config")
    patterns = fp32_patterns(
        library="diffusers" if is_diffusers else "transformers",
        dtype=dtype,
        keep=module._keep_in_fp32_modules,
        keep_strict=getattr(module, "_keep_in_fp32_modules_strict", None),
    )
    stored = module.state_dict().keys()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        bits = tensor.element_size() * 8
        if name in stored and tensor.is_floating_point():
            bits = 32 if kept_in_fp32(name, patterns) else _FLOAT_BITS[dtype] if is_diffusers else bits
        yield name, math.ceil(tensor.numel() * bits / 8)


def _not_built(folder: Path, class_name: str, why: str) -> Problem:
    return Problem(
        code=Code.SIZES_UNKNOWN,
        what=f"the size of {folder.name} is unknown: {class_name} cannot be built from its config.json",
        why=why,
        fix="give its weights as safetensors files, whose headers tell the size",
        origin=str(folder / "config.json"),
    )
