/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A fake of libcuda.so.1, for tests on machines without a card. It is not CUDA: what it has is what
 * tierd calls, as CUDA's documents say that it behaves, and it says nothing of a card's speed.
 *
 * A card's addresses are reserved without access, so that a CPU that follows one ends by SIGSEGV; what
 * is in a granule lies elsewhere. A stream is a thread, and each of its copies is made a moment later, or
 * when the test allows it: until then its memory is in use, and to unmap a granule is to abort().
 *
 * FAKE_CUDA_BYTES is the size of its memory, FAKE_CUDA_CONTROL a file with a struct control.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define GRANULE (2UL << 20)
#define STREAM (64UL << 10) /* a stream takes so much of the card's memory */
#define MOST 4096

enum {
	SUCCESS = 0,
	INVALID_VALUE = 1,
	OUT_OF_MEMORY = 2,
	NO_DEVICE = 100,
	INVALID_CONTEXT = 201,
	NOT_FOUND = 500,
	NOT_READY = 600,
	ALREADY_REGISTERED = 712,
	NOT_REGISTERED = 713,
};

struct control {
	uint32_t cards; /* how many there are */
	uint32_t hold; /* not 0: no copy is made */
	uint32_t error; /* what each call on the card comes to, and each copy that is not made yet */
	uint32_t deny; /* not 0: no memory is pinned */
	uint32_t pinned; /* told by this library: how many ranges are */
	uint32_t copies; /* likewise, how many copies were made */
};

struct location {
	int type;
	int id;
};

struct kind {
	int type;
	int handles;
	struct location location;
};

struct granule {
	char *bytes;
	uint64_t at; /* where it is mapped, 0 where it is not */
	int released;
	int access;
};

struct range {
	uint64_t at;
	uint64_t size;
};

struct event {
	int done;
	int error;
};

struct work {
	struct work *next;
	struct event *event; /* else a copy */
	uint64_t device;
	char *host;
	uint64_t size;
	uint64_t to; /* of a copy within the card */
	int is_in;
};

struct stream {
	pthread_t thread;
	pthread_mutex_t lock;
	pthread_cond_t more;
	struct work *first;
	int busy;
	int ends;
};

static volatile struct control *control;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct granule granules[MOST];
static struct range reserved[MOST], pinned[MOST];
static struct stream *streams[MOST];
static uint64_t used;
static int retained;
static _Thread_local int has_context;

static uint64_t memory_bytes(void)
{
	const char *told = getenv("FAKE_CUDA_BYTES");

	return told ? strtoull(told, NULL, 0) : 64UL << 20;
}

