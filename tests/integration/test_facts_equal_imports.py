"""Every fact read from source equals what importing the class says."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

import diffusers
import pytest

from dmconfig.facts import (
    ClassFacts,
    PipelineFacts,
    class_facts,
    dataclass_fields,
    fits,
    known_attention_backends,
    known_pipelines,
    method_parameters,
    pipeline_facts,
)
from dmconfig.facts.installed import installed_libraries
from dmconfig.facts.lookup import (
    _backends,
    _class,
    _fields,
    _known,
    _known_modular,
    _method,
    _modular,
    _pipeline,
)
from dmconfig.footprint import import_library
from dmconfig.spec import CompileSpec
from dmconfig.switches import _CACHES

pytestmark = pytest.mark.slow

# fmt: off
TRANSFORMERS_FAMILIES = (
    "albert", "altclip", "auto", "aya_vision", "bart", "bert", "bit", "blip", "blip_2", "bloom", "bridgetower",
    "chameleon", "chinese_clip", "clap", "clip", "clipseg", "clvp", "cohere", "convnext", "dinov2", "distilbert",
    "dpt", "electra", "falcon", "flava", "florence2", "fsmt", "gemma", "gemma2", "gemma3", "glm", "glm4v", "gpt2",
    "gpt_neox", "idefics3", "instructblip", "internvl", "llama", "llava", "longformer", "m2m_100", "mbart", "mistral",
    "mistral3", "mpt", "mt5", "opt", "owlvit", "paligemma", "phi3", "pix2struct", "pixtral", "pop2piano", "qwen2",
    "qwen2_5_vl", "qwen2_vl", "qwen3", "qwen3_vl", "roberta", "sam", "seamless_m4t", "siglip", "siglip2", "smolvlm",
    "speecht5", "t5", "t5gemma", "tapas", "umt5", "vilt", "vit", "vits", "wav2vec2", "whisper", "xlm_roberta",
)
# fmt: on
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
MODEL_ENDINGS = ("Model", "ModelWithProjection", "ForConditionalGeneration", "ForCausalLM", "PreTrainedModel")


@pytest.fixture(autouse=True, scope="module")
def fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Facts come from source, not from an earlier run's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DMCONFIG_CACHE", str(tmp_path_factory.mktemp("cache")))
        for lookup in (_pipeline, _modular, _class, _known, _known_modular, _method, _fields, _backends):
            lookup.cache_clear()
        yield
        for lookup in (_pipeline, _modular, _class, _known, _known_modular, _method, _fields, _backends):
            lookup.cache_clear()


def exported_classes(library: types.ModuleType, base: type) -> Iterator[tuple[str, Any]]:
    """Yield what library really exports under base; stand-ins for missing optional packages are no subclasses."""
    for name in dir(library):
        try:
            value = getattr(library, name)
        except (ImportError, RuntimeError):
            continue
        if inspect.isclass(value) and issubclass(value, base):
            yield name, value


def mismatches(expected: dict[str, Any], facts: Any) -> list[str]:
    """Return a line for each field in which facts differ from expected."""
    name = f"{facts.module}.{facts.class_name}"
    return [
        f"{name}.{field}: read {getattr(facts, field)!r}, imported {value!r}"
        for field, value in expected.items()
        if getattr(facts, field) != value
    ]


def as_json(value: Any) -> Any:
    """Return value as JSON holds it, or None when JSON cannot."""
    if value is inspect.Parameter.empty or (isinstance(value, dict) and not all(isinstance(k, str) for k in value)):
        return None
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        return None


def expected_call(cls: type) -> list[tuple[str, bool, Any]]:
    if not inspect.isfunction(call := cls.__call__):  # type's own, when the class has none
        return []
    named = [each for each in inspect.signature(call).parameters.values() if each.kind in NAMED][1:]
    return [(each.name, each.default is each.empty, as_json(each.default)) for each in named]


def takes_any(cls: type) -> bool:
    call = cls.__call__
    return inspect.isfunction(call) and any(
        each.kind is each.VAR_KEYWORD for each in inspect.signature(call).parameters.values()
    )


def component_parameters(cls: Any) -> list[str]:
    """Return upstream's components in signature order, with those annotated by a class though they have a default."""
    expected, _ = cls._get_signature_keys(cls)
    return [
        name
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
        if name in expected
        or (name != "self" and mentioned_classes(parameter.annotation) and parameter.default is None)
    ]


