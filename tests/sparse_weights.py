"""Full-size pipelines that take no disk: true headers and configs, bodies that are holes.

Everything that reads headers sees a 33 GB FLUX; the file system stores a few kilobytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from dmconfig.catalog import CatalogComponent, find_pipeline
from dmconfig.weights import DTYPE_BITS

Tensors = Mapping[str, tuple[str, Sequence[int]]]

LAYERS = 24
SHARDS = 3
STORED_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# A tensor that the class keeps in float32 when loaded in 16 bits, and _keep_in_fp32_modules of the class
KEPT_IN_FP32 = {
    "T5EncoderModel": ("encoder.block.{}.layer.1.DenseReluDense.wo.weight", ["wo"]),
    "UMT5EncoderModel": ("encoder.block.{}.layer.1.DenseReluDense.wo.weight", ["wo"]),
    "Kandinsky5Transformer3DModel": (
        "visual_transformer_blocks.{}.visual_modulation.out_layer.weight",
        ["time_embeddings", "modulation", "visual_modulation", "text_modulation"],
    ),
    "WanTransformer3DModel": (
        "blocks.{}.norm2.weight",
        ["rope", "time_embedder", "scale_shift_table", "norm1", "norm2", "norm3"],
    ),
}
# The one class of the catalogue with a stored integer buffer
INTEGERS: Mapping[str, Tensors] = {"AutoencoderKLFlux2": {"bn.num_batches_tracked": ("I64", ())}}


def write_safetensors(file: Path, tensors: Tensors) -> None:
    """Write a file whose header is true and whose body is a hole of the right length."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + _bytes_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)


def write_sharded(folder: Path, stem: str, shards: Sequence[Tensors]) -> None:
    """Write the shards and their index under the names that both libraries use."""
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        name = f"{stem}-{number:05}-of-{len(shards):05}.safetensors"
        write_safetensors(folder / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    total = sum(_bytes_of(dtype, shape) for tensors in shards for dtype, shape in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


def write_sparse_pipeline(folder: Path, hub_id: str, dtype: str = "bfloat16") -> None:
    """Write the catalogue's pipeline at its full size, stored in dtype.

    The tensors of every component add up to the catalogue's bytes for dtype. Layers that the class keeps in float32
    carry names of that kind, so what is measured for another dtype is the catalogue's figure for that one too. The
    transformer is in three shards.
    """
    pipeline = find_pipeline(hub_id)
    assert pipeline is not None, hub_id
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, object] = {"_class_name": pipeline.class_name, "_diffusers_version": "0.42.1"}
    for component in pipeline.components:
        index[component.name] = [component.library, component.class_name]
        (folder / component.name).mkdir()
        if component.is_module:
            _write_module(folder / component.name, component, dtype)
        else:
            _write_config(folder / component.name, component)
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))


def tensors_of(component: CatalogComponent, dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return tensors that add up to the catalogue's bytes of component at dtype."""
    integers = {name: (kind, tuple(shape)) for name, (kind, shape) in INTEGERS.get(component.class_name, {}).items()}
    integer_bytes = sum(_bytes_of(kind, shape) for kind, shape in integers.values())
    floats = {name: count - integer_bytes for name, count in component.bytes_by_dtype.items()}
    elements = floats["float32"] // 4
    kept = {name: (floats[name] - 2 * elements) // 2 for name in ("float16", "bfloat16")} | {"float32": elements}
    kept_name, _ = KEPT_IN_FP32.get(component.class_name, ("", []))
    kept_elements = max(kept["float16"], kept["bfloat16"])
    stored = STORED_NAMES[dtype]
    tensors = _layers("layers.{}.proj.weight", elements - kept_elements, stored)
    if kept_elements:
        tensors |= _layers(kept_name, kept_elements, "F32" if kept[dtype] else stored)
    tensors |= integers
    total = sum(_bytes_of(kind, shape) for kind, shape in tensors.values())
    assert total == component.bytes_by_dtype[dtype], component
    return tensors


def _write_module(folder: Path, component: CatalogComponent, dtype: str) -> None:
    _write_config(folder, component)
    stem = "diffusion_pytorch_model" if component.library == "diffusers" else "model"
    tensors = tensors_of(component, dtype)
    if component.name.startswith("transformer"):
        names = list(tensors)
        write_sharded(folder, stem, [{name: tensors[name] for name in names[i::SHARDS]} for i in range(SHARDS)])
    else:
        write_safetensors(folder / f"{stem}.safetensors", tensors)


def _write_config(folder: Path, component: CatalogComponent) -> None:
    name = "config.json"
    config: dict[str, str | list[str]] = {"_class_name": component.class_name}
    if component.is_module and component.library != "diffusers":
        config = {"architectures": [component.class_name]}
    elif component.name.endswith("scheduler"):
        name = "scheduler_config.json"
    elif not component.is_module:
        is_tokenizer = "tokenizer" in component.name
        name = "tokenizer_config.json" if is_tokenizer else "preprocessor_config.json"
        config = {"tokenizer_class" if is_tokenizer else "processor_class": component.class_name}
    (folder / name).write_text(json.dumps(config))


def _layers(name: str, elements: int, dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    share, rest = divmod(elements, LAYERS)
    counts = [share + (1 if number < rest else 0) for number in range(LAYERS)]
    return {name.format(number): (dtype, (count,)) for number, count in enumerate(counts)}


def _bytes_of(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * DTYPE_BITS[dtype] // 8
