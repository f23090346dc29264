"""Facts: read from source without imports, kept in the cache, and compared with what a slot takes."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dmconfig.facts import (
    ClassFacts,
    ComponentSlot,
    class_facts,
    fits,
    is_module_class,
    is_scheduler_class,
    known_attention_backends,
    known_pipelines,
    lookup,
    method_parameters,
    pipeline_facts,
)
from dmconfig.facts.cache import cache_folder, read_cached, write_cached
from dmconfig.facts.expression import UnknownValueError, evaluate, read_annotation
from dmconfig.facts.installed import Library, find_library, installed_libraries, state_key
from dmconfig.facts.source import Module, Sources

TOY = {
    "__init__.py": """
        __version__ = "1.0"
        _import_structure = {"pipelines": ["ToyPipeline"], "models": ["ToyModel"], "lazy": ["OnlyLazy"]}
        if TYPE_CHECKING:
            try:
                raise Missing
            except Missing:
                from .utils.dummy_objects import ToyPipeline
            else:
                from .pipelines import ToyPipeline
            from .models import ToyModel, OtherModel
    """,
    "lazy.py": "class OnlyLazy(SchedulerMixin): ...",
    "base.py": """
        class DiffusionPipeline(ConfigMixin):
            model_cpu_offload_seq = None
            _optional_components = []
            _exclude_from_cpu_offload = []
    """,
    "pipelines/__init__.py": "from .toy import ToyPipeline",
    "pipelines/toy/__init__.py": "from .pipeline_toy import ToyPipeline\nfrom .checker import Checker",
    "pipelines/toy/checker.py": "from transformers import PreTrainedModel\nclass Checker(PreTrainedModel): ...",
    "pipelines/toy/pipeline_toy.py": """
        from ...base import DiffusionPipeline
        from ...models.a import ToyModel as Renamed
        EXTRA = ["third"]
        class Mixin:
            _exclude_from_cpu_offload = ["vae"]
        class ToyPipeline(Mixin, DiffusionPipeline):
            model_cpu_offload_seq = "first->" "vae"
            _optional_components = ["second"] + EXTRA
            def __init__(self, first: Renamed, vae: "AutoencoderKL | None", second=None, third: int = None,
                         fourth: Renamed = None, flag: bool = True, size: int = 8): ...
            def __call__(self, prompt, steps: int = 5 * 2, *, crop=(0, 0), draw=print, **kwargs): ...
    """,
    "models/__init__.py": "from .a import ToyModel\nfrom .b import OtherModel",
    "models/attention_dispatch.py": """
        class AttentionBackendName(str, Enum):
            FLASH = "flash"
            _MATH = "_math"
    """,
    "models/a.py": """
        class Base(nn.Module):
            _no_split_modules = ["ABlock"]
            _keep_in_fp32_modules = {"z", "a"}
            def enable_tiling(self, tile_size: int = 32, *, overlap=0.25, **kwargs): ...
        class ToyModel(Base):
            _skip_keys = ("cache",)
    """,
    "models/b.py": """
        class Base(torch.nn.Module):
            _no_split_modules = ["BBlock"]
        class OtherModel(Base):
            _tied_weights_keys = {"head.weight": "embed.weight"}
            @property
            def _skip_keys(self): return []
    """,
}


@pytest.fixture(autouse=True, scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The tests of this file share one cache folder, and leave the user's alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DMCONFIG_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A stand-in for diffusers, installed for the length of a test; returns its folder."""
    folder = tmp_path / "site" / "diffusers"
    for name, text in TOY.items():
        write_source(folder / name, text)
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.delitem(sys.modules, "diffusers", raising=False)
    monkeypatch.setenv("DMCONFIG_CACHE", str(tmp_path / "cache"))
    forget()
    yield folder
    forget()


