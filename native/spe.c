/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What Arm's Statistical Profiling Extension writes, decoded into accesses.
 *
 * Follows "Statistical Profiling Extension Sample Record Specification" in the Arm Architecture
 * Reference Manual (DDI 0487), and how tools/perf/util/arm-spe-decoder reads it. A record is a row
 * of packets up to one that ends it; a packet is a header, one byte or two, and a payload whose
 * size the header tells, lowest byte first. Of a load:
 *
 *     65 80 02 00 00              context, of EL2: thread 640
 *     49 00                       operation: a load
 *     42 16                       events
 *     98 36 01                    counter 0: 310 cycles altogether
 *     b2 34 12 00 00 00 7f 00 00  address 2: virtual
 *     b3 00 10 00 00 00 00 00 80  address 3: physical, not secure
 *     43 0e                       data source
 *     01                          the end
 */
#include "tierd.h"

#include <errno.h>
#include <linux/perf_event.h>
#include <stdbool.h>

#define EXTENDED 0x20 /* of the first byte of two, which has two more bits of the index */
#define EXTENDED_MASK 0xfc
#define SHORT_INDEX 0x07
#define SIZE_SHIFT 4 /* of the payload's size, as a power of two */
#define SIZE_MASK 3

#define ADDRESS_VIRTUAL 2
#define ADDRESS_PHYSICAL 3
#define ADDRESS_BITS 0x00ffffffffffffff /* the top byte is a tag, or tells the address space */
#define ADDRESS_OF_KERNEL 0x0080000000000000
#define COUNTER_TOTAL 0
#define OPERATION_ACCESS 1
#define OPERATION_STORE 1
#define SOURCE_DRAM 0x0e

enum kind { BAD, PAD, END, TIMESTAMP, EVENTS, SOURCE, CONTEXT, OPERATION, ADDRESS, COUNTER };

struct packet {
	enum kind kind;
	uint32_t index;
	uint64_t payload;
};

/* Positions count up for ever and wrap around, as in a perf ring. */
struct trace {
	const uint8_t *bytes;
	uint64_t mask;
	uint64_t head;
};

/* What the packets of one record have told. */
struct record {
	uint64_t addr;
	uint64_t phys_addr;
	uint64_t source;
	uint32_t op;
	uint32_t tid;
	uint32_t cycles;
	uint32_t addresses; /* a bit for each kind that has come */
	bool begun;
};

static uint64_t load(const struct trace *trace, uint64_t at, uint32_t bytes)
{
	uint64_t value = 0;

	for (uint32_t i = 0; i < bytes; i++)
		value |= (uint64_t)trace->bytes[(at + i) & trace->mask] << (8 * i);
	return value;
}

static enum kind kind_of(uint8_t header)
{
	if (header == 0x00)
		return PAD;
	if (header == 0x01)
		return END;
	if (header == 0x71)
		return TIMESTAMP;
	if ((header & 0xcf) == 0x42)
		return EVENTS;
	if ((header & 0xcf) == 0x43)
		return SOURCE;
	if ((header & 0xfc) == 0x64)
		return CONTEXT;
	if ((header & 0xfc) == 0x48)
		return OPERATION;
	if ((header & 0xf8) == 0xb0)
		return ADDRESS;
	if ((header & 0xf8) == 0x98)
		return COUNTER;
	return BAD;
}

static uint32_t index_of(enum kind kind, uint8_t header)
{
	return kind == CONTEXT || kind == OPERATION ? header & 0x03 : header & SHORT_INDEX;
}

/* Returns the size of a packet whose header has two bytes, 0 if it is none. */
static uint32_t read_extended(const struct trace *trace, uint64_t at, struct packet *ret_packet)
{
	uint8_t first = (uint8_t)load(trace, at, 1), second = (uint8_t)load(trace, at + 1, 1);
	uint32_t alignment = 2u << (first & 0x0f);
	enum kind kind = kind_of(second);
	uint32_t bytes = 1u << (second >> SIZE_SHIFT & SIZE_MASK);

	if (kind == PAD) { /* up to where an address of so many bytes begins */
		*ret_packet = (struct packet){ .kind = PAD };
		return alignment - (uint32_t)(at & (alignment - 1));
	}
	if (kind != ADDRESS && kind != COUNTER)
		return 0;
	*ret_packet = (struct packet){ .kind = kind,
				       .index = (first & 0x03) << 3 | (second & SHORT_INDEX),
				       .payload = load(trace, at + 2, bytes) };
	return 2 + bytes;
}

static uint32_t read_short(const struct trace *trace, uint64_t at, struct packet *ret_packet)
{
	uint8_t header = (uint8_t)load(trace, at, 1);
	enum kind kind = kind_of(header);
	uint32_t bytes = kind == PAD || kind == END ? 0 : 1u << (header >> SIZE_SHIFT & SIZE_MASK);

	if (kind == BAD)
		return 0;
	*ret_packet = (struct packet){ .kind = kind,
				       .index = index_of(kind, header),
				       .payload = load(trace, at + 1, bytes) };
	return 1 + bytes;
}

