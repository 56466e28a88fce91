/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Arenas: blocks with identities, in slots of tiers, that move while programs use them.
 *
 * All that has to be right about a block is in one word: where it is, who holds it, and which mover
 * has a copy of it under way. A mover copies without holding anything up, and then swaps the word
 * only where its own claim is still in it and nobody holds the block: who writes a block, or gives it
 * up, takes the claim out. So no number of writes can make a stale copy look fresh, and a reader's
 * pin and the place that it reads from come with the same compare-and-swap.
 */
#include "tierd.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PIN 1ULL
#define PINS 0x7fffULL /* bits 0 to 14: readers */
#define WRITING (1ULL << 15)
#define LIVE (1ULL << 16)
#define CLAIM_SHIFT 17 /* bits 17 to 24: the mover that copies it, from 1 */
#define CLAIM (0xffULL << CLAIM_SHIFT)
#define TIER_SHIFT 28 /* bits 28 to 31 */
#define SLOT_SHIFT 32 /* bits 32 to 63 */
#define PLACE (~0ULL << TIER_SHIFT)

#define NOBODY UINT32_MAX
#define NO_TIER TIERD_TIERS
#define UNKNOWN 0 /* the sum of what was written where the CPU does not see it; sum_block() is never 0 */
#define AHEAD 16 /* ids whose words are on their way to the cache, as atomics would wait for each */
#define TRIES 8 /* so often a block that finds its tier full has others make way, and then stays */

enum { RESTS, QUEUED, UNDER_WAY };

/*
 * A tier's slots, from @base on, which is @memory where the CPU reaches them. What is free is a stack;
 * @owner and @sums are of whoever has the slot.
 */
struct space {
	uint64_t base;
	char *memory;
	uint32_t slots;
	uint32_t spare;
	uint32_t free;
	uint32_t hand;
	int closed;
	uint32_t *stack;
	uint32_t *owner;
	uint64_t *sums;
};

/* What is to become of a block, under the lock. */
struct job {
	uint8_t state;
	uint8_t tier;
	uint8_t tries;
	uint8_t leaves; /* to make room, and counted in @leaving */
	uint8_t goes_on; /* to @tier, from the memory that it passes through */
	int8_t outcome; /* negative errno of the last move, or 0 */
};

struct tierd_arena {
	uint64_t block_bytes;
	uint32_t blocks;
	uint32_t tiers;
	uint32_t flags;
	uint32_t reach; /* a bit for each tier that the CPU reaches */
	uint32_t *counts; /* shared: only ever added to */
	uint8_t *places; /* shared: only ever written */
	uint64_t *words;
	uint32_t *seen;
	struct job *jobs;
	uint32_t *queue; /* a ring with room for every block, as none is in it twice */
	uint32_t head;
	uint32_t queued;
	uint32_t leaving;
	int stopping;
	struct space spaces[TIERD_TIERS];
	struct tierd_moves tally;
	pthread_mutex_t lock;
	pthread_cond_t work;
	pthread_cond_t done;
};

static uint32_t tier_of(uint64_t word)
{
	return word >> TIER_SHIFT & 0xf;
}

static uint32_t slot_of(uint64_t word)
{
	return (uint32_t)(word >> SLOT_SHIFT);
}

static uint64_t place_word(uint32_t tier, uint32_t slot)
{
	return LIVE | (uint64_t)tier << TIER_SHIFT | (uint64_t)slot << SLOT_SHIFT;
}

static uint64_t load_word(const struct tierd_arena *arena, uint32_t block)
{
	return __atomic_load_n(&arena->words[block], __ATOMIC_ACQUIRE);
}

