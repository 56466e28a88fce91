# SPDX-License-Identifier: Apache-2.0
"""What tierd asks of etcd: keys below a prefix, a wait for their next change, and leases.

aetcd brings the messages of etcd's v3 API; the channel is gRPC's own, since aetcd's client knows
neither TLS nor several endpoints, and waits for ever on one that is silent. Here every call has a
deadline.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from tierd.errors import TierdError
from tierd.remote.link import join_address, split_address

DEADLINE_S: Final = 2.0
"""Of each call that is answered at once."""

PORT: Final = 2379

_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel does not wait as long as an old one did
)


class Away(TierdError):
    """No answer in time, or none that is of use. The next call goes to the next endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """What a key holds; `lease` is 0 where it belongs to none."""

    data: bytes
    lease: int
    revision: int


class Etcd:
    """One etcd, by one of its endpoints at a time. Each call raises Away.

    Args:
        endpoints: host:port of its members.
        ca: PEM file of who signs for them; without it there is no TLS.
        cert: one's own certificate, where etcd asks for one.
        key: of it.

    Raises:
        TierdError: there is no aetcd, no endpoint, or one of the files is not there.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        ca: str | Path | None = None,
        cert: str | Path | None = None,
        key: str | Path | None = None,
    ) -> None:
        if not endpoints:
            raise TierdError("no endpoint of etcd is given", hint=f"such as etcd-a:{PORT}")
        self._endpoints = [join_address(*split_address(each, PORT)) for each in endpoints]
        self._grpc, self._rpc = _load()
        self._credentials = _credentials(self._grpc, ca, cert, key)
        self._turn = 0
        self._lock = threading.Lock()
        self._channel: Any = None
        self._closed = False

    def close(self) -> None:
        """Ends what another thread waits for here, and what it would still ask."""
        with self._lock:
            self._closed = True
            self._drop()

    def read(self, prefix: str, most: int) -> tuple[dict[str, Value], int]:
        """Returns keys, without the prefix, and as of which revision; a majority agrees on them."""
        begin, end = _range(prefix)
        request = self._rpc.RangeRequest(key=begin, range_end=end, limit=most)
        with self._asking() as channel:
            found = self._rpc.KVStub(channel).Range(request, timeout=DEADLINE_S)
        values = {kv.key[len(begin) :].decode(errors="replace"): _value(kv) for kv in found.kvs}
        return values, found.header.revision

    def get(self, key: str) -> Value | None:
        request = self._rpc.RangeRequest(key=key.encode())
        with self._asking() as channel:
            found = self._rpc.KVStub(channel).Range(request, timeout=DEADLINE_S)
        return _value(found.kvs[0]) if found.kvs else None

    def wait_for_change(self, prefix: str, revision: int, longest_s: float) -> None:
        """Returns when a key has changed after a revision, or so much time has passed.

        It may return earlier, such as where etcd has compacted that revision away.
        """
        begin, end = _range(prefix)
        wanted = self._rpc.WatchCreateRequest(key=begin, range_end=end, start_revision=revision + 1)
        request = self._rpc.WatchRequest(create_request=wanted)
        with self._asking() as channel:
            call = self._rpc.WatchStub(channel).Watch(iter([request]))
            is_over = threading.Event()

            def give_up() -> None:
                is_over.set()
                call.cancel()

            # No deadline of gRPC's: at its end the server may be first to tell, as of any error.
            timer = threading.Timer(longest_s, give_up)
            timer.daemon = True
            timer.start()
            try:
                self._until_changed(call)
            except self._grpc.RpcError:
                if not is_over.is_set():
                    raise
            finally:
                timer.cancel()
                call.cancel()

    def _until_changed(self, call: Any) -> None:
        for response in call:
            if response.canceled and not response.compact_revision:
                raise Away(f"etcd ends a watch: {response.cancel_reason}")
            if response.canceled or response.events:
                return
        raise Away("etcd ends a watch")

    def grant(self, lasts_s: int) -> int:
        """Returns a lease that lasts so long without renew(), by etcd's clock alone."""
        request = self._rpc.LeaseGrantRequest(TTL=lasts_s)
        with self._asking() as channel:
            return int(self._rpc.LeaseStub(channel).LeaseGrant(request, timeout=DEADLINE_S).ID)

    def renew(self, lease: int) -> bool:
        """Returns whether it lasts; one that has lapsed is gone."""
        request = self._rpc.LeaseKeepAliveRequest(ID=lease)
        with self._asking() as channel:
            call = self._rpc.LeaseStub(channel).LeaseKeepAlive(iter([request]), timeout=DEADLINE_S)
            try:
                return any(response.TTL > 0 for response in islice(call, 1))
            finally:
                call.cancel()

    def revoke(self, lease: int) -> None:
        """Ends a lease, and with it its keys."""
        with self._asking() as channel:
            request = self._rpc.LeaseRevokeRequest(ID=lease)
            self._rpc.LeaseStub(channel).LeaseRevoke(request, timeout=DEADLINE_S)

    def put(self, key: str, data: bytes, lease: int, over: Value | None) -> bool:
        """Puts a key in place of what it held; returns whether it held that still."""
        name = key.encode()
        same = self._rpc.Compare(
            result=self._rpc.Compare.EQUAL,
            target=self._rpc.Compare.MOD,
            key=name,
            mod_revision=over.revision if over is not None else 0,
        )
        put = self._rpc.PutRequest(key=name, value=data, lease=lease)
        request = self._rpc.TxnRequest(
            compare=[same], success=[self._rpc.RequestOp(request_put=put)]
        )
        with self._asking() as channel:
            return bool(self._rpc.KVStub(channel).Txn(request, timeout=DEADLINE_S).succeeded)

    @contextmanager
    def _asking(self) -> Iterator[Any]:
        endpoint = self._endpoints[self._turn]
        try:
            yield self._open(endpoint)
        except (self._grpc.RpcError, ValueError) as error:  # ValueError: it was closed just now
            with self._lock:
                self._drop()
                self._turn = (self._turn + 1) % len(self._endpoints)
            raise Away(f"etcd {endpoint}: {_reason(error)}") from error

    def _open(self, endpoint: str) -> Any:
        with self._lock:
            if self._closed:
                raise Away(f"etcd {endpoint}: left")
            if self._channel is None:
                self._channel = (
                    self._grpc.insecure_channel(endpoint, _OPTIONS)
                    if self._credentials is None
                    else self._grpc.secure_channel(endpoint, self._credentials, _OPTIONS)
                )
            return self._channel

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _load() -> tuple[Any, Any]:
    """Returns gRPC and aetcd's messages.

    Raises:
        TierdError: there is no aetcd, or it does not go with what else is installed.
    """
    try:
        import grpc
        from aetcd import rpc  # both are an extra
    except Exception as error:  # of protobuf's version too, which has no base but this
        raise TierdError(
            f"donors from etcd need aetcd: {error}", hint="pip install 'tierd[rdma]'"
        ) from error
    return grpc, rpc


def _credentials(
    grpc: Any, ca: str | Path | None, cert: str | Path | None, key: str | Path | None
) -> Any:
    if ca is None:
        if cert is not None or key is not None:
            raise TierdError("a certificate for etcd without its authority", hint="give both")
        return None
    if (cert is None) != (key is None):
        raise TierdError("a certificate for etcd goes with its key", hint="give both, or neither")
    try:
        return grpc.ssl_channel_credentials(
            Path(ca).read_bytes(),
            None if key is None else Path(key).read_bytes(),
            None if cert is None else Path(cert).read_bytes(),
        )
    except OSError as error:
        raise TierdError(f"keys for etcd: {error}", hint="PEM files of etcd's authority") from error


def _range(prefix: str) -> tuple[bytes, bytes]:
    """Returns the first key below a prefix, and the first one after all of those."""
    begin = prefix.encode()
    return begin, begin[:-1] + bytes([begin[-1] + 1])


def _value(kv: Any) -> Value:
    return Value(data=kv.value, lease=kv.lease, revision=kv.mod_revision)


def _reason(error: Any) -> str:
    details: Callable[[], str] | None = getattr(error, "details", None)
    return (details() if details is not None else "") or str(error) or type(error).__name__
