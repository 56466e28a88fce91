/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A batch of reads or writes of one file by io_uring, begun together and waited for together.
 *
 * Follows io_uring_setup(2), io_uring_enter(2) and include/uapi/linux/io_uring.h.
 */
#include "tierd.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <linux/stat.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

struct tierd_uring {
	int fd;
	uint32_t entries; /* also the most that are under way */
	void *rings;	  /* both, as with IORING_FEAT_SINGLE_MMAP */
	size_t rings_bytes;
	struct io_uring_sqe *sqes;
	uint32_t *sq_tail, *sq_mask, *sq_array;
	uint32_t *cq_head, *cq_tail, *cq_mask;
	struct io_uring_cqe *cqes;
};

void tierd_close_uring(struct tierd_uring *uring)
{
	if (uring->sqes)
		munmap(uring->sqes, uring->entries * sizeof(*uring->sqes));
	if (uring->rings)
		munmap(uring->rings, uring->rings_bytes);
	if (uring->fd >= 0)
		close(uring->fd);
	free(uring);
}

static void *map(int fd, size_t bytes, off_t what)
{
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);

	return at == MAP_FAILED ? NULL : at;
}

static size_t larger(size_t one, size_t other)
{
	return one > other ? one : other;
}

static int map_rings(struct tierd_uring *uring, const struct io_uring_params *params)
{
	const uint32_t wanted = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_RW_CUR_POS;
	uint8_t *rings;

	/* Before Linux 5.6 there is no IORING_OP_READ; what came with it is told as a feature. */
	if ((params->features & wanted) != wanted)
		return -EOPNOTSUPP;
	uring->rings_bytes = larger(params->sq_off.array + params->sq_entries * sizeof(uint32_t),
				    params->cq_off.cqes + params->cq_entries * sizeof(*uring->cqes));
	rings = uring->rings = map(uring->fd, uring->rings_bytes, IORING_OFF_SQ_RING);
	if (!rings)
		return -errno;
	uring->sqes = map(uring->fd, uring->entries * sizeof(*uring->sqes), IORING_OFF_SQES);
	if (!uring->sqes)
		return -errno;
	uring->sq_tail = (uint32_t *)(rings + params->sq_off.tail);
	uring->sq_mask = (uint32_t *)(rings + params->sq_off.ring_mask);
	uring->sq_array = (uint32_t *)(rings + params->sq_off.array);
	uring->cq_head = (uint32_t *)(rings + params->cq_off.head);
	uring->cq_tail = (uint32_t *)(rings + params->cq_off.tail);
	uring->cq_mask = (uint32_t *)(rings + params->cq_off.ring_mask);
	uring->cqes = (struct io_uring_cqe *)(rings + params->cq_off.cqes);
	return 0;
}

int tierd_open_uring(uint32_t entries, struct tierd_uring **ret_uring)
{
	struct io_uring_params params = { 0 };
	struct tierd_uring *uring = calloc(1, sizeof(*uring));
	int err;

	if (!uring)
		return -ENOMEM;
	uring->fd = (int)syscall(SYS_io_uring_setup, entries, &params);
	if (uring->fd < 0) {
		err = -errno;
		tierd_close_uring(uring);
		return err;
	}
	uring->entries = params.sq_entries;
	err = map_rings(uring, &params);
	if (err) {
		tierd_close_uring(uring);
		return err;
	}
	*ret_uring = uring;
	return 0;
}

static void add(struct tierd_uring *uring, const struct io_uring_sqe *sqe)
{
	uint32_t tail = *uring->sq_tail, index = tail & *uring->sq_mask;

	uring->sqes[index] = *sqe;
	uring->sq_array[index] = index;
	__atomic_store_n(uring->sq_tail, tail + 1, __ATOMIC_RELEASE);
}

/* Takes back what the kernel has not taken yet. */
static void drop(struct tierd_uring *uring, uint32_t count)
{
	__atomic_store_n(uring->sq_tail, *uring->sq_tail - count, __ATOMIC_RELEASE);
}

/* Notes what has ended. Returns how many. */
static uint32_t reap(struct tierd_uring *uring, int32_t *results)
{
	uint32_t head = *uring->cq_head, tail = __atomic_load_n(uring->cq_tail, __ATOMIC_ACQUIRE);
	uint32_t count = tail - head;

	for (; head != tail; head++) {
		const struct io_uring_cqe *cqe = &uring->cqes[head & *uring->cq_mask];

		results[cqe->user_data] = cqe->res;
	}
	__atomic_store_n(uring->cq_head, head, __ATOMIC_RELEASE);
	return count;
}

/* Has @count that were added done. Nothing is under way when it returns. */
static int finish(struct tierd_uring *uring, uint32_t count, int32_t *results)
{
	uint32_t begun = 0, ended = 0;
	int err = 0;

	while (ended < count) {
		long taken = syscall(SYS_io_uring_enter, uring->fd, count - begun, count - ended,
				     IORING_ENTER_GETEVENTS, NULL, 0);

		if (taken >= 0) {
			begun += (uint32_t)taken;
		} else if (errno != EINTR && (begun == ended || (errno != EAGAIN && errno != EBUSY))) {
			err = -errno;
			drop(uring, count - begun);
			count = begun; /* these are waited for all the same */
		}
		ended += reap(uring, results);
	}
	return err;
}

int tierd_run_uring(struct tierd_uring *uring, int fd, uint32_t is_write, uint32_t size,
		    const int64_t *offsets, size_t count, void *data, int32_t *ret_results)
{
	if (count > uring->entries)
		return -EINVAL;
	for (size_t i = 0; i < count; i++) {
		const struct io_uring_sqe sqe = {
			.opcode = is_write ? IORING_OP_WRITE : IORING_OP_READ,
			.fd = fd,
			.off = (uint64_t)offsets[i],
			.addr = (uint64_t)(uintptr_t)data + i * size,
			.len = size,
			.user_data = i,
		};

		add(uring, &sqe);
		ret_results[i] = -ECANCELED;
	}
	return finish(uring, (uint32_t)count, ret_results);
}

int tierd_tell_direct(int fd, uint32_t *ret_memory, uint32_t *ret_offset)
{
	struct statx told;

	memset(&told, 0, sizeof(told));
	if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &told))
		return -errno;
	if (!(told.stx_mask & STATX_DIOALIGN))
		return -ENODATA;
	*ret_memory = told.stx_dio_mem_align;
	*ret_offset = told.stx_dio_offset_align;
	return 0;
}
