"""Code of a source, run: by the texts that were read of it, and no others.

diffusers' own loader copies the code of every folder into one shared folder, where a file of one source is imported
by the code of another, today or a year later, and asks the hub for that of a repository each time
(``utils/dynamic_modules_utils.py``, ``get_cached_module_file``). Here each code is a package of its own, named after
its folder and texts. Nothing is copied, and neither byte code nor binary modules that lie beside it are run.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

from dmconfig.facts import CodeFile, CodeFiles
from dmconfig.remote_code import OwnCode

_lock = Lock()


def import_class(code: OwnCode) -> Any:
    """Return the class of code that the file grants. Runs its file, and those that it imports, the first time.

    Raises: whatever the code raises. AttributeError: it has no such class when it is run.
    """
    with _lock:
        _finder.add(code.files)
    return getattr(importlib.import_module(code.files.module), code.class_name)


class _Text(SourceLoader):
    """Runs one file as it was read. Its path is for tracebacks."""

    def __init__(self, file: CodeFile) -> None:
        self.file = file

    def get_filename(self, fullname: str) -> str:  # noqa: ARG002 - the loader of one file
        return str(self.file.path)

    def get_data(self, path: str | bytes) -> bytes:
        """Return the text. Python asks for no byte code, because this loader knows no age of a file."""
        if str(path) != str(self.file.path):
            raise OSError(f"{path!r} is not {self.file.path}")
        return self.file.text


class _Finder(MetaPathFinder):
    """Finds the modules of code that was granted in this process."""

    def __init__(self) -> None:
        self.files: dict[str, CodeFile] = {}

    def add(self, code: CodeFiles) -> None:
        """Let code be imported, as the package that it is named as."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        folder = code.files[0].path.parent
        for file in code.files:
            name = f"{code.package}.{file.module}"
            self.files[name] = file
            while "." in name:  # the packages that it is in, where they have no file
                name = name.rpartition(".")[0]
                self.files.setdefault(name, CodeFile("", folder / Path("__init__.py"), b""))

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the names here say where
        target: ModuleType | None = None,  # noqa: ARG002 - as above
    ) -> ModuleSpec | None:
        """Return how a module is made, or None for those of others."""
        file = self.files.get(fullname)
        if file is None:
            return None
        spec = spec_from_file_location(fullname, file.path, loader=_Text(file))
        if spec is not None and file.is_package:
            spec.submodule_search_locations = []  # of no folder: Python would look into it for byte code and binaries
        return spec


_finder = _Finder()
