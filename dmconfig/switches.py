"""Speed and memory switches of components: rules against what the installed libraries take, and applying them.

Each switch is a method of diffusers, of the same name where it has one. Its arguments are held against that method as
it is installed, so one that a release renames is told before anything is loaded. Most are set before a component is
placed; caches and compiling come after, because their hooks and graphs see the placed component.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dmconfig.errors import BuildError, Code, Problem, nearest
from dmconfig.facts import (
    CallParameter,
    dataclass_fields,
    known_attention_backends,
    method_parameters,
    own_method_parameters,
)
from dmconfig.paths import ConfigPath
from dmconfig.resolve import Resolved
from dmconfig.spec import DTYPES, CompileSpec, ComponentSpec, LayerwiseCastingSpec

if TYPE_CHECKING:
    from dmconfig.assembly import Assembly, Component

SWITCHES = (
    "attention_backend", "attention_slicing", "tiling", "slicing", "memory_format", "layerwise_casting", "cache",
    "compile",
)  # fmt: skip
"""The keys of a component that are switches."""
AFTER_PLACING = ("cache", "compile")
"""Those that are set when the component is in its place."""

_TIMESTEP = "current_timestep_callback"
"""A field of cache configurations that asks the pipeline where it is: filled in for the file."""
_ATTENTION_PACKAGES = {
    "flash": ("flash_attn", "flash-attn"), "flash_varlen": ("flash_attn", "flash-attn"),
    "_flash_3": ("flash_attn_interface", "flash-attn 3, built from source"),
    "_flash_varlen_3": ("flash_attn_interface", "flash-attn 3, built from source"),
    "sage": ("sageattention", "sageattention"), "sage_varlen": ("sageattention", "sageattention"),
    "xformers": ("xformers", "xformers"),
    "_native_npu": ("torch_npu", "torch_npu"), "_native_xla": ("torch_xla", "torch_xla"),
}  # fmt: skip
"""Attention backend -> the module it needs, and how that is called by pip."""
FROM_HUB = "_hub"
"""How the words of those end that diffusers would fetch, compiled, from the hub, of a version that moves.

