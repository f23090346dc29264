"""Rehearsed reserves, kept between runs in the user's cache folder: the second time they cost nothing.

A reserve is used again only where everything that it depends on is the same: the file, what it names, the machine,
the settings, and the versions of all that runs. No trouble with the cache is ever an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dmconfig.facts.cache import cache_folder
from dmconfig.files import replacing
from dmconfig.inventory import Inventory
from dmconfig.measure import config_folder_of
from dmconfig.rehearse.inputs import Settings
from dmconfig.rehearse.rehearsal import Script
from dmconfig.rehearse.settling import Planner, settle
from dmconfig.version import __version__

FORMAT = 1
"""Raised whenever a rehearsal counts otherwise."""
_PACKAGES = ("torch", "diffusers", "transformers", "accelerate")


def rehearsed_reserve(
    script: Script, planner: Planner, inventory: Inventory, settings: Settings
) -> tuple[Mapping[str, int], bool]:
    """Return the reserve that plan and rehearsal agree on, and whether they do; from the cache where it is known.

    Raises: PlanError, BuildError, DispatchError: as ``settle``.
    """
    file = _file(_key(script, inventory, settings))
    known = _read(file)
    if known is not None:
        return known["reserve"], known["agrees"]
    settled = settle(script, planner, inventory, settings)
    _write(file, {"reserve": dict(settled.reserve), "agrees": settled.agrees})
    return settled.reserve, settled.agrees


def _key(script: Script, inventory: Inventory, settings: Settings) -> str:
    configs = {c.name: _config(config_folder_of(c)) for c in script.assembly.components}
    versions = {package: _version(package) for package in _PACKAGES}
    everything = {
        "format": FORMAT,
        "dmconfig": __version__,
        "versions": versions,
        "file": script.resolved.data,
        "class": script.assembly.class_name,
        "configs": configs,
        "machine": asdict(inventory),
        "settings": asdict(settings),
    }
    return hashlib.sha256(json.dumps(everything, sort_keys=True, default=str).encode()).hexdigest()


def _config(folder: Path | None) -> str:
    """The text of a component's config, whatever its library calls the file."""
    files = sorted(folder.glob("*config.json")) if folder is not None else []
    return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _file(key: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "rehearsals" / f"{key}.json"


def _read(file: Path | None) -> Any:
    try:
        return json.loads(file.read_bytes()) if file is not None else None
    except (OSError, ValueError):
        return None


def _write(file: Path | None, data: Mapping[str, Any]) -> None:
    if file is None:
        return
    with contextlib.suppress(OSError), replacing(file) as draft:
        draft.write_text(json.dumps(data), encoding="utf-8")
