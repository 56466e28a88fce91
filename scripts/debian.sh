# SPDX-License-Identifier: Apache-2.0
# Sourced by scripts/setup and scripts/install: what is missing on a Debian machine, and getting it.
# $python is the Python that it is about.

die() {
	printf '%s: %s\n' "$0" "$*" >&2
	exit 1
}

as_root() {
	if [ "$(id -u)" = 0 ]; then
		"$@"
	elif command -v sudo >/dev/null; then
		sudo -- "$@"
	else
		die "not root, and there is no sudo; as root: $*"
	fi
}

# The Debian packages of those programs that are missing, as pairs PROGRAM:PACKAGE.
missing() {
	local pair
	for pair; do
		command -v "${pair%:*}" >/dev/null || printf '%s\n' "${pair#*:}"
	done
}

# What it takes to compile the extension.
missing_for_building() {
	missing gcc:gcc
	[ -e /usr/include/stdio.h ] || printf '%s\n' libc6-dev
	"$python" - 2>/dev/null <<-'END' || printf '%s\n' python3-dev
		import os, sys, sysconfig
		sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))
	END
}

require_python() {
	"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
		die "$python is older than Python 3.11: Debian 12 or later has it"
}

install_packages() {
	[ $# -gt 0 ] || return 0
	command -v apt-get >/dev/null || die "not a Debian machine; install what Debian calls: $*"
	printf 'installing %s\n' "$*"
	as_root apt-get -qq update
	without_starting_services as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq \
		-o Acquire::Retries=5 -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 \
		install --no-install-recommends "$@" >/dev/null
}

# Debian starts a service when it is installed, unless a policy-rc.d says no.
without_starting_services() {
	local policy=/usr/sbin/policy-rc.d
	if [ -e "$policy" ]; then
		"$@"
		return
	fi
	printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null
	as_root chmod +x "$policy"
	local status=0
	"$@" || status=$?
	as_root rm "$policy"
	return "$status"
}
