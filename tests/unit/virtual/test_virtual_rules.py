from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dmconfig.virtual import DeviceMismatchError, VirtualTensor
from tests.virtual_devices import MakeMachine

TWO_DEVICES = "Expected all tensors to be on the same device, but found at least two devices, {} and {}! (op {})"
INDICES = "indices should be either on cpu or on the same device as the indexed tensor (cpu), but found one on cuda:0"


def on(device: str, *shape: int) -> torch.Tensor:
    return torch.ones(shape).to(device)


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda: on("cuda:0", 2) + on("cpu", 2), TWO_DEVICES.format("cuda:0", "cpu", "aten.add")),
        (lambda: on("cuda:0", 2) + on("cuda:1", 2), TWO_DEVICES.format("cuda:0", "cuda:1", "aten.add")),
        (lambda: on("cpu", 2).add_(on("cuda:1", 1)), TWO_DEVICES.format("cpu", "cuda:1", "aten.add_")),
        (lambda: torch.tensor(1.0).add_(on("cuda:1")), TWO_DEVICES.format("cpu", "cuda:1", "aten.add_")),
        (lambda: on("cuda:1", 2, 2) @ on("cuda:0", 2, 2), TWO_DEVICES.format("cuda:1", "cuda:0", "aten.mm")),
        (
            lambda: torch.cat([on("cuda:0", 2), on("cuda:0", 2), on("cuda:1", 2)]),
            TWO_DEVICES.format("cuda:0", "cuda:1", "aten.cat"),
        ),
        (
            lambda: torch.nn.functional.linear(on("cuda:0", 2, 2), on("meta", 2, 2)),
            TWO_DEVICES.format("cuda:0", "meta", "aten.mm"),
        ),
        (
            lambda: torch.nn.functional.group_norm(on("cuda:0", 1, 2, 2), 2, on("cuda:1", 2)),
            TWO_DEVICES.format("cuda:0", "cuda:1", "group_norm"),
        ),
        (
            lambda: torch.nn.functional.scaled_dot_product_attention(*[on(f"cuda:{i}", 1, 1, 2, 2) for i in (0, 1, 0)]),
            TWO_DEVICES.format("cuda:0", "cuda:1", "scaled_dot_product_attention"),
        ),
        (lambda: on("cpu", 2)[torch.tensor([0], device="cuda:0")], INDICES),
        (
            lambda: torch.randn(2, device="cuda:0", generator=torch.Generator()),
            "Expected a 'cuda' device type for generator but found 'cpu'",
        ),
        (
            lambda: on("cuda:0", 2).normal_(generator=torch.Generator("cuda:1")),
            "the generator is on cuda:1, the result on cuda:0",
        ),
    ],
)  # fmt: skip
def test_mixed_devices_raise_with_cudas_words(
    virtual_machine: MakeMachine, operation: Callable[[], object], message: str
) -> None:
    """Tensors of two devices in one operator raise what CUDA would raise, and the error names the operator."""
    virtual_machine()
    with pytest.raises(DeviceMismatchError) as caught:
        operation()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "operation",
    [
        lambda: on("cuda:0", 2) + torch.tensor(1.0),
        lambda: torch.tensor(1.0) * on("cuda:0", 2),
        lambda: torch.where(torch.tensor(True), on("cuda:0", 2), torch.tensor(0.0)),
        lambda: on("cuda:0", 2)[torch.tensor([0, 1])],
        lambda: on("cuda:0", 2).copy_(on("cuda:1", 2)),
        lambda: torch.randn(2, device="cuda", generator=torch.Generator("cuda").manual_seed(0)),
    ],
)
def test_what_cuda_allows_is_allowed(virtual_machine: MakeMachine, operation: Callable[[], torch.Tensor]) -> None:
    """Host scalars, host indices and copies may meet an accelerator, and the result is on it."""
    virtual_machine()
    result = operation()
    assert isinstance(result, VirtualTensor)
    assert result.device == torch.device("cuda:0")


@pytest.mark.parametrize(
    ("make", "device"),
    [
        (lambda: torch.zeros(2).to(1), "cuda:1"),
        (lambda: torch.zeros(2).to("cuda"), "cuda:0"),
        (lambda: torch.zeros(2).to(device="cuda:1"), "cuda:1"),
        (lambda: torch.zeros(2).to(torch.float16).to(torch.device(1)), "cuda:1"),
        (lambda: torch.zeros(2).cuda(), "cuda:0"),
        (lambda: torch.zeros(2).cuda(1), "cuda:1"),
        (lambda: torch.zeros(2, device=1), "cuda:1"),
        (lambda: torch.arange(2, device="cuda"), "cuda:0"),
        (lambda: torch.hann_window(2, device="cuda"), "cuda:0"),
        (lambda: torch.tensor([1.0, 2.0], device="cuda:1"), "cuda:1"),
        (lambda: torch.zeros_like(torch.zeros(2), device="cuda:1"), "cuda:1"),
        (lambda: torch.nn.Linear(2, 2).to(1).weight, "cuda:1"),
        (lambda: torch.nn.Linear(2, 2).cuda().weight, "cuda:0"),
        (lambda: torch.zeros(2).to("cuda:1").cpu(), "cpu"),
    ],
)
def test_every_way_to_name_a_device(
    virtual_machine: MakeMachine, make: Callable[[], torch.Tensor], device: str
) -> None:
    """Numbers, names, names without an index and torch's own methods lead to the same virtual devices."""
    virtual_machine()
    result = make()
    assert str(result.device) == device
    assert isinstance(result, VirtualTensor) == (device != "cpu")


