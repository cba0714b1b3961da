from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.common.aliases import slug_meant
from kernels.common.errors import UserError
from kernels.machine import known_machines

SLUGS = list(known_machines())


@pytest.mark.parametrize(
    ("word", "slug"),
    [
        ("nvidia-h200", "nvidia-h200"),
        ("h200", "nvidia-h200"),
        ("H200", "nvidia-h200"),
        ("h20", "nvidia-h20"),
        ("l40", "nvidia-l40"),
        ("L40S", "nvidia-l40s"),
        ("a10", "nvidia-a10"),
        ("a100-sxm-80", "nvidia-a100-sxm-80gb"),
        ("a6000", "nvidia-rtx-a6000"),
        ("b200", "nvidia-b200"),
        ("gb200", "nvidia-gb200"),
        ("4090", "nvidia-geforce-rtx-4090"),
        ("RTX 4090", "nvidia-geforce-rtx-4090"),
        ("rtx4090", "nvidia-geforce-rtx-4090"),
        ("h100 pcie", "nvidia-h100-pcie"),
        ("a100-40gb-sxm", "nvidia-a100-sxm-40gb"),
        ("rtx-pro-6000", "nvidia-rtx-pro-6000"),  # a whole name, with which another name begins
    ],
)
def test_a_unique_part_of_a_name_is_enough(word: str, slug: str) -> None:
    assert slug_meant(word, SLUGS) == slug


def test_an_ambiguous_name_lists_the_machines() -> None:
    with pytest.raises(UserError, match="nvidia-h100-sxm or nvidia-h100-pcie; give the full name"):
        slug_meant("h100", SLUGS)


@pytest.mark.parametrize("word", ["l20", "nvidia-l20", "h2000", "nvidia-geforce-rtx-4080", "b100"])
def test_a_card_with_other_numbers_is_never_suggested(word: str) -> None:
    with pytest.raises(UserError) as caught:
        slug_meant(word, SLUGS)
    assert "did you mean" not in str(caught.value)
    assert "analysis machines" in str(caught.value)


@pytest.mark.parametrize("word", ["", "-", "?!", "é"])
def test_a_word_that_names_no_machine_is_an_error(word: str) -> None:
    with pytest.raises(UserError, match="is not known"):
        slug_meant(word, SLUGS)


@given(st.text(max_size=30))
def test_any_text_is_a_slug_or_a_sentence(word: str) -> None:
    with contextlib.suppress(UserError):
        assert slug_meant(word, SLUGS) in SLUGS


@given(st.sampled_from(SLUGS), st.data())
def test_all_of_a_slugs_words_in_any_order_mean_it_or_a_longer_name(
    slug: str, data: st.DataObject
) -> None:
    words = " ".join(data.draw(st.permutations(slug.split("-"))))
    longer = [other for other in SLUGS if set(slug.split("-")) < set(other.split("-"))]
    if longer and words.split() != slug.split("-"):
        with pytest.raises(UserError, match="give the full name"):
            slug_meant(words, SLUGS)
    else:
        assert slug_meant(words, SLUGS) == slug
