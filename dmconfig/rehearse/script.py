"""What is rehearsed, and what is asked of it: values, made without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dmconfig.assembly import Assembly
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
    """What a rehearsal is asked for beyond the file; None leaves it to the pipeline.

    ``full`` runs every step. ``tiled`` lets the VAE work tile by tile, as ``pipe.vae.enable_tiling()`` does.
    """

    height: int | None = None
    width: int | None = None
    frames: int | None = None
    steps: int | None = None
    batch: int = 1
    full: bool = False
    tiled: bool = False
    call: Mapping[str, Any] = field(default_factory=dict)


def _packaged(source: Source) -> Path | None:
    """The packaged configs of a pipeline on the hub."""
    return config_folder(source.hub_id) if source.hub_id else None
