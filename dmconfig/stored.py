"""What a component's own files say of it before it is built: which weights it loads, their headers, and its config.

Read from what is on this machine or asked of the hub, and for configs from what is packaged. No weights are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dmconfig.assembly import Component
from dmconfig.checkpoint import part_of, tensors_of
from dmconfig.configs import config_folder
from dmconfig.errors import SourceError
from dmconfig.source import CONFIG_FILES, Source, read_json
from dmconfig.weights import TensorInfo, WeightFiles, find_weights, read_tensors

AUTO = "auto"
"""The dtype that stands for the one a component is stored in."""

Headers = Callable[[Component], Sequence[TensorInfo] | None]
"""The tensors of the weights that a component is in, where they are, or None where there are none."""


def component_weights(component: Component) -> WeightFiles | None:
    """Return the weight files a component loads: of its variant, or without one where the variant is the pipeline's.

    Raises: SourceError: an index names files that are not there.
    """
    if component.folder is None or component.is_single_file:
        return None
    variants = [component.variant] if component.variant_required or not component.variant else [component.variant, None]
    for pickled in (False, True) if component.allows_pickle else (False,):
        for variant in variants:
            files = find_weights(component.folder, library=component.library, variant=variant, pickled=pickled)
            if files is not None:
                return files
    return None


def model_config(component: Component) -> Mapping[str, Any]:
    """Return the config of a component, its own or the packaged one; empty where there is none, or none that is one."""
    return read_config(config_folder_of(component))


def config_of_home(source: Source, name: str) -> Mapping[str, Any]:
    """Return the config of a component as a pipeline has it, whatever is used in its place; empty without one."""
    home = source.folder or (config_folder(source.hub_id) if source.hub_id else None)
    return read_config(home / name if home is not None else None)


def read_config(folder: Path | None) -> Mapping[str, Any]:
    """Return the config in folder; empty where there is none, or none that is one."""
    names = CONFIG_FILES if folder is not None else ()
    file = next((folder / name for name in names if folder is not None and (folder / name).is_file()), None)
    try:
        return read_json(file) if file is not None else {}
    except SourceError:
        return {}  # its loader tells


def config_folder_of(component: Component) -> Path | None:
    """Return where a component's config is: on this machine, or packaged; None when it is neither, or to be made."""
    if component.original_config is not None:
        return None
    if component.folder is not None:
        return component.folder
    packaged = config_folder(component.home.hub_id) if component.home.hub_id else None
    folder = packaged / component.name_there if packaged else None
    return folder if folder is not None and folder.is_dir() else None


def header_tensors(component: Component, hub: Headers | None = None) -> Sequence[TensorInfo] | None:
    """What the headers of a component's weights say: of those here, else of those on the hub, if it may be asked."""
    if component.parts:
        each = [header_tensors(part, hub) for part in component.parts]
        known = [tensors for tensors in each if tensors is not None]
        if len(known) < len(each):
            return None
        wrapper = component.facts.members[0] if component.facts.members else "nets"
        return [t._replace(name=f"{wrapper}.{i}.{t.name}") for i, tensors in enumerate(known) for t in tensors]
    files = component_weights(component)
    if files is not None:
        return None if files.is_pickle else read_tensors(files)
    return hub(component) if hub is not None else None


def single_file_tensors(component: Component) -> Sequence[TensorInfo] | None:
    """Return what of a single file is a component's; None where it is not known, or cannot be looked into.

    Raises: SourceError: the file is damaged.
    """
    tensors = tensors_of(component.source)
    if tensors is None:
        return None
    return part_of(component.name, component.facts, tensors) or tensors


def stored_dtype(component: Component) -> str | None:
    """Return the dtype that most of a component is stored in, where its weights are here and can be looked into."""
    try:
        tensors = single_file_tensors(component) if component.is_single_file else header_tensors(component)
    except SourceError:
        return None  # measuring tells
    from dmconfig.footprint import dominant_dtype

    return dominant_dtype(tensors) if tensors is not None and not component.source.is_gguf else None
