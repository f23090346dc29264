from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
import torch

from dmconfig.errors import Code, Edit, Problem, ResolveError, SpecError
from dmconfig.paths import ConfigPath
from dmconfig.resolve import as_read
from dmconfig.spec import DEFAULT_RESERVE, DTYPES, STRATEGIES, PlacementSpec, Spec, validate_spec
from dmconfig.units import GIB, Budget
from tests.conftest import DIGITS, document_from, only_problem, spec_from


def refusals(text: str, overrides: dict[str, Any] | None = None) -> tuple[Problem, ...]:
    with pytest.raises(SpecError) as caught:
        spec_from(text, overrides)
    return caught.value.problems


def refusal(line: str, overrides: dict[str, Any] | None = None) -> Problem:
    """The one problem of a spec whose third line is this."""
    (problem,) = refusals(DIGITS + line, overrides)
    return problem


def where(problem: Problem) -> tuple[int, int]:
    assert problem.location is not None
    return problem.location.line, problem.location.column


def test_validate_spec_defaults_are_those_of_the_descriptions() -> None:
    """Two lines are a spec: balanced, no limits, a reserve of 1.5 GiB, nothing offloaded."""
    spec = spec_from(DIGITS)
    assert (spec.version, spec.pipeline.source, spec.pipeline.dtype) == (1, "./digits/pipeline", "auto")
    assert (spec.device_map, spec.low_memory, spec.offload_folder) == ("balanced", "none", None)
    assert (spec.components, spec.max_memory, spec.call) == ({}, {}, {})
    assert spec.reserve == DEFAULT_RESERVE == 3 * GIB // 2


def test_validate_spec_normalises_devices_sizes_and_dtypes() -> None:
    """Full device names, bytes, and torch's own names of dtypes are stored, however they were written."""
    spec = spec_from("""
version: 1
pipeline: {source: a/b, class: FluxPipeline, variant: fp16, dtype: torch.bfloat16, revision: main}
components:
  vae: {source: ./vae, subfolder: x, dtype: fp32, config: {a: 1}}
  safety_checker: null
device_map: {unet: 1, vae: {execution: gpu, offload: model}, default: balanced}
max_memory: {0: 20GiB, cuda:1: 80%, cpu: free-8GiB, disk: 0}
reserve: 2GiB
low_memory: sequential_cpu_offload
offload_folder: ./offload
call: {guidance_scale: 3.0, sizes: [1, {a: null}]}
""")
    assert (spec.pipeline.class_name, spec.pipeline.dtype) == ("FluxPipeline", "bfloat16")
    assert spec.components["safety_checker"] is None
    vae = spec.components["vae"]
    assert vae is not None
    assert (vae.dtype, vae.subfolder, vae.config) == ("float32", "x", {"a": 1})
    assert spec.device_map == {
        "unet": "cuda:1",
        "vae": PlacementSpec(execution="cuda:0", offload="model"),
        "default": "balanced",
    }
    assert spec.max_memory == {
        "cuda:0": Budget("fixed", Decimal(20 * GIB)),
        "cuda:1": Budget("percent", Decimal(80)),
        "cpu": Budget("free_minus", Decimal(8 * GIB)),
        "disk": Budget("fixed", Decimal(0)),
    }
    assert (spec.reserve, spec.low_memory, spec.offload_folder) == (2 * GIB, "sequential_cpu_offload", "./offload")
    assert spec.call == {"guidance_scale": 3.0, "sizes": [1, {"a": None}]}


def test_validate_spec_python_overrides_read_like_the_file() -> None:
    """Values of torch and whole numbers given from Python mean what their text means in a file."""
    overrides = {
        "device_map": {"unet": torch.device("cuda", 1), "default": 0},
        "pipeline.dtype": torch.float16,
        "max_memory": {0: GIB, torch.device("cpu"): "50%"},
        "reserve": 0,
    }
    spec = spec_from(DIGITS, overrides)
    assert spec.device_map == {"unet": "cuda:1", "default": "cuda:0"}
    assert (spec.pipeline.dtype, spec.reserve) == ("float16", 0)
    assert list(spec.max_memory) == ["cuda:0", "cpu"]


