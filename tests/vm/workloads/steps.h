/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tells how fast a CPU computes while a program runs there, whatever else does: what it gets done in
 * a second is held against that where the machine's own speed changes, as an emulated CPU's does with
 * its host's, and with what its other CPUs do where they take turns.
 *
 * The program takes steps in between, by its own progress. A process that takes them by a clock says
 * something else: emulated CPUs take turns that timers end, its own among them, so that its time
 * begins with its CPU's turn.
 *
 * Speed is that of arithmetic: faults, and a TLB that is flushed, take time from a program and hardly
 * any from its steps; nor does what others take of its CPU count.
 */
#ifndef STEPS_H
#define STEPS_H

#include <stdint.h>
#include <time.h>

#define STEPS_WORDS 2048 /* four pages */

struct steps {
	uint64_t count; /* since the start */
	uint64_t ns;	/* of CPU time that they took */
	uint64_t state;
	uint64_t table[STEPS_WORDS];
};

static uint64_t steps_cpu_ns(void)
{
	struct timespec time;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
	return time.tv_sec * 1000000000ULL + time.tv_nsec;
}

/* xorshift64*, whose numbers are added up all over the table. */
static void take_steps(struct steps *steps, uint64_t count)
{
	uint64_t begun_ns = steps_cpu_ns();
	uint64_t state = steps->state ? steps->state : 0x853c49e6748fea9bULL;

	for (uint64_t step = 0; step < count; step++) {
		state ^= state >> 12;
		state ^= state << 25;
		state ^= state >> 27;
		steps->table[state % STEPS_WORDS] += state;
	}
	steps->state = state;
	steps->count += count;
	steps->ns += steps_cpu_ns() - begun_ns;
}

#endif
