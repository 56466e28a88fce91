/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What programs do with an arena's blocks: hold, read, write and give them up.
 */
#include "arena.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define AHEAD 16 /* ids whose words are on their way to the cache, as atomics would wait for each */

/*
 * Sums a block in four lanes that don't wait for each other. Each step is a bijection of the lane, so
 * no single word can change unseen; it is against accidents, not attackers.
 */
uint64_t sum_block(const void *block, uint64_t bytes)
{
	uint64_t lanes[4] = { 1, 2, 3, 4 };
	const char *at = block;

	for (uint64_t done = 0; done < bytes; done += sizeof(lanes)) {
		uint64_t words[4];

		memcpy(words, at + done, sizeof(words));
		for (int i = 0; i < 4; i++) {
			lanes[i] = (lanes[i] ^ words[i]) * 0x9e3779b97f4a7c15ULL;
			lanes[i] ^= lanes[i] >> 29;
		}
	}
	for (int i = 1; i < 4; i++)
		lanes[0] = (lanes[0] ^ lanes[i]) * 0x2545f4914f6cdd1dULL;
	lanes[0] ^= lanes[0] >> 32;
	return lanes[0] == UNKNOWN ? ~0ULL : lanes[0];
}

void tierd_sum_blocks(const void *data, uint64_t block_bytes, size_t count, uint64_t *ret_sums)
{
	for (size_t i = 0; i < count; i++)
		ret_sums[i] = sum_block((const char *)data + i * block_bytes, block_bytes);
}

static void count_touch(struct tierd_arena *arena, int64_t id)
{
	__atomic_fetch_add(&arena->counts[id], 1, __ATOMIC_RELAXED);
}

static void init_locks(struct tierd_arena *arena)
{
	pthread_condattr_t monotonic;

	pthread_condattr_init(&monotonic);
	pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
	pthread_mutex_init(&arena->lock, NULL);
	pthread_cond_init(&arena->work, &monotonic);
	pthread_cond_init(&arena->done, &monotonic);
	pthread_cond_init(&arena->departed, &monotonic);
	pthread_condattr_destroy(&monotonic);
}

int tierd_open_arena(uint64_t block_bytes, uint32_t blocks, uint32_t flags, uint32_t *counts,
		     uint8_t *places, struct tierd_arena **ret_arena)
{
	struct tierd_arena *arena;

	if (block_bytes == 0 || block_bytes % TIERD_BLOCK_UNIT || blocks == 0 || blocks > INT32_MAX ||
	    flags & ~TIERD_SUMS)
		return -EINVAL;
	arena = calloc(1, sizeof(*arena));
	if (!arena)
		return -ENOMEM;
	*arena = (struct tierd_arena){
		.block_bytes = block_bytes,
		.blocks = blocks,
		.flags = flags,
		.counts = counts,
		.places = places,
		.words = calloc(blocks, sizeof(*arena->words)),
		.seen = calloc(blocks, sizeof(*arena->seen)),
		.jobs = calloc(blocks, sizeof(*arena->jobs)),
		.queue = calloc(blocks, sizeof(*arena->queue)),
	};
	init_locks(arena);
	if (!arena->words || !arena->seen || !arena->jobs || !arena->queue) {
		tierd_close_arena(arena);
		return -ENOMEM;
	}
	memset(places, TIERD_NOWHERE, blocks);
	*ret_arena = arena;
	return 0;
}

static void free_space(struct space *space)
{
	free(space->stack);
	free(space->owner);
	free(space->sums);
	free(space->empty);
	*space = (struct space){ 0 };
}

int tierd_add_tier(struct tierd_arena *arena, void *memory, uint64_t device, uint32_t slots,
		   uint32_t spare)
{
	struct space *space = &arena->spaces[arena->tiers];

	if (arena->tiers == TIERD_TIERS || slots == 0 || spare >= slots || (memory && device))
		return -EINVAL;
	*space = (struct space){
		.base = memory ? (uint64_t)(uintptr_t)memory : device,
		.memory = memory,
		.slots = slots,
		.spare = spare,
		.free = slots,
		.stack = calloc(slots, sizeof(*space->stack)),
		.owner = calloc(slots, sizeof(*space->owner)),
		.sums = calloc(slots, sizeof(*space->sums)),
		.empty = calloc(slots, sizeof(*space->empty)),
	};
	if (!space->stack || !space->owner || !space->sums || !space->empty) {
		free_space(space);
		return -ENOMEM;
	}
	for (uint32_t i = 0; i < slots; i++) {
		space->stack[i] = slots - 1 - i;
		space->owner[i] = NOBODY;
	}
	if (memory)
		arena->reach |= 1U << arena->tiers;
	return (int)arena->tiers++;
}

void tierd_close_arena(struct tierd_arena *arena)
{
	for (uint32_t i = 0; i < arena->tiers; i++)
		free_space(&arena->spaces[i]);
	pthread_cond_destroy(&arena->work);
	pthread_cond_destroy(&arena->done);
	pthread_cond_destroy(&arena->departed);
	pthread_mutex_destroy(&arena->lock);
	free(arena->words);
	free(arena->seen);
	free(arena->jobs);
	free(arena->queue);
	free(arena);
}