static int cuInit(unsigned flags)
{
	const char *path = getenv("FAKE_CUDA_CONTROL");
	int fd = path ? open(path, O_RDWR) : -1;

	if (flags)
		return INVALID_VALUE;
	if (fd < 0) {
		fprintf(stderr, "fake libcuda: FAKE_CUDA_CONTROL names no file\n");
		abort();
	}
	control = mmap(NULL, sizeof(*control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (control == MAP_FAILED)
		abort();
	return control->cards ? SUCCESS : NO_DEVICE;
}

/* What any call on the card comes to, before it does anything. */
static int refused(void)
{
	return !has_context ? INVALID_CONTEXT : (int)control->error;
}

static int cuDriverGetVersion(int *version)
{
	*version = 13000;
	return SUCCESS;
}

static int cuDeviceGetCount(int *count)
{
	*count = (int)control->cards;
	return SUCCESS;
}

static int cuDeviceGet(int *device, int number)
{
	if (number < 0 || number >= (int)control->cards)
		return INVALID_VALUE;
	*device = number;
	return SUCCESS;
}

static int cuDeviceGetName(char *name, int size, int device)
{
	snprintf(name, (size_t)size, "Fake CUDA card %d (no real one)", device);
	return SUCCESS;
}

static int cuDeviceGetUuid(unsigned char *uuid, int device)
{
	for (int i = 0; i < 16; i++)
		uuid[i] = (unsigned char)(i << 4 | device);
	return SUCCESS;
}

static int cuDeviceGetPCIBusId(char *id, int size, int device)
{
	snprintf(id, (size_t)size, "0000:%02X:00.0", 0xa5 + device);
	return SUCCESS;
}

static int cuDevicePrimaryCtxRetain(void **context, int device)
{
	if (control->error)
		return (int)control->error;
	retained++;
	*context = (void *)(uintptr_t)(0x1000 + device);
	return SUCCESS;
}

static int cuDevicePrimaryCtxRelease(int device)
{
	(void)device;
	if (retained-- == 0)
		return INVALID_CONTEXT;
	return SUCCESS;
}

static int cuCtxSetCurrent(void *context)
{
	has_context = context && retained;
	return has_context ? SUCCESS : INVALID_CONTEXT;
}

static int cuMemGetInfo(size_t *free_bytes, size_t *total)
{
	if (refused())
		return refused();
	*free_bytes = memory_bytes() - used;
	*total = memory_bytes();
	return SUCCESS;
}

static int cuMemGetAllocationGranularity(size_t *size, const struct kind *kind, int option)
{
	(void)option;
	if (kind->type != 1 || kind->location.type != 1)
		return INVALID_VALUE;
	*size = GRANULE;
	return SUCCESS;
}

static struct range *find_range(struct range *ranges, uint64_t at)
{
	for (int i = 0; i < MOST; i++)
		if (ranges[i].at == at && (at || !ranges[i].size))
			return &ranges[i];
	abort();
}

static int has_range(const struct range *ranges, uint64_t at)
{
	for (int i = 0; i < MOST; i++)
		if (ranges[i].at == at)
			return 1;
	return 0;
}

static int cuMemAddressReserve(uint64_t *at, size_t size, size_t align, uint64_t hint, uint64_t flags)
{
	char *found;
	uint64_t start;

	(void)hint;
	if (refused())
		return refused();
	if (size == 0 || size % GRANULE || align || flags)
		return INVALID_VALUE;
	found = mmap(NULL, size + GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (found == MAP_FAILED)
		return OUT_OF_MEMORY;
	start = ((uint64_t)(uintptr_t)found + GRANULE - 1) / GRANULE * GRANULE;
	pthread_mutex_lock(&lock);
	*find_range(reserved, 0) = (struct range){ start, size };
	pthread_mutex_unlock(&lock);
	*at = start;
	return SUCCESS;
}

static int cuMemAddressFree(uint64_t at, size_t size)
{
	int ret = SUCCESS;

	pthread_mutex_lock(&lock);
	for (int i = 0; i < MOST; i++)
		if (granules[i].at >= at && granules[i].at < at + size)
			ret = INVALID_VALUE; /* it is still mapped */
	if (ret == SUCCESS && (!has_range(reserved, at) || find_range(reserved, at)->size != size))
		ret = INVALID_VALUE;
	if (ret == SUCCESS)
		*find_range(reserved, at) = (struct range){ 0 };
	pthread_mutex_unlock(&lock);
	return ret; /* its addresses are never used again, so that a stale one is found */
}

static int cuMemCreate(uint64_t *handle, size_t size, const struct kind *kind, uint64_t flags)
{
	int i = 0;

	if (refused())
		return refused();
	if (size != GRANULE || kind->type != 1 || kind->location.type != 1 || flags)
		return INVALID_VALUE;
	if (used + size > memory_bytes())
		return OUT_OF_MEMORY;
	while (granules[i].bytes)
		i++;
	used += size;
	granules[i] = (struct granule){ .bytes = malloc(size) };
	memset(granules[i].bytes, 0xcd, size);
	*handle = (uint64_t)i + 1;
	return SUCCESS;
}

static void drop_granule(struct granule *granule)
{
	if (granule->at || !granule->released)
		return;
	free(granule->bytes);
	*granule = (struct granule){ 0 };
	used -= GRANULE;
}

static int cuMemRelease(uint64_t handle)
{
	struct granule *granule = &granules[handle - 1];

	if (handle == 0 || handle > MOST || !granule->bytes || granule->released)
		return INVALID_VALUE;
	granule->released = 1;
	drop_granule(granule);
	return SUCCESS;
}

static int cuMemMap(uint64_t at, size_t size, size_t offset, uint64_t handle, uint64_t flags)
{
	if (refused())
		return refused();
	if (size != GRANULE || offset || flags || at % GRANULE || granules[handle - 1].at)
		return INVALID_VALUE;
	granules[handle - 1].at = at;
	return SUCCESS;
}

static struct granule *granule_at(uint64_t at)
{
	for (int i = 0; i < MOST; i++)
		if (granules[i].at && at >= granules[i].at && at < granules[i].at + GRANULE)
			return &granules[i];
	return NULL;
}

static int cuMemSetAccess(uint64_t at, size_t size, const void *access, size_t count)
{
	(void)access;
	if (refused())
		return refused();
	for (uint64_t end = at + size; at < end; at += GRANULE) {
		if (!granule_at(at) || count != 1)
			return INVALID_VALUE;
		granule_at(at)->access = 1;
	}
	return SUCCESS;
}

static int cuMemUnmap(uint64_t at, size_t size)
{
	struct granule *granule = granule_at(at);

	if (!granule || granule->at != at || size != GRANULE)
		return INVALID_VALUE;
	for (int i = 0; i < MOST; i++) {
		if (streams[i] && (streams[i]->first || streams[i]->busy)) {
			fprintf(stderr, "fake libcuda: unmapped while copies are under way\n");
			abort();
		}
	}
	granule->at = 0;
	granule->access = 0;
	drop_granule(granule);
	return SUCCESS;
}

/* Copies between memory and whatever granules are behind the card's addresses. */
static int copy(const struct work *work)
{
	for (uint64_t done = 0; done < work->size;) {
		struct granule *granule = granule_at(work->device + done);
		uint64_t inside, rest;

		if (!granule || !granule->access)
			return INVALID_VALUE;
		inside = work->device + done - granule->at;
		rest = GRANULE - inside < work->size - done ? GRANULE - inside : work->size - done;
		if (work->to) {
			struct granule *to = granule_at(work->to + done);
			uint64_t beyond = to ? work->to + done - to->at : 0;

			if (!to || !to->access)
				return INVALID_VALUE;
			rest = GRANULE - beyond < rest ? GRANULE - beyond : rest;
			memmove(to->bytes + beyond, granule->bytes + inside, rest);
		} else if (work->is_in) {
			memcpy(granule->bytes + inside, work->host + done, rest);
		} else {
			memcpy(work->host + done, granule->bytes + inside, rest);
		}
		done += rest;
	}
	control->copies++;
	return SUCCESS;
}

static void pause_a_moment(void)
{
	struct timespec moment = { .tv_nsec = 200000 };

	nanosleep(&moment, NULL);
}

static void *work_off(void *argument)
{
	struct stream *stream = argument;
	int failed = 0;

	for (;;) {
		struct work *work;

		pthread_mutex_lock(&stream->lock);
		stream->busy = 0;
		while (!stream->first && !stream->ends)
			pthread_cond_wait(&stream->more, &stream->lock);
		work = stream->first;
		if (!work) {
			pthread_mutex_unlock(&stream->lock);
			return NULL;
		}
		stream->busy = 1;
		stream->first = work->next;
		pthread_mutex_unlock(&stream->lock);
		pause_a_moment();
		while (control->hold && !control->error)
			pause_a_moment();
		if (control->error)
			failed = (int)control->error;
		if (!work->event && !failed)
			failed = copy(work);
		if (work->event) {
			work->event->error = failed;
			__atomic_store_n(&work->event->done, 1, __ATOMIC_RELEASE);
		}
		free(work);
	}
}

static int cuStreamCreate(struct stream **ret_stream, unsigned flags)
{
	struct stream *stream;
	int i = 0;

	if (refused())
		return refused();
	if (flags != 1)
		return INVALID_VALUE;
	if (used + STREAM > memory_bytes())
		return OUT_OF_MEMORY;
	used += STREAM;
	stream = calloc(1, sizeof(*stream));
	pthread_mutex_init(&stream->lock, NULL);
	pthread_cond_init(&stream->more, NULL);
	pthread_mutex_lock(&lock);
	while (streams[i])
		i++;
	streams[i] = stream;
	pthread_mutex_unlock(&lock);
	pthread_create(&stream->thread, NULL, work_off, stream);
	*ret_stream = stream;
	return SUCCESS;
}

static int cuStreamDestroy(struct stream *stream)
{
	pthread_mutex_lock(&stream->lock);
	stream->ends = 1;
	pthread_cond_signal(&stream->more);
	pthread_mutex_unlock(&stream->lock);
	pthread_join(stream->thread, NULL);
	for (int i = 0; i < MOST; i++)
		if (streams[i] == stream)
			streams[i] = NULL;
	used -= STREAM;
	free(stream);
	return SUCCESS;
}

static void add_work(struct stream *stream, struct work work)
{
	struct work **last = &stream->first, *added = malloc(sizeof(work));

	*added = work;
	pthread_mutex_lock(&stream->lock);
	while (*last)
		last = &(*last)->next;
	*last = added;
	pthread_cond_signal(&stream->more);
	pthread_mutex_unlock(&stream->lock);
}

static int cuCtxSynchronize(void)
{
	int busy = 1;

	while (busy && !refused()) {
		busy = 0;
		for (int i = 0; i < MOST; i++)
			busy |= streams[i] && (streams[i]->first || streams[i]->busy);
		pause_a_moment();
	}
	return refused();
}

static int cuMemcpyHtoDAsync(uint64_t to, char *from, size_t size, struct stream *stream)
{
	if (refused())
		return refused();
	add_work(stream, (struct work){ .device = to, .host = from, .size = size, .is_in = 1 });
	return SUCCESS;
}

static int cuMemcpyDtoHAsync(char *to, uint64_t from, size_t size, struct stream *stream)
{
	if (refused())
		return refused();
	add_work(stream, (struct work){ .device = from, .host = to, .size = size });
	return SUCCESS;
}

static int cuMemcpyDtoDAsync(uint64_t to, uint64_t from, size_t size, struct stream *stream)
{
	if (refused())
		return refused();
	add_work(stream, (struct work){ .device = from, .to = to, .size = size });
	return SUCCESS;
}

static int cuEventCreate(struct event **ret_event, unsigned flags)
{
	(void)flags;
	if (refused())
		return refused();
	*ret_event = calloc(1, sizeof(struct event));
	(*ret_event)->done = 1;
	return SUCCESS;
}

static int cuEventRecord(struct event *event, struct stream *stream)
{
	if (refused())
		return refused();
	event->done = 0;
	add_work(stream, (struct work){ .event = event });
	return SUCCESS;
}

static int cuEventQuery(struct event *event)
{
	if (refused())
		return refused();
	return __atomic_load_n(&event->done, __ATOMIC_ACQUIRE) ? event->error : NOT_READY;
}

static int cuEventDestroy(struct event *event)
{
	free(event);
	return SUCCESS;
}

static int cuMemHostRegister(char *host, size_t size, unsigned flags)
{
	int ret = SUCCESS;

	(void)flags;
	if (refused())
		return refused();
	if (control->deny)
		return OUT_OF_MEMORY;
	pthread_mutex_lock(&lock);
	for (int i = 0; i < MOST; i++)
		if (pinned[i].at < (uint64_t)(uintptr_t)host + size &&
		    (uint64_t)(uintptr_t)host < pinned[i].at + pinned[i].size)
			ret = ALREADY_REGISTERED;
	if (ret == SUCCESS) {
		*find_range(pinned, 0) = (struct range){ (uint64_t)(uintptr_t)host, size };
		control->pinned++;
	}
	pthread_mutex_unlock(&lock);
	return ret;
}

static int cuMemHostUnregister(char *host)
{
	int ret = SUCCESS;

	pthread_mutex_lock(&lock);
	if (has_range(pinned, (uint64_t)(uintptr_t)host)) {
		*find_range(pinned, (uint64_t)(uintptr_t)host) = (struct range){ 0 };
		control->pinned--;
	} else {
		ret = NOT_REGISTERED;
	}
	pthread_mutex_unlock(&lock);
	return ret;
}

__attribute__((visibility("default"))) int cuGetProcAddress_v2(const char *name, void **ret_function,
							       int version, uint64_t flags, int *status);

#define CALL(name) { #name, (void *)name }

static const struct {
	const char *name;
	void *function;
} calls[] = {
	CALL(cuCtxSetCurrent),
	CALL(cuCtxSynchronize),
	CALL(cuDeviceGet),
	CALL(cuDeviceGetCount),
	CALL(cuDeviceGetName),
	CALL(cuDeviceGetPCIBusId),
	CALL(cuDeviceGetUuid),
	CALL(cuDevicePrimaryCtxRelease),
	CALL(cuDevicePrimaryCtxRetain),
	CALL(cuDriverGetVersion),
	CALL(cuEventCreate),
	CALL(cuEventDestroy),
	CALL(cuEventQuery),
	CALL(cuEventRecord),
	CALL(cuInit),
	CALL(cuMemAddressFree),
	CALL(cuMemAddressReserve),
	CALL(cuMemCreate),
	CALL(cuMemGetAllocationGranularity),
	CALL(cuMemGetInfo),
	CALL(cuMemHostRegister),
	CALL(cuMemHostUnregister),
	CALL(cuMemMap),
	CALL(cuMemRelease),
	CALL(cuMemSetAccess),
	CALL(cuMemUnmap),
	CALL(cuMemcpyDtoDAsync),
	CALL(cuMemcpyDtoHAsync),
	CALL(cuMemcpyHtoDAsync),
	CALL(cuStreamCreate),
	CALL(cuStreamDestroy),
	{ "cuGetProcAddress", (void *)cuGetProcAddress_v2 },
};

int cuGetProcAddress_v2(const char *name, void **ret_function, int version, uint64_t flags, int *status)
{
	(void)version;
	(void)flags;
	*ret_function = NULL;
	if (status)
		*status = 1;
	for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
		if (strcmp(calls[i].name, name) == 0) {
			*ret_function = calls[i].function;
			if (status)
				*status = 0;
			return SUCCESS;
		}
	}
	return NOT_FOUND;
}
