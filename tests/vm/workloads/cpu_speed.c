/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tells how fast a CPU computes, whatever else runs on it: what a program does in a second is held
 * against that where the machine's own speed changes, as an emulated CPU's does with its host's, and
 * with what its other CPUs do where they take turns.
 *
 *   cpu_speed FILE
 *
 * Some twenty times a second it takes steps, in a table of four pages, for 2 ms of CPU time, and
 * counts both: a twentieth of what a CPU has. Each time has as much of it, or slow ones would weigh
 * more than in what a program does in a second. FILE has both sums since the start, in a line of
 * fixed length:
 *
 *   00000000000001230000 00000000000012345678
 *   steps                ns
 *
 * Its speed is that of arithmetic: faults, and a TLB that is flushed, take time from a program and
 * hardly any from these steps. SIGTERM ends it.
 */
#include <errno.h>
#include <error.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#define TABLE_BYTES (16 << 10)
#define STEPS 2000 /* between two looks at the time: tens of microseconds, a look takes a few */
#define BURST_NS 2000000
#define PAUSE_US 50000
#define LINE_BYTES 42

static uint64_t table[TABLE_BYTES / sizeof(uint64_t)];

static uint64_t cpu_ns(void)
{
	struct timespec time;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
	return time.tv_sec * 1000000000ULL + time.tv_nsec;
}

/* xorshift64*, whose numbers are added up all over the table. */
static uint64_t step(uint64_t state)
{
	for (int i = 0; i < STEPS; i++) {
		state ^= state >> 12;
		state ^= state << 25;
		state ^= state >> 27;
		table[state % (TABLE_BYTES / sizeof(uint64_t))] += state;
	}
	return state;
}

int main(int argc, char **argv)
{
	uint64_t state = 0x853c49e6748fea9bULL, steps = 0, spent_ns = 0;
	char line[LINE_BYTES + 1];
	int file;

	if (argc != 2)
		error(2, 0, "FILE");
	file = open(argv[1], O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (file < 0)
		error(2, errno, "%s", argv[1]);
	for (;;) {
		uint64_t begun_ns = cpu_ns(), took_ns = 0;

		for (; took_ns < BURST_NS; took_ns = cpu_ns() - begun_ns) {
			state = step(state);
			steps += STEPS;
		}
		spent_ns += took_ns;
		snprintf(line, sizeof(line), "%020" PRIu64 " %020" PRIu64 "\n", steps, spent_ns);
		if (pwrite(file, line, LINE_BYTES, 0) != LINE_BYTES)
			error(2, errno, "%s", argv[1]);
		usleep(PAUSE_US);
	}
}
