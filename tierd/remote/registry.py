# SPDX-License-Identifier: Apache-2.0
"""Which donors there are, by etcd: a donor registers itself, a borrower looks them up.

A donor's key holds its record, and goes with a lease of etcd's that the donor renews:

    /tierd/donors/host-a
    {"version": 1, "id": "5f0c…", "address": "host-a:7430", "lent_bytes": 1024, "free_bytes": 512}

etcd tells whom to ask, and no more: whether a donor lives, and who it is, is between it and its
borrower. So a borrower keeps the list it had where etcd is away. No time of one machine is compared
with that of another.
"""

import json
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tierd.errors import Damaged, TierdError
from tierd.remote.etcd import Away, Etcd, Value
from tierd.remote.link import join_address, split_address

log = logging.getLogger("tierd")

VERSION: Final = 1
PREFIX: Final = "/tierd/donors/"
LEASE_S: Final = 10
"""Of a donor that does not renew it."""

MOST_DONORS: Final = 1024
MOST_BYTES: Final = 4096
"""Of a record."""

LIST_EVERY_S = 5.0
"""A list is read so often where nobody tells of a change: a watch may be silent for bad reasons."""

_SHORT_REST_S, _LONG_REST_S = 0.05, 2.0
_RENEW_S = 3.0
_MOST_MEMORY: Final = 1 << 60
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ID = re.compile(r"[0-9a-f]{1,64}")
_ADDRESS = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Za-z:.%_-]{2,80}\]):[0-9]{1,5}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a donor tells of itself.

    Args:
        id: of its process; anew with each.
        address: host:port by which borrowers reach it.
        lent_bytes: of all borrowers at most.
        free_bytes: of those, what nobody has; as of a few seconds ago.
    """

    id: str
    address: str
    lent_bytes: int
    free_bytes: int

    def encode(self) -> bytes:
        return json.dumps({"version": VERSION, **asdict(self)}).encode()


def parse_record(data: bytes) -> Record:
    """Parses what etcd has of a donor, whoever put it there.

    Raises:
        Damaged: it is none that this version knows.
    """
    if len(data) > MOST_BYTES:
        raise Damaged(f"{len(data)} bytes, of {MOST_BYTES} at most")
    try:
        told = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged("no JSON") from error
    if not isinstance(told, dict):
        raise Damaged("no JSON object")
    if told.get("version") != VERSION:
        raise Damaged(f"of version {ascii(told.get('version'))[:20]}, and this is {VERSION}")
    lent = _number(told, "lent_bytes", _MOST_MEMORY)
    return Record(
        id=_id(told.get("id")),
        address=_address(told.get("address")),
        lent_bytes=lent,
        free_bytes=_number(told, "free_bytes", lent),
    )


class Directory:
    """The donors that are registered, as etcd last told them.

    Args:
        endpoints: host:port of etcd's members, tried in turn.
        prefix: of their keys; it ends with a slash.
        ca: PEM file of who signs for etcd; without it there is no TLS.
        cert: one's own certificate, where etcd asks for one.
        key: of it.

    Raises:
        TierdError: no endpoint answers within DEADLINE_S each, or there is no aetcd.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        prefix: str = PREFIX,
        ca: str | Path | None = None,
        cert: str | Path | None = None,
        key: str | Path | None = None,
    ) -> None:
        self.failure: str | None = None
        """Why etcd tells nothing now; the donors are those of before."""
        self._prefix = _checked(prefix)
        self._etcd = Etcd(endpoints, ca=ca, cert=cert, key=key)
        self._found: Mapping[str, Record | None] = {}
        self._addresses: tuple[str, ...] = ()
        self._is_full = False
        self._over = threading.Event()
        try:
            self._list_first(len(endpoints))
        except TierdError:
            self._etcd.close()
            raise
        self._thread = threading.Thread(target=self._look, daemon=True, name="directory")
        self._thread.start()

    def addresses(self) -> tuple[str, ...]:
        """Returns where donors are, sorted; from any thread, and without waiting."""
        return self._addresses

    def roomiest(self) -> tuple[str, ...]:
        """Returns where donors are, those first that have most to lend; likewise."""
        found = sorted(self.records().values(), key=lambda record: -record.free_bytes)
        return tuple(dict.fromkeys(record.address for record in found))

    def records(self) -> Mapping[str, Record]:
        """Returns what donors tell of themselves, by their names; likewise."""
        return {name: record for name, record in self._found.items() if record is not None}

    def close(self) -> None:
        """Looks no more; what was found stays."""
        self._over.set()
        self._etcd.close()
        self._thread.join()

    def _list_first(self, endpoints: int) -> None:
        failures = []
        for _ in range(endpoints):
            try:
                self._list()
            except Away as error:
                failures.append(str(error))
            else:
                return
        raise TierdError(
            f"the donors are not known: {'; '.join(failures)}",
            hint="is etcd there, and spoken to with TLS where it wants that? Or name the donors",
        )

    def _look(self) -> None:
        """Is a thread: lists again after each change, and every LIST_EVERY_S."""
        rest_s = _SHORT_REST_S
        while not self._over.wait(rest_s):
            try:
                revision = self._list()
                self._tell(None)
                self._etcd.wait_for_change(self._prefix, revision, LIST_EVERY_S)
                rest_s = _SHORT_REST_S
            except Away as error:
                self._tell(str(error))
                rest_s = min(2 * rest_s, _LONG_REST_S)

    def _list(self) -> int:
        """Reads all donors; returns as of which revision of etcd's."""
        values, revision = self._etcd.read(self._prefix, MOST_DONORS + 1)
        names = sorted(values)[:MOST_DONORS]
        if len(values) > MOST_DONORS and not self._is_full:
            log.warning("etcd: %s has more than %d donors", self._prefix, MOST_DONORS)
        self._is_full = len(values) > MOST_DONORS
        self._found = {name: self._parse(name, values[name]) for name in names}
        self._addresses = tuple(sorted({record.address for record in self.records().values()}))
        return revision

    def _parse(self, name: str, value: Value) -> Record | None:
        """Returns a record, or None where it is none, which is told once."""
        try:
            return parse_record(value.data)
        except Damaged as error:
            if self._found.get(name, True) is not None:
                log.warning("etcd: donor %s is left out: %s", ascii(name)[:80], error)
            return None

    def _tell(self, failure: str | None) -> None:
        if self._over.is_set() or (failure is None) == (self.failure is None):
            return
        self.failure = failure
        if failure is None:
            log.info("etcd tells of donors again")
        else:
            log.warning("%s; %d donors of before are kept", failure, len(self._addresses))


