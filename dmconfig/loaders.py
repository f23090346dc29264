"""One component, loaded on the host by its own class's loader: from a folder, or from one file of weights.

What is added to the libraries' loaders: safetensors only, unless the file grants more; no network, and no code of a
repository; nothing that a file lacks filled with random numbers; and the layers that a class keeps in float32 kept so
from a single file too. In which dtype is the plan's to say.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dmconfig.assembly import Component, Made
from dmconfig.checkpoint import loads_from_single_file, part_of, read_single_file
from dmconfig.facts import PipelineFacts
from dmconfig.footprint import fp32_patterns, import_library, kept_in_fp32
from dmconfig.importing import import_class
from dmconfig.plan import Assignment
from dmconfig.quantization import loads_on_accelerator, quantization_config
from dmconfig.remote_code import OwnCode
from dmconfig.stored import component_weights, config_folder_of, stored_dtype
from dmconfig.weights import WeightFiles, weight_names


def class_of(component: Component) -> Any:
    """Return the class of a component: of a library's public names, or of one of diffusers' pipeline packages.

    Where it is code of its source, which the file grants, that is run.
    """
    if component.code is not None:
        return import_class(component.code)
    return getattr(import_library(component.library), component.class_name)


def pipeline_class(class_name: str, code: OwnCode | None) -> Any:
    """Return the class of a pipeline: of diffusers, or in code that the file grants, which is run then."""
    return getattr(import_library("diffusers"), class_name) if code is None else import_class(code)


def make_pipeline(
    facts: PipelineFacts,
    settings: Mapping[str, Any],
    parts: Mapping[str, Any],
    made: Iterable[Made] = (),
    *,
    code: OwnCode | None = None,
) -> Any:
    """Return a pipeline of its class on its components.

    A modular pipeline makes those that its blocks make, and is given the others; ``made`` are those that it makes
    otherwise than its blocks say. Where the class is ``code`` that the file grants, that is run.
    """
    cls = pipeline_class(facts.class_name, code)
    if facts.blocks is None:
        return cls(**settings, **parts)
    blocks = getattr(import_library("diffusers"), facts.blocks)()
    pipe = cls(blocks=blocks, modular_config_dict=dict(settings))
    pipe.update_components(**{name: part for name, part in parts.items() if part is not None})
    pipe.update_components(**{each.name: _made(pipe, each) for each in made})
    return pipe


def _made(pipe: Any, made: Made) -> Any:
    """A component that blocks make, of another class or with other values than theirs."""
    import diffusers
    from diffusers import ComponentSpec

    there = getattr(pipe, made.name)
    cls = getattr(diffusers, made.class_name) if made.class_name else type(there)
    before = {name: value for name, value in there.config.items() if not name.startswith("_")}
    config = {**before, **made.config} if cls is type(there) else dict(made.config)
    return ComponentSpec(made.name, cls, config=config, default_creation_method="from_config").create()


def load_other(cls: Any, component: Component) -> Any:
    """Return a component without weights: a scheduler with the values set on top of its config, a tokenizer."""
    folder = str(component.folder)
    if hasattr(cls, "from_config") and component.config:
        return cls.from_config({**cls.load_config(folder), **component.config})
    if component.library == "transformers":
        return cls.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return cls.from_pretrained(folder, local_files_only=True)


def load_module(cls: Any, component: Component, assignment: Assignment) -> Any:
    """Return a component with weights, in the dtype that is planned, quantised where the file says so.

    Raises: ValueError: its weights lack some tensors. What the class's loader raises.
    """
    dtype = assignment.dtype
    if not component.is_single_file:
        more = _quantised(component, assignment)
        return _from_folder(cls, dtype, str(component.folder), component_weights(component), **more)
    file, config = component.source.path, config_folder_of(component)
    if file is not None and (told := _told_config(component, config)):
        if component.source.is_gguf:
            return _whole(_from_gguf(cls, file, told, dtype))
        if loads_from_single_file(component.facts):
            return _whole(_from_single_file(cls, component, file, told, dtype))
    if file is None or config is None:
        raise FileNotFoundError(f"{component.source.text} or its config is not on this machine")
    if _is_in_pipeline_file(component, file):
        return _whole(_from_pipeline_file(component, file, config, dtype))
    return _from_config_and_weights(cls, component, file, config, dtype)


def _told_config(component: Component, folder: Path | None) -> dict[str, Any]:
    """What diffusers' single-file loaders are told of a component's config: its authors' own, else its folder."""
    original = component.original_config
    if original is not None:
        return {"original_config": copy.deepcopy(original.values)} if original.values is not None else {}
    return {"config": str(folder)} if folder is not None else {}


