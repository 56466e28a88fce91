# SPDX-License-Identifier: Apache-2.0
"""Types of the extension that cffi makes of native/tierd.h, which documents it."""

from collections.abc import Mapping
from typing import Any, Literal, Protocol, overload

import numpy as np
from numpy.typing import NDArray

class Pointer(Protocol):
    """An array or a pointer to one thing, which is then its element 0."""

    def __getitem__(self, index: int, /) -> int: ...
    def __len__(self) -> int: ...

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

class _Shim(Protocol):
    TIERD_EXCLUDE_KERNEL: int
    TIERD_SPE: int
    TIERD_SPE_SOURCES: int
    TIERD_UNASKED: int
    TIERD_MOVE_ALL: int
    TIERD_PROC_CHANGED: int
    TIERD_PROC_ENDED: int

    def tierd_list_folios(
        self,
        pagemap: int,
        maps: int,
        start: int,
        end: int,
        capacity: int,
        ret_folios: Pointer,
        ret_count: Pointer,
        ret_next: Pointer,
        /,
    ) -> int: ...
    def tierd_query_nodes(self, pid: int, folios: Pointer, count: int, /) -> int: ...
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
    def tierd_set_period(self, ring: RingState, period: int, /) -> int: ...
    def tierd_close_ring(self, ring: RingState, /) -> None: ...
    def tierd_read_proc_events(
        self, socket: int, capacity: int, ret_events: Pointer, ret_lost: Pointer, /
    ) -> int: ...
    def tierd_write_ranges(self, folder: int, start: int, size: int, count: int, /) -> int: ...

class _Ffi(Protocol):
    @overload
    def new(self, cdecl: Literal["struct tierd_tally *"], /) -> Tally: ...
    @overload
    def new(self, cdecl: Literal["struct tierd_ring *"], /) -> RingState: ...
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
    def new(self, cdecl: Literal["uint32_t *", "uint64_t *"], /) -> Pointer: ...
    def from_buffer(
        self,
        cdecl: Literal[
            "struct tierd_folio[]",
            "struct tierd_record[]",
            "struct tierd_access[]",
            "struct tierd_proc_event[]",
            "uint8_t[]",
        ],
        buffer: NDArray[np.void] | bytes | bytearray,
        *,
        require_writable: bool = False,
    ) -> Pointer: ...

ffi: _Ffi
lib: _Shim
