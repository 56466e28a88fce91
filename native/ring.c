/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Perf rings, decoded into an array of the caller: of damon:damon_aggregated, of accesses that
 * hardware has sampled, and of tracepoints whose records are passed on as they are.
 *
 * Follows perf_event_open(2) and include/uapi/linux/perf_event.h: the reader loads data_head,
 * consumes behind a read barrier, and stores data_tail behind a full one.
 */
#include "tierd.h"

#include <errno.h>
#include <linux/perf_event.h>
#include <stdbool.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SAMPLE_MOST 512 /* bytes of a sample up to the end of the last field we read */
#define RAW_AT 20	/* header, u64 time, u32 size of the raw data, raw data */

#define ACCESS_SAMPLE                                                                              \
	(PERF_SAMPLE_TID | PERF_SAMPLE_TIME | PERF_SAMPLE_ADDR | PERF_SAMPLE_WEIGHT |              \
	 PERF_SAMPLE_DATA_SRC | PERF_SAMPLE_PHYS_ADDR)
#define ACCESS_BYTES 56 /* header, u32 pid and tid, and u64 each: the others in perf's order */

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

/* How much was lost nobody tells: a full area stops the event, and a collision drops a sample. */
static void note_aux(struct tierd_cursor *cursor, uint64_t flags)
{
	if (flags & (PERF_AUX_FLAG_TRUNCATED | PERF_AUX_FLAG_PARTIAL | PERF_AUX_FLAG_COLLISION))
		note_lost(cursor, 1);
	if (flags & PERF_AUX_FLAG_TRUNCATED)
		cursor->throttled++;
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

/* What a PERF_RECORD_SAMPLE becomes. */
struct form {
	const struct tierd_layout *layout; /* NULL for an access or a trace */
	uint32_t raw;			   /* bytes that hold all fields of the layout */
	bool is_trace;			   /* whether it becomes a tierd_trace */
	size_t bytes;			   /* of what it becomes */
};

/* Returns whether the sample, of @size bytes, became a tierd_record. */
static bool take_record(const struct data *data, uint16_t size, const struct form *form,
			struct tierd_cursor *cursor, struct tierd_record *ret_record)
{
	uint8_t bounce[SAMPLE_MOST];
	const uint8_t *at;
	uint32_t have;

	if (size < RAW_AT + form->raw)
		return false;
	at = peek(data, cursor->tail, RAW_AT + form->raw, bounce);
	have = load32(at + RAW_AT - sizeof(have));
	if (have < form->raw || have > size - (uint32_t)RAW_AT)
		return false;
	fill_record(at, form->layout, cursor, ret_record);
	return true;
}

/* Returns whether the sample, of @size bytes, became a tierd_access. */
static bool take_access(const struct data *data, uint16_t size, struct tierd_cursor *cursor,
			struct tierd_access *ret_access)
{
	uint8_t bounce[ACCESS_BYTES];
	const uint8_t *at;

	if (size != ACCESS_BYTES)
		return false;
	at = peek(data, cursor->tail, ACCESS_BYTES, bounce);
	*ret_access = (struct tierd_access){
		.pid = load32(at + 8),
		.tid = load32(at + 12),
		.time_ns = load64(at + 16),
		.addr = load64(at + 24),
		.weight = load32(at + 32),
		.source = load64(at + 40),
		.phys_addr = load64(at + 48),
		.lost = cursor->gap,
	};
	cursor->gap = 0;
	return true;
}

/* Returns whether the sample, of @size bytes, became a tierd_trace. */
static bool take_trace(const struct data *data, uint16_t size, struct tierd_cursor *cursor,
		       struct tierd_trace *ret_trace)
{
	uint8_t bounce[RAW_AT + TIERD_TRACE_MOST];
	const uint8_t *at;
	uint32_t have;

	if (size < RAW_AT)
		return false;
	at = peek(data, cursor->tail, RAW_AT, bounce);
	have = load32(at + RAW_AT - sizeof(have));
	if (have > TIERD_TRACE_MOST || have > size - (uint32_t)RAW_AT)
		return false;
	at = peek(data, cursor->tail, RAW_AT + have, bounce);
	ret_trace->time_ns = load64(at + sizeof(struct perf_event_header));
	ret_trace->lost = cursor->gap;
	ret_trace->bytes = have;
	memcpy(ret_trace->data, at + RAW_AT, have);
	cursor->gap = 0;
	return true;
}

/* Returns whether the sample, of @size bytes, became what @form says. */
static inline __attribute__((always_inline)) bool take_sample(const struct data *data,
							      uint16_t size,
							      const struct form *form,
							      struct tierd_cursor *cursor,
							      void *ret)
{
	if (form->layout)
		return take_record(data, size, form, cursor, ret);
	if (form->is_trace)
		return take_trace(data, size, cursor, ret);
	return take_access(data, size, cursor, ret);
}

/* Takes in one record of the ring. Returns 1 when it became one of the caller's, else 0. */
static inline __attribute__((always_inline)) int take(const struct data *data,
						      const struct perf_event_header *header,
						      const struct form *form,
						      struct tierd_cursor *cursor, void *ret)
{
	uint8_t bounce[8];

	switch (header->type) {
	case PERF_RECORD_SAMPLE:
		if (take_sample(data, header->size, form, cursor, ret))
			return 1;
		break;
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
	case PERF_RECORD_AUX: /* header, u64 offset, u64 size, u64 flags */
		if (header->size < 32)
			break;
		note_aux(cursor, load64(peek(data, cursor->tail + 24, 8, bounce)));
		return 0;
	case PERF_RECORD_THROTTLE:
		cursor->throttled++;
		return 0;
	default:
		return 0;
	}
	note_corrupt(cursor);
	return 0;
}

static inline __attribute__((always_inline)) int decode(const struct form *form, const void *bytes,
							uint64_t data_bytes, uint64_t head,
							uint32_t capacity,
							struct tierd_cursor *cursor, uint8_t *ret)
{
	/* Copies, which no store to a record can change: they stay in registers. */
	const struct data data = { .bytes = bytes, .mask = data_bytes - 1 };
	struct tierd_cursor at = *cursor;
	uint32_t count = 0;

	if (data_bytes < 8 || data_bytes & (data_bytes - 1) || capacity > INT32_MAX)
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
		count += take(&data, &header, form, &at, ret + count * form->bytes);
		at.tail += header.size;
	}
	*cursor = at;
	return (int)count;
}