Source: diffusers models/attention_dispatch.py (``_HUB_KERNELS_REGISTRY``).
"""


def is_set(asked: ComponentSpec, switch: str) -> bool:
    """Tell whether a switch is set, to whatever value."""
    return getattr(asked, switch) not in (None, False)


def casting_of(asked: ComponentSpec) -> LayerwiseCastingSpec | None:
    """Return the options of layerwise casting, or None where it is off."""
    value = asked.layerwise_casting
    return LayerwiseCastingSpec() if value is True else value if isinstance(value, LayerwiseCastingSpec) else None


def compiling_of(asked: ComponentSpec) -> CompileSpec | None:
    """Return the options of compiling, or None where it is off."""
    value = asked.compile
    return CompileSpec() if value is True else value if isinstance(value, CompileSpec) else None


def refused_by_switches(asked: ComponentSpec) -> Mapping[str, str]:
    """Return the ways of placing that a component's switches do not allow, in the words of the file, with reasons.

    Source: diffusers' guide on compiling with offloading, which names model and group offloading and no other; its
        hooks/group_offloading.py keeps its hooks out of graphs (``torch.compiler.disable``).
    """
    refused: dict[str, str] = {}
    compiling = compiling_of(asked)
    if compiling is not None:
        refused["sequential"] = "it is compiled, and weights brought layer by layer are compiled anew on every call"
        refused["split"] = "it is compiled, and its parts meet outside of any graph"
        if compiling.fullgraph:
            refused["group"] = "it is compiled with fullgraph, and the hooks of group offloading break the graph"
    if casting_of(asked) is not None:
        refused["disk"] = "its weights are kept in another type than in their files"
    if asked.memory_format is not None:
        refused["disk"] = "its weights are kept in another order than in their files"
    return refused


# Rules


def unfit_switches(resolved: Resolved, assembly: Assembly) -> Iterator[Problem]:
    """Yield what is wrong with the switches of every component."""
    for component in assembly.components:
        for each in component.parts or (component,):
            asked = [switch for switch in SWITCHES if is_set(each.asked, switch)]
            if asked and not each.is_module:
                what = f"{each.name!r} has no weights, so {asked[0]} means nothing for it"
                path = (*each.path, asked[0])
                yield resolved.problem(Code.NOT_A_MODULE, path, what, fix="remove the line", key=True)
            elif asked:
                yield from _unfit(resolved, each)


def _unfit(resolved: Resolved, component: Component) -> Iterator[Problem]:
    asked = component.asked
    if asked.tiling is not False:
        yield from _unfit_method(resolved, component, "tiling", "enable_tiling", asked.tiling)
        yield from _not_implemented(resolved, component, "tiling", "use_tiling")
    if asked.slicing:
        yield from _unfit_method(resolved, component, "slicing", "enable_slicing", given=True)
        yield from _not_implemented(resolved, component, "slicing", "use_slicing")
    if asked.attention_slicing is not None:
        yield from _unfit_method(resolved, component, "attention_slicing", "set_attention_slice", given=True)
    if asked.attention_backend is not None:
        yield from _unfit_attention_backend(resolved, component)
    if (casting := casting_of(asked)) is not None:
        given = casting.model_dump(exclude_unset=True)
        yield from _unfit_method(resolved, component, "layerwise_casting", "enable_layerwise_casting", given)
    if asked.cache is not None:
        yield from _unfit_cache(resolved, component)
    yield from _unfit_compiling(resolved, component)


def _unfit_method(
    resolved: Resolved, component: Component, switch: str, method: str, given: bool | Mapping[str, Any]
) -> Iterator[Problem]:
    """The class has the method, and the method takes what is given."""
    path: ConfigPath = (*component.path, switch)
    code = component.code
    if code is None:
        parameters = method_parameters(component.library, component.class_name, method)
    else:
        parameters = own_method_parameters(code.files, code.class_name, method)
    if parameters is None:
        what = f"{component.class_name}, as installed, has no {method}"
        yield resolved.problem(Code.UNKNOWN_SWITCH, path, what, fix="remove the line", key=True)
    elif isinstance(given, Mapping):
        yield from _unknown_options(resolved, path, f"{method} of {component.class_name}", parameters, given)


def _unknown_options(
    resolved: Resolved, path: ConfigPath, taker: str, parameters: Sequence[CallParameter], given: Mapping[str, Any]
) -> Iterator[Problem]:
    known = [parameter.name for parameter in parameters if not parameter.name.startswith("_")]
    for name in given:
        if name not in known:
            meant = nearest(name, known)
            fix = f"did you mean {meant!r}?" if meant else f"it takes: {', '.join(known) or 'nothing'}"
            what = f"{taker}, as installed, takes no {name!r}"
            yield resolved.problem(Code.UNKNOWN_SWITCH, (*path, name), what, fix=fix, key=True)


def _not_implemented(resolved: Resolved, component: Component, switch: str, member: str) -> Iterator[Problem]:
    """Diffusers gives every autoencoder the method; those that can do it set a member in their constructor."""
    if "AutoencoderMixin" in component.facts.ancestors and member not in component.facts.members:
        what = f"{component.class_name} cannot do {switch}"
        path = (*component.path, switch)
        yield resolved.problem(Code.UNKNOWN_SWITCH, path, what, fix="remove the line", key=True)


def _unfit_attention_backend(resolved: Resolved, component: Component) -> Iterator[Problem]:
    path: ConfigPath = (*component.path, "attention_backend")
    given, known = component.asked.attention_backend or "", known_attention_backends()
    here = [word for word in known if not word.endswith(FROM_HUB)]
    yield from _unfit_method(resolved, component, "attention_backend", "set_attention_backend", given=True)
    if given in known and given not in here:
        what = f"{given!r} is compiled code, which diffusers would fetch from the hub at no commit"
        own = given.removesuffix(FROM_HUB)
        fix = f"install the package of {own!r} and write that" if own in here else "write another, e.g. native"
        yield resolved.problem(Code.CODE_NOT_TRUSTED, path, what, fix=fix)
    elif given not in known:
        meant = nearest(given, here)
        shown = ", ".join(word for word in here if not word.startswith("_"))
        what = f"{given!r} is no attention backend of diffusers as installed; one of: {shown}"
        fix = f"did you mean {meant!r}?" if meant else ""
        yield resolved.problem(Code.UNKNOWN_SWITCH, path, what, fix=fix)


def _unfit_cache(resolved: Resolved, component: Component) -> Iterator[Problem]:
    cache = component.asked.cache
    assert cache is not None  # noqa: S101 - the caller has looked
    path: ConfigPath = (*component.path, "cache")
    yield from _unfit_method(resolved, component, "cache", "enable_cache", given=True)
    known = _known_caches()
    if cache.class_name not in known:
        meant = nearest(cache.class_name, known)
        what = f"diffusers, as installed, has no cache {cache.class_name!r}"
        fix = f"did you mean {meant!r}?" if meant else f"its caches are: {', '.join(known)}"
        yield resolved.problem(Code.UNKNOWN_SWITCH, (*path, "class"), what, fix=fix)
        return
    fields = [each for each in dataclass_fields(cache.class_name) or () if not each.name.endswith("_callback")]
    yield from _unknown_options(resolved, (*path, "config"), cache.class_name, fields, cache.config)


_CACHES = (
    "FasterCacheConfig", "FirstBlockCacheConfig", "MagCacheConfig", "PyramidAttentionBroadcastConfig", "SeaCacheConfig",
    "TaylorSeerCacheConfig", "TextKVCacheConfig",
)  # fmt: skip


def _known_caches() -> tuple[str, ...]:
    """The caches of which diffusers, as installed, has the configuration class."""
    return tuple(name for name in _CACHES if dataclass_fields(name) is not None)


def _unfit_compiling(resolved: Resolved, component: Component) -> Iterator[Problem]:
    compiling = compiling_of(component.asked)
    if compiling is None:
        return
    path: ConfigPath = (*component.path, "compile")
    if compiling.regional and not component.facts.repeated_blocks:
        what = f"{component.class_name} does not say which of its blocks repeat, so it is not compiled by regions"
        yield resolved.problem(Code.UNKNOWN_SWITCH, (*path, "regional"), what, fix="remove the line", key=True)
    if compiling.mode is not None and compiling.options is not None:
        what = "torch.compile takes a mode or options, not both"
        yield resolved.problem(Code.CONTRADICTION, (*path, "options"), what, fix="remove one of the two", key=True)
    if compiling.fullgraph and component.asked.cache is not None:
        what = "a cache decides on every step what to compute, which breaks the graph that fullgraph asks for"
        yield resolved.problem(Code.CONTRADICTION, (*path, "fullgraph"), what, fix="remove one of the two", key=True)


def missing_attention_packages(resolved: Resolved, assembly: Assembly) -> Iterator[Problem]:
    """Yield a problem per attention backend whose package is not installed here."""
    for component in assembly.modules:
        for each in component.parts or (component,):
            backend = each.asked.attention_backend
            module, package = _ATTENTION_PACKAGES.get(backend or "", ("", ""))
            if backend is not None and backend.startswith("_sage"):
                module, package = ("sageattention",) * 2
            if module and importlib.util.find_spec(module) is None:
                what = f"the attention backend {backend} takes {package}, which is not installed"
                path = (*each.path, "attention_backend")
                yield resolved.problem(Code.PACKAGE_MISSING, path, what, fix=f"pip install {package}")


# Applying


def apply_switches(resolved: Resolved, component: Component, module: Any, dtype: str) -> None:
    """Set the switches of a loaded component that are set before it is placed.

    Raises: BuildError: the first that its class refuses.
    """
    for part, each in _models(component, module):
        for switch in SWITCHES:
            if is_set(part.asked, switch) and switch not in AFTER_PLACING:
                _guarded(resolved, part, switch, functools.partial(_set, part, each, switch, dtype))


def _models(component: Component, module: Any) -> Iterator[tuple[Component, Any]]:
    """The models of a component: itself, or those that are several in one place."""
    nets = getattr(module, "nets", None) or getattr(module, "adapters", None) or ()
    yield from zip(component.parts, nets, strict=True) if component.parts else [(component, module)]


def _guarded(resolved: Resolved, component: Component, switch: str, action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:  # code of other libraries: anything may come
        reason = (str(error).strip().splitlines() or [""])[0]
        what = f"{switch} of {component.name!r} ({component.class_name}): {type(error).__name__}: {reason}"
        path = (*component.path, switch)
        raise BuildError([resolved.problem(Code.SWITCH_NOT_APPLIED, path, what)]) from error


def _set(component: Component, module: Any, switch: str, dtype: str) -> None:
    import torch

    asked = component.asked
    match switch:
        case "attention_backend":
            module.set_attention_backend(asked.attention_backend)
        case "attention_slicing":
            module.set_attention_slice(asked.attention_slicing)
        case "tiling":
            module.enable_tiling(**(asked.tiling if isinstance(asked.tiling, dict) else {}))
        case "slicing":
            module.enable_slicing()
        case "memory_format":
            module.to(memory_format=getattr(torch, asked.memory_format or ""))
        case "layerwise_casting":
            cast_by_layer(module, asked, dtype)


def cast_by_layer(module: Any, asked: ComponentSpec, dtype: str) -> None:
    """Turn on layerwise casting of a model whose dtype is the one given."""
    import torch

    casting = casting_of(asked)
    assert casting is not None  # noqa: S101 - the caller has looked
    compute = dtype if casting.compute_dtype == "auto" else casting.compute_dtype
    module.enable_layerwise_casting(
        storage_dtype=getattr(torch, casting.storage_dtype),
        compute_dtype=getattr(torch, compute),
        skip_modules_pattern=casting.skip_modules_pattern,
        non_blocking=casting.non_blocking,
    )


def cast_sizes(module: Any, asked: ComponentSpec, dtype: str) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of every tensor of a component built on meta, loaded in dtype and cast layer by layer.

    diffusers itself casts, so what it leaves as it is is left.
    """
    from dmconfig.footprint import module_bytes

    casting = casting_of(asked)
    assert casting is not None  # noqa: S101 - the caller has looked
    before = [*module_bytes(module, dtype)]
    cast_by_layer(module, asked, dtype)
    after = dict((*module.named_parameters(), *module.named_buffers()))
    for name, nbytes in before:
        is_cast = str(after[name].dtype) == f"torch.{casting.storage_dtype}"
        yield name, after[name].numel() * after[name].element_size() if is_cast else nbytes


