/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Processes that begin, change or end, as the kernel's process connector tells them.
 *
 * Follows drivers/connector/cn_proc.c and include/uapi/linux/cn_proc.h. Each event is a netlink
 * message of its own: struct nlmsghdr, struct cn_msg, struct proc_event.
 */
#include "tierd.h"

#include <errno.h>
#include <linux/cn_proc.h>
#include <linux/connector.h>
#include <linux/netlink.h>
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>

#define MESSAGES 64 /* of one recvmmsg(2) */

#define HEADERS (sizeof(struct nlmsghdr) + sizeof(struct cn_msg))

/* One recvmmsg(2), with room for what a later kernel may add to an event. */
struct batch {
	struct mmsghdr headers[MESSAGES];
	struct iovec vectors[MESSAGES];
	struct sockaddr_nl senders[MESSAGES];
	char buffers[MESSAGES][256];
};

static void prepare(struct batch *batch)
{
	memset(batch->headers, 0, sizeof(batch->headers));
	for (size_t i = 0; i < MESSAGES; i++) {
		batch->vectors[i] = (struct iovec){ batch->buffers[i], sizeof(batch->buffers[i]) };
		batch->headers[i].msg_hdr = (struct msghdr){
			.msg_name = &batch->senders[i],
			.msg_namelen = sizeof(batch->senders[i]),
			.msg_iov = &batch->vectors[i],
			.msg_iovlen = 1,
		};
	}
}

static bool is_from_kernel(const char *message, const struct sockaddr_nl *sender)
{
	struct nlmsghdr netlink;
	struct cn_msg connector;

	memcpy(&netlink, message, sizeof(netlink));
	memcpy(&connector, message + sizeof(netlink), sizeof(connector));
	return sender->nl_pid == 0 && netlink.nlmsg_type == NLMSG_DONE &&
	       connector.id.idx == CN_IDX_PROC && connector.id.val == CN_VAL_PROC;
}

/* Takes a whole process's event; threads come and go without notice. */
static bool take(const struct proc_event *event, struct tierd_proc_event *ret_event)
{
	struct tierd_proc_event taken = { .kind = TIERD_PROC_CHANGED };
	int32_t thread;

	switch (event->what) {
	case PROC_EVENT_FORK:
		thread = event->event_data.fork.child_pid;
		taken.pid = event->event_data.fork.child_tgid;
		break;
	case PROC_EVENT_EXEC:
		thread = taken.pid = event->event_data.exec.process_tgid;
		break;
	case PROC_EVENT_UID:
		thread = event->event_data.id.process_pid;
		taken.pid = event->event_data.id.process_tgid;
		break;
	case PROC_EVENT_COMM:
		thread = event->event_data.comm.process_pid;
		taken.pid = event->event_data.comm.process_tgid;
		break;
	case PROC_EVENT_EXIT:
		thread = event->event_data.exit.process_pid;
		taken.pid = event->event_data.exit.process_tgid;
		taken.kind = TIERD_PROC_ENDED;
		break;
	default:
		return false;
	}
	if (thread != taken.pid)
		return false;
	*ret_event = taken;
	return true;
}

int tierd_read_proc_events(int socket, uint32_t capacity, struct tierd_proc_event *ret_events,
			   uint32_t *ret_lost)
{
	struct batch batch;
	uint32_t count = 0, lost = 0;

	while (capacity - count >= MESSAGES) {
		int received;

		prepare(&batch);
		received = recvmmsg(socket, batch.headers, MESSAGES, MSG_DONTWAIT, NULL);
		if (received < 0 && errno == ENOBUFS) {
			lost++;
			continue;
		}
		if (received < 0 && (errno == EAGAIN || errno == EINTR))
			break;
		if (received < 0)
			return -errno;
		for (int i = 0; i < received; i++) {
			const char *message = batch.buffers[i];
			struct proc_event event;

			if (batch.headers[i].msg_len < HEADERS + sizeof(event))
				continue;
			memcpy(&event, message + HEADERS, sizeof(event));
			if (is_from_kernel(message, &batch.senders[i]))
				count += take(&event, &ret_events[count]);
		}
	}
	*ret_lost = lost;
	return (int)count;
}
