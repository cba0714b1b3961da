"""Read the catalogue of rules (common performance advice) from ``rules.toml``."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("rules.toml")


@dataclass(frozen=True)
class Rule:
    """A piece of advice and the experiment that tests it; ``rules.toml`` explains the fields."""

    id: str
    statement: str
    do: str
    source: str
    effect: str
    sweeps: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    pairing: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    by: tuple[str, ...] = ()
    claim: float | None = None
    largest: bool = False
    tolerance: float | None = None
    on: str = ""
    needs: str = ""
    public: bool = False
    models: bool = False
    worth: bool = True


@functools.cache
def all_rules() -> dict[str, Rule]:
    """Return every rule of ``rules.toml`` by its id, in the order of the file."""
    entries: list[dict[str, Any]] = tomllib.loads(_FILE.read_text(encoding="utf-8"))["rule"]
    rules: dict[str, Rule] = {}
    for entry in entries:
        for name in entry.keys() & {"sweeps", "also", "by"}:
            entry[name] = tuple(entry[name])
        rules[entry["id"]] = Rule(**entry)
    return rules


def rule_sweeps() -> list[str]:
    """Return the distinct groups of sweeps that are needed to judge the rules.

    A group lists one rule's ``sweeps``, joined by commas as on the command line.
    """
    groups = (",".join(rule.sweeps) for rule in all_rules().values())
    return list(dict.fromkeys(group for group in groups if group))