def mentioned_classes(annotation: Any) -> set[str]:
    """Return the names of the classes an imported annotation mentions, plain values left out."""
    if isinstance(annotation, str):
        return {name.strip() for name in annotation.split("|")} - {"Any", "None", "int", "str"}
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType, list, tuple):
        return {name for inner in typing.get_args(annotation) for name in mentioned_classes(inner)}
    if (
        origin is not None
        or not inspect.isclass(annotation)
        or annotation.__module__ in ("builtins", "inspect", "typing")
    ):
        return set()
    return {annotation.__name__}


def runtime_name(cls: Any, written: str) -> str:
    """Return the real name of the class that written means where ``__init__`` is defined."""
    namespace = cls.__init__.__globals__
    for home in (namespace, vars(sys.modules["diffusers"]), vars(sys.modules["transformers"])):
        if inspect.isclass(found := home.get(written)):
            return found.__name__
    return written


def pipeline_mismatches(cls: Any, facts: PipelineFacts) -> list[str]:
    sequence = cls.model_cpu_offload_seq
    expected = {
        "model_cpu_offload_seq": None if sequence is None else tuple(sequence.split("->")),
        "exclude_from_cpu_offload": tuple(cls._exclude_from_cpu_offload),
        "accepts_any_call_argument": takes_any(cls),
        "module": cls.__module__,
    }
    found = mismatches(expected, facts)
    pairs = {
        "slots": ([slot.name for slot in facts.slots], component_parameters(cls)),
        "__init__": (
            sorted([*facts.config_parameters, *(slot.name for slot in facts.slots)]),
            sorted(inspect.signature(cls.__init__).parameters.keys() - {"self"}),
        ),
        "call": ([(each.name, each.required, each.default) for each in facts.call], expected_call(cls)),
    }
    found += [f"{cls.__name__} {what}: {left} != {right}" for what, (left, right) in pairs.items() if left != right]
    return found + slot_mismatches(cls, facts)


def slot_mismatches(cls: Any, facts: PipelineFacts) -> list[str]:
    parameters = inspect.signature(cls.__init__).parameters
    found = []
    for slot in facts.slots:
        parameter = parameters[slot.name]
        types_read = {runtime_name(cls, name) for name in slot.types}
        imported = {runtime_name(cls, name) for name in mentioned_classes(parameter.annotation)}
        if types_read != imported:
            found.append(f"{cls.__name__}.{slot.name} types: {types_read} != {imported}")
        may_lack = slot.name in cls._optional_components or parameter.default is not parameter.empty
        allows_none = any(word in str(parameter.annotation) for word in ("None", "Optional"))
        if slot.optional != (may_lack or allows_none):
            found.append(f"{cls.__name__}.{slot.name} optional: {slot.optional}")
    return found


def names(value: Any) -> tuple[str, ...] | None:
    if value is None or isinstance(value, str):
        return None if value is None else (value,)
    return tuple(sorted(value) if isinstance(value, set) else value)


