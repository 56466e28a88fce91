/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The shim between Python and the kernel: what Python cannot do, or where a batch pays.
 *
 * Every function returns a negative errno on failure and leaves its ret_ outputs untouched then.
 * None logs, keeps global state, or calls back into Python; cffi releases the GIL around each.
 */
#ifndef TIERD_H
#define TIERD_H

#include <stddef.h>
#include <stdint.h>

/* cffi: begin */

/**
 * struct tierd_folio - one folio of a process, by the address of its first mapped page
 * @addr: virtual address, bytes
 * @pages: base pages that the folio spans in the mapping
 * @node: NUMA node when >= 0, TIERD_UNASKED before the first query, else a negative errno of
 *        move_pages(2)
 */
struct tierd_folio {
	uint64_t addr;
	uint32_t pages;
	int32_t node;
};

#define TIERD_UNASKED -2147483647

/**
 * struct tierd_tally - what became of the folios of one call, in base pages
 * @moved: on the destination now, elsewhere before
 * @resident: on the destination before, so never passed to the kernel
 * @absent: not present: never touched, swapped out, or device memory (-ENOENT)
 * @busy: could not be isolated, or its migration failed (-EBUSY)
 * @shared: mapped by another process too, and TIERD_MOVE_ALL was not given (-EACCES)
 * @unmovable: zero page, special or vanished mapping (-EFAULT)
 * @no_memory: not moved when the destination ran out of memory (@stopped is -ENOMEM)
 * @left: not moved when the whole call was refused for any other reason (@stopped)
 * @other: any other errno
 * @stopped: negative errno that ended the work early, 0 when every folio was tried: -ESRCH the
 *           process has exited, -EPERM no right to move its pages, -EACCES the destination lies
 *           outside its cpuset, -ENODEV the destination has no memory, -ENOMEM it is full
 */
struct tierd_tally {
	uint64_t moved;
	uint64_t resident;
	uint64_t absent;
	uint64_t busy;
	uint64_t shared;
	uint64_t unmovable;
	uint64_t no_memory;
	uint64_t left;
	uint64_t other;
	int32_t stopped;
};

#define TIERD_MOVE_ALL 1

/**
 * struct tierd_range - a part of another process' memory, and what was listed of it
 * @start: first byte, page-aligned; becomes where to go on, @end or above when it is done
 * @end: first byte behind it, page-aligned
 * @folios: folios listed
 */
struct tierd_range {
	uint64_t start;
	uint64_t end;
	uint64_t folios;
};

/**
 * tierd_list_ranges() - list the folios with a present page in ranges of another process
 * @pagemap: an open /proc/PID/pagemap of a process that has memory
 * @maps: its open /proc/PID/maps, which since Linux 6.11 tells how large hugetlbfs pages are
 * @ranges: listed one after the other. Those that were come to are set; of the last of these some
 *          may be left
 * @count: number of ranges
 * @capacity: room in @ret_folios, at least 1; no range is begun once so many base pages are listed
 * @ret_folios: each range's folios by rising address, @node TIERD_UNASKED
 * @ret_count: ranges that were come to
 *
 * A huge page counts once, by its first address, also where the range cuts it. Base pages of a
 * folio that is not mapped by a PMD count one each, since nothing tells them apart from outside.
 * The zero page is left out.
 *
 * Return: 0, or, where not even one range could be listed, -ENOTTY before Linux 6.7, -EFAULT for a
 * range outside user space, or another negative errno of ioctl(PAGEMAP_SCAN).
 */
int tierd_list_ranges(int pagemap, int maps, struct tierd_range *ranges, size_t count,
		      uint32_t capacity, struct tierd_folio *ret_folios, uint64_t *ret_count);

/**
 * tierd_query_nodes() - ask on which node each folio is
 * @pid: whose folios
 * @folios: each @node is set to the node or a negative errno
 * @count: number of folios
 *
 * Return: 0, -ESRCH when the process has no memory (any more), or another negative errno of
 * move_pages(2); folios before the failure are answered all the same.
 */
int tierd_query_nodes(int32_t pid, struct tierd_folio *folios, size_t count);

