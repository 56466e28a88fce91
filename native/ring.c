/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The perf ring of damon:damon_aggregated, decoded into an array of the caller.
 *
 * Follows perf_event_open(2) and include/uapi/linux/perf_event.h: the reader loads data_head,
 * consumes behind a read barrier, and stores data_tail behind a full one.
 */
#include "tierd.h"

#include <errno.h>
#include <linux/perf_event.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SAMPLE_MOST 512 /* bytes of a sample up to the end of the last field we read */
#define RAW_AT 20	/* header, u64 time, u32 size of the raw data, raw data */

/* The data area, in which positions count up for ever and wrap around. */
struct data {
	const uint8_t *bytes;
	uint64_t mask;
};

static uint32_t load32(const uint8_t *from)
{
	uint32_t value;

	memcpy(&value, from, sizeof(value));
	return value;
}

static uint64_t load64(const uint8_t *from)
{
	uint64_t value;

	memcpy(&value, from, sizeof(value));
	return value;
}

/* Copies @count bytes at a position where the data area wraps; out of line, since that is rare. */
static __attribute__((noinline)) const uint8_t *join(const struct data *data, uint64_t at,
						     size_t count, uint8_t *bounce)
{
	uint64_t first = data->mask + 1 - (at & data->mask);

	memcpy(bounce, data->bytes + (at & data->mask), first);
	memcpy(bounce + first, data->bytes, count - first);
	return bounce;
}

/* Returns @count bytes at a position in one piece, in @bounce where the data area wraps. */
static const uint8_t *peek(const struct data *data, uint64_t at, size_t count, uint8_t *bounce)
{
	if ((at & data->mask) + count <= data->mask + 1)
		return data->bytes + (at & data->mask);
	return join(data, at, count, bounce);
}

static uint32_t larger(uint32_t a, uint32_t b)
{
	return a > b ? a : b;
}

/* Returns how many bytes of raw data hold every field, 0 for a layout that cannot be right. */
static uint32_t raw_bytes(const struct tierd_layout *layout)
{
	uint32_t wide = larger(layout->target_id, larger(layout->start, layout->end));
	uint32_t narrow = larger(layout->nr_regions, larger(layout->nr_accesses, layout->age));

	if (larger(wide, narrow) > SAMPLE_MOST - RAW_AT - sizeof(uint64_t))
		return 0;
	return larger(wide + sizeof(uint64_t), narrow + sizeof(uint32_t));
}

static void note_gap(struct tierd_cursor *cursor, uint64_t lost)
{
	uint32_t room = UINT32_MAX - cursor->gap;

	cursor->gap += lost < room ? (uint32_t)lost : room;
}

static void note_lost(struct tierd_cursor *cursor, uint64_t lost)
{
	cursor->lost += lost;
	note_gap(cursor, lost);
}

static void note_corrupt(struct tierd_cursor *cursor)
{
	cursor->corrupt++;
	note_gap(cursor, 1);
}

static void fill_record(const uint8_t *sample, const struct tierd_layout *layout,
			struct tierd_cursor *cursor, struct tierd_record *ret_record)
{
	const uint8_t *raw = sample + RAW_AT;

	*ret_record = (struct tierd_record){
		.time_ns = load64(sample + sizeof(struct perf_event_header)),
		.start = load64(raw + layout->start),
		.end = load64(raw + layout->end),
		.target_id = load64(raw + layout->target_id),
		.nr_regions = load32(raw + layout->nr_regions),
		.nr_accesses = load32(raw + layout->nr_accesses),
		.age = load32(raw + layout->age),
		.lost = cursor->gap,
	};
	cursor->gap = 0;
}

/* Takes in one record of the ring. Returns 1 when it became a tierd_record, else 0. */
static int take(const struct data *data, const struct perf_event_header *header, uint32_t raw,
		const struct tierd_layout *layout, struct tierd_cursor *cursor,
		struct tierd_record *ret_record)
{
	uint8_t bounce[SAMPLE_MOST];
	const uint8_t *at;
	uint32_t have;

