"""What expressions in source say without being run: values of attributes and defaults, names in annotations."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dmconfig.facts.source import ClassSource, Module, Sources, original_name

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.BitOr: operator.or_,
}
_COLLECTIONS: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
# Written around the classes in question; the others (dict, Callable, Literal...) take no component.
_CONTAINERS = frozenset(
    {"Optional", "Union", "Annotated", "list", "List", "tuple", "Tuple", "set", "Sequence", "Iterable"}
)
_TYPING = frozenset({"Any", "Callable", "Dict", "Ellipsis", "List", "Literal", "Mapping", "None", "Tuple", "Type"})
_BUILTINS = frozenset({"bool", "bytes", "callable", "complex", "dict", "float", "int", "object", "str", "type"})
_NOT_COMPONENTS = _TYPING | _BUILTINS | _CONTAINERS


class UnknownValueError(Exception):
    """The expression is not one that can be understood without running it."""


@dataclass(frozen=True, slots=True)
class Annotation:
    """The class names an annotation mentions, in the order written, and whether it allows None."""

    types: tuple[str, ...]
    allows_none: bool


def evaluate(sources: Sources, module: Module, node: ast.expr) -> Any:
    """Return the value node has in module: literals, names, attributes of classes, and arithmetic on these.

    Raises:
        UnknownValueError: when it is anything else.
    """
    try:
        return _evaluate(sources, module, node)
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise UnknownValueError(ast.dump(node)) from error


def _evaluate(sources: Sources, module: Module, node: ast.expr) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Tuple() | ast.List() | ast.Set():
            return _elements(sources, module, node)
        case ast.Dict():
            return _items(sources, module, node)
        case ast.UnaryOp(op=ast.USub()):
            return -evaluate(sources, module, node.operand)
        case ast.BinOp() if type(node.op) in _OPERATORS:
            left, right = (evaluate(sources, module, side) for side in (node.left, node.right))
            return _OPERATORS[type(node.op)](left, right)
        case ast.Name():
            return _named(sources, module, node.id)
        case ast.Attribute(value=ast.Name(id=owner)):
            return class_value(sources, sources.find_class(module.name, owner), node.attr)
        case ast.Subscript():
            return evaluate(sources, module, node.value)[_subscript(sources, module, node.slice)]
        case ast.Call(func=ast.Name(id=name), args=[argument]) if name in _COLLECTIONS:
            return _COLLECTIONS[name](evaluate(sources, module, argument))
    raise UnknownValueError(ast.dump(node))


def class_value(sources: Sources, source: ClassSource | None, attribute: str) -> Any:
    """Return the value of a class attribute, inherited ones included; None when no class in sight sets it.

    Raises:
        UnknownValueError: when it is set to something that is not understood, or is a property or method.
    """
    for ancestor in [] if source is None else sources.mro(source):
        if isinstance(ancestor, ClassSource) and (node := _bound(ancestor.node, attribute)) is not None:
            if isinstance(node, ast.expr):
                return evaluate(sources, ancestor.module, node)
            raise UnknownValueError(f"{attribute} is computed")
    return None


def own_attribute(node: ast.ClassDef, attribute: str) -> ast.expr | ast.FunctionDef | None:
    """Return what the class statement itself binds to attribute: the last one, as in Python."""
    found: ast.expr | ast.FunctionDef | None = None
    for statement in node.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == attribute:
                found = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if name == attribute:
                found = value
            case ast.FunctionDef(name=name) if name == attribute:
                found = statement
    return found


def methods_of(sources: Sources, source: ClassSource, name: str) -> Iterator[tuple[Module, ast.FunctionDef]]:
    """Yield a method as a class and its bases have it, the class's own first, each with the module it is written in."""
    for ancestor in sources.mro(source):
        if isinstance(ancestor, ClassSource):
            node = own_attribute(ancestor.node, name)
            if isinstance(node, ast.FunctionDef):
                yield ancestor.module, node


def method_of(sources: Sources, source: ClassSource, name: str) -> tuple[Module, ast.FunctionDef] | None:
    """Return the method that a class has, its own or inherited, or None."""
    return next(methods_of(sources, source, name), None)


def _bound(node: ast.ClassDef, attribute: str) -> ast.expr | ast.FunctionDef | None:
    """Return what the class binds to attribute, one step further where that is another name of the class."""
    found = own_attribute(node, attribute)
    if isinstance(found, ast.Name) and found.id != attribute:
        return own_attribute(node, found.id) or found
    return found


def read_annotation(sources: Sources, module: Module, node: ast.expr | None) -> Annotation:
    """Return the classes that node mentions. Names are those under which the classes were defined."""
    names = list(dict.fromkeys(_names(sources, module, node)))
    return Annotation(tuple(name for name in names if name not in _NOT_COMPONENTS), "None" in names)


def _elements(sources: Sources, module: Module, node: ast.Tuple | ast.List | ast.Set) -> Any:
    values: list[Any] = []
    for element in node.elts:
        if isinstance(element, ast.Starred):
            values.extend(evaluate(sources, module, element.value))
        else:
            values.append(evaluate(sources, module, element))
    return {ast.Tuple: tuple, ast.List: list, ast.Set: set}[type(node)](values)


def _items(sources: Sources, module: Module, node: ast.Dict) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        inner = evaluate(sources, module, value)
        found.update(inner if key is None else {evaluate(sources, module, key): inner})
    return found


def _subscript(sources: Sources, module: Module, node: ast.expr) -> Any:
    if not isinstance(node, ast.Slice):
        return evaluate(sources, module, node)
    bounds = (node.lower, node.upper, node.step)
    return slice(*(None if bound is None else evaluate(sources, module, bound) for bound in bounds))


def _named(sources: Sources, module: Module, name: str) -> Any:
    found = sources.find(module.name, name)
    if found is None or isinstance(found[1], ast.ClassDef):
        raise UnknownValueError(name)
    return evaluate(sources, found[0], found[1])


def _names(sources: Sources, module: Module, node: ast.expr | None) -> list[str]:
    match node:
        case ast.Constant(value=None):
            return ["None"]
        case ast.Constant(value=str(text)):  # a forward reference
            return _names(sources, module, _parsed(text))
        case ast.BinOp():
            return [*_names(sources, module, node.left), *_names(sources, module, node.right)]
        case ast.Subscript():
            return _names_inside(sources, module, node)
        case ast.Tuple():
            return [name for element in node.elts for name in _names(sources, module, element)]
        case ast.Attribute():
            return [node.attr]
        case ast.Name():
            return _name_or_alias(sources, module, node.id)
    return []


def _names_inside(sources: Sources, module: Module, node: ast.Subscript) -> list[str]:
    outer = _names(sources, module, node.value)
    if outer and outer[0] not in _CONTAINERS:
        return [] if outer[0] in _NOT_COMPONENTS else outer  # a generic class, not what it is generic in
    return [*(["None"] if outer == ["Optional"] else []), *_names(sources, module, node.slice)]


def _name_or_alias(sources: Sources, module: Module, name: str) -> list[str]:
    """Return the classes behind ``name = Union[...]``, or the name itself."""
    if name not in module.imports and isinstance(alias := module.values.get(name), ast.Subscript | ast.BinOp):
        return _names(sources, module, alias)
    return [original_name(module, name)]


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
