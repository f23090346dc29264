"""What is rehearsed, and what is asked of it: values, made without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dmconfig.assembly import PIPELINE, Assembly
from dmconfig.resolve import Resolved
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

    ``full`` runs every step; ``pipeline`` is the one of the file's that is called.
    """

    height: int | None = None
    width: int | None = None
    frames: int | None = None
    steps: int | None = None
    batch: int | None = None
    full: bool = False
    call: Mapping[str, Any] = field(default_factory=dict)
    pipeline: str = PIPELINE
