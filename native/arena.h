/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Arenas: blocks with identities, in slots of tiers, that move while programs use them. What programs
 * do with blocks is in arena.c, what is to be moved in arena_queue.c, the moves in arena_moves.c.
 *
 * All that has to be right about a block is in one word: where it is, who holds it, and which mover
 * has a copy of it under way. A mover copies without holding anything up, and then swaps the word
 * only where its own claim is still in it and nobody holds the block: who writes a block, or gives it
 * up, takes the claim out. So no number of writes can make a stale copy look fresh, and a reader's
 * pin and the place that it reads from come with the same compare-and-swap.
 */
#ifndef TIERD_ARENA_H
#define TIERD_ARENA_H

#include "tierd.h"

#include <errno.h>
#include <pthread.h>

#define PIN 1ULL
#define PINS 0x7fffULL /* bits 0 to 14: readers */
#define WRITING (1ULL << 15)
#define LIVE (1ULL << 16)
#define CLAIM_SHIFT 17 /* bits 17 to 24: the mover that copies it, from 1 */
#define CLAIM (0xffULL << CLAIM_SHIFT)
#define TIER_SHIFT 28 /* bits 28 to 31 */
#define SLOT_SHIFT 32 /* bits 32 to 63 */

#define NOBODY UINT32_MAX
#define NO_TIER TIERD_TIERS
#define UNKNOWN 0 /* the sum of what a device has written; sum_block() is never 0 */

enum { RESTS, QUEUED, UNDER_WAY };

/*
 * A tier's slots, from @base on, which is @memory where the CPU reaches them. What is free is a stack;
 * @owner and @sums are of whoever has the slot; @empty ones have no memory until they are used.
 */
struct space {
	uint64_t base;
	char *memory;
	uint32_t slots;
	uint32_t spare;
	uint32_t free;
	uint32_t hand;
	uint32_t departing; /* blocks that movers copy to other memory just now */
	int closed;
	uint32_t *stack;
	uint32_t *owner;
	uint64_t *sums;
	uint8_t *empty;
};

/* What is to become of a block, under the lock. */
struct job {
	uint8_t state;
	uint8_t tier;
	uint8_t tries;
	uint8_t leaves; /* to make room, and counted in @leaving */
	uint8_t goes_on; /* to @tier, from the memory that it passes through */
	uint8_t awaited; /* by somebody who sleeps until it is done */
	uint8_t departs; /* 1 + the tier that counts it as @departing, or 0 */
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
	pthread_cond_t departed;
};

static inline uint32_t tier_of(uint64_t word)
{
	return word >> TIER_SHIFT & 0xf;
}

static inline uint32_t slot_of(uint64_t word)
{
	return (uint32_t)(word >> SLOT_SHIFT);
}

static inline uint64_t place_word(uint32_t tier, uint32_t slot)
{
	return LIVE | (uint64_t)tier << TIER_SHIFT | (uint64_t)slot << SLOT_SHIFT;
}

static inline uint64_t load_word(const struct tierd_arena *arena, uint32_t block)
{
	return __atomic_load_n(&arena->words[block], __ATOMIC_ACQUIRE);
}

/* On failure @expected is what is there. */
static inline int swap_word(struct tierd_arena *arena, uint32_t block, uint64_t *expected,
			    uint64_t desired)
{
	return __atomic_compare_exchange_n(&arena->words[block], expected, desired, 0,
					   __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

static inline char *memory_of(const struct tierd_arena *arena, uint32_t tier, uint32_t slot)
{
	return arena->spaces[tier].memory + slot * arena->block_bytes;
}

static inline int is_in(uint64_t word, uint32_t reach)
{
	return reach >> tier_of(word) & 1;
}

static inline int all_in_range(const struct tierd_arena *arena, const int64_t *ids, size_t count)
{
	uint64_t beyond = 0;

	for (size_t i = 0; i < count; i++)
		beyond |= (uint64_t)ids[i] >= arena->blocks;
	return !beyond;
}

static inline int is_claimed(uint64_t word, uint32_t mover)
{
	return (word & CLAIM) == (uint64_t)mover << CLAIM_SHIFT;
}

static inline int has_room(const struct space *space, int is_for_mover)
{
	return !space->closed && space->free > (is_for_mover ? 0 : space->spare);
}

/* Takes a slot, leaving @spare of them; under the lock. Returns 0 or -ENOSPC. */
static inline int take_slot(struct space *space, uint32_t spare, uint32_t *ret_slot)
{
	if (space->closed || space->free <= spare)
		return -ENOSPC;
	*ret_slot = space->stack[--space->free];
	space->empty[*ret_slot] = 0;
	return 0;
}

/* Under the lock. */
static inline void give_slot(struct space *space, uint32_t slot)
{
	space->owner[slot] = NOBODY;
	space->stack[space->free++] = slot;
}

/* arena.c */
uint64_t sum_block(const void *block, uint64_t bytes);

/* arena_queue.c */
uint32_t take_from_queue(struct tierd_arena *arena);
void settle_job(struct tierd_arena *arena, uint32_t block, int outcome);
void try_again(struct tierd_arena *arena, uint32_t block);
void await_departing(struct tierd_arena *arena, uint32_t block, uint32_t tier);
uint32_t next_stop(struct tierd_arena *arena, uint32_t block, uint32_t from);
uint32_t take_alike(struct tierd_arena *arena, uint32_t from, uint32_t tier, uint32_t most,
		    uint32_t *blocks);
uint32_t find_victims(struct tierd_arena *arena, uint32_t tier, uint32_t most,
		      uint32_t *ret_blocks);
uint32_t find_refuge(const struct tierd_arena *arena, uint32_t tier, int is_for_mover);
uint32_t find_full_refuge(const struct tierd_arena *arena, uint32_t tier);
uint32_t victims_at_once(const struct tierd_arena *arena, uint32_t tier, uint32_t refuge);

#endif