def write_source(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = text.strip("\n").splitlines() or [""]
    indent = len(lines[0]) - len(lines[0].lstrip())
    path.write_text("\n".join(line[indent:] for line in lines) + "\n")


def forget() -> None:
    """Empty this process's memory, as a new process would find it."""
    of_names = (lookup._pipeline, lookup._class, lookup._known, lookup._method, lookup._fields, lookup._backends)
    for lookup_function in (installed_libraries, lookup._sources, *of_names):
        lookup_function.cache_clear()


def cache_files() -> list[Path]:
    return [path for path in Path(os.environ["DMCONFIG_CACHE"]).rglob("*") if path.is_file()]


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


# ---------------------------------------------------------------- the installed libraries


def test_facts_of_a_real_pipeline_import_neither_torch_nor_diffusers() -> None:
    """Looking up a pipeline, a model and all names leaves the heavy packages unimported."""
    code = """
import sys
from dmconfig.facts import class_facts, known_pipelines, pipeline_facts
assert pipeline_facts("FluxPipeline") and class_facts("transformers", "T5EncoderModel") and known_pipelines()
print(sorted({"torch", "diffusers", "transformers", "numpy"} & set(sys.modules)))
"""
    assert run_python(code) == "[]"


def test_warm_lookup_reads_no_source() -> None:
    """With a warm cache the code that parses source is not even imported."""
    ask = 'import sys; from dmconfig.facts import pipeline_facts; assert pipeline_facts("FluxPipeline")'
    run_python(ask)
    assert run_python(f'{ask}; print("dmconfig.facts.source" in sys.modules)') == "False"


def test_flux_slots_and_sequence() -> None:
    """Components come in signature order with their annotated classes."""
    facts = pipeline_facts("FluxPipeline")
    assert facts is not None
    assert [(slot.name, slot.optional) for slot in facts.slots] == [
        ("scheduler", False),
        ("vae", False),
        ("text_encoder", False),
        ("tokenizer", False),
        ("text_encoder_2", False),
        ("tokenizer_2", False),
        ("transformer", False),
        ("image_encoder", True),
        ("feature_extractor", True),
    ]
    assert facts.slots[0].types == ("FlowMatchEulerDiscreteScheduler",)
    assert facts.model_cpu_offload_seq == ("text_encoder", "text_encoder_2", "image_encoder", "transformer", "vae")
    assert facts.module == "diffusers.pipelines.flux.pipeline_flux"
    assert facts.config_parameters == ()


def test_stable_diffusion_settings_are_not_components() -> None:
    """A flag of __init__ is a config parameter, and the checker stays out of upstream's offloading."""
    facts = pipeline_facts("StableDiffusionPipeline")
    assert facts is not None
    assert facts.config_parameters == ("requires_safety_checker",)
    assert facts.exclude_from_cpu_offload == ("safety_checker",)
    assert facts.accepts_any_call_argument


def test_t5_encoder_facts() -> None:
    """A transformers model says what stays whole, what stays fp32 and what is tied."""
    facts = class_facts("transformers", "T5EncoderModel")
    assert facts is not None
    assert facts.no_split_modules == ("T5Block",)
    assert facts.keep_in_fp32_modules == ("wo",)
    assert facts.tied_weights_keys == ("encoder.embed_tokens.weight",)
    assert is_module_class(facts)
    assert not is_scheduler_class(facts)


def test_class_of_a_pipeline_folder_is_found() -> None:
    """A library of model_index.json may be a folder of diffusers' pipelines."""
    facts = class_facts("stable_diffusion", "StableDiffusionSafetyChecker")
    assert facts is not None
    assert (facts.library, facts.module) == ("diffusers", "diffusers.pipelines.stable_diffusion.safety_checker")
    assert is_module_class(facts)


def test_former_names_are_followed() -> None:
    """Names that only old versions define are looked up as diffusers and transformers do."""
    for name in ("CLIPFeatureExtractor", "T5TokenizerFast", "CLIPImageProcessorFast", "XLMRobertaTokenizerFast"):
        facts = class_facts("transformers", name)
        assert facts is not None, name
        assert facts.class_name == name
        assert name in facts.ancestors


@pytest.mark.parametrize(
    "name", ["NoSuchPipeline", "DiffusionPipeline", "UNet2DConditionModel", "a/../b", "", "x" * 999]
)
def test_unknown_pipeline_is_none(name: str) -> None:
    """What is not a pipeline diffusers exports has no pipeline facts, whatever the text."""
    assert pipeline_facts(name) is None


@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("diffusers", "NoSuchModel"),
        ("transformers", "T5Stack"),
        ("no_such_library", "Model"),
        ("torch", "Tensor"),
        ("../transformers", "T5Model"),
        ("diffusers", "T5EncoderModel"),
    ],
)
def test_unknown_class_is_none(library: str, name: str) -> None:
    """A class that the library does not export has no facts."""
    assert class_facts(library, name) is None