/**
 * tierd_find_huge() - tell which pages are mapped as part of a huge one
 * @pagemap: an open /proc/PID/pagemap of a process that has memory
 * @pages: addresses in it, each by itself; @pages becomes what the huge page spans, else is as it
 *         was. One larger than a PMD maps counts as one of a PMD. They are best sorted: neighbours
 *         that one entry of a PMD would map are answered by one system call.
 * @count: number of addresses
 *
 * Return: 0, -ENOTTY before Linux 6.7, or another negative errno of ioctl(PAGEMAP_SCAN).
 */
int tierd_find_huge(int pagemap, struct tierd_folio *pages, size_t count);

/**
 * tierd_move_folios() - move folios to one node
 * @pid: whose folios
 * @node: destination
 * @batch_pages: at most so many base pages a call of move_pages(2), at least one folio
 * @flags: 0, or TIERD_MOVE_ALL to move what other processes map too
 * @folios: @node says where each is, as a query left it (TIERD_UNASKED is asked here), and
 *          becomes the destination or a negative errno; those on the destination or with an
 *          errno are passed over
 * @count: number of folios
 * @ret_tally: the same outcomes, counted
 *
 * Return: 0 also when the kernel refused (see tally's @stopped), -EINVAL for an impossible @pid,
 * @node, @batch_pages or @flags, -ENOMEM when there is no memory for the batch's own arrays.
 */
int tierd_move_folios(int32_t pid, int32_t node, uint32_t batch_pages, uint32_t flags,
		      struct tierd_folio *folios, size_t count, struct tierd_tally *ret_tally);

/**
 * struct tierd_layout - where damon:damon_aggregated keeps its fields, bytes into the raw record
 * @target_id: u64, index of the target in its context
 * @nr_regions: u32, regions of that target
 * @start: u64, first byte of the region
 * @end: u64, first byte behind the region
 * @nr_accesses: u32, sampling intervals in which the region was found accessed
 * @age: u32, aggregations for which the region has kept its access frequency
 */
struct tierd_layout {
	uint32_t target_id;
	uint32_t nr_regions;
	uint32_t start;
	uint32_t end;
	uint32_t nr_accesses;
	uint32_t age;
};

/**
 * struct tierd_record - one region of one aggregation
 * @time_ns: CLOCK_MONOTONIC, when the kernel wrote the record
 * @lost: records lost between the previous one and this, so that a torn snapshot is known
 *
 * The rest is as in struct tierd_layout.
 */
struct tierd_record {
	uint64_t time_ns;
	uint64_t start;
	uint64_t end;
	uint64_t target_id;
	uint32_t nr_regions;
	uint32_t nr_accesses;
	uint32_t age;
	uint32_t lost;
};

/**
 * struct tierd_cursor - how far a ring has been read
 * @tail: bytes consumed, as in perf_event_mmap_page's data_tail
 * @lost: records that the kernel could not write, ever
 * @corrupt: stretches skipped since they could not be parsed, ever
 * @throttled: how often the kernel held an event for being too frequent, ever
 * @gap: lost or skipped since the last decoded record, due in the next one's @lost
 */
struct tierd_cursor {
	uint64_t tail;
	uint64_t lost;
	uint64_t corrupt;
	uint64_t throttled;
	uint32_t gap;
};

/**
 * tierd_decode_records() - decode what lies in a ring between the cursor's tail and @head
 * @layout: where the fields are
 * @data: the ring's data area
 * @data_bytes: its size, a power of two of at least 8
 * @head: bytes ever written, as in perf_event_mmap_page's data_head
 * @capacity: room in @ret_records; what does not fit is left for the next call
 * @cursor: moved behind what was consumed
 * @ret_records: the records in the order of the ring
 *
 * Whatever the bytes are, nothing outside @data is read and the cursor ends at or before @head.
 *
 * Return: the number of records, or -EINVAL for an impossible @layout or @data_bytes.
 */
int tierd_decode_records(const struct tierd_layout *layout, const void *data, uint64_t data_bytes,
			 uint64_t head, uint32_t capacity, struct tierd_cursor *cursor,
			 struct tierd_record *ret_records);

/**
 * struct tierd_access - an access that was sampled
 * @time_ns: CLOCK_MONOTONIC, 0 where it is not known
 * @addr: the virtual address that was accessed, 0 where it is not known
 * @phys_addr: the physical one, likewise
 * @source: what served it, as union perf_mem_data_src; 0 where it is not known
 * @pid: whose it is, 0 where it is not known
 * @tid: which thread's, likewise
 * @weight: what it took, in the unit of the event: cycles for loads of Intel, AMD and Arm
 * @lost: samples lost between the previous one and this
 */