/* On failure @expected is what is there. */
static int swap_word(struct tierd_arena *arena, uint32_t block, uint64_t *expected, uint64_t desired)
{
	return __atomic_compare_exchange_n(&arena->words[block], expected, desired, 0,
					   __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

static char *memory_of(const struct tierd_arena *arena, uint32_t tier, uint32_t slot)
{
	return arena->spaces[tier].memory + slot * arena->block_bytes;
}

static int is_in(uint64_t word, uint32_t reach)
{
	return reach >> tier_of(word) & 1;
}

/*
 * Sums a block in four lanes that don't wait for each other. Each step is a bijection of the lane, so
 * no single word can change unseen; it is against accidents, not attackers.
 */
static uint64_t sum_block(const void *block, uint64_t bytes)
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

static int all_in_range(const struct tierd_arena *arena, const int64_t *ids, size_t count)
{
	uint64_t beyond = 0;

	for (size_t i = 0; i < count; i++)
		beyond |= (uint64_t)ids[i] >= arena->blocks;
	return !beyond;
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
	};
	if (!space->stack || !space->owner || !space->sums) {
		free(space->stack);
		free(space->owner);
		free(space->sums);
		*space = (struct space){ 0 };
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
	for (uint32_t i = 0; i < arena->tiers; i++) {
		free(arena->spaces[i].stack);
		free(arena->spaces[i].owner);
		free(arena->spaces[i].sums);
	}
	pthread_cond_destroy(&arena->work);
	pthread_cond_destroy(&arena->done);
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

/* Takes a slot, leaving @spare of them; under the lock. Returns 0 or -ENOSPC. */
static int take_slot(struct space *space, uint32_t spare, uint32_t *ret_slot)
{
	if (space->closed || space->free <= spare)
		return -ENOSPC;
	*ret_slot = space->stack[--space->free];
	return 0;
}

/* Under the lock. */
static void give_slot(struct space *space, uint32_t slot)
{
	space->owner[slot] = NOBODY;
	space->stack[space->free++] = slot;
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

/* Under the lock. An urgent one is next. */
static void put_in_queue(struct tierd_arena *arena, uint32_t block, uint32_t tier, int is_urgent)
{
	if (is_urgent) {
		arena->head = (arena->head + arena->blocks - 1) % arena->blocks;
		arena->queue[arena->head] = block;
	} else {
		arena->queue[(arena->head + (uint64_t)arena->queued) % arena->blocks] = block;
	}
	arena->queued++;
	arena->jobs[block].state = QUEUED;
	arena->jobs[block].tier = (uint8_t)tier;
}

/* Under the lock, and only where something is queued. */
static uint32_t next_in_queue(const struct tierd_arena *arena)
{
	return arena->queue[arena->head];
}

static uint32_t take_from_queue(struct tierd_arena *arena)
{
	uint32_t block = next_in_queue(arena);

	arena->head = (arena->head + 1) % arena->blocks;
	arena->queued--;
	arena->jobs[block].state = UNDER_WAY;
	return block;
}

int64_t tierd_want_blocks(struct tierd_arena *arena, const int64_t *ids, size_t count, uint32_t tier,
			  uint32_t flags)
{
	int64_t wanted = 0;

	if (tier >= arena->tiers || flags & ~(TIERD_URGENT | TIERD_ABSENT) ||
	    !all_in_range(arena, ids, count))
		return -EINVAL;
	pthread_mutex_lock(&arena->lock);
	for (size_t i = 0; i < count; i++) {
		uint32_t block = (uint32_t)ids[flags & TIERD_URGENT ? count - 1 - i : i];
		uint64_t word = load_word(arena, block);
		struct job *job = &arena->jobs[block];

		if (!(word & LIVE) || job->state != RESTS || tier_of(word) == tier)
			continue;
		if (flags & TIERD_ABSENT && arena->spaces[tier_of(word)].memory)
			continue;
		*job = (struct job){ 0 };
		put_in_queue(arena, block, tier, (int)(flags & TIERD_URGENT));
		wanted++;
	}
	pthread_cond_broadcast(&arena->work);
	pthread_mutex_unlock(&arena->lock);
	return wanted;
}

static struct timespec time_after(uint64_t ns)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	ns += (uint64_t)time.tv_nsec;
	time.tv_sec += (time_t)(ns / 1000000000);
	time.tv_nsec = (long)(ns % 1000000000);
	return time;
}

int tierd_await_blocks(struct tierd_arena *arena, const int64_t *ids, size_t count,
		       uint64_t timeout_ns, int32_t *ret_outcomes)
{
	struct timespec until = time_after(timeout_ns);
	int ret = 0;

	if (!all_in_range(arena, ids, count))
		return -EINVAL;
	pthread_mutex_lock(&arena->lock);
	for (size_t i = 0; i < count && ret == 0; i++)
		while (arena->jobs[ids[i]].state != RESTS && ret == 0)
			ret = -pthread_cond_timedwait(&arena->done, &arena->lock, &until);
	for (size_t i = 0; i < count && ret == 0; i++)
		ret_outcomes[i] = arena->jobs[ids[i]].outcome;
	pthread_mutex_unlock(&arena->lock);
	return ret;
}

/* Puts a mover's claim on a block that nobody holds. Returns 0 or why not. */
static int claim_block(struct tierd_arena *arena, uint32_t block, uint32_t mover, uint64_t *ret_word)
{
	uint64_t word = load_word(arena, block);

	do {
		if (!(word & LIVE))
			return -ENOENT;
		if (word & (WRITING | PINS | CLAIM))
			return -EBUSY;
	} while (!swap_word(arena, block, &word, word | (uint64_t)mover << CLAIM_SHIFT));
	*ret_word = word;
	return 0;
}

static int is_claimed(uint64_t word, uint32_t mover)
{
	return (word & CLAIM) == (uint64_t)mover << CLAIM_SHIFT;
}

static void drop_claim(struct tierd_arena *arena, uint32_t block, uint32_t mover)
{
	uint64_t word = load_word(arena, block);

	while (is_claimed(word, mover) && !swap_word(arena, block, &word, word & ~CLAIM))
		;
}

/* Has a block be where its copy is, if the copy is of what it holds. Returns 0 or -EBUSY. */
static int switch_block(struct tierd_arena *arena, uint32_t block, uint32_t mover, uint32_t tier,
			uint32_t slot)
{
	uint64_t word;
	int ret = 0;

	__atomic_thread_fence(__ATOMIC_ACQUIRE); /* the copy before the look at the claim */
	pthread_mutex_lock(&arena->lock);
	word = load_word(arena, block);
	do {
		if (!is_claimed(word, mover) || word & (WRITING | PINS)) {
			ret = -EBUSY;
			break;
		}
	} while (!swap_word(arena, block, &word, place_word(tier, slot)));
	if (ret == 0) {
		arena->spaces[tier].owner[slot] = block;
		arena->places[block] = (uint8_t)tier;
		/* It came to be used: until then it makes way for nobody. */
		arena->seen[block] = __atomic_load_n(&arena->counts[block], __ATOMIC_RELAXED) - 1;
		give_slot(&arena->spaces[tier_of(word)], slot_of(word));
	} else {
		give_slot(&arena->spaces[tier], slot);
	}
	pthread_mutex_unlock(&arena->lock);
	return ret;
}

/* Tells those who wait what became of a move. */
static void settle_job(struct tierd_arena *arena, uint32_t block, int outcome)
{
	struct job *job = &arena->jobs[block];

	pthread_mutex_lock(&arena->lock);
	if (outcome == 0)
		arena->tally.moved++;
	else if (outcome == -EBUSY || outcome == -ENOENT)
		arena->tally.busy++;
	else if (outcome == -ENOSPC)
		arena->tally.no_room++;
	else
		arena->tally.failed++;
	if (job->state == UNDER_WAY && job->goes_on && outcome == 0) {
		job->goes_on = 0;
		put_in_queue(arena, block, job->tier, 1);
		pthread_cond_signal(&arena->work);
	} else if (job->state == UNDER_WAY) {
		arena->leaving -= job->leaves;
		*job = (struct job){ .outcome = (int8_t)outcome };
	}
	pthread_cond_broadcast(&arena->done);
	pthread_mutex_unlock(&arena->lock);
}

static int try_slot(struct tierd_arena *arena, uint32_t tier, uint32_t *ret_slot)
{
	int ret;

	pthread_mutex_lock(&arena->lock);
	ret = take_slot(&arena->spaces[tier], 0, ret_slot);
	pthread_mutex_unlock(&arena->lock);
	return ret;
}

static void return_slot(struct tierd_arena *arena, uint32_t tier, uint32_t slot)
{
	pthread_mutex_lock(&arena->lock);
	give_slot(&arena->spaces[tier], slot);
	pthread_mutex_unlock(&arena->lock);
}

/* Copies a block from memory into a slot that is the caller's. Returns 0 or why it stays. */
static int move_in_memory(struct tierd_arena *arena, uint32_t block, uint32_t mover, uint32_t tier,
			  uint32_t slot)
{
	struct space *space = &arena->spaces[tier];
	uint64_t word;
	int ret = claim_block(arena, block, mover, &word);

	if (ret == 0 && !arena->spaces[tier_of(word)].memory) {
		drop_claim(arena, block, mover);
		ret = -EXDEV;
	}
	if (ret < 0) {
		return_slot(arena, tier, slot);
		return ret;
	}
	memcpy(memory_of(arena, tier, slot), memory_of(arena, tier_of(word), slot_of(word)),
	       arena->block_bytes);
	if (arena->flags & TIERD_SUMS) {
		uint64_t sum = arena->spaces[tier_of(word)].sums[slot_of(word)];

		space->sums[slot] = sum_block(memory_of(arena, tier, slot), arena->block_bytes);
		/* A copy that a writer has torn has lost its claim. */
		if (space->sums[slot] != sum && is_claimed(load_word(arena, block), mover)) {
			return_slot(arena, tier, slot);
			drop_claim(arena, block, mover);
			return -EBADMSG;
		}
	}
	ret = switch_block(arena, block, mover, tier, slot);
	drop_claim(arena, block, mover);
	return ret;
}

/*
 * Finds blocks of a tier that have not been used since the hand last passed by; under the lock. Those
 * that are held or to be moved are passed over. Two rounds find any that can go.
 */
static uint32_t find_victims(struct tierd_arena *arena, uint32_t tier, uint32_t most,
			     uint32_t *ret_blocks)
{
	struct space *space = &arena->spaces[tier];
	uint32_t found = 0;

	for (uint64_t passed = 0; passed < 2ULL * space->slots && found < most; passed++) {
		uint32_t block = space->owner[space->hand], count;
		uint64_t word;

		space->hand = (space->hand + 1) % space->slots;
		if (block == NOBODY || arena->jobs[block].state != RESTS)
			continue;
		word = load_word(arena, block);
		if (!(word & LIVE) || word & (WRITING | PINS))
			continue;
		count = __atomic_load_n(&arena->counts[block], __ATOMIC_RELAXED);
		if (arena->seen[block] != count) {
			arena->seen[block] = count;
			continue;
		}
		arena->jobs[block] = (struct job){ .state = UNDER_WAY };
		ret_blocks[found++] = block;
	}
	return found;
}

static int has_room(const struct space *space, int is_for_mover)
{
	return !space->closed && space->free > (is_for_mover ? 0 : space->spare);
}

/*
 * Under the lock. Returns where blocks go that make way, the movers' own slots counted or not: to a
 * slower tier, or where none has room up to or from one of a device; else NO_TIER. Without memory on
 * either side there is nothing to copy by.
 */
static uint32_t find_refuge(const struct tierd_arena *arena, uint32_t tier, int is_for_mover)
{
	const struct space *from = &arena->spaces[tier];

	for (uint32_t below = tier + 1; below < arena->tiers; below++)
		if ((from->memory || arena->spaces[below].memory) &&
		    has_room(&arena->spaces[below], is_for_mover))
			return below;
	for (uint32_t above = 0; above < tier; above++) {
		const struct space *to = &arena->spaces[above];

		if (!from->memory != !to->memory && (from->memory ? to : from)->base &&
		    has_room(to, is_for_mover))
			return above;
	}
	return NO_TIER;
}

/* Under the lock. Returns the memory, full now, that blocks of a device's tier make way to, or NO_TIER. */
static uint32_t find_full_refuge(const struct tierd_arena *arena, uint32_t tier)
{
	if (arena->spaces[tier].memory || !arena->spaces[tier].base)
		return NO_TIER;
	for (uint32_t i = 1; i < arena->tiers; i++)
		if (arena->spaces[(tier + i) % arena->tiers].memory)
			return (tier + i) % arena->tiers;
	return NO_TIER;
}

static int gather_block(struct tierd_arena *arena, uint32_t block, uint32_t mover, uint32_t tier,
			void *bounce, struct tierd_batch *batch)
{
	struct space *space = &arena->spaces[tier];
	uint32_t slot;
	uint64_t word, sum;
	int ret = claim_block(arena, block, mover, &word);

	if (ret < 0)
		return ret;
	ret = arena->spaces[tier_of(word)].memory ? try_slot(arena, tier, &slot) : -EXDEV;
	if (ret < 0)
		goto unclaim;
	memcpy((char *)bounce + batch->count * arena->block_bytes,
	       memory_of(arena, tier_of(word), slot_of(word)), arena->block_bytes);
	sum = sum_block((char *)bounce + batch->count * arena->block_bytes, arena->block_bytes);
	if (arena->flags & TIERD_SUMS && arena->spaces[tier_of(word)].sums[slot_of(word)] != sum) {
		ret = is_claimed(load_word(arena, block), mover) ? -EBADMSG : -EBUSY;
		return_slot(arena, tier, slot);
		goto unclaim;
	}
	space->sums[slot] = sum;
	batch->blocks[batch->count] = block;
	batch->slots[batch->count] = slot;
	batch->count++;
	return 0;
unclaim:
	drop_claim(arena, block, mover);
	return ret;
}

/* Claims blocks and has their bytes in the bounce buffer. Those that can't be are settled. */
static void begin_store(struct tierd_arena *arena, uint32_t mover, uint32_t tier,
			const uint32_t *blocks, uint32_t count, void *bounce,
			struct tierd_batch *batch)
{
	*batch = (struct tierd_batch){ .tier = tier, .mover = mover, .is_store = 1 };
	for (uint32_t i = 0; i < count; i++) {
		int ret = gather_block(arena, blocks[i], mover, tier, bounce, batch);

		if (ret < 0)
			settle_job(arena, blocks[i], ret);
	}
}

/* Claims blocks that are to be read into memory. Those that can't be are settled. */
static void begin_load(struct tierd_arena *arena, uint32_t mover, uint32_t from, uint32_t tier,
		       const uint32_t *blocks, uint32_t count, struct tierd_batch *batch)
{
	*batch = (struct tierd_batch){ .tier = from, .to = tier, .mover = mover };
	for (uint32_t i = 0; i < count; i++) {
		uint64_t word;
		uint32_t slot;
		int ret = claim_block(arena, blocks[i], mover, &word);

		if (ret == 0) {
			ret = tier_of(word) == from ? try_slot(arena, tier, &slot) : -EBUSY;
			if (ret < 0)
				drop_claim(arena, blocks[i], mover);
		}
		if (ret < 0) {
			settle_job(arena, blocks[i], ret);
			continue;
		}
		batch->blocks[batch->count] = blocks[i];
		batch->slots[batch->count] = slot_of(word);
		batch->to_slots[batch->count] = slot;
		batch->count++;
	}
}

/*
 * Under the lock. How many blocks go at once from a full tier to another: one where no plugin is
 * called, and else as many as others wait for, but of the movers' own slots only one.
 */
static uint32_t victims_at_once(const struct tierd_arena *arena, uint32_t tier, uint32_t refuge)
{
	const struct space *to = &arena->spaces[refuge];
	uint32_t more = to->free > to->spare ? to->free - to->spare : 1;

	if (!to->memory)
		return arena->queued + 1;
	if (arena->spaces[tier].memory)
		return 1;
	return more < arena->queued + 1 ? more : arena->queued + 1;
}

/*
 * Has blocks of a full tier make way for one; where they find no memory to go to, blocks of that one
 * first. Returns 0 when there is room, 1 when a batch is to be
 * copied first, or -ENOSPC.
 */
static int make_way(struct tierd_arena *arena, uint32_t mover, uint32_t tier, uint32_t capacity,
		    void *bounce, struct tierd_batch *batch)
{
	uint32_t victims[TIERD_BATCH], to, full = NO_TIER, count = 0, slot;
	int ret;

	if (arena->spaces[tier].closed)
		return -ENOSPC;
	pthread_mutex_lock(&arena->lock);
	to = find_refuge(arena, tier, 1);
	if (to != NO_TIER) {
		uint32_t most = victims_at_once(arena, tier, to);

		count = find_victims(arena, tier, most < capacity ? most : capacity, victims);
	} else {
		full = find_full_refuge(arena, tier);
	}
	pthread_mutex_unlock(&arena->lock);
	if (full != NO_TIER)
		return make_way(arena, mover, full, capacity, bounce, batch);
	if (count == 0)
		return -ENOSPC;
	if (!arena->spaces[to].memory) {
		begin_store(arena, mover, to, victims, count, bounce, batch);
		return batch->count > 0;
	}
	if (!arena->spaces[tier].memory) {
		begin_load(arena, mover, tier, to, victims, count, batch);
		return batch->count > 0;
	}
	ret = try_slot(arena, to, &slot);
	if (ret == 0)
		ret = move_in_memory(arena, victims[0], mover, to, slot);
	settle_job(arena, victims[0], ret);
	return 0; /* or it is tried again */
}

/* Puts a block back in the queue's front, unless it was tried too often. */
static void try_again(struct tierd_arena *arena, uint32_t block)
{
	struct job *job = &arena->jobs[block];
	int is_last;

	pthread_mutex_lock(&arena->lock);
	is_last = ++job->tries >= TRIES;
	if (!is_last)
		put_in_queue(arena, block, job->tier, 1);
	pthread_mutex_unlock(&arena->lock);
	if (is_last)
		settle_job(arena, block, -ENOSPC);
}

/*
 * Under the lock. Where a block goes to now: between tiers without addresses by way of memory, the
 * fastest that has room for it.
 */
static uint32_t next_stop(struct tierd_arena *arena, uint32_t block, uint32_t from)
{
	uint32_t tier = arena->jobs[block].tier, first = NO_TIER;

	if (arena->spaces[from].memory || arena->spaces[tier].memory)
		return tier;
	for (uint32_t i = 0; i < arena->tiers; i++) {
		if (!arena->spaces[i].memory)
			continue;
		if (arena->spaces[i].free > 0)
			return i;
		if (first == NO_TIER)
			first = i;
	}
	return first == NO_TIER ? tier : first;
}

/*
 * Takes those next in the queue that come from and go to the same tiers, as far as there is room for
 * them and one more; under the lock.
 */
static uint32_t take_alike(struct tierd_arena *arena, uint32_t from, uint32_t tier, uint32_t most,
			   uint32_t *blocks)
{
	uint32_t count = 0;

	while (count < most && count + 1 < arena->spaces[tier].free && arena->queued) {
		uint32_t block = next_in_queue(arena);
		uint64_t word = load_word(arena, block);
		int alike = arena->spaces[tier].memory ? tier_of(word) == from :
							 arena->spaces[tier_of(word)].memory != NULL;

		if (!(word & LIVE) || !alike || next_stop(arena, block, tier_of(word)) != tier)
			break;
		blocks[count++] = take_from_queue(arena);
		arena->jobs[block].goes_on = arena->jobs[block].tier != tier;
	}
	return count;
}

/* Does one job, with those that go along with it. Returns 1 where a batch is to be copied. */
static int do_job(struct tierd_arena *arena, uint32_t mover, uint32_t block, uint32_t capacity,
		  void *bounce, struct tierd_batch *batch)
{
	uint32_t blocks[TIERD_BATCH] = { block }, count = 1, tier, slot;
	uint64_t word = load_word(arena, block);
	uint32_t from = tier_of(word);
	int is_room, ret;

	if (!(word & LIVE) || from == arena->jobs[block].tier) {
		settle_job(arena, block, word & LIVE ? 0 : -ENOENT);
		return 0;
	}
	pthread_mutex_lock(&arena->lock);
	tier = next_stop(arena, block, from);
	arena->jobs[block].goes_on = arena->jobs[block].tier != tier;
	is_room = has_room(&arena->spaces[tier], 1);
	pthread_mutex_unlock(&arena->lock);
	if (!is_room) {
		ret = make_way(arena, mover, tier, capacity, bounce, batch);
		if (ret < 0)
			settle_job(arena, block, ret);
		else
			try_again(arena, block);
		return ret == 1;
	}
	if (arena->spaces[from].memory && arena->spaces[tier].memory) {
		if (try_slot(arena, tier, &slot) < 0)
			try_again(arena, block); /* another mover was first */
		else
			settle_job(arena, block,
				   move_in_memory(arena, block, mover, tier, slot));
		return 0;
	}
	pthread_mutex_lock(&arena->lock);
	count += take_alike(arena, from, tier, capacity - 1, blocks + 1);
	pthread_mutex_unlock(&arena->lock);
	if (arena->spaces[tier].memory)
		begin_load(arena, mover, from, tier, blocks, count, batch);
	else
		begin_store(arena, mover, tier, blocks, count, bounce, batch);
	return batch->count > 0;
}

int tierd_run_moves(struct tierd_arena *arena, uint32_t mover, uint32_t capacity, void *bounce,
		    struct tierd_batch *ret_batch)
{
	if (mover == 0 || mover > TIERD_MOVERS || capacity == 0 || capacity > TIERD_BATCH)
		return -EINVAL;
	for (;;) {
		uint32_t block;

		pthread_mutex_lock(&arena->lock);
		while (!arena->queued && !arena->stopping)
			pthread_cond_wait(&arena->work, &arena->lock);
		if (arena->stopping) {
			pthread_mutex_unlock(&arena->lock);
			return 0;
		}
		block = take_from_queue(arena);
		pthread_mutex_unlock(&arena->lock);
		if (do_job(arena, mover, block, capacity, bounce, ret_batch))
			return 1;
	}
}

int tierd_check_batch(const struct tierd_arena *arena, struct tierd_batch *batch, const void *bounce)
{
	int bad = 0;

	for (uint32_t i = 0; i < batch->count && !batch->is_store; i++) {
		const char *copy = (const char *)bounce + i * arena->block_bytes;
		uint64_t sum = arena->spaces[batch->tier].sums[batch->slots[i]];

		/* Of a block that was given up another one may have the slot by now. */
		batch->is_bad[i] = sum != UNKNOWN && sum_block(copy, arena->block_bytes) != sum &&
				   is_claimed(load_word(arena, batch->blocks[i]), batch->mover);
		bad += batch->is_bad[i];
	}
	return bad;
}

static int end_load(struct tierd_arena *arena, const struct tierd_batch *batch, uint32_t i,
		    const void *bounce)
{
	uint32_t slot = batch->to_slots[i];
	uint64_t sum = arena->spaces[batch->tier].sums[batch->slots[i]];

	if (batch->is_bad[i]) {
		return_slot(arena, batch->to, slot);
		return -EBADMSG;
	}
	memcpy(memory_of(arena, batch->to, slot), (const char *)bounce + i * arena->block_bytes,
	       arena->block_bytes);
	if (sum == UNKNOWN && arena->flags & TIERD_SUMS)
		sum = sum_block(memory_of(arena, batch->to, slot), arena->block_bytes);
	arena->spaces[batch->to].sums[slot] = sum;
	return switch_block(arena, batch->blocks[i], batch->mover, batch->to, slot);
}

void tierd_settle_batch(struct tierd_arena *arena, const struct tierd_batch *batch, int failed,
			const void *bounce)
{
	for (uint32_t i = 0; i < batch->count; i++) {
		int ret;

		if (failed) {
			return_slot(arena, batch->is_store ? batch->tier : batch->to,
				    batch->is_store ? (uint32_t)batch->slots[i] : batch->to_slots[i]);
			ret = -EIO;
		} else if (batch->is_store) {
			ret = switch_block(arena, batch->blocks[i], batch->mover, batch->tier,
					   (uint32_t)batch->slots[i]);
		} else {
			ret = end_load(arena, batch, i, bounce);
		}
		drop_claim(arena, batch->blocks[i], batch->mover);
		settle_job(arena, batch->blocks[i], ret);
	}
}

int64_t tierd_evict_blocks(struct tierd_arena *arena, uint32_t count)
{
	uint32_t victims[TIERD_BATCH];
	int64_t leaving;

	pthread_mutex_lock(&arena->lock);
	for (uint32_t tier = arena->tiers; tier-- > 0 && arena->leaving < count;) {
		uint32_t to = find_refuge(arena, tier, 0), most = count - arena->leaving, got;

		if (!arena->spaces[tier].memory || to == NO_TIER)
			continue;
		got = find_victims(arena, tier, most < TIERD_BATCH ? most : TIERD_BATCH, victims);
		for (uint32_t i = 0; i < got; i++) {
			put_in_queue(arena, victims[i], to, 1);
			arena->jobs[victims[i]].leaves = 1;
		}
		arena->leaving += got;
	}
	leaving = arena->leaving;
	pthread_cond_broadcast(&arena->work);
	pthread_mutex_unlock(&arena->lock);
	return leaving;
}

void tierd_close_tier(struct tierd_arena *arena, uint32_t tier)
{
	pthread_mutex_lock(&arena->lock);
	arena->spaces[tier].closed = 1;
	pthread_mutex_unlock(&arena->lock);
}

void tierd_tell_moves(struct tierd_arena *arena, struct tierd_moves *ret_moves)
{
	pthread_mutex_lock(&arena->lock);
	*ret_moves = arena->tally;
	ret_moves->queued = arena->queued;
	for (uint32_t i = 0; i < arena->tiers; i++)
		ret_moves->used[i] = arena->spaces[i].slots - arena->spaces[i].free;
	pthread_mutex_unlock(&arena->lock);
}

void tierd_stop_moves(struct tierd_arena *arena)
{
	pthread_mutex_lock(&arena->lock);
	arena->stopping = 1;
	pthread_cond_broadcast(&arena->work);
	pthread_mutex_unlock(&arena->lock);
}
