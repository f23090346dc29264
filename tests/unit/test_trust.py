"""What is refused for where it comes from: pickles, code, links and paths that lead out, moving revisions, tokens."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from dmconfig.check import check, check_weights
from dmconfig.document import parse_document
from dmconfig.errors import Code, DMConfigError, Problem, SourceError
from dmconfig.provenance import config_data
from dmconfig.resolve import resolve
from dmconfig.source import MAX_JSON_BYTES, Source, is_within, read_index, read_json
from dmconfig.spec import validate_spec
from dmconfig.trust import unpinned
from dmconfig.weights import read_header
from tests.conftest import EXAMPLES, only_problem, spec_from

DIGITS = EXAMPLES / "digits" / "pipeline"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_" + "aBcDeFgH" * 4


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the digits pipeline that a test may change."""
    folder = tmp_path / "pipeline"
    shutil.copytree(DIGITS, folder)
    return folder


def problems_of(folder: Path, text: str) -> tuple[Problem, ...]:
    """Return what is wrong with a spec whose relative paths start in folder, weights included; () when nothing is."""
    resolved = resolve(parse_document(f"version: 1\n{text}", name="pipe.yaml", folder=folder))
    try:
        assembly = check(resolved, validate_spec(resolved))
        check_weights(resolved, assembly)
    except DMConfigError as error:
        return error.problems
    return ()


def problem_of(folder: Path, text: str) -> Problem:
    """Return the one thing that is wrong with a spec."""
    (problem,) = problems_of(folder, text)
    return problem


def edit_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


# Pickles


class Payload:
    """What an attacker pickles: unpickling it writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self.target),)


def plant_pickle(folder: Path, name: str, target: Path) -> None:
    """Put a pickle with a payload in the place of a component's weights."""
    for file in (folder / name).glob("*.safetensors"):
        file.unlink()
    (folder / name / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Payload(target)))


def test_a_payload_does_what_it_is_meant_to(tmp_path: Path) -> None:
    """The attack of these tests works where nothing guards against it."""
    pickle.loads(pickle.dumps(Payload(tmp_path / "owned")))  # noqa: S301 - this is the attack
    assert (tmp_path / "owned").is_dir()


def test_pickled_weights_are_refused_and_never_opened(copied: Path, tmp_path: Path) -> None:
    """A folder with pickles alone is refused by name; why, and both ways out, are told; the payload has not run."""
    plant_pickle(copied, "unet", tmp_path / "owned")
    problem = problem_of(tmp_path, "pipeline: {source: ./pipeline}")
    assert problem.code is Code.PICKLE_NOT_TRUSTED
    assert problem.what == (f"the weights of 'unet' are in a pickle, {copied / 'unet' / 'diffusion_pytorch_model.bin'}")
    assert problem.why == "opening a pickle can run code that its author put there; safetensors holds numbers alone"
    assert problem.fix == (
        "convert it to safetensors on a machine that may be lost, or write the reason: pipeline.allow_pickle: ..."
    )
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("end", ["ckpt", "bin", "pt", "pth"])
def test_a_single_file_that_is_a_pickle_is_refused(tmp_path: Path, copied: Path, end: str) -> None:
    """So is one file of weights that is a pickle, of a pipeline or of a component, whatever its name ends in."""
    (tmp_path / f"model.{end}").write_bytes(pickle.dumps(Payload(tmp_path / "owned")))
    whole = problems_of(tmp_path, f"pipeline: {{source: ./model.{end}, config: ./pipeline, dtype: float16}}")
    assert {problem.code for problem in whole} == {Code.PICKLE_NOT_TRUSTED}
    part = problem_of(
        tmp_path, f"pipeline: {{source: ./pipeline, dtype: fp16}}\ncomponents: {{vae: {{source: ./model.{end}}}}}"
    )
    assert part.code is Code.PICKLE_NOT_TRUSTED
    assert part.fix.endswith("components.vae.allow_pickle: ...")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("value", ["true", "yes-please", "1"])
def test_a_pickle_is_allowed_with_a_reason_only(copied: Path, tmp_path: Path, value: str) -> None:
    """A mere yes is no reason."""
    plant_pickle(copied, "unet", tmp_path / "owned")
    problem = problem_of(tmp_path, f"pipeline: {{source: ./pipeline, allow_pickle: {value}, dtype: float16}}")
    assert problem.code is Code.BAD_VALUE
    assert problem.what.startswith("a reason is expected, in a few words")
    assert problem.fix == "write why, and who made the file"