def class_mismatches(cls: Any, facts: ClassFacts) -> list[str]:
    import transformers

    skip = "_skip_keys_device_placement" if issubclass(cls, transformers.PreTrainedModel) else "_skip_keys"
    expected = {
        "module": cls.__module__,
        "no_split_modules": names(getattr(cls, "_no_split_modules", None)),
        "keep_in_fp32_modules": names(getattr(cls, "_keep_in_fp32_modules", None)) or (),
        "keep_in_fp32_modules_strict": names(getattr(cls, "_keep_in_fp32_modules_strict", None)) or (),
        "skip_keys": names(getattr(cls, skip, None)) or (),
        "tied_weights_keys": names(getattr(cls, "_tied_weights_keys", None)) or (),
    }
    ours = {each.__name__ for each in cls.__mro__ if each.__module__.split(".")[0] in ("diffusers", "transformers")}
    ours |= {each.__name__ for each in cls.__mro__ if each.__module__ == "torch.nn.modules.module"}
    missing = ours - facts.ancestors
    foreign = facts.ancestors - {each.__name__ for each in cls.__mro__} - {facts.class_name}
    lines = [f"{cls.__name__} ancestors: missing {missing}, not so {foreign}"] if missing or foreign else []
    return mismatches(expected, facts) + lines


def test_every_pipeline_read_equals_imported() -> None:
    """For every pipeline diffusers exports, components, call parameters and offload attributes are as imported."""
    compared, found = 0, []
    for name, cls in exported_classes(diffusers, diffusers.DiffusionPipeline):
        if cls is diffusers.DiffusionPipeline:
            continue
        facts = pipeline_facts(name)
        found += [f"{name} not found"] if facts is None else pipeline_mismatches(cls, facts)
        found += [] if name in known_pipelines() else [f"{name} not known"]
        compared += 1
    print(f"compared {compared} pipelines")
    assert found == []
    assert compared >= 250


def test_every_known_pipeline_has_facts() -> None:
    """Each suggested name is a pipeline, also where an optional package is missing and it could not be imported."""
    assert [name for name in known_pipelines() if pipeline_facts(name) is None] == []


def test_every_diffusers_class_read_equals_imported() -> None:
    """For every model and scheduler diffusers exports, class attributes and ancestors are as imported."""
    import torch

    compared, found = 0, []
    for base in (torch.nn.Module, diffusers.SchedulerMixin):
        for name, cls in exported_classes(diffusers, base):
            facts = class_facts("diffusers", name)
            found += [f"{name} not found"] if facts is None else class_mismatches(cls, facts)
            compared += 1
    print(f"compared {compared} diffusers classes")
    assert found == []
    assert compared >= 150


def test_sampled_transformers_classes_read_equal_imported() -> None:
    """For the models of many transformers families, class attributes and ancestors are as imported."""
    import transformers

    compared, found = 0, []
    for name in sampled_transformers_classes():
        cls = getattr(transformers, name)
        facts = class_facts("transformers", name)
        found += [f"{name} not found"] if facts is None else class_mismatches(cls, facts)
        compared += 1
    print(f"compared {compared} transformers classes")
    assert found == []
    assert compared >= 200


def sampled_transformers_classes() -> list[str]:
    """Return the exported models of the sampled families."""
    folder = next(library.folder for library in installed_libraries() if library.name == "transformers")
    present = [family for family in TRANSFORMERS_FAMILIES if (folder / "models" / family).is_dir()]
    modules = [path for family in present for path in sorted((folder / "models" / family).glob("modeling_*.py"))]
    found = []
    for path in modules:
        if path.stem.startswith(("modeling_tf_", "modeling_flax_")):
            continue
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        found += [name for name in module.__all__ if name.endswith(MODEL_ENDINGS)]
    return found


MODULAR = sorted(name for name in dir(diffusers) if name.endswith("ModularPipeline") and name != "ModularPipeline")