int tierd_touch_blocks(struct tierd_arena *arena, const int64_t *ids, size_t count)
{
	if (!all_in_range(arena, ids, count))
		return -EINVAL;
	for (size_t i = 0; i < count; i++)
		count_touch(arena, ids[i]);
	return 0;
}

/* Gives a new block the fastest memory that has room, to its one writer. */
static int place_new(struct tierd_arena *arena, uint32_t block, uint64_t *ret_word)
{
	uint64_t expected = 0, word = 0;
	int ret = -ENOSPC;

	pthread_mutex_lock(&arena->lock);
	for (uint32_t tier = 0; tier < arena->tiers && ret < 0; tier++) {
		struct space *space = &arena->spaces[tier];
		uint32_t slot;

		if (!space->memory || take_slot(space, space->spare, &slot) < 0)
			continue;
		word = place_word(tier, slot) | WRITING;
		if (swap_word(arena, block, &expected, word)) {
			space->owner[slot] = block;
			arena->places[block] = (uint8_t)tier;
			ret = 0;
		} else {
			give_slot(space, slot);
			ret = -EBUSY; /* another one was first */
			break;
		}
	}
	pthread_mutex_unlock(&arena->lock);
	if (ret == 0)
		*ret_word = word;
	return ret;
}

static int pin_reader(struct tierd_arena *arena, uint32_t block, uint32_t reach, uint64_t *ret_word)
{
	uint64_t word = load_word(arena, block);

	do {
		if (!(word & LIVE))
			return -ENOENT;
		if (!is_in(word, reach))
			return -EXDEV;
		if (word & WRITING || (word & PINS) == PINS)
			return -EBUSY;
	} while (!swap_word(arena, block, &word, word + PIN));
	*ret_word = word;
	return 0;
}

/* A new block is in memory, whatever is to be reached. */
static int pin_writer(struct tierd_arena *arena, uint32_t block, uint32_t reach, int *ret_is_new,
		      uint64_t *ret_word)
{
	uint64_t word = load_word(arena, block);

	*ret_is_new = !(word & LIVE);
	if (*ret_is_new)
		return place_new(arena, block, ret_word);
	do {
		if (!(word & LIVE))
			return -EBUSY; /* given up by another one just now */
		if (!is_in(word, reach))
			return -EXDEV;
		if (word & (WRITING | PINS))
			return -EBUSY;
	} while (!swap_word(arena, block, &word, (word & ~CLAIM) | WRITING));
	/* A copy that has any of what is written from here on finds its claim gone (switch_block()). */
	__atomic_thread_fence(__ATOMIC_RELEASE);
	*ret_word = word;
	return 0;
}

static int unpin_reader(struct tierd_arena *arena, uint32_t block)
{
	uint64_t word = load_word(arena, block);

	do {
		if (!(word & PINS))
			return -EALREADY;
	} while (!swap_word(arena, block, &word, word - PIN));
	return 0;
}

static int unpin_writer(struct tierd_arena *arena, uint32_t block)
{
	uint64_t word = load_word(arena, block);
	struct space *space = &arena->spaces[tier_of(word)];

	if (!(word & WRITING))
		return -EALREADY;
	if (!space->memory)
		space->sums[slot_of(word)] = UNKNOWN;
	else if (arena->flags & TIERD_SUMS)
		space->sums[slot_of(word)] = sum_block(
			memory_of(arena, tier_of(word), slot_of(word)), arena->block_bytes);
	while (!swap_word(arena, block, &word, word & ~WRITING))
		;
	return 0;
}

/* Of a block that the caller has pinned. Returns 0 or -EBADMSG. */
static int check_pinned(const struct tierd_arena *arena, uint64_t word, const void *copy)
{
	if (!(arena->flags & TIERD_SUMS) || !is_in(word, arena->reach))
		return 0;
	return arena->spaces[tier_of(word)].sums[slot_of(word)] ==
			       sum_block(copy, arena->block_bytes) ?
		       0 :
		       -EBADMSG;
}

static int pin_block(struct tierd_arena *arena, uint32_t block, uint32_t mode, uint32_t reach,
		     void **ret_address)
{
	uint64_t word, address;
	int ret, is_new = 0;

	ret = mode == TIERD_WRITE ? pin_writer(arena, block, reach, &is_new, &word) :
				    pin_reader(arena, block, reach, &word);
	if (ret < 0)
		return ret;
	address = arena->spaces[tier_of(word)].base + slot_of(word) * arena->block_bytes;
	if (is_new) {
		memset(memory_of(arena, tier_of(word), slot_of(word)), 0, arena->block_bytes);
		if (!is_in(word, reach)) {
			unpin_writer(arena, block);
			return -EXDEV; /* it is there, and comes to where it is wanted as others do */
		}
	}
	if (mode == TIERD_READ) {
		ret = check_pinned(arena, word, (const void *)(uintptr_t)address);
		if (ret < 0) {
			unpin_reader(arena, block);
			return ret;
		}
	}
	*ret_address = (void *)(uintptr_t)address;
	return 0;
}

