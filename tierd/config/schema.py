# SPDX-License-Identifier: Apache-2.0
"""The configuration as JSON Schema, draft 2020-12, for editors and for what writes drop-ins.

What two keys say together it does not tell: `tierctl config check` does.
"""

from collections.abc import Mapping
from typing import Any

from tierd.config.rules import (
    ARRAYS,
    MARKS_OF_TARGET,
    NEEDED_OF_TENANT,
    NEEDED_OF_TIER,
    TABLES,
    Rule,
)
from tierd.config.show import settings
from tierd.config.values import Config
from tierd.model import MAX_TIERS


def schema() -> dict[str, Any]:
    """Returns the schema of tierd.toml and of its drop-ins."""
    defaults = settings(Config())
    tables = {
        name: _object({key: _described(rule, defaults[name, key]) for key, rule in rules.items()})
        for name, rules in TABLES.items()
    }
    tier = _object(_schemas(ARRAYS["tier"])) | {"required": [*NEEDED_OF_TIER]}
    target = _object(_schemas(ARRAYS["target"]))
    tenant = _object(_schemas(ARRAYS["tenant"])) | {"required": [*NEEDED_OF_TENANT]}
    by_marks = {"anyOf": [{"required": [name]} for name in MARKS_OF_TARGET]}
    target["oneOf"] = [{"required": ["pid"]}, by_marks]
    arrays = {
        "tier": {"type": "array", "items": tier, "maxItems": MAX_TIERS},
        "target": {"type": "array", "items": target},
        "tenant": {"type": "array", "items": tenant},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tierd.toml",
        **_object(tables | arrays),
    }


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "additionalProperties": False}


def _schemas(rules: Mapping[str, Rule]) -> dict[str, Any]:
    return {key: dict(rule.schema) for key, rule in rules.items()}


def _described(rule: Rule, default: Any) -> dict[str, Any]:
    return {**rule.schema, "default": default}
