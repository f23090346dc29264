"""What users of other tools reported of building from a configuration."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dmconfig import load_from_yaml
from dmconfig.errors import BuildError, Code

DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "pipeline"


def test_component_that_cannot_be_built_names_itself_its_line_and_the_cause(tmp_path: Path) -> None:
    """Hydra issue 2099: when building from a config fails, one cannot tell which node it was."""
    shutil.copytree(DIGITS / "vae", tmp_path / "vae")
    config = tmp_path / "vae" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"down_block_types": ["NoSuchBlock"]}))
    file = tmp_path / "spec.yaml"
    file.write_text(
        f"version: 1\npipeline: {{source: {DIGITS}}}\ncomponents:\n  vae:\n    source: ./vae\ndevice_map: cpu\n"
    )
    with pytest.raises(BuildError) as caught:
        load_from_yaml(file)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == (Code.COMPONENT_NOT_LOADED, ("components", "vae"))
    assert problem.location is not None
    assert (problem.location.line, "NoSuchBlock" in problem.what) == (5, True)
    assert "NoSuchBlock" in str(caught.value.__cause__)
