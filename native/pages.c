/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Folios of another process: list them, ask where they are, move them.
 *
 * Follows fs/proc/task_mmu.c (PAGEMAP_SCAN) and do_pages_move() in mm/migrate.c of Linux 6.12
 * and 7.2.
 */
#include "tierd.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PAGE_BYTES 4096ULL
#define HUGE_BYTES (512 * PAGE_BYTES)
#define REGIONS 64 /* answers of one PAGEMAP_SCAN */
#define BATCH 16384 /* folios of one move_pages(2) that moves */
#define ASKED 1024 /* folios of one that asks: their arrays are on the stack */

/* From include/uapi/linux/fs.h of Linux 6.7, which the headers of Debian 12 (6.1) lack. */
#ifndef PAGEMAP_SCAN
#define PAGEMAP_SCAN _IOWR('f', 16, struct pm_scan_arg)
#define PAGE_IS_PRESENT (1 << 3)
#define PAGE_IS_PFNZERO (1 << 5)
#define PAGE_IS_HUGE (1 << 6)

struct page_region {
	uint64_t start;
	uint64_t end;
	uint64_t categories;
};

struct pm_scan_arg {
	uint64_t size;
	uint64_t flags;
	uint64_t start;
	uint64_t end;
	uint64_t walk_end;
	uint64_t vec;
	uint64_t vec_len;
	uint64_t max_pages;
	uint64_t category_inverted;
	uint64_t category_mask;
	uint64_t category_anyof_mask;
	uint64_t return_mask;
};
#endif

/* The head of struct procmap_query in include/uapi/linux/fs.h of Linux 6.11; it says its size. */
struct vma_query {
	uint64_t size;
	uint64_t query_flags;
	uint64_t query_addr;
	uint64_t vma_start;
	uint64_t vma_end;
	uint64_t vma_flags;
	uint64_t vma_page_size;
};

#define VMA_QUERY _IOC(_IOC_READ | _IOC_WRITE, 'f', 17, 104) /* PROCMAP_QUERY */

/*
 * Returns the size of the huge pages mapped at an address, and how far that holds.
 *
 * A PMD maps 2 MiB, unless hugetlbfs says otherwise. Where the kernel cannot be asked, a larger
 * page is listed in pieces: the first moves it all, the others are refused as busy and then found
 * on the destination.
 */
static uint64_t huge_bytes(int maps, uint64_t addr, uint64_t *ret_until)
{
	struct vma_query vma = { .size = sizeof(vma), .query_addr = addr };

	if (ioctl(maps, VMA_QUERY, &vma) < 0) {
		*ret_until = UINT64_MAX;
		return HUGE_BYTES;
	}
	*ret_until = vma.vma_end;
	return vma.vma_page_size > PAGE_BYTES ? vma.vma_page_size : HUGE_BYTES;
}

/* Appends a region's folios. Returns where to go on: behind the last one appended. */
static uint64_t append_folios(int maps, const struct page_region *region, uint32_t capacity,
			      struct tierd_folio *folios, uint32_t *count)
{
	uint64_t until = region->categories & PAGE_IS_HUGE ? 0 : UINT64_MAX;
	uint64_t step = PAGE_BYTES;
	uint64_t addr = region->start;

	while (addr < region->end && *count < capacity) {
		if (addr >= until) {
			step = huge_bytes(maps, addr, &until);
			addr &= ~(step - 1);
		}
		folios[(*count)++] = (struct tierd_folio){
			.addr = addr,
			.pages = (uint32_t)(step / PAGE_BYTES),
			.node = TIERD_UNASKED,
		};
		addr += step;
	}
	return addr;
}

/* Lists the folios of one range, and tells where to go on; see tierd_list_ranges(). */
static int list_folios(int pagemap, int maps, uint64_t start, uint64_t end, uint32_t capacity,
		       struct tierd_folio *ret_folios, uint32_t *ret_count, uint64_t *ret_next)
{
	struct page_region regions[REGIONS];
	uint32_t count = 0;
	uint64_t next = start;

	while (next < end && count < capacity) {
		uint64_t before = next;
		/* As many pages as there is room for folios: no part of a range is walked twice. */
		struct pm_scan_arg scan = {
			.size = sizeof(scan),
			.start = next,
			.end = end,
			.vec = (uintptr_t)regions,
			.vec_len = REGIONS,
			.max_pages = capacity - count,
			.category_inverted = PAGE_IS_PFNZERO,
			.category_mask = PAGE_IS_PRESENT | PAGE_IS_PFNZERO,
			.return_mask = PAGE_IS_HUGE,
		};
		int found = ioctl(pagemap, PAGEMAP_SCAN, &scan);

		if (found < 0 && count == 0)
			return -errno;
		if (found < 0)
			break; /* what there is comes first, the error with the next call */
		for (int i = 0; i < found && count < capacity; i++)
			next = append_folios(maps, &regions[i], capacity, ret_folios, &count);
		/* A huge page at the end may reach behind what the kernel has walked. */
		if (count < capacity && next < scan.walk_end)
			next = scan.walk_end;
		if (next == before)
			return -EIO;
	}
	*ret_count = count;
	*ret_next = next;
	return 0;
}