def test_known_pipelines_are_sorted_and_without_the_base() -> None:
    """Suggestions hold every pipeline by name, but no base class and no model."""
    names = known_pipelines()
    assert list(names) == sorted(set(names))
    assert {"FluxPipeline", "StableDiffusionXLPipeline", "WanPipeline"} <= set(names)
    assert not {"DiffusionPipeline", "UNet2DConditionModel", "AutoPipelineForText2Image"} & set(names)


# ---------------------------------------------------------------- a toy library, exactly


def test_toy_pipeline_exactly(toy: Path) -> None:
    """Every rule about components, defaults and inherited attributes, on one small pipeline."""
    facts = pipeline_facts("ToyPipeline")
    assert facts is not None
    assert facts.slots == (
        ComponentSlot("first", ("ToyModel",), optional=False),
        ComponentSlot("vae", ("AutoencoderKL",), optional=True),
        ComponentSlot("second", (), optional=True),
        ComponentSlot("third", (), optional=True),
        ComponentSlot("fourth", ("ToyModel",), optional=True),
    )
    assert facts.config_parameters == ("flag", "size")
    assert [(each.name, each.required, each.default) for each in facts.call] == [
        ("prompt", True, None),
        ("steps", False, 10),
        ("crop", False, [0, 0]),
        ("draw", False, None),
    ]
    assert facts.accepts_any_call_argument
    assert facts.model_cpu_offload_seq == ("first", "vae")
    assert facts.exclude_from_cpu_offload == ("vae",)
    assert known_pipelines() == ("ToyPipeline",)


def test_bases_of_the_same_name_are_told_apart(toy: Path) -> None:
    """A base is the one its own module means, not another class of the same name."""
    first, second = class_facts("diffusers", "ToyModel"), class_facts("diffusers", "OtherModel")
    assert first is not None
    assert second is not None
    assert (first.no_split_modules, second.no_split_modules) == (("ABlock",), ("BBlock",))
    assert first.keep_in_fp32_modules == ("a", "z")
    assert first.skip_keys == ("cache",)
    assert second.skip_keys == ()  # a property: not known without running it
    assert second.tied_weights_keys == ("head.weight",)
    assert second.ancestors == {"OtherModel", "Base", "Module"}


def test_methods_and_words_are_read_with_their_defaults(toy: Path) -> None:
    """The parameters of a method, inherited ones too, and the words of an enumeration; None where there is none."""
    parameters = method_parameters("diffusers", "ToyModel", "enable_tiling")
    assert parameters is not None
    assert [(each.name, each.required, each.default) for each in parameters] == [
        ("tile_size", False, 32),
        ("overlap", False, 0.25),
    ]
    assert method_parameters("diffusers", "ToyModel", "enable_slicing") is None
    assert method_parameters("diffusers", "NoModel", "enable_tiling") is None
    assert known_attention_backends() == ("flash", "_math")
    assert method_parameters("diffusers", "ToyModel", "enable_tiling") == parameters  # from the cache


def test_class_only_exported_lazily_is_found(toy: Path) -> None:
    """A name in the lazy table counts as exported even where no import repeats it."""
    facts = class_facts("diffusers", "OnlyLazy")
    assert facts is not None
    assert is_scheduler_class(facts)
    assert class_facts("diffusers", "Mixin") is None


