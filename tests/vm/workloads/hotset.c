/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program that knows nothing of memory tiers: a buffer, of which a window is hot.
 *
 *   hotset [--mib N] [--node N] [--hot-mib N] [--hot-offset-mib N] [--share PERCENT] [--stride]
 *          [--sweep | --zipf EXPONENT] [--move-every SECONDS] [--seconds N] [--cpu N]
 *          [--fast-nodes LIST] [--no-waker] [--verify]
 *
 * The buffer is filled on the given node, by threads for 32 MiB each, under a memory policy of theirs
 * alone. The kernel looks at a program's memory by each thread's CPU time, and at nothing that is
 * under such a policy: a look that fell into the filling would be in vain, and the next one three
 * seconds later; so none is to. Then cache lines of it are read, changed and written at random: SHARE percent of the accesses go to
 * the hot window, the rest anywhere in the buffer; with --stride the window is every second page of
 * twice its range, with --sweep the rest goes through the buffer from its start to its end, again and
 * again. With --zipf the page of rank r gets a share of all accesses that is proportional to
 * r^-EXPONENT, pages have their ranks at random, and the first ones count as the hot window. SIGUSR1,
 * or --move-every, moves the window on by its range, and around the buffer's end; of ranks the
 * hottest change places with the next ones. SIGTERM, SIGINT or --seconds end it.
 *
 * Each second it prints a line of JSON; where the pages are it asks of move_pages(2), and which
 * nodes count as fast it is told by --fast-nodes (0 by default). Seconds, here and in its options,
 * are those of its accesses, what a line takes not among them:
 *
 *   {"t": 3.0, "ops_per_s": 612345, "window": 0, "hot_pages": 2048, "hot_on_fast": 2048,
 *    "cold_pages": 14336, "cold_on_slow": 14336, "absent": 0, "hit_ratio": 0.9,
 *    "hot_ratio": 0.9}
 *
 * hit_ratio is the share of the second's accesses that went to pages that are on fast nodes now, and
 * hot_ratio that which went to the hot window, wherever it is.
 *
 * Each word holds its index and the count of its changes, combined so that a word that was lost, or
 * put elsewhere, shows. --verify checks all of them at the end: 1 is the exit status of damage.
 *
 * The waker is a second process on the same CPU, which is woken about each millisecond. Under TCG a
 * process that never leaves its CPU keeps its translations, and since DAMON clears accessed bits
 * without flushing (mm/damon/vaddr.c: damon_young_pmd_entry), they stay clear: it looks idle. To
 * switch address spaces flushes them. It sets no timer, at which emulated CPUs would take turns.
 */
#include <errno.h>
#include <error.h>
#include <getopt.h>
#include <inttypes.h>
#include <linux/mempolicy.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "common.h"

#define MIB (1ULL << 20)
#define MAX_MIB (1 << 14)
#define MAX_NODES 64
#define LINE_BYTES 64
#define WORDS_PER_LINE (LINE_BYTES / sizeof(uint64_t))
#define BATCH_LEAST 32
#define BATCH_MOST 1024
#define BATCH_S 1e-3
#define QUERY_PAGES 4096
#define FILL_WORDS (32 * MIB / sizeof(uint64_t))
#define STACK_BYTES (256 << 10)

struct options {
	uint64_t size;
	uint64_t hot_size;
	uint64_t hot_offset;
	uint64_t fast_nodes;
	double move_every_s;
	double duration_s;
	double zipf;
	int node;
	int share;
	int cpu;
	bool stride;
	bool sweep;
	bool verify;
	bool waker;
};

/*
 * Draws ranks with given shares in constant time: Walker's alias method. A rank drawn evenly is kept
 * if a second number is below its bound, else its alias is taken.
 */
struct ranks {
	uint32_t *bound;
	uint32_t *alias;
	uint32_t *page; /* of a rank */
	uint32_t *rank; /* of a page */
};

struct hotset {
	struct options options;
	uint64_t *words;
	uint64_t word_count;
	uint64_t page_size;
	uint64_t hot_offset;
	uint64_t swept; /* lines */
	uint64_t random;
	uint32_t *accesses; /* of each page since the last report */
	uint64_t batch;     /* accesses that take about BATCH_S */
	struct ranks ranks; /* with --zipf */
	unsigned int window;
	int wakes; /* an eventfd, with a waker */
};

struct census {
	uint64_t hot_pages, hot_on_fast, cold_pages, cold_on_slow, absent;
	uint64_t accesses, hits, hot_accesses;
};

static volatile sig_atomic_t stop, move;

