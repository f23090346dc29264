"""Where the components of a live pipeline came from, as far as they say so.

Both libraries note on what they load the folder it came from. Weights are taken to be those of that folder: what was
done to them since cannot be seen.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dmconfig.assembly import Component
from dmconfig.errors import SourceError
from dmconfig.export.remembered import LoadedAs
from dmconfig.facts import class_facts
from dmconfig.footprint import import_library
from dmconfig.provenance import as_written
from dmconfig.source import PipelineIndex, Source, find_snapshot, read_index
from dmconfig.weights import find_weights, variants_in
from dmconfig.writing import Verbatim

_OF_SOURCE = (
    "source", "subfolder", "revision", "local_files_only", "allow_pickle", "class", "variant", "variant_missing",
    "config", "config_revision", "original_config", "original_config_revision", "trust_remote_code",
)  # fmt: skip
"""The keys of a component that say where it comes from."""
_HELD = ("local_files_only", "allow_pickle", "trust_remote_code", "variant_missing")
"""Those of them that leave no trace on what was loaded."""
_SNAPSHOT = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})(?:/(.+))?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where a pipeline, or a component, is: a folder, and for the hub the repository, commit and folder in it."""

    folder: Path
    hub_id: str | None = None
    commit: str | None = None
    subfolder: str | None = None

    def keys(self, beside: Path | None) -> dict[str, str]:
        """The keys of a file that name it; a folder in full, or as it is written in a file in ``beside``."""
        if self.hub_id is None:
            return {"source": str(self.folder) if beside is None else as_written(self.folder, beside)}
        commit = {"revision": self.commit} if self.commit else {}
        return {"source": self.hub_id, **commit, **({"subfolder": self.subfolder} if self.subfolder else {})}


def home_of(text: str) -> Home | None:
    """Return where a folder, or a hub id, noted by the libraries is; None where there is nothing on this machine."""
    folder = Path(os.path.normpath(Path(text).expanduser().absolute()))
    if not folder.is_dir():
        snapshot = find_snapshot(text, None) if text.count("/") == 1 else None
        return home_of(str(snapshot)) if snapshot is not None else None
    match = _SNAPSHOT.search(folder.as_posix())
    if match is None:
        return Home(folder=folder)
    owner, name, commit, subfolder = match.groups()
    return Home(folder=folder, hub_id=f"{owner}/{name}", commit=commit, subfolder=subfolder)


def noted_home(component: Any) -> Home | None:
    """Return where a component says that it came from."""
    if (told := _loaded_from(component)) is not None:
        return told
    config = getattr(component, "config", None)
    noted = config.get("_name_or_path") if isinstance(config, Mapping) else getattr(config, "_name_or_path", None)
    text = noted or getattr(component, "name_or_path", None)
    return home_of(os.fspath(text)) if isinstance(text, (str, os.PathLike)) and text else None


def _loaded_from(component: Any) -> Home | None:
    """Where a modular pipeline of diffusers has loaded a component from: source, subfolder, variant and revision."""
    told = getattr(component, "_diffusers_load_id", None)
    if not isinstance(told, str) or told.count("|") != 3:
        return None
    text, subfolder, _, revision = (None if part == "null" else part for part in told.split("|"))
    folder = Path(text) if text and Path(text).is_dir() else find_snapshot(text, revision) if text else None
    return home_of(str(folder / (subfolder or ""))) if folder is not None else None


def index_of(home: Home, *, modular: bool = False) -> PipelineIndex | None:
    """Return what the pipeline at home lists; None where it is no pipeline."""
    try:
        return read_index(Source(text=str(home.folder), folder=home.folder), modular=modular)
    except SourceError:
        return None


