"""Quantising components while they are loaded: what each backend takes, what it weighs, and where it cannot go.

One section of the file serves parts of diffusers and of transformers alike; each part gets the configuration class of
its own library. What weights take afterwards follows from the backend's layout, given here as rules, and from which
linear layers it converts, which is asked of the class itself, built from its config on the meta device.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dmconfig.errors import Code, Problem, nearest
from dmconfig.facts import CallParameter, method_parameters
from dmconfig.paths import ConfigPath
from dmconfig.resolve import Resolved
from dmconfig.spec import DTYPES, QuantizationBackend, QuantizationSpec, Spec

if TYPE_CHECKING:
    from dmconfig.assembly import Assembly, Component

_BY_LAYER = "its weights are more than the tensors that would be brought layer by layer"
_IN_GROUPS = "group offloading moves plain tensors, and its weights are more than that"
_IN_PARTS = "the parts of a quantised component have one place"
_IN_FILES = "its weights are made while they are loaded, so no file holds them"
_BNB_ON_CPU = "bitsandbytes quantises while weights are moved to an accelerator"


class Backend(NamedTuple):
    """A library that quantises.

    ``refuses``: ways of placing it does not allow, in the words of the file (``model``, ``sequential``, ``group``,
    ``split``, ``disk``, ``cpu``), each with the reason.
    """

    package: str
    module: str
    config_class: str
    refuses: Mapping[str, str]


_QUANTISED = {"sequential": _BY_LAYER, "split": _IN_PARTS, "disk": _IN_FILES}
BACKENDS: Mapping[str, Backend] = {
    "bitsandbytes_4bit": Backend(
        package="bitsandbytes",
        module="bitsandbytes",
        config_class="BitsAndBytesConfig",
        refuses={**_QUANTISED, "group": _IN_GROUPS, "cpu": _BNB_ON_CPU},
    ),
    "bitsandbytes_8bit": Backend(
        package="bitsandbytes",
        module="bitsandbytes",
        config_class="BitsAndBytesConfig",
        refuses={
            **_QUANTISED,
            "group": _IN_GROUPS,
            "cpu": _BNB_ON_CPU,
            "model": "8-bit weights of bitsandbytes do not go back to the cpu",
        },
    ),
    "torchao": Backend(
        package="torchao",
        module="torchao",
        config_class="TorchAoConfig",
        refuses={**_QUANTISED, "group": _IN_GROUPS},
    ),
    "quanto": Backend(
        package="optimum-quanto",
        module="optimum.quanto",
        config_class="QuantoConfig",
        refuses={**_QUANTISED, "group": _IN_GROUPS},
    ),
}
"""Every backend of the file but gguf, whose files are quantised already.

