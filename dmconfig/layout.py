"""How a component is laid out: its modules with their bytes, in the order of the class, so that it can be split.

Where a component's own names are those of its modules, as in diffusers, the headers of its weights tell all that is
needed. transformers renames what it loads, so a component of it that is split is built once on the meta device, from
its config alone: the only reason for which a plan of known sizes imports torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from dmconfig.errors import Code, Problem, SourceError
from dmconfig.footprint import build_on_meta, module_bytes


class LaidOutModule(NamedTuple):
    """One module: ``own_bytes`` are its own tensors, without its children.

    ``whole``: it stays on one device, because the class says so of its blocks, or because it has nothing below.
    ``shares_with`` is the module that holds a tensor of this one first (a tied weight, or this very module elsewhere).
    """

    path: str
    own_bytes: int
    whole: bool
    shares_with: str | None = None


class Block(NamedTuple):
    """What moves as one: a module with all below it (``path`` and ``nbytes``), and its largest layer."""

    path: str
    nbytes: int
    largest_leaf_bytes: int
    shares_with: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The modules of one component that hold weights or parts that do, parents before children, in the class's order.

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
        largest_leaf_bytes=max(chain_bytes({module.path: module.own_bytes for module in modules}).values()),
        shares_with=next(shared, None),
    )


def chain_bytes(own: Mapping[str, int]) -> Mapping[str, int]:
    """Return for every module its own bytes and those of the modules it is in: what is there while it runs.

    A module's own tensors are brought for as long as it runs, and the layers below it run within that time.
    """
    chains: dict[str, int] = {}
    for path in sorted(own, key=lambda path: path.count(".") if path else -1):  # parents first
        above = path.rpartition(".")[0] if path else None
        chains[path] = own[path] + (chains.get(above, 0) if above is not None else 0)
    return chains


def with_more(layout: Layout, tensors: Iterable[tuple[str, int]]) -> Layout:
    """Return a layout with more tensors: each counts for the module that its name leads to, or the nearest above."""
    paths = {module.path: 0 for module in layout.modules}
    more = dict(paths)
    for name, nbytes in tensors:
        more[nearest_ancestor(name.rpartition(".")[0], paths)] += nbytes
    if not any(more.values()):
        return layout
    modules = tuple(module._replace(own_bytes=module.own_bytes + more[module.path]) for module in layout.modules)
    return replace(layout, modules=modules)


def is_within(path: str, ancestor: str) -> bool:
    """Tell whether a module path is ancestor or below it; everything is within the empty path."""
    return not ancestor or path == ancestor or path.startswith(f"{ancestor}.")


def nearest_ancestor(path: str, paths: Mapping[str, Any]) -> str:
    """Return the longest of paths that path is within; "" where none is."""
    while path and path not in paths:
        path = path.rpartition(".")[0]
    return path


def layout_of_tensors(
    sizes: Iterable[tuple[str, int]],
    *,
    order: Sequence[str],
    can_split: bool,
    ties: Mapping[str, str] | None = None,
    whole: Collection[str] = (),
) -> Layout:
    """Return the layout that the names of tensors tell, with the bytes of each, tied ones once.

    Members of lists stay whole (``transformer_blocks.7``): they are the blocks that classes name, or hold them.

    Args:
        sizes: name and bytes of every tensor, once loaded.
        order: the members of the class in the order it makes them; files have another.
        can_split: whether the class says which of its modules stay whole.
        ties: modules that hold no tensor of their own, and the one whose tensor each shares.
        whole: what stays whole beside members of lists, and beside modules with nothing below.
    """
    own, ties, whole = dict[str, int](), ties or {}, {*whole}
    for name, nbytes in (*sizes, *((f"{path}.weight", 0) for path in ties)):
        path = name.rpartition(".")[0]
        own[path] = own.get(path, 0) + nbytes
        while path:
            path = path.rpartition(".")[0]
            own.setdefault(path, 0)
    ranks = {member: rank for rank, member in enumerate(order)}
    paths = sorted(own, key=lambda path: _rank(path, ranks))
    parents = {path.rpartition(".")[0] for path in paths if path}
    whole |= {path for path in paths if _is_block(path) or path not in parents}
    modules = (LaidOutModule(path, own[path], path in whole, ties.get(path)) for path in paths)
    return Layout(modules=tuple(modules), can_split=can_split)


def _rank(path: str, ranks: Mapping[str, int]) -> tuple[object, ...]:
    """The place of a path among all: members of the class as it orders them, members of lists by number."""
    first, *rest = path.split(".")
    return (-1,) if not path else (ranks.get(first, len(ranks)), first, *(_number_or_name(part) for part in rest))


def _number_or_name(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdigit() else (-1, part)


def _is_block(path: str) -> bool:
    """Tell whether a path is a member of a list that is within no member of another."""
    *above, last = path.split(".")
    return last.isdigit() and not any(part.isdigit() for part in above)


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
    # also one that is in two places, as the embeddings of T5 are before transformers 5: it moves as a tied weight does
    for path, module in root.named_modules(remove_duplicate=False):
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        shared = next((holders[id(tensor)] for _, tensor in own if id(tensor) in holders), None)
        nbytes = sum(sizes[f"{path}.{name}" if path else name] for name, tensor in own if id(tensor) not in holders)
        holders.update((id(tensor), path) for _, tensor in own if id(tensor) not in holders)
        whole = type(module).__name__ in keep_whole or not any(True for _ in module.children())
        yield LaidOutModule(path, nbytes, whole, shared)