def _quantised(component: Component, assignment: Assignment) -> dict[str, Any]:
    """What the loaders are told of a component that is quantised while it is loaded."""
    if component.quantization is None:
        return {}
    told: dict[str, Any] = {"quantization_config": quantization_config(component.quantization, component.library)}
    if loads_on_accelerator(component.quantization):
        told["device_map"] = {"": assignment.execution_device}
    return told


def _from_folder(cls: Any, dtype: str, folder: str, files: WeightFiles | None, **quantised: Any) -> Any:
    import torch

    module, info = cls.from_pretrained(
        folder,
        **{_dtype_argument(cls): getattr(torch, dtype)},
        variant=files.variant if files else None,
        use_safetensors=files is None or not files.is_pickle,
        local_files_only=True,
        output_loading_info=True,
        **quantised,
    )
    _refuse_random_weights(info)
    return module.eval()


def _from_gguf(cls: Any, file: Path, told: Mapping[str, Any], dtype: str) -> Any:
    """A model of diffusers whose weights stay quantised and are decoded to dtype layer by layer."""
    import torch
    from diffusers import GGUFQuantizationConfig

    compute = getattr(torch, dtype)
    quantization = GGUFQuantizationConfig(compute_dtype=compute)
    return cls.from_single_file(
        str(file),
        **told,
        quantization_config=quantization,
        local_files_only=True,
        **{_dtype_argument(cls): compute},
    )


def _from_single_file(cls: Any, component: Component, file: Path, told: Mapping[str, Any], dtype: str) -> Any:
    """A model of diffusers, from weights in the names of its authors, or in its own."""
    module = _single_file(cls, file, told, dtype)
    patterns = fp32_patterns(
        library="diffusers", dtype=dtype, keep=component.facts.keep_in_fp32_modules, keep_strict=None
    )
    if dtype != "float32" and patterns:
        _keep_in_fp32(module, patterns, lambda: _single_file(cls, file, told, "float32"), stored_dtype(component))
    return module


def _single_file(cls: Any, file: Path, told: Mapping[str, Any], dtype: str) -> Any:
    import torch

    try:
        return cls.from_single_file(
            str(file),
            **told,
            local_files_only=True,
            **{_dtype_argument(cls): getattr(torch, dtype)},
        )
    except NotImplementedError as error:  # a tensor is on meta still: accelerate says so, and not which
        names = ", ".join(_lacking(cls, file, told)[:3]) or "some of the model's tensors"
        raise ValueError(f"its weights lack {names}") from error


def _lacking(cls: Any, file: Path, told: Mapping[str, Any]) -> list[str]:
    """The tensors of a model that are not in a file of its own names; none where the file has others."""
    import torch

    if "config" not in told:
        return []  # a config of the authors goes with their names
    with torch.device("meta"):
        names = cls.from_config(cls.load_config(told["config"])).state_dict().keys()
    there = {tensor.name for tensor in read_single_file(file)}
    return sorted(names - there) if len(names & there) > len(names) / 2 else []


