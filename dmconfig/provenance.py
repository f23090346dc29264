"""A resolved spec written back as one file: what all layers say together, and where each value came from.

What is printed loads back to the same spec. Relative paths are rewritten to start in the folder where the printed file
is to be; what came from a variable that is named like a secret stands there as the variable; and a secret that a file
has in plain text is left out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmconfig.errors import Code, Problem
from dmconfig.inputs import BY_PATH
from dmconfig.paths import ROOT, ConfigPath, Origin, render_path
from dmconfig.resolve import Resolved
from dmconfig.secrets import HIDDEN, is_secret_key, is_token, redact
from dmconfig.source import is_local
from dmconfig.spec import DEFAULT_RESERVE, Spec
from dmconfig.units import GIB
from dmconfig.validation import Model, keys
from dmconfig.writing import Verbatim, as_yaml

DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One value of a spec: ``origin`` is None for a default; ``variables`` of the environment gave it something."""

    path: ConfigPath
    value: Any
    origin: Origin | None
    variables: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """Where it came from, in words: ``base.yaml:3, from STEPS``."""
        if self.origin is None:
            return DEFAULT
        place = self.origin.location
        words = redact(self.origin.words) if place is None else f"{place.file}:{place.line}"
        return f"{words}, from {', '.join(self.variables)}" if self.variables else words


def config_data(resolved: Resolved, folder: Path | None, spec: Spec | None = None) -> dict[str, Any]:
    """Return what all layers say, as the data of one file in ``folder``; with ``spec`` also the defaults of its keys.

    Where ``folder`` is None, paths are written in full. Text that holds secret variables is ``Verbatim``.
    """
    data: dict[str, Any] = _written(resolved, ROOT, resolved.data, folder)
    for path, value in _defaults(spec) if spec is not None else ():
        inside: dict[Any, Any] = data
        for key in path[:-1]:
            inside = inside.setdefault(key, {})
        inside[path[-1]] = value
    return {name: data[name] for name in (*keys(Spec), *data) if name in data}


def config_text(resolved: Resolved, folder: Path, spec: Spec | None = None) -> str:
    """Return what all layers say, as the text of one file in ``folder``.

    With ``spec``, the defaults stand there too, and each value has where it came from as a comment.
    """
    comments = {} if spec is None else {each.path: each.source for each in values_of(resolved, folder, spec)}
    hidden = dict.fromkeys(_hidden(resolved), f"{HIDDEN[1:-1]}; write it as a variable: ${{NAME}}")
    return as_yaml(config_data(resolved, folder, spec), comments | hidden)


def values_of(resolved: Resolved, folder: Path, spec: Spec) -> Iterator[Value]:
    """Yield every value of a spec that is no mapping or list, and every default, with where it came from."""
    defaults = {path for path, _ in _defaults(spec)}
    for path, value in _leaves(config_data(resolved, folder, spec), ROOT):
        template = resolved.templates.get(path)
        yield Value(
            path=path,
            value=value.text if isinstance(value, Verbatim) else value,
            origin=None if path in defaults else resolved.origin(path),
            variables=template.variables if template else (),
        )


def provenance_data(value: Value) -> dict[str, Any]:
    """Return where one value came from, as JSON data."""
    place = value.origin.location if value.origin else None
    data: dict[str, Any] = {"path": [*value.path], "key": render_path(value.path), "value": value.value}
    if place is not None:
        data |= {"from": "file", "file": place.file, "line": place.line, "column": place.column}
    else:
        data |= (
            {"from": DEFAULT} if value.origin is None else {"from": "override", "origin": redact(value.origin.words)}
        )
    return data | ({"variables": [*value.variables]} if value.variables else {})


def as_json(value: Any) -> Any:
    """Return data of a file as JSON data: text with variables as it stands in the file, other text with ``$$``."""
    match value:
        case Mapping():
            return {key: as_json(item) for key, item in value.items()}
        case list():
            return [as_json(item) for item in value]
        case Verbatim():
            return value.text
        case str():
            return value.replace("$", "$$")
        case _:
            return value


def not_in_json(resolved: Resolved) -> Iterator[Problem]:
    """Yield a problem per number of a spec that JSON cannot say."""
    for path, value in _leaves(resolved.data, ROOT):
        if isinstance(value, float) and not math.isfinite(value):
            what = f"JSON has no way to write {value}"
            yield resolved.problem(Code.BAD_VALUE, path, what, fix="print it as text: leave --format json out")


def _leaves(value: Any, path: ConfigPath) -> Iterator[tuple[ConfigPath, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


# ---------------------------------------------------------------- values, as they are written


def _written(resolved: Resolved, path: ConfigPath, value: Any, folder: Path | None) -> Any:
    if isinstance(value, dict):
        return {key: _written(resolved, (*path, key), item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_written(resolved, (*path, index), item, folder) for index, item in enumerate(value)]
    template = resolved.templates.get(path)
    if template is not None and template.is_secret:
        return Verbatim(template.text, is_text=template.is_text)
    if _is_hidden(resolved, path, value):
        return HIDDEN
    return _moved(value, resolved.folder_of(path), folder) if _is_path(path, value) else value


def _hidden(resolved: Resolved) -> Iterator[ConfigPath]:
    return (path for path, value in _leaves(resolved.data, ROOT) if _is_hidden(resolved, path, value))


def _is_hidden(resolved: Resolved, path: ConfigPath, value: Any) -> bool:
    """Whether a value is a secret in plain text."""
    template = resolved.templates.get(path)
    is_secret = isinstance(value, str) and (is_token(value) or is_secret_key(path))
    return is_secret and not (template and template.is_secret)


def _is_path(path: ConfigPath, value: Any) -> bool:
    """Whether a value is a path that starts in the folder of the file that says it."""
    match path:
        case (
            ("pipeline", "source" | "config")
            | ("components", _, "source" | "config")
            | ("components", _, int(), "source" | "config")
            | ("adapters", _, int(), "source")
        ):
            return isinstance(value, str) and is_local(value)
        case ("offload_folder",):
            return isinstance(value, str)
        case ("call", name, *_) | ("pipelines", _, "call", name, *_):
            return isinstance(value, str) and name in BY_PATH
        case _:
            return False


def _moved(text: str, start: Path, folder: Path | None) -> str:
    """A path that starts in one folder, as it is written in another, or in full."""
    if folder is None:
        return str(start / Path(text).expanduser())
    if start == folder or text.startswith("~") or Path(text).is_absolute():
        return text
    return as_written(start / text, folder)


def as_written(path: Path, folder: Path) -> str:
    """Return a path as a file in ``folder`` writes it: ``./models``, ``../models``."""
    relative = Path(os.path.relpath(path, folder)).as_posix()
    return relative if relative.startswith("..") else f"./{relative}"


def _defaults(model: Model, path: ConfigPath = ROOT) -> Iterator[tuple[ConfigPath, Any]]:
    """Yield the keys that nothing sets and that have a value all the same; null and empty ones say nothing."""
    for name, field in type(model).model_fields.items():
        value, at = getattr(model, name), (*path, field.alias or name)
        inside = value.items() if isinstance(value, dict) else ()
        if isinstance(value, Model):
            yield from _defaults(value, at)
        elif name not in model.model_fields_set and isinstance(value, (str, int, float)):
            yield at, f"{value / GIB:g}GiB" if at == ("reserve",) and value == DEFAULT_RESERVE else value
        for key, item in inside:
            if isinstance(item, Model):
                yield from _defaults(item, (*at, key))
