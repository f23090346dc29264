"""What the models of files share: how a file is held against one, and pydantic's errors as problems at their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails, PydanticCustomError

from dmconfig.devices import nearest_device
from dmconfig.errors import Code, DMConfigError, Problem, nearest
from dmconfig.hints import VALUE_HINTS, newer_version
from dmconfig.paths import ROOT, ConfigPath
from dmconfig.resolve import Resolved
from dmconfig.units import SIZE_FORMS, SIZE_PATTERN, parse_size

DeviceAdvice = Callable[[ConfigPath, Any, str], tuple[str, str]]
"""From the path, what is written there and what is wrong with it: what is wrong in more words, and how to mend it."""
TypeAdvice = Callable[[ConfigPath, str, Any], str]


class Model(BaseModel):
    """Base of all models of the file: frozen, and nothing unknown is accepted.

    A model is built when it is first validated: most are only parts of another, and start-up is a feature. So a section
    of which nothing is written is ``model_construct()``, its defaults, which need no validating.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


M = TypeVar("M", bound=Model)


class Section(NamedTuple):
    """A mapping whose keys can name one thing in two ways (``0`` and ``cuda:0``).

    ``read`` returns what a key means, and raises ValueError for one that means nothing; ``word`` says what kind of
    thing that is.
    """

    name: str
    read: Callable[[str], object]
    word: str = "device"


class FileKind(NamedTuple, Generic[M]):
    """One kind of file: its model, its version, and what is said of one that is not right.

    ``noun`` begins the sentence that a newer version is told with. ``translate`` makes a problem of one of pydantic's
    errors, or None of one that another tells already.
    """

    model: type[M]
    version: int
    noun: str
    beginning: str
    sections: tuple[Section, ...]
    translate: Callable[[ErrorDetails, Resolved], Problem | None]
    error: type[DMConfigError]


def validated(resolved: Resolved, kind: FileKind[M]) -> M:
    """Return the model of a kind of file in resolved data.

    Raises: DMConfigError: of the kind's type, every problem at once, each at its place. A file of a newer version
        says so first, and only that: its other keys may well be right there.
    """
    data = resolved.data
    if not isinstance(data, dict):
        what = "the file is empty" if data is None else "the file is not a mapping"
        raise kind.error([resolved.problem(Code.MISSING_KEY, ROOT, what, fix=f"start it with {kind.beginning}")])
    version = data.get("version")
    if type(version) is int and version > kind.version:
        what, fix = newer_version(kind.noun, version, kind.version)
        raise kind.error([resolved.problem(Code.UNSUPPORTED_VERSION, ("version",), what, fix=fix)])
    problems = [problem for section in kind.sections for problem in _named_twice(resolved, section)]
    try:
        model = kind.model.model_validate(data)
    except ValidationError as error:
        told = (kind.translate(detail, resolved) for detail in error.errors(include_url=False))
        problems += [problem for problem in told if problem is not None]
        raise kind.error(problems) from None
    if problems:
        raise kind.error(problems)
    return model


def _named_twice(resolved: Resolved, section: Section) -> Iterator[Problem]:
    """Yield a problem per key that means what an earlier one means."""
    entries = resolved.data.get(section.name)
    seen: dict[object, str] = {}
    for key in entries if isinstance(entries, dict) else ():
        try:
            meaning = section.read(key)
        except ValueError:
            continue  # where it has to mean something, the model says so
        if meaning in seen:
            what = f"{seen[meaning]!r} and {key!r} are the same {section.word}"
            what += f", {meaning}" if isinstance(meaning, str) else ""
            fix = "keep one of the two"
            if None in (resolved.place((section.name, name))[0] for name in (key, seen[meaning])):
                fix += f"; an override has to spell the {section.word} as the file does"
            yield resolved.problem(Code.DUPLICATE_DEVICE, (section.name, key), what, fix=fix, key=True)
        seen[meaning] = key


def file_version(version: int) -> Any:
    """Return the type of the key ``version``: this whole number, and nothing that merely equals it (true, 1.0)."""

    def only_int(value: object) -> object:
        if type(value) is not int:
            raise PydanticCustomError("literal_error", "", {"expected": str(version)})
        return value

    return BeforeValidator(only_int)


def _size(value: object) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise PydanticCustomError("bad_size", "{text}", {"text": str(error)}) from None


def text_or_number(pattern: str, description: str) -> dict[str, Any]:
    """Return the JSON Schema of what may be a text of a pattern, or a whole number that is not negative."""
    text = {"type": "string", "pattern": pattern, "description": description}
    return {"anyOf": [text, {"type": "integer", "minimum": 0}]}


def written_as(schema: dict[str, Any]) -> Any:
    """Return the type that a value has in a file, for the JSON Schema alone."""
    return Annotated[Any, WithJsonSchema(schema)]