def test_spec_is_frozen() -> None:
    """A validated spec cannot be changed."""
    spec: Any = spec_from(DIGITS)
    with pytest.raises(ValueError, match="frozen"):
        spec.reserve = 0


@pytest.mark.parametrize("word", [*STRATEGIES, "cuda", "cpu", "0", "mps", "disk"])
def test_device_map_words_are_accepted(word: str) -> None:
    """Every strategy and every device is a word of the format; what is supported is another rule's."""
    assert isinstance(spec_from(DIGITS + f"device_map: {word}\n").device_map, str)


@pytest.mark.parametrize("word", [*DTYPES, *(f"torch.{word}" for word in DTYPES)])
def test_dtype_words_are_accepted(word: str) -> None:
    """Short, long and torch's own names lead to one name."""
    assert spec_from(DIGITS, {"pipeline.dtype": word}).pipeline.dtype == DTYPES[word.removeprefix("torch.")]


@pytest.mark.parametrize(
    ("text", "what"),
    [("", "the file is empty"), ("# nothing\n", "the file is empty"), ("- a\n", "the file is not a mapping")],
)
def test_validate_spec_no_mapping_says_how_to_start(text: str, what: str) -> None:
    """An empty file and a list have one problem, with the first two lines to write."""
    (problem,) = refusals(text)
    assert (problem.code, problem.what, where(problem)) == (Code.MISSING_KEY, what, (1, 1))
    assert problem.fix == "start it with 'version: 1' and 'pipeline: {source: ./folder}'"


def test_validate_spec_newer_version_is_the_only_problem() -> None:
    """A file of the future fails on its version alone: its other keys may be right there."""
    text = "version: 2\nnewest_key: 1\nreserve: what\nprofiles: 3\n"
    with pytest.raises(ResolveError) as layers:
        spec_from(text)
    with pytest.raises(SpecError) as caught:
        validate_spec(as_read(document_from(text)))
    (problem,) = caught.value.problems
    assert layers.value.problems == (problem,)
    assert (problem.code, where(problem)) == (Code.UNSUPPORTED_VERSION, (1, 10))
    assert problem.what == "this file is of schema version 2; this dmconfig reads version 1"


@pytest.mark.parametrize("version", ["0", "-1", "'1'", "1.5", "null", "[1]"])
def test_validate_spec_other_versions_are_refused(version: str) -> None:
    """A version is the whole number 1."""
    (problem,) = refusals(f"version: {version}\npipeline: {{source: ./x}}\n")
    assert (problem.code, problem.fix) == (Code.UNSUPPORTED_VERSION, "write 'version: 1'")


@pytest.mark.parametrize("version", ["true", "1.0", "1.0e+0"])
def test_validate_spec_version_that_only_equals_one_is_refused(version: str) -> None:
    """The published schema's integer is no boolean, and a file says 1 in one way."""
    (problem,) = refusals(f"version: {version}\npipeline: {{source: ./x}}\n")
    assert problem.code is Code.UNSUPPORTED_VERSION


@pytest.mark.parametrize(
    ("text", "path", "position", "name", "fix"),
    [
        ("pipeline: {source: ./x}\n", (), (1, 1), "version", "add 'version: 1' as the first line"),
        ("version: 1\n", (), (1, 1), "pipeline", "add 'pipeline: {source: ./folder}'"),
        ("version: 1\npipeline: {}\n", ("pipeline",), (2, 1), "source", "add 'source: ./folder'"),
        (
            DIGITS + "device_map: {unet: {offload: model}}\n",
            ("device_map", "unet"),
            (3, 14),
            "execution",
            "add 'execution: cuda:0'",
        ),
    ],
)
def test_missing_key_is_placed_at_its_mapping(
    text: str, path: ConfigPath, position: tuple[int, int], name: str, fix: str
) -> None:
    """A key that is not there is shown at the key of the mapping it belongs in."""
    (problem,) = refusals(text)
    assert (problem.code, problem.path, where(problem)) == (Code.MISSING_KEY, path, position)
    assert (problem.what, problem.fix) == (f"the key {name!r} is missing", fix)