class Registration:
    """A donor's record in etcd, until close(); etcd may come and go.

    Args:
        etcd: where to; it is closed with this.
        name: of the donor, of up to 64 letters, digits, dots, hyphens and underscores.
        record: tells what to put there, now; called by another thread.
        lease_s: it is gone so long after the donor, where that has not left.
        prefix: as of a Directory.

    Raises:
        TierdError: the name is none.
    """

    def __init__(
        self,
        etcd: Etcd,
        name: str,
        record: Callable[[], Record],
        *,
        lease_s: int = LEASE_S,
        prefix: str = PREFIX,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise TierdError(f"{name!r} is no name of a donor", hint="such as host-a")
        self.failure: str | None = None
        """Why borrowers may not find this donor."""
        self._etcd, self._key, self._record = etcd, _checked(prefix) + name, record
        self._lease_s = lease_s
        self._lease: int | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True, name="registration")
        self._thread.start()

    def close(self) -> None:
        """Takes the record away, within a few seconds; where etcd is away its lease lapses."""
        self._over.set()
        self._thread.join()
        lease, self._lease = self._lease, None
        try:
            if lease is not None:
                self._etcd.revoke(lease)
        except Away as error:
            log.warning("%s; the donor's record stays for %d s", error, self._lease_s)
        finally:
            self._etcd.close()

    def _keep(self) -> None:
        """Is a thread: renews the lease, and mends the record."""
        rest_s, after_failure_s = 0.0, _SHORT_REST_S
        while not self._over.wait(rest_s):
            try:
                self._register()
                rest_s, after_failure_s = min(self._lease_s / 3, _RENEW_S), _SHORT_REST_S
            except Away as error:
                self._tell(str(error))
                rest_s = after_failure_s
                after_failure_s = min(2 * after_failure_s, _LONG_REST_S)

    def _register(self) -> None:
        """Has etcd hold the record as it is now, unless another donor has its name."""
        if self._lease is None or not self._etcd.renew(self._lease):
            self._lease = None
            self._lease = self._etcd.grant(self._lease_s)
        record = self._record()
        there = self._etcd.get(self._key)
        if there is not None and self._is_anothers(there, record):
            self._tell(f"etcd: another donor is registered as {self._key}")
            return
        wanted = (record.encode(), self._lease)
        if there is None or (there.data, there.lease) != wanted:
            if not self._etcd.put(self._key, *wanted, over=there):
                raise Away(f"etcd: {self._key} has just been changed")
            if there is None or there.lease != self._lease:
                log.info("etcd: registered as %s, at %s", self._key, record.address)
        self._tell(None)

    def _is_anothers(self, there: Value, record: Record) -> bool:
        """Whether a live donor has the key; who had our own address before is none."""
        if there.lease in (0, self._lease):
            return False
        try:
            return parse_record(there.data).address != record.address
        except Damaged:
            return True

    def _tell(self, failure: str | None) -> None:
        if failure is not None and self.failure is None:
            log.warning("%s; borrowers may not find this donor", failure)
        self.failure = failure


