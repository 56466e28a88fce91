/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What an arena's movers do: claim a block, copy it, and have it be where its copy is. Between memory
 * that is done here; to and from other tiers a batch is handed out, and settled when it was copied.
 */
#include "arena.h"

#include <string.h>

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
	await_departing(arena, block, tier);
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

		if (batch->is_bad[i])
			continue;
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

void tierd_settle_batch(struct tierd_arena *arena, const struct tierd_batch *batch, int outcome,
			const void *bounce)
{
	for (uint32_t i = 0; i < batch->count; i++) {
		int ret;

		if (outcome < 0) {
			return_slot(arena, batch->is_store ? batch->tier : batch->to,
				    batch->is_store ? (uint32_t)batch->slots[i] : batch->to_slots[i]);
			ret = outcome;
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
