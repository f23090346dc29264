"""A model of PyTorch's caching allocator: what a device keeps reserved for the tensors that live on it.

The rules and numbers are those of ``c10/cuda/CUDACachingAllocator.cpp`` with default settings, on one stream. It is a
model: it has been checked against sequences worked out by hand, not against a device. It knows neither expandable
segments nor ``PYTORCH_CUDA_ALLOC_CONF``, and its segments lie in the order they were asked for, which decides only
between free blocks of equal size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Self

from dmconfig.units import MIB

ROUNDING_BYTES = 512  # kMinBlockSize: every request is rounded up to a multiple
_SMALL_BYTES = MIB  # kSmallSize: up to this a request is served from the pool of small blocks
_SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
_LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer: for requests under ...
_OWN_SEGMENT_BYTES = 10 * MIB  # ... kMinLargeAlloc; from here on a request has a segment of its own ...
_OWN_ROUNDING_BYTES = 2 * MIB  # ... rounded up to a multiple of kRoundLarge


@dataclass(slots=True, eq=False)
class Block:
    """A stretch of one segment, and its neighbours there."""

    segment: int
    offset: int
    size_bytes: int
    small: bool
    in_use: bool = False
    before: Block | None = None
    after: Block | None = None

    @property
    def is_whole_segment(self) -> bool:
        """Whether nothing has been split off, or everything has come back together."""
        return self.before is None and self.after is None

    def split(self, size_bytes: int) -> Self:
        """Keep the first size_bytes; return the rest as a block of its own."""
        rest = type(self)(
            segment=self.segment,
            offset=self.offset + size_bytes,
            size_bytes=self.size_bytes - size_bytes,
            small=self.small,
            before=self,
            after=self.after,
        )
        if self.after is not None:
            self.after.before = rest
        self.after, self.size_bytes = rest, size_bytes
        return rest

    def absorb_next(self) -> None:
        """Take over the block behind."""
        absorbed = self.after
        if absorbed is None:
            raise ValueError("the last block of a segment has none behind it")
        self.size_bytes += absorbed.size_bytes
        self.after = absorbed.after
        if self.after is not None:
            self.after.before = self
        absorbed.before = absorbed.after = None


class _FreeBlocks:
    """The free blocks of one pool, smallest first, then in the order of their addresses."""

    def __init__(self) -> None:
        self._sorted: list[tuple[int, int, int, Block]] = []

    def add(self, block: Block) -> None:
        insort(self._sorted, self._entry(block))

    def remove(self, block: Block) -> None:
        del self._sorted[bisect_left(self._sorted, self._entry(block))]

    def take_smallest(self, size_bytes: int) -> Block | None:
        """Remove and return the smallest block that has room for size_bytes; None when there is none."""
        index = bisect_left(self._sorted, (size_bytes,))
        return self._sorted.pop(index)[-1] if index < len(self._sorted) else None

    def take_whole_segments(self) -> list[Block]:
        """Remove and return what could be given back to the device."""
        blocks = [block for *_, block in self._sorted]
        self._sorted = [self._entry(block) for block in blocks if not block.is_whole_segment]
        return [block for block in blocks if block.is_whole_segment]

    @staticmethod
    def _entry(block: Block) -> tuple[int, int, int, Block]:
        return block.size_bytes, block.segment, block.offset, block  # never equal before the block itself


class CachingAllocator:
    """Hands out blocks of segments, and keeps the segments when the blocks come back.

    It never refuses: where segments exceed the capacity although every unused one was given back (counted in
    ``retries``), a device would have run out of memory, and ``peak_reserved_bytes`` above the capacity tells so. On
    toy devices that says little, as the smallest segment is 2 MiB and the next 20.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.allocated_bytes = 0  # of blocks in use: up to 1 MiB more than asked for, where a rest was not split off
        self.peak_allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self.retries = 0
        self._capacity_bytes = capacity_bytes
        self._segments = 0
        self._free = {True: _FreeBlocks(), False: _FreeBlocks()}  # by Block.small

    def allocate(self, size_bytes: int) -> Block:
        """Return a block with room for size_bytes, best fit first, of a new segment if no free one is large enough."""
        size_bytes = rounded(size_bytes)
        free = self._free[size_bytes <= _SMALL_BYTES]
        block = free.take_smallest(size_bytes) or self._new_segment(size_bytes)
        if _is_worth_splitting(block, size_bytes):
            free.add(block.split(size_bytes))
        block.in_use = True
        self.allocated_bytes += block.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Take a block back, together with its free neighbours."""
        block.in_use = False
        self.allocated_bytes -= block.size_bytes
        free = self._free[block.small]
        if block.after is not None and not block.after.in_use:
            free.remove(block.after)
            block.absorb_next()
        if block.before is not None and not block.before.in_use:
            block = block.before
            free.remove(block)
            block.absorb_next()
        free.add(block)

    def release_cached(self) -> None:
        """Give back every segment of which nothing is in use, as ``torch.cuda.empty_cache`` does."""
        for free in self._free.values():
            self.reserved_bytes -= sum(block.size_bytes for block in free.take_whole_segments())

    def reset_peak(self) -> None:
        """Let the peaks start again from what is allocated and reserved now."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def _new_segment(self, size_bytes: int) -> Block:
        segment_bytes = _segment_bytes(size_bytes)
        if self._capacity_bytes is not None and self.reserved_bytes + segment_bytes > self._capacity_bytes:
            self.retries += 1
            self.release_cached()
        self._segments += 1
        self.reserved_bytes += segment_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return Block(self._segments, offset=0, size_bytes=segment_bytes, small=size_bytes <= _SMALL_BYTES)


def rounded(size_bytes: int) -> int:
    """Return the bytes that a request takes up."""
    return max(1, -(-size_bytes // ROUNDING_BYTES)) * ROUNDING_BYTES


def _segment_bytes(size_bytes: int) -> int:
    if size_bytes <= _SMALL_BYTES:
        return _SMALL_SEGMENT_BYTES
    if size_bytes < _OWN_SEGMENT_BYTES:
        return _LARGE_SEGMENT_BYTES
    return -(-size_bytes // _OWN_ROUNDING_BYTES) * _OWN_ROUNDING_BYTES


def _is_worth_splitting(block: Block, size_bytes: int) -> bool:
    rest_bytes = block.size_bytes - size_bytes
    return rest_bytes >= ROUNDING_BYTES if block.small else rest_bytes > _SMALL_BYTES