Size = Annotated[
    int,
    BeforeValidator(_size, json_schema_input_type=written_as(text_or_number(SIZE_PATTERN, f"A size: {SIZE_FORMS}."))),
]

CODES = {
    "bad_device": Code.BAD_DEVICE,
    "bad_size": Code.BAD_SIZE,
    "bad_dtype": Code.BAD_DTYPE,
    "bad_reason": Code.BAD_VALUE,
}
_EXPECTED = {
    "string_type": "text",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "float_type": "a number",
    "float_parsing": "a number",
}


def path_in(data: Any, loc: tuple[int | str, ...]) -> ConfigPath:
    """Keep the elements of pydantic's loc that are keys of the document: union tags and ``[key]`` are not."""
    path: list[int | str] = []
    for element in loc:
        inside = isinstance(data, dict) and element in data
        listed = isinstance(data, list) and isinstance(element, int) and element < len(data)
        if inside or listed:
            data = data[element]
            path.append(element)
    return tuple(path)


def value_at(data: Any, path: ConfigPath) -> Any:
    """Return what stands at a path that is there."""
    for element in path:
        data = data[element]
    return data


def keys(model: type[Model]) -> Iterator[str]:
    """Yield the keys of a model as a file spells them."""
    return (field.alias or name for name, field in model.model_fields.items())


def nearest_key(key: str, known: Sequence[str]) -> str:
    """Return the advice to write the known key nearest to this one, or nothing."""
    meant = nearest(key, known)
    return f"did you mean {meant!r}?" if meant else ""


def nearest_device_advice(path: ConfigPath, given: Any, what: str) -> tuple[str, str]:  # noqa: ARG001 - one of several
    """Advise the device that a misspelt name most likely means."""
    meant = nearest_device(given) if isinstance(given, str) else None
    return what, f"did you mean {meant!r}?" if meant else ""


def refused(path: ConfigPath, detail: ErrorDetails, resolved: Resolved, advice: DeviceAdvice | None = None) -> Problem:
    """Return the problem of a device, size or dtype that our own parsers refuse; they say what they accept."""
    kind, given, context = detail["type"], detail["input"], detail.get("ctx", {})
    is_key = detail["loc"][-1] == "[key]"
    what, fix = str(context["text"]), str(context.get("fix", ""))
    if not isinstance(given, (str, int)) or isinstance(given, bool):
        what = f"{what}, found {_describe(given)}"
    if kind == "bad_device":
        what, fix = (advice or nearest_device_advice)(path, given, what)
    return resolved.problem(CODES[kind], path, what, fix=fix, key=is_key)


def not_one_of(path: ConfigPath, detail: ErrorDetails, resolved: Resolved, *, version: int) -> Problem:
    """Return the problem of a word that is none of those accepted; ``version`` is that of the file's format."""
    given = detail["input"]
    if path[-1:] == ("version",):
        what = f"version is {spelled(given)}; this dmconfig reads version {version}"
        return resolved.problem(Code.UNSUPPORTED_VERSION, path, what, fix=f"write 'version: {version}'")
    expected = str(detail.get("ctx", {})["expected"])
    accepted = [word.strip(" '") for word in expected.replace(" or ", ", ").split(",")]
    word = given if isinstance(given, str) else str(given).lower()
    meant = next((known for known in VALUE_HINTS.get(word, ()) if known in accepted), None) or nearest(word, accepted)
    what = f"{spelled(given)} is not accepted; one of: {', '.join(accepted)}"
    return resolved.problem(Code.BAD_VALUE, path, what, fix=f"did you mean {meant!r}?" if meant else "")


def wrong_type(path: ConfigPath, detail: ErrorDetails, resolved: Resolved, advice: TypeAdvice | None = None) -> Problem:
    """Return the problem of a value of another kind; ``advice`` says how it is written, given path, kind and value."""
    given, expected = detail["input"], _EXPECTED.get(detail["type"])
    if detail["type"] == "too_short":
        return resolved.problem(Code.BAD_VALUE, path, "the list is empty", fix="name at least one device")
    if expected is None:
        return resolved.problem(Code.BAD_VALUE, path, detail["msg"].replace("Input should be", "the value should be"))
    what = f"expected {expected}, found {_describe(given)}"
    fix = advice(path, expected, given) if advice else ""
    if not fix and expected == "text" and isinstance(given, (int, float, bool)):
        fix = f"quote it: '{spelled(given)}'"
    return resolved.problem(Code.WRONG_TYPE, path, what, fix=fix)


def spelled(value: Any) -> str:
    """Return a value as YAML spells it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if isinstance(value, str) else str(value)


def _describe(value: Any) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return f"the boolean {spelled(value)}"
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the text {value!r}"
        case list():
            return "a list"
        case _:
            return "a mapping"
