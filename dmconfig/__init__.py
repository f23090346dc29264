"""Declare a diffusers pipeline and where each part of it lives in a YAML file; plan, check, load and run it.

Importing this package loads no torch, diffusers, transformers or accelerate; the first call that needs one does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dmconfig.version import __version__ as __version__

if TYPE_CHECKING:
    from dmconfig.condition import report as report
    from dmconfig.dispatch import derive as derive
    from dmconfig.dispatch import execution_device_of as execution_device_of
    from dmconfig.dispatch import swap as swap
    from dmconfig.dispatch import unload as unload
    from dmconfig.errors import DMConfigError as DMConfigError
    from dmconfig.export import to_spec as to_spec
    from dmconfig.load import load_from_yaml as load_from_yaml
    from dmconfig.load import load_pipelines as load_pipelines
    from dmconfig.load import loaded as loaded
    from dmconfig.load import plan_from_yaml as plan_from_yaml

_HOMES = {
    "DMConfigError": "dmconfig.errors",
    "derive": "dmconfig.dispatch",
    "execution_device_of": "dmconfig.dispatch",
    "load_from_yaml": "dmconfig.load",
    "load_pipelines": "dmconfig.load",
    "loaded": "dmconfig.load",
    "plan_from_yaml": "dmconfig.load",
    "report": "dmconfig.condition",
    "swap": "dmconfig.dispatch",
    "to_spec": "dmconfig.export",
    "unload": "dmconfig.dispatch",
}
__all__ = [
    "DMConfigError",
    "__version__",
    "derive",
    "execution_device_of",
    "load_from_yaml",
    "load_pipelines",
    "loaded",
    "plan_from_yaml",
    "report",
    "swap",
    "to_spec",
    "unload",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that start-up costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dmconfig' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__]
