from __future__ import annotations

import pytest

from dmconfig.devices import ACCELERATOR_KINDS, is_accelerator, nearest_device, parse_device


@pytest.mark.parametrize(
    ("written", "device"),
    [
        (0, "cuda:0"),
        (3, "cuda:3"),
        ("0", "cuda:0"),
        ("12", "cuda:12"),
        ("cuda", "cuda:0"),
        ("cuda:0", "cuda:0"),
        ("cuda:07", "cuda:7"),
        ("gpu", "cuda:0"),
        ("gpu:1", "cuda:1"),
        (" cuda:1 ", "cuda:1"),
        ("mps", "mps:0"),
        ("xpu:1", "xpu:1"),
        ("npu", "npu:0"),
        ("cpu", "cpu"),
        ("cpu:0", "cpu"),
        ("disk", "disk"),
    ],
)
def test_parse_device_many_ways_one_name(written: object, device: str) -> None:
    """Every way to write a device leads to one full name."""
    assert parse_device(written) == device


@pytest.mark.parametrize("written", ["cuda:0", "cuda:11", "mps:0", "xpu:2", "cpu", "disk"])
def test_parse_device_full_name_is_kept(written: str) -> None:
    """A full name names itself."""
    assert parse_device(written) == written


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (-1, "device index -1 is negative; accepted are cpu, or an accelerator"),
        ("-1", "'-1' is not a device; accepted are cpu"),
        ("cuda:-1", "'cuda:-1' is not a device"),
        ("cuda:", "'cuda:' is not a device"),
        ("cuda:one", "'cuda:one' is not a device"),
        ("cuda:0:1", "'cuda:0:1' is not a device"),
        ("9" * 5000, "'999"),
        ("cuda0", "'cuda0' is not a device"),
        ("CUDA:0", "'CUDA:0' is not a device"),
        ("cpu:1", "'cpu:1' is not a device"),
        ("meta", "'meta' is not a device"),
        ("tpu:0", "'tpu:0' is not a device"),
        ("", "'' is not a device"),
        ("0.5", "'0.5' is not a device"),
        (True, "expected a device: cpu"),
        (1.0, "expected a device: cpu"),
        (None, "expected a device: cpu"),
        (["cuda"], "expected a device: cpu"),
    ],
)
def test_parse_device_refused_says_what_is_accepted(written: object, message: str) -> None:
    """What is no device is refused, also True, which is an int to Python, and 1.0, which equals one."""
    with pytest.raises(ValueError, match=r"^.") as caught:
        parse_device(written)
    assert str(caught.value).startswith(message)


def test_is_accelerator_all_but_cpu_and_disk() -> None:
    """Every kind of accelerator is one; the cpu and the disk are not."""
    assert all(is_accelerator(parse_device(kind)) for kind in ACCELERATOR_KINDS)
    assert not is_accelerator("cpu")
    assert not is_accelerator("disk")


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("cuda0", "cuda:0"),
        ("CUDA: 1", "cuda:1"),
        ("GPU", "cuda:0"),
        ("gpu 2", "cuda:2"),
        ("CPU", "cpu"),
        ("host", "cpu"),
        ("MPS", "mps:0"),
        ("tpu", None),
        ("balanced", None),
        ("0.5", None),
        ("", None),
    ],
)
def test_nearest_device_is_what_was_meant(misspelt: str, meant: str | None) -> None:
    """Other spellings of a device lead to its name, and what is like none to nothing."""
    assert nearest_device(misspelt) == meant
