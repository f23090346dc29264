"""What placements take, kept between runs in the user's cache folder: free the second time, and without torch.

What was taken is used again only where everything that it depends on is the same: what the file says of the pipeline
and its call, the configs, where everything is placed, the cards, the settings, and the versions of all that runs. How
much a machine has is not among it. No trouble with the cache is ever an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from dmconfig.assembly import Component
from dmconfig.checkpoint import tensors_of
from dmconfig.facts.cache import cache_folder
from dmconfig.files import replacing
from dmconfig.inventory import Inventory
from dmconfig.plan import Plan
from dmconfig.rehearse.script import Script, Settings
from dmconfig.stored import config_folder_of
from dmconfig.version import __version__
from dmconfig.weights import read_header

FORMAT = 4
"""Raised whenever a rehearsal counts otherwise."""
_PACKAGES = ("torch", "diffusers", "transformers", "accelerate")
_SECTIONS = ("pipeline", "components", "adapters", "quantization", "group_offload", "call", "pipelines")
"""What a file says of a pipeline beside where it is placed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a placement takes.

    ``reserve`` is in bytes by component: what each needs of a device beside the weights that the plan counts there
    (see ``taken.reserves_of``). ``need_bytes`` is what each device has to have, and ``phases`` where that is. ``wrong``
    says what is wrong with the run itself, whatever a machine has; ``output`` is the shape of what came out.
    """

    reserve: Mapping[str, int]
    need_bytes: Mapping[str, int]
    phases: Mapping[str, str]
    wrong: str
    output: tuple[int, ...]


_TAKEN = TypeAdapter(Taken)


def taken_by(script: Script, plan: Plan, inventory: Inventory, settings: Settings) -> Taken:
    """Return what the placement of a plan takes: remembered, or rehearsed now and remembered.

    Raises: SpecError, BuildError, DispatchError: as ``rehearse``. RunError: as ``apart``.
    """
    file = _file(_key(script, plan, inventory, settings))
    known = _read(file)
    if known is None:
        from dmconfig.rehearse.apart import apart
        from dmconfig.rehearse.taken import rehearse_taken

        known = apart(rehearse_taken, script, plan, inventory, settings)
        _write(file, known)
    return known


def _key(script: Script, plan: Plan, inventory: Inventory, settings: Settings) -> str:
    everything = {
        "format": FORMAT,
        "dmconfig": __version__,
        "versions": {package: _version(package) for package in _PACKAGES},
        "file": {section: script.resolved.data.get(section) for section in _SECTIONS},
        "class": script.assembly.class_name,
        "components": [(component.name, _component(component)) for component in script.assembly.loaded],
        "adapters": [str((each, each.file and read_header(each.file))) for each in script.assembly.adapters],
        "places": places_of(plan),
        "cards": [(device.id, device.description) for device in inventory.accelerators],
        "settings": asdict(settings),
    }
    return hashlib.sha256(json.dumps(everything, sort_keys=True, default=str).encode()).hexdigest()


def places_of(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Return all of a plan that a run depends on: where everything is."""
    return (("", plan.execution_device), *_places(plan))


def _places(plan: Plan) -> Iterator[tuple[str, ...]]:
    for each in plan.assignments:
        yield each.component, each.dtype, each.execution_device, each.storage_device, each.residency
        for part in each.parts:
            yield each.component, part.path, part.execution_device, part.storage_device, part.residency


def _component(component: Component) -> list[str]:
    """What a rehearsal sees of a component: class, dtype, config, packed weights, and whether its files are here."""
    original = component.original_config
    config = _config(config_folder_of(component)) if original is None else str(original.values)
    told = [component.class_name, component.dtype, str(component.folder), config]
    return [*told, str(tensors_of(component.source)) if component.source.is_gguf else ""]


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


def _read(file: Path | None) -> Taken | None:
    """What was remembered; None where nothing was, or where the file is not what was written."""
    try:
        return _TAKEN.validate_json(file.read_bytes()) if file is not None else None
    except (OSError, ValueError):
        return None


def _write(file: Path | None, taken: Taken) -> None:
    if file is None:
        return
    with contextlib.suppress(OSError), replacing(file) as draft:
        draft.write_text(json.dumps(asdict(taken)), encoding="utf-8")
