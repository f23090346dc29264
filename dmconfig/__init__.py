"""Declare a diffusers pipeline and where each part of it lives in a YAML file; plan, check, load and run it.

Importing this package loads no torch, diffusers, transformers or accelerate; the first call that needs one does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dmconfig.version import __version__ as __version__

if TYPE_CHECKING:
    from dmconfig.errors import DMConfigError as DMConfigError
    from dmconfig.load import load_from_yaml as load_from_yaml
    from dmconfig.load import plan_from_yaml as plan_from_yaml

_HOMES = {
    "DMConfigError": "dmconfig.errors",
    "load_from_yaml": "dmconfig.load",
    "plan_from_yaml": "dmconfig.load",
}
__all__ = ["DMConfigError", "__version__", "load_from_yaml", "plan_from_yaml"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that start-up costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dmconfig' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__]
