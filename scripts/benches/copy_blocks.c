/* SPDX-License-Identifier: Apache-2.0 */
/* What movers are held against: memcpy of blocks, one after the other, and nothing else. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

void copy_blocks(char *to, const char *from, const int64_t *order, size_t count, size_t bytes);

void copy_blocks(char *to, const char *from, const int64_t *order, size_t count, size_t bytes)
{
	for (size_t i = 0; i < count; i++)
		memcpy(to + (size_t)order[i] * bytes, from + (size_t)order[i] * bytes, bytes);
}
