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
from dmconfig.export.adapters import adapters_of, is_made_by_ip_adapter
from dmconfig.export.connected import connected_homes, with_connected
from dmconfig.export.modular import blocks_make, changes_of_made, is_modular, unknown_blocks
from dmconfig.export.places import Entry, places_of
from dmconfig.export.quantised import quantization_of
from dmconfig.export.remembered import LoadedAs
from dmconfig.export.sources import ComponentSources, Home, home_of, index_of, only_variant
from dmconfig.export.switches import casting_dtype, several_in, switches_of, unwrapped
from dmconfig.facts import pipeline_facts
from dmconfig.inputs import SEED
from dmconfig.provenance import as_json, config_data
from dmconfig.source import PipelineIndex
from dmconfig.spec import DTYPES, SCHEMA_VERSION
from dmconfig.weights import variants_in
from dmconfig.writing import Verbatim, as_yaml

_KEPT = ("allow_moving_revision", "pipelines", "max_memory", "reserve", "offload_folder", "calls", "call")
"""The sections of the file that a pipeline was loaded from that cannot be seen on it, and hold on."""
_HELD = ("local_files_only", "allow_pickle", "variant_missing", "custom_pipeline", "trust_remote_code")
"""The same, of the section of the pipeline."""


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
    loaded: LoadedAs | None = getattr(pipe, "_loaded_as", None)
    modules = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    home, connected = _home(pipe, loaded), connected_homes(pipe)
    index = with_connected(index_of(home, modular=is_modular(pipe)) if home else None, connected)
    places = places_of(pipe, modules)
    dtypes = dict(_dtypes(modules, unknown))
    dtype = _usual(modules, dtypes)
    written = _written(pipe, loaded, beside)
    variant = written.get("pipeline", {}).get("variant") or _variant(home, modules, unknown)
    unknown.extend([*places.unknown, *unknown_blocks(pipe, index), *_settings(pipe, index), *_code(pipe, written)])
    sources = ComponentSources(
        pipeline=home,
        index=index,
        beside=beside,
        connected=connected,
        written=written.get("components", {}),
        loaded=loaded,
        unknown=unknown,
    )
    beside_it = {prefix: each.keys(beside) for prefix, each in connected.items()}
    told = {"connected": beside_it, "variant": variant, "dtype": dtype}
    pipeline = _pipeline(pipe, sources, written.get("pipeline", {}))
    sections = {
        "version": SCHEMA_VERSION,
        "pipeline": pipeline | {key: value for key, value in told.items() if value},
        "components": _components(pipe, sources, {n: d for n, d in dtypes.items() if d != dtype}),
        "quantization": _quantization(modules, loaded, written.get("quantization", {}), unknown),
        "adapters": adapters_of(pipe, loaded, beside, unknown),
        "device_map": _device_map(places.device_map),
        **_execution_device(places.execution_device, places.device_map),
        "group_offload": dict(places.group_offload),
        **({key: written[key] for key in _KEPT if key in written} if written else {"reserve": 0}),
    }
    return Export(data={key: value for key, value in sections.items() if value != {}}, unknown=tuple(unknown))


def _home(pipe: Any, loaded: LoadedAs | None) -> Home | None:
    """Where a pipeline is that is a folder or a repository."""
    noted = pipe.config.get("_name_or_path") or getattr(pipe, "_pretrained_model_name_or_path", None)
    is_file = loaded is not None and loaded.is_single_file
    return home_of(os.fspath(noted)) if noted and not is_file else None


def _dtypes(modules: Mapping[str, torch.nn.Module], unknown: list[str]) -> Iterator[tuple[str, str]]:
    """The types of components with weights, as far as a file can say them."""
    for name, module in modules.items():
        dtype = dtype_of(module)
        if dtype in DTYPES:
            yield name, dtype
        elif dtype is not None:
            unknown.append(f"how to say in a file that the weights of {name} are {dtype}")