def test_library_that_is_not_installed_has_no_facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without diffusers there are no facts and no error."""
    monkeypatch.setenv("DMCONFIG_CACHE", str(tmp_path))
    monkeypatch.setattr(lookup, "installed_libraries", lambda: ())
    assert pipeline_facts("FluxPipeline") is None
    assert class_facts("diffusers", "AutoencoderKL") is None
    assert known_pipelines() == ()
    assert find_library("no_such_library_at_all") is None


# ---------------------------------------------------------------- the cache


def test_cached_facts_are_used_and_equal(toy: Path) -> None:
    """A second process gets the same facts without the source."""
    read = (pipeline_facts("ToyPipeline"), class_facts("diffusers", "ToyModel"), known_pipelines())
    for path in (toy / "pipelines").rglob("*.py"):
        path.unlink()
    forget()
    assert (pipeline_facts("ToyPipeline"), class_facts("diffusers", "ToyModel"), known_pipelines()) == read


def test_absence_is_cached_too(toy: Path) -> None:
    """A name that does not exist is answered from the cache the second time."""
    assert pipeline_facts("NoSuchPipeline") is None
    forget()
    assert pipeline_facts("NoSuchPipeline") is None
    assert [path.name for path in cache_files()] == ["pipeline.NoSuchPipeline"]


def test_new_version_is_read_anew(toy: Path) -> None:
    """Facts of another version of the library are not used."""
    assert pipeline_facts("ToyPipeline") is not None
    write_source(toy / "__init__.py", TOY["__init__.py"].replace('"1.0"', '"1.1"'))
    pipeline = TOY["pipelines/toy/pipeline_toy.py"].replace('"first->" "vae"', '"vae->first"')
    write_source(toy / "pipelines/toy/pipeline_toy.py", pipeline)
    forget()
    facts = pipeline_facts("ToyPipeline")
    assert facts is not None
    assert facts.model_cpu_offload_seq == ("vae", "first")


def test_key_names_version_time_and_place() -> None:
    """Whatever tells two installations apart changes the key."""
    one = Library("diffusers", Path("/a"), "1.0", 1)
    others = [Library("diffusers", Path(place), version, time) for place, version, time in
              (("/b", "1.0", 1), ("/a", "1.1", 1), ("/a", "1.0", 2))]  # fmt: skip
    keys = {state_key((library,)) for library in (one, *others)}
    assert len(keys) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"\x00\xff",
        lambda data: data[:-1],
        lambda data: data.replace(b"vae", b"eav"),
        lambda data: data.replace(b" 1.0 ", b" 0.9 "),
        lambda data: b"null\n" + data,
    ],
)
def test_damaged_cache_is_not_used(toy: Path, damage: Callable[[bytes], bytes]) -> None:
    """A file that is cut, altered or foreign is ignored, and replaced by a good one."""
    read = pipeline_facts("ToyPipeline")
    (path,) = cache_files()
    good = path.read_bytes()
    path.write_bytes(damage(good))
    forget()
    assert pipeline_facts("ToyPipeline") == read
    assert path.read_bytes() == good


def test_file_of_another_name_is_not_used(toy: Path) -> None:
    """Where the file system ignores case, the file of another class is not taken for this one."""
    pipeline_facts("NoSuchPipeline")
    (path,) = cache_files()
    path.rename(path.with_name("pipeline.ToyPipeline"))
    forget()
    assert pipeline_facts("ToyPipeline") is not None


def test_unwritable_cache_is_no_error(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be written, facts are read from source each time."""
    blocked = tmp_path / "a file, not a folder"
    blocked.touch()
    monkeypatch.setenv("DMCONFIG_CACHE", str(blocked))
    for _ in range(2):
        forget()
        assert pipeline_facts("ToyPipeline") is not None
    assert blocked.read_bytes() == b""


