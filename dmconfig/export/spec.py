"""Putting a spec together from what is seen of a live pipeline."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dmconfig.assembly import DENOISER_NAMES, PIPELINE
from dmconfig.export.connected import connected_homes, with_connected
from dmconfig.export.modular import blocks_make, changes_of_made, is_modular, unknown_blocks
from dmconfig.export.places import Entry, places_of
from dmconfig.export.sources import ComponentSources, Home, home_of, index_of, only_variant
from dmconfig.facts import pipeline_facts
from dmconfig.inputs import SEED
from dmconfig.provenance import as_json, config_data
from dmconfig.source import PipelineIndex
from dmconfig.spec import SCHEMA_VERSION
from dmconfig.weights import variants_in
from dmconfig.writing import Verbatim, as_yaml

_KEPT = ("pipelines", "max_memory", "reserve", "offload_folder", "calls", "call")
"""The sections of the file that a pipeline was loaded from that cannot be seen on it, and hold on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A spec as data, and what of the pipeline could not be known: one sentence each.

    What is unknown and needed to load stands in the spec as a variable that has to be set.
    """

    data: Mapping[str, Any]
    unknown: tuple[str, ...]

    def text(self) -> str:
        """Return the spec as the text of a file; what is not known stands at its top."""
        notes = "".join(f"# not known: {sentence}\n" for sentence in self.unknown)
        return notes + as_yaml(self.data)

    def plain(self) -> dict[str, Any]:
        """Return the spec as JSON data, which is a file too."""
        return dict(as_json(self.data))

    def __str__(self) -> str:
        return self.text()


def to_spec(pipe: Any, folder: str | Path | None = None) -> Export:
    """Return the spec of a live pipeline: sources, classes, dtypes, scheduler, and where each component is now.

    Loaded back, it gives the same components in the same places. Of a pipeline that dmconfig loaded, what its file
    says of the call, budgets and reserves is kept; of any other, nothing is reserved.

    Args:
        pipe: a diffusers pipeline, placed by dmconfig or by diffusers itself.
        folder: where the file is to be; folders in it are then relative to this. None: they are written in full.
    """
    beside = Path(folder).absolute() if folder is not None else None
    unknown: list[str] = []
    modules = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    noted = pipe.config.get("_name_or_path") or getattr(pipe, "_pretrained_model_name_or_path", None)
    home = home_of(os.fspath(noted)) if noted else None
    connected = connected_homes(pipe)
    index = with_connected(index_of(home, modular=is_modular(pipe)) if home else None, connected)
    places = places_of(pipe, modules)
    dtypes = {name: dtype for name, module in modules.items() if (dtype := dtype_of(module)) is not None}
    dtype = _usual(modules, dtypes)
    written = _written(pipe, beside)
    variant = written.get("pipeline", {}).get("variant") or _variant(home, modules, unknown)
    unknown.extend([*places.unknown, *unknown_blocks(pipe, index), *_settings(pipe, index), *_adapters(pipe)])
    parts = written.get("components", {})
    sources = ComponentSources(
        pipeline=home, index=index, beside=beside, connected=connected, written=parts, unknown=unknown
    )
    beside_it = {prefix: each.keys(beside) for prefix, each in connected.items()}
    told = {"connected": beside_it, "variant": variant, "dtype": dtype}
    sections = {
        "version": SCHEMA_VERSION,
        "pipeline": _pipeline(pipe, home, index, beside) | {key: value for key, value in told.items() if value},
        "components": _components(pipe, sources, index, {n: d for n, d in dtypes.items() if d != dtype}),
        "device_map": _device_map(places.device_map),
        **_execution_device(places.execution_device, places.device_map),
        "group_offload": dict(places.group_offload),
        **({key: written[key] for key in _KEPT if key in written} if written else {"reserve": 0}),
    }
    return Export(data={key: value for key, value in sections.items() if value != {}}, unknown=tuple(unknown))


def dtype_of(module: torch.nn.Module) -> str | None:
    """Return the floating-point type that most bytes of a module are of, or None where it has none.

    Classes keep some of their layers in float32, whatever they are loaded in.
    """
    sizes = Counter[str]()
    for tensor in module.parameters():
        if tensor.is_floating_point():
            sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel() * tensor.element_size()
    return max(sizes, key=lambda name: sizes[name]) if sizes else None


def _usual(modules: Mapping[str, torch.nn.Module], dtypes: Mapping[str, str]) -> str | None:
    """The dtype of most weights."""
    sizes = Counter[str]()
    for name, dtype in dtypes.items():
        sizes[dtype] += sum(tensor.numel() for tensor in modules[name].parameters())
    return max(sizes, key=lambda name: sizes[name]) if sizes else None


def _pipeline(pipe: Any, home: Home | None, index: PipelineIndex | None, beside: Path | None) -> dict[str, Any]:
    unknown = Verbatim("${PIPELINE_SOURCE:?where the pipeline came from is not known}", is_text=True)
    keys: dict[str, Any] = home.keys(beside) if home is not None and index is not None else {"source": unknown}
    if index is None or index.class_name != type(pipe).__name__:
        keys["class"] = type(pipe).__name__
    return keys


def _components(
    pipe: Any, sources: ComponentSources, index: PipelineIndex | None, dtypes: Mapping[str, str]
) -> dict[str, Any]:
    made = blocks_make(pipe)
    sections: dict[str, Any] = changes_of_made(pipe, made)
    for name, component in pipe.components.items():
        if name in made and component is not None:
            continue
        if component is None:
            if index is not None and index.entries.get(name) is not None:
                sections[name] = None
            continue
        library = type(component).__module__.partition(".")[0]
        keys = sources.keys_of(name, component, library, has_weights=isinstance(component, torch.nn.Module))
        keys |= {"dtype": dtypes[name]} if name in dtypes else {}
        if keys:
            sections[name] = keys
    return sections


def _variant(home: Home | None, modules: Mapping[str, torch.nn.Module], unknown: list[str]) -> str | None:
    """The variant that the pipeline's folders have weights of where they have no others.

    Where they have both, the weights themselves do not tell which were loaded.
    """
    found = (
        {name: only_variant(home.folder / name, _library(module)) for name, module in modules.items()} if home else {}
    )
    named = sorted({variant for variant in found.values() if variant})
    if len(named) > 1:
        unknown.append(f"which variant each component is of; there are {', '.join(named)}")
    both = sorted(name for name in found if home and not found[name] and variants_in(home.folder / name))
    if both:
        unknown.append(f"whether the weights of {', '.join(both)} are those of a variant, of which there are files too")
    return named[0] if len(named) == 1 else None


def _library(module: torch.nn.Module) -> str:
    return type(module).__module__.partition(".")[0]


def _device_map(entries: Mapping[str, Entry]) -> Entry | dict[str, Entry]:
    """One device where everything stays on one, else an entry for each component."""
    words = {entry for entry in entries.values() if isinstance(entry, str)}
    only = next(iter(words)) if len(words) == 1 and all(isinstance(entry, str) for entry in entries.values()) else None
    return only if only is not None else dict(entries)


def _execution_device(device: str, entries: Mapping[str, Entry]) -> dict[str, str]:
    """The pipeline's own device, where it is not the denoiser's."""
    denoiser = next((entries[name] for name in DENOISER_NAMES if name in entries), None)
    runs_on = denoiser["execution"] if isinstance(denoiser, dict) else denoiser
    return {} if device == runs_on else {"execution_device": device}


def _written(pipe: Any, beside: Path | None) -> dict[str, Any]:
    """What the file that the pipeline was loaded from says of it; empty where there was none.

    One of several in a file is exported by itself: with its own arguments, and those of the first that it takes.
    """
    loaded_as = getattr(pipe, "_loaded_as", None)
    if loaded_as is None:
        return {}
    resolved, name = loaded_as
    data = config_data(resolved, beside)
    if name == PIPELINE:
        return data
    facts = pipeline_facts(type(pipe).__name__, pipe.config.get("_blocks_class_name"))
    taken = {SEED, *(parameter.name for parameter in facts.call)} if facts else set()
    first = {key: value for key, value in data.get("call", {}).items() if key in taken}
    return data | {"pipelines": {}, "call": first | data["pipelines"][name].get("call", {})}


def _settings(pipe: Any, index: PipelineIndex | None) -> Iterator[str]:
    """Settings of the pipeline itself that its source has otherwise; a file cannot say them."""
    before = index.config if index else {}
    for name, value in pipe.config.items():
        if not name.startswith("_") and name not in pipe.components and name in before and value != before[name]:
            yield f"how to say in a file that {name} of the pipeline is {value!r}, not {before[name]!r}"


def _adapters(pipe: Any) -> Iterator[str]:
    """Adapters are in the weights' place or beside them; a file cannot name them."""
    loaded = pipe.get_list_adapters() if hasattr(pipe, "get_list_adapters") else {}
    for component, names in loaded.items():
        yield f"the files of the adapters {', '.join(names)} on {component}: load them again after loading the spec"
    if getattr(pipe, "num_fused_loras", 0):
        yield "which adapters are fused into the weights: the weights of the spec are those before"
