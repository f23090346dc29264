"""Shapes that are remembered are those that the operator would make, storages included; what returns views is run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmconfig.virtual import VirtualMachine, shapes

aten = torch.ops.aten
META = torch.device("meta")


def empty(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device=META)


def asked(func: Any, *args: Any) -> tuple[Any, int]:
    """Return what an operator makes, asked for twice, and how often it was run."""
    runs = []

    def run() -> Any:
        runs.append(func)
        return func(*args)

    shapes.shapes_of(func, args, {}, run)
    return shapes.shapes_of(func, args, {}, run), len(runs)


def described(result: Any) -> list[Any]:
    parts = [result] if isinstance(result, torch.Tensor) else [*result]
    return [(part.shape, part.stride(), part.dtype, part.untyped_storage().nbytes()) for part in parts]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with nothing remembered."""
    monkeypatch.setattr(shapes, "_known", {})


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.mm.default, (empty(3, 4), empty(4, 5))),
        (aten.add.Tensor, (empty(3, 1), empty(1, 4))),
        (aten.native_layer_norm.default, (empty(2, 8), [8], None, None, 1e-5)),
        (aten.cat.default, ([empty(2, 3), empty(4, 3)],)),
        (aten.convolution.default, (empty(1, 3, 8, 8), empty(4, 3, 3, 3), None, *[[1, 1]] * 3, False, [0, 0], 1)),
        (aten.clone.default, (empty(4, 3).t(),)),
    ],
)  # fmt: skip
def test_what_makes_new_tensors_is_run_once(func: Any, args: tuple[Any, ...]) -> None:
    """Size, strides, dtype and storage are those of the operator's own result."""
    again, runs = asked(func, *args)
    assert runs == 1
    assert described(again) == described(func(*args))


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten._unsafe_view.default, (empty(2, 6), [3, 4])),  # whose schema speaks of no view
        (aten.view.default, (empty(2, 6), [3, 4])),
        (aten.add_.Tensor, (empty(2, 3), empty(2, 3))),
    ],
)
def test_what_shares_an_argument_is_run_every_time(func: Any, args: tuple[Any, ...]) -> None:
    """A view is a view again, and what is written is what was given."""
    again, runs = asked(func, *args)
    assert runs == 2
    assert again.untyped_storage()._cdata == args[0].untyped_storage()._cdata


@pytest.mark.parametrize(
    "calls",
    [
        [(empty(2, 3), 1), (empty(2, 3), 1.0)],
        [(empty(2, 3, dtype=torch.int64), 1), (empty(2, 3, dtype=torch.int64), True)],
        [(empty(2, 3), 1), (empty(3, 2).t(), 1)],
        [(empty(2, 3), 1), (empty(2, 3, dtype=torch.float16), 1)],
    ],
)
def test_what_differs_in_kind_is_asked_apart(calls: list[tuple[Any, ...]]) -> None:
    """One and 1.0 are equal in Python and not to an operator; so are strides and dtypes told apart."""
    for args in calls:
        again, runs = asked(aten.mul.Scalar, *args)
        assert runs == 1
        assert described(again) == described(aten.mul.Scalar(*args))


def test_a_machine_takes_the_same_with_shapes_remembered_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The books of two equal runs are equal, whether the second one asks again or not."""
    peaks = [peaks_of_a_run(), peaks_of_a_run()]
    monkeypatch.setattr(shapes, "_makes_new", lambda _func: False)
    assert {*peaks} == {peaks_of_a_run()}


def peaks_of_a_run() -> tuple[int, int]:
    module = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.GELU(), torch.nn.Linear(400, 300))
    with VirtualMachine([1 << 30], values=False) as machine, torch.no_grad():
        machine.adopt(module, "cuda:0")
        machine.ledger.reset()
        for _ in range(2):
            module(torch.zeros(512, 300, device="cuda:0"))
        ledger = machine.ledger
        return ledger.peak_bytes("cuda:0"), ledger.peak_reserved_bytes("cuda:0")