def test_an_allowed_pickle_needs_a_dtype_and_then_passes(copied: Path, tmp_path: Path) -> None:
    """A pickle is not opened to look which dtype it has, so ``auto`` would be a guess."""
    plant_pickle(copied, "unet", tmp_path / "owned")
    text = "pipeline: {source: ./pipeline, allow_pickle: our own export of 2022"
    problem = problem_of(tmp_path, f"{text}}}")
    assert (problem.code, problem.why) == (Code.BAD_DTYPE, "a pickle is not opened to look")
    assert problems_of(tmp_path, f"{text}, dtype: float16}}") == ()
    assert not (tmp_path / "owned").exists()


def test_a_pickle_granted_to_one_component_is_not_granted_to_others(copied: Path, tmp_path: Path) -> None:
    """The grant is per source."""
    for name in ("unet", "vae"):
        plant_pickle(copied, name, tmp_path / "owned")
    text = "pipeline: {source: ./pipeline, dtype: fp16}\ncomponents: {unet: {allow_pickle: made by us in 2022}}"
    problem = problem_of(tmp_path, text)
    assert (problem.code, "'vae'" in problem.what) == (Code.PICKLE_NOT_TRUSTED, True)


# Code


@pytest.mark.parametrize(("library", "name"), [("os", "system"), ("subprocess", "Popen"), ("builtins", "eval")])
def test_an_index_that_names_other_code_is_refused(copied: Path, tmp_path: Path, library: str, name: str) -> None:
    """Classes come from the installed diffusers and transformers alone."""
    edit_json(copied / "model_index.json", unet=[library, name])
    problem = problem_of(tmp_path, "pipeline: {source: ./pipeline}")
    assert (problem.code, problem.what) == (
        Code.CODE_NOT_TRUSTED, f"the source asks for {library}.{name} as 'unet'",
    )  # fmt: skip
    assert "code of a repository is not run" in problem.why


@pytest.mark.parametrize("name", ["os.system", "system", "__import__('os')"])
def test_a_config_that_names_other_code_is_refused(copied: Path, tmp_path: Path, name: str) -> None:
    """The class in a model's own config is looked up by the same rule, and so are those in the spec."""
    shutil.copytree(copied / "unet", tmp_path / "mine")
    edit_json(tmp_path / "mine" / "config.json", _class_name=name)
    text = "pipeline: {source: ./pipeline}\ncomponents: {unet: {source: ./mine}}"
    assert problem_of(tmp_path, text).code is Code.UNKNOWN_CLASS
    text = f'pipeline: {{source: ./pipeline}}\ncomponents: {{unet: {{class: "{name}"}}}}'
    assert problem_of(tmp_path, text).code is Code.UNKNOWN_CLASS
    assert problem_of(tmp_path, f'pipeline: {{source: ./pipeline, class: "{name}"}}').code is Code.UNKNOWN_CLASS


def test_a_pipeline_of_its_repository_s_own_code_is_refused(copied: Path, tmp_path: Path) -> None:
    """So is an index whose class is in the repository, with the code beside it."""
    edit_json(copied / "model_index.json", _class_name=["pipeline", "MyPipeline"])
    (copied / "pipeline.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'owned')!r})\n")
    problem = problem_of(tmp_path, "pipeline: {source: ./pipeline}")
    assert problem.code is Code.CODE_NOT_TRUSTED
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("place", "key", "fix"),
    [
        ("", "trust_remote_code: read by us", "it belongs to the source that brings the code"),
        ("components: {unet: {", "custom_pipeline: ./code", "write pipeline.custom_pipeline: {source: ..."),
        ("", "custom_revision: main", "write pipeline.custom_pipeline: {source: ..."),
    ],
)
def test_keys_that_run_code_say_where_they_belong(copied: Path, tmp_path: Path, place: str, key: str, fix: str) -> None:
    """A grant is of one source, so it stands beside that."""
    problem = problem_of(tmp_path, f"pipeline: {{source: ./pipeline}}\n{place}{key}{'}' * place.count('{')}")
    assert (problem.code, problem.fix.startswith(fix)) == (Code.UNKNOWN_KEY, True)


# Paths