@pytest.mark.parametrize(
    ("line", "path", "column", "fix"),
    [
        ("devicemap: cuda", ("devicemap",), 1, "did you mean 'device_map'?"),
        ("dtype: fp16", ("dtype",), 1, "write it as pipeline.dtype"),
        ("torch_dtype: fp16", ("torch_dtype",), 1, "write it as pipeline.dtype"),
        ("variant: fp16", ("variant",), 1, "it belongs under 'pipeline' or under 'components.<name>'"),
        (
            "enable_model_cpu_offload: true",
            ("enable_model_cpu_offload",),
            1,
            "write low_memory: cpu_offload_with_hook at the top level",
        ),
        ("model_id: a/b", ("model_id",), 1, "write it as pipeline.source"),
        ("num_inference_steps: 3", ("num_inference_steps",), 1, "it belongs under 'call'"),
        ("seed: 3", ("seed",), 1, "it belongs under 'call'"),
        ("components: {vae: {device: 0}}", ("components", "vae", "device"), 20, "it belongs under 'device_map.vae'"),
        ("components: {vae: {sorce: ./x}}", ("components", "vae", "sorce"), 20, "did you mean 'source'?"),
        (
            "components: {vae: {reserve: 1}}",
            ("components", "vae", "reserve"),
            20,
            "it belongs at the top level",
        ),
        (
            "device_map: {unet: {execution: cpu, ofload: model}}",
            ("device_map", "unet", "ofload"),
            37,
            "did you mean 'offload'?",
        ),
        ("use_stream: true", ("use_stream",), 1, "it belongs under 'group_offload'"),
        ("class: FluxPipeline", ("class",), 1, "it belongs under 'pipeline' or under 'components.<name>'"),
        ("token: x", ("token",), 1, "leave it out: a spec holds no secrets; set HF_TOKEN in the environment"),
        (
            "components: {vae: {execution: 0}}",
            ("components", "vae", "execution"),
            20,
            "it belongs under 'device_map.<component>'",
        ),
        (
            "device_map: {vae: {execution: 0, source: ./x}}",
            ("device_map", "vae", "source"),
            34,
            "it belongs under 'pipeline' or under 'components.<name>'",
        ),
        ("zebra: 1", ("zebra",), 1, ""),
    ],
)
def test_unknown_key_is_refused_at_the_key_with_a_hint(line: str, path: ConfigPath, column: int, fix: str) -> None:
    """Misspelt keys, other tools' words and keys at the wrong level each have a place and what to write instead."""
    problem = refusal(line)
    assert (problem.code, problem.path, where(problem)) == (Code.UNKNOWN_KEY, path, (3, column))
    moves = "; dmconfig fix spec.yaml does it" if problem.edits else ""
    assert (problem.what, problem.fix) == (f"unknown key {path[-1]!r}", fix + moves)
    assert problem.why.startswith("the keys accepted here are: ")


@pytest.mark.parametrize(
    ("line", "old", "new", "column"),
    [
        ("device: cuda", "device", "device_map", 1),
        ("gpu: 0", "gpu", "device_map", 1),
        ("offload_dir: ./x", "offload_dir", "offload_folder", 1),
        ("components: {vae: {model: ./x}}", "model", "source", 20),
        ("components: {vae: {torch_dtype: fp16}}", "torch_dtype", "dtype", 20),
        ("components: {vae: {'path': ./x}}", "path", "source", 20),
        ("device_map: {vae: {device: 0}}", "device", "execution", 20),
        ("group_offload: {stream: true}", "stream", "use_stream", 17),
    ],
)
def test_renamed_key_answers_old_and_new_with_an_edit(line: str, old: str, new: str, column: int) -> None:
    """Another name of a key is told as old -> new, at the key, with the edit that mends it."""
    problem = next(each for each in refusals(f"{DIGITS}{line}") if each.code is Code.RENAMED_KEY)
    assert where(problem) == (3, column)
    assert (problem.what, problem.fix) == (
        f"{old!r} is called {new!r} here",
        f"{old} -> {new}; dmconfig fix spec.yaml writes it",
    )
    (edit,) = problem.edits
    assert isinstance(edit, Edit)
    assert (edit.old, edit.new, edit.location) == (old, new, problem.location)
    assert edit.location.length == len(old) + 2 * ("'" in line)