static void on_stop(int signal)
{
	(void)signal;
	stop = 1;
}

static void on_move(int signal)
{
	(void)signal;
	move = 1;
}

/* A number below `bound`, which is below 2^32. */
static uint64_t below(uint64_t *state, uint64_t bound)
{
	return (next_random(state) >> 32) * bound >> 32;
}

/* The word at an index after `count` changes. */
static uint64_t pattern(uint64_t index, uint32_t count)
{
	return (uint64_t)((uint32_t)index ^ (count * 0x9e3779b9U)) << 32 | count;
}

static bool is_intact(uint64_t index, uint64_t word)
{
	return word == pattern(index, (uint32_t)word);
}

static uint64_t changed(uint64_t index, uint64_t word)
{
	return pattern(index, (uint32_t)word + 1);
}

static void prefer_node(int node)
{
	unsigned long mask = 1UL << node;

	/* The kernel takes one bit off the length that it is given. */
	if (syscall(SYS_set_mempolicy, MPOL_PREFERRED, &mask, MAX_NODES + 1))
		error(2, errno, "set_mempolicy: node %d", node);
}

static void prefer_no_node(void)
{
	if (syscall(SYS_set_mempolicy, MPOL_DEFAULT, NULL, 0))
		error(2, errno, "set_mempolicy");
}

/* What a thread fills. */
struct part {
	uint64_t *words;
	uint64_t first, end;
	int node;
};

static void *fill(void *data)
{
	const struct part *part = data;

	if (part->node >= 0)
		prefer_node(part->node);
	for (uint64_t index = part->first; index < part->end; index++)
		part->words[index] = pattern(index, 0);
	prefer_no_node(); /* before libc's code for its end is read, which would lie there too */
	return NULL;
}

/*
 * Its stack is ours, since the kernel joins a mapping of its own to the buffer's, and is not to lie
 * on the given node: it is written to before the thread is.
 */
static void fill_by_thread(struct part *part)
{
	static _Alignas(4096) char stack[STACK_BYTES];
	pthread_attr_t attributes;
	pthread_t filler;
	int code = pthread_attr_init(&attributes);

	memset(stack, 1, sizeof(stack));
	if (!code)
		code = pthread_attr_setstack(&attributes, stack, sizeof(stack));
	if (!code)
		code = pthread_create(&filler, &attributes, fill, part);
	if (code)
		error(2, code, "pthread_create");
	pthread_join(filler, NULL);
	pthread_attr_destroy(&attributes);
}

