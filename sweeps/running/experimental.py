"""Find the cases with an experimental feature of a kernel, to refuse them once it has crashed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kernels.config import experimental_feature
from sweeps.cases.case import Case
from sweeps.folding.history import History
from sweeps.planning.plan import PlanEntry

Feature = tuple[str, str]
"""Name of an implementation, and its experimental feature."""


def feature_of(case: Case) -> Feature | None:
    """Return the experimental feature of a case's config, or None if it has none."""
    name = experimental_feature(case.implementation, case.config)
    return (case.implementation, name) if name else None


def crashed_features(
    planned: Sequence[PlanEntry], histories: Mapping[str, History]
) -> dict[Feature, None]:
    """Return the features of the cases during which a process crashed, in the order of the plan.

    The dictionary serves as an ordered set.
    """
    features = (feature_of(entry.case) for entry in planned if histories[entry.case.id].crashes)
    return dict.fromkeys(feature for feature in features if feature is not None)


def unfinished_with(
    feature: Feature, planned: Sequence[PlanEntry], histories: Mapping[str, History]
) -> list[str]:
    """Return the ids of the unfinished cases that have a feature."""
    return [
        entry.case.id
        for entry in planned
        if feature_of(entry.case) == feature and not histories[entry.case.id].closed
    ]


def refusal(feature: Feature, how: str) -> str:
    """Return why a case is not tried.

    ``how`` says how a process ended during another case with this feature.
    """
    implementation, name = feature
    return f"not tried: {implementation} with {name} ended the process in another case ({how})."
