# SPDX-License-Identifier: Apache-2.0
"""Types of the extension that cffi makes of native/tierd.h, which documents it."""

from collections.abc import Callable, Mapping
from mmap import mmap
from typing import Any, Literal, Protocol, overload

from numpy.typing import NDArray

class Pointer(Protocol):
    """An array or a pointer to one thing, which is then its element 0."""

    def __getitem__(self, index: int, /) -> int: ...
    def __len__(self) -> int: ...
    def __add__(self, count: int, /) -> Pointer: ...

class Tally(Protocol):
    moved: int
    resident: int
    absent: int
    busy: int
    shared: int
    unmovable: int
    no_memory: int
    left: int
    other: int
    stopped: int

class Cursor(Protocol):
    tail: int
    lost: int
    corrupt: int
    throttled: int
    gap: int

class RingState(Protocol):
    map: Pointer
    data_bytes: int
    aux: Pointer
    aux_bytes: int
    flags: int
    fd: int
    cursor: Cursor

class Pace(Protocol):
    count: int
    ns: int
    next: int

class Moves(Protocol):
    moved: int
    busy: int
    no_room: int
    failed: int
    queued: int
    used: Pointer

class Batch(Protocol):
    tier: int
    to: int
    mover: int
    is_store: int
    count: int
    blocks: Pointer
    slots: Pointer
    is_bad: Pointer