struct tierd_access {
	uint64_t time_ns;
	uint64_t addr;
	uint64_t phys_addr;
	uint64_t source;
	uint32_t pid;
	uint32_t tid;
	uint32_t weight;
	uint32_t lost;
};

/**
 * tierd_decode_accesses() - decode what lies in a ring of tierd_open_accesses()
 *
 * As tierd_decode_records(), for samples of its form; others count as corrupt.
 *
 * Return: the number of accesses, or -EINVAL for an impossible @data_bytes.
 */
int tierd_decode_accesses(const void *data, uint64_t data_bytes, uint64_t head, uint32_t capacity,
			  struct tierd_cursor *cursor, struct tierd_access *ret_accesses);

#define TIERD_TRACE_MOST 1024

/**
 * struct tierd_trace - a record of a tracepoint, as the kernel wrote it
 * @time_ns: CLOCK_MONOTONIC, when the kernel wrote it
 * @lost: records lost between the previous one and this
 * @bytes: how many of @data are its own
 * @data: the raw data; the u16 that it begins with is the tracepoint's id
 */
struct tierd_trace {
	uint64_t time_ns;
	uint32_t lost;
	uint32_t bytes;
	uint8_t data[TIERD_TRACE_MOST];
};

/**
 * tierd_decode_traces() - decode what lies in a ring of tierd_open_traces()
 *
 * As tierd_decode_records(); a record of more than TIERD_TRACE_MOST bytes counts as corrupt.
 *
 * Return: the number of records, or -EINVAL for an impossible @data_bytes.
 */
int tierd_decode_traces(const void *data, uint64_t data_bytes, uint64_t head, uint32_t capacity,
			struct tierd_cursor *cursor, struct tierd_trace *ret_traces);

/**
 * tierd_decode_packets() - decode what Arm's SPE wrote between the cursor's tail and @head
 * @data: the AUX area
 * @data_bytes: its size, a power of two of at least 8
 * @head: bytes ever written, as in perf_event_mmap_page's aux_head
 * @flags: TIERD_SPE_SOURCES, or 0
 * @capacity: room in @ret_accesses; what does not fit is left for the next call
 * @cursor: moved behind what was consumed
 * @ret_accesses: the loads and stores of user space: of each the @tid, not whose it is, 0 where
 *                packets don't tell it; the cycles as @weight; no time
 *
 * Whatever the bytes are, nothing outside @data is read and the cursor ends at or before @head.
 *
 * Return: the number of accesses, or -EINVAL for an impossible @data_bytes.
 */
int tierd_decode_packets(const void *data, uint64_t data_bytes, uint64_t head, uint32_t flags,
			 uint32_t capacity, struct tierd_cursor *cursor,
			 struct tierd_access *ret_accesses);

/**
 * struct tierd_ring - an open perf event with its mapped ring
 * @map: struct perf_event_mmap_page, the data area one page behind it
 * @data_bytes: size of the data area
 * @aux: the area that SPE writes to, NULL without
 * @aux_bytes: its size
 * @aux_tail: how far it has been read, as @cursor has it of the ring
 * @flags: as of struct tierd_event
 * @fd: the event, to poll for input
 * @leader: the event that leads its group, -1 where it is alone
 * @cursor: how far the ring has been read, and what was amiss in both
 */
struct tierd_ring {
	void *map;
	uint64_t data_bytes;
	void *aux;
	uint64_t aux_bytes;
	uint64_t aux_tail;
	uint32_t flags;
	int32_t fd;
	int32_t leader;
	struct tierd_cursor cursor;
};

/**
 * tierd_open_ring() - record every hit of a tracepoint in one thread
 * @event: the tracepoint's id in tracefs
 * @pid: the thread, on whatever CPU it runs
 * @data_bytes: size of the data area, a power of two of at least a page
 * @wakeup_bytes: unread bytes from which the fd polls readable, at least 1
 * @ret_ring: to be closed with tierd_close_ring()
 *
 * Return: 0, or a negative errno of perf_event_open(2) or mmap(2).
 */
int tierd_open_ring(uint64_t event, int32_t pid, uint64_t data_bytes, uint32_t wakeup_bytes,
		    struct tierd_ring *ret_ring);

/**
 * tierd_read_ring() - decode and consume what is in the ring
 * @ring: an open ring
 * @layout: where the fields are
 * @capacity: room in @ret_records
 * @ret_records: as of tierd_decode_records()
 *
 * Return: as of tierd_decode_records().
 */
