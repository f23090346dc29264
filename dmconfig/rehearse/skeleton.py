"""A pipeline without weights: every component built from its config on the meta device, as a load would leave it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from dmconfig.assembly import PIPELINE, Assembly, Component, Made
from dmconfig.checkpoint import tensors_of
from dmconfig.errors import BuildError, Code
from dmconfig.facts import PipelineFacts
from dmconfig.footprint import build_class_on_meta, fp32_patterns, kept_in_fp32
from dmconfig.loaders import class_of, make_pipeline
from dmconfig.measure import config_of_authors
from dmconfig.rehearse.adapters import put_on
from dmconfig.rehearse.quantised import module_of_gguf, quantised
from dmconfig.rehearse.standins import stand_in_for
from dmconfig.remote_code import OwnCode
from dmconfig.resolve import Resolved
from dmconfig.stored import config_folder_of
from dmconfig.switches import apply_switches


def build_skeletons(
    resolved: Resolved, assembly: Assembly, dtypes: Mapping[str, str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the pipelines of assembly by name, without weights, on meta, and the parts that stand-ins stand for.

    Raises: BuildError: a component cannot be built from its config, or there is no config of it.
    """
    parts: dict[str, Any] = dict.fromkeys(assembly.absent)
    parts |= {part.name: _whole(resolved, part, dtypes[part.name]) for part in assembly.modules}
    stand_ins = []
    for component in assembly.components:
        if not component.is_module:  # a tokenizer's stand-in looks at the encoder it feeds, which is there by now
            parts[component.name], is_stand_in = _other(resolved, component, parts)
            stand_ins += [component.name] if is_stand_in else []
    pipe = _pipeline(assembly.facts, parts, assembly.config, assembly.made, code=assembly.code)
    put_on(resolved, pipe, assembly)
    for component in assembly.modules:
        apply_switches(resolved, component, parts[component.name], dtypes[component.name])
    others = {each.name: _pipeline(each.facts, parts) for each in assembly.sharing}
    return {PIPELINE: pipe, **others}, tuple(stand_ins)


def _pipeline(
    facts: PipelineFacts,
    parts: Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
    made: Iterable[Made] = (),
    *,
    code: OwnCode | None = None,
) -> Any:
    """The pipeline of its parts, which learn nothing and show nothing."""
    own = {slot.name: parts[slot.name] for slot in facts.slots}
    with torch.device("meta"):  # some pipelines build modules of their own
        pipe = make_pipeline(facts, config or {}, own, made, code=code)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval().requires_grad_(requires_grad=False)
    pipe.set_progress_bar_config(disable=True)
    _silence(getattr(pipe, "_blocks", None))
    return pipe


def _silence(blocks: Any) -> None:
    """Show no progress of the blocks of a modular pipeline: the pipeline itself passes that on to the first of them."""
    for block in getattr(blocks, "sub_blocks", {}).values():
        if hasattr(block, "set_progress_bar_config"):
            block.set_progress_bar_config(disable=True)
        _silence(block)


def as_loaded(module: Any, dtype: str) -> Any:
    """Give a module that was built on meta the dtypes that loading in dtype leaves it in; return it."""
    target = getattr(torch, dtype)
    is_diffusers = hasattr(module, "load_config")
    patterns = fp32_patterns(
        library="diffusers" if is_diffusers else "transformers",
        dtype=dtype,
        keep=module._keep_in_fp32_modules,
        keep_strict=getattr(module, "_keep_in_fp32_modules_strict", None),
    )
    stored = module.state_dict(keep_vars=True)
    for name, tensor in stored.items():
        if not tensor.is_floating_point():
            continue
        if kept_in_fp32(name, patterns):
            tensor.data = tensor.data.to(torch.float32)
        elif is_diffusers:
            tensor.data = tensor.data.to(target)
    return module


def _whole(resolved: Resolved, component: Component, dtype: str) -> Any:
    """A component, or the wrapper of the models that are several in its place."""
    if not component.parts:
        return _module(resolved, component, dtype)
    return class_of(component)([_module(resolved, part, dtype) for part in component.parts])


def _module(resolved: Resolved, component: Component, dtype: str) -> Any:
    folder = config_folder_of(component)
    if folder is None and component.original_config is None:
        what = f"{component.name!r} ({component.class_name}) cannot be rehearsed: its config is not on this machine"
        fix = "load the pipeline once, which downloads what it needs, or copy its configs here"
        raise BuildError([resolved.problem(Code.COMPONENT_NOT_LOADED, component.path, what, fix=fix)])
    try:
        tensors = tensors_of(component.source)
        if component.source.is_gguf and tensors is not None and folder is not None:
            return module_of_gguf(class_of(component), tensors, folder, dtype)
        module = as_loaded(_built(component, folder, dtype), dtype)
        return quantised(module, component.quantization) if component.quantization is not None else module
    except Exception as error:  # code of other libraries, on a config nobody has checked: anything may come
        what = f"{component.name!r} ({component.class_name}) cannot be built from its config"
        why = f"{type(error).__name__}: {error}"
        raise BuildError([resolved.problem(Code.COMPONENT_NOT_LOADED, component.path, what, why=why)]) from error


def _built(component: Component, folder: Path | None, dtype: str) -> Any:
    return build_class_on_meta(class_of(component), folder or config_of_authors(component), dtype)


def _other(resolved: Resolved, component: Component, parts: Mapping[str, Any]) -> tuple[Any, bool]:
    """A scheduler, from its config; a tokenizer or processor, its own where its files are here."""
    folder = config_folder_of(component)
    try:
        cls = class_of(component)
        if folder is not None and hasattr(cls, "from_config"):
            return cls.from_config({**cls.load_config(str(folder)), **(component.config or {})}), False
        if component.folder is not None:
            return cls.from_pretrained(str(component.folder), local_files_only=True), False
    except Exception as error:  # as above
        what = f"{component.name!r} ({component.class_name}) could not be made: {type(error).__name__}: {error}"
        raise BuildError([resolved.problem(Code.COMPONENT_NOT_LOADED, component.path, what)]) from error
    try:
        return stand_in_for(component.class_name, _config_of_the_encoder(component, parts)), True
    except KeyError:
        what = f"nothing can stand in for {component.name!r} ({component.class_name}), which is not on this machine"
        fix = f"give components.{component.name} a source that is here"
        raise BuildError([resolved.problem(Code.COMPONENT_NOT_LOADED, component.path, what, fix=fix)]) from None


def _config_of_the_encoder(component: Component, parts: Mapping[str, Any]) -> Any:
    """The config of the encoder that a tokenizer or processor feeds, by their names; None where there is none."""
    name = component.name
    words = name.replace("tokenizer", "text_encoder")
    if words == name and name.endswith(("image_processor", "feature_extractor")):
        pictures = name.replace("image_processor", "image_encoder").replace("feature_extractor", "image_encoder")
        encoder = parts.get(pictures) or parts.get("safety_checker")
        return getattr(encoder, "config", None)
    config: Any = getattr(parts.get(words.replace("processor", "text_encoder")), "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config
