# SPDX-License-Identifier: Apache-2.0
"""What the API takes and answers, as JSON Schema (draft 2020-12, as OpenAPI 3.1 has it).

docs/status.md and docs/topology.md say what the keys mean. Answers may get more keys.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

from tierd.config.rules import TABLES
from tierd.kernel.cxl_events import Kind, Severity
from tierd.model import Pin, TenantClass

Schema: TypeAlias = Mapping[str, Any]

STRING: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
ANY_OBJECT: Schema = {"type": "object"}


def whole(low: int, high: int, *, default: int | None = None) -> Schema:
    """A whole number; without a default it has to be given."""
    schema = {"type": "integer", "minimum": low, "maximum": high}
    return schema if default is None else schema | {"default": default}


def answer(**properties: Schema) -> Schema:
    """An object that has all of these, and perhaps more."""
    return {"type": "object", "properties": properties, "required": [*properties]}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def mapping(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_PIN = {"enum": [*map(str, Pin)]}
LAST = 1 << 56
"""No process has higher addresses: x86-64 with five levels of page tables has the most."""

ADDRESS = whole(0, LAST)

_BY_TIER = mapping(COUNT)
_BY_PIN = answer(**{str(pin): COUNT for pin in Pin})
_PINS = array(answer(start=COUNT, end=COUNT, pin=_PIN, by={"enum": ["operator", "configuration"]}))
_TARGET = {
    "pid": COUNT,
    "command": STRING,
    "cgroup": or_null(STRING),
    "pin": or_null(_PIN),
    "pinned": _BY_PIN,
    "rests": FLAG,
    "pieces": COUNT,
    "resident": _BY_TIER,
    "hot": _BY_TIER,
    "rate": mapping(NUMBER),
}

DRAIN = answer(
    node=COUNT,
    done=FLAG,
    moved_pages=COUNT,
    in_use=COUNT,
    left=mapping(COUNT),
    passes=COUNT,
    processes=COUNT,
    processes_left=COUNT,
)
ERROR = answer(error=STRING, hint=or_null(STRING))
VERSION = answer(version=STRING, api=STRING)
TARGETS = answer(targets=array(answer(**_TARGET)))
STATUS = answer(
    pid=COUNT,
    mode=STRING,
    paused=FLAG,
    rounds=COUNT,
    rounds_s=NUMBER,
    round_ms=NUMBER,
    tiers=array(
        answer(
            rank=COUNT,
            name=STRING,
            kind=STRING,
            nodes=array(COUNT),
            capacity=COUNT,
            free=COUNT,
            headroom=COUNT,
            backing=array(STRING),
            loads=COUNT,
            loaded_cycles=or_null(NUMBER),
            closed_to=array(STRING),
        )
    ),
    targets=array(answer(**_TARGET)),
    arenas=array(
        answer(
            name=STRING,
            pid=COUNT,
            command=STRING,
            user=COUNT,
            cgroup=or_null(STRING),
            tenant=STRING,
            block_bytes=COUNT,
            blocks=COUNT,
            resident=_BY_TIER,
            far_used_mbps=mapping(NUMBER),
            far_limit_mbps=_BY_TIER,
            asked=COUNT,
            moved=COUNT,
            unmoved=COUNT,
            dropped=COUNT,
        )
    ),
    tenants=array(
        answer(
            **{"class": {"enum": [*map(str, TenantClass)]}},
            name=STRING,
            weight=NUMBER,
            guaranteed=_BY_TIER,
            maximum=_BY_TIER,
            share=_BY_TIER,
            resident=_BY_TIER,
            far_used_mbps=mapping(NUMBER),
            far_limit_mbps=_BY_TIER,
            far_maximum_mbps=mapping(NUMBER),
        )
    ),
    moved=array(answer(**{"from": STRING, "to": STRING, "pages": COUNT})),
    refused=mapping(COUNT),
    flows=array(
        answer(
            tenant=STRING,
            source=STRING,
            destination=STRING,
            direction={"enum": ["promotion", "demotion", "level"]},
            outcome=STRING,
            pages=COUNT,
        )
    ),
    cache_pages=COUNT,
    kept=mapping(COUNT),
    sampler=answer(
        way=STRING,
        lost=COUNT,
        zoomed_pages=COUNT,
        hardware={"type": ["object", "null"]},
        tuning=ANY_OBJECT,
    ),
    page_cost_ns=NUMBER,
    config=ANY_OBJECT,
    set=ANY_OBJECT,
    drains=array(DRAIN),
    cxl=answer(
        listens=FLAG,
        lost=COUNT,
        errors=array(
            answer(
                device=STRING,
                region=or_null(STRING),
                kind={"enum": [*map(str, Kind)]},
                severity={"enum": [*map(str, Severity)]},
                count=COUNT,
            )
        ),
        evacuations=array(
            answer(
                block=COUNT,
                node=COUNT,
                done=FLAG,
                moved_pages=COUNT,
                left=mapping(COUNT),
                mapped_pages=or_null(COUNT),
                bad_pages=COUNT,
            )
        ),
        fenced=array(answer(node=COUNT, device=STRING)),
    ),
    schemes=array(
        answer(action=STRING, pages=COUNT, regions=COUNT, tried_bytes=COUNT, over_quota=COUNT)
    ),
    notes=array(STRING),
)
LENDING = answer(
    pid=COUNT,
    address=STRING,
    nodes=array(COUNT),
    capacity=COUNT,
    borrowed=COUNT,
    free=COUNT,
    reserve=COUNT,
    spare={"type": "integer"},
    leaves=FLAG,
    leases=COUNT,
    refused=mapping(COUNT),
    ended=mapping(COUNT),
    borrowers=array(answer(name=STRING, address=STRING, bytes=COUNT, since=STRING)),
)
TOPOLOGY = answer(
    nodes=array(answer(id=COUNT, total_bytes=COUNT, free_bytes=or_null(COUNT))),
    tiers=array(answer(rank=COUNT, name=STRING, nodes=array(COUNT), capacity_bytes=COUNT)),
    memdevs=array(ANY_OBJECT),
    decoders=array(ANY_OBJECT),
    regions=array(ANY_OBJECT),
    dax_devices=array(ANY_OBJECT),
    warnings=array(STRING),
)
EXPLANATION = answer(
    **_TARGET,
    pins=_PINS,
    ranges=array(answer(start=COUNT, end=COUNT, heat=NUMBER, resident=_BY_TIER, why=STRING)),
    why=_BY_TIER,
)
EVENTS = answer(
    events=array(
        answer(id=COUNT, time=STRING, level=STRING, kind=STRING, message=STRING, fields=ANY_OBJECT)
    )
)
CONFIG = answer(config=ANY_OBJECT, set=ANY_OBJECT)
PAUSED = answer(paused=FLAG)
BEGUN = answer(id=COUNT)
RECORDED = answer(data=STRING, ended=or_null(STRING))
PINNED = answer(pid=COUNT, pin=or_null(_PIN), pins=_PINS)
CHANGES = answer(changes=array(answer(key=STRING, before={}, after={})), set=ANY_OBJECT)


def only(properties: Schema, **more: Any) -> Schema:
    """An object that may have these, and nothing else."""
    return {
        "type": "object",
        "properties": dict(properties),
        "additionalProperties": False,
        **more,
    }


PIN = only(
    {
        "pin": _PIN,
        "range": only({"start": ADDRESS, "end": ADDRESS}, required=["start", "end"]),
    },
    required=["pin"],
)
SETTINGS = only(
    {
        table: only({key: or_null(rule.schema) for key, rule in rules.items()})
        for table, rules in TABLES.items()
    }
)