int tierd_read_ring(struct tierd_ring *ring, const struct tierd_layout *layout, uint32_t capacity,
		    struct tierd_record *ret_records);

/**
 * tierd_open_traces() - record every hit of a tracepoint on one CPU, whoever runs there
 * @event: the tracepoint's id in tracefs
 * @cpu: the CPU
 * @data_bytes: as of tierd_open_ring()
 * @ret_ring: to be closed with tierd_close_ring()
 *
 * Return: as of tierd_open_ring().
 */
int tierd_open_traces(uint64_t event, int32_t cpu, uint64_t data_bytes,
		      struct tierd_ring *ret_ring);

/**
 * tierd_join_traces() - have another tracepoint's hits on that CPU recorded in the same ring
 * @event: the tracepoint's id in tracefs
 * @cpu: the CPU of the ring
 * @ring: of tierd_open_traces()
 *
 * Return: an fd to be closed, or a negative errno of perf_event_open(2) or ioctl(2).
 */
int tierd_join_traces(uint64_t event, int32_t cpu, const struct tierd_ring *ring);

/**
 * tierd_read_traces() - decode and consume what is in the ring
 * @ring: an open ring of tierd_open_traces()
 * @capacity: room in @ret_traces
 * @ret_traces: as of tierd_decode_traces()
 *
 * Return: as of tierd_decode_traces(), or -EBADF for a closed ring.
 */
int tierd_read_traces(struct tierd_ring *ring, uint32_t capacity, struct tierd_trace *ret_traces);

#define TIERD_EXCLUDE_KERNEL 1
#define TIERD_SPE 2
#define TIERD_SPE_SOURCES 4

/**
 * struct tierd_event - a perf event whose samples tell addresses
 * @config: as in struct perf_event_attr, likewise the next ones
 * @period: a sample is taken of each so many events
 * @leader: config of an event that has to count beside this one, 0 for none: Intel's mem-loads-aux
 * @precise: what skid is allowed, 0 to 3, as precise_ip
 * @flags: TIERD_EXCLUDE_KERNEL to leave out what the kernel does itself; TIERD_SPE for an event of
 *         Arm's SPE, which writes packets beside the ring, and TIERD_SPE_SOURCES where its data
 *         source is coded as Arm's Neoverse cores do
 */
struct tierd_event {
	uint64_t config;
	uint64_t config1;
	uint64_t config2;
	uint64_t period;
	uint64_t leader;
	uint32_t type;
	uint32_t precise;
	uint32_t flags;
};

/**
 * tierd_open_accesses() - sample the accesses of a process or a CPU
 * @event: what is sampled
 * @pid: the process, -1 for all of a CPU
 * @cpu: the CPU, -1 for any that the process runs on
 * @data_bytes: as of tierd_open_ring(); with TIERD_SPE of what the packets go to, four pages at least
 * @wakeup_bytes: as of tierd_open_ring()
 * @ret_ring: to be closed with tierd_close_ring()
 *
 * Return: 0, -EINVAL also for impossible @flags or @precise, or another negative errno of
 * perf_event_open(2) or mmap(2).
 */
int tierd_open_accesses(const struct tierd_event *event, int32_t pid, int32_t cpu,
			uint64_t data_bytes, uint32_t wakeup_bytes, struct tierd_ring *ret_ring);

/**
 * tierd_read_accesses() - decode and consume what is in the ring
 * @ring: an open ring of tierd_open_accesses()
 * @capacity: room in @ret_accesses
 * @ret_accesses: as of tierd_decode_accesses()
 *
 * Return: as of tierd_decode_accesses(), or -EBADF for a closed ring.
 */
int tierd_read_accesses(struct tierd_ring *ring, uint32_t capacity,
			struct tierd_access *ret_accesses);

/**
 * tierd_set_period() - sample more or less often from now on
 * @ring: an open ring of tierd_open_accesses()
 * @period: as of struct tierd_event
 *
 * Return: 0, -EBADF for a closed ring, or another negative errno of ioctl(PERF_EVENT_IOC_PERIOD).
 */
int tierd_set_period(struct tierd_ring *ring, uint64_t period);

/**
 * tierd_close_ring() - unmap and close; a closed ring stays closed
 * @ring: an open or closed ring
 */
