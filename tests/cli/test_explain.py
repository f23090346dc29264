"""``dmconfig explain``: keys and codes, as text and as data; and the shell's completion of both."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from dmconfig.cli import app
from dmconfig.errors import Code
from dmconfig.reference import key_docs
from dmconfig.spec import Spec


def explain(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["explain", *arguments])


def test_explain_key_says_what_it_takes_means_and_looks_like() -> None:
    """Type, default, documentation, an example and the keys inside, from the models."""
    assert explain("low_memory").stdout == (
        "low_memory\n"
        "  takes    one of none, cpu_offload_with_hook, sequential_cpu_offload, group_offload; default: none\n"
        "  How components whose weights do not stay on an accelerator get there: cpu_offload_with_hook brings\n"
        "  each whole while it runs, sequential_cpu_offload one layer at a time, group_offload in groups.\n"
        "  example\n"
        "    low_memory: cpu_offload_with_hook\n"
    )
    assert explain("reserve").stdout.endswith(
        "  example\n    reserve: 3GiB\n  inside   reserve.<component or device>\n"
    )


@pytest.mark.parametrize(
    ("word", "keys"),
    [
        ("max_memory", ["max_memory"]),
        ("max_memory.cuda:0", ["max_memory.<device>"]),
        ("device_map.unet", ["device_map.<component>"]),
        ("device_map.default", ["device_map.default"]),
        ("device_map.transformer.blocks.0.offload", ["device_map.<component>.offload"]),
        ("components.vae.dtype", ["components.<component>.dtype"]),
        ("dtype", ["pipeline.dtype", "components.<component>.dtype"]),
        ("use_stream", ["group_offload.use_stream"]),
        ("profiles.prod", ["profiles.<profile>"]),
        ("torch_dtype", ["pipeline.dtype", "components.<component>.dtype"]),
        ("gpu", ["device_map", "device_map.<component>.execution"]),
    ],
)
def test_explain_finds_a_key_by_path_name_or_other_name(word: str, keys: list[str]) -> None:
    """A path, a path of a real file, a name alone, and the name that other tools have for it."""
    data = json.loads(explain(word, "--format", "json").stdout)
    assert [doc["key"] for doc in data["keys"]] == keys


@pytest.mark.parametrize("word", ["DM202", "dm202", "unknown-key", "UNKNOWN-KEY"])
def test_explain_code_by_number_or_name(word: str) -> None:
    """A code is found as it is printed in a report, whatever the case."""
    text = explain(word).stdout
    assert text.startswith("DM202 unknown-key\n  There is no key of this name")
    assert "    $ dmconfig validate pipe.yaml\n  remedy\n" in text
    assert json.loads(explain(word, "--format", "json").stdout)["code"] == "DM202"


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("enable_model_cpu_offload", "write low_memory: cpu_offload_with_hook at the top level"),
        ("max_memry", "did you mean 'max_memory'?"),
        ("unknow-key", "did you mean 'unknown-key'?"),
        ("zebra", "dmconfig explain, alone, lists the keys"),
    ],
)
def test_explain_unknown_word_says_what_was_meant(word: str, fix: str) -> None:
    """What is no key and no code is an error, with what was most likely meant."""
    result = explain(word)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith(f"  fix  {fix}\n")


def test_explain_alone_lists_every_key() -> None:
    """Without a word, all keys, one to a line; as data, with everything that is to be known of them."""
    lines = explain().stdout.splitlines()
    assert [line.split()[0] for line in lines] == [doc.path.split()[0] for doc in key_docs()]
    assert len(json.loads(explain("--format", "json").stdout)["keys"]) == len(lines)


def test_every_key_of_the_models_is_documented() -> None:
    """No field of the models is missing, and each says what it is, shows itself, and states its default."""
    docs = {doc.path: doc for doc in key_docs()}
    assert {field.alias or name for name, field in Spec.model_fields.items()} <= set(docs)
    for doc in docs.values():
        assert doc.type, doc.path
        assert doc.description, doc.path
        assert doc.example, doc.path
    assert [path for path, doc in docs.items() if doc.default is None] == [
        "version", "pipeline", "pipeline.source", "pipeline.custom_pipeline.source",
        "pipeline.connected.prior.source",
        "components.<component>.cache.class", "quantization.<component>.quant_backend", "adapters.lora[].source",
        "adapters.textual_inversion[].source", "adapters.ip_adapter[].source", "pipelines.<name>.class",
        "device_map.<component>.execution",
    ]  # fmt: skip


def test_shell_completes_keys_and_codes() -> None:
    """What a shell asks for the beginning of a word is answered from the models and the codes."""
    environment = {"_DMCONFIG_COMPLETE": "complete_bash", "COMP_WORDS": "dmconfig explain max", "COMP_CWORD": "2"}
    result = CliRunner().invoke(app, [], prog_name="dmconfig", env=environment)
    assert result.stdout.split() == ["max_memory", "max_memory.<device>"]
    environment |= {"COMP_WORDS": "dmconfig explain DM60"}
    result = CliRunner().invoke(app, [], prog_name="dmconfig", env=environment)
    assert result.stdout.split() == [str(code) for code in Code if code.startswith("DM60")]
