"""The text of metrics.jsonl and summary.json, which any program can read: JSON has no NaN and no infinity."""

import json
import math
from typing import Any

# As Python, JavaScript and others turn them back into numbers: float("NaN"), Number("Infinity").
WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def text(value: object, indent: int | None = None) -> str:
    """Return `value` as JSON. Numbers that are not finite become the strings of WORDS."""
    try:
        return json.dumps(value, indent=indent, default=encoded, allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(value, default=encoded), parse_constant=str), indent=indent)


def parsed(content: str) -> dict[str, Any] | None:
    """Return a JSON object with numbers for the strings of WORDS; None if `content` is not one."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return {name: WORDS.get(field, field) if isinstance(field, str) else field for name, field in value.items()}


def encoded(value: Any) -> object:
    """Return what stands in JSON for a value that it does not have: numbers for a tensor or an array, else text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