int tierd_decode_records(const struct tierd_layout *layout, const void *bytes, uint64_t data_bytes,
			 uint64_t head, uint32_t capacity, struct tierd_cursor *cursor,
			 struct tierd_record *ret_records)
{
	const struct tierd_layout fields = *layout;
	const struct form form = { .layout = &fields,
				   .raw = raw_bytes(&fields),
				   .bytes = sizeof(*ret_records) };

	if (form.raw == 0)
		return -EINVAL;
	return decode(&form, bytes, data_bytes, head, capacity, cursor, (uint8_t *)ret_records);
}

int tierd_decode_accesses(const void *bytes, uint64_t data_bytes, uint64_t head, uint32_t capacity,
			  struct tierd_cursor *cursor, struct tierd_access *ret_accesses)
{
	const struct form form = { .bytes = sizeof(*ret_accesses) };

	return decode(&form, bytes, data_bytes, head, capacity, cursor, (uint8_t *)ret_accesses);
}

int tierd_decode_traces(const void *bytes, uint64_t data_bytes, uint64_t head, uint32_t capacity,
			struct tierd_cursor *cursor, struct tierd_trace *ret_traces)
{
	const struct form form = { .is_trace = true, .bytes = sizeof(*ret_traces) };

	return decode(&form, bytes, data_bytes, head, capacity, cursor, (uint8_t *)ret_traces);
}

static int open_event(const struct perf_event_attr *attr, int32_t pid, int32_t cpu, int leader)
{
	return (int)syscall(SYS_perf_event_open, attr, pid, cpu, leader, PERF_FLAG_FD_CLOEXEC);
}

static void close_events(const struct tierd_ring *ring)
{
	if (ring->fd >= 0)
		close(ring->fd);
	if (ring->leader >= 0)
		close(ring->leader);
}

static void set_common(struct perf_event_attr *attr, uint32_t wakeup_bytes)
{
	attr->size = sizeof(*attr);
	attr->watermark = 1;
	attr->wakeup_watermark = wakeup_bytes;
	attr->use_clockid = 1;
	attr->clockid = CLOCK_MONOTONIC;
}

/*
 * Opens what @attr says for @pid on @cpu, with a ring of its own, behind an open @leader unless that
 * is -1. The leader is closed with the ring, or if there is none.
 */
