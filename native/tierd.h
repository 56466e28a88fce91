/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The shim between Python and the kernel: what Python cannot do, or where a batch pays.
 *
 * Every function returns a negative errno on failure and leaves its ret_ outputs untouched then.
 * None logs, keeps global state, or calls back into Python; cffi releases the GIL around each.
 */
#ifndef TIERD_H
#define TIERD_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* cffi: begin */

/**
 * struct tierd_folio - one folio of a process, by the address of its first mapped page
 * @addr: virtual address, bytes
 * @pages: base pages that the folio spans in the mapping
 * @node: NUMA node when >= 0, else a negative errno of move_pages(2)
 */
struct tierd_folio {
	uint64_t addr;
	uint32_t pages;
	int32_t node;
};

/* cffi: end */
#endif
