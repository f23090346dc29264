"""What is wanted of the repositories on the hub, and what of it is on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dmconfig.assembly import Assembly, Component
from dmconfig.errors import DMConfigError
from dmconfig.measure import component_weights
from dmconfig.paths import ROOT, ConfigPath
from dmconfig.source import INDEX_FILE, Source, find_snapshot
from dmconfig.units import format_bytes
from dmconfig.weights import find_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A repository of the hub at a revision, and what is wanted of it; ``path`` is where the file names it."""

    hub_id: str
    revision: str | None = None
    components: tuple[Component, ...] = ()
    is_pipeline: bool = False
    path: ConfigPath = ROOT

    @property
    def snapshot(self) -> Path | None:
        """Its folder in the cache, whole or not."""
        return find_snapshot(self.hub_id, self.revision)

    def __str__(self) -> str:
        return f"{self.hub_id!r} (revision {self.revision})" if self.revision else repr(self.hub_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The files of a repository that are needed, and how many of them, of how many bytes, are not here."""

    repository: Repository
    revision: str | None
    commit: str = ""
    files: tuple[str, ...]
    missing_files: int = 0
    missing_bytes: int = 0

    @property
    def is_here(self) -> bool:
        """Whether all of it is in the cache, and the revision leads there."""
        if not self.files:
            return True
        snapshot = find_snapshot(self.repository.hub_id, self.revision)
        return snapshot is not None and snapshot.name == self.commit and not self.missing_files

    def __str__(self) -> str:
        files = "1 file" if self.missing_files == 1 else f"{self.missing_files} files"
        return f"{self.repository.hub_id} ({files}, {format_bytes(self.missing_bytes)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What the hub says is in a repository: the bytes of every file, at a commit."""

    commit: str
    sizes: Mapping[str, int]


def repositories(assembly: Assembly) -> list[Repository]:
    """The repositories that assembly is made from, with all it takes from each."""
    found: dict[tuple[str, str | None], Repository] = {}

    def add(source: Source, path: ConfigPath, *components: Component) -> None:
        if source.hub_id is None:
            return
        key = (source.hub_id, source.revision)
        known = found.get(key) or Repository(hub_id=key[0], revision=key[1], path=path)
        is_pipeline = known.is_pipeline or source is assembly.source
        found[key] = replace(known, components=(*known.components, *components), is_pipeline=is_pipeline)

    add(assembly.source, ("pipeline", "source"))
    for component in assembly.loaded:
        own = component.source is not assembly.source
        add(component.source, (*component.path, "source") if own else ("pipeline", "source"), component)
    return list(found.values())


def lacks(repository: Repository) -> list[str]:
    """What must be downloaded before the pipeline can be loaded, in words."""
    index_here = repository.snapshot is not None and (repository.snapshot / INDEX_FILE).is_file()
    lacking = [INDEX_FILE] if repository.is_pipeline and not index_here else []
    for component in repository.components:
        if component.folder is None:
            lacking.append(component.name)
        elif component.is_module and not _is_whole_module(component, component.folder):
            wanted = component.variant if component.variant_required else None
            lacking.append(
                f"the {wanted} weights of {component.name}" if wanted else f"the weights of {component.name}"
            )
    return lacking


def _is_whole_module(component: Component, folder: Path) -> bool:
    try:
        return (folder / "config.json").is_file() and component_weights(component) is not None
    except DMConfigError:  # an index without its files
        return False


def may_lack(repository: Repository) -> bool:
    """Whether the hub may have weights of the pipeline's variant where this machine has plain ones."""
    inheriting = [each for each in repository.components if each.is_module and inherits_variant(each)]
    return any(not has_variant(each) for each in inheriting)


def inherits_variant(component: Component) -> bool:
    """Whether the component has its variant from the pipeline, and does without where there is none."""
    return component.variant is not None and not component.variant_required


def has_variant(component: Component) -> bool:
    """Whether weights of the component's variant are here."""
    if component.folder is None:
        return False
    try:
        return find_weights(component.folder, library=component.library, variant=component.variant) is not None
    except DMConfigError:
        return False


def existing_parent(folder: Path) -> Path:
    """Return folder or the nearest of its parents that exists."""
    return next(each for each in (folder, *folder.parents) if each.exists())