void tierd_close_ring(struct tierd_ring *ring);

#define TIERD_PROC_CHANGED 1
#define TIERD_PROC_ENDED 2

/**
 * struct tierd_proc_event - a process that came, changed or went
 * @pid: its pid
 * @kind: TIERD_PROC_CHANGED for a fork, an execve(2), another user or name, TIERD_PROC_ENDED when
 *        its first thread has ended
 */
struct tierd_proc_event {
	int32_t pid;
	uint32_t kind;
};

/**
 * tierd_read_proc_events() - read what a socket of the process connector holds, without waiting
 * @socket: a netlink socket that listens to CN_IDX_PROC
 * @capacity: room in @ret_events, at least 64
 * @ret_events: the events in their order, those of single threads left out
 * @ret_lost: how many times the kernel had no room for events since the last call
 *
 * Return: the number of events; when there may be more, at least @capacity less 63. Or a negative
 * errno of recvmmsg(2).
 */
int tierd_read_proc_events(int socket, uint32_t capacity, struct tierd_proc_event *ret_events,
			   uint32_t *ret_lost);

/**
 * tierd_write_ranges() - write adjoining ranges into the folders 0, 1, ..., a start and an end each
 * @folder: descriptor of the folder that has them, such as DAMON's regions
 * @start: where the first begins, bytes
 * @size: of each, bytes
 * @count: how many there are
 *
 * Return: 0, or the negative errno of the first open(2) or write(2) that failed; what was written
 * before stays.
 */
int tierd_write_ranges(int folder, uint64_t start, uint64_t size, uint32_t count);

/**
 * tierd_place_buffer() - have all of an anonymous buffer on one node
 * @buffer: page-aligned, not touched yet
 * @bytes: its size, whole pages
 * @node: where it is to be
 *
 * The node is preferred until every page is there, and the only one allowed from then on. Had it been
 * the only one from the start, the kernel's OOM killer might make room on it (constrained_alloc() in
 * mm/oom_kill.c). Huge pages are asked for, and the buffer is locked, both as far as may be.
 *
 * Return: 0, -EIO where pages came to be on other nodes, or another negative errno of mbind(2) and
 * madvise(2): -EINVAL for a node without memory or outside of the caller's cpuset.
 */
int tierd_place_buffer(void *buffer, uint64_t bytes, int32_t node);

/**
 * tierd_prefer_node() - have what comes to a buffer from now on be on a node, or where there is room
 * @buffer: page-aligned
 * @bytes: its size, whole pages
 * @node: where it is to be
 *
 * Return: 0, or a negative errno of mbind(2).
 */
int tierd_prefer_node(void *buffer, uint64_t bytes, int32_t node);

/**
 * tierd_free_pages() - give the memory of blocks in a buffer back to the kernel, locked or not
 * @buffer: anonymous, page-aligned
 * @block_bytes: whole pages
 * @blocks: their numbers in it; they are of zeros then
 *
 * Return: 0, or a negative errno of madvise(2): -EINVAL before Linux 5.18.
 */
int tierd_free_pages(void *buffer, uint64_t block_bytes, const int64_t *blocks, size_t count);

#define TIERD_SLOT_BYTES 128
#define TIERD_WINDOW_BYTES 2097152

/**
 * tierd_link_slots() - make one cycle of a buffer's slots, each of which points to the next
 * @buffer: aligned to a slot
 * @bytes: its size; what is behind the last whole slot is left as it is
 * @seed: of the order, not 0
 *
 * A slot is two cache lines, since CPUs fetch lines in pairs. The order is random within each window,
 * so that it cannot be guessed, and goes from window to window, so that a TLB that holds few pages
 * holds those that are next.
 *
 * Return: the number of slots in the cycle, or -EINVAL where there is none.
 */
int64_t tierd_link_slots(void *buffer, uint64_t bytes, uint64_t seed);

/**
 * struct tierd_pace - what a thread got done
 * @count: loads for tierd_follow_slots(), bytes for the others
 * @ns: the time that it took, of CLOCK_MONOTONIC
 * @next: for tierd_follow_slots() where to go on, bytes into the buffer; else 0
 */
struct tierd_pace {
	uint64_t count;
	uint64_t ns;
	uint64_t next;
};