def test_device_context_makes_tensors_there(virtual_machine: MakeMachine) -> None:
    """``with torch.device`` and ``with torch.cuda.device`` say where new tensors go."""
    virtual_machine()
    with torch.device("cuda:1"):
        assert torch.tensor([1.0]).device.index == 1
        assert torch.nn.Linear(2, 2).weight.device.index == 1
    with torch.cuda.device(1):
        assert torch.zeros(2).to("cuda").device.index == 1
    assert torch.zeros(2).to("cuda").device.index == 0


@pytest.mark.parametrize(("device", "message"), [("cuda:2", "invalid device ordinal"), ("mps", "no mps devices")])
def test_device_that_is_not_there_raises(virtual_machine: MakeMachine, device: str, message: str) -> None:
    """A device beyond the machine's, or of a kind it has not, is refused."""
    virtual_machine()
    with pytest.raises(RuntimeError, match=message):
        torch.zeros(2).to(device)


def test_values_leave_an_accelerator_through_the_host_only(virtual_machine: MakeMachine) -> None:
    """``numpy()`` on an accelerator's tensor raises as CUDA's does; ``item``, ``tolist`` and ``cpu`` work."""
    virtual_machine()
    tensor = torch.arange(3.0, device="cuda:0")
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        tensor.numpy()
    assert tensor.cpu().numpy().tolist() == tensor.tolist() == [0.0, 1.0, 2.0]
    assert tensor.sum().item() == 3.0


def test_indexing_reads_and_writes(virtual_machine: MakeMachine) -> None:
    """Slices are views of the same memory, and assignments through them are seen."""
    virtual_machine()
    tensor = torch.zeros(2, 3, device="cuda:0")
    tensor[:, 0] = 5
    tensor[0].add_(1)
    tensor[1, 1:] = torch.tensor([7.0, 8.0]).to("cuda:0")
    assert tensor.tolist() == [[6, 1, 1], [5, 7, 8]]
    assert tensor[torch.tensor(1)].tolist() == [5, 7, 8]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_reshaping_in_place_reshapes_once(virtual_machine: MakeMachine, device: str) -> None:
    """A view made in place changes the wrapper as it changes the content, and host tensors as always."""
    virtual_machine()
    tensor = torch.arange(6.0, device=device).view(2, 3)
    assert tensor.unsqueeze_(0).shape == (1, 2, 3)
    assert tensor.squeeze_(0).t_().shape == (3, 2) == tensor.shape
    assert tensor.tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize(
    "resize",
    [
        lambda: torch.zeros(2, device="cuda:0").resize_(3),
        lambda: torch.zeros(2, device="cuda:0").resize_(1),
        lambda: torch.zeros(2, device="cuda:0").resize_as_(torch.zeros(3, device="cuda:0")),
        lambda: torch.zeros(2, device="cuda:0").set_(torch.zeros(2, device="cuda:0")),
        lambda: torch.add(torch.ones(2, device="cuda:0"), 1, out=torch.empty(0, device="cuda:0")),
    ],
)
def test_resizing_in_place_is_refused(virtual_machine: MakeMachine, resize: Callable[[], object]) -> None:
    """A wrapper has no storage that could grow with its content, so that raises instead of going wrong."""
    virtual_machine()
    with pytest.raises(NotImplementedError, match="cannot be resized in place"):
        resize()


def test_refused_resizing_changes_nothing(virtual_machine: MakeMachine) -> None:
    """The tensor and the ledger are as before; the size it has already is granted, and host tensors always are."""
    ledger = virtual_machine().ledger
    tensor = torch.arange(2.0, device="cuda:0")
    for resize in (lambda: tensor.resize_(10_000), lambda: tensor.untyped_storage().resize_(40_000)):
        with pytest.raises(NotImplementedError, match="cannot be resized"):
            resize()
    assert tensor.resize_(2).tolist() == [0.0, 1.0]
    assert ledger.live_bytes("cuda:0") == 512
    host = torch.zeros(2)
    assert host.resize_(3).shape == (3,)
    assert host.untyped_storage().resize_(100).nbytes() == 100


