"""Adapters: LoRAs, textual inversions and IP-Adapters. Where their files are, what they weigh, and how they get on.

Sizes come from the headers of the files, as those of components do. Putting them on is left to diffusers' own methods,
before anything is placed; a pipeline on which one of them fails is not handed out. Fetching is for ``fetch``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from dmconfig.errors import BuildError, Code, DMConfigError, Problem, nearest
from dmconfig.facts import PipelineFacts
from dmconfig.paths import ConfigPath
from dmconfig.resolve import Resolved
from dmconfig.source import find_snapshot, is_hub_id, is_local
from dmconfig.spec import AdapterSpec, IpAdapterSpec, LoraSpec, Spec, TextualInversionSpec
from dmconfig.weights import TensorInfo, read_header

SUFFIX = ".safetensors"
_MIXINS = {LoraSpec: "LoraBaseMixin", TextualInversionSpec: "TextualInversionLoaderMixin"}
"""What a pipeline class that takes an adapter is based on. For IP-Adapters there are several."""
_KINDS: Mapping[type[AdapterSpec], str] = {
    LoraSpec: "LoRA", TextualInversionSpec: "textual inversion", IpAdapterSpec: "IP-Adapter",
}  # fmt: skip
_KOHYA = {"lora_unet": None, "lora_transformer": None, "lora_te": "text_encoder", "lora_te1": "text_encoder",
          "lora_te2": "text_encoder_2", "lora_te3": "text_encoder_3"}  # fmt: skip
"""Beginnings of names in files of kohya's trainer, and their components; None is the denoiser."""
_EMBEDDINGS = {"clip_l": "text_encoder", "clip_g": "text_encoder_2"}
"""Names in files of textual inversions for two encoders, and their components."""
_IP_ADAPTER = ("image_proj.", "ip_adapter.", "ip_adapter_proj_model.", "double_blocks.")
"""Beginnings of names in files of IP-Adapters; the last two are those of FLUX."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One adapter of a file: what is asked, where that stands, and its weights; ``file`` is None where it is not here.

    ``hub_id`` and ``name_in_repository`` are of one on the hub. ``name`` is that of the adapter, unique among LoRAs.
    """

    spec: AdapterSpec
    path: ConfigPath
    name: str
    file: Path | None
    hub_id: str | None = None
    name_in_repository: str = ""

    @property
    def kind(self) -> str:
        """What it is, in words."""
        return _KINDS[type(self.spec)]

    @property
    def is_fused(self) -> bool:
        """Whether it is added to the weights it changes."""
        return isinstance(self.spec, LoraSpec) and self.spec.fused


class Addition(NamedTuple):
    """A tensor that an adapter adds to a component: the path of the module it goes to, as far as known, and its size.

    ``elements`` are counted, not bytes: adapters take the dtype of what they are put on.
    """

    component: str
    module: str
    elements: int


def locate_adapters(
    resolved: Resolved, spec: Spec, facts: PipelineFacts, ancestors: frozenset[str]
) -> tuple[tuple[Adapter, ...], list[Problem]]:
    """Return the adapters of a spec, and what is wrong with them: files that are not there, kinds the class lacks.

    ``ancestors`` are those of the pipeline's class: some of them take adapters.
    """
    adapters: list[Adapter] = []
    problems: list[Problem] = []
    for path, asked in spec.adapters.all:
        problems += _not_taken(resolved, path, asked, facts, ancestors)
        try:
            adapters.append(_located(resolved, path, asked))
        except DMConfigError as error:
            problems += error.problems
    problems += _same_names(resolved, adapters)
    problems += _too_many_pictures(resolved, adapters, facts, ancestors)
    problems += _damaged(resolved, adapters)
    return tuple(adapters), problems


def additions_of(adapter: Adapter, modules: Sequence[str], denoiser: str) -> Iterator[Addition]:
    """Yield what an adapter adds to components; nothing for one that is not here, or that is fused.

    ``modules`` are the names of the pipeline's components with weights.

    Raises: SourceError: its file is not what it should be.
    """
    if adapter.file is None or adapter.is_fused:
        return
    for tensor in read_header(adapter.file):
        match adapter.spec:
            case LoraSpec():
                if not tensor.name.endswith(".alpha"):
                    component, module = _lora_target(tensor.name, modules, denoiser)
                    yield Addition(component, module, _elements(tensor))
            case TextualInversionSpec():
                component = _EMBEDDINGS.get(tensor.name, "text_encoder")
                yield Addition(component, "", _elements(tensor))
            case _:
                yield Addition(denoiser, "", _elements(tensor))


