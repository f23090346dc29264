"""What is rehearsed, and what is asked of it: values, made without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dmconfig.assembly import Assembly, Component
from dmconfig.configs import config_folder
from dmconfig.resolve import Resolved
from dmconfig.source import Source
from dmconfig.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What is rehearsed: a checked spec, and what its pipeline is made of."""

    resolved: Resolved
    spec: Spec
    assembly: Assembly


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a rehearsal is asked for beside the file, over which it goes; None leaves it to the file and the pipeline.

    ``full`` runs every step. ``tiled`` lets the VAE work tile by tile, as ``pipe.vae.enable_tiling()`` does.
    """

    height: int | None = None
    width: int | None = None
    frames: int | None = None
    steps: int | None = None
    batch: int | None = None
    full: bool = False
    tiled: bool = False
    call: Mapping[str, Any] = field(default_factory=dict)


def folder_of(component: Component) -> Path | None:
    """Return where a component's config is: on this machine, or packaged; None when it is neither."""
    if component.folder is not None:
        return component.folder
    packaged = _packaged(component.source)
    folder = packaged / (component.subfolder or component.name) if packaged else None
    return folder if folder is not None and folder.is_dir() else None


def _packaged(source: Source) -> Path | None:
    """The packaged configs of a pipeline on the hub."""
    return config_folder(source.hub_id) if source.hub_id else None