@pytest.mark.parametrize(
    "map_location",
    ["cuda", "cuda:1", torch.device("cuda:0"), {"cpu": "cuda:1"}, lambda storage, _location: storage.cuda(1)],
)
def test_loading_onto_a_device_is_refused(virtual_machine: MakeMachine, map_location: Any) -> None:
    """``torch.load`` says how to do it instead, and loads onto the host as ever."""
    virtual_machine()
    file = io.BytesIO()
    torch.save({"weight": torch.ones(2)}, file)
    file.seek(0)
    with pytest.raises(NotImplementedError, match="load them with map_location='cpu', then move them"):
        torch.load(file, map_location=map_location)
    file.seek(0)
    assert torch.load(file, map_location="cpu")["weight"].to("cuda:1").tolist() == [1.0, 1.0]


@pytest.mark.parametrize("destination", ["cpu", "cuda:1"])
def test_moving_with_a_graph_alive_is_refused(virtual_machine: MakeMachine, destination: str) -> None:
    """Weights that a graph holds stay where they are, with their values; once it is gone they can move."""
    virtual_machine()
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).to("cuda:0")
    values = layers[1].weight.tolist()
    result = layers(torch.ones(1, 2, device="cuda:0"))
    with pytest.raises(NotImplementedError, match=r"run under torch\.no_grad\(\), or drop the results first"):
        layers[1].to(destination)
    assert (str(layers[1].weight.device), layers[1].weight.tolist()) == ("cuda:0", values)
    with pytest.raises(NotImplementedError, match=r"backward\(\) is not possible on a virtual device"):
        result.sum().backward()
    del result
    assert str(layers.to(destination)[1].weight.device) == destination


def test_gradients_on_the_host_work(virtual_machine: MakeMachine) -> None:
    """What runs on the host inside a machine has its gradients."""
    virtual_machine()
    weight = torch.ones(2, requires_grad=True)
    (weight * 3).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0]


def test_data_assignment_keeps_the_parameter(virtual_machine: MakeMachine) -> None:
    """``.data =`` exchanges the content and keeps the object, which group offloading uses as a key."""
    virtual_machine()
    layer = torch.nn.Linear(2, 2)
    weight = layer.weight
    weight.data = torch.full((2, 2), 3.0, device="cuda:1")
    assert layer.weight is weight
    assert isinstance(weight, torch.nn.Parameter)
    assert str(weight.device) == "cuda:1"
    assert weight.tolist() == [[3, 3], [3, 3]]


def test_type_of_a_parameter_builds_a_parameter(virtual_machine: MakeMachine) -> None:
    """Accelerate rebuilds weights as ``type(param)(value, requires_grad=...)``, whatever the type."""
    virtual_machine()
    weight = torch.nn.Linear(2, 2).to("cuda:0").weight
    again = type(weight)(torch.ones(2, 2).to("cuda:1"), requires_grad=False, **vars(weight))
    assert isinstance(again, torch.nn.Parameter)
    assert str(again.device) == "cuda:1"


def test_data_ptr_tells_aliases_apart_from_others(virtual_machine: MakeMachine) -> None:
    """Accelerate finds tied weights by address, so aliases share one and different tensors do not."""
    virtual_machine()
    one, other = torch.ones(4, device="cuda:0"), torch.ones(4, device="cuda:0")
    assert one.data_ptr() == one.detach().data_ptr() == one.view(2, 2).data_ptr() != 0
    assert one.data_ptr() != other.data_ptr()


def test_copies_of_a_module_stay_on_its_device(virtual_machine: MakeMachine) -> None:
    """Deep copies and pickles of virtual parameters are parameters on the same device with memory of their own."""
    virtual_machine()
    layer = torch.nn.Linear(2, 2).to("cuda:1")
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):  # noqa: S301
        assert isinstance(again.weight, torch.nn.Parameter)
        assert str(again.weight.device) == "cuda:1"
        assert torch.equal(again.weight, layer.weight)
        assert again.weight.data_ptr() != layer.weight.data_ptr()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_results_equal_the_host_bit_for_bit(virtual_machine: MakeMachine, context: Callable[[], torch.no_grad]) -> None:
    """A block of layers, whose C++ branches on the device, gives the very bits of a plain run, in any grad mode."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.GroupNorm(4, 8),
        torch.nn.SiLU(),
        torch.nn.Upsample(scale_factor=2),
    ).to(memory_format=torch.channels_last)
    image = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    with context():
        plain = layers(image).detach()
    virtual_machine()
    with context():
        virtual = layers.to("cuda:1")(image.to("cuda:1"))
    assert str(virtual.device) == "cuda:1"
    assert torch.equal(virtual.detach().cpu(), plain)
