"""The striped token order, and masks in it, against brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_masks import masks

from cpsim.masks.shapes import mask_slices
from cpsim.masks.slices import UNBOUNDED, dense_mask
from cpsim.masks.stripes import stripe_bounds, striped, striped_positions, striped_tokens

strides = st.integers(1, 30)


@given(st.integers(1, 100), strides)
def test_stripes_lie_one_after_another(num_tokens, stride):
    tokens = striped_tokens(np.arange(num_tokens), num_tokens, stride)
    assert tokens.tolist() == [t for i in range(stride) for t in range(i, num_tokens, stride)]
    assert striped_positions(tokens, num_tokens, stride).tolist() == list(range(num_tokens))
    bounds = stripe_bounds(num_tokens, stride)
    assert np.diff(bounds).tolist() == [len(range(i, num_tokens, stride)) for i in range(stride)]


@settings(max_examples=300, deadline=None)
@given(masks(), strides)
def test_a_striped_mask_is_the_mask_with_its_tokens_in_that_order(mask, stride):
    parts, tokens = striped(mask, 24, stride), striped_tokens(np.arange(24), 24, stride)
    allowed = dense_mask(mask, 24)[np.ix_(tokens, tokens)]
    assert np.array_equal(dense_mask(parts, 24), allowed)
    assert parts.areas().sum() == allowed.sum()
    assert (parts.areas() > 0).all()
    assert (np.diff(parts.q_start) >= 0).all()


def test_causal_stripes_are_causal_with_or_without_the_diagonal():
    parts = striped(mask_slices("causal", [12]), 12, 3)
    diagonal = parts.high - (parts.k_start - parts.q_start)
    assert diagonal.tolist() == [0, -1, -1, 0, 0, -1, 0, 0, 0]


def test_bands_that_cut_nothing_still_cut_nothing():
    parts = striped(mask_slices("full", [10**9]), 10**9, 4096)
    assert parts.areas().sum() == 10**18
    assert (parts.high > UNBOUNDED // 10_000).all()


@pytest.mark.parametrize("name", ["causal_document", "full_document"])
def test_documents_shorter_than_the_stride_are_parts_of_one_token(name):
    parts = striped(mask_slices(name, [2, 3]), 5, 8)
    assert (parts.areas() == 1).all()
    assert len(parts) == {"causal_document": 3 + 6, "full_document": 4 + 9}[name]