def test_write_leaves_no_draft(toy: Path) -> None:
    """Files appear whole under their final name, and no draft stays behind."""
    write_cached((), "entry", {"found": [1]})
    assert read_cached((), "entry") == {"found": [1]}
    assert [path.name for path in cache_files()] == ["entry"]


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """DMCONFIG_CACHE wins, then an absolute XDG_CACHE_HOME, then ~/.cache."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DMCONFIG_CACHE", "/chosen")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/chosen")
    monkeypatch.setenv("DMCONFIG_CACHE", "")
    assert cache_folder() == Path("/xdg/dmconfig")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / ".cache" / "dmconfig"


# ---------------------------------------------------------------- expressions and annotations


def expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('["a", *("b",)] + ["c"]', ["a", "b", "c"]),
        ("{**{'a': 1}, 'b': -2}", {"a": 1, "b": -2}),
        ("1024**2", 1048576),
        ("(1, 2, 3)[1:]", (2, 3)),
        ("list(('a', 'b'))", ["a", "b"]),
        ("None", None),
    ],
)
def test_expression_is_evaluated(text: str, value: Any) -> None:
    """Literals, arithmetic on them, slices and plain collections need no running."""
    assert evaluate(Sources(()), Module("m", is_package=False), expression(text)) == value


@pytest.mark.parametrize("text", ["f()", "missing", "a.b.c", "[1][5]", "1 + 'a'", "1 / 0", "[x for x in y]"])
def test_expression_not_understood_is_refused(text: str) -> None:
    """Anything that would have to be run, or fails when run, is unknown rather than guessed."""
    with pytest.raises(UnknownValueError):
        evaluate(Sources(()), Module("m", is_package=False), expression(text))


@pytest.mark.parametrize(
    ("text", "types", "allows_none"),
    [
        ("A", ("A",), False),
        ("A | None", ("A",), True),
        ("Optional[A]", ("A",), True),
        ("typing.Union[A, list[B], None]", ("A", "B"), True),
        ("'A | m.B'", ("A", "B"), False),
        ("list[A] | tuple[A, ...] | A", ("A",), False),
        ("Any", (), False),
        ("bool | str | dict[str, A]", (), False),
        ("Callable[[A], B]", (), False),
        ("Generic2[A]", ("Generic2",), False),
        ("not a type", (), False),
    ],
)
def test_annotation_is_flattened(text: str, types: tuple[str, ...], allows_none: bool) -> None:
    """An annotation gives its classes in the order written, and whether None is allowed."""
    node = ast.Constant(text) if " a " in text else expression(text)
    found = read_annotation(Sources(()), Module("m", is_package=False), node)
    assert (found.types, found.allows_none) == (types, allows_none)


# ---------------------------------------------------------------- fits


def slot(*types: str) -> ComponentSlot:
    return ComponentSlot("part", types, optional=False)


def facts_of(library: str, name: str) -> ClassFacts:
    facts = class_facts(library, name)
    assert facts is not None
    return facts


FITTING = [
    ((), "diffusers", "AutoencoderKL"),
    (("AutoencoderKL",), "diffusers", "AutoencoderKL"),
    (("AutoencoderKL",), "diffusers", "AutoencoderTiny"),
    (("AutoencoderKL",), "diffusers", "ConsistencyDecoderVAE"),
    (("VQModel", "AutoencoderKL"), "diffusers", "AsymmetricAutoencoderKL"),
    (("ModelMixin",), "diffusers", "UNet2DConditionModel"),
    (("KarrasDiffusionSchedulers",), "diffusers", "DDIMScheduler"),
    (("DDIMScheduler",), "diffusers", "EulerDiscreteScheduler"),
    (("CLIPTokenizer",), "transformers", "CLIPTokenizerFast"),
    (("T5TokenizerFast",), "transformers", "T5Tokenizer"),
    (("T5Tokenizer",), "transformers", "LlamaTokenizerFast"),
    (("AutoTokenizer",), "transformers", "Qwen2Tokenizer"),
    (("Qwen2Tokenizer",), "transformers", "AutoTokenizer"),
    (("AutoProcessor",), "transformers", "PixtralProcessor"),
    (("PreTrainedModel",), "transformers", "T5EncoderModel"),
    (("AutoModel",), "transformers", "T5EncoderModel"),
    (("Gemma2PreTrainedModel",), "transformers", "Gemma2Model"),
    (("CLIPImageProcessor",), "transformers", "CLIPFeatureExtractor"),
    (("CLIPImageProcessor",), "transformers", "CLIPImageProcessorFast"),
    (("StableDiffusionSafetyChecker",), "stable_diffusion", "StableDiffusionSafetyChecker"),
]
NOT_FITTING = [
    (("AutoencoderKL",), "diffusers", "UNet2DConditionModel"),
    (("AutoencoderTiny",), "diffusers", "AutoencoderKL"),
    (("DDIMScheduler",), "diffusers", "AutoencoderKL"),
    (("CLIPTokenizer",), "transformers", "CLIPTextModel"),
    (("CLIPTextModel",), "transformers", "T5EncoderModel"),
    (("CLIPTextModel",), "transformers", "CLIPTokenizer"),
    (("CLIPImageProcessor",), "transformers", "SiglipImageProcessor"),
    (("PreTrainedModel",), "diffusers", "UNet2DConditionModel"),
    (("AutoModel",), "transformers", "CLIPTokenizer"),
    (("NoSuchClass",), "diffusers", "DDIMScheduler"),
]


@pytest.mark.parametrize(("types", "library", "name"), FITTING)
def test_class_fits(types: tuple[str, ...], library: str, name: str) -> None:
    """Subclasses, interchangeable kinds, Auto classes and documented stand-ins are accepted."""
    assert fits(slot(*types), facts_of(library, name))


@pytest.mark.parametrize(("types", "library", "name"), NOT_FITTING)
def test_class_does_not_fit(types: tuple[str, ...], library: str, name: str) -> None:
    """Another kind of component, or another model, is refused."""
    assert not fits(slot(*types), facts_of(library, name))
