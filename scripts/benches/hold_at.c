/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A process with memory at given addresses, for the footprint benchmark.
 *
 *   hold_at START BYTES    map and touch these base pages, print a line, wait for the end of input
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

int main(int argc, char **argv)
{
	int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
	void *start, *at;
	size_t bytes;

	if (argc != 3)
		return 2;
	start = (void *)(uintptr_t)strtoull(argv[1], NULL, 10);
	bytes = strtoull(argv[2], NULL, 10);
	at = mmap(start, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
	if (at != start || madvise(at, bytes, MADV_NOHUGEPAGE))
		return 1;
	memset(at, 1, bytes);
	puts("held");
	fflush(stdout);
	return getchar() == EOF ? 0 : 1;
}