def test_renamed_key_beside_its_new_name_has_no_edit() -> None:
    """With both names there, one has to go, and which is the user's to say."""
    problem = refusal("device: cuda:0\ndevice_map: cuda:1")
    assert (problem.code, problem.edits) == (Code.RENAMED_KEY, ())
    assert problem.what == "'device' is called 'device_map' here, which is there as well"


@pytest.mark.parametrize(
    ("line", "path", "column", "code", "what"),
    [
        ("reserve: 10Gb", ("reserve",), 10, Code.BAD_SIZE, "unit 'Gb' is not accepted"),
        ("reserve: 2.5", ("reserve",), 10, Code.BAD_SIZE, "expected a whole number of bytes"),
        ("reserve:", ("reserve",), 9, Code.BAD_SIZE, "expected a whole number of bytes"),
        ("reserve: 80%", ("reserve",), 10, Code.BAD_SIZE, "'80%' is not a size"),
        ("max_memory: {0: 64000MiBGiB}", ("max_memory", "0"), 17, Code.BAD_SIZE, "'MiBGiB' is not a unit of memory"),
        ("max_memory: {cpu: 120%}", ("max_memory", "cpu"), 19, Code.BAD_SIZE, "120% is more than the device has"),
        ("max_memory: {cup: 1}", ("max_memory", "cup"), 14, Code.BAD_DEVICE, "'cup' is not a device"),
        ("max_memory: {-1: 1}", ("max_memory", "-1"), 14, Code.BAD_DEVICE, "'-1' is not a device"),
        ("max_memory: 10GiB", ("max_memory",), 13, Code.WRONG_TYPE, "expected a mapping, found the text '10GiB'"),
        ("max_memory:", ("max_memory",), 12, Code.WRONG_TYPE, "expected a mapping, found nothing"),
        ("device_map: -1", ("device_map",), 13, Code.BAD_DEVICE, "device index -1 is negative"),
        ("device_map: [cuda]", ("device_map",), 13, Code.BAD_DEVICE, "expected a device"),
        ("device_map: {unet: gpu0}", ("device_map", "unet"), 20, Code.BAD_DEVICE, "'gpu0' is not a device"),
        (
            "device_map: {unet: {execution: tpu}}",
            ("device_map", "unet", "execution"),
            32,
            Code.BAD_DEVICE,
            "'tpu' is not a device",
        ),
        (
            "device_map: {unet: {execution: 0, offload: sometimes}}",
            ("device_map", "unet", "offload"),
            44,
            Code.BAD_VALUE,
            "'sometimes' is not accepted; one of: none, model, sequential, group",
        ),
        ("components: {vae: ./x}", ("components", "vae"), 19, Code.WRONG_TYPE, "expected a mapping, found the text"),
        ("components: [vae]", ("components",), 13, Code.WRONG_TYPE, "expected a mapping, found a list"),
        ("components: {vae: {dtype: int8}}", ("components", "vae", "dtype"), 27, Code.BAD_DTYPE, "'int8' is not a"),
        ("call: 3", ("call",), 7, Code.WRONG_TYPE, "expected a mapping, found the number 3"),
        ("offload_folder: true", ("offload_folder",), 17, Code.WRONG_TYPE, "expected text, found the boolean true"),
    ],
)
def test_wrong_value_is_refused_at_its_place(line: str, path: ConfigPath, column: int, code: Code, what: str) -> None:
    """A wrong value is shown where it stands, a wrong device among max_memory's keys at the key."""
    problem = refusal(line)
    assert (problem.code, problem.path, where(problem)) == (code, path, (3, column))
    assert problem.what.startswith(what)


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("device_map: blanced", "did you mean 'balanced'?"),
        ("low_memory: cpu_offload", "did you mean 'cpu_offload_with_hook'?"),
        ("low_memory: model", "did you mean 'cpu_offload_with_hook'?"),
        ("low_memory: enable_sequential_cpu_offload", "did you mean 'sequential_cpu_offload'?"),
        ("low_memory: group", "did you mean 'group_offload'?"),
        ("low_memory: 'off'", "did you mean 'none'?"),
        ("low_memory: false", "did you mean 'none'?"),
        ("device_map: {unet: CUDA0}", "did you mean 'cuda:0'?"),
        ("max_memory: 10GiB", "name the device: max_memory: {0: 10GiB}"),
        ("components: {vae: {dtype: bflot16}}", "did you mean 'bfloat16'?"),
        ("components: {vae: {revision: 1}}", "quote it: '1'"),
    ],
)
def test_wrong_value_has_the_word_meant(line: str, fix: str) -> None:
    """Misspelt words and other tools' words are answered with ours; a number for text with its quotes."""
    assert refusal(line).fix == fix


