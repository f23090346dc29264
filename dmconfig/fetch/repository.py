"""What is wanted of the repositories on the hub, and what of it is on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dmconfig.assembly import Assembly, Component
from dmconfig.errors import DMConfigError
from dmconfig.paths import ROOT, ConfigPath
from dmconfig.source import INDEX_FILE, INDEX_FILES, Source, find_snapshot
from dmconfig.stored import component_weights, config_folder_of
from dmconfig.units import format_bytes
from dmconfig.weights import find_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A repository of the hub at a revision, and what is wanted of it; ``path`` is where the file names it.

    Wanted are ``components``, the configs alone of those that are ``configured`` by it, and ``files`` of weights.
    ``local_only``: the spec forbids asking the hub for it.
    """

    hub_id: str
    revision: str | None = None
    components: tuple[Component, ...] = ()
    configured: tuple[Component, ...] = ()
    files: tuple[str, ...] = ()
    is_pipeline: bool = False
    local_only: bool = False
    path: ConfigPath = ROOT

    @property
    def snapshot(self) -> Path | None:
        """Its folder in the cache, whole or not."""
        return find_snapshot(self.hub_id, self.revision)

    def __str__(self) -> str:
        return f"{self.hub_id!r} (revision {self.revision})" if self.revision else repr(self.hub_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file as the hub describes it: its hash by git (of a large file, that of its pointer), or by SHA-256."""

    name: str
    nbytes: int
    git_sha1: str | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The files of a repository that are needed, and those of them that are not here."""

    repository: Repository
    revision: str | None
    commit: str = ""
    files: tuple[str, ...]
    missing: tuple[File, ...] = ()

    @property
    def missing_bytes(self) -> int:
        """The bytes of what is not here."""
        return sum(file.nbytes for file in self.missing)

    @property
    def is_here(self) -> bool:
        """Whether all of it is in the cache, and the revision leads there."""
        if not self.files:
            return True
        snapshot = find_snapshot(self.repository.hub_id, self.revision)
        return snapshot is not None and snapshot.name == self.commit and not self.missing

    def __str__(self) -> str:
        files = "1 file" if len(self.missing) == 1 else f"{len(self.missing)} files"
        return f"{self.repository.hub_id} ({files}, {format_bytes(self.missing_bytes)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What the hub says is in a repository: every file by its name, at a commit."""

    commit: str
    files: Mapping[str, File]


def selection_of(repository: Repository, revision: str | None, listing: Listing, files: tuple[str, ...]) -> Selection:
    """Return files of a repository as the hub lists it, and which of them are not here."""
    here = find_snapshot(repository.hub_id, listing.commit)
    missing = (listing.files[file] for file in files if here is None or not (here / file).is_file())
    return Selection(
        repository=repository,
        revision=revision,
        commit=listing.commit,
        files=files,
        missing=tuple(missing),
    )


def repositories(assembly: Assembly) -> list[Repository]:
    """The repositories that assembly is made from, with all it takes from each."""
    found: dict[tuple[str, str | None], Repository] = {}

    def of(source: Source, path: ConfigPath) -> Repository:
        key = (source.hub_id or "", source.revision)
        known = found.get(key) or Repository(hub_id=key[0], revision=key[1], path=path, local_only=source.local_only)
        is_pipeline = known.is_pipeline or source is assembly.source
        return replace(known, is_pipeline=is_pipeline, local_only=known.local_only or source.local_only)

    def add(repository: Repository) -> None:
        if repository.hub_id:
            found[repository.hub_id, repository.revision] = repository

    in_file = any(component.shares_file for component in assembly.loaded)
    home_path: ConfigPath = ("pipeline", "config" if in_file else "source")
    add(of(assembly.source, home_path))
    for component in assembly.loaded:
        own = component.path if component.path[-1] == "source" else (*component.path, "source")
        if component.is_single_file:
            repository = of(component.source, own)
            files = dict.fromkeys((*repository.files, component.source.file or ""))
            add(replace(repository, files=tuple(files)))
            if component.original_config is not None:
                of_authors = of(component.original_config.source, component.original_config.path)
                files = dict.fromkeys((*of_authors.files, component.original_config.source.file or ""))
                add(replace(of_authors, files=tuple(files)))
                continue
            repository = of(component.home, home_path if component.home is assembly.source else (*own[:-1], "config"))
            add(replace(repository, configured=(*repository.configured, component)))
        else:
            repository = of(component.source, home_path if component.source is assembly.source else own)
            add(replace(repository, components=(*repository.components, component)))
    return list(found.values())


def lacks(repository: Repository) -> list[str]:
    """What must be downloaded before the pipeline can be loaded, in words."""
    snapshot = repository.snapshot
    index_here = snapshot is not None and any((snapshot / index).is_file() for index in INDEX_FILES)
    lacking = [INDEX_FILE] if repository.is_pipeline and not index_here else []
    lacking += [file for file in repository.files if snapshot is None or not (snapshot / file).is_file()]
    configured = (component for component in repository.configured if config_folder_of(component) is None)
    lacking += [f"the config of {component.name}" for component in configured]
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


def size_of(file: Path) -> int:
    """Return the bytes of a file; 0 for one that is gone."""
    try:
        return file.stat().st_size
    except OSError:
        return 0