	switch (header->type) {
	case PERF_RECORD_SAMPLE:
		if (header->size < RAW_AT + raw)
			break;
		at = peek(data, cursor->tail, RAW_AT + raw, bounce);
		have = load32(at + RAW_AT - sizeof(have));
		if (have < raw || have > header->size - (uint32_t)RAW_AT)
			break;
		fill_record(at, layout, cursor, ret_record);
		return 1;
	case PERF_RECORD_LOST: /* header, u64 id, u64 lost */
		if (header->size < 24)
			break;
		note_lost(cursor, load64(peek(data, cursor->tail + 16, 8, bounce)));
		return 0;
	case PERF_RECORD_LOST_SAMPLES: /* header, u64 lost */
		if (header->size < 16)
			break;
		note_lost(cursor, load64(peek(data, cursor->tail + 8, 8, bounce)));
		return 0;
	default:
		return 0;
	}
	note_corrupt(cursor);
	return 0;
}

int tierd_decode_records(const struct tierd_layout *layout, const void *bytes, uint64_t data_bytes,
			 uint64_t head, uint32_t capacity, struct tierd_cursor *cursor,
			 struct tierd_record *ret_records)
{
	/* Copies, which no store to a record can change: they stay in registers. */
	const struct data data = { .bytes = bytes, .mask = data_bytes - 1 };
	const struct tierd_layout fields = *layout;
	struct tierd_cursor at = *cursor;
	uint32_t raw = raw_bytes(&fields);
	uint32_t count = 0;

	if (raw == 0 || data_bytes < 8 || data_bytes & (data_bytes - 1) || capacity > INT32_MAX)
		return -EINVAL;
	while (at.tail != head && count < capacity) {
		uint64_t unread = head - at.tail;
		struct perf_event_header header = { 0 };

		if (unread <= data_bytes && at.tail % 8 == 0)
			memcpy(&header, data.bytes + (at.tail & data.mask), sizeof(header));
		if (header.size < sizeof(header) || header.size % 8 || header.size > unread) {
			/* Without a size there is no next record: go on with what comes later. */
			note_corrupt(&at);
			at.tail = head;
			break;
		}
		count += take(&data, &header, raw, &fields, &at, &ret_records[count]);
		at.tail += header.size;
	}
	*cursor = at;
	return (int)count;
}

static int open_event(uint64_t event, int32_t pid, uint32_t wakeup_bytes)
{
	struct perf_event_attr attr = {
		.type = PERF_TYPE_TRACEPOINT,
		.size = sizeof(attr),
		.config = event,
		.sample_period = 1,
		.sample_type = PERF_SAMPLE_TIME | PERF_SAMPLE_RAW,
		.watermark = 1,
		.wakeup_watermark = wakeup_bytes,
		.use_clockid = 1,
		.clockid = CLOCK_MONOTONIC,
	};

	return (int)syscall(SYS_perf_event_open, &attr, pid, -1, -1, PERF_FLAG_FD_CLOEXEC);
}

int tierd_open_ring(uint64_t event, int32_t pid, uint64_t data_bytes, uint32_t wakeup_bytes,
		    struct tierd_ring *ret_ring)
{
	struct tierd_ring ring = { .data_bytes = data_bytes };
	int err;

	ring.fd = open_event(event, pid, wakeup_bytes);
	if (ring.fd < 0)
		return -errno;
	ring.map = mmap(NULL, sysconf(_SC_PAGESIZE) + data_bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
			ring.fd, 0);
	if (ring.map == MAP_FAILED) {
		err = -errno;
		close(ring.fd);
		return err;
	}
	*ret_ring = ring;
	return 0;
}

int tierd_read_ring(struct tierd_ring *ring, const struct tierd_layout *layout, uint32_t capacity,
		    struct tierd_record *ret_records)
{
	struct perf_event_mmap_page *page = ring->map;
	uint64_t head;
	int count;

	if (!page)
		return -EBADF;
	head = __atomic_load_n(&page->data_head, __ATOMIC_ACQUIRE);
	count = tierd_decode_records(layout, (const uint8_t *)page + page->data_offset,
				     ring->data_bytes, head, capacity, &ring->cursor, ret_records);
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	__atomic_store_n(&page->data_tail, ring->cursor.tail, __ATOMIC_RELAXED);
	return count;
}

void tierd_close_ring(struct tierd_ring *ring)
{
	if (!ring->map)
		return;
	munmap(ring->map, sysconf(_SC_PAGESIZE) + ring->data_bytes);
	close(ring->fd);
	ring->map = NULL;
	ring->fd = -1;
}
