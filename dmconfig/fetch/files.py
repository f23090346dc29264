"""Which files of a repository a component needs, from the list of its files alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from dmconfig.source import INDEX_FILES, PICKLES, SINGLE_FILES
from dmconfig.weights import weight_names

_TEXT_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".spm", ".tiktoken"})
"""Configs, vocabularies, merges, sentencepiece models, chat templates: what is not weights, and not code."""

WEIGHTS_SUFFIX = ".safetensors"
WEIGHTS_ENDS = (*SINGLE_FILES, *PICKLES)
_WEIGHTS_INDEX = re.compile(r".*\.index(\.[\w-]+)?\.json")


def needed_files(
    files: Sequence[str],
    folder: str = "",
    *,
    library: str = "diffusers",
    variant: str | None = None,
    variant_required: bool = False,
    weights: bool = True,
    pickled: bool = False,
) -> tuple[str, ...]:
    """Return the files of a repository that one component of it needs, sorted; pure.

    Args:
        files: the names of all files of the repository.
        folder: the component's folder in it; empty for a repository that is one model.
        library: whose loader reads it, which decides the names of weights.
        variant: weights variant; where the component has none of it, its plain weights are taken.
        variant_required: take no plain weights in place of a variant.
        weights: whether the component has weights; never more than one set of them is taken.
        pickled: take pickles where there are no safetensors.

    Example:
        >>> needed_files(["vae/config.json", "vae/model.fp16.safetensors", "vae/model.safetensors", "vae/m.bin"],
        ...              "vae", library="transformers", variant="fp16")
        ('vae/config.json', 'vae/model.fp16.safetensors')
    """
    prefix = f"{folder}/" if folder else ""
    names = {file.removeprefix(prefix) for file in files if file.startswith(prefix)}
    names = {name for name in names if "/" not in name}
    chosen = {name for name in names if _is_text(name)}
    if weights:
        variants = [variant] if variant_required or variant is None else [variant, None]
        sets = (
            _weights_among(names, library, each, pickled=kind)
            for kind in ((False, True) if pickled else (False,))
            for each in variants
        )
        chosen.update(next(filter(None, sets), ()))
    return tuple(sorted(prefix + name for name in chosen))


def _is_text(name: str) -> bool:
    return PurePosixPath(name).suffix in _TEXT_SUFFIXES and not _WEIGHTS_INDEX.fullmatch(name)


def _weights_among(names: set[str], library: str, variant: str | None, *, pickled: bool) -> tuple[str, ...]:
    """One set of weights, chosen as ``find_weights`` chooses: a file, or an index and its shards."""
    end = ".bin" if pickled else WEIGHTS_SUFFIX
    for name in weight_names(library, variant, pickled=pickled):
        if name not in names:
            continue
        if name.endswith(end):
            return (name,)
        shards = _shards_among(names, name.partition(end)[0], variant, end)
        if shards:
            return (name, *shards)
    return ()


def _shards_among(names: set[str], stem: str, variant: str | None, end: str) -> tuple[str, ...]:
    # two forms for a variant: older versions of both libraries wrote it at the end
    number, stem = r"-\d+-of-\d+", re.escape(stem)
    forms = [stem + number] if variant is None else [f"{stem}.{variant}{number}", f"{stem}{number}.{variant}"]
    shard = re.compile(rf"({'|'.join(forms)}){re.escape(end)}")
    return tuple(name for name in names if shard.fullmatch(name))


def folder_of(name: str, subfolder: str | None, files: Sequence[str], *, is_pipeline: bool = False) -> str:
    """Return where in a repository a component is, by the rule of ``assembly``: as asked, by its name, or the root."""
    if subfolder:
        return subfolder.strip("/")
    return name if is_pipeline or any(index in files for index in INDEX_FILES) else ""
