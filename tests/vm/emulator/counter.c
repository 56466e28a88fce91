/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A plugin of QEMU's: counts the instructions that each CPU of an x86 guest runs.
 *
 *   -plugin counter.so,into=FILE
 *
 * FILE holds a struct count for each CPU, in the order in which they first ran with data of their own,
 * which is that of their numbers.
 *
 * Where CPUs take turns on one thread QEMU 10 tells callbacks the number of the CPU that a block was
 * translated for (accel/tcg/plugin-gen.c: gen_cpu_index), whichever runs it. So CPUs are told apart by
 * where their own data begins, GS's base, each SAMPLE instructions; turns are a hundred times as long.
 * With a thread for each CPU it would count wrongly.
 *
 * Debian packages QEMU's headers nowhere; these declarations follow include/qemu/qemu-plugin.h of
 * QEMU 10.0, version 4 of that interface, and GLib's garray.h.
 */
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define COUNTS 64
#define SAMPLE 4096
#define KERNEL (1ULL << 63)

struct count {
	uint64_t base;
	uint64_t instructions;
};

typedef uint64_t qemu_plugin_id_t;
typedef struct qemu_info_t qemu_info_t;
struct qemu_plugin_tb;
struct qemu_plugin_register;

typedef struct {
	struct qemu_plugin_register *handle;
	const char *name;
	const char *feature;
} qemu_plugin_reg_descriptor;

typedef struct {
	char *data;
	unsigned int len;
} GArray;

typedef struct {
	uint8_t *data;
	unsigned int len;
} GByteArray;

enum qemu_plugin_cb_flags { QEMU_PLUGIN_CB_NO_REGS, QEMU_PLUGIN_CB_R_REGS };

typedef void (*qemu_plugin_vcpu_simple_cb_t)(qemu_plugin_id_t id, unsigned int cpu);
typedef void (*qemu_plugin_vcpu_tb_trans_cb_t)(qemu_plugin_id_t id, struct qemu_plugin_tb *tb);
typedef void (*qemu_plugin_vcpu_udata_cb_t)(unsigned int cpu, void *data);

GByteArray *g_byte_array_new(void);
GByteArray *g_byte_array_set_size(GByteArray *array, unsigned int length);
GArray *qemu_plugin_get_registers(void);
int qemu_plugin_read_register(struct qemu_plugin_register *handle, GByteArray *buffer);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
void qemu_plugin_register_vcpu_init_cb(qemu_plugin_id_t id, qemu_plugin_vcpu_simple_cb_t cb);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id, qemu_plugin_vcpu_tb_trans_cb_t cb);
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *tb, qemu_plugin_vcpu_udata_cb_t cb,
					  enum qemu_plugin_cb_flags flags, void *data);

int qemu_plugin_version = 4;

static struct count *counts;
static struct qemu_plugin_register *in_kernel, *in_user; /* what has the base */
static GByteArray *buffer;
static uint64_t uncounted;

static uint64_t value(struct qemu_plugin_register *handle)
{
	uint64_t number = 0;

	g_byte_array_set_size(buffer, 0);
	if (qemu_plugin_read_register(handle, buffer) == sizeof(number))
		memcpy(&number, buffer->data, sizeof(number));
	return number;
}

/* 0 before Linux runs. */
static uint64_t base(void)
{
	uint64_t number = value(in_kernel);

	if (!(number & KERNEL))
		number = value(in_user);
	return number & KERNEL ? number : 0;
}

static struct count *count_of(uint64_t cpu_base)
{
	struct count *count = counts;

	while (count < counts + COUNTS - 1 && count->base && count->base != cpu_base)
		count++;
	count->base = cpu_base;
	return count;
}

static void on_run(unsigned int cpu, void *instructions)
{
	uint64_t cpu_base;

	(void)cpu;
	uncounted += (uintptr_t)instructions;
	if (uncounted < SAMPLE)
		return;
	cpu_base = base();
	if (cpu_base)
		count_of(cpu_base)->instructions += uncounted;
	uncounted = 0;
}

static void on_translated(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
	(void)id;
	qemu_plugin_register_vcpu_tb_exec_cb(tb, on_run, QEMU_PLUGIN_CB_R_REGS,
					     (void *)qemu_plugin_tb_n_insns(tb));
}

static void on_cpu(qemu_plugin_id_t id, unsigned int cpu)
{
	GArray *registers = qemu_plugin_get_registers();
	qemu_plugin_reg_descriptor *each = (void *)registers->data;

	(void)id;
	(void)cpu;
	for (unsigned int i = 0; i < registers->len; i++) {
		if (!strcmp(each[i].name, "gs_base"))
			in_kernel = each[i].handle;
		if (!strcmp(each[i].name, "k_gs_base"))
			in_user = each[i].handle;
	}
}

static struct count *mapped(const char *path)
{
	size_t size = COUNTS * sizeof(struct count);
	int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	void *map = MAP_FAILED;

	if (file >= 0 && !ftruncate(file, size))
		map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (file >= 0)
		close(file);
	return map == MAP_FAILED ? NULL : map;
}

int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc, char **argv)
{
	static const char into[] = "into=";

	(void)info;
	if (argc != 1 || strncmp(argv[0], into, sizeof(into) - 1)) {
		fprintf(stderr, "counter: into=FILE is all it takes, and it has to be there\n");
		return -1;
	}
	counts = mapped(argv[0] + sizeof(into) - 1);
	if (!counts) {
		fprintf(stderr, "counter: %s: %s\n", argv[0], strerror(errno));
		return -1;
	}
	buffer = g_byte_array_new();
	qemu_plugin_register_vcpu_init_cb(id, on_cpu);
	qemu_plugin_register_vcpu_tb_trans_cb(id, on_translated);
	return 0;
}
