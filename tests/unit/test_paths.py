from __future__ import annotations

import pytest

from dmconfig.paths import ROOT, ConfigPath, Location, render_path


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (ROOT, "(whole file)"),
        (("device_map",), "device_map"),
        (("device_map", "unet"), "device_map.unet"),
        (("components", "vae", "dtype"), "components.vae.dtype"),
        (("items", 2), "items[2]"),
        (("call", "sizes", 0, 1, "width"), "call.sizes[0][1].width"),
        ((0,), "[0]"),
        (("device_map", "transformer.blocks.0"), "device_map.transformer.blocks.0"),
        (("max_memory", "cuda:0"), "max_memory.cuda:0"),
    ],
)
def test_render_path_as_one_writes_it(path: ConfigPath, text: str) -> None:
    """Keys are joined by dots, indices stand in brackets, the root has a name of its own."""
    assert render_path(path) == text


def test_location_reads_as_editors_jump() -> None:
    """File, line and column with colons: what terminals and editors follow."""
    assert str(Location("specs/flux.yaml", 14, 5)) == "specs/flux.yaml:14:5"
