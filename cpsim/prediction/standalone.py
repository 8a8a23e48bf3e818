"""A scenario with all that it rests on, as files that can be read in any folder and on any machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from cpsim.case.changes import split_name
from cpsim.case.cluster import load_cluster, presets
from cpsim.case.files import read_text
from cpsim.case.scenario import Scenario
from cpsim.models.derive import DATA_SHEET
from cpsim.models.profile import shipped_profiles, whole_data

SCENARIO, PROFILE, OF_CLUSTER, CLUSTER = "scenario.yaml", "profile.json", "cluster-profile.json", "cluster.json"
HOST, HOST_OF_CLUSTER = "host.json", "cluster-host.json"


def standalone(scenario: Scenario) -> dict[str, str]:
    """Names and texts of files: the scenario, and beside it whatever does not ship with cpsim: its cluster, and
    profiles with the parts of their bases. What they predict together is equal to the last bit.

    Raises:
        CpsimError: the cluster or a profile cannot be read.
    """
    files: dict[str, str] = {}

    def packed(profile: str | None, name: str) -> str | None:
        if profile is None or profile in (DATA_SHEET, *shipped_profiles()) or not os.path.isfile(profile):
            return profile
        files[name] = _json(whole_data(Path(profile)))
        return name

    fields = scenario.to_dict()
    if scenario.profile is not None:
        fields["profile"] = packed(scenario.profile, PROFILE)
    if isinstance(scenario.host, str):
        fields["host"], files[HOST] = HOST, read_text(Path(scenario.host))
    file, _ = split_name(scenario.cluster)
    if scenario.cluster not in presets() and os.path.isfile(file):
        cluster = load_cluster(scenario.cluster)
        fields["cluster"] = name = _name(Path(file))
        theirs = {"profile": packed(cluster.profile, OF_CLUSTER)}
        if isinstance(cluster.host, str):
            theirs["host"], files[HOST_OF_CLUSTER] = HOST_OF_CLUSTER, read_text(Path(cluster.host))
        files[name] = _json(cluster.to_dict() | theirs)
    said = {name: value for name, value in fields.items() if value not in ({}, None)}
    return {SCENARIO: yaml.safe_dump(said, sort_keys=False, allow_unicode=True), **files}


def _name(path: Path) -> str:
    """The name of a cluster file, which a run and its prediction have in common."""
    readable = path.suffix in (".yaml", ".yml", ".json") and path.name not in (
        SCENARIO,
        PROFILE,
        OF_CLUSTER,
        HOST,
        HOST_OF_CLUSTER,
    )
    return path.name if readable else CLUSTER


def _json(fields: dict[str, Any]) -> str:
    """JSON, which is YAML, too."""
    return json.dumps(fields, indent=1, ensure_ascii=False) + "\n"