static int open_ring(struct perf_event_attr *attr, int32_t pid, int32_t cpu, int leader,
		     uint64_t data_bytes, uint32_t wakeup_bytes, struct tierd_ring *ret_ring)
{
	struct tierd_ring ring = { .data_bytes = data_bytes, .leader = leader };
	int err;

	set_common(attr, wakeup_bytes);
	ring.fd = open_event(attr, pid, cpu, leader);
	if (ring.fd < 0)
		goto fail;
	ring.map = mmap(NULL, sysconf(_SC_PAGESIZE) + data_bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
			ring.fd, 0);
	if (ring.map == MAP_FAILED)
		goto fail;
	*ret_ring = ring;
	return 0;
fail:
	err = -errno;
	close_events(&ring);
	return err;
}

static struct perf_event_attr tracepoint(uint64_t event)
{
	return (struct perf_event_attr){
		.type = PERF_TYPE_TRACEPOINT,
		.config = event,
		.sample_period = 1,
		.sample_type = PERF_SAMPLE_TIME | PERF_SAMPLE_RAW,
	};
}

int tierd_open_ring(uint64_t event, int32_t pid, uint64_t data_bytes, uint32_t wakeup_bytes,
		    struct tierd_ring *ret_ring)
{
	struct perf_event_attr attr = tracepoint(event);

	return open_ring(&attr, pid, -1, -1, data_bytes, wakeup_bytes, ret_ring);
}

int tierd_open_traces(uint64_t event, int32_t cpu, uint64_t data_bytes, struct tierd_ring *ret_ring)
{
	struct perf_event_attr attr = tracepoint(event);

	return open_ring(&attr, -1, cpu, -1, data_bytes, 1, ret_ring);
}

int tierd_join_traces(uint64_t event, int32_t cpu, const struct tierd_ring *ring)
{
	struct perf_event_attr attr = tracepoint(event);
	int fd, err;

	if (!ring->map)
		return -EBADF;
	set_common(&attr, 1);
	fd = open_event(&attr, -1, cpu, -1);
	if (fd < 0)
		return -errno;
	if (ioctl(fd, PERF_EVENT_IOC_SET_OUTPUT, ring->fd) == 0)
		return fd;
	err = -errno;
	close(fd);
	return err;
}

/* Maps what SPE writes to, and lets it begin. */
static int open_aux(struct tierd_ring *ring, uint64_t aux_bytes)
{
	struct perf_event_mmap_page *page = ring->map;
	void *aux;

	page->aux_offset = sysconf(_SC_PAGESIZE) + ring->data_bytes;
	page->aux_size = aux_bytes;
	aux = mmap(NULL, aux_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring->fd,
		   (off_t)page->aux_offset);
	if (aux == MAP_FAILED)
		return -errno;
	ring->aux = aux;
	ring->aux_bytes = aux_bytes;
	return ioctl(ring->fd, PERF_EVENT_IOC_ENABLE, 0) ? -errno : 0;
}

/*
 * The ring of an SPE event tells only what was amiss. The event begins when its area is mapped, since
 * arm_spe_pmu_add() refuses one without (drivers/perf/arm_spe_pmu.c), and hands over each page.
 */
static int open_packets(struct perf_event_attr *attr, int32_t pid, int32_t cpu, uint64_t aux_bytes,
			uint32_t flags, struct tierd_ring *ret_ring)
{
	uint64_t page_bytes = sysconf(_SC_PAGESIZE);
	struct tierd_ring ring;
	int err;

	attr->sample_type = 0;
	attr->disabled = 1;
	attr->aux_watermark = (uint32_t)page_bytes;
	err = open_ring(attr, pid, cpu, -1, page_bytes, 1, &ring);
	if (err)
		return err;
	ring.flags = flags;
	err = open_aux(&ring, aux_bytes);
	if (err) {
		tierd_close_ring(&ring);
		return err;
	}
	*ret_ring = ring;
	return 0;
}

