/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What of an arena is to be moved, where to, and who makes way for it: under the arena's lock.
 */
#include "arena.h"

#include <time.h>

#define TRIES 8 /* so often a block that finds its tier full has others make way, and then stays */

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

uint32_t take_from_queue(struct tierd_arena *arena)
{
	uint32_t block = next_in_queue(arena), from = tier_of(load_word(arena, block));
	struct job *job = &arena->jobs[block];

	arena->head = (arena->head + 1) % arena->blocks;
	arena->queued--;
	job->state = UNDER_WAY;
	if (from != job->tier && arena->spaces[from].memory && arena->spaces[job->tier].memory) {
		job->departs = (uint8_t)(from + 1);
		arena->spaces[from].departing++;
	}
	return block;
}

/* Under the lock. A block has gone, or doesn't go now. */
static void end_departing(struct tierd_arena *arena, struct job *job)
{
	if (!job->departs)
		return;
	arena->spaces[job->departs - 1].departing--;
	job->departs = 0;
	pthread_cond_broadcast(&arena->departed);
}

/*
 * Under the lock. Waits for blocks that leave a full memory already, so that no others make way for
 * this one. Who waits so isn't waited for: there is always a mover that goes on.
 */
void await_departing(struct tierd_arena *arena, uint32_t block, uint32_t tier)
{
	struct space *space = &arena->spaces[tier];

	while (!has_room(space, 1) && space->departing && !arena->stopping) {
		end_departing(arena, &arena->jobs[block]);
		pthread_cond_wait(&arena->departed, &arena->lock);
	}
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
	int has_slept, ret = 0;

	if (!all_in_range(arena, ids, count))
		return -EINVAL;
	pthread_mutex_lock(&arena->lock);
	do {
		has_slept = 0;
		/* The last first: when that is done, the others mostly are, and this has woken once. */
		for (size_t i = count; i > 0 && ret == 0; i--) {
			struct job *job = &arena->jobs[ids[i - 1]];

			while (job->state != RESTS && ret == 0) {
				job->awaited = has_slept = 1;
				ret = -pthread_cond_timedwait(&arena->done, &arena->lock, &until);
			}
		}
	} while (has_slept && ret == 0); /* those that rested may have to make way meanwhile */
	for (size_t i = 0; i < count && ret == 0; i++)
		ret_outcomes[i] = arena->jobs[ids[i]].outcome;
	pthread_mutex_unlock(&arena->lock);
	return ret;
}

/* Tells those who wait what became of a move. */
void settle_job(struct tierd_arena *arena, uint32_t block, int outcome)
{
	struct job *job = &arena->jobs[block];
	int awaited;

	pthread_mutex_lock(&arena->lock);
	awaited = job->awaited;
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
		end_departing(arena, job);
		arena->leaving -= job->leaves;
		*job = (struct job){ .outcome = (int8_t)outcome };
	}
	if (awaited && job->state == RESTS)
		pthread_cond_broadcast(&arena->done);
	pthread_mutex_unlock(&arena->lock);
}

/* Puts a block back in the queue's front, unless it was tried too often. */
void try_again(struct tierd_arena *arena, uint32_t block)
{
	struct job *job = &arena->jobs[block];
	int is_last;

	pthread_mutex_lock(&arena->lock);
	end_departing(arena, job);
	is_last = ++job->tries >= TRIES;
	if (!is_last)
		put_in_queue(arena, block, job->tier, 1);
	pthread_mutex_unlock(&arena->lock);
	if (is_last)
		settle_job(arena, block, -ENOSPC);
}

/*
 * Finds blocks of a tier that have not been used since the hand last passed by; under the lock. Those
 * that are held or to be moved are passed over. Two rounds find any that can go.
 */
uint32_t find_victims(struct tierd_arena *arena, uint32_t tier, uint32_t most,
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

/*
 * Under the lock. Returns where blocks go that make way, the movers' own slots counted or not: to a
 * slower tier, or where none has room up to or from one of a device; else NO_TIER. Without memory on
 * either side there is nothing to copy by.
 */
uint32_t find_refuge(const struct tierd_arena *arena, uint32_t tier, int is_for_mover)
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

/* Under the lock. Returns the memory, full now, where blocks of a device would go, or NO_TIER. */
uint32_t find_full_refuge(const struct tierd_arena *arena, uint32_t tier)
{
	if (arena->spaces[tier].memory || !arena->spaces[tier].base)
		return NO_TIER;
	for (uint32_t i = 1; i < arena->tiers; i++)
		if (arena->spaces[(tier + i) % arena->tiers].memory)
			return (tier + i) % arena->tiers;
	return NO_TIER;
}

/*
 * Under the lock. How many blocks go at once from a full tier to another: one where no plugin is
 * called, and else as many as others wait for, but of the movers' own slots only one.
 */
uint32_t victims_at_once(const struct tierd_arena *arena, uint32_t tier, uint32_t refuge)
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
 * Under the lock. Where a block goes to now: between tiers without addresses by way of memory, the
 * fastest that has room for it.
 */
uint32_t next_stop(struct tierd_arena *arena, uint32_t block, uint32_t from)
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
uint32_t take_alike(struct tierd_arena *arena, uint32_t from, uint32_t tier, uint32_t most,
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

int64_t tierd_lend_slots(struct tierd_arena *arena, uint32_t tier, size_t count, int64_t *ret_slots)
{
	struct space *space = &arena->spaces[tier];
	size_t lent = 0;

	if (tier >= arena->tiers)
		return -EINVAL;
	pthread_mutex_lock(&arena->lock);
	for (uint32_t i = space->free; i-- > 0 && lent < count && space->free > space->spare;) {
		uint32_t slot = space->stack[i];

		if (space->empty[slot])
			continue;
		space->stack[i] = space->stack[--space->free];
		ret_slots[lent++] = slot;
	}
	pthread_mutex_unlock(&arena->lock);
	return (int64_t)lent;
}

void tierd_end_lending(struct tierd_arena *arena, uint32_t tier, const int64_t *slots, size_t count,
		       uint32_t are_empty)
{
	pthread_mutex_lock(&arena->lock);
	for (size_t i = 0; i < count; i++) {
		arena->spaces[tier].empty[slots[i]] = are_empty != 0;
		give_slot(&arena->spaces[tier], (uint32_t)slots[i]);
	}
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
	pthread_cond_broadcast(&arena->departed);
	pthread_mutex_unlock(&arena->lock);
}