def apply_after_placing(resolved: Resolved, pipes: Sequence[Any], assembly: Assembly) -> None:
    """Turn on caches and compiling, on pipelines that are placed and share their components.

    Raises: BuildError: the first that a class refuses.
    """
    for component in assembly.modules:
        pipe = next(each for each in pipes if component.name in each.components)
        for part, module in _models(component, getattr(pipe, component.name)):
            if is_set(part.asked, "cache"):
                _guarded(resolved, part, "cache", functools.partial(_enable_cache, pipe, part, module))
            if is_set(part.asked, "compile"):
                _guarded(resolved, part, "compile", functools.partial(_compile, part, module))


def _enable_cache(pipe: Any, component: Component, module: Any) -> None:
    import diffusers

    cache = component.asked.cache
    assert cache is not None  # noqa: S101 - the caller has looked
    given = {name: _cache_value(name, value) for name, value in cache.config.items()}
    if any(each.name == _TIMESTEP for each in dataclass_fields(cache.class_name) or ()):
        given[_TIMESTEP] = lambda: pipe.current_timestep
    module.enable_cache(getattr(diffusers, cache.class_name)(**given))


def _cache_value(name: str, value: Any) -> Any:
    """A value of a cache's configuration as the library has it: types of torch, and tuples."""
    import torch

    if name.endswith("dtype"):
        return getattr(torch, DTYPES.get(str(value), str(value)))
    return tuple(value) if isinstance(value, list) else value


def _compile(component: Component, module: Any) -> None:
    compiling = compiling_of(component.asked)
    assert compiling is not None  # noqa: S101 - the caller has looked
    options = compiling.model_dump(exclude={"regional"})
    compile_it = module.compile_repeated_blocks if compiling.regional else module.compile
    compile_it(**options)