@contextmanager
def registered(
    endpoints: Sequence[str],
    name: str,
    record: Callable[[], Record],
    *,
    lease_s: int = LEASE_S,
    ca: Path | None = None,
    cert: Path | None = None,
    key: Path | None = None,
) -> Iterator[Registration | None]:
    """Has a donor be in etcd; without endpoints, nowhere. Raises as Etcd and Registration."""
    if not endpoints:
        yield None
        return
    registration = Registration(
        Etcd(endpoints, ca=ca, cert=cert, key=key), name, record, lease_s=lease_s
    )
    try:
        yield registration
    finally:
        registration.close()


def advertised(address: str | None, port: int) -> str:
    """Returns by which address borrowers reach a donor: the host's name, where none is given.

    Raises:
        TierdError: it is no host:port.
    """
    try:
        return _address(join_address(*split_address(address or socket.gethostname(), port)))
    except Damaged as error:
        raise TierdError(
            f"borrowers cannot be told to come to {address!r}: {error}",
            hint="--advertise host-a:7430",
        ) from error


def _checked(prefix: str) -> str:
    if not prefix.endswith("/"):
        raise TierdError(f"{prefix!r} is no prefix of keys", hint=f"such as {PREFIX}")
    return prefix


def _address(value: object) -> str:
    """Spells an address in one way, so that one donor is not taken for two."""
    if not isinstance(value, str) or not _ADDRESS.fullmatch(value):
        raise Damaged(f"address is {ascii(value)[:40]}")
    try:
        host, port = split_address(value)
    except TierdError as error:
        raise Damaged(str(error)) from error
    if port == 0:
        raise Damaged("an address with port 0")
    return join_address(host.lower(), port)


def _id(value: object) -> str:
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise Damaged(f"id is {ascii(value)[:40]}")
    return value


def _number(told: Mapping[str, Any], name: str, most: int) -> int:
    value = told.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise Damaged(f"{name} is {ascii(value)[:40]}, and not from 0 to {most}")
    return value