def changed_components(adapters: Iterable[Adapter], modules: Sequence[str], denoiser: str) -> Iterator[tuple[str, str]]:
    """Yield a component whose weights in files are not those in memory, and why: it is fused, or has more words."""
    for adapter in adapters:
        if adapter.file is None:
            continue
        for tensor in read_header(adapter.file):
            if adapter.is_fused:
                yield _lora_target(tensor.name, modules, denoiser)[0], f"the LoRA {adapter.name} is fused into it"
            elif isinstance(adapter.spec, TextualInversionSpec):
                yield _EMBEDDINGS.get(tensor.name, "text_encoder"), f"{adapter.name} adds words to it"


def unplaceable_adapters(
    resolved: Resolved,
    adapters: Iterable[Adapter],
    modules: Sequence[str],
    denoiser: str,
    *,
    without: Sequence[str],
    image_encoder: str,
) -> Iterator[Problem]:
    """Yield a problem per adapter for components that the pipeline does not have.

    ``without`` are null in the file; ``image_encoder`` is the class that the pipeline has for one.
    """
    for adapter in adapters:
        missing = {each.component for each in additions_of(adapter, modules, denoiser)} - set(modules)
        if missing:
            what = (
                f"{adapter.kind} {adapter.name} is for {', '.join(sorted(missing))}, which the pipeline does not have"
            )
            fix = f"its components with weights are: {', '.join(modules)}"
            yield resolved.problem(Code.BAD_ADAPTER, (*adapter.path, "source"), what, fix=fix)
        if isinstance(adapter.spec, IpAdapterSpec) and "image_encoder" not in (*modules, *without):
            what = "an IP-Adapter looks at pictures through an image encoder, and the pipeline has none"
            fix = f"add components.image_encoder with a source and class: {image_encoder}; or null, for calls with "
            fix += "ip_adapter_image_embeds"
            yield resolved.problem(Code.BAD_ADAPTER, adapter.path, what, fix=fix)