/**
 * tierd_follow_slots() - load one slot after the other, each from where the one before points
 * @buffer: of a cycle of tierd_link_slots()
 * @first: the first slot, bytes into the buffer: where the last call left off, or caches would answer
 * @begin_ns: when to begin, CLOCK_MONOTONIC, likewise the next
 * @end_ns: when to end
 * @ret_pace: the loads, and their time
 *
 * Return: 0.
 */
int tierd_follow_slots(const void *buffer, uint64_t first, uint64_t begin_ns, uint64_t end_ns,
		       struct tierd_pace *ret_pace);

#define TIERD_BLOCK_BYTES 65536

/**
 * tierd_stream_reads() - read a buffer from its start to its end, again and again
 * @buffer: aligned to a word
 * @bytes: whole blocks, at least one
 * @begin_ns: as of tierd_follow_slots(), likewise the others
 * @end_ns:
 * @ret_pace: the bytes, and their time
 *
 * Return: 0, or -EINVAL for impossible @bytes.
 */
int tierd_stream_reads(void *buffer, uint64_t bytes, uint64_t begin_ns, uint64_t end_ns,
		       struct tierd_pace *ret_pace);

/**
 * tierd_stream_writes() - as tierd_stream_reads(), with writes that need not read what they replace
 */
int tierd_stream_writes(void *buffer, uint64_t bytes, uint64_t begin_ns, uint64_t end_ns,
			struct tierd_pace *ret_pace);

#define TIERD_BLOCK_UNIT 64
#define TIERD_TIERS 8
#define TIERD_MOVERS 255
#define TIERD_BATCH 32
#define TIERD_NOWHERE 255
#define TIERD_MEMORY 255
#define TIERD_SUMS 1
#define TIERD_READ 0
#define TIERD_WRITE 1
#define TIERD_URGENT 1
#define TIERD_ABSENT 2

struct tierd_arena;
struct tierd_uring;

/**
 * tierd_open_arena() - make an arena of blocks, none of which is anywhere yet
 * @block_bytes: of each, a multiple of TIERD_BLOCK_UNIT
 * @blocks: how many identities there are, from 0
 * @flags: TIERD_SUMS to sum each block that is written, and to check it when it is read or moved; or 0
 * @counts: accesses of each block, modulo 2^32; shared, and nothing relies on them
 * @places: the tier of each block, or TIERD_NOWHERE; shared, and never read here
 * @ret_arena: to be closed with tierd_close_arena()
 *
 * Both arrays have to outlive the arena.
 *
 * Return: 0, -EINVAL or -ENOMEM.
 */
int tierd_open_arena(uint64_t block_bytes, uint32_t blocks, uint32_t flags, uint32_t *counts,
		     uint8_t *places, struct tierd_arena **ret_arena);

/**
 * tierd_add_tier() - give an arena the next slower tier, before anything else is done with it
 * @arena: an open arena
 * @memory: its slots, one after the other, or NULL where the CPU cannot address them; it has to
 *          outlive the arena
 * @device: without @memory the address that its slots have for a device, or 0 for none; it is told to
 *          who holds blocks, and never followed
 * @slots: how many
 * @spare: so many of them are left to the movers, less than @slots
 *
 * Return: the tier's number, from 0, -EINVAL for too many, or -ENOMEM.
 */
int tierd_add_tier(struct tierd_arena *arena, void *memory, uint64_t device, uint32_t slots,
		   uint32_t spare);

/**
 * tierd_close_arena() - free an arena, when no call is in it
 * @arena: not to be used any more
 */
void tierd_close_arena(struct tierd_arena *arena);

/**
 * tierd_touch_blocks() - count an access of each block
 * @arena: an open arena
 * @ids: the blocks
 * @count: how many
 *
 * Return: 0, or -EINVAL when an id is out of range: nothing is counted then.
 */
int tierd_touch_blocks(struct tierd_arena *arena, const int64_t *ids, size_t count);

/**
 * tierd_pin_blocks() - hold blocks where they are, until tierd_unpin_blocks()
 * @arena: an open arena
 * @ids: the blocks, each of which is counted as accessed
 * @count: how many
 * @mode: TIERD_READ beside other readers, TIERD_WRITE alone; a new block is of zeros
 * @on: TIERD_MEMORY for wherever the CPU reaches them, or a tier of @memory or with a @device
 * @ret_addresses: where each is, for the CPU or for the device
 * @ret_why: 0, or why the first that is not pinned is not: -ENOENT was never written, -EBUSY is held
 *           by others, -EXDEV is not where it is to be held, -ENOSPC there is no memory for it,
 *           -EBADMSG is not what was written
 *
 * Return: how many are pinned, from the first on, or -EINVAL when an id is out of range.
 */
