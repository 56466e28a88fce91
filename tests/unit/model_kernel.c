/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model of move_pages(2) after do_pages_move() in mm/migrate.c of Linux 6.12, for what a machine
 * with one node cannot show. native/pages.c is compiled against it, with syscall() renamed.
 *
 * Page i of the process is at address (i + 1) * 4096.
 */
#include <errno.h>
#include <linux/mempolicy.h>
#include <stdarg.h>
#include <stdint.h>

enum kind { PLAIN, ABSENT, ZERO, SHARED, BUSY, PINNED, FLEETING };

struct model_page {
	int node;
	int kind;
	int head; /* first page of its folio */
	int tails; /* of a head */
	int isolated;
};

struct model {
	struct model_page *pages;
	int room;     /* pages that the destination takes */
	int lives;    /* calls before the process exits */
	int refusal;  /* errno for every move */
	int moves;    /* calls that moved */
	int needless; /* residents passed in */
};

struct model model;

static int isolate(const struct model_page *page, int node, int flags)
{
	struct model_page *head = &model.pages[page->head];

	if (page->kind == ABSENT)
		return -ENOENT;
	if (page->kind == ZERO)
		return -EFAULT;
	if (page->node == node)
		return 0;
	if (page->kind == SHARED && !(flags & MPOL_MF_MOVE_ALL))
		return -EACCES;
	if (page->kind == BUSY || head->isolated)
		return -EBUSY;
	head->isolated = 1;
	return 1;
}

/* Migrates what is isolated: the count of folios that failed, or -ENOMEM. */
static int migrate(const void **addrs, int from, int to, int node)
{
	int failed = 0, full = 0;

	for (int i = from; i < to; i++) {
		int at = (uintptr_t)addrs[i] / 4096 - 1;
		struct model_page *head = &model.pages[model.pages[at].head];

		if (!head->isolated)
			continue;
		head->isolated = 0;
		full |= model.room <= head->tails;
		if (!full && head->kind == FLEETING) /* swapped out under our hands */
			for (int tail = 0; tail <= head->tails; tail++)
				head[tail].kind = ABSENT;
		if (full || head->kind == PINNED || head->kind == ABSENT) {
			failed++;
			continue;
		}
		model.room -= head->tails + 1;
		for (int tail = 0; tail <= head->tails; tail++)
			head[tail].node = node;
	}
	return full ? -ENOMEM : failed;
}

static int flush(const void **addrs, int *status, int start, int i, int count, int node)
{
	int err = start < i ? migrate(addrs, start, i, node) : 0;

	if (err > 0)
		return err + count - i;
	for (int done = start; !err && done < i; done++)
		status[done] = node;
	return err;
}

static int move(int count, const void **addrs, const int *nodes, int *status, int flags)
{
	int start = 0;

	model.moves++;
	if (model.refusal)
		return -model.refusal;
	for (int i = 0; i < count; i++) {
		const struct model_page *page = &model.pages[(uintptr_t)addrs[i] / 4096 - 1];
		int err = isolate(page, nodes[i], flags);

		if (err > 0)
			continue;
		model.needless += err == 0;
		status[i] = err ? err : nodes[i];
		err = flush(addrs, status, start, i, count, nodes[i]);
		if (err)
			return err > 0 ? err - 1 : err;
		start = i + 1;
	}
	return flush(addrs, status, start, count, count, nodes[0]);
}

static int query(int count, const void **addrs, int *status)
{
	for (int i = 0; i < count; i++) {
		const struct model_page *page = &model.pages[(uintptr_t)addrs[i] / 4096 - 1];

		status[i] = page->kind == ABSENT ? -ENOENT : page->kind == ZERO ? -EFAULT : page->node;
	}
	return 0;
}

long model_syscall(long number, ...)
{
	va_list args;
	int err;

	(void)number;
	va_start(args, number);
	(void)va_arg(args, int); /* pid */
	int count = (int)va_arg(args, unsigned long);
	const void **addrs = va_arg(args, const void **);
	const int *nodes = va_arg(args, const int *);
	int *status = va_arg(args, int *);
	int flags = va_arg(args, int);
	va_end(args);

	if (model.lives-- <= 0)
		err = -EINVAL; /* a zombie: get_task_mm() finds nothing */
	else
		err = nodes ? move(count, addrs, nodes, status, flags) : query(count, addrs, status);
	if (err >= 0)
		return err;
	errno = -err;
	return -1;
}
