"""Find the cases that use an experimental feature of a kernel, to skip them after a crash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kernels.config import experimental_feature
from sweeps.cases.case import Case
from sweeps.folding.history import History
from sweeps.planning.plan import PlanEntry

Feature = tuple[str, str]
"""Name of an implementation and name of one of its experimental features."""


def feature_of(case: Case) -> Feature | None:
    """Return the experimental feature that a case's config uses, or None if it uses none.

    Raises:
        UserError: if the case's config is not valid for its hand-written kernel.
    """
    name = experimental_feature(case.implementation, case.config)
    return (case.implementation, name) if name else None


def crashed_features(
    planned: Sequence[PlanEntry], histories: Mapping[str, History]
) -> list[Feature]:
    """Return the experimental features of the cases that crashed a process."""
    features = (feature_of(entry.case) for entry in planned if histories[entry.case.id].crashes)
    return list(dict.fromkeys(feature for feature in features if feature is not None))


def unfinished_with(
    feature: Feature, planned: Sequence[PlanEntry], histories: Mapping[str, History]
) -> list[str]:
    """Return the ids of the unfinished cases that use a feature."""
    return [
        entry.case.id
        for entry in planned
        if feature_of(entry.case) == feature and not histories[entry.case.id].closed
    ]


def refusal(feature: Feature, how: str) -> str:
    """Return the message for a case that is given up because of its experimental feature.

    ``how`` says how or when another case with this feature ended a process.
    """
    implementation, name = feature
    return (
        f"this case was given up, because {implementation} with {name} ended the process in "
        f"another case ({how})."
    )
