from __future__ import annotations

from types import SimpleNamespace

import pytest

from kernels.common.checks import check_counts
from kernels.common.errors import UserError


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
def test_a_count_is_an_integer_of_at_least_one(value: object) -> None:
    check_counts(SimpleNamespace(loss_chunks=1), "loss_chunks")
    with pytest.raises(UserError, match=r"--loss-chunks is .*; it must be a whole number"):
        check_counts(SimpleNamespace(loss_chunks=value), "loss_chunks")