static void allocate(struct hotset *set)
{
	void *buffer = mmap(NULL, set->options.size, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct part part = { .node = set->options.node };

	if (buffer == MAP_FAILED)
		error(2, errno, "mmap");
	/* Pages are counted one by one. */
	if (madvise(buffer, set->options.size, MADV_NOHUGEPAGE))
		error(2, errno, "madvise");
	set->words = part.words = buffer;
	for (; part.first < set->word_count; part.first = part.end) {
		uint64_t left = set->word_count - part.first;

		part.end = part.first + (left < FILL_WORDS ? left : FILL_WORDS);
		fill_by_thread(&part);
	}
}

static uint64_t page_count(const struct hotset *set)
{
	return set->options.size / set->page_size;
}

static uint64_t hot_page_count(const struct hotset *set)
{
	return set->options.hot_size / set->page_size;
}

static void *numbers(uint64_t count)
{
	void *made = calloc(count, sizeof(uint32_t));

	if (!made)
		error(2, errno, "calloc");
	return made;
}

static void place(struct ranks *ranks, uint32_t rank, uint32_t page)
{
	ranks->page[rank] = page;
	ranks->rank[page] = rank;
}

/* Gives ranks to pages at random. */
static void shuffle(struct hotset *set)
{
	struct ranks *ranks = &set->ranks;
	uint64_t count = page_count(set);

	for (uint64_t rank = 0; rank < count; rank++)
		place(ranks, rank, rank);
	for (uint64_t rank = count - 1; rank > 0; rank--) {
		uint64_t other = below(&set->random, rank + 1);
		uint32_t page = ranks->page[rank];

		place(ranks, rank, ranks->page[other]);
		place(ranks, other, page);
	}
}

/* Pairs each rank that is drawn too often with ones that are drawn too seldom (Vose). */
static void make_aliases(struct hotset *set)
{
	struct ranks *ranks = &set->ranks;
	uint64_t count = page_count(set), few = 0, many = count;
	double *share = calloc(count, sizeof(*share)), total = 0;
	uint32_t *todo = numbers(count);

	if (!share)
		error(2, errno, "calloc");
	for (uint64_t rank = 0; rank < count; rank++)
		total += share[rank] = pow(rank + 1, -set->options.zipf);
	for (uint64_t rank = 0; rank < count; rank++) {
		share[rank] *= count / total;
		todo[share[rank] < 1 ? few++ : --many] = rank;
	}
	while (few > 0 && many < count) {
		uint32_t low = todo[--few], high = todo[many];

		ranks->bound[low] = share[low] * UINT32_MAX;
		ranks->alias[low] = high;
		share[high] -= 1 - share[low];
		if (share[high] < 1) {
			many++;
			todo[few++] = high;
		}
	}
	/* What is left has a share of one, but for rounding. */
	while (few > 0)
		ranks->bound[todo[--few]] = UINT32_MAX;
	while (many < count)
		ranks->bound[todo[many++]] = UINT32_MAX;
	free(todo);
	free(share);
}

static void make_ranks(struct hotset *set)
{
	uint64_t count = page_count(set);

	set->ranks = (struct ranks){ .bound = numbers(count),
				     .alias = numbers(count),
				     .page = numbers(count),
				     .rank = numbers(count) };
	shuffle(set);
	make_aliases(set);
}

static uint32_t draw_page(struct hotset *set)
{
	uint32_t rank = below(&set->random, page_count(set));

	if (next_random(&set->random) >> 32 > set->ranks.bound[rank])
		rank = set->ranks.alias[rank];
	return set->ranks.page[rank];
}

/* The distance of hot pages from each other. */
static uint64_t hot_step(const struct hotset *set)
{
	return set->options.stride ? 2 : 1;
}

static uint64_t hot_page(const struct hotset *set, uint64_t position)
{
	uint64_t first = set->hot_offset / set->page_size;

	return (first + position * hot_step(set)) % page_count(set);
}

static bool is_hot(const struct hotset *set, uint64_t page)
{
	uint64_t first = set->hot_offset / set->page_size;
	uint64_t distance = (page + page_count(set) - first) % page_count(set);

	if (set->options.zipf)
		return set->ranks.rank[page] < hot_page_count(set);
	return distance % hot_step(set) == 0 && distance / hot_step(set) < hot_page_count(set);
}

/* The hottest pages and as many of the next ones change places. */
static void move_ranks(struct hotset *set)
{
	uint64_t hot = hot_page_count(set);

	for (uint64_t rank = 0; rank < hot && rank + hot < page_count(set); rank++) {
		uint32_t page = set->ranks.page[rank];

		place(&set->ranks, rank, set->ranks.page[rank + hot]);
		place(&set->ranks, rank + hot, page);
	}
}

static void move_window(struct hotset *set)
{
	uint64_t range = set->options.hot_size * hot_step(set);

	if (set->options.zipf)
		move_ranks(set);
	set->hot_offset = (set->hot_offset + range) % set->options.size;
	set->window++;
}

static uint64_t choose_line(struct hotset *set)
{
	uint64_t lines = set->word_count / WORDS_PER_LINE;
	uint64_t lines_per_page = set->page_size / LINE_BYTES;
	uint64_t page;

	if (set->options.zipf)
		page = draw_page(set);
	else if (below(&set->random, 100) < (uint64_t)set->options.share)
		page = hot_page(set, below(&set->random, hot_page_count(set)));
	else if (set->options.sweep)
		return set->swept++ % lines;
	else
		return below(&set->random, lines);
	return page * lines_per_page + below(&set->random, lines_per_page);
}

static void touch(struct hotset *set, uint64_t count)
{
	while (count--) {
		uint64_t first = choose_line(set) * WORDS_PER_LINE;

		set->accesses[first * sizeof(*set->words) / set->page_size]++;
		for (uint64_t index = first; index < first + WORDS_PER_LINE; index++)
			set->words[index] = changed(index, set->words[index]);
	}
}

/* `node` is the page's, or the negative errno of a page that has none. */
static void count_page(const struct hotset *set, uint64_t page, int node, struct census *census)
{
	bool fast = node >= 0 && set->options.fast_nodes >> node & 1;

	census->absent += node < 0;
	census->accesses += set->accesses[page];
	census->hits += fast ? set->accesses[page] : 0;
	if (is_hot(set, page)) {
		census->hot_pages++;
		census->hot_on_fast += fast;
		census->hot_accesses += set->accesses[page];
	} else {
		census->cold_pages++;
		census->cold_on_slow += node >= 0 && !fast;
	}
}

static struct census take_census(const struct hotset *set)
{
	struct census census = { 0 };
	void *pages[QUERY_PAGES];
	int nodes[QUERY_PAGES];
	uint64_t total = page_count(set);

	for (uint64_t first = 0; first < total; first += QUERY_PAGES) {
		uint64_t count = total - first < QUERY_PAGES ? total - first : QUERY_PAGES;

		for (uint64_t i = 0; i < count; i++)
			pages[i] = (char *)set->words + (first + i) * set->page_size;
		if (syscall(SYS_move_pages, 0, count, pages, NULL, nodes, 0))
			error(2, errno, "move_pages");
		for (uint64_t i = 0; i < count; i++)
			count_page(set, first + i, nodes[i], &census);
	}
	return census;
}

static void report(struct hotset *set, double t, double ops_per_s)
{
	struct census census = take_census(set);

	printf("{\"t\": %.2f, \"ops_per_s\": %.0f, \"window\": %u, "
	       "\"hot_pages\": %" PRIu64 ", \"hot_on_fast\": %" PRIu64 ", "
	       "\"cold_pages\": %" PRIu64 ", \"cold_on_slow\": %" PRIu64 ", "
	       "\"absent\": %" PRIu64 ", \"hit_ratio\": %.4f, \"hot_ratio\": %.4f}\n",
	       t, ops_per_s, set->window, census.hot_pages, census.hot_on_fast,
	       census.cold_pages, census.cold_on_slow, census.absent,
	       (double)census.hits / census.accesses,
	       (double)census.hot_accesses / census.accesses);
	fflush(stdout);
	memset(set->accesses, 0, page_count(set) * sizeof(*set->accesses));
}

static void wake(const struct hotset *set)
{
	if (set->options.waker && eventfd_write(set->wakes, 1))
		error(2, errno, "eventfd");
}

/* Sizes the next batch by how long one took. */
static void resize_batch(struct hotset *set, double took_s)
{
	double fits = set->batch * BATCH_S / took_s;

	set->batch = fits < BATCH_LEAST ? BATCH_LEAST : fits > BATCH_MOST ? BATCH_MOST : fits;
}

/* Works for a second, adds it to what it has worked, and returns the accesses per second. */
static double work_a_second(struct hotset *set, double *worked_s)
{
	double start = now(), begun, end = start;
	uint64_t done = 0;

	do {
		begun = end;
		touch(set, set->batch);
		done += set->batch;
		wake(set);
		end = now();
		resize_batch(set, end - begun);
	} while (end - start < 1 && !stop);
	*worked_s += end - start;
	return done / (end - start);
}

static void work(struct hotset *set)
{
	double t = 0, moved = 0;

	while (!stop) {
		double ops_per_s = work_a_second(set, &t);

		report(set, t, ops_per_s);
		if (set->options.move_every_s && t - moved >= set->options.move_every_s)
			move = 1;
		if (move) {
			move = 0;
			moved = t;
			move_window(set);
		}
		if (set->options.duration_s && t >= set->options.duration_s)
			stop = 1;
	}
}

static uint64_t count_damaged(const struct hotset *set)
{
	uint64_t damaged = 0;

	for (uint64_t index = 0; index < set->word_count; index++)
		damaged += !is_intact(index, set->words[index]);
	return damaged;
}

static void pin(int cpu)
{
	cpu_set_t cpus;

	CPU_ZERO(&cpus);
	CPU_SET(cpu, &cpus);
	if (sched_setaffinity(0, sizeof(cpus), &cpus))
		error(2, errno, "cpu %d", cpu);
}

static pid_t start_waker(int wakes)
{
	pid_t parent = getpid();
	pid_t waker = fork();
	eventfd_t count;

	if (waker < 0)
		error(2, errno, "fork");
	if (waker > 0)
		return waker;
	prctl(PR_SET_NAME, "waker");
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	while (getppid() == parent && !eventfd_read(wakes, &count))
		;
	_exit(0);
}

static void stop_waker(pid_t waker)
{
	kill(waker, SIGKILL);
	waitpid(waker, NULL, 0);
}

static void handle_signals(void)
{
	struct sigaction action = { .sa_handler = on_stop };

	sigaction(SIGTERM, &action, NULL);
	sigaction(SIGINT, &action, NULL);
	action.sa_handler = on_move;
	sigaction(SIGUSR1, &action, NULL);
}

static double number(const char *text, const char *name, double most)
{
	char *end;
	double value = strtod(text, &end);

	if (end == text || *end || !(value >= 0 && value <= most))
		error(2, 0, "--%s: not a number from 0 to %.0f: %s", name, most, text);
	return value;
}

static uint64_t size(const char *text, const char *name)
{
	return (uint64_t)number(text, name, MAX_MIB) * MIB;
}

/* A list such as 0,2 as a mask. */
static uint64_t node_mask(char *list, const char *name)
{
	uint64_t mask = 0;

	for (char *node = strtok(list, ","); node; node = strtok(NULL, ","))
		mask |= 1ULL << (int)number(node, name, MAX_NODES - 1);
	return mask;
}

static void set_option(struct options *options, int option, char *value, const char *name)
{
	switch (option) {
	case 'm':
		options->size = size(value, name);
		break;
	case 'n':
		options->node = number(value, name, MAX_NODES - 1);
		break;
	case 'h':
		options->hot_size = size(value, name);
		break;
	case 'o':
		options->hot_offset = size(value, name);
		break;
	case 's':
		options->share = number(value, name, 100);
		break;
	case 'c':
		options->cpu = number(value, name, CPU_SETSIZE - 1);
		break;
	case 'f':
		options->fast_nodes = node_mask(value, name);
		break;
	case 'e':
		options->move_every_s = number(value, name, 1e6);
		break;
	case 't':
		options->duration_s = number(value, name, 1e6);
		break;
	case 'p':
		options->stride = true;
		break;
	case 'S':
		options->sweep = true;
		break;
	case 'z':
		options->zipf = number(value, name, 10);
		break;
	case 'v':
		options->verify = true;
		break;
	case 'w':
		options->waker = false;
		break;
	default:
		exit(2);
	}
}

static void parse(int argc, char **argv, struct options *options)
{
	static const struct option known[] = {
		{ "mib", required_argument, NULL, 'm' },
		{ "node", required_argument, NULL, 'n' },
		{ "hot-mib", required_argument, NULL, 'h' },
		{ "hot-offset-mib", required_argument, NULL, 'o' },
		{ "share", required_argument, NULL, 's' },
		{ "cpu", required_argument, NULL, 'c' },
		{ "fast-nodes", required_argument, NULL, 'f' },
		{ "move-every", required_argument, NULL, 'e' },
		{ "seconds", required_argument, NULL, 't' },
		{ "stride", no_argument, NULL, 'p' },
		{ "sweep", no_argument, NULL, 'S' },
		{ "zipf", required_argument, NULL, 'z' },
		{ "verify", no_argument, NULL, 'v' },
		{ "no-waker", no_argument, NULL, 'w' },
		{ 0 },
	};
	int option, index = 0;

	while ((option = getopt_long(argc, argv, "", known, &index)) != -1)
		set_option(options, option, optarg, known[index].name);
	if (optind < argc)
		error(2, 0, "not an option: %s", argv[optind]);
}

static void check(const struct options *options)
{
	uint64_t range = options->hot_size * (options->stride ? 2 : 1);

	if (!options->hot_size || range > options->size)
		error(2, 0, "the hot window does not fit into the buffer");
	if (options->zipf && (options->stride || options->sweep))
		error(2, 0, "--zipf leaves nothing to stride or to sweep");
	if (options->hot_offset >= options->size)
		error(2, 0, "the hot window does not start in the buffer");
}

int main(int argc, char **argv)
{
	struct hotset set = {
		.options = {
			.size = 64 * MIB, .hot_size = 8 * MIB, .fast_nodes = 1, .node = -1,
			.share = 90, .cpu = -1, .waker = true,
		},
		.page_size = sysconf(_SC_PAGESIZE),
		.random = 0x853c49e6748fea9bULL,
		.batch = BATCH_LEAST,
	};
	pid_t waker = 0;
	uint64_t damaged = 0;

	parse(argc, argv, &set.options);
	check(&set.options);
	set.word_count = set.options.size / sizeof(uint64_t);
	set.hot_offset = set.options.hot_offset;
	if (set.options.cpu >= 0)
		pin(set.options.cpu);
	if (set.options.waker) {
		set.wakes = eventfd(0, EFD_CLOEXEC);
		if (set.wakes < 0)
			error(2, errno, "eventfd");
		waker = start_waker(set.wakes);
	}
	handle_signals();
	set.accesses = numbers(page_count(&set));
	if (set.options.zipf)
		make_ranks(&set);
	allocate(&set);
	work(&set);
	if (waker)
		stop_waker(waker);
	if (set.options.verify)
		damaged = count_damaged(&set);
	if (damaged)
		error(1, 0, "%" PRIu64 " of %" PRIu64 " words are damaged", damaged, set.word_count);
	return 0;
}
