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

from dmconfig.errors import SourceError
from dmconfig.footprint import import_library
from dmconfig.provenance import as_written
from dmconfig.source import PipelineIndex, Source, find_snapshot, read_index
from dmconfig.weights import find_weights, variants_in
from dmconfig.writing import Verbatim

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


@dataclass(slots=True)
class ComponentSources:
    """What the ``components`` section has to say, one component after the other; gathers what is not known."""

    pipeline: Home | None
    index: PipelineIndex | None
    beside: Path | None
    connected: Mapping[str, Home]
    """Where the components with a prefix are, of a pipeline that is made of several."""
    written: Mapping[str, Any]
    """The section of the file that the pipeline was loaded from, if any: nothing else tells a variant."""
    unknown: list[str]

    def keys_of(self, name: str, component: Any, library: str, *, has_weights: bool) -> dict[str, Any]:
        """Return the keys that tell a component from the one that the pipeline's source has."""
        listed = self.index.entries.get(name) if self.index else None
        own = self._own(name)
        home = noted_home(component)
        keys: dict[str, Any] = {}
        if listed is None or not _is_called(type(component), listed.library, listed.class_name):
            keys["class"] = type(component).__name__
        if "Scheduler" in type(component).__name__ or hasattr(component, "set_timesteps"):
            return keys | self._scheduler(name, component, own)
        if home is not None and home.folder != own:
            variant = self._variant(name, home.folder, library) if has_weights else {}
            return home.keys(self.beside) | keys | variant
        if home is None and not (not has_weights and _is_alike(component, own)):
            self.unknown.append(f"where {name} ({type(component).__name__}) came from")
            variable = f"{name.upper()}_SOURCE"
            keys = {"source": Verbatim(f"${{{variable}:?where {name} came from is not known}}", is_text=True)} | keys
        return keys | (self._variant(name, own, library) if has_weights and home is not None and own else {})

    def _own(self, name: str) -> Path | None:
        """The folder in which the pipeline's source, or the connected one, has a component of this name."""
        prefix, _, rest = name.partition("_")
        if prefix in self.connected:
            return self.connected[prefix].folder / rest
        return self.pipeline.folder / name if self.pipeline else None

    def _variant(self, name: str, folder: Path, library: str) -> dict[str, str]:
        """The variant that a component has of its own: as the file says, else the only one that its folder has."""
        said = (self.written.get(name) or {}).get("variant")
        elsewhere = self.pipeline is None or folder.parent != self.pipeline.folder
        variant = said or (only_variant(folder, library) if elsewhere else None)
        return {"variant": variant} if variant else {}

    def _scheduler(self, name: str, scheduler: Any, own: Path | None) -> dict[str, Any]:
        """What differs between a scheduler and its class made from the config in the pipeline's source."""
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
    return cls.__name__ == class_name or getattr(import_library(library), class_name, None) is cls


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
