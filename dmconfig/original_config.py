"""The config that a model's authors published beside one file of its weights: YAML, of before diffusers.

Classes that diffusers can make a config for from it take it in the place of ``config``. It is read here, bounded, and
looked over for the sections that diffusers reads without asking; making the config is diffusers' own.

Source: diffusers loaders/single_file_utils.py (create_unet_diffusers_config_from_ldm and its like).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dmconfig.errors import Code, DMConfigError, Problem, SourceError, SpecError
from dmconfig.facts import ClassFacts, classes_with_original_config
from dmconfig.paths import ConfigPath
from dmconfig.resolve import Resolved
from dmconfig.source import HUB_ID, Source, find_snapshot, is_local

MAX_BYTES = 1 << 16
"""More than any takes: the published ones have some 3 kB."""

_Parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, where it is there, which also limits how deep a file nests."""
_ENDS = (".yaml", ".yml")
_ON_HUB = re.compile(rf"({HUB_ID})/((?:[\w-]+/)*[\w.-]+\.ya?ml)")
_UNET, _VAE = ("unet_config", "network_config"), ("first_stage_config",)
_SECTIONS = {"UNet2DConditionModel": (_UNET, _VAE), "AutoencoderKL": (_VAE,)}
"""By class, the sections of ``model.params`` that are read for it, each with its other names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalConfig:
    """Where it is, and what it says; ``values`` is None for one on the hub that is not on this machine yet."""

    source: Source
    path: ConfigPath
    values: Mapping[str, Any] | None = field(default=None, repr=False)


_FAILING = ("ControlNetModel",)
"""Classes that diffusers lists, and fails on: up to 0.42 it calls its own function for them without an argument."""


def known_classes() -> tuple[str, ...]:
    """Return the classes for which diffusers, as installed, makes a config from one of the authors."""
    return tuple(name for name in classes_with_original_config() if name not in _FAILING)


def takes_original_config(facts: ClassFacts) -> bool:
    """Tell whether diffusers, as installed, makes a config for the class from one of its authors."""
    return not facts.ancestors.isdisjoint(known_classes())


def original_config(
    resolved: Resolved, path: ConfigPath, text: str, revision: str | None, facts: ClassFacts
) -> OriginalConfig:
    """Return the original config that the file names at path for a component of a class.

    Raises: SpecError: SOURCE_NOT_FOUND: it is not there. BAD_ORIGINAL_CONFIG: the class takes none, or it is not one.
    """
    try:
        if not takes_original_config(facts):
            raise _bad(f"{facts.class_name} takes no original_config", _of_others())
        source = _located(text, resolved.folder_of(path), revision)
        file = source.path
        values = _read(file) if file is not None else None
        for section in _lacking(values, facts) if values is not None else ():
            raise _bad(f"{text} has no {section}, which diffusers makes the config of {facts.class_name} from")
    except DMConfigError as error:
        raise SpecError(resolved.located(error.problems, path)) from None
    return OriginalConfig(source=source, path=path, values=values)


def _of_others() -> str:
    return f"remove the line, and name a folder or hub id as config; it is for: {', '.join(known_classes())}"


def _located(text: str, folder: Path, revision: str | None) -> Source:
    if is_local(text):
        path = Path(os.path.normpath(folder / Path(text).expanduser()))
        if not path.is_file() or path.suffix not in _ENDS:
            raise SourceError([Problem(code=Code.SOURCE_NOT_FOUND, what=f"there is no YAML file {path}")])
        if revision is not None:
            what, fix = f"a revision is given, and {text} is a local file", "remove the line, or name a file on the hub"
            raise SourceError([Problem(code=Code.CONTRADICTION, what=what, fix=fix)])
        return Source(text=text, folder=path.parent, file=path.name)
    on_hub = _ON_HUB.fullmatch(text)
    if on_hub is None or ".." in text.split("/"):
        fix = "download it and name its path, ./v1-inference.yaml; or a file on the hub: organisation/name/file.yaml"
        raise _bad(f"{text!r} is neither a YAML file beside this one nor one on the hub", fix)
    hub_id, file = on_hub.groups()
    return Source(text=text, folder=find_snapshot(hub_id, revision), hub_id=hub_id, revision=revision, file=file)


def _read(file: Path) -> Mapping[str, Any]:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise _bad(f"{file} is larger than {MAX_BYTES >> 10} KiB")
        text = file.read_text(encoding="utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=_Parser)):
            raise _bad(f"{file} has aliases, which may stand for more than any memory holds", "write them out")
        values = yaml.load(text, Loader=_Parser)  # noqa: S506 - a safe loader, of either make
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise _bad(f"{file} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise _bad(f"{file} holds no mapping")
    return values


def _lacking(values: Mapping[str, Any], facts: ClassFacts) -> Iterator[str]:
    """Yield the sections that are read for a class and are not there."""
    params = _mapping(_mapping(values, "model"), "params")
    asked = next((sections for name, sections in _SECTIONS.items() if name in facts.ancestors), ())
    for names in asked:
        section = next((_mapping(_mapping(params, name), "params") for name in names if params.get(name)), {})
        if not (section if names != _VAE else _mapping(section, "ddconfig")):
            yield f"model.params.{names[0]}.params{'.ddconfig' if names == _VAE else ''}"


def _mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    inside = values.get(key)
    return inside if isinstance(inside, dict) else {}


def _bad(what: str, fix: str = "") -> SourceError:
    return SourceError([Problem(code=Code.BAD_ORIGINAL_CONFIG, what=what, fix=fix)])
