"""The keys of the file, as its models document them: what ``explain`` prints and ``docs/spec-reference.md`` lists.

Read from the JSON Schema of the models, so that an editor, the command and the page say the same.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dmconfig.devices import DEVICE_PATTERN, RUNS_PATTERN
from dmconfig.hints import RENAMED
from dmconfig.schema import FILE_KEY_SCHEMAS, PROFILE_MEANING
from dmconfig.spec import Spec
from dmconfig.units import BUDGET_PATTERN, SIZE_PATTERN

Schema = Mapping[str, Any]
Path = tuple[str, ...]

_OPEN_KEYS = {
    "components": "<component>",
    "quantization": "<component>",
    "pipelines": "<name>",
    "device_map": "<component>",
    "max_memory": "<device>",
    "reserve": "<component or device>",
    "calls": "<component>",
    "call": "<parameter>",
    "profiles": "<profile>",
}
"""The mappings whose keys are not the format's, and what their keys are."""
_PATTERNS = {DEVICE_PATTERN: "a device", RUNS_PATTERN: "a device", SIZE_PATTERN: "a size", BUDGET_PATTERN: "a budget"}
_TYPES = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "object": "a mapping",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDoc:
    """One key: its path (``components.<component>.dtype``), what it takes, and what that means.

    ``default`` is what it is when it is left out, None where it has to be there; ``example`` is a whole fragment of a
    file; ``words`` are its fixed values with what they mean, where these have a meaning each; ``below`` are the paths
    of the keys inside it.
    """

    path: str
    type: str
    default: str | None
    description: str
    example: Mapping[str, Any]
    words: Mapping[str, str]
    below: tuple[str, ...]

    @property
    def name(self) -> str:
        """The key itself."""
        return self.path.rpartition(".")[2]


@functools.cache
def key_docs() -> tuple[KeyDoc, ...]:
    """Return every key of the file, in its order, each before the keys inside it."""
    schema = Spec.model_json_schema()
    schema["properties"] |= FILE_KEY_SCHEMAS
    profile = {"type": "object", "description": PROFILE_MEANING}
    return tuple(_Reader({**schema["$defs"], "Profile": profile}).keys_of(schema, ()))


def find_keys(text: str) -> tuple[KeyDoc, ...]:
    """Return the keys that a dotted path names, or that a name alone could; none when nothing is called so.

    Example:
        >>> [doc.path for doc in find_keys("device_map.unet")], [doc.path for doc in find_keys("subfolder")]
        (['device_map.<component>'], ['components.<component>.subfolder'])
    """
    docs = key_docs()
    exact = [doc for doc in docs if doc.path == text]
    matching = exact or sorted((doc for doc in docs if _pattern(doc.path).fullmatch(text)), key=_open_parts)
    return tuple(matching[:1]) or tuple(doc for doc in docs if doc.name == text)


def called_otherwise(name: str) -> tuple[KeyDoc, ...]:
    """Return the keys that people from elsewhere call by this name."""
    new = {(section, names[name]) for section, names in RENAMED.items() if name in names}
    return tuple(doc for doc in key_docs() if (doc.path.partition(".")[0] if "." in doc.path else "", doc.name) in new)


def _pattern(path: str) -> re.Pattern[str]:
    """What a dotted path of a real file looks like; a component of the device map may have module paths below it."""
    anything = ".+" if path.startswith("device_map.") else r"[^.]+"
    pattern = re.sub(r"<[^>]+>", anything, re.escape(path).replace(r"\ ", " "))
    return re.compile(pattern.replace(r"\[\]", r"(?:\[\d*\])?"))


def _open_parts(doc: KeyDoc) -> int:
    """Sorts the key that names more of a path first."""
    return -len(doc.path.split("."))