int tierd_open_accesses(const struct tierd_event *event, int32_t pid, int32_t cpu,
			uint64_t data_bytes, uint32_t wakeup_bytes, struct tierd_ring *ret_ring)
{
	struct perf_event_attr attr = {
		.type = event->type,
		.config = event->config,
		.config1 = event->config1,
		.config2 = event->config2,
		.sample_period = event->period,
		.sample_type = ACCESS_SAMPLE,
		.precise_ip = event->precise,
		.exclude_kernel = event->flags & TIERD_EXCLUDE_KERNEL ? 1 : 0,
		.exclude_hv = event->flags & TIERD_EXCLUDE_KERNEL ? 1 : 0,
	};
	/* A group has one clock. */
	struct perf_event_attr leading = { .type = event->type,
					   .size = sizeof(leading),
					   .config = event->leader,
					   .use_clockid = 1,
					   .clockid = CLOCK_MONOTONIC };
	int leader = -1;

	if (event->precise > 3 ||
	    event->flags & ~(TIERD_EXCLUDE_KERNEL | TIERD_SPE | TIERD_SPE_SOURCES))
		return -EINVAL;
	if (event->flags & TIERD_SPE)
		return open_packets(&attr, pid, cpu, data_bytes, event->flags, ret_ring);
	if (event->leader) {
		leader = open_event(&leading, pid, cpu, -1);
		if (leader < 0)
			return -errno;
	}
	return open_ring(&attr, pid, cpu, leader, data_bytes, wakeup_bytes, ret_ring);
}

int tierd_set_period(struct tierd_ring *ring, uint64_t period)
{
	if (!ring->map)
		return -EBADF;
	return ioctl(ring->fd, PERF_EVENT_IOC_PERIOD, &period) ? -errno : 0;
}

/* Where the data of an open ring are, and how far they have been written. */
static const void *written(const struct tierd_ring *ring, uint64_t *ret_head)
{
	const struct perf_event_mmap_page *page = ring->map;

	*ret_head = __atomic_load_n(&page->data_head, __ATOMIC_ACQUIRE);
	return (const uint8_t *)page + page->data_offset;
}

static void give_back(struct tierd_ring *ring)
{
	struct perf_event_mmap_page *page = ring->map;

	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	__atomic_store_n(&page->data_tail, ring->cursor.tail, __ATOMIC_RELAXED);
}

int tierd_read_ring(struct tierd_ring *ring, const struct tierd_layout *layout, uint32_t capacity,
		    struct tierd_record *ret_records)
{
	const void *data;
	uint64_t head;
	int count;

	if (!ring->map)
		return -EBADF;
	data = written(ring, &head);
	count = tierd_decode_records(layout, data, ring->data_bytes, head, capacity, &ring->cursor,
				     ret_records);
	give_back(ring);
	return count;
}

int tierd_read_traces(struct tierd_ring *ring, uint32_t capacity, struct tierd_trace *ret_traces)
{
	const void *data;
	uint64_t head;
	int count;

	if (!ring->map)
		return -EBADF;
	data = written(ring, &head);
	count = tierd_decode_traces(data, ring->data_bytes, head, capacity, &ring->cursor,
				    ret_traces);
	give_back(ring);
	return count;
}

/* Reads what SPE has written; the counts of what was amiss go on in the ring's cursor. */
static int read_packets(struct tierd_ring *ring, uint32_t capacity,
			struct tierd_access *ret_accesses)
{
	struct perf_event_mmap_page *page = ring->map;
	struct tierd_cursor cursor = ring->cursor;
	uint64_t head = __atomic_load_n(&page->aux_head, __ATOMIC_ACQUIRE);
	int count;

	cursor.tail = ring->aux_tail;
	count = tierd_decode_packets(ring->aux, ring->aux_bytes, head, ring->flags, capacity,
				     &cursor, ret_accesses);
	ring->aux_tail = cursor.tail;
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	__atomic_store_n(&page->aux_tail, ring->aux_tail, __ATOMIC_RELAXED);
	cursor.tail = ring->cursor.tail;
	ring->cursor = cursor;
	/* perf_aux_output_end() has turned the event off if the area was full. */
	ioctl(ring->fd, PERF_EVENT_IOC_ENABLE, 0);
	return count;
}

int tierd_read_accesses(struct tierd_ring *ring, uint32_t capacity,
			struct tierd_access *ret_accesses)
{
	const void *data;
	uint64_t head;
	int count;

	if (!ring->map)
		return -EBADF;
	data = written(ring, &head);
	count = tierd_decode_accesses(data, ring->data_bytes, head, capacity, &ring->cursor,
				      ret_accesses);
	give_back(ring);
	return ring->aux ? read_packets(ring, capacity, ret_accesses) : count;
}

void tierd_close_ring(struct tierd_ring *ring)
{
	if (!ring->map)
		return;
	if (ring->aux)
		munmap(ring->aux, ring->aux_bytes);
	munmap(ring->map, sysconf(_SC_PAGESIZE) + ring->data_bytes);
	close_events(ring);
	ring->map = ring->aux = NULL;
	ring->fd = ring->leader = -1;
}
