"""Virtual CUDA devices on a torch built without CUDA: rehearse placements, offloading and moves on any host.

A ``VirtualMachine`` makes torch, accelerate, diffusers and transformers believe in accelerators of stated
capacities. Tensors that "live" there are wrappers around host tensors, so values are computed for real and equal a
plain CPU run bit for bit; mixing devices raises as CUDA would, and a ledger counts bytes per device and moves
between them. Importing this package imports torch; nothing else in dmconfig imports it.

Not modelled: memory that CUDA takes besides tensors (context, workspaces), and time. The allocator's cache is a model
that was not checked against a device. Not possible, and refused with ``NotImplementedError``: ``torch.load`` straight
to a virtual device, resizing a tensor there in place, ``backward()``, and moving a module while the graph of a run with
gradients is alive. On a host with real accelerators, ``run_hidden`` runs a process that does not see them.

    errors        what CUDA would have refused
    tensor        VirtualTensor, the wrapper
    allocator     a model of what PyTorch's allocator reserves
    ledger        live, peak and reserved bytes, moves, phases
    state         one machine's devices, and how results become tensors on them
    rules         which devices may meet in one operator
    operators     running one operator on the inner tensors
    shapes        what operators make of shapes, remembered
    functions     calls caught above the operators, before C++ branches on the device
    threads       entering the two torch modes, also in the workers of thread pools
    generator     torch.Generator with a virtual device
    cuda          what torch.cuda and torch.accelerator answer
    environment   everything that is patched while a machine is active
    patching      replacing attributes, and putting them back
    guard         a device guard for builds without CUDA
    disk          shape-only: files that are remembered instead of written
    loading       torch.load and storages, refused where they cannot work
    modules       adopting a module
    quantised     weights of GGUF files
    tracking      phases: components, and how a pipeline enters them
    whereabouts   the module that is running, for errors
    machine       VirtualMachine
    hidden        a process that sees no real accelerators
"""

from dmconfig.virtual.errors import DeviceMismatchError as DeviceMismatchError
from dmconfig.virtual.errors import UnknownValueError as UnknownValueError
from dmconfig.virtual.errors import VirtualOutOfMemoryError as VirtualOutOfMemoryError
from dmconfig.virtual.hidden import run_hidden as run_hidden
from dmconfig.virtual.ledger import OUTSIDE as OUTSIDE
from dmconfig.virtual.ledger import Kind as Kind
from dmconfig.virtual.ledger import Ledger as Ledger
from dmconfig.virtual.ledger import Move as Move
from dmconfig.virtual.ledger import MoveCount as MoveCount
from dmconfig.virtual.machine import VirtualMachine as VirtualMachine
from dmconfig.virtual.tensor import VirtualTensor as VirtualTensor