@dataclass(slots=True, kw_only=True)
class ComponentSources:
    """What the ``components`` section has to say, one component after the other; gathers what is not known."""

    pipeline: Home | None
    index: PipelineIndex | None
    beside: Path | None
    connected: Mapping[str, Home]
    """Where the components with a prefix are, of a pipeline that is made of several."""
    written: Mapping[str, Any]
    """The section of the file that the pipeline was loaded from, if any."""
    loaded: LoadedAs | None
    unknown: list[str]

    def said_of(self, name: str, component: Any) -> Any:
        """Return what the file says of a component that is still the one it speaks of; else an empty mapping."""
        return (self.written.get(name) or {}) if self.loaded and self.loaded.has(name, component) else {}

    def keys_of(self, name: str, component: Any, said: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys that tell a component from the one that the pipeline's source has.

        ``said`` is what the file that it was loaded from says of it.
        """
        has_weights = isinstance(component, torch.nn.Module)
        if has_weights and self._is_only_told_by_file(name, component):
            return {key: said[key] for key in _OF_SOURCE if key in said}
        keys = {} if self._is_listed(name, component) else {"class": type(component).__name__}
        if "Scheduler" in type(component).__name__ or hasattr(component, "set_timesteps"):
            return keys | self._scheduler(name, component)
        held = {key: said[key] for key in _HELD if key in said}
        return self._source(name, component, keys, has_weights=has_weights) | held

    def _is_only_told_by_file(self, name: str, component: Any) -> bool:
        """Whether a component is as it was loaded, from one file or made anew by its pipeline: it notes no folder."""
        known = self._known(name)
        is_as_loaded = self.loaded is not None and self.loaded.has(name, component)
        return is_as_loaded and known is not None and (known.is_single_file or noted_home(component) is None)

    def _known(self, name: str) -> Component | None:
        """What was loaded under a name."""
        components = self.loaded.assembly.components if self.loaded is not None else ()
        return next((each for each in components if each.name == name), None)

    def _is_listed(self, name: str, component: Any) -> bool:
        """Whether the pipeline's source names this class for it, or one file of weights tells it."""
        if self.index is not None:
            listed = self.index.entries.get(name)
            is_open = listed is not None and not listed.class_name  # its own config tells which class it is
            return is_open or (listed is not None and _is_called(type(component), listed.library, listed.class_name))
        known = self._known(name) if self.pipeline is None else None
        return known is not None and _is_called(type(component), known.library, known.class_name)

    def _own(self, name: str) -> Path | None:
        """The folder that the pipeline's source, or the connected one, has of a component: its config at least."""
        prefix, _, rest = name.partition("_")
        if prefix in self.connected:
            return self.connected[prefix].folder / rest
        if self.pipeline is not None:
            return self.pipeline.folder / name
        known = self._known(name)
        return known.folder if known is not None else None

    def _source(self, name: str, component: Any, keys: dict[str, Any], *, has_weights: bool) -> dict[str, Any]:
        library, own, home = type(component).__module__.partition(".")[0], self._own(name), noted_home(component)
        if home is not None and home.folder != own:
            variant = self._variant(name, home.folder, library) if has_weights else {}
            return home.keys(self.beside) | keys | variant
        if home is None and not (not has_weights and _is_alike(component, own)):
            self.unknown.append(f"where {name} ({type(component).__name__}) came from")
            variable = f"{name.upper()}_SOURCE"
            keys = {"source": Verbatim(f"${{{variable}:?where {name} came from is not known}}", is_text=True)} | keys
        return keys | (self._variant(name, own, library) if has_weights and home is not None and own else {})

    def _variant(self, name: str, folder: Path, library: str) -> dict[str, str]:
        """The variant that a component has of its own: as the file says, else the only one that its folder has."""
        entry = self.written.get(name) or {}
        said = entry.get("variant") if isinstance(entry, Mapping) else None
        elsewhere = self.pipeline is None or folder.parent != self.pipeline.folder
        variant = said or (only_variant(folder, library) if elsewhere else None)
        return {"variant": variant} if variant else {}

    def _scheduler(self, name: str, scheduler: Any) -> dict[str, Any]:
        """What differs between a scheduler and its class made from the config in the pipeline's source."""
        own = self._own(name)
        if own is None or not own.is_dir():
            self.unknown.append(f"what {name} is made from: its settings are written in full")
            return {"config": dict(_settings(scheduler))}
        made = type(scheduler).from_config(type(scheduler).load_config(str(own)))
        before = dict(_settings(made))
        changed = {key: value for key, value in _settings(scheduler) if before.get(key, ...) != value}
        return {"config": changed} if changed else {}


def only_variant(folder: Path, library: str) -> str | None:
    """Return the variant that a folder has weights of, where it has no others."""
    variants = variants_in(folder)
    return variants[0] if len(variants) == 1 and find_weights(folder, library=library, variant=None) is None else None


def _settings(scheduler: Any) -> Iterator[tuple[str, Any]]:
    """The settings of a scheduler as a file holds them; a file has lists where Python may have tuples."""
    for key, value in scheduler.config.items():
        if not key.startswith("_"):
            yield key, list(value) if isinstance(value, tuple) else value


def _is_called(cls: type, library: str, class_name: str) -> bool:
    """Whether a library's name, also an old one that it still serves, stands for a class."""
    if cls.__name__ == class_name:
        return True
    if library not in ("diffusers", "transformers") and class_facts(library, class_name) is None:
        return False  # code of the source
    return getattr(import_library(library), class_name, None) is cls


def _is_alike(component: Any, folder: Path | None) -> bool:
    """Whether a component without weights has the settings that the pipeline's source has of it."""
    if folder is None or not folder.is_dir() or not hasattr(component, "to_dict"):
        return False
    try:
        return bool(
            type(component).from_pretrained(str(folder), local_files_only=True).to_dict() == component.to_dict()
        )
    except (OSError, ValueError):
        return False
