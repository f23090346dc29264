"""What the models of files share: their base, and pydantic's errors as problems at their place in the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import ErrorDetails, PydanticCustomError

from dmconfig.devices import nearest_device
from dmconfig.errors import Code, Problem, nearest
from dmconfig.hints import VALUE_HINTS
from dmconfig.paths import ConfigPath
from dmconfig.resolve import Resolved
from dmconfig.units import parse_size

DeviceAdvice = Callable[[ConfigPath, Any, str], tuple[str, str]]
"""From the path, what is written there and what is wrong with it: what is wrong in more words, and how to mend it."""
TypeAdvice = Callable[[ConfigPath, str, Any], str]


class Model(BaseModel):
    """Base of all models of the file: frozen, and nothing unknown is accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def _size(value: object) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise PydanticCustomError("bad_size", "{text}", {"text": str(error)}) from None


Size = Annotated[int, BeforeValidator(_size, json_schema_input_type=str | int)]

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