class _Shim(Protocol):
    TIERD_EXCLUDE_KERNEL: int
    TIERD_SPE: int
    TIERD_SPE_SOURCES: int
    TIERD_UNASKED: int
    TIERD_MOVE_ALL: int
    TIERD_TRACE_MOST: int
    TIERD_PROC_CHANGED: int
    TIERD_PROC_ENDED: int
    TIERD_SLOT_BYTES: int
    TIERD_WINDOW_BYTES: int
    TIERD_BLOCK_BYTES: int
    TIERD_BLOCK_UNIT: int
    TIERD_TIERS: int
    TIERD_MOVERS: int
    TIERD_BATCH: int
    TIERD_NOWHERE: int
    TIERD_MEMORY: int
    TIERD_SUMS: int
    TIERD_READ: int
    TIERD_WRITE: int
    TIERD_URGENT: int
    TIERD_ABSENT: int

    def tierd_list_ranges(
        self,
        pagemap: int,
        maps: int,
        ranges: Pointer,
        count: int,
        capacity: int,
        ret_folios: Pointer,
        ret_count: Pointer,
        /,
    ) -> int: ...
    def tierd_query_nodes(self, pid: int, folios: Pointer, count: int, /) -> int: ...
    def tierd_find_huge(self, pagemap: int, pages: Pointer, count: int, /) -> int: ...
    def tierd_move_folios(
        self,
        pid: int,
        node: int,
        batch_pages: int,
        flags: int,
        folios: Pointer,
        count: int,
        ret_tally: Tally,
        /,
    ) -> int: ...
    def tierd_decode_records(
        self,
        layout: Pointer,
        data: Pointer,
        data_bytes: int,
        head: int,
        capacity: int,
        cursor: Cursor,
        ret_records: Pointer,
        /,
    ) -> int: ...
    def tierd_open_ring(
        self, event: int, pid: int, data_bytes: int, wakeup_bytes: int, ret_ring: RingState, /
    ) -> int: ...
    def tierd_read_ring(
        self, ring: RingState, layout: Pointer, capacity: int, ret_records: Pointer, /
    ) -> int: ...
    def tierd_decode_accesses(
        self,
        data: Pointer,
        data_bytes: int,
        head: int,
        capacity: int,
        cursor: Cursor,
        ret_accesses: Pointer,
        /,
    ) -> int: ...
    def tierd_decode_packets(
        self,
        data: Pointer,
        data_bytes: int,
        head: int,
        flags: int,
        capacity: int,
        cursor: Cursor,
        ret_accesses: Pointer,
        /,
    ) -> int: ...
    def tierd_open_accesses(
        self,
        event: Pointer,
        pid: int,
        cpu: int,
        data_bytes: int,
        wakeup_bytes: int,
        ret_ring: RingState,
        /,
    ) -> int: ...
    def tierd_read_accesses(
        self, ring: RingState, capacity: int, ret_accesses: Pointer, /
    ) -> int: ...
    def tierd_decode_traces(
        self,
        data: Pointer,
        data_bytes: int,
        head: int,
        capacity: int,
        cursor: Cursor,
        ret_traces: Pointer,
        /,
    ) -> int: ...
    def tierd_open_traces(
        self, event: int, cpu: int, data_bytes: int, ret_ring: RingState, /
    ) -> int: ...
    def tierd_join_traces(self, event: int, cpu: int, ring: RingState, /) -> int: ...
    def tierd_read_traces(self, ring: RingState, capacity: int, ret_traces: Pointer, /) -> int: ...
    def tierd_set_period(self, ring: RingState, period: int, /) -> int: ...
    def tierd_close_ring(self, ring: RingState, /) -> None: ...
    def tierd_read_proc_events(
        self, socket: int, capacity: int, ret_events: Pointer, ret_lost: Pointer, /
    ) -> int: ...
    def tierd_write_ranges(self, folder: int, start: int, size: int, count: int, /) -> int: ...
    def tierd_place_buffer(self, buffer: Pointer, size: int, node: int, /) -> int: ...
    def tierd_prefer_node(self, buffer: Pointer, size: int, node: int, /) -> int: ...
    def tierd_free_pages(
        self, buffer: Pointer, block_bytes: int, blocks: Pointer, count: int, /
    ) -> int: ...
    def tierd_link_slots(self, buffer: Pointer, size: int, seed: int, /) -> int: ...
    def tierd_follow_slots(
        self, buffer: Pointer, first: int, begin_ns: int, end_ns: int, ret_pace: Pace, /
    ) -> int: ...
    def tierd_stream_reads(
        self, buffer: Pointer, size: int, begin_ns: int, end_ns: int, ret_pace: Pace, /
    ) -> int: ...
    def tierd_stream_writes(
        self, buffer: Pointer, size: int, begin_ns: int, end_ns: int, ret_pace: Pace, /
    ) -> int: ...
    def tierd_open_arena(
        self,
        block_bytes: int,
        blocks: int,
        flags: int,
        counts: Pointer,
        places: Pointer,
        ret_arena: Pointer,
        /,
    ) -> int: ...
    def tierd_add_tier(
        self, arena: Pointer, memory: Pointer, device: int, slots: int, spare: int, /
    ) -> int: ...
    def tierd_close_arena(self, arena: Pointer, /) -> None: ...
    def tierd_touch_blocks(self, arena: Pointer, ids: Pointer, count: int, /) -> int: ...
    def tierd_pin_blocks(
        self,
        arena: Pointer,
        ids: Pointer,
        count: int,
        mode: int,
        on: int,
        ret_addresses: Pointer,
        ret_why: Pointer,
        /,
    ) -> int: ...
    def tierd_unpin_blocks(self, arena: Pointer, ids: Pointer, count: int, mode: int, /) -> int: ...
    def tierd_read_blocks(
        self, arena: Pointer, ids: Pointer, count: int, into: Pointer, ret_why: Pointer, /
    ) -> int: ...
    def tierd_write_blocks(
        self, arena: Pointer, ids: Pointer, count: int, source: Pointer, ret_why: Pointer, /
    ) -> int: ...
    def tierd_drop_blocks(
        self, arena: Pointer, ids: Pointer, count: int, ret_why: Pointer, /
    ) -> int: ...
    def tierd_want_blocks(
        self, arena: Pointer, ids: Pointer, count: int, tier: int, flags: int, /
    ) -> int: ...
    def tierd_await_blocks(
        self, arena: Pointer, ids: Pointer, count: int, timeout_ns: int, ret_outcomes: Pointer, /
    ) -> int: ...
    def tierd_run_moves(
        self, arena: Pointer, mover: int, capacity: int, bounce: Pointer, ret_batch: Batch, /
    ) -> int: ...
    def tierd_sum_blocks(
        self, data: Pointer, block_bytes: int, count: int, ret_sums: Pointer, /
    ) -> None: ...
    def tierd_check_batch(self, arena: Pointer, batch: Batch, bounce: Pointer, /) -> int: ...
    def tierd_settle_batch(
        self, arena: Pointer, batch: Batch, outcome: int, bounce: Pointer, /
    ) -> None: ...
    def tierd_evict_blocks(self, arena: Pointer, count: int, /) -> int: ...
    def tierd_close_tier(self, arena: Pointer, tier: int, /) -> None: ...
    def tierd_lend_slots(
        self, arena: Pointer, tier: int, count: int, ret_slots: Pointer, /
    ) -> int: ...
    def tierd_end_lending(
        self, arena: Pointer, tier: int, slots: Pointer, count: int, are_empty: int, /
    ) -> None: ...
    def tierd_tell_moves(self, arena: Pointer, ret_moves: Moves, /) -> None: ...
    def tierd_stop_moves(self, arena: Pointer, /) -> None: ...
    def tierd_open_uring(self, entries: int, ret_uring: Pointer, /) -> int: ...
    def tierd_run_uring(
        self,
        uring: Pointer,
        fd: int,
        is_write: int,
        size: int,
        offsets: Pointer,
        count: int,
        data: Pointer,
        ret_results: Pointer,
        /,
    ) -> int: ...
    def tierd_close_uring(self, uring: Pointer, /) -> None: ...
    def tierd_tell_direct(self, fd: int, ret_memory: Pointer, ret_offset: Pointer, /) -> int: ...

