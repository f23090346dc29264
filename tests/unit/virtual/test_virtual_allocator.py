"""The allocator's model against sequences worked out by hand from CUDACachingAllocator.cpp; no device was asked."""

from __future__ import annotations

import gc

import pytest
import torch

from dmconfig.units import KIB, MIB
from dmconfig.virtual import Ledger
from dmconfig.virtual.allocator import CachingAllocator
from tests.virtual_devices import MakeMachine


def figures(allocator: CachingAllocator) -> tuple[float, float]:
    """Allocated and reserved, in MiB."""
    return allocator.allocated_bytes / MIB, allocator.reserved_bytes / MIB


@pytest.mark.parametrize(
    ("wanted_bytes", "allocated_bytes", "reserved_bytes"),
    [
        (0, 512, 2 * MIB),  # nothing is rounded up too
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # the last small one
        (MIB + 1, MIB + 512, 20 * MIB),  # the first large one: 18.9 MiB are split off
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),  # a segment of its own
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),  # 2 MiB - 512 B are left: more than 1 MiB, so they are split off
        (11 * MIB, 12 * MIB, 12 * MIB),  # just 1 MiB is left: it stays with the block
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
    ],
)
def test_first_request_takes_what_its_size_says(wanted_bytes: int, allocated_bytes: int, reserved_bytes: int) -> None:
    """Requests are rounded to 512 bytes, segments are 2 MiB, 20 MiB or a multiple of 2 MiB."""
    allocator = CachingAllocator()
    block = allocator.allocate(wanted_bytes)
    assert (block.size_bytes, allocator.reserved_bytes) == (allocated_bytes, reserved_bytes)
    assert allocator.allocated_bytes == allocated_bytes


def test_small_requests_share_a_segment() -> None:
    """Two of 1 MiB fill a small segment; the third starts another, which the last 512 bytes go to as well."""
    allocator = CachingAllocator()
    blocks = [allocator.allocate(MIB) for _ in range(3)]
    assert figures(allocator) == (3, 4)
    assert [(block.segment, block.offset) for block in blocks] == [(1, 0), (1, MIB), (2, 0)]
    assert (allocator.allocate(1).segment, allocator.reserved_bytes) == (2, 4 * MIB)


def test_pools_do_not_serve_one_another() -> None:
    """A small request does not go into a large segment, however empty that is."""
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(2 * MIB))
    allocator.allocate(512)
    assert figures(allocator) == (512 / MIB, 22)


def test_smallest_free_block_with_room_is_taken() -> None:
    """Best fit, not first fit and not the largest."""
    allocator = CachingAllocator()
    # one segment of 20 MiB: five, 1.5, three, 1.5 and 9 MiB that are free
    five, _, three, _ = [allocator.allocate(int(size * MIB)) for size in (5, 1.5, 3, 1.5)]
    allocator.free(five)
    allocator.free(three)
    block = allocator.allocate(int(2.5 * MIB))
    assert (block.offset, block.size_bytes) == (int(6.5 * MIB), 3 * MIB), "0.5 MiB are too little to split off"
    block = allocator.allocate(int(2.5 * MIB))
    assert (block.offset, block.size_bytes) == (0, int(2.5 * MIB)), "of the five, as nine are more"
    assert figures(allocator) == (1.5 + 3 + 1.5 + 2.5, 20)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_free_neighbours_become_one(order: tuple[int, ...]) -> None:
    """In whatever order blocks come back, the segment is one free block at the end, and serves a large request."""
    allocator = CachingAllocator()
    blocks = [allocator.allocate(6 * MIB) for _ in range(3)]  # of one segment of 20 MiB; 2 MiB are free
    for index in order:
        allocator.free(blocks[index])
    assert figures(allocator) == (0, 20)
    assert (allocator.allocate(20 * MIB).offset, allocator.reserved_bytes) == (0, 20 * MIB)