class _Reader:
    """Walks a schema; ``definitions`` are what it refers to."""

    def __init__(self, definitions: Schema) -> None:
        self._definitions = definitions

    def keys_of(self, model: Schema, above: Path) -> Iterator[KeyDoc]:
        """Yield the keys of a model and those inside them."""
        required = model.get("required", ())
        for name, field in model["properties"].items():
            path = (*above, name)
            default = None if name in required else _spelled(field.get("default"))
            example = _nested(_stood_in(path), next(iter(field.get("examples", [])), None))
            yield self._doc(path, field, default, example)
            yield from self._inside(path, field)

    def _inside(self, path: Path, field: Schema) -> Iterator[KeyDoc]:
        """The keys inside a field: those of the models it refers to, and the one that stands for all it leaves open."""
        forms = [*self._forms(field)]
        for form in forms:
            if "properties" in form:
                yield from self.keys_of(form, path)
            elif "items" in form and not any("properties" in other for other in forms):
                yield from self._inside((*path[:-1], f"{path[-1]}[]"), form["items"])
            entry = form.get("additionalProperties")
            if isinstance(entry, dict):
                inner = (*path, _OPEN_KEYS[path[0]])
                yield self._doc(inner, entry, "", _nested(path, _one_entry(field["examples"])))
                yield from self._inside(inner, entry)

    def _doc(self, path: Path, field: Schema, default: str | None, example: Mapping[str, Any]) -> KeyDoc:
        forms = [*self._forms(field)]
        return KeyDoc(
            path=".".join(path),
            type=self._type(field, path),
            default=default,
            description=self._description(field),
            example=example,
            words={form["const"]: form["description"] for form in forms if isinstance(form.get("const"), str)},
            below=tuple(".".join((*path, name)) for form in forms for name in _names_inside(form, path)),
        )

    def _whole(self, form: Schema) -> Schema:
        """A form with what it refers to put in."""
        definition: Schema = self._definitions[form["$ref"].rpartition("/")[2]] if "$ref" in form else {}
        return {**definition, **form}

    def _forms(self, field: Schema) -> Iterator[Schema]:
        """Every form that a value may have, of unions in unions too; null is not one of them."""
        whole = self._whole(field)
        options = whole.get("oneOf") or whole.get("anyOf")
        if options:
            for option in options:
                yield from self._forms(option)
        elif whole.get("type") != "null":
            yield whole

    def _description(self, field: Schema) -> str:
        """The field's own description, or those of its forms."""
        if "description" in field:
            return str(field["description"])
        options = [*self._forms(field)]
        return " Or: ".join(str(option["description"]) for option in options if "description" in option)

    def _type(self, field: Schema, path: Path) -> str:
        forms = [*self._forms(field)]
        if any("pattern" in form for form in forms):  # of what is written as text, the number is another spelling
            forms = [form for form in forms if form.get("type") != "integer"]
        return " or ".join(dict.fromkeys(kind for form in forms for kind in self._kinds(form, path)))

    def _kinds(self, form: Schema, path: Path) -> Iterator[str]:
        """What a value of one form is, in words."""
        match form:
            case {"const": str()}:
                yield "a strategy"
            case {"const": value}:
                yield str(value)
            case {"enum": [word]}:
                yield f"the word {word}"
            case {"enum": words}:
                yield f"one of {', '.join(words)}"
            case {"pattern": pattern}:
                yield _PATTERNS[pattern]
            case {"type": "array", "items": items}:
                yield f"a list of {self._type(items, path).removeprefix('a ')}s"
            case {"type": "object", "additionalProperties": entry} if len(path) == 1 and entry is not False:
                what = self._type(entry, (*path, "")) if isinstance(entry, dict) else "any value"
                yield f"a mapping from {_OPEN_KEYS[path[0]]} to {what}"
            case {"type": kind}:
                yield _TYPES[kind]


def _one_entry(examples: Iterable[Any]) -> dict[str, Any]:
    """One entry of the example that is a mapping; one that is itself a mapping shows most."""
    entries = [*next(each for each in examples if isinstance(each, dict)).items()]
    return dict([next((entry for entry in entries if isinstance(entry[1], dict)), entries[-1])])


def _names_inside(form: Schema, path: Path) -> Iterator[str]:
    yield from form.get("properties", ())
    if isinstance(form.get("additionalProperties"), dict):
        yield _OPEN_KEYS[path[0]]


def _stood_in(path: Path) -> Path:
    """A path with a name for what stands for all of its kind."""
    return tuple({"<component>": "vae", "<name>": "repaint"}.get(part, part) for part in path)


def _spelled(value: Any) -> str:
    """A default as a file spells it; nothing for none."""
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def _nested(path: Path, value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key.removesuffix("[]"): [value] if key.endswith("[]") else value}
    return dict(value)
