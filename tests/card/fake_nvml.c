/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A fake of libnvidia-ml.so.1 beside fake_cuda.c's card. FAKE_NVML_FREE is what it tells to be free;
 * FAKE_NVML_LOST names a file: once that is there, the card is lost.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CALL __attribute__((visibility("default"))) int

enum { SUCCESS = 0, NOT_FOUND = 6, GPU_IS_LOST = 15 };

struct memory {
	unsigned long long total;
	unsigned long long free;
	unsigned long long used;
};

CALL nvmlInitWithFlags(unsigned flags)
{
	(void)flags;
	return SUCCESS;
}

CALL nvmlInit_v2(void)
{
	return SUCCESS;
}

CALL nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **ret_device)
{
	if (strcmp(id, "0000:a5:00.0") != 0)
		return NOT_FOUND;
	*ret_device = (void *)1;
	return SUCCESS;
}

CALL nvmlDeviceGetMemoryInfo(void *device, struct memory *ret_memory)
{
	const char *lost = getenv("FAKE_NVML_LOST"), *told = getenv("FAKE_NVML_FREE");

	(void)device;
	if (lost && access(lost, F_OK) == 0)
		return GPU_IS_LOST;
	ret_memory->free = told ? strtoull(told, NULL, 0) : 0;
	ret_memory->total = ret_memory->free;
	ret_memory->used = 0;
	return SUCCESS;
}