def missing_peft(resolved: Resolved, adapters: Iterable[Adapter], modules: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem per LoRA for which peft is missing, or too old for the library of what it is put on."""
    from importlib import metadata

    from packaging.version import Version

    for adapter in adapters:
        if not isinstance(adapter.spec, LoraSpec):
            continue
        try:
            installed = Version(metadata.version("peft"))
        except metadata.PackageNotFoundError:
            what, fix = f"the LoRA {adapter.name} takes peft, which is not installed", "pip install peft"
            yield resolved.problem(Code.PACKAGE_MISSING, adapter.path, what, fix=fix)
            continue
        from transformers.integrations import peft

        needed = Version(peft.MIN_PEFT_VERSION)
        on_encoder = {each.component for each in additions_of(adapter, modules, "") if "encoder" in each.component}
        if on_encoder and installed < needed:
            what = f"the LoRA {adapter.name} changes {', '.join(sorted(on_encoder))}"
            why = f"transformers, as installed, takes peft {needed} or newer for that, and {installed} is installed"
            fix = f"pip install 'peft>={needed}'"
            yield resolved.problem(Code.PACKAGE_MISSING, adapter.path, what, why=why, fix=fix)


def adapter_notes(adapters: Iterable[Adapter]) -> Iterator[str]:
    """Yield a sentence per adapter that is not on this machine, and so not in the figures."""
    for adapter in adapters:
        if adapter.file is None:
            yield f"{adapter.kind} {adapter.name} is not on this machine, so its bytes are not counted"


# Where files are


def _located(resolved: Resolved, path: ConfigPath, asked: AdapterSpec) -> Adapter:
    """Return the adapter at path of the file.

    Raises: BuildError: with the problem, which the caller collects.
    """
    where: ConfigPath = (*path, "source")
    if is_local(asked.source):
        if asked.revision is not None:
            what, fix = f"a revision is given, and {asked.source} is local", "remove the line, or name a hub id"
            raise _wrong(resolved, (*path, "revision"), what, fix, Code.CONTRADICTION)
        file = _local_file(resolved, where, asked)
        return Adapter(spec=asked, path=path, name=_name_of(asked, file.name), file=file)
    if not is_hub_id(asked.source):
        fix = f"write ./{asked.source} for a file beside this one, or organisation/name for a hub id"
        raise _wrong(resolved, where, f"{asked.source!r} is neither a local file nor a hub id", fix)
    if asked.weight_name is None:
        what = f"which file of {asked.source} is meant is not said"
        raise _wrong(resolved, path, what, "add weight_name: the name of the .safetensors file")
    name = str(PurePosixPath(asked.subfolder or "") / asked.weight_name)
    _refuse_pickles(resolved, (*path, "weight_name"), name)
    snapshot = find_snapshot(asked.source, asked.revision)
    here = snapshot / name if snapshot is not None and (snapshot / name).is_file() else None
    return Adapter(
        spec=asked, path=path, name=_name_of(asked, name), file=here, hub_id=asked.source, name_in_repository=name
    )


def _local_file(resolved: Resolved, where: ConfigPath, asked: AdapterSpec) -> Path:
    start = Path(os.path.normpath(resolved.folder_of(where) / Path(asked.source).expanduser()))
    if start.is_file():
        for key in ("subfolder", "weight_name"):
            if getattr(asked, key) is not None:
                what = f"{asked.source} is a file, so {key} means nothing"
                raise _wrong(resolved, (*where[:-1], key), what, "remove the line", Code.CONTRADICTION)
        _refuse_pickles(resolved, where, start.name)
        return start
    folder = start / (asked.subfolder or "")
    if not folder.is_dir():
        near = nearest(folder.name, [each.name for each in folder.parent.iterdir()] if folder.parent.is_dir() else [])
        raise _wrong(resolved, where, f"{folder} is not there", f"did you mean {near!r}?" if near else "check the path")
    files = sorted(each.name for each in folder.glob(f"*{SUFFIX}"))
    if asked.weight_name is None and len(files) != 1:
        what = f"{folder} has {len(files) or 'no'} {SUFFIX} files" + (f": {', '.join(files)}" if files else "")
        raise _wrong(resolved, where, what, "name one with weight_name" if files else "check the path")
    name = asked.weight_name or files[0]
    _refuse_pickles(resolved, (*where[:-1], "weight_name"), name)
    if not (folder / name).is_file():
        near = nearest(name, files)
        fix = f"did you mean {near!r}?" if near else f"it has: {', '.join(files) or 'none'}"
        raise _wrong(resolved, (*where[:-1], "weight_name"), f"{folder} has no file {name}", fix)
    return folder / name


def _refuse_pickles(resolved: Resolved, where: ConfigPath, name: str) -> None:
    if not name.endswith(SUFFIX):
        what = f"{name} is no {SUFFIX} file; other formats can run code when they are read"
        raise _wrong(resolved, where, what, "convert it to safetensors")
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise _wrong(resolved, where, f"{name} leads out of its source", "name a file inside it")


def _wrong(resolved: Resolved, path: ConfigPath, what: str, fix: str, code: Code = Code.BAD_ADAPTER) -> BuildError:
    return BuildError([resolved.problem(code, path, what, fix=fix)])


def _name_of(asked: AdapterSpec, file: str) -> str:
    """The name of a LoRA is that of a module: it has no dots."""
    own = (
        asked.name if isinstance(asked, LoraSpec) else asked.token if isinstance(asked, TextualInversionSpec) else None
    )
    return own or PurePosixPath(file).name.removesuffix(SUFFIX).replace(".", "_")


# Rules


def _not_taken(
    resolved: Resolved, path: ConfigPath, asked: AdapterSpec, facts: PipelineFacts, ancestors: frozenset[str]
) -> Iterator[Problem]:
    mixin = _MIXINS.get(type(asked))
    takes = mixin in ancestors if mixin else any("IPAdapter" in name for name in ancestors)
    if not takes:
        what = f"{facts.class_name} takes no {_KINDS[type(asked)]}"
        yield resolved.problem(Code.BAD_ADAPTER, path, what, fix="remove it, or use another pipeline class")


def _same_names(resolved: Resolved, adapters: Sequence[Adapter]) -> Iterator[Problem]:
    seen: set[str] = set()
    for adapter in adapters:
        if not isinstance(adapter.spec, LoraSpec):
            continue
        if adapter.name in seen:
            what = f"two LoRAs are called {adapter.name!r}"
            yield resolved.problem(Code.BAD_ADAPTER, adapter.path, what, fix="give one of them a name of its own")
        if "." in adapter.name:
            where = (*adapter.path, "name")
            yield resolved.problem(Code.BAD_ADAPTER, where, "a LoRA's name has no dots", fix="write another")
        seen.add(adapter.name)


def _too_many_pictures(
    resolved: Resolved, adapters: Sequence[Adapter], facts: PipelineFacts, ancestors: frozenset[str]
) -> Iterator[Problem]:
    """Stable Diffusion 3 holds one IP-Adapter; what it is called with for more is not a list to it."""
    pictures = [adapter for adapter in adapters if isinstance(adapter.spec, IpAdapterSpec)]
    if "SD3IPAdapterMixin" in ancestors:
        for adapter in pictures[1:]:
            what = f"{facts.class_name} takes one IP-Adapter"
            yield resolved.problem(Code.BAD_ADAPTER, adapter.path, what, fix="remove it, or the one above")


def _damaged(resolved: Resolved, adapters: Sequence[Adapter]) -> Iterator[Problem]:
    for adapter in adapters:
        try:
            tensors = read_header(adapter.file) if adapter.file is not None else ()
        except DMConfigError as error:
            for each in error.problems:
                yield resolved.problem(each.code, (*adapter.path, "source"), each.what, why=each.why, fix=each.fix)
            continue
        if adapter.file is not None and not _is_of_its_kind(adapter, tensors):
            what = f"{adapter.file} holds no {adapter.kind}: its tensors are {', '.join(t.name for t in tensors[:3])}"
            yield resolved.problem(Code.BAD_ADAPTER, (*adapter.path, "source"), what, fix="name another file")


def _is_of_its_kind(adapter: Adapter, tensors: Sequence[TensorInfo]) -> bool:
    names = [tensor.name for tensor in tensors]
    match adapter.spec:
        case LoraSpec():
            return any("lora" in name or "lokr" in name or "loha" in name for name in names)
        case IpAdapterSpec():
            return any(name.startswith(_IP_ADAPTER) for name in names)
        case _:
            return 0 < len(names) <= len(_EMBEDDINGS) and all(len(tensor.shape) in (1, 2) for tensor in tensors)


# What is in files


def _lora_target(name: str, modules: Sequence[str], denoiser: str) -> tuple[str, str]:
    """Return the component that a tensor of a LoRA is for, and the module in it, where its name tells."""
    first, _, rest = name.partition(".")
    if first in modules:
        return first, _module_of(rest)
    for start, component in _KOHYA.items():
        if first.startswith(f"{start}_"):
            return component or denoiser, ""
    if first.startswith("text_encoder"):
        return first, _module_of(rest)
    return denoiser, _module_of(rest if first in ("unet", "transformer", "diffusion_model") else name)


def _module_of(name: str) -> str:
    return name.partition(".lora")[0]


def _elements(tensor: TensorInfo) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return count


# Putting them on


def apply_adapters(resolved: Resolved, pipe: Any, adapters: Sequence[Adapter]) -> None:
    """Put adapters on a pipeline that is not placed yet, by diffusers' own methods: fused LoRAs first.

    Raises: BuildError: the first that diffusers refuses, or that changes nothing, with its file. The pipeline is then
        of no use, and is to be let go of.
    """
    of_kind = {kind: [each for each in adapters if isinstance(each.spec, kind)] for kind in _KINDS}
    fused = [each for each in of_kind[LoraSpec] if each.is_fused]
    stacked = [each for each in of_kind[LoraSpec] if not each.is_fused]
    for adapter in fused:
        guarded(resolved, adapter, lambda adapter: _load_lora(pipe, adapter))
    if fused:
        guarded(resolved, fused[-1], lambda _: _fuse(pipe, fused))
    for adapter in stacked:
        guarded(resolved, adapter, lambda adapter: _load_lora(pipe, adapter))
    if stacked:
        guarded(resolved, stacked[-1], lambda _: _set_weights(pipe, stacked))
    for adapter in of_kind[TextualInversionSpec]:
        guarded(resolved, adapter, lambda adapter: _load_words(pipe, adapter))
    if pictures := of_kind[IpAdapterSpec]:
        guarded(resolved, pictures[-1], lambda _: _load_ip_adapters(pipe, pictures))


def guarded(resolved: Resolved, adapter: Adapter, put_on: Callable[[Adapter], None]) -> None:
    """Put an adapter on.

    Raises: BuildError: ADAPTER_NOT_LOADED, with its file, whatever was raised.
    """
    try:
        put_on(adapter)
    except Exception as error:  # code of other libraries, on a file nobody has checked: anything may come
        what = f"{adapter.kind} {adapter.name} could not be loaded: {type(error).__name__}: {_first_line(error)}"
        problem = resolved.problem(Code.ADAPTER_NOT_LOADED, adapter.path, what, why=f"from {adapter.file}")
        raise BuildError([problem]) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _load_lora(pipe: Any, adapter: Adapter) -> None:
    assert adapter.file is not None  # noqa: S101 - it has been fetched
    pipe.load_lora_weights(
        str(adapter.file.parent), weight_name=adapter.file.name, adapter_name=adapter.name, local_files_only=True
    )
    if not _carriers(pipe, [adapter]):
        raise ValueError("none of its layers is one of the pipeline's")


def _carriers(pipe: Any, adapters: Sequence[Adapter]) -> list[str]:
    """The components that have any of these LoRAs on them."""
    names = {adapter.name for adapter in adapters}
    return [component for component, listed in pipe.get_list_adapters().items() if names & set(listed)]


def _set_weights(pipe: Any, adapters: Sequence[Adapter]) -> None:
    weights = [adapter.spec.weight for adapter in adapters if isinstance(adapter.spec, LoraSpec)]
    pipe.set_adapters([adapter.name for adapter in adapters], adapter_weights=weights)


def _fuse(pipe: Any, adapters: Sequence[Adapter]) -> None:
    """Add LoRAs to the weights they change, and take their layers off again."""
    _set_weights(pipe, adapters)
    names = [adapter.name for adapter in adapters]
    pipe.fuse_lora(components=_carriers(pipe, adapters), adapter_names=names, safe_fusing=True)
    pipe.unload_lora_weights()


def _load_words(pipe: Any, adapter: Adapter) -> None:
    from safetensors.torch import load_file

    assert adapter.file is not None  # noqa: S101 - it has been fetched
    assert isinstance(adapter.spec, TextualInversionSpec)  # noqa: S101 - the caller has looked
    tensors = load_file(adapter.file)
    if not set(tensors) <= set(_EMBEDDINGS):
        pipe.load_textual_inversion(tensors if len(tensors) == 1 else str(adapter.file), token=adapter.spec.token)
        return
    for name, embedding in tensors.items():  # one file for two encoders, as SDXL has
        encoder = _EMBEDDINGS[name]
        pipe.load_textual_inversion(
            embedding,
            token=adapter.name,
            text_encoder=getattr(pipe, encoder),
            tokenizer=getattr(pipe, encoder.replace("text_encoder", "tokenizer")),
        )


def _load_ip_adapters(pipe: Any, adapters: Sequence[Adapter]) -> None:
    """Put IP-Adapters on, all at once; of Stable Diffusion 3 there is one at most."""
    import inspect

    files = [adapter.file for adapter in adapters if adapter.file is not None]
    scales = [adapter.spec.scale for adapter in adapters if isinstance(adapter.spec, IpAdapterSpec)]
    # that of FLUX has another word for the image encoder, which here is a component like any other
    of_flux = "image_encoder_pretrained_model_name_or_path"
    takes = inspect.signature(pipe.load_ip_adapter).parameters
    pipe.load_ip_adapter(
        one_or_all([str(file.parent) for file in files]),
        subfolder=one_or_all([""] * len(files)),
        weight_name=one_or_all([file.name for file in files]),
        local_files_only=True,
        **{of_flux if of_flux in takes else "image_encoder_folder": None},
    )
    pipe.set_ip_adapter_scale(one_or_all(scales))


def one_or_all(values: list[Any]) -> Any:
    """A single value by itself: to some classes a list of one means something else, or nothing."""
    return values[0] if len(values) == 1 else values