def dtype_of(module: torch.nn.Module) -> str | None:
    """Return the floating-point type that most bytes of a module are of, or None where it has none.

    Classes keep some of their layers in float32, whatever they are loaded in. Where weights are kept in another type
    than the one in which they compute, it is the latter.
    """
    if (computes_in := casting_dtype(module)) is not None:
        return computes_in
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


def _pipeline(pipe: Any, sources: ComponentSources, said: Mapping[str, Any]) -> dict[str, Any]:
    """The section of the pipeline, but for what holds for all components; ``said`` is that of the file it is from."""
    loaded, home, index = sources.loaded, sources.pipeline, sources.index
    if loaded is not None and loaded.is_single_file:
        is_told = type(pipe).__name__ == loaded.assembly.class_name
        own = {key: value for key, value in said.items() if key not in ("variant", "dtype")}
        return own | ({} if is_told else {"class": type(pipe).__name__})
    unknown = Verbatim("${PIPELINE_SOURCE:?where the pipeline came from is not known}", is_text=True)
    keys: dict[str, Any] = home.keys(sources.beside) if home is not None and index is not None else {"source": unknown}
    if index is None or index.class_name != type(pipe).__name__ or "custom_pipeline" in said:
        keys["class"] = type(pipe).__name__
    return keys | {key: said[key] for key in _HELD if key in said}


def _components(pipe: Any, sources: ComponentSources, dtypes: Mapping[str, str]) -> dict[str, Any]:
    made = blocks_make(pipe)
    sections: dict[str, Any] = changes_of_made(pipe, made)
    for name, component in pipe.components.items():
        if name in made and component is not None:
            continue
        if component is None:
            listed = sources.index is not None and sources.index.entries.get(name) is not None
            if listed or (name in sources.written and sources.written[name] is None):
                sections[name] = None
        elif not is_made_by_ip_adapter(pipe, name):
            dtype = {"dtype": dtypes[name]} if name in dtypes else {}
            keys = _entry(name, component, sources, dtype)
            if keys:
                sections[name] = keys
    return sections


def _entry(name: str, component: Any, sources: ComponentSources, dtype: Mapping[str, str]) -> Any:
    """The keys of a component; of one that is several models, a list of theirs."""
    said, models = sources.said_of(name, unwrapped(component)), several_in(component)
    if models:
        each_said = said if isinstance(said, list) else [{}] * len(models)
        return [_keys(name, model, sources, own, dtype) for model, own in zip(models, each_said, strict=True)]
    return _keys(name, component, sources, said, dtype)


def _keys(
    name: str, component: Any, sources: ComponentSources, said: Mapping[str, Any], dtype: Mapping[str, str]
) -> dict[str, Any]:
    keys = {**sources.keys_of(name, unwrapped(component), said), **dtype}
    is_module = isinstance(component, torch.nn.Module)
    return keys | (switches_of(name, component, said, sources.unknown) if is_module else {})


def _quantization(
    modules: Mapping[str, torch.nn.Module], loaded: LoadedAs | None, said: Mapping[str, Any], unknown: list[str]
) -> dict[str, Any]:
    found = {}
    for name, module in modules.items():
        own = said.get(name) if loaded is not None and loaded.has(name, unwrapped(module)) else None
        if (entry := quantization_of(name, unwrapped(module), own, unknown)) is not None:
            found[name] = entry
    return found


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


def _written(pipe: Any, loaded: LoadedAs | None, beside: Path | None) -> dict[str, Any]:
    """What the file that the pipeline was loaded from says of it; empty where there was none.

    One of several in a file is exported by itself: with its own arguments, and those of the first that it takes.
    """
    if loaded is None:
        return {}
    resolved, name = loaded.resolved, loaded.name
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


def _code(pipe: Any, written: Mapping[str, Any]) -> Iterator[str]:
    """Code that no file grants: where it is cannot be seen, and whether it may be run is not for an export to say."""
    if written:
        return
    for name, wrapped in {"the pipeline": pipe, **pipe.components}.items():
        part = unwrapped(wrapped)
        library = type(part).__module__.partition(".")[0]
        if part is not None and library not in ("diffusers", "transformers"):
            yield f"the code of {name}, {type(part).__name__}, and why it may be run (trust_remote_code)"