/* Returns the size of the packet at a position, 0 if there is none, or not all of it. */
static uint32_t read_packet(const struct trace *trace, uint64_t at, struct packet *ret_packet)
{
	bool extended = (load(trace, at, 1) & EXTENDED_MASK) == EXTENDED;
	uint32_t size = extended ? read_extended(trace, at, ret_packet) :
				   read_short(trace, at, ret_packet);

	return size <= trace->head - at ? size : 0;
}

/* Returns false where the packet is of another record, so that the end of this one is missing. */
static bool add_address(const struct packet *packet, struct record *record)
{
	if (record->addresses & 1u << packet->index)
		return false;
	record->addresses |= 1u << packet->index;
	if (packet->index == ADDRESS_VIRTUAL && !(packet->payload & ADDRESS_OF_KERNEL))
		record->addr = packet->payload & ADDRESS_BITS;
	if (packet->index == ADDRESS_PHYSICAL)
		record->phys_addr = packet->payload & ADDRESS_BITS;
	return true;
}

static bool add(const struct packet *packet, struct record *record)
{
	record->begun |= packet->kind != PAD;
	switch (packet->kind) {
	case ADDRESS:
		return add_address(packet, record);
	case CONTEXT: /* that of EL1 or of EL2: the kernel writes its own level's */
		if (packet->payload)
			record->tid = (uint32_t)packet->payload;
		return true;
	case COUNTER:
		if (packet->index == COUNTER_TOTAL)
			record->cycles = (uint32_t)packet->payload;
		return true;
	case OPERATION:
		record->op = 0;
		if (packet->index == OPERATION_ACCESS)
			record->op = packet->payload & OPERATION_STORE ? PERF_MEM_OP_STORE :
									 PERF_MEM_OP_LOAD;
		return true;
	case SOURCE:
		record->source = packet->payload;
		return true;
	default:
		return true;
	}
}

static uint64_t data_source(const struct record *record, uint32_t flags)
{
	union perf_mem_data_src source = { .mem_op = record->op };

	if (flags & TIERD_SPE_SOURCES && record->op == PERF_MEM_OP_LOAD &&
	    record->source == SOURCE_DRAM)
		source.mem_lvl_num = PERF_MEM_LVLNUM_RAM;
	return source.val;
}

/* Returns 1 when the record is of an access to an address of user space, else 0. */
static int finish(const struct record *record, uint32_t flags, struct tierd_cursor *cursor,
		  struct tierd_access *ret_access)
{
	if (!record->op || !record->addr)
		return 0;
	*ret_access = (struct tierd_access){
		.addr = record->addr,
		.phys_addr = record->phys_addr,
		.source = data_source(record, flags),
		.tid = record->tid,
		.weight = record->cycles,
		.lost = cursor->gap,
	};
	cursor->gap = 0;
	return 1;
}

static void note_corrupt(struct tierd_cursor *cursor)
{
	cursor->corrupt++;
	cursor->gap += cursor->gap < UINT32_MAX;
}

/*
 * Takes in one record. What can't be read is skipped byte by byte up to where another record ends:
 * only what follows is trusted again.
 */
static int take(const struct trace *trace, uint32_t flags, struct tierd_cursor *cursor,
		struct tierd_access *ret_access)
{
	struct record record = { 0 };
	bool whole = true;

	while (cursor->tail != trace->head) {
		struct packet packet = { .kind = BAD };
		uint32_t size = read_packet(trace, cursor->tail, &packet);

		cursor->tail += size ? size : 1;
		if (size && (packet.kind == END || packet.kind == TIMESTAMP))
			return whole ? finish(&record, flags, cursor, ret_access) : 0;
		if (whole && !(size && add(&packet, &record))) {
			note_corrupt(cursor);
			whole = false;
		}
	}
	if (whole && record.begun)
		note_corrupt(cursor);
	return 0;
}

int tierd_decode_packets(const void *data, uint64_t data_bytes, uint64_t head, uint32_t flags,
			 uint32_t capacity, struct tierd_cursor *cursor,
			 struct tierd_access *ret_accesses)
{
	const struct trace trace = { .bytes = data, .mask = data_bytes - 1, .head = head };
	uint32_t count = 0;

	if (data_bytes < 8 || data_bytes & (data_bytes - 1) || capacity > INT32_MAX)
		return -EINVAL;
	if (head - cursor->tail > data_bytes) {
		note_corrupt(cursor);
		cursor->tail = head;
	}
	while (cursor->tail != head && count < capacity)
		count += (uint32_t)take(&trace, flags, cursor, ret_accesses + count);
	return (int)count;
}