@pytest.mark.parametrize("name", MODULAR)
def test_modular_pipeline_read_equals_its_blocks_made(name: str) -> None:
    """What the blocks of a pipeline need, make and take, put together from source, is what they say when made."""
    facts = pipeline_facts(name)
    assert facts is not None
    blocks = getattr(diffusers, getattr(diffusers, name).default_blocks_name)()
    parts = {spec.name: spec for spec in blocks.expected_components}
    made = [name for name, spec in parts.items() if spec.default_creation_method == "from_config"]
    outputs = {output.name for output in blocks.intermediate_outputs}
    call = {
        each.name: (each.required and each.default is None and each.name not in outputs, as_json(each.default))
        for each in blocks.inputs
        if each.name is not None
    }

    assert facts.blocks == type(blocks).__name__
    assert [slot.name for slot in facts.slots] == list(parts)
    assert list(facts.made) == made
    assert list(facts.config_parameters) == [config.name for config in blocks.expected_configs]
    assert {each.name: (each.required, each.default) for each in facts.call} == call
    for slot in facts.slots:
        assert slot.optional
        hint = parts[slot.name].type_hint
        kind = class_facts(hint.__module__.partition(".")[0], hint.__name__) if hint is not None else None
        assert kind is None or fits(slot, kind)


@pytest.mark.parametrize("name", MODULAR)
def test_order_of_a_modular_pipeline_is_of_models_that_are_loaded(name: str) -> None:
    """Each once; a text encoder before what denoises, and that before what decodes, unless a denoiser does that too."""
    facts = pipeline_facts(name)
    assert facts is not None
    order = facts.model_cpu_offload_seq
    assert order is not None
    assert len(set(order)) == len(order)
    assert set(order) <= {slot.name for slot in facts.slots} - {*facts.made, "controlnet", "scheduler", "tokenizer"}
    usual = ["text_encoder", "unet", "transformer", "diffusion_decoder" if "diffusion_decoder" in order else "vae"]
    ranked = [each for each in order if each in usual]
    assert ranked == sorted(ranked, key=usual.index)


def test_other_blocks_of_a_modular_pipeline_are_read() -> None:
    """An index may name blocks that are not the class's default; of none that diffusers has, the default are read."""
    assert pipeline_facts("WanModularPipeline", "WanImage2VideoAutoBlocks") != pipeline_facts("WanModularPipeline")
    for blocks in ("MyBlocks", "SequentialPipelineBlocks", "FluxPipeline", "not a name"):
        facts = pipeline_facts("FluxModularPipeline", blocks)
        assert facts is not None
        assert facts.blocks == "FluxAutoBlocks"


def test_connected_pipelines_read_equal_imported() -> None:
    """Of every class whose parts diffusers loads from another repository, and of no other."""
    facts = [pipeline_facts(name) for name in known_pipelines()]
    connected = {each.class_name for each in facts if each is not None and each.connected == ("prior",)}
    imported = {
        name for name, cls in exported_classes(diffusers, diffusers.DiffusionPipeline) if cls._load_connected_pipes
    }
    assert imported == connected


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("wuerstchen", "PaellaVQModel"),
        ("paint_by_example", "PaintByExampleImageEncoder"),
        ("unclip", "UnCLIPTextProjModel"),
    ],
)
def test_class_of_a_folder_that_has_moved_is_read_and_imported(folder: str, name: str) -> None:
    """Published indexes name the folder as it was; diffusers finds it there no more."""
    facts = class_facts(folder, name)
    assert facts is not None
    assert facts.module.startswith(f"diffusers.pipelines.deprecated.{folder}.")
    assert getattr(import_library(folder), name).__name__ == name


CLASSES_OF_PIPELINE_FOLDERS = (
    ("stable_diffusion", "StableDiffusionSafetyChecker"),
    ("stable_diffusion", "StableUnCLIPImageNormalizer"),
    ("deepfloyd_if", "IFSafetyChecker"),
    ("kandinsky", "MultilingualCLIP"),
    ("ltx2", "LTX2Vocoder"),
    ("ltx2", "LTX2TextConnectors"),
    ("stable_audio", "StableAudioProjectionModel"),
    ("audioldm2", "AudioLDM2UNet2DConditionModel"),
)