int64_t tierd_pin_blocks(struct tierd_arena *arena, const int64_t *ids, size_t count, uint32_t mode,
			 uint32_t on, void **ret_addresses, int32_t *ret_why);

/**
 * tierd_unpin_blocks() - end what tierd_pin_blocks() began
 *
 * Return: 0, -EINVAL when an id is out of range, or -EALREADY when one was not pinned; the others are
 * unpinned all the same.
 */
int tierd_unpin_blocks(struct tierd_arena *arena, const int64_t *ids, size_t count, uint32_t mode);

/**
 * tierd_read_blocks() - copy blocks out, each as it was at one moment
 * @into: room for @count blocks
 *
 * The rest, and what is returned, is as for tierd_pin_blocks().
 */
int64_t tierd_read_blocks(struct tierd_arena *arena, const int64_t *ids, size_t count, void *into,
			  int32_t *ret_why);

/**
 * tierd_write_blocks() - replace blocks whole
 * @from: @count blocks
 *
 * The rest, and what is returned, is as for tierd_pin_blocks().
 */
int64_t tierd_write_blocks(struct tierd_arena *arena, const int64_t *ids, size_t count,
			   const void *from, int32_t *ret_why);

/**
 * tierd_drop_blocks() - give up blocks and what they hold
 *
 * Return: how many were, from the first on, or -EINVAL; @ret_why is 0, -ENOENT or -EBUSY.
 */
int64_t tierd_drop_blocks(struct tierd_arena *arena, const int64_t *ids, size_t count,
			  int32_t *ret_why);

/**
 * tierd_want_blocks() - have the movers bring blocks to a tier
 * @tier: where to; what is not used there makes way
 * @flags: TIERD_URGENT to be before all others, TIERD_ABSENT to leave out what has an address already
 *
 * Return: how many were queued, or -EINVAL. Those that were never written, are on that tier, or wait
 * to be moved already are left out.
 */
int64_t tierd_want_blocks(struct tierd_arena *arena, const int64_t *ids, size_t count, uint32_t tier,
			  uint32_t flags);

/**
 * tierd_await_blocks() - wait until none of the blocks is queued or under way, all at one moment
 * @timeout_ns: at most so long
 * @ret_outcomes: of each, what its last move came to: 0 or a negative errno, -EIO where its tier
 *                failed, -ENOSPC, -EBUSY, -EBADMSG
 *
 * Return: 0, -ETIMEDOUT or -EINVAL.
 */
int tierd_await_blocks(struct tierd_arena *arena, const int64_t *ids, size_t count,
		       uint64_t timeout_ns, int32_t *ret_outcomes);

/**
 * tierd_sum_blocks() - sum blocks, as an arena does that checks them
 * @data: @count blocks of @block_bytes, which is a multiple of 32
 * @ret_sums: of each, never 0
 */
void tierd_sum_blocks(const void *data, uint64_t block_bytes, size_t count, uint64_t *ret_sums);

/**
 * struct tierd_batch - blocks that go to or come from a tier without addresses
 * @tier: that tier
 * @to: where they go to when they come from it
 * @mover: who has claimed them
 * @is_store: 1 where they go to it
 * @count: how many
 * @blocks: which
 * @slots: theirs in @tier
 * @to_slots: theirs in @to
 * @is_bad: of a load, which are lost; tierd_check_batch() adds those that are something else
 */
struct tierd_batch {
	uint32_t tier;
	uint32_t to;
	uint32_t mover;
	uint32_t is_store;
	uint32_t count;
	uint32_t blocks[TIERD_BATCH];
	int64_t slots[TIERD_BATCH];
	uint32_t to_slots[TIERD_BATCH];
	uint8_t is_bad[TIERD_BATCH];
};

/**
 * tierd_run_moves() - be a mover: move blocks from memory to memory, until there is other work
 * @arena: an open arena
 * @mover: from 1 to TIERD_MOVERS, of this thread alone
 * @capacity: blocks of a batch, at most TIERD_BATCH
 * @bounce: room for them
 * @ret_batch: what is to be copied: from @bounce where it is a store, else into it; it ends with
 *             tierd_settle_batch()
 *
 * Return: 1 with a batch, 0 after tierd_stop_moves(), or -EINVAL.
 */
