"""What the loader knows of a pipeline that cannot be seen on it: its file, and which parts it was made of."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dmconfig.assembly import Assembly
from dmconfig.resolve import Resolved
from dmconfig.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAs:
    """The spec that a pipeline was loaded from, and its name in it; what was put in its place since is told apart."""

    resolved: Resolved
    spec: Spec
    assembly: Assembly
    name: str
    parts: Mapping[str, weakref.ref[Any]]
    """The components as they were loaded."""
    loras: Mapping[tuple[str, str], Any]
    """By component and name, the configuration objects of the LoRAs that were put on."""

    @property
    def is_single_file(self) -> bool:
        """Whether the pipeline's own source is one file of weights."""
        return any(component.shares_file for component in self.assembly.components)

    def has(self, name: str, component: Any) -> bool:
        """Tell whether a component is the one that was loaded under its name."""
        known = self.parts.get(name)
        return known is not None and known() is component


def loaded_as(pipe: Any, name: str, resolved: Resolved, spec: Spec, assembly: Assembly) -> LoadedAs:
    """Return what is to be remembered of a pipeline that has just been loaded."""
    parts = {key: part for key, part in pipe.components.items() if part is not None}
    refs = {key: weakref.ref(part) for key, part in parts.items() if hasattr(type(part), "__weakref__")}
    return LoadedAs(
        resolved=resolved, spec=spec, assembly=assembly, name=name, parts=refs, loras=dict(lora_configs(parts))
    )


def lora_configs(parts: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """Return the configuration objects of the LoRAs on components, by component and name, in the order of loading."""
    return {
        (component, name): config
        for component, part in parts.items()
        for name, config in (getattr(part, "peft_config", None) or {}).items()
    }
