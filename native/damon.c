/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What takes two files a page of DAMON's interface in sysfs: the regions that a look begins with.
 *
 * Follows damon_sysfs_regions in mm/damon/sysfs.c: regions/nr_regions makes the folders 0, 1, ...,
 * each with a start and an end, which are read when the kdamond is turned on.
 */
#include "tierd.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

static int write_number(int folder, const char *path, uint64_t number)
{
	char text[24];
	int length = snprintf(text, sizeof(text), "%" PRIu64, number);
	int fd = openat(folder, path, O_WRONLY | O_CLOEXEC);
	ssize_t written;
	int error;

	if (fd < 0)
		return -errno;
	written = write(fd, text, length);
	error = written < 0 ? -errno : written < length ? -EIO : 0;
	close(fd);
	return error;
}

int tierd_write_ranges(int folder, uint64_t start, uint64_t size, uint32_t count)
{
	char path[24];
	int error;

	for (uint32_t i = 0; i < count; i++, start += size) {
		snprintf(path, sizeof(path), "%" PRIu32 "/start", i);
		error = write_number(folder, path, start);
		if (error)
			return error;
		snprintf(path, sizeof(path), "%" PRIu32 "/end", i);
		error = write_number(folder, path, start + size);
		if (error)
			return error;
	}
	return 0;
}