def test_a_shard_index_that_leads_out_is_refused(copied: Path, tmp_path: Path) -> None:
    """Neither a parent folder nor an absolute path is a file of the index's folder."""
    folder = copied / "unet"
    weights = folder / "diffusion_pytorch_model.safetensors"
    shutil.move(weights, tmp_path / "outside.safetensors")
    for target in ("../../outside.safetensors", str(tmp_path / "outside.safetensors"), "..\\outside.safetensors", ".."):
        index = {"metadata": {}, "weight_map": {"conv_in.weight": target}}
        (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
        problem = problem_of(tmp_path, "pipeline: {source: ./pipeline}")
        assert problem.code is Code.WEIGHTS_CORRUPT
        assert "not a file of its folder" in problem.what


@pytest.mark.parametrize("name", ["config.json", "diffusion_pytorch_model.safetensors"])
def test_a_link_out_of_the_source_is_refused(copied: Path, tmp_path: Path, name: str) -> None:
    """A link in a folder of somebody else's must not reach the rest of the machine."""
    shutil.move(copied / "unet" / name, tmp_path / name)
    (copied / "unet" / name).symlink_to(tmp_path / name)
    problem = problem_of(tmp_path, "pipeline: {source: ./pipeline}")
    assert problem.code is Code.OUTSIDE_SOURCE
    assert problem.what == (
        f"{copied / 'unet' / name} is a link that leads out of its source, to {(tmp_path / name).resolve()}"
    )


def test_links_within_a_source_and_to_a_source_are_fine(copied: Path, tmp_path: Path) -> None:
    """A folder may be reached by a link, and may have links of its own inside."""
    weights = copied / "unet" / "diffusion_pytorch_model.safetensors"
    shutil.move(weights, copied / "shared.safetensors")
    weights.symlink_to(Path("..") / "shared.safetensors")
    (tmp_path / "current").symlink_to(copied)
    assert problems_of(tmp_path, "pipeline: {source: ./current}") == ()


def test_the_hub_cache_s_own_links_are_fine(tmp_path: Path) -> None:
    """Snapshots are links into the blobs beside them; links into those of another repository are not its own."""
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for blobs in (repository / "blobs", tmp_path / "models--c--d" / "blobs"):
        blobs.mkdir(parents=True)
        (blobs / "x").touch()
    (snapshot / "own").symlink_to(repository / "blobs" / "x")
    (snapshot / "other").symlink_to(tmp_path / "models--c--d" / "blobs" / "x")
    assert is_within(snapshot / "own", snapshot)
    assert not is_within(snapshot / "other", snapshot)


@pytest.mark.parametrize("subfolder", ["../secret", "/etc", "a/../../b"])
def test_a_subfolder_that_leads_out_is_refused(copied: Path, tmp_path: Path, subfolder: str) -> None:
    """A subfolder is in its source."""
    text = f"pipeline: {{source: ./pipeline}}\ncomponents: {{unet: {{subfolder: {subfolder}}}}}"
    codes = {problem.code for problem in problems_of(tmp_path, text)}
    assert codes <= {Code.OUTSIDE_SOURCE, Code.SOURCE_NOT_FOUND}
    assert codes


# Headers and other small files


def header_file(folder: Path, header: bytes, data: bytes = b"") -> Path:
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return file


BOMBS = {
    "nested": b'{"a":' + b"[" * 2_000_000,
    "objects": b'{"a":' * 500_000,
    "many dimensions": b'{"a":{"dtype":"F32","data_offsets":[0,0],"shape":[' + b"9," * 3_000_000 + b"0]}}",
    "many small lists": b'{"a":[' + b"[]," * 3_000_000 + b"[]]}",
    "huge number": b'{"a":{"dtype":"F32","data_offsets":[0,0],"shape":[' + b"9" * 5_000 + b"]}}",
    "large sizes": b'{"a":{"dtype":"F32","data_offsets":[0,4],"shape":[' + b"9" * 19 + b"," + b"9" * 19 + b"]}}",
}


@pytest.mark.parametrize("header", BOMBS.values(), ids=BOMBS.keys())
def test_a_header_made_to_exhaust_is_refused(tmp_path: Path, header: bytes) -> None:
    """Nested, repeated and oversized values are told as damage, in bounded time and memory."""
    with pytest.raises(SourceError) as caught:
        read_header(header_file(tmp_path, header))
    assert only_problem(caught.value).code is Code.WEIGHTS_CORRUPT


def test_a_header_that_claims_more_than_the_format_allows_is_not_read(tmp_path: Path) -> None:
    """The claimed length is looked at first: nothing of that size is allocated."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    with pytest.raises(SourceError) as caught:
        read_header(file)
    assert "the format allows" in only_problem(caught.value).what


def test_configs_made_to_exhaust_are_refused(tmp_path: Path) -> None:
    """An index that is nested without end, or larger than any is, is not parsed."""
    file = tmp_path / "model_index.json"
    file.write_bytes(b"[" * 1_000_000)
    with pytest.raises(SourceError) as caught:
        read_index(Source(text="./x", folder=tmp_path))
    assert only_problem(caught.value).what.endswith("nested too deep")
    with file.open("wb") as stream:
        stream.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(SourceError) as caught:
        read_json(file)
    assert "larger than a config can be" in only_problem(caught.value).what


# Revisions


@pytest.mark.parametrize("revision", ["main", "v1.0", "0123abc", COMMIT[:39], COMMIT.upper()])
def test_a_revision_that_may_move_is_refused(revision: str) -> None:
    """A branch, a tag and a part of a commit name other files tomorrow."""
    text = f"pipeline: {{source: stabilityai/stable-diffusion-xl-base-1.0, revision: {revision}}}"
    problem = problem_of(EXAMPLES, text)
    assert (problem.code, problem.path) == (Code.MOVING_REVISION, ("pipeline", "revision"))
    assert problem.what == f"{revision!r} is not a full commit, so what it names may change"
    assert "dmconfig pin" in problem.fix
    assert problems_of(EXAMPLES, f"{text}\nallow_moving_revision: true") == ()


def test_a_strict_spec_needs_a_commit_everywhere() -> None:
    """``allow_moving_revision: false`` refuses a revision left out, of the pipeline and of components alike."""
    text = (
        "allow_moving_revision: false\npipeline: {source: stabilityai/stable-diffusion-xl-base-1.0}\n"
        "components: {vae: {source: black-forest-labs/FLUX.1-dev, class: AutoencoderKL, subfolder: vae}}"
    )
    found = problems_of(EXAMPLES, text)
    moving = [problem.path for problem in found if problem.code is Code.MOVING_REVISION]
    assert moving == [("pipeline", "source"), ("components", "vae", "source")]


def test_what_is_not_pinned_is_remarked_on() -> None:
    """A revision left out is legal, and said, unless the spec says that it may move; folders never move."""
    text = "version: 1\npipeline: {source: a/b}\ncomponents: {vae: {source: c/d}, unet: {source: ./u}}\n"
    (note,) = unpinned(spec_from(text))
    assert note == "not pinned, so what it names may change: a/b, c/d (dmconfig pin writes the commit into the file)"
    assert not [*unpinned(spec_from(f"{text}allow_moving_revision: true\n"))]
    pinned = text.replace("a/b}", f"a/b, revision: {COMMIT}}}").replace("c/d}", f"c/d, revision: {COMMIT}}}")
    assert not [*unpinned(spec_from(pinned))]


# Tokens


def test_a_token_in_a_spec_or_an_override_is_in_no_error(copied: Path, tmp_path: Path) -> None:
    """Where somebody writes one in spite of all, nothing repeats it; where tokens belong is told."""
    for text in (
        f"pipeline: {{source: 'https://me:{TOKEN}@example.org/a/b'}}",
        f"pipeline: {{source: {TOKEN}}}",
        f"pipeline: {{source: ./pipeline, token: {TOKEN}}}",
        f"pipeline: {{source: ./pipeline, revision: {TOKEN}}}",
        f"pipeline: {{source: ./pipeline, dtype: {TOKEN}}}",
    ):
        found = problems_of(tmp_path, text)
        assert found
        assert TOKEN not in str(DMConfigError(found)), text
    (problem,) = problems_of(tmp_path, f"pipeline: {{source: ./pipeline, token: {TOKEN}}}")
    assert problem.fix == "leave it out: a spec holds no secrets; set HF_TOKEN in the environment"


# Written elsewhere


def test_paths_of_a_spec_written_elsewhere_lead_where_they_led(tmp_path: Path) -> None:
    """Of sources, configs and code alike; hub ids stay as they are."""
    text = (
        "pipeline: {source: ./a.safetensors, config: ./b, original_config: ./c.yaml,"
        " custom_pipeline: {source: ./d.py}}\n"
        "components: {vae: {source: ./e, config: org/f}, controlnet: [{source: ./g, original_config: ./h.yaml}]}\n"
    )
    resolved = resolve(parse_document(f"version: 1\n{text}", name="pipe.yaml", folder=tmp_path / "specs"))
    data = config_data(resolved, tmp_path)
    assert data["pipeline"] == {
        "source": "./specs/a.safetensors", "config": "./specs/b", "original_config": "./specs/c.yaml",
        "custom_pipeline": {"source": "./specs/d.py"},
    }  # fmt: skip
    assert data["components"] == {
        "vae": {"source": "./specs/e", "config": "org/f"},
        "controlnet": [{"source": "./specs/g", "original_config": "./specs/h.yaml"}],
    }
