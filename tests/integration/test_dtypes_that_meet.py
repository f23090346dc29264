"""The table of components that must be of one dtype, held against runs of every pair on the tiny pipelines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline

from dmconfig.compatibility import incompatible_dtypes
from tests.conftest import checked_from
from tests.tiny_pipelines import CALLS, CLASSES, class_override, draw, kind_of, write_tiny


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_verdicts_are_those_of_running(call: str, root: Path, one_thread: None) -> None:
    """With one component in float32 beside others in bfloat16: what is refused fails, and what passes runs."""
    folder = root / kind_of(call)
    if not folder.exists():
        write_tiny(kind_of(call), folder)
    cls = getattr(diffusers, CLASSES[call]) if call in CLASSES else DiffusionPipeline
    pipe = cls.from_pretrained(folder, dtype=torch.bfloat16)
    head = f"version: 1\npipeline: {{source: {folder}, dtype: bfloat16"
    named = f", class: {class_override(call)['pipeline.class']}" if call in CLASSES else ""
    checked = checked_from(f"{head}{named}}}\n")
    for component in checked.assembly.modules:
        parts = [replace(c, dtype="float32" if c is component else c.dtype) for c in checked.assembly.components]
        assembly = replace(checked.assembly, components=tuple(parts))
        refused = [*incompatible_dtypes(checked.resolved, checked.spec, assembly)]
        module = getattr(pipe, component.name)
        stored = {name: tensor.dtype for name, tensor in module.named_parameters()}
        module.float()
        try:
            draw(pipe, call, 0)
            runs = True
        except RuntimeError:
            runs = False
        for name, tensor in module.named_parameters():
            tensor.data = tensor.data.to(stored[name])
        for buffer in module.buffers():
            buffer.data = buffer.data.to(torch.bfloat16) if buffer.is_floating_point() else buffer.data
        if refused:
            assert not runs, component.name
        elif call != "sd3":  # which joins its texts, so that the widest dtype decides: more fails than is refused
            assert runs, component.name
