# SPDX-License-Identifier: Apache-2.0
"""Records of CXL's tracepoints as guests gave them, whole and damaged.

Each was made by debugfs' inject_poison and clear_poison, trigger_poison_list, or QEMU's monitor.
"""

import base64
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_ring import LOST, SAMPLE, captured, perf
from tierd.errors import UnsupportedKernel
from tierd.kernel import cxl_events
from tierd.kernel.cxl_events import EVENTS, TRACE, CxlEvent, CxlEvents, Kind, Severity, parse
from tierd.kernel.tracepoint import TRACEFS, Field, parse_fields, read_format

CAPTURED = Path(__file__).with_name("cxl_events")
KERNELS = ("6.12", "7.2")
HPA = 0x690000000


def capture(kernel: str) -> Any:
    return json.loads((CAPTURED / f"{kernel}.json").read_text())


def fields_of(kernel: str, event: str) -> Mapping[str, Field]:
    return parse_fields(capture(kernel)["formats"][event])


def raws(kernel: str) -> list[tuple[str, bytes]]:
    """The tracepoints and raw data of what was captured."""
    found = []
    for told in capture(kernel)["records"]:
        record = base64.b64decode(told["record"])
        (size,) = struct.unpack_from("<I", record, 16)
        found.append((told["event"], record[20 : 20 + size]))
    return found


def at(dpa: int, kind: Kind) -> CxlEvent:
    """What is told of an address of the device."""
    severity = Severity.NONE if kind is Kind.CLEARED else Severity.UNCORRECTED
    return CxlEvent(
        kind=kind,
        severity=severity,
        device="mem0",
        region="region0",
        start=HPA + dpa,
        dpa=dpa,
        size_bytes=64,
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_guests_told_is_read(kernel: str) -> None:
    found = [parse(event, fields_of(kernel, event), data) for event, data in raws(kernel)]
    injected = [at(dpa, Kind.POISON) for dpa in (0x1000000, 0x1200040)]
    assert found == [
        *injected,  # as they were injected
        *reversed(injected),  # as the device lists them
        at(0x1200040, Kind.CLEARED),
        at(0x3000040, Kind.DRAM),
        at(0x3000000, Kind.GENERAL_MEDIA),
        CxlEvent(kind=Kind.MEMORY_MODULE, severity=Severity.NONE, device="mem0"),
    ]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_corrected_error_is_told_from_one_that_is_not(kernel: str) -> None:
    event, data = next(raw for raw in raws(kernel) if raw[0] == "cxl_dram")
    fields = fields_of(kernel, event)
    corrected = bytearray(data)
    corrected[fields["descriptor"].offset] &= ~1
    found = parse(event, fields, bytes(corrected))
    assert found is not None
    assert found.severity is Severity.CORRECTED


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_address_that_the_kernel_does_not_know_is_none(kernel: str) -> None:
    event, data = raws(kernel)[0]
    hpa = fields_of(kernel, event)["hpa"].offset
    unknown = data[:hpa] + b"\xff" * 8 + data[hpa + 8 :]
    found = parse(event, fields_of(kernel, event), unknown)
    assert found is not None
    assert (found.start, found.dpa) == (None, 0x1000000)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_record_that_is_cut_short_is_none_or_knows_less(kernel: str) -> None:
    for event, data in raws(kernel):
        fields, whole = fields_of(kernel, event), parse(event, fields_of(kernel, event), data)
        assert parse(event, fields, b"") is None
        for length in range(len(data)):
            found = parse(event, fields, data[:length])
            assert found is None or (whole and found.device == whole.device)


@given(st.sampled_from(EVENTS), st.binary(max_size=300))
def test_garbage_is_read_without_harm(event: str, data: bytes) -> None:
    known = capture("7.2")["formats"]
    if event in known:
        found = parse(event, parse_fields(known[event]), data)
        assert found is None or 0 < len(found.device) <= 64


def test_fields_that_are_new_or_missing_are_no_matter() -> None:
    event, data = raws("7.2")[0]
    fields = dict(fields_of("7.2", event))
    fields["news"] = Field(offset=9999, size=8)
    del fields["hpa"], fields["region"], fields["dpa_length"]
    found = parse(event, fields, data)
    assert found is not None
    assert (found.start, found.region, found.dpa) == (None, None, 0x1000000)
    del fields["memdev"]
    assert parse(event, fields, data) is None


def test_arrays_and_strings_are_known_from_numbers() -> None:
    fields = fields_of("7.2", "cxl_general_media")
    assert fields["memdev"] == Field(offset=8, size=4, is_dynamic=True)
    assert fields["comp_id"].is_array
    assert (fields["log"].is_signed, fields["dpa"].is_signed) == (True, False)


def test_links_are_of_ports_too() -> None:
    fields = fields_of("7.2", "cxl_port_aer_uncorrectable_error")
    assert "memdev" not in fields
    data = bytearray(2000)
    struct.pack_into("<I", data, fields["device"].offset, 1000 | 6 << 16)
    data[1000:1006] = b"port1\0"
    found = parse("cxl_port_aer_uncorrectable_error", fields, bytes(data))
    assert found == CxlEvent(kind=Kind.LINK, severity=Severity.UNCORRECTED, device="port1")


def stream(kernel: str) -> bytes:
    told = [base64.b64decode(record["record"]) for record in capture(kernel)["records"]]
    lost = perf(LOST, struct.pack("<QQ", 7, 5))
    too_long = perf(SAMPLE, struct.pack("<QI", 1, 2000) + bytes(2004))
    return b"".join([told[0], lost, told[1], too_long, *told[2:]])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tail", [0, 4096 - 200])
def test_records_come_whole_out_of_the_ring(kernel: str, tail: int) -> None:
    data = stream(kernel)
    tail -= tail % 8
    into = np.empty(20, TRACE)
    ring = captured(data, tail, 4096)
    found = cxl_events.decode(ring, head=tail + len(data), tail=tail, into=into)
    read = [trace["data"].tobytes()[: int(trace["bytes"])] for trace in found.records]
    assert read == [raw for _, raw in raws(kernel)]
    assert found.records["lost"].tolist() == [0, 5, 1, *[0] * (len(read) - 3)]
    assert (found.tail, found.lost, found.corrupt) == (tail + len(data), 5, 1)


@given(st.binary(min_size=64, max_size=64), st.integers(0, 8))
def test_a_ring_of_garbage_is_read_to_its_end(data: bytes, capacity: int) -> None:
    into = np.empty(capacity, TRACE)
    found = cxl_events.decode(data, head=64, tail=0, into=into)
    assert len(found.records) <= capacity
    assert found.tail <= 64


def test_formats_are_found_where_tracefs_is(tmp_path: Path) -> None:
    folder = tmp_path / TRACEFS[1] / "events/cxl/cxl_poison"
    assert read_format("cxl/cxl_poison", tmp_path) is None
    folder.mkdir(parents=True)
    (folder / "format").write_text(capture("7.2")["formats"]["cxl_poison"])
    (folder / "id").write_text("1356\n")
    found = read_format("cxl/cxl_poison", tmp_path)
    assert found is not None
    assert (found.id, found.fields["dpa"].offset) == (1356, 56)
    (folder / "id").write_text("none\n")
    assert read_format("cxl/cxl_poison", tmp_path) is None


def test_without_tracepoints_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedKernel, match="CXL's tracepoints are out of reach"):
        CxlEvents(tmp_path)