def _keep_in_fp32(module: Any, patterns: tuple[str, ...], exact: Any, stored: str | None) -> None:
    """Give a module back the float32 layers that its loader cast: diffusers' single-file loader casts all of them.

    What was stored no finer than it was cast to loses nothing; other files are read once more, in float32.
    """
    import torch

    kept = [name for name, _ in module.named_parameters() if kept_in_fp32(name, patterns)]
    kept += [name for name, each in module.named_buffers() if kept_in_fp32(name, patterns) and each.is_floating_point()]
    is_exact = stored == str(module.dtype).removeprefix("torch.")
    source = module if is_exact or not kept else exact()
    tensors = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    ours = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name in kept:
        ours[name].data = tensors[name].data.to(torch.float32)


def _is_in_pipeline_file(component: Component, file: Path) -> bool:
    """Tell whether a text encoder is in a file of a whole pipeline, under the names of the pipeline's authors."""
    if component.shares_file or component.source.is_pickle:
        return component.shares_file
    return bool(part_of(component.name, component.facts, read_single_file(file)))


def _from_pipeline_file(component: Component, file: Path, config: Path, dtype: str) -> Any:
    """A text encoder out of the one file of its pipeline, as diffusers' pipelines take it.

    Source: diffusers loaders/single_file.py (FromSingleFileMixin.from_single_file), which does this for each component.
    """
    import torch
    from diffusers import pipelines
    from diffusers.loaders.single_file import load_single_file_sub_model
    from diffusers.loaders.single_file_utils import load_single_file_checkpoint

    return load_single_file_sub_model(
        library_name=component.library,
        class_name=component.class_name,
        name=config.name,
        checkpoint=load_single_file_checkpoint(str(file), local_files_only=True),
        pipelines=pipelines,
        is_pipeline_module=False,
        cached_model_config_path=str(config.parent),
        local_files_only=True,
        torch_dtype=getattr(torch, dtype),
    )


def _from_config_and_weights(cls: Any, component: Component, file: Path, config: Path, dtype: str) -> Any:
    """A model whose weights are in its own names, in a file elsewhere than its config: as one folder, of links."""
    with tempfile.TemporaryDirectory(prefix="dmconfig-") as staged:
        folder = Path(staged)
        for each in config.glob("*.json"):
            if ".index." not in each.name:
                (folder / each.name).symlink_to(each.resolve())
        names = weight_names(component.library, None, pickled=component.source.is_pickle)
        name = next(name for name in names if not name.endswith(".json"))
        (folder / name).symlink_to(file.resolve())
        files = WeightFiles(folder, (folder / name,), None, None, is_pickle=component.source.is_pickle)
        return _from_folder(cls, dtype, str(folder), files)


def _whole(module: Any) -> Any:
    """Return module, unless its file lacked some of it.

    Raises: ValueError: some tensors are on meta, which have no data.
    """
    lacking = [name for name, each in (*module.named_parameters(), *module.named_buffers()) if each.is_meta]
    _refuse_random_weights({"missing_keys": lacking})
    return module.eval()


def _refuse_random_weights(info: Mapping[str, Any]) -> None:
    """Both libraries fill tensors that a file lacks with random numbers and go on; a picture of noise is the result."""
    lacking = sorted(info.get("missing_keys", ()))
    misshapen = sorted(
        str(entry[0] if isinstance(entry, tuple) else entry) for entry in info.get("mismatched_keys", ())
    )
    for names, what in ((lacking, "its weights lack"), (misshapen, "its weights have another shape for")):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{what} {', '.join(names[:3])}{more}")


def _dtype_argument(cls: Any) -> str:
    """Both libraries renamed torch_dtype to dtype: transformers before 4.57, diffusers in 0.42.

    The class tells whose it is: a pipeline's own module may be of either.
    """
    if hasattr(cls, "load_config"):
        import diffusers

        major, minor = (int(part) for part in diffusers.__version__.split(".")[:2])
        return "dtype" if (major, minor) >= (0, 42) else "torch_dtype"
    return "dtype"
