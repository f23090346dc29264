# ruff: noqa: PLW0108 - the functions must be looked up inside the machine, so the lambdas are necessary
from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import pytest
import torch

from dmconfig.units import MIB
from dmconfig.virtual import VirtualMachine, VirtualTensor
from dmconfig.virtual.guard import cuda_guard
from tests.virtual_devices import MakeMachine

_C: Any = torch._C


def snapshot() -> dict[str, Any]:
    """Everything that a machine replaces, and enough around it to notice something new."""
    return {
        "torch": dict(vars(torch)),
        "UntypedStorage": dict(vars(torch.UntypedStorage)),
        "torch.cuda": dict(vars(torch.cuda)),
        "torch.accelerator": dict(vars(torch.accelerator)),
        "torch._C._nn": dict(vars(_C._nn)),
        "Parameter": dict(vars(torch.nn.Parameter)),
        "ThreadPoolExecutor": dict(vars(ThreadPoolExecutor)),
        "safetensors.torch": dict(vars(import_module("safetensors.torch"))),
        "accelerate.utils.offload": dict(vars(import_module("accelerate.utils.offload"))),
        "accelerate state": dict(import_module("accelerate.state").PartialState._shared_state),
        "device maps": list(import_module("diffusers.pipelines.pipeline_utils").SUPPORTED_DEVICE_MAP),
        "transformers.modeling_utils": dict(vars(import_module("transformers.modeling_utils"))),
        "global module hooks": global_hooks(),
        "guard": cuda_guard(),
        "modes": (_C._len_torch_dispatch_stack(), _C._len_torch_function_stack()),
        "lifts only cpu": _C._only_lift_cpu_tensors(),
        "detected device": import_module("diffusers.utils.torch_utils").get_device(),
        "cuda available": import_module("accelerate.utils.imports").is_cuda_available(),
    }


def global_hooks() -> dict[str, dict[int, Any]]:
    """What is registered for every module there is, of each kind of hook."""
    kinds = vars(torch.nn.modules.module)
    return {name: dict(hooks) for name, hooks in kinds.items() if name.startswith("_global_") and hooks is not None
            and hasattr(hooks, "items")}  # fmt: skip


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_leaving_restores_torch_exactly(values: bool, fails: bool) -> None:
    """Whatever happened inside, every patched attribute is the very object it was before."""
    with VirtualMachine([MIB]):
        pass  # first, so that what is imported on the way is there in both snapshots
    before = snapshot()
    try:
        with VirtualMachine([MIB, MIB], values=values):
            inside = snapshot()
            import_module("accelerate.state").PartialState()
            torch.cuda.set_device(1)
            torch.ones(2).to("cuda") + torch.ones(2, device="cpu" if fails else "cuda:1")
    except RuntimeError:
        assert fails
    after = snapshot()
    changed = {name for name in before if inside[name] != before[name]}
    kept = {"safetensors.torch", "accelerate.utils.offload"} if values else set()
    assert changed == set(before) - kept - {"accelerate state"}
    for name, value in before.items():
        assert after[name] == value, name
    assert not torch.cuda.is_available()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2).to("cuda:0")


def test_machines_do_not_nest(virtual_machine: MakeMachine) -> None:
    """A second machine is refused, and the first one goes on as before."""
    virtual_machine(count=2)
    with pytest.raises(RuntimeError, match="active already"):
        VirtualMachine([MIB]).__enter__()
    assert torch.cuda.device_count() == 2
    assert torch.ones(2).to("cuda:1").device.index == 1


def test_a_machine_can_be_entered_again() -> None:
    """A machine that was left can be entered again, and its ledger goes on."""
    machine = VirtualMachine([MIB])
    with machine:
        tensor = torch.ones(2).to("cuda:0")
    with machine:
        assert (tensor + 1).tolist() == [2, 2]
        assert machine.ledger.live_bytes("cuda:0") == 512


def test_real_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CUDA is real, entering raises and says how to run instead, and nothing is patched."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = dict(vars(torch.cuda))
    with pytest.raises(RuntimeError, match='CUDA_VISIBLE_DEVICES=""'):
        VirtualMachine([MIB]).__enter__()
    assert dict(vars(torch.cuda)) == before


