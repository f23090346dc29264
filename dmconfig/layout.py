"""How a component is laid out: its modules with their bytes, in the order of the class, so that it can be split.

Weights files tell names and sizes but not classes, and old ones name modules as older versions did; so a component
that is split over devices is built once on the meta device, from its config alone. Nothing else needs this, and it is
the only reason for which a plan of known sizes imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmconfig.errors import Code, Problem, SourceError
from dmconfig.footprint import build_on_meta, module_bytes


@dataclass(frozen=True, slots=True)
class LaidOutModule:
    """One module: ``own_bytes`` are its own tensors, without its children.

    ``whole``: it stays on one device, because the class says so of its blocks, or because it has nothing below.
    ``shares_with`` is the module that holds a tensor of this one first (a tied weight).
    """

    path: str
    own_bytes: int
    whole: bool
    shares_with: str | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """What moves as one: a module with all below it (``path`` and ``nbytes``), and its largest layer."""

    path: str
    nbytes: int
    largest_leaf_bytes: int
    shares_with: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The modules of one component, parents before children, in the order of the class.

    ``can_split`` tells whether the class says which of its modules stay whole (``_no_split_modules``).
    """

    modules: tuple[LaidOutModule, ...]
    can_split: bool

    def has(self, path: str) -> bool:
        """Tell whether there is a module of this path."""
        return any(module.path == path for module in self.modules)

    def below(self, path: str) -> Iterator[LaidOutModule]:
        """Yield the module of this path and all within it."""
        return (module for module in self.modules if is_within(module.path, path))

    def blocks(self) -> tuple[Block, ...]:
        """Return what can be placed separately: all of the component but what parents of blocks hold themselves.

        A module without weights is in none: it runs wherever its input is.
        """
        parts: dict[str, list[LaidOutModule]] = {}
        block = None
        for module in self.modules:
            if block is None or not is_within(module.path, block):
                block = module.path if module.whole else None
            if block is not None:
                parts.setdefault(block, []).append(module)
        blocks = (_block(path, modules) for path, modules in parts.items())
        return tuple(block for block in blocks if block.nbytes or block.shares_with is not None)

    @property
    def outside_blocks_bytes(self) -> int:
        """The bytes of tensors that parents of blocks hold themselves."""
        return sum(module.own_bytes for module in self.modules) - sum(block.nbytes for block in self.blocks())


def _block(path: str, modules: Sequence[LaidOutModule]) -> Block:
    shared = (m.shares_with for m in modules if m.shares_with is not None and not is_within(m.shares_with, path))
    return Block(
        path=path,
        nbytes=sum(module.own_bytes for module in modules),
        largest_leaf_bytes=max(module.own_bytes for module in modules),
        shares_with=next(shared, None),
    )


def is_within(path: str, ancestor: str) -> bool:
    """Tell whether a module path is ancestor or below it; everything is within the empty path."""
    return not ancestor or path == ancestor or path.startswith(f"{ancestor}.")


def nearest_ancestor(path: str, paths: Mapping[str, Any]) -> str:
    """Return the longest of paths that path is within; "" where none is."""
    while path and path not in paths:
        path = path.rpartition(".")[0]
    return path


def lay_out(folder: Path, library: str, class_name: str, dtype: str) -> Layout:
    """Return how the component in folder is laid out once loaded in dtype. Imports torch; reads no weight.

    A tensor that several modules hold counts for the first.

    Raises: SourceError: SIZES_UNKNOWN when the class cannot be built from its config.
    """
    try:
        module = build_on_meta(folder, library, class_name, dtype)
    except Exception as error:  # code of other libraries, on a config nobody has checked: anything may come
        what = f"{folder.name} cannot be split: {class_name} cannot be built from its config.json"
        why = f"{type(error).__name__}: {error}"
        raise SourceError([Problem(code=Code.SIZES_UNKNOWN, what=what, why=why, origin=str(folder))]) from error
    return layout_of(module, dtype)


def layout_of(module: Any, dtype: str) -> Layout:
    """Return how a module is laid out; its tensors may be on meta."""
    sizes = dict(module_bytes(module, dtype))
    keep_whole = getattr(module, "_no_split_modules", None)
    return Layout(modules=tuple(_modules(module, sizes, frozenset(keep_whole or ()))), can_split=keep_whole is not None)


def _modules(root: Any, sizes: Mapping[str, int], keep_whole: frozenset[str]) -> Iterator[LaidOutModule]:
    holders: dict[int, str] = {}  # of each tensor, the module that holds it first
    for path, module in root.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        shared = next((holders[id(tensor)] for _, tensor in own if id(tensor) in holders), None)
        nbytes = sum(sizes[f"{path}.{name}" if path else name] for name, tensor in own if id(tensor) not in holders)
        holders.update((id(tensor), path) for _, tensor in own if id(tensor) not in holders)
        whole = type(module).__name__ in keep_whole or not any(True for _ in module.children())
        yield LaidOutModule(path, nbytes, whole, shared)