int tierd_list_ranges(int pagemap, int maps, struct tierd_range *ranges, size_t count,
		      uint32_t capacity, struct tierd_folio *ret_folios, uint64_t *ret_count)
{
	uint32_t listed = 0;
	uint64_t pages = 0;
	size_t i;

	for (i = 0; i < count && pages < capacity; i++) {
		struct tierd_range *range = &ranges[i];
		struct tierd_folio *folios = ret_folios + listed;
		uint32_t found;
		int ret = list_folios(pagemap, maps, range->start, range->end, capacity - listed,
				      folios, &found, &range->start);

		if (ret < 0 && i == 0)
			return ret;
		if (ret < 0)
			break; /* what there is comes first, the error with the next call */
		range->folios = found;
		listed += found;
		for (uint32_t j = 0; j < found; j++)
			pages += folios[j].pages;
	}
	*ret_count = i;
	return 0;
}

/* Whether a huge page is mapped at an address: 1 or 0, or a negative errno. */
static int is_huge(int pagemap, uint64_t address)
{
	struct page_region region;
	struct pm_scan_arg scan = {
		.size = sizeof(scan),
		.start = address & ~(PAGE_BYTES - 1),
		.end = (address & ~(PAGE_BYTES - 1)) + PAGE_BYTES,
		.vec = (uintptr_t)&region,
		.vec_len = 1,
		.category_mask = PAGE_IS_PRESENT | PAGE_IS_HUGE,
		.return_mask = PAGE_IS_HUGE,
	};
	int found = ioctl(pagemap, PAGEMAP_SCAN, &scan);

	if (found < 0 && errno != EFAULT) /* which says that no program maps it */
		return -errno;
	return found > 0;
}

/* Pages that one entry of a PMD would map have the same answer: neighbours are asked for once. */
int tierd_find_huge(int pagemap, struct tierd_folio *pages, size_t count)
{
	uint64_t asked = UINT64_MAX;
	int huge = 0;

	for (size_t i = 0; i < count; i++) {
		uint64_t entry = pages[i].addr / HUGE_BYTES;

		if (entry != asked)
			huge = is_huge(pagemap, pages[i].addr);
		if (huge < 0)
			return huge;
		if (huge)
			pages[i].pages = HUGE_BYTES / PAGE_BYTES;
		asked = entry;
	}
	return 0;
}

/*
 * Wraps the system call: 0, a negative errno, or the positive count of pages that did not move.
 *
 * -EINVAL is find_mm_struct()'s word for a process without memory: a zombie or a kernel thread.
 * No argument of ours can cause it, so it becomes -ESRCH.
 */
static long move_pages(int32_t pid, size_t count, const void *const *addrs, const int *nodes,
		       int *status, int flags)
{
	long ret = syscall(SYS_move_pages, pid, count, addrs, nodes, status, flags);

	if (ret >= 0)
		return ret;
	return errno == EINVAL ? -ESRCH : -errno;
}

int tierd_query_nodes(int32_t pid, struct tierd_folio *folios, size_t count)
{
	const void *addrs[ASKED];
	int status[ASKED];

	if (pid <= 0)
		return -EINVAL; /* 0 would be the caller itself */
	for (size_t done = 0; done < count;) {
		size_t n = count - done < ASKED ? count - done : ASKED;
		long ret;

		for (size_t i = 0; i < n; i++)
			addrs[i] = (const void *)(uintptr_t)folios[done + i].addr;
		ret = move_pages(pid, n, addrs, NULL, status, 0);
		if (ret < 0)
			return (int)ret;
		for (size_t i = 0; i < n; i++)
			folios[done + i].node = status[i];
		done += n;
	}
	return 0;
}

/* The arrays of one call of move_pages(2), and whose they are. */
struct batch {
	size_t count;
	struct tierd_folio *folios[BATCH];
	const void *addrs[BATCH];
	int nodes[BATCH];
	int status[BATCH];
	uint32_t doubts[BATCH];
};

static void count_outcome(struct tierd_tally *tally, const struct tierd_folio *folio)
{
	switch (folio->node) {
	case -ENOENT:
		tally->absent += folio->pages;
		break;
	case -EBUSY:
		tally->busy += folio->pages;
		break;
	case -EACCES:
		tally->shared += folio->pages;
		break;
	case -EFAULT:
		tally->unmovable += folio->pages;
		break;
	default:
		tally->other += folio->pages;
	}
}

/*
 * Fills the batch with what is to move among the folios, and counts what is not. A resident among
 * the others would make the kernel flush what it has gathered, at the price of a call.
 *
 * Returns the number of folios gone through.
 */
