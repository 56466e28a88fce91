/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A client of redis that reads keys by Zipf's law, and tells where the values lie that it read.
 *
 *   redis_reads SOCKET SERVER_PID KEYS VALUE_BYTES EXPONENT HOT_KEYS FAST_NODE
 *
 * The keys are those of `DEBUG POPULATE KEYS key VALUE_BYTES`: key:7 has the value value:7, followed
 * by zeros. The key of rank r is read in proportion to r^-EXPONENT; keys have their ranks at random,
 * and the first HOT_KEYS ranks count as hot. Values are found in the server's memory by their
 * content, and their pages asked of move_pages(2); a value counts as lying where it begins.
 *
 * Each second it prints a line as hotset does, with values for pages. SIGTERM ends it; 1 is the exit
 * status of a value that is not its key's.
 */
#include <errno.h>
#include <error.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "common.h"

#define BATCH 32
#define QUERY 4096
#define PIECE (1 << 20)
#define NAME_BYTES 32

struct reads {
	int socket;
	FILE *replies;
	int server;
	int fast_node;
	uint64_t random;
	uint32_t keys, hot_keys, value_bytes;
	double *until;      /* of a rank: the share of reads of it and of those before it */
	uint32_t *key;      /* of a rank */
	uint32_t *rank;     /* of a key */
	uint32_t *accesses; /* of a key since the last report */
	void **value;       /* of a key, in the server */
	char *reply;
};

struct census {
	uint64_t hot, hot_on_fast, cold, cold_on_slow, absent, accesses, hits, hot_accesses;
};

static volatile sig_atomic_t stop;

static void on_stop(int signal)
{
	(void)signal;
	stop = 1;
}

static void *table(size_t count, size_t size)
{
	void *made = calloc(count, size);

	if (!made)
		error(2, errno, "calloc");
	return made;
}

static void make_ranks(struct reads *reads, double exponent)
{
	double total = 0;

	reads->until = table(reads->keys, sizeof(double));
	reads->key = table(reads->keys, sizeof(uint32_t));
	reads->rank = table(reads->keys, sizeof(uint32_t));
	for (uint32_t rank = 0; rank < reads->keys; rank++) {
		uint32_t other = next_random(&reads->random) % (rank + 1);

		reads->key[rank] = reads->key[other];
		reads->key[other] = rank;
		reads->until[rank] = total += pow(rank + 1, -exponent);
	}
	for (uint32_t rank = 0; rank < reads->keys; rank++) {
		reads->rank[reads->key[rank]] = rank;
		reads->until[rank] /= total;
	}
}

static uint32_t draw_key(struct reads *reads)
{
	double drawn = (next_random(&reads->random) >> 11) * 0x1p-53;
	uint32_t low = 0, high = reads->keys - 1;

	while (low < high) {
		uint32_t middle = (low + high) / 2;

		if (reads->until[middle] < drawn)
			low = middle + 1;
		else
			high = middle;
	}
	return reads->key[low];
}

/* Notes the values that begin in a piece of the server's memory, which is at `start` there. */
static void note_values(struct reads *reads, char *piece, size_t length, uint64_t start)
{
	static const char mark[] = "value:";
	char *at = piece, *end = piece + length, *after;

	while ((at = memmem(at, end - at, mark, sizeof(mark) - 1))) {
		uint64_t key = strtoull(at + sizeof(mark) - 1, &after, 10);

		if (after > at + sizeof(mark) - 1 && !*after && key < reads->keys)
			reads->value[key] = (void *)(start + (at - piece));
		at += sizeof(mark) - 1;
	}
}

static void search(struct reads *reads, FILE *memory, uint64_t start, uint64_t end)
{
	static char piece[PIECE + NAME_BYTES + 1];

	/* Pieces overlap by the length of a value's beginning. */
	for (uint64_t at = start; at < end; at += PIECE) {
		size_t wanted = end - at < PIECE + NAME_BYTES ? end - at : PIECE + NAME_BYTES;

		if (fseeko(memory, at, SEEK_SET))
			error(2, errno, "fseeko");
		memset(piece, 0, sizeof(piece));
		note_values(reads, piece, fread(piece, 1, wanted, memory), at);
	}
}

static FILE *open_of(int pid, const char *name)
{
	char path[64];
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/%s", pid, name);
	file = fopen(path, "r");
	if (!file)
		error(2, errno, "%s", path);
	return file;
}

static void find_values(struct reads *reads)
{
	FILE *maps = open_of(reads->server, "maps"), *memory = open_of(reads->server, "mem");
	uint64_t start, end, inode;
	char line[512], mode[8];

	reads->value = table(reads->keys, sizeof(void *));
	while (fgets(line, sizeof(line), maps))
		if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %7s %*s %*s %" SCNu64, &start, &end, mode,
			   &inode) == 4 && !strncmp(mode, "rw", 2) && !inode)
			search(reads, memory, start, end);
	for (uint32_t key = 0; key < reads->keys; key++)
		if (!reads->value[key])
			error(2, 0, "value:%" PRIu32 " was not found", key);
	fclose(memory);
	fclose(maps);
}

