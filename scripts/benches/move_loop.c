/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loop over move_pages(2) that tierd's mover is measured against, and a process to move.
 *
 *   move_loop hold PAGES STEP                      touch every STEPth page, print the address, wait
 *   move_loop move PID NODE START STEP PAGES BATCH move these pages, print the nanoseconds it took
 */
#include <linux/mempolicy.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PAGE_BYTES 4096UL

static int hold(size_t pages, size_t step)
{
	size_t bytes = pages * step * PAGE_BYTES;
	char *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (at == MAP_FAILED || madvise(at, bytes, MADV_NOHUGEPAGE))
		return 1;
	for (size_t i = 0; i < pages; i++)
		at[i * step * PAGE_BYTES] = 1;
	printf("%lu\n", (unsigned long)at);
	fflush(stdout);
	return getchar() == EOF ? 0 : 1;
}

static int64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int move(pid_t pid, int node, uintptr_t start, size_t step, size_t pages, size_t batch)
{
	void **addrs = calloc(pages, sizeof(*addrs));
	int *nodes = calloc(pages, sizeof(*nodes));
	int *status = calloc(pages, sizeof(*status));
	int64_t begin, end;

	for (size_t i = 0; i < pages; i++) {
		addrs[i] = (void *)(start + i * step * PAGE_BYTES);
		nodes[i] = node;
		status[i] = -1;
	}
	begin = now_ns();
	for (size_t i = 0; i < pages; i += batch) {
		size_t count = pages - i < batch ? pages - i : batch;

		if (syscall(SYS_move_pages, pid, count, addrs + i, nodes + i, status + i, MPOL_MF_MOVE))
			return 1;
	}
	end = now_ns();
	for (size_t i = 0; i < pages; i++)
		if (status[i] != node)
			return 1;
	printf("%ld\n", (long)(end - begin));
	return 0;
}

int main(int argc, char **argv)
{
	if (argc == 4 && !strcmp(argv[1], "hold"))
		return hold(strtoul(argv[2], NULL, 10), strtoul(argv[3], NULL, 10));
	if (argc == 8 && !strcmp(argv[1], "move"))
		return move(atoi(argv[2]), atoi(argv[3]), strtoul(argv[4], NULL, 10),
			    strtoul(argv[5], NULL, 10), strtoul(argv[6], NULL, 10),
			    strtoul(argv[7], NULL, 10));
	return 2;
}
