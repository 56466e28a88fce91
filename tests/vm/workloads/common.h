/* SPDX-License-Identifier: Apache-2.0 */
/* What programs that tell of their accesses share: a clock, and numbers at random. */
#ifndef COMMON_H
#define COMMON_H

#include <stdint.h>
#include <time.h>

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

/* xorshift64*: fast, and good enough to choose lines with. */
static uint64_t next_random(uint64_t *state)
{
	*state ^= *state >> 12;
	*state ^= *state << 25;
	*state ^= *state >> 27;
	return *state * 0x2545f4914f6cdd1dULL;
}

#endif
