"""Modules, names and inheritance of the installed packages, read with ``ast``.

A name is followed the way Python would: classes and assignments of the module, its imports, re-exports of a
package's ``__init__``. Both packages fill their ``__init__`` lazily at run time and repeat the same names as
imports for type checkers; those imports are what is followed. Star imports of whole packages are answered
from an index of all class statements, because following hundreds of modules would cost seconds.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dmconfig.facts.index import Index, build_index, read_text
from dmconfig.facts.installed import Library
from dmconfig.facts.records import CodeFile, CodeFiles

_QUOTED = re.compile(r"""["'](\w+)["']""")


@dataclass(slots=True)
class Module:
    """The top level of one parsed file. ``exported`` is None when it has no ``__all__``."""

    name: str
    is_package: bool
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    values: dict[str, ast.expr] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    exported: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class ClassSource:
    """A class statement and the module it stands in."""

    module: Module
    node: ast.ClassDef

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from every other class: module and name."""
        return (self.module.name, self.node.name)


Ancestor = ClassSource | str
"""A base class; of a class outside the installed libraries only the name is known."""


class Sources:
    """The source of the given libraries; modules are parsed when first needed and kept."""

    def __init__(self, libraries: tuple[Library, ...]) -> None:
        self._libraries = {library.name: library for library in libraries}
        self._modules: dict[str, Module | None] = {}
        self._indexes: dict[str, Index] = {}

    def module(self, name: str) -> Module | None:
        """Return the module called name, or None when it is not a readable file of the libraries."""
        if name not in self._modules:
            self._modules[name] = self._parse(name)
        return self._modules[name]

    def index(self, library: str) -> Index:
        """Return all class statements of library; empty when it is not installed."""
        if library not in self._indexes:
            known = self._libraries.get(library)
            self._indexes[library] = build_index(known) if known else {}
        return self._indexes[library]

    def public_class(self, library: str, name: str) -> ClassSource | None:
        """Return the class that ``library.name`` is, or None when the library exports no such class."""
        if (found := self.find_class(library, name)) is not None:
            return found
        named = name in self.quoted(library)  # lazily exported, and not repeated for type checkers
        exporting = (each for each in self._candidates(library, name) if named or name in (each.exported or ()))
        return next((ClassSource(each, each.classes[name]) for each in exporting if name in each.classes), None)

    def quoted(self, library: str) -> frozenset[str]:
        """Return the names written as strings in library's ``__init__``, where it lists what it exports."""
        if (known := self._libraries.get(library)) is None:
            return frozenset()
        return frozenset(_QUOTED.findall(read_text(known.folder / "__init__.py")))

    def find_class(self, module: str, name: str) -> ClassSource | None:
        """Return the class that name means in module; imports and ``A = B`` are followed."""
        found = self.find(module, name)
        if found is None:
            return None
        where, node = found
        if isinstance(node, ast.ClassDef):
            return ClassSource(where, node)
        if isinstance(node, ast.Name) and node.id != name:
            return self.find_class(where.name, node.id)
        return None

    def find(self, module: str, name: str) -> tuple[Module, ast.ClassDef | ast.expr] | None:
        """Return where name, as seen in module, is defined: the class statement or the assigned expression."""
        return self._find(module, name, frozenset())

    def bases(self, source: ClassSource) -> list[Ancestor]:
        """Return the direct bases of a class, in the order written; ``object`` is left out."""
        found = (self._base(source.module, node) for node in source.node.bases)
        return [base for base in found if base is not None and base != "object"]

    def mro(self, source: ClassSource) -> list[Ancestor]:
        """Return the class and all its bases in the order Python searches them (C3), without ``object``."""
        bases = self.bases(source)
        parents: list[list[Ancestor]] = [self.mro(base) if isinstance(base, ClassSource) else [base] for base in bases]
        return [source, *_merge([*parents, bases])]

    def _parse(self, name: str) -> Module | None:
        library = self._libraries.get(name.partition(".")[0])
        if library is None or (path := _file(library, name)) is None:
            return None
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return None
        return _read_module(name, path.name == "__init__.py", tree)

    def _find(self, module: str, name: str, seen: frozenset[str]) -> tuple[Module, ast.ClassDef | ast.expr] | None:
        source = self.module(module)
        if source is None or module in seen:
            return None
        if name in source.classes:
            return source, source.classes[name]
        seen |= {module}
        if name in source.imports and (found := self._find(*source.imports[name], seen)):
            return found
        if name in source.values:
            return source, source.values[name]
        return self._find_in_stars(source, name)

    def _find_in_stars(self, source: Module, name: str) -> tuple[Module, ast.ClassDef | ast.expr] | None:
        for star in source.stars:
            for candidate in self._candidates(star.partition(".")[0], name):
                inside = candidate.name == star or candidate.name.startswith(f"{star}.")
                if inside and (candidate.exported is None or name in candidate.exported):
                    return self.find(candidate.name, name)
        return None

    def _candidates(self, library: str, name: str) -> Iterator[Module]:
        """Yield the modules that define a class called name."""
        for module, _ in self.index(library).get(name, ()):
            if (source := self.module(module)) is not None:
                yield source

    def _base(self, module: Module, node: ast.expr) -> Ancestor | None:
        match node:
            case ast.Subscript():  # Generic[T], or a class made generic
                return self._base(module, node.value)
            case ast.Name():
                return self.find_class(module.name, node.id) or original_name(module, node.id)
            case ast.Attribute():
                return self._qualified(module, node) or node.attr
        return None

    def _qualified(self, module: Module, node: ast.Attribute) -> ClassSource | None:
        """Return the class written as ``imported_module.Name``, if that module is of the libraries."""
        if not isinstance(node.value, ast.Name) or node.value.id not in module.imports:
            return None
        package, name = module.imports[node.value.id]
        return self.find_class(f"{package}.{name}" if name else package, node.attr)


class SourcesWithCode(Sources):
    """The source of code of no library, beside the libraries that it is made on, whose modules it shares."""

    def __init__(self, sources: Sources, code: CodeFiles) -> None:
        self._beside = sources
        self._libraries, self._indexes = sources._libraries, sources._indexes
        self._modules = {f"{code.package}.{file.module}": _module_of(code, file) for file in code.files}

    def module(self, name: str) -> Module | None:
        """Return the module called name, of the code or of the libraries, or None."""
        return self._modules[name] if name in self._modules else self._beside.module(name)


def _module_of(code: CodeFiles, file: CodeFile) -> Module:
    return _read_module(f"{code.package}.{file.module}", file.is_package, ast.parse(file.text))


def original_name(module: Module, name: str) -> str:
    """Return the name under which an imported name was defined: ``A`` for ``from x import A as B``."""
    return module.imports[name][1] or name if name in module.imports else name


def _file(library: Library, module: str) -> Path | None:
    path = library.folder.joinpath(*module.split(".")[1:])
    choices = (path / "__init__.py", path.parent / f"{path.name}.py")
    return next((choice for choice in choices if choice.is_file()), None)


def _read_module(name: str, is_package: bool, tree: ast.Module) -> Module:
    module = Module(name, is_package)
    for statement in _top_level(tree.body):
        _read_statement(module, statement)
    return module


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that can define a name of the module, those under ``if`` and ``try`` included."""
    for statement in body:
        match statement:
            case ast.If():
                yield from _top_level([*statement.body, *statement.orelse])
            case ast.Try():
                handlers = [inner for handler in statement.handlers for inner in handler.body]
                yield from _top_level([*statement.body, *handlers, *statement.orelse])
            case _:
                yield statement


def _read_statement(module: Module, statement: ast.stmt) -> None:
    match statement:
        case ast.ClassDef():
            module.classes.setdefault(statement.name, statement)
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            module.exported = _strings(statement.value)
        case ast.Assign(targets=[ast.Name(id=name)]):
            module.values.setdefault(name, statement.value)
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            module.values.setdefault(name, value)
        case ast.ImportFrom():
            _read_import_from(module, statement)
        case ast.Import():
            for alias in statement.names:
                module.imports.setdefault(alias.asname or alias.name, (alias.name, ""))


def _read_import_from(module: Module, statement: ast.ImportFrom) -> None:
    target = _absolute(module, statement)
    if target.rpartition(".")[2].startswith("dummy_"):  # stand-ins that raise when an optional package is missing
        return
    for alias in statement.names:
        if alias.name == "*":
            module.stars.append(target)
        else:
            module.imports.setdefault(alias.asname or alias.name, (target, alias.name))


def _absolute(module: Module, statement: ast.ImportFrom) -> str:
    """Return the full name of the module that a ``from ... import`` reads."""
    if not statement.level:
        return statement.module or ""
    parts = module.name.split(".")
    up = statement.level - 1 if module.is_package else statement.level
    return ".".join([*parts[: len(parts) - up], *([statement.module] if statement.module else [])])


def _strings(node: ast.expr) -> frozenset[str] | None:
    try:
        return frozenset(ast.literal_eval(node))
    except (ValueError, TypeError):
        return None


def _merge(sequences: list[list[Ancestor]]) -> list[Ancestor]:
    """Return the C3 merge of sequences; where none exists, the first head goes next, so that no base is lost."""
    merged: list[Ancestor] = []
    while sequences := [sequence for sequence in sequences if sequence]:
        later = {_identity(each) for sequence in sequences for each in sequence[1:]}
        heads = [sequence[0] for sequence in sequences]
        chosen = next((head for head in heads if _identity(head) not in later), heads[0])
        merged.append(chosen)
        sequences = [[each for each in sequence if _identity(each) != _identity(chosen)] for sequence in sequences]
    return merged


def _identity(ancestor: Ancestor) -> tuple[str, str]:
    return ancestor.key if isinstance(ancestor, ClassSource) else ("", ancestor)
