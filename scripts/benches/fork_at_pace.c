/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Short-lived processes at an even pace: fork_at_pace PER_SECOND SECONDS
 *
 * Each child ends at once. Prints how many were made each second, on the average.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000LL + now.tv_nsec;
}

int main(int argc, char **argv)
{
	long pace = argc == 3 ? atol(argv[1]) : 0;
	long total = pace * (argc == 3 ? atol(argv[2]) : 0);
	int64_t begin = now_ns();

	if (total <= 0)
		return 2;
	for (long i = 0; i < total; i++) {
		int64_t wait_ns = begin + i * 1000000000LL / pace - now_ns();
		pid_t child;

		if (wait_ns > 0)
			nanosleep(&(struct timespec){ .tv_sec = wait_ns / 1000000000,
						      .tv_nsec = wait_ns % 1000000000 }, NULL);
		child = fork();
		if (child == 0)
			_exit(0);
		if (child < 0 || waitpid(child, NULL, 0) < 0)
			return 1;
	}
	printf("%.1f\n", total * 1e9 / (now_ns() - begin));
	return 0;
}