def test_fragments_do_not_serve_a_larger_request() -> None:
    """Twelve free MiB in two pieces are no room for nine: a second segment is reserved."""
    allocator = CachingAllocator()
    blocks = [allocator.allocate(6 * MIB) for _ in range(3)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])  # and the 2 MiB behind it: 6 and 8 are free
    allocator.allocate(9 * MIB)
    assert figures(allocator) == (15, 40)


def test_empty_cache_gives_back_whole_segments_only() -> None:
    """A segment of which 512 bytes are in use stays; the others go, of both pools."""
    allocator = CachingAllocator()
    kept, small, large = allocator.allocate(MIB), allocator.allocate(MIB), allocator.allocate(30 * MIB)
    allocator.free(small)
    allocator.free(large)
    assert figures(allocator) == (1, 32)
    allocator.release_cached()
    assert figures(allocator) == (1, 2)
    allocator.free(kept)
    allocator.release_cached()
    assert figures(allocator) == (0, 0)
    assert allocator.peak_reserved_bytes == 32 * MIB
    allocator.reset_peak()
    assert allocator.peak_reserved_bytes == 0


def test_cache_is_given_back_before_memory_runs_out() -> None:
    """At the capacity, what is cached makes room; what is in use cannot, and is told by a peak above the capacity."""
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    allocator.free(allocator.allocate(20 * MIB))
    allocator.allocate(30 * MIB)  # 20 + 30 > 40, so the 20 go
    assert (allocator.retries, *figures(allocator)) == (1, 30, 30)
    assert allocator.peak_reserved_bytes == 30 * MIB
    allocator.allocate(12 * MIB)  # nothing to give back: a device would have refused
    assert (allocator.retries, *figures(allocator)) == (2, 42, 42)


def test_torch_cuda_tells_reserved_memory(virtual_machine: MakeMachine) -> None:
    """What is freed stays reserved until the cache is emptied; each device has its own."""
    machine = virtual_machine()
    tensor = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda:1")
    assert (torch.cuda.memory_allocated(1), torch.cuda.memory_reserved(1)) == (3 * MIB, 20 * MIB)
    assert torch.cuda.memory_reserved(0) == torch.cuda.memory_reserved() == 0
    del tensor
    gc.collect()
    assert (torch.cuda.memory_allocated(1), torch.accelerator.memory_reserved(1)) == (0, 20 * MIB)
    torch.cuda.empty_cache()
    assert (torch.cuda.memory_reserved(1), torch.cuda.max_memory_reserved("cuda:1")) == (0, 20 * MIB)
    assert torch.cuda.memory_stats(1)["reserved_bytes.all.peak"] == 20 * MIB
    assert machine.ledger.peak_reserved_bytes("cuda:1") == 20 * MIB
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.cuda.max_memory_reserved(1) == 0


def test_cache_limits_nothing(virtual_machine: MakeMachine) -> None:
    """The capacity is what live bytes may fill, also where segments are larger; the cache goes first."""
    ledger = virtual_machine(capacity_bytes=22 * MIB).ledger
    torch.empty(3 * MIB, dtype=torch.uint8, device="cuda:0")  # a segment of 20, free at once
    kept = torch.empty(21 * MIB, dtype=torch.uint8, device="cuda:0")  # a segment of 22
    assert (ledger.reserved_bytes("cuda:0"), ledger.allocation_retries("cuda:0")) == (22 * MIB, 1)
    small = torch.empty(KIB, dtype=torch.uint8, device="cuda:0")
    assert ledger.reserved_bytes("cuda:0") == 24 * MIB
    assert ledger.live_bytes("cuda:0") == kept.numel() + small.numel()


def test_host_has_no_such_allocator() -> None:
    """Reserved bytes are asked of accelerators only."""
    with pytest.raises(ValueError, match="'cpu' is not an accelerator of this machine; it has cuda:0"):
        Ledger({"cuda:0": MIB}).reserved_bytes("cpu")