static void connect_to(struct reads *reads, const char *path)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };

	strncpy(address.sun_path, path, sizeof(address.sun_path) - 1);
	reads->socket = socket(AF_UNIX, SOCK_STREAM, 0);
	if (reads->socket < 0 || connect(reads->socket, (void *)&address, sizeof(address)))
		error(2, errno, "%s", path);
	reads->replies = fdopen(reads->socket, "r");
	if (!reads->replies)
		error(2, errno, "fdopen");
}

/* Takes "$4090\r\nvalue:7...\r\n" for key 7. */
static void take_reply(struct reads *reads, uint32_t key)
{
	char wanted[NAME_BYTES], length[NAME_BYTES];

	snprintf(wanted, sizeof(wanted), "value:%" PRIu32, key);
	if (!fgets(length, sizeof(length), reads->replies) ||
	    fread(reads->reply, 1, reads->value_bytes + 2, reads->replies) != reads->value_bytes + 2)
		error(2, errno, "the server is gone");
	if (strtoul(length + 1, NULL, 10) != reads->value_bytes || strcmp(reads->reply, wanted))
		error(1, 0, "key:%" PRIu32 " has another value", key);
	reads->accesses[key]++;
}

static void read_batch(struct reads *reads)
{
	char requests[BATCH * NAME_BYTES];
	uint32_t keys[BATCH];
	size_t length = 0;

	for (int i = 0; i < BATCH; i++) {
		keys[i] = draw_key(reads);
		length += sprintf(requests + length, "GET key:%" PRIu32 "\r\n", keys[i]);
	}
	if (write(reads->socket, requests, length) != (ssize_t)length)
		error(2, errno, "write");
	for (int i = 0; i < BATCH; i++)
		take_reply(reads, keys[i]);
}

static void count_value(const struct reads *reads, uint32_t key, int node, struct census *census)
{
	bool fast = node == reads->fast_node;

	census->absent += node < 0;
	census->accesses += reads->accesses[key];
	census->hits += fast ? reads->accesses[key] : 0;
	if (reads->rank[key] < reads->hot_keys) {
		census->hot++;
		census->hot_on_fast += fast;
		census->hot_accesses += reads->accesses[key];
	} else {
		census->cold++;
		census->cold_on_slow += node >= 0 && !fast;
	}
}

static struct census take_census(const struct reads *reads)
{
	struct census census = { 0 };
	int nodes[QUERY];

	for (uint32_t first = 0; first < reads->keys; first += QUERY) {
		uint32_t count = reads->keys - first < QUERY ? reads->keys - first : QUERY;

		if (syscall(SYS_move_pages, reads->server, (unsigned long)count,
			    reads->value + first, NULL, nodes, 0))
			error(2, errno, "move_pages");
		for (uint32_t i = 0; i < count; i++)
			count_value(reads, first + i, nodes[i], &census);
	}
	return census;
}

static void report(struct reads *reads, double t, double ops_per_s)
{
	struct census census = take_census(reads);

	printf("{\"t\": %.2f, \"ops_per_s\": %.0f, \"window\": 0, \"hot_pages\": %" PRIu64 ", "
	       "\"hot_on_fast\": %" PRIu64 ", \"cold_pages\": %" PRIu64 ", "
	       "\"cold_on_slow\": %" PRIu64 ", \"absent\": %" PRIu64 ", "
	       "\"hit_ratio\": %.4f, \"hot_ratio\": %.4f}\n",
	       t, ops_per_s, census.hot, census.hot_on_fast, census.cold,
	       census.cold_on_slow, census.absent, (double)census.hits / census.accesses,
	       (double)census.hot_accesses / census.accesses);
	fflush(stdout);
	memset(reads->accesses, 0, reads->keys * sizeof(*reads->accesses));
}

/* Reads for a second, adds it to what it has read, and returns the reads per second. */
static double read_a_second(struct reads *reads, double *read_s)
{
	double start = now(), end;
	uint64_t done = 0;

	do {
		read_batch(reads);
		done += BATCH;
		end = now();
	} while (end - start < 1 && !stop);
	*read_s += end - start;
	return done / (end - start);
}

int main(int argc, char **argv)
{
	struct reads reads = { .random = 0x853c49e6748fea9bULL };
	struct sigaction action = { .sa_handler = on_stop };
	double t = 0;

	if (argc != 8)
		error(2, 0, "SOCKET SERVER_PID KEYS VALUE_BYTES EXPONENT HOT_KEYS FAST_NODE");
	reads.server = atoi(argv[2]);
	reads.keys = atoi(argv[3]);
	reads.value_bytes = atoi(argv[4]);
	reads.hot_keys = atoi(argv[6]);
	reads.fast_node = atoi(argv[7]);
	reads.accesses = table(reads.keys, sizeof(*reads.accesses));
	reads.reply = table(reads.value_bytes + 3, 1);
	/* A write or read that a signal interrupts is restarted. */
	action.sa_flags = SA_RESTART;
	sigaction(SIGTERM, &action, NULL);
	make_ranks(&reads, atof(argv[5]));
	find_values(&reads);
	connect_to(&reads, argv[1]);
	while (!stop) {
		double ops_per_s = read_a_second(&reads, &t);

		report(&reads, t, ops_per_s);
	}
	return 0;
}