static size_t fill_batch(pid_t pid, struct batch *batch, int32_t node, uint32_t batch_pages,
			 struct tierd_folio *folios, size_t count, struct tierd_tally *tally)
{
	uint64_t pages = 0;
	size_t i;

	batch->count = 0;
	for (i = 0; i < count && batch->count < BATCH; i++) {
		struct tierd_folio *folio = &folios[i];

		if (folio->node == TIERD_UNASKED) /* if that fails, so will the move, and tell why */
			tierd_query_nodes(pid, folio, count - i < BATCH ? count - i : BATCH);
		if (folio->node == node) {
			tally->resident += folio->pages;
			continue;
		}
		if (folio->node < 0 && folio->node != TIERD_UNASKED) {
			count_outcome(tally, folio);
			continue;
		}
		pages += folio->pages;
		if (pages > batch_pages && batch->count > 0)
			break;
		batch->folios[batch->count] = folio;
		batch->addrs[batch->count] = (const void *)(uintptr_t)folio->addr;
		batch->nodes[batch->count] = node;
		batch->status[batch->count] = TIERD_UNASKED;
		batch->count++;
	}
	return i;
}

/*
 * After a positive return: the run that failed has no statuses, the page whose own refusal ended
 * that run has one, and what lies behind it was not tried.
 *
 * Returns the index of the first page that was not tried.
 */
static size_t skip_failed_run(const struct batch *batch, size_t first)
{
	size_t i = first;

	while (i < batch->count && batch->status[i] != TIERD_UNASKED)
		i++;
	while (i < batch->count && batch->status[i] == TIERD_UNASKED)
		i++;
	return i < batch->count ? i + 1 : i;
}

/* Tries every page of the batch once. Returns 0, or the negative errno of a refused call. */
static int try_batch(int32_t pid, struct batch *batch, int flags)
{
	size_t first = 0;

	while (first < batch->count) {
		long ret = move_pages(pid, batch->count - first, batch->addrs + first,
				      batch->nodes + first, batch->status + first, flags);

		if (ret < 0)
			return (int)ret;
		if (ret == 0)
			return 0;
		first = skip_failed_run(batch, first);
	}
	return 0;
}

/*
 * Asks again where the pages are whose status is unknown, or -EBUSY as the tail of a folio that
 * has moved along with its head. Their status becomes the destination where they have arrived.
 */
static void ask_again(int32_t pid, struct batch *batch, int32_t node)
{
	size_t count = 0;

	for (size_t i = 0; i < batch->count; i++) {
		if (batch->status[i] != TIERD_UNASKED && batch->status[i] != -EBUSY)
			continue;
		batch->addrs[count] = batch->addrs[i];
		batch->doubts[count++] = (uint32_t)i;
	}
	if (count == 0 || move_pages(pid, count, batch->addrs, NULL, batch->nodes, 0) < 0)
		return;
	for (size_t i = 0; i < count; i++)
		if (batch->nodes[i] == node || batch->nodes[i] == -ENOENT)
			batch->status[batch->doubts[i]] = batch->nodes[i];
}

/* Tells each folio of the batch what became of it, and counts it. */
static void settle_batch(const struct batch *batch, int32_t node, struct tierd_tally *tally)
{
	for (size_t i = 0; i < batch->count; i++) {
		struct tierd_folio *folio = batch->folios[i];
		int refused = batch->status[i] == TIERD_UNASKED && tally->stopped;

		folio->node = batch->status[i];
		if (folio->node == TIERD_UNASKED)
			folio->node = refused ? tally->stopped : -EBUSY;
		if (folio->node == node)
			tally->moved += folio->pages;
		else if (!refused)
			count_outcome(tally, folio);
		else if (tally->stopped == -ENOMEM)
			tally->no_memory += folio->pages;
		else
			tally->left += folio->pages;
	}
}

int tierd_move_folios(int32_t pid, int32_t node, uint32_t batch_pages, uint32_t flags,
		      struct tierd_folio *folios, size_t count, struct tierd_tally *ret_tally)
{
	int mpol = flags & TIERD_MOVE_ALL ? MPOL_MF_MOVE_ALL : MPOL_MF_MOVE;
	struct tierd_tally tally = { 0 };
	struct batch *batch;

	if (pid <= 0 || node < 0 || batch_pages == 0 || flags & ~TIERD_MOVE_ALL)
		return -EINVAL;
	batch = malloc(sizeof(*batch));
	if (!batch)
		return -ENOMEM;
	for (size_t done = 0; done < count;) {
		done += fill_batch(pid, batch, node, batch_pages, folios + done, count - done,
				   &tally);
		if (!tally.stopped) {
			tally.stopped = try_batch(pid, batch, mpol);
			ask_again(pid, batch, node);
		}
		settle_batch(batch, node, &tally);
	}
	free(batch);
	*ret_tally = tally;
	return 0;
}