def test_failure_on_the_way_in_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the last step of entering fails, the earlier ones are undone."""
    with VirtualMachine([MIB]):
        pass
    before = snapshot()

    def fail(_state: object) -> None:
        raise OSError("no modes today")

    with monkeypatch.context() as patch:
        patch.setattr("dmconfig.virtual.machine.modes_of", fail)
        with pytest.raises(OSError, match="no modes today"):
            VirtualMachine([MIB]).__enter__()
    assert snapshot() == before
    with VirtualMachine([MIB]):
        pass


def test_tensors_outlive_the_machine() -> None:
    """A tensor that is left over can be described, read as numbers and dropped."""
    with VirtualMachine([MIB]):
        tensor = torch.ones(2).to("cuda:0")
    assert repr(tensor) == "VirtualTensor((2,), torch.float32, device=cuda:0, real)"
    assert (tensor.shape, tensor.dtype, str(tensor.device), tensor.dim()) == ((2,), torch.float32, "cuda:0", 1)
    assert (tensor.numel(), tensor.is_floating_point(), tensor.requires_grad, len(tensor)) == (2, True, False, 2)
    assert tensor.tolist() == [1.0, 1.0]
    assert {tensor: "it can be a key"}


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize(
    "use",
    [
        lambda layers: layers(torch.ones(1, 2)),
        lambda layers: layers.to("cpu"),
        lambda layers: layers.state_dict(),
        lambda layers: copy.deepcopy(layers),
        lambda layers: torch.nn.Linear(2, 2).weight.copy_(layers[0].weight),
        lambda layers: layers[0].weight + 1,
        lambda layers: layers[0].weight[0],
        lambda layers: layers[0].weight.data,
        lambda layers: setattr(layers[0].weight, "data", torch.zeros(2, 2)),
        lambda layers: layers[0].weight.cpu(),
        lambda layers: torch.cat([torch.ones(2, 2), layers[0].weight]),
        lambda layers: torch.nn.functional.group_norm(layers[0].weight, 1),
        lambda layers: torch.nn.functional.scaled_dot_product_attention(*[layers[0].weight] * 3),
        lambda layers: float(layers[1].bias.sum()),
    ],
)
def test_weights_left_on_a_device_say_what_is_missing(
    use: Callable[[torch.nn.Sequential], object], gradients: bool
) -> None:
    """Outside, whatever asks for the content of weights that stayed on a device is told so; C++ would abort."""
    with VirtualMachine([MIB]):
        layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.GroupNorm(1, 2)).to("cuda:0")
    with torch.set_grad_enabled(gradients), pytest.raises(RuntimeError, match="no VirtualMachine is active; move what"):
        use(layers)


def test_weights_brought_home_are_plain_again() -> None:
    """What was moved to the cpu before the end works after it, with gradients too."""
    with VirtualMachine([MIB]):
        layer = torch.nn.Linear(2, 1).to("cuda:0").to("cpu")
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad is not None
    assert type(layer.weight) is torch.nn.Parameter


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda: torch.cuda.is_available(), True),
        (lambda: torch.cuda.device_count(), 3),
        (lambda: torch.cuda.current_device(), 0),
        (lambda: torch.cuda.get_device_properties(2).total_memory, 8 * MIB),
        (lambda: torch.cuda.get_device_properties("cuda:1").name, "Virtual GPU 1"),
        (lambda: torch.cuda.get_device_name(1), "Virtual GPU 1"),
        (lambda: torch.cuda.get_device_capability(), (8, 6)),
        (lambda: torch.cuda.is_bf16_supported(), True),
        (lambda: torch.cuda.synchronize(1), None),
        (lambda: torch.cuda.empty_cache(), None),
        (lambda: torch.cuda.mem_get_info(1), (8 * MIB, 8 * MIB)),
        (lambda: str(torch.accelerator.current_accelerator()), "cuda"),
        (lambda: torch.accelerator.is_available(), True),
        (lambda: torch.accelerator.device_count(), 3),
        (lambda: str(torch.device(0)), "cuda:0"),
        (lambda: str(torch.cuda.Stream(1).device), "cuda:1"),
        (lambda: import_module("accelerate.utils").get_max_memory()[2], 8 * MIB - 512),
        (lambda: import_module("diffusers.utils.torch_utils").get_device(), "cuda"),
    ],
)
def test_libraries_see_the_virtual_devices(
    virtual_machine: MakeMachine, ask: Callable[[], object], answer: object
) -> None:
    """torch, accelerate and diffusers describe the machine when they are asked."""
    virtual_machine(count=3, capacity_bytes=8 * MIB)
    assert ask() == answer


def test_generators_from_before_are_generators_inside(virtual_machine: MakeMachine) -> None:
    """A generator made before the machine passes for one, and draws the numbers it would have drawn."""
    generator = torch.Generator().manual_seed(0)
    virtual_machine()
    assert isinstance(generator, torch.Generator)
    inside = torch.Generator("cuda:1").manual_seed(0)
    assert str(inside.device) == "cuda:1"
    drawn = torch.randn(3, device="cuda:1", generator=inside)
    assert torch.equal(drawn.cpu(), torch.randn(3, generator=generator))


def test_tasks_of_a_thread_pool_run_on_the_machine() -> None:
    """Workers see the devices and the ledger counts for them; after the machine they are plain again."""

    def work() -> torch.Tensor:
        return torch.zeros(256).to("cuda") + torch.ones(256, device="cuda:0")

    with ThreadPoolExecutor(1) as pool:
        with VirtualMachine([MIB]) as machine:
            (result,) = pool.map(lambda _: work(), [0])
            assert isinstance(result, VirtualTensor)
            assert machine.ledger.live_bytes("cuda:0") == 1024
            assert pool.submit(_C._len_torch_dispatch_stack).result() == 1
        assert pool.submit(_C._len_torch_dispatch_stack).result() == 0


def test_task_that_waits_longer_than_the_machine_runs_plain() -> None:
    """A task that was submitted inside and starts after the machine has ended sees no virtual devices."""
    release = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(release.wait, 10)
        with VirtualMachine([MIB]):
            waiting = pool.submit(_C._len_torch_dispatch_stack)
        release.set()
        assert waiting.result() == 0


def test_importing_dmconfig_imports_no_torch() -> None:
    """The package itself does not import dmconfig.virtual, and with it torch."""
    code = "import sys, dmconfig; assert 'dmconfig.virtual' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