int tierd_run_moves(struct tierd_arena *arena, uint32_t mover, uint32_t capacity, void *bounce,
		    struct tierd_batch *ret_batch);

/**
 * tierd_check_batch() - find which blocks of a load are not what was once stored
 * @batch: those that are bad already are left out
 * @bounce: what was read
 *
 * Return: how many.
 */
int tierd_check_batch(const struct tierd_arena *arena, struct tierd_batch *batch, const void *bounce);

/**
 * tierd_settle_batch() - end a batch; blocks that are bad stay where they are
 * @outcome: 0, or a negative errno where the tier did not do it: all of them stay
 * @bounce: what was read
 */
void tierd_settle_batch(struct tierd_arena *arena, const struct tierd_batch *batch, int outcome,
			const void *bounce);

/**
 * tierd_evict_blocks() - have blocks of memory make room, to other tiers
 * @count: so many are to be on their way, with those that are already
 *
 * Return: how many are.
 */
int64_t tierd_evict_blocks(struct tierd_arena *arena, uint32_t count);

/**
 * tierd_close_tier() - let no more blocks go to a tier
 */
void tierd_close_tier(struct tierd_arena *arena, uint32_t tier);

/**
 * tierd_lend_slots() - take free slots of a tier that have memory, so that it can be given back
 * @count: how many, at most
 * @ret_slots: which; to be given to tierd_end_lending()
 *
 * Those that are left to the movers stay.
 *
 * Return: how many, or -EINVAL.
 */
int64_t tierd_lend_slots(struct tierd_arena *arena, uint32_t tier, size_t count,
			 int64_t *ret_slots);

/**
 * tierd_end_lending() - let slots be used again
 * @are_empty: their memory was given back; it comes again with the first use
 */
void tierd_end_lending(struct tierd_arena *arena, uint32_t tier, const int64_t *slots, size_t count,
		       uint32_t are_empty);

/**
 * struct tierd_moves - what the movers have done since the arena is there
 * @moved: blocks that were moved
 * @busy: that stayed, since they were held, written or given up meanwhile
 * @no_room: that stayed, for want of room
 * @failed: that stayed, since a tier failed
 * @queued: that wait now
 * @used: slots in use now, of each tier
 */
struct tierd_moves {
	uint64_t moved;
	uint64_t busy;
	uint64_t no_room;
	uint64_t failed;
	uint32_t queued;
	uint32_t used[TIERD_TIERS];
};

void tierd_tell_moves(struct tierd_arena *arena, struct tierd_moves *ret_moves);

/**
 * tierd_stop_moves() - have every tierd_run_moves() return
 */
void tierd_stop_moves(struct tierd_arena *arena);

/**
 * tierd_open_uring() - make an io_uring for batches of reads and writes
 * @entries: of a batch, at most
 * @ret_uring: to be closed with tierd_close_uring()
 *
 * Return: 0, or a negative errno: -ENOSYS, -EPERM or -EOPNOTSUPP where there is none for us.
 */
int tierd_open_uring(uint32_t entries, struct tierd_uring **ret_uring);

/**
 * tierd_run_uring() - read or write parts of a file together, and wait for all of them
 * @fd: the file
 * @is_write: not 0 to write
 * @size: bytes of each part
 * @offsets: where each is in the file
 * @count: how many, at most as many as there are entries
 * @data: where they are in memory, one after the other
 * @ret_results: of each, the bytes that were read or written, or a negative errno
 *
 * Nothing is under way when it returns.
 *
 * Return: 0, or a negative errno where not all could be begun; these are -ECANCELED then.
 */
int tierd_run_uring(struct tierd_uring *uring, int fd, uint32_t is_write, uint32_t size,
		    const int64_t *offsets, size_t count, void *data, int32_t *ret_results);

void tierd_close_uring(struct tierd_uring *uring);

/**
 * tierd_tell_direct() - how a file has to be read and written directly (O_DIRECT)
 * @ret_memory: what addresses in memory are multiples of; 0 where it can't be
 * @ret_offset: what offsets and sizes are multiples of; 0 where it can't be
 *
 * Return: 0, -ENODATA where the kernel does not tell, or another negative errno.
 */
int tierd_tell_direct(int fd, uint32_t *ret_memory, uint32_t *ret_offset);

/* cffi: end */
#endif