int64_t tierd_pin_blocks(struct tierd_arena *arena, const int64_t *ids, size_t count, uint32_t mode,
			 uint32_t on, void **ret_addresses, int32_t *ret_why)
{
	uint32_t reach = on == TIERD_MEMORY ? arena->reach : 1U << on % TIERD_TIERS;
	int why = 0;
	size_t i;

	if (mode > TIERD_WRITE || !all_in_range(arena, ids, count) ||
	    (on != TIERD_MEMORY && (on >= arena->tiers || !arena->spaces[on].base)))
		return -EINVAL;
	for (i = 0; i < count; i++) {
		if (i + AHEAD < count) {
			__builtin_prefetch(&arena->words[ids[i + AHEAD]], 1);
			__builtin_prefetch(&arena->counts[ids[i + AHEAD]], 1);
		}
		why = pin_block(arena, (uint32_t)ids[i], mode, reach, &ret_addresses[i]);
		if (why < 0)
			break;
		count_touch(arena, ids[i]);
	}
	*ret_why = why;
	return (int64_t)i;
}

int tierd_unpin_blocks(struct tierd_arena *arena, const int64_t *ids, size_t count, uint32_t mode)
{
	int ret = 0;

	if (mode > TIERD_WRITE || !all_in_range(arena, ids, count))
		return -EINVAL;
	for (size_t i = 0; i < count; i++) {
		int unpinned;

		if (i + AHEAD < count)
			__builtin_prefetch(&arena->words[ids[i + AHEAD]], 1);
		unpinned = mode == TIERD_WRITE ? unpin_writer(arena, (uint32_t)ids[i]) :
						     unpin_reader(arena, (uint32_t)ids[i]);

		if (unpinned < 0)
			ret = unpinned;
	}
	return ret;
}

static int read_block(struct tierd_arena *arena, uint32_t block, void *into)
{
	uint64_t word;
	int ret = pin_reader(arena, block, arena->reach, &word);

	if (ret < 0)
		return ret;
	memcpy(into, memory_of(arena, tier_of(word), slot_of(word)), arena->block_bytes);
	ret = check_pinned(arena, word, into);
	unpin_reader(arena, block);
	return ret;
}

static int write_block(struct tierd_arena *arena, uint32_t block, const void *from)
{
	uint64_t word;
	int is_new, ret = pin_writer(arena, block, arena->reach, &is_new, &word);

	if (ret < 0)
		return ret;
	memcpy(memory_of(arena, tier_of(word), slot_of(word)), from, arena->block_bytes);
	return unpin_writer(arena, block);
}

int64_t tierd_read_blocks(struct tierd_arena *arena, const int64_t *ids, size_t count, void *into,
			  int32_t *ret_why)
{
	int why = 0;
	size_t i;

	if (!all_in_range(arena, ids, count))
		return -EINVAL;
	for (i = 0; i < count; i++) {
		why = read_block(arena, (uint32_t)ids[i], (char *)into + i * arena->block_bytes);
		if (why < 0)
			break;
		count_touch(arena, ids[i]);
	}
	*ret_why = why;
	return (int64_t)i;
}

int64_t tierd_write_blocks(struct tierd_arena *arena, const int64_t *ids, size_t count,
			   const void *from, int32_t *ret_why)
{
	int why = 0;
	size_t i;

	if (!all_in_range(arena, ids, count))
		return -EINVAL;
	for (i = 0; i < count; i++) {
		why = write_block(arena, (uint32_t)ids[i],
				  (const char *)from + i * arena->block_bytes);
		if (why < 0)
			break;
		count_touch(arena, ids[i]);
	}
	*ret_why = why;
	return (int64_t)i;
}

int64_t tierd_drop_blocks(struct tierd_arena *arena, const int64_t *ids, size_t count,
			  int32_t *ret_why)
{
	int why = 0;
	size_t i;

	if (!all_in_range(arena, ids, count))
		return -EINVAL;
	for (i = 0; i < count && why == 0; i++) {
		uint32_t block = (uint32_t)ids[i];
		uint64_t word = load_word(arena, block);

		do {
			why = !(word & LIVE) ? -ENOENT : word & (WRITING | PINS) ? -EBUSY : 0;
		} while (why == 0 && !swap_word(arena, block, &word, 0));
		if (why < 0)
			break;
		pthread_mutex_lock(&arena->lock);
		/* Where it was written anew meanwhile, its owner has told of the new place. */
		if (!(load_word(arena, block) & LIVE))
			arena->places[block] = TIERD_NOWHERE;
		give_slot(&arena->spaces[tier_of(word)], slot_of(word));
		pthread_mutex_unlock(&arena->lock);
	}
	*ret_why = why;
	return (int64_t)i;
}
