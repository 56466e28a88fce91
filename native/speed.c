/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How fast a node's memory is: a buffer on it, a chase of pointers through it, and streams.
 */
#include "tierd.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#ifdef __x86_64__
#include <emmintrin.h>
#endif

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* of Linux 5.14 */
#endif
#ifndef MADV_DONTNEED_LOCKED
#define MADV_DONTNEED_LOCKED 24 /* of Linux 5.18 */
#endif

#define NODES 1024 /* MAX_NUMNODES with NODES_SHIFT=10, the most that a kernel can be built for */
#define LOADS 1024 /* from one look at the clock to the next */

#define MASK_BITS (8 * sizeof(unsigned long))
#define SLOTS (TIERD_WINDOW_BYTES / TIERD_SLOT_BYTES)

static int set_policy(void *buffer, uint64_t bytes, int mode, int32_t node, unsigned int flags)
{
	unsigned long mask[NODES / MASK_BITS] = { 0 };

	mask[(size_t)node / MASK_BITS] = 1UL << ((size_t)node % MASK_BITS);
	/* The kernel counts one bit less than it is told (get_nodes() in mm/mempolicy.c). */
	return syscall(SYS_mbind, buffer, bytes, mode, mask, NODES + 1, flags) < 0 ? -errno : 0;
}

int tierd_place_buffer(void *buffer, uint64_t bytes, int32_t node)
{
	int ret;

	if (node < 0 || node >= NODES)
		return -EINVAL;
	ret = set_policy(buffer, bytes, MPOL_PREFERRED, node, 0);
	if (ret < 0)
		return ret;
	madvise(buffer, bytes, MADV_HUGEPAGE); /* slower pages are as right */
	if (madvise(buffer, bytes, MADV_POPULATE_WRITE) < 0)
		return -errno;
	ret = set_policy(buffer, bytes, MPOL_BIND, node, MPOL_MF_STRICT);
	if (ret == 0)
		mlock(buffer, bytes); /* where a limit forbids it, reclaim is only less likely */
	return ret;
}

int tierd_prefer_node(void *buffer, uint64_t bytes, int32_t node)
{
	if (node < 0 || node >= NODES)
		return -EINVAL;
	return set_policy(buffer, bytes, MPOL_PREFERRED, node, 0);
}

int tierd_free_pages(void *buffer, uint64_t block_bytes, const int64_t *blocks, size_t count)
{
	for (size_t i = 0; i < count; i++) {
		char *at = (char *)buffer + (uint64_t)blocks[i] * block_bytes;

		if (madvise(at, block_bytes, MADV_DONTNEED_LOCKED) < 0)
			return -errno;
	}
	return 0;
}

/* xorshift64*: fast, and good enough to choose slots with. */
static uint64_t next_random(uint64_t *state)
{
	*state ^= *state >> 12;
	*state ^= *state << 25;
	*state ^= *state >> 27;
	return *state * 0x2545f4914f6cdd1dULL;
}

/* Orders 0 to count - 1 at random, but for the 0, which stays first. */
static void shuffle(uint16_t *order, size_t count, uint64_t *random)
{
	for (size_t i = 0; i < count; i++)
		order[i] = (uint16_t)i;
	for (size_t i = count - 1; i > 1; i--) {
		size_t other = 1 + (next_random(random) >> 32) % i;
		uint16_t taken = order[i];

		order[i] = order[other];
		order[other] = taken;
	}
}

static void **slot_at(void *window, size_t slot)
{
	return (void **)((char *)window + slot * TIERD_SLOT_BYTES);
}

int64_t tierd_link_slots(void *buffer, uint64_t bytes, uint64_t seed)
{
	uint64_t slots = bytes / TIERD_SLOT_BYTES;
	uint16_t order[SLOTS];

	if (slots == 0 || seed == 0)
		return -EINVAL;
	for (uint64_t done = 0; done < slots; done += SLOTS) {
		size_t count = slots - done < SLOTS ? slots - done : SLOTS;
		void *window = (char *)buffer + done * TIERD_SLOT_BYTES;
		void *behind = slot_at(window, count);

		shuffle(order, count, &seed);
		for (size_t i = 0; i + 1 < count; i++)
			*slot_at(window, order[i]) = slot_at(window, order[i + 1]);
		*slot_at(window, order[count - 1]) = done + count < slots ? behind : buffer;
	}
	return (int64_t)slots;
}

static uint64_t now_ns(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

/* Waits awake, so that the CPU's clock is up. Returns when that ended. */
static uint64_t wait_until(uint64_t begin_ns)
{
	uint64_t now = now_ns();

	while (now < begin_ns)
		now = now_ns();
	return now;
}

int tierd_follow_slots(const void *buffer, uint64_t first, uint64_t begin_ns, uint64_t end_ns,
		       struct tierd_pace *ret_pace)
{
	const void *const volatile *at = (const void *)((const char *)buffer + first);
	uint64_t begun = wait_until(begin_ns);
	uint64_t count = 0, now;

	do {
		for (int i = 0; i < LOADS; i++)
			at = *at;
		count += LOADS;
		now = now_ns();
	} while (now < end_ns);
	*ret_pace = (struct tierd_pace){
		.count = count,
		.ns = now - begun,
		.next = (uint64_t)((const char *)at - (const char *)buffer),
	};
	return 0;
}

/* Reads every word of a block, in sums that don't wait for each other. */
static void read_block(void *block)
{
	const uint64_t *words = block;
	uint64_t a = 0, b = 0, c = 0, d = 0;

	for (size_t i = 0; i < TIERD_BLOCK_BYTES / sizeof(*words); i += 4) {
		a += words[i];
		b += words[i + 1];
		c += words[i + 2];
		d += words[i + 3];
	}
	__asm__ volatile("" : : "r"(a + b + c + d)); /* somebody wants it */
}

/* Writes every word of a block, past the caches where the CPU has stores for that. */
static void write_block(void *block)
{
	uint64_t *words = block;

	for (size_t i = 0; i < TIERD_BLOCK_BYTES / sizeof(*words); i++)
#ifdef __x86_64__
		_mm_stream_si64((long long *)&words[i], (long long)i);
#else
		words[i] = i;
#endif
}

static int stream(void *buffer, uint64_t bytes, uint64_t begin_ns, uint64_t end_ns,
		  void (*pass)(void *block), struct tierd_pace *ret_pace)
{
	uint64_t begun, now, count = 0;

	if (bytes == 0 || bytes % TIERD_BLOCK_BYTES)
		return -EINVAL;
	begun = wait_until(begin_ns);
	do {
		pass((char *)buffer + count % bytes);
		count += TIERD_BLOCK_BYTES;
		now = now_ns();
	} while (now < end_ns);
	*ret_pace = (struct tierd_pace){ .count = count, .ns = now - begun };
	return 0;
}

int tierd_stream_reads(void *buffer, uint64_t bytes, uint64_t begin_ns, uint64_t end_ns,
		       struct tierd_pace *ret_pace)
{
	return stream(buffer, bytes, begin_ns, end_ns, read_block, ret_pace);
}

int tierd_stream_writes(void *buffer, uint64_t bytes, uint64_t begin_ns, uint64_t end_ns,
			struct tierd_pace *ret_pace)
{
	return stream(buffer, bytes, begin_ns, end_ns, write_block, ret_pace);
}