Source: diffusers pipelines/pipeline_utils.py and models/modeling_utils.py (``to``, ``enable_model_cpu_offload``), its
issues 10653 (8-bit and model offload), 10800 (4-bit) and 10526 (quanto) on sequential offload, and
quantizers/*/validate_environment on device maps.
"""

_ADVICE = {
    "model": "keep it on an accelerator, or quantise it with bitsandbytes_4bit or torchao, which can be moved",
    "cpu": "name an accelerator, or quantise it with torchao, which computes on the cpu too",
}
_OTHERWISE = "keep it whole on an accelerator, or bring it whole with offload: model"
_LOADS = {"bitsandbytes_4bit": "load_in_4bit", "bitsandbytes_8bit": "load_in_8bit"}
"""The argument by which BitsAndBytesConfig is told how many bits; the backend's name says it already."""
_OLD_TORCHAO_WORDS = {
    "int8wo": "Int8WeightOnlyConfig", "int8_weight_only": "Int8WeightOnlyConfig",
    "int8dq": "Int8DynamicActivationInt8WeightConfig", "int4wo": "Int4WeightOnlyConfig",
    "int4_weight_only": "Int4WeightOnlyConfig", "float8wo": "Float8WeightOnlyConfig",
    "float8dq": "Float8DynamicActivationFloat8WeightConfig",
}  # fmt: skip
_DTYPE_ARGUMENTS = ("bnb_4bit_compute_dtype",)


def advice_for(way: str, spec: QuantizationSpec) -> str:
    """Return what to do where a backend does not allow a way of placing."""
    if way == "model" or (way == "cpu" and spec.quant_backend.startswith("bitsandbytes")):
        return _ADVICE[way]
    can_be_brought = "model" not in BACKENDS[spec.quant_backend].refuses
    return _OTHERWISE if can_be_brought else "keep it whole on an accelerator"


def refused_by_backend(spec: QuantizationSpec | None) -> Mapping[str, str]:
    """Return the ways of placing that a quantised component does not allow, with reasons; none for a plain one."""
    backend = BACKENDS.get(spec.quant_backend) if spec is not None else None
    return backend.refuses if backend is not None else {}


# Rules


def quantised_parts(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:
    """Yield what is wrong with the section: names, backends and arguments."""
    modules = {component.name: component for component in assembly.modules}
    for name in spec.quantization:
        path: ConfigPath = ("quantization", name)
        asked = spec.quantization_of(name)
        component = modules.get(name)
        if component is None:
            meant = nearest(name, modules)
            what = f"{name!r} is not a component with weights"
            fix = f"did you mean {meant!r}?" if meant else f"its components are: {', '.join(modules)}"
            yield resolved.problem(Code.UNKNOWN_COMPONENT, path, what, fix=fix, key=True)
        elif asked is not None and asked.quant_backend == "gguf":
            what, fix = "a .gguf file is quantised already", f"name the file as components.{name}.source"
            yield resolved.problem(Code.BAD_QUANTIZATION, path, what, fix=fix)
        elif component.parts:
            what = f"{name!r} is several models, which are not quantised"
            yield resolved.problem(Code.BAD_QUANTIZATION, path, what, fix="remove the line, or give it one model")
        elif asked is not None:
            yield from _bad_arguments(resolved, path, asked, component)
            yield from _beside_casting(resolved, path, component)


def _beside_casting(resolved: Resolved, path: ConfigPath, component: Component) -> Iterator[Problem]:
    if component.asked.layerwise_casting:
        what = f"{component.name!r} is quantised, and its weights are to be cast layer by layer too"
        yield resolved.problem(Code.CONTRADICTION, path, what, fix="keep one of the two", key=True)


def _bad_arguments(
    resolved: Resolved, path: ConfigPath, asked: QuantizationSpec, component: Component
) -> Iterator[Problem]:
    backend, given = BACKENDS[asked.quant_backend], asked.quant_kwargs
    library = "transformers" if component.library != "diffusers" else "diffusers"
    parameters = method_parameters(library, backend.config_class, "__init__")
    if parameters is None:
        what = f"{library}, as installed, has no {backend.config_class}"
        yield resolved.problem(Code.BAD_QUANTIZATION, path, what, fix=f"upgrade {library}, or use another backend")
        return
    known = [parameter.name for parameter in parameters]
    for name in given:
        if name not in known:
            meant = nearest(name, known)
            what = f"{backend.config_class} of {library} takes no {name!r}"
            fix = f"did you mean {meant!r}?" if meant else f"it takes: {', '.join(known)}"
            where = (*path, "quant_kwargs", name)
            yield resolved.problem(Code.UNKNOWN_SWITCH, where, what, fix=fix, key=True)
    yield from _bad_values(resolved, path, asked, parameters)


def _bad_values(
    resolved: Resolved, path: ConfigPath, asked: QuantizationSpec, parameters: Iterable[CallParameter]
) -> Iterator[Problem]:
    given = asked.quant_kwargs
    where: ConfigPath = (*path, "quant_kwargs")
    loads = _LOADS.get(asked.quant_backend)
    for name in _LOADS.values():
        if name in given and given[name] is not (name == loads):
            what = f"{asked.quant_backend} and {name}: {str(given[name]).lower()} contradict each other"
            yield resolved.problem(Code.CONTRADICTION, (*where, name), what, fix="remove the line", key=True)
    for name in _DTYPE_ARGUMENTS:
        if name in given and given[name] not in DTYPES:
            what = f"{given[name]!r} is not a dtype"
            yield resolved.problem(Code.BAD_DTYPE, (*where, name), what, fix="write bfloat16, float16 or float32")
    missing = [each.name for each in parameters if each.required and each.name not in given]
    if asked.quant_backend == "torchao" and not missing:
        yield from _bad_quant_type(resolved, (*where, "quant_type"), given["quant_type"])
    elif missing:
        what = f"{asked.quant_backend} needs {', '.join(missing)}"
        fix = "write {quant_backend: torchao, quant_kwargs: {quant_type: Int8WeightOnlyConfig}}"
        yield resolved.problem(Code.MISSING_KEY, path, what, fix=fix)
    yield from _bad_quanto_type(resolved, where, asked)


def _bad_quant_type(resolved: Resolved, where: ConfigPath, value: object) -> Iterator[Problem]:
    """The name of one of torchao's configuration classes, or {class: name, config: {...}}."""
    name = value.get("class") if isinstance(value, dict) else value
    extra = set(value) - {"class", "config"} if isinstance(value, dict) else set()
    well_formed = isinstance(name, str) and name.isidentifier() and name.endswith("Config")
    if not well_formed or extra:
        meant = _OLD_TORCHAO_WORDS.get(str(name).lower())
        what = f"{value!r} is not a configuration of torchao"
        fix = f"did you mean {meant}?" if meant else "write Int8WeightOnlyConfig, or {class: ..., config: {...}}"
        yield resolved.problem(Code.BAD_QUANTIZATION, where, what, fix=fix)


def _bad_quanto_type(resolved: Resolved, where: ConfigPath, asked: QuantizationSpec) -> Iterator[Problem]:
    if asked.quant_backend != "quanto":
        return
    given = asked.quant_kwargs
    for name in ("weights", "weights_dtype"):
        if name in given and given[name] not in _QUANTO_BITS:
            what = f"{given[name]!r} is not accepted; one of: {', '.join(_QUANTO_BITS)}"
            yield resolved.problem(Code.BAD_VALUE, (*where, name), what)
    if given.get("activations") is not None:
        what, fix = "transformers loads with quantised weights only, not with quantised activations", "remove the line"
        yield resolved.problem(Code.BAD_QUANTIZATION, (*where, "activations"), what, fix=fix)


def missing_backends(resolved: Resolved, spec: Spec) -> Iterator[Problem]:
    """Yield a problem per component whose backend is not installed here."""
    for name in spec.quantization:
        asked = spec.quantization_of(name)
        backend = BACKENDS.get(asked.quant_backend) if asked is not None else None
        if backend is not None and not _is_installed(backend.module):
            what = f"quantising {name} takes {backend.package}, which is not installed"
            fix = f"pip install {backend.package}"
            yield resolved.problem(Code.PACKAGE_MISSING, ("quantization", name), what, fix=fix)


def missing_gguf(resolved: Resolved, assembly: Assembly) -> Iterator[Problem]:
    """Yield a problem per component of a GGUF file where the package that reads such files is not installed here."""
    for component in assembly.loaded:
        if component.source.is_gguf and not _is_installed("gguf"):
            what = f"loading {component.name} from {component.source.text} takes gguf, which is not installed"
            yield resolved.problem(Code.PACKAGE_MISSING, component.path, what, fix="pip install gguf")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of the package that it is in
        return False


# Sizes


class LinearShape(NamedTuple):
    """The weight of a linear layer: its rows and columns, the bytes of an element before it is quantised, and whose."""

    rows: int
    columns: int
    itemsize: int
    is_of_transformers: bool = False

    @property
    def elements(self) -> int:
        """How many there are."""
        return self.rows * self.columns


_QUANTO_BITS = {"int8": 8, "float8": 8, "int4": 4, "int2": 2}
_TORCHAO_ROW_BYTES = {
    "Int8WeightOnlyConfig": 5, "Int8DynamicActivationInt8WeightConfig": 5, "Float8WeightOnlyConfig": 4,
}  # fmt: skip
"""Bytes beside a byte per element that configurations of torchao keep per row: a float32 scale, an int8 zero point."""


def bitsandbytes_4bit_bytes(shape: LinearShape, kwargs: Mapping[str, Any]) -> int:
    """Two elements a byte, a float32 scale per 64 of them and a table of 16; doubly quantised scales take a byte each.

    Source: bitsandbytes functional.py (quantize_4bit, blocksize 64; quantize_blockwise of the scales, blocksize 256).
    """
    blocks = math.ceil(shape.elements / 64)
    scales = 4 * blocks
    if kwargs.get("bnb_4bit_use_double_quant"):
        scales = blocks + 4 * math.ceil(blocks / 256) + 4 * 256 + 4
    return math.ceil(shape.elements / 2) + scales + 4 * 16


def bitsandbytes_8bit_bytes(shape: LinearShape, kwargs: Mapping[str, Any]) -> int:  # noqa: ARG001 - one of several
    """A byte an element and a float32 scale per row. Source: bitsandbytes nn/modules.py (Int8Params)."""
    return shape.elements + 4 * shape.rows


def torchao_bytes(shape: LinearShape, kwargs: Mapping[str, Any]) -> int:
    """Return the bytes of configurations that are known; those of the plain weight for others, which is no less.

    Source: torchao quantization/quantize_/workflows (Int8Tensor, Float8Tensor) of version 0.18.
    """
    value = kwargs.get("quant_type")
    is_plain = isinstance(value, str) or (isinstance(value, dict) and not value.get("config"))
    name = value.get("class") if isinstance(value, dict) else value
    if not is_plain or name not in _TORCHAO_ROW_BYTES:
        return shape.elements * shape.itemsize
    return shape.elements + _TORCHAO_ROW_BYTES[name] * shape.rows


def quanto_bytes(shape: LinearShape, kwargs: Mapping[str, Any]) -> int:
    """Packed elements with a scale per row, or, below 8 bits, scale and shift per group; two scales of the layer.

    transformers leaves those two in float32.

    Source: optimum-quanto nn/qmodule.py (group sizes of 128, 96, 64 or 32) and tensor/weights.
    """
    bits = _QUANTO_BITS[kwargs.get("weights", kwargs.get("weights_dtype", "int8"))]
    of_layer = 2 * (4 if shape.is_of_transformers else shape.itemsize)
    if bits == 8:
        return shape.elements + (shape.rows * shape.itemsize) + of_layer
    group = next((size for size in (128, 96, 64, 32) if shape.columns % size == 0), shape.columns)
    groups = shape.elements // group  # several of them are packed in a byte, the last ones with less
    return math.ceil(groups * bits / 8) * group + 2 * groups * shape.itemsize + of_layer


_WEIGHS: Mapping[str, Callable[[LinearShape, Mapping[str, Any]], int]] = {
    "bitsandbytes_4bit": bitsandbytes_4bit_bytes,
    "bitsandbytes_8bit": bitsandbytes_8bit_bytes,
    "torchao": torchao_bytes,
    "quanto": quanto_bytes,
}


def quantised_sizes(module: Any, asked: QuantizationSpec, dtype: str) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of every tensor of a component built on meta, once it is loaded in dtype and quantised."""
    from dmconfig.footprint import module_bytes

    weights = {f"{path}.weight": layer for path, layer in converted_layers(module, asked)}
    for name, nbytes in module_bytes(module, dtype):
        layer = weights.get(name)
        yield name, nbytes if layer is None else layer_bytes(module, layer, asked, nbytes // layer.weight.numel())


def layer_bytes(module: Any, layer: Any, asked: QuantizationSpec, itemsize: int) -> int:
    """Return the bytes of a quantised linear layer's weight, of a component; itemsize is that of an element before."""
    shape = LinearShape(layer.out_features, layer.in_features, itemsize, not hasattr(module, "load_config"))
    return _WEIGHS[asked.quant_backend](shape, asked.quant_kwargs)


def converted_layers(module: Any, asked: QuantizationSpec) -> Iterator[tuple[str, Any]]:
    """Yield path and module of every linear layer that the backend converts, by each library's own rule.

    Source: diffusers quantizers/bitsandbytes/utils.py, quantizers/quanto/utils.py and
        quantizers/torchao/torchao_quantizer.py (check_if_quantized_param); transformers quantizers/base.py.
    """
    import torch

    linear = [(path, layer) for path, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)]
    skip = asked.quant_kwargs.get("llm_int8_skip_modules", asked.quant_kwargs.get("modules_to_not_convert"))
    if not hasattr(module, "load_config"):
        yield from _converted_by_transformers(module, linear, skip, asked.quant_backend)
        return
    kept = [*(skip or ()), *(module._keep_in_fp32_modules or ())]
    for path, layer in linear:
        last = path.rpartition(".")[2]
        by_name = asked.quant_backend != "torchao" and last in kept
        by_path = asked.quant_backend != "quanto" and any(f"{key}." in f"{path}.weight" or key == path for key in kept)
        if not by_name and not by_path:
            yield path, layer


def _converted_by_transformers(
    module: Any, linear: Iterable[tuple[str, Any]], skip: list[str] | None, backend: QuantizationBackend
) -> Iterator[tuple[str, Any]]:
    """As transformers asks: torchao of the weight by its name, so T5's ``wo`` is converted; others of the layer."""
    from transformers.quantizers import quantizers_utils
    from transformers.quantizers.base import HfQuantizer

    kept = HfQuantizer.get_modules_to_not_convert(module, skip, module._keep_in_fp32_modules)
    suffix = ".weight" if backend == "torchao" else ""
    of_all = getattr(quantizers_utils, "should_convert_module", None)
    converts: Callable[[str, list[str]], bool] = of_all or functools.partial(_converts_before_5, backend)
    return ((path, layer) for path, layer in linear if converts(path + suffix, kept))


def _converts_before_5(backend: QuantizationBackend, name: str, kept: list[str]) -> bool:
    """Whether transformers 4.57 converts a layer, or a weight, of this name; each backend had a rule of its own.

    Source: transformers 4.57 integrations/bitsandbytes.py (_replace_with_bnb_linear), integrations/quanto.py
        (replace_with_quanto_layers), quantizers/quantizer_torchao.py (param_needs_quantization).
    """
    if backend == "quanto":
        return not any(key in name for key in kept)
    is_kept = any(f"{key}." in name or key == name for key in kept)
    return not is_kept and (backend == "torchao" or name.rpartition(".")[2] not in kept)


# Loading


def quantization_config(asked: QuantizationSpec, library: str) -> Any:
    """Return the configuration object of a component's own library. Imports the backend.

    Raises: whatever the library or the backend raises on arguments it does not understand.
    """
    import importlib

    package = importlib.import_module("diffusers" if library == "diffusers" else "transformers")
    arguments = dict(asked.quant_kwargs)
    for name in _DTYPE_ARGUMENTS:
        if name in arguments:
            arguments[name] = DTYPES[arguments[name]]
    if asked.quant_backend in _LOADS:
        arguments[_LOADS[asked.quant_backend]] = True
    if asked.quant_backend == "torchao":
        arguments["quant_type"] = _torchao_config(arguments["quant_type"])
    return getattr(package, BACKENDS[asked.quant_backend].config_class)(**arguments)


def _torchao_config(value: str | Mapping[str, Any]) -> Any:
    import importlib

    name, config = (value, {}) if isinstance(value, str) else (value["class"], value.get("config") or {})
    return getattr(importlib.import_module("torchao.quantization"), name)(**config)


def loads_on_accelerator(asked: QuantizationSpec | None) -> bool:
    """Tell whether the backend quantises on the way to an accelerator, so that weights are loaded there."""
    return asked is not None and asked.quant_backend in _LOADS
