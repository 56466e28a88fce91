#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The init of a guest whose root is a bare Debian. It lays an overlay in memory over that tree, puts
# in the repository, the kernel's modules and the agent as a service, and goes on there as systemd.
#
#   enter_debian.sh TREE REPOSITORY MODULES PORT
set -e
tree=$1 repository=$2 modules=$3 port=$4
root=/mnt/root

mount -t tmpfs -o mode=0755 tmpfs /mnt
mkdir /mnt/upper /mnt/work $root
mount -t overlay -o "lowerdir=$tree,upperdir=/mnt/upper,workdir=/mnt/work" overlay $root
mkdir -p "$root$repository" $root/usr/lib/modules
mount --bind "$repository" "$root$repository"
mount --bind "$modules" $root/usr/lib/modules

# What has been written since, for tests to look at.
mount --bind /mnt/upper $root/mnt

# What does nothing for a guest, and takes a second each where all is emulated; generators do so at
# each reload.
mkdir -p $root/etc/systemd/system-generators
for generator in $root/usr/lib/systemd/system-generators/*; do
	ln -s /dev/null "$root/etc/systemd/system-generators/${generator##*/}"
done
for unit in dev-hugepages.mount dev-mqueue.mount proc-sys-fs-binfmt_misc.automount \
	run-lock.mount sys-fs-fuse-connections.mount sys-kernel-config.mount \
	kmod-static-nodes.service systemd-binfmt.service systemd-journal-flush.service \
	systemd-modules-load.service systemd-pstore.service systemd-random-seed.service \
	systemd-remount-fs.service systemd-sysctl.service systemd-tmpfiles-setup-dev.service \
	systemd-tmpfiles-setup-dev-early.service systemd-udev-load-credentials.service; do
	ln -s /dev/null $root/etc/systemd/system/$unit
done

cat >$root/etc/systemd/system/agent.service <<END
[Unit]
Description=Runs what the host asks for
SuccessAction=poweroff-immediate
FailureAction=poweroff-immediate
[Service]
Type=exec
ExecStartPre=udevadm settle
ExecStart=/usr/bin/python3 -S -E $repository/tests/vm/guests/agent.py /dev/virtio-ports/$port
END
exec switch_root $root /lib/systemd/systemd