@pytest.mark.parametrize(("folder", "name"), CLASSES_OF_PIPELINE_FOLDERS)
def test_class_of_a_pipeline_folder_read_equals_imported(folder: str, name: str) -> None:
    """A class that model_index.json names by its pipeline's folder is found, and is as imported."""
    facts = class_facts(folder, name)
    cls = getattr(importlib.import_module(f"diffusers.pipelines.{folder}"), name)
    assert facts is not None
    assert class_mismatches(cls, facts) == []


@pytest.mark.parametrize(
    "name",
    [
        "CLIPTokenizer", "CLIPTokenizerFast", "T5TokenizerFast", "LlamaTokenizerFast", "GemmaTokenizerFast",
        "Qwen2Tokenizer", "Qwen2TokenizerFast", "PreTrainedTokenizerFast", "ByT5Tokenizer", "BertTokenizerFast",
        "XLMRobertaTokenizerFast", "GPTNeoXTokenizerFast", "Qwen2VLProcessor",
        "CLIPImageProcessor", "SiglipImageProcessor", "ClapFeatureExtractor", "AutoTokenizer",
    ],
)  # fmt: skip
def test_class_without_weights_found_as_transformers_serves_it(name: str) -> None:
    """Tokenizers and processors are found under all names transformers serves, with the ancestors they have."""
    import transformers

    facts, cls = class_facts("transformers", name), getattr(transformers, name)
    assert facts is not None
    tell = {"PreTrainedTokenizerBase", "ProcessorMixin", "ImageProcessingMixin", "FeatureExtractionMixin"}
    assert facts.ancestors & tell == {each.__name__ for each in cls.__mro__} & tell


def test_class_transformers_does_not_export_is_unknown() -> None:
    """An inner class of a modeling file is not a component: transformers does not export it."""
    assert class_facts("transformers", "T5Stack") is None
    assert class_facts("diffusers", "BasicTransformerBlock") is None


SWITCHES = ("enable_tiling", "enable_slicing", "set_attention_slice", "enable_layerwise_casting", "enable_cache",
            "set_attention_backend", "compile_repeated_blocks", "enable_group_offload")  # fmt: skip
CONFIGS = ("BitsAndBytesConfig", "TorchAoConfig", "QuantoConfig")


def parameters_of(function: Any) -> list[str]:
    """Return the names of a function's parameters, without self."""
    named = [each for each in inspect.signature(function).parameters.values() if each.kind in NAMED]
    return [each.name for each in named if each.name != "self"]


def test_methods_behind_switches_take_what_they_do_when_imported() -> None:
    """Of every model of diffusers: which switches it has, and their arguments."""
    wrong = []
    for name, cls in exported_classes(diffusers, diffusers.ModelMixin):
        for method in SWITCHES:
            read = method_parameters("diffusers", name, method)
            expected = parameters_of(getattr(cls, method)) if hasattr(cls, method) else None
            if (None if read is None else [each.name for each in read]) != expected:
                wrong.append((name, method, read, expected))
    assert not wrong


def test_configurations_take_what_they_do_when_imported() -> None:
    """Quantisation and caches: the arguments of the classes of both libraries."""
    import transformers

    for library in (diffusers, transformers):
        for name in CONFIGS:
            read = method_parameters(library.__name__, name, "__init__")
            assert read is not None
            assert [each.name for each in read] == parameters_of(getattr(library, name).__init__)
    for name in _CACHES:
        fields = dataclass_fields(name)
        assert fields is not None
        assert [each.name for each in fields] == [each.name for each in dataclasses.fields(getattr(diffusers, name))]


def test_attention_backends_are_those_of_the_enumeration() -> None:
    """The words that set_attention_backend compares with."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    assert set(known_attention_backends()) == {each.value for each in AttentionBackendName}


def test_options_of_compiling_are_those_of_torch() -> None:
    """Every option of the file is one of torch.compile, by the same name."""
    import torch

    ours = set(CompileSpec.model_fields) - {"regional"}
    assert ours <= set(parameters_of(torch.compile))