def test_unknown_word_lists_devices_and_supported_strategies() -> None:
    """A word that is neither is answered with both; one component takes no strategy, so none is offered there."""
    what = refusal("device_map: everywhere").what
    assert "cuda:0" in what
    assert what.endswith(f"; or a strategy: {', '.join(STRATEGIES)}")
    assert "strategy" not in refusal("device_map: {unet: everywhere}").what


@pytest.mark.parametrize(
    ("names", "second", "device", "column"),
    [
        ("0: 1GiB, cuda:0: 2GiB", "cuda:0", "cuda:0", 23),
        ("gpu: 1, '0': 1", "0", "cuda:0", 22),
        ("cpu: 1, cpu:0: 2", "cpu:0", "cpu", 22),
    ],
)
def test_device_named_twice_is_refused_at_the_second(names: str, second: str, device: str, column: int) -> None:
    """Two names of one device in max_memory contradict each other, also with equal limits."""
    problem = refusal(f"max_memory: {{{names}}}")
    assert (problem.code, problem.path, where(problem)) == (Code.DUPLICATE_DEVICE, ("max_memory", second), (3, column))
    assert problem.what.endswith(f" and {second!r} are the same device, {device}")


def test_all_problems_come_together_in_file_order() -> None:
    """Every mistake of a file is told at once, from top to bottom."""
    problems = refusals("version: 1\npipelin: {source: x}\nreserve: much\ndevice_map: {unet: x}\ncall: 1\n")
    assert [(problem.code, where(problem)[0]) for problem in problems] == [
        (Code.UNKNOWN_KEY, 2),  # which says that pipeline is meant, so that it is missing need not be told
        (Code.BAD_SIZE, 3),
        (Code.BAD_DEVICE, 4),
        (Code.WRONG_TYPE, 5),
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reserve", "much"),
        ("pipeline.dtypo", "fp16"),
        ("device_map", {"unet": "nowhere"}),
        ("max_memory.9", "lots"),
        ("max_memory.ninth", "1GiB"),
        ("version", 0),
    ],
)
def test_problem_of_an_override_names_the_override(key: str, value: object) -> None:
    """A value from outside is no line of the file, though the file may have that key too."""
    (problem,) = refusals(DIGITS + "reserve: 1GiB\nmax_memory: {0: 1GiB}\n", {key: value})
    assert (problem.location, problem.origin) == (None, f"overrides[{key!r}]")


def test_component_named_like_a_union_tag_does_not_move_a_place() -> None:
    """A key 'mapping' or 'word' in device_map is a key like any other."""
    problem = refusal("device_map: {mapping: cuda:0, word: cpu, unet: nowhere}")
    assert (problem.path, where(problem)) == (("device_map", "unet"), (3, 48))


def test_schema_of_every_key_has_a_description() -> None:
    """Editors show something for each key of each level."""
    schema = Spec.model_json_schema()
    models = [schema, *(model for model in schema["$defs"].values() if model.get("type") == "object")]
    described = [field for model in models for field in model["properties"].items()]
    assert len(described) > 20
    assert [name for name, field in described if "description" not in field] == []


def test_only_problem_needs_just_one() -> None:
    """The builder of these tests does not hide a second problem."""
    with pytest.raises(ValueError, match="too many"):
        only_problem(SpecError([refusal("zebra: 1"), refusal("zebras: 1")]))