class _Ffi(Protocol):
    @overload
    def new(self, cdecl: Literal["struct tierd_tally *"], /) -> Tally: ...
    @overload
    def new(self, cdecl: Literal["struct tierd_ring *"], /) -> RingState: ...
    @overload
    def new(self, cdecl: Literal["struct tierd_pace *"], /) -> Pace: ...
    @overload
    def new(self, cdecl: Literal["struct tierd_batch *"], /) -> Batch: ...
    @overload
    def new(self, cdecl: Literal["struct tierd_moves *"], /) -> Moves: ...
    @overload
    def new(
        self, cdecl: Literal["struct tierd_cursor *"], init: Mapping[str, int], /
    ) -> Cursor: ...
    @overload
    def new(
        self, cdecl: Literal["struct tierd_event *"], init: Mapping[str, int], /
    ) -> Pointer: ...
    @overload
    def new(self, cdecl: Literal["struct tierd_layout *"], init: tuple[Any, ...], /) -> Pointer: ...
    @overload
    def new(
        self,
        cdecl: Literal[
            "uint32_t *",
            "uint64_t *",
            "int32_t *",
            "struct tierd_arena **",
            "struct tierd_uring **",
        ],
        /,
    ) -> Pointer: ...
    def from_buffer(
        self,
        cdecl: Literal[
            "struct tierd_folio[]",
            "struct tierd_range[]",
            "struct tierd_record[]",
            "struct tierd_access[]",
            "struct tierd_trace[]",
            "struct tierd_proc_event[]",
            "uint8_t[]",
            "uint32_t[]",
            "int32_t[]",
            "int64_t[]",
            "uint64_t[]",
            "void *[]",
        ],
        buffer: NDArray[Any] | bytes | bytearray | mmap,
        *,
        require_writable: bool = False,
    ) -> Pointer: ...
    def cast(self, cdecl: Literal["uintptr_t"], value: Pointer, /) -> int: ...
    def release(self, buffer: Pointer, /) -> None: ...
    def gc(self, pointer: Any, destructor: Callable[[Pointer], None], /) -> Pointer: ...
    def buffer(self, pointer: Pointer, /) -> bytearray: ...

    NULL: Pointer

ffi: _Ffi
lib: _Shim
