"""Named masks against definitions pair by pair, written from the papers' words and not from slices."""

# ruff: noqa: ARG001, ARG005 (definitions have one signature, though some need less)

from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsim.errors import ScenarioError
from cpsim.masks import shapes as mask_shapes
from cpsim.masks.names import MASK_NAMES
from cpsim.masks.shapes import SHAPES, mask_slices
from cpsim.masks.slices import dense_mask

lengths = st.lists(st.integers(1, 14), min_size=1, max_size=5)
small = st.integers(1, 9)

OPTIONS = {
    "full_sliding_window": {"window": st.integers(0, 9)},
    "causal_sliding_window": {"window": st.integers(0, 9)},
    "shared_question": {"question_share": st.floats(0, 1), "answers": small},
    "causal_blockwise": {"block": small, "local_blocks": small},
    "prefix_lm_causal": {"prefix": st.integers(1, 60)},
    "prefix_lm_document": {"prefix": st.integers(1, 20)},
    "block_causal_document": {"block": small},
    "lambda": {"sink": st.integers(0, 9), "window": small},
    "global_sliding": {"window": st.integers(1, 60), "ends": st.sampled_from(["causal", "full"])},
    "block_sparse": {"block": small, "density": st.floats(0, 1), "seed": small},
    "variable_block_sparse": {
        "block": st.integers(4, 9),
        "min_block": st.integers(1, 4),
        "align": st.sampled_from([1, 2, 4]),
        "density": st.floats(0, 1),
        "seed": small,
    },
}


@st.composite
def cases(draw, name):
    options = {key: draw(values) for key, values in OPTIONS.get(name, {}).items()}
    return draw(lengths), options


# Who sees whom. S tokens in all; query q and key k; document d of L tokens, where they are tokens i and j.


def _lambda(i, j, length, sink, window):
    return j <= i and (j < min(sink, i + 1) or j >= max(0, i - (window - 1)))


def _causal_blockwise(i, j, length, block, local_blocks):
    b, num_blocks = i // block, -(-length // block)
    if b in (0, num_blocks - 1):
        return j <= i
    return j < block or max(block, i - local_blocks * block) <= j <= i


def _shared_question(i, j, length, question_share, answers):
    question = int(question_share * length)
    if i < question:
        return j <= i
    each = max((length - question) // answers, 1)
    a = min((i - question) // each, answers - 1)
    return j < question or question + a * each <= j <= i


APART = {
    "full_document": lambda i, j, length: True,
    "causal_document": lambda i, j, length: j <= i,
    "full_sliding_window": lambda i, j, length, window: abs(i - j) <= window,
    "causal_sliding_window": lambda i, j, length, window: 0 <= i - j <= window,
    "lambda": _lambda,
    "causal_blockwise": _causal_blockwise,
    "shared_question": _shared_question,
    "prefix_lm_document": lambda i, j, length, prefix: j < prefix if i < prefix else j <= i,
    "block_causal_document": lambda i, j, length, block: j // block <= i // block,
}
"""Within a document, which alone is seen."""


def _global_sliding(q, k, total, window, ends):
    w = min(window, total)
    if k < w:
        return ends == "full" or k - q <= w - total  # bottom-right aligned in total x w
    if q < w:
        return ends == "full" or k - q <= total - w  # bottom-right aligned in w x (total - w)
    return abs(k - q) <= w


WHOLE = {
    "full": lambda q, k, total: True,
    "causal": lambda q, k, total: k <= q,
    "prefix_lm_causal": lambda q, k, total, prefix: k < prefix if q < prefix else k <= q,
    "global_sliding": _global_sliding,
}
RELATED = {
    "shared_question_document": lambda q, k, of_q, of_k, last: k <= q and (of_k in (0, of_q)),
    "causal_blockwise_document": lambda q, k, of_q, of_k, last: k <= q and (of_k == of_q or of_q == last),
}
"""With the documents of both."""
RANDOM = ("block_sparse", "variable_block_sparse")


def defined(name, documents, options):
    """The mask as a boolean matrix, pair by pair."""
    total = sum(documents)
    document = np.repeat(np.arange(len(documents)), documents)
    first = np.concatenate(([0], np.cumsum(documents)))[document]
    sees = np.zeros((total, total), bool)
    for q in range(total):
        for k in range(total):
            if name in WHOLE:
                sees[q, k] = WHOLE[name](q, k, total, **options)
            elif name in RELATED:
                sees[q, k] = RELATED[name](q, k, document[q], document[k], len(documents) - 1)
            elif document[q] == document[k]:
                sees[q, k] = APART[name](q - first[q], k - first[k], documents[document[q]], **options)
    return sees


def areas_by_slice(slices):
    """How many slices hold every pair."""
    total = int(slices.q_end.max())
    count = np.zeros((total, total), int)
    for row in range(len(slices)):
        one = type(slices)(*(getattr(slices, column)[row : row + 1] for column in slices.__slots__))
        count += dense_mask(one, total)
    return count


def test_every_named_mask_is_defined_here():
    assert set(SHAPES) == set(MASK_NAMES) == {*APART, *WHOLE, *RELATED, *RANDOM}
    assert set(OPTIONS) == {name for name, mask in MASK_NAMES.items() if mask.options}


@pytest.mark.parametrize("name", [*APART, *WHOLE, *RELATED])
@settings(deadline=None)  # the first call compiles
@given(st.data())
def test_a_mask_is_its_definition_pair_by_pair(name, data):
    documents, options = data.draw(cases(name))
    slices = mask_slices(name, documents, options)
    expected = defined(name, documents, options)
    assert np.array_equal(dense_mask(slices, sum(documents)), expected)
    assert slices.areas().sum() == expected.sum()


@pytest.mark.parametrize("name", MASK_NAMES)
@settings(deadline=None)
@given(st.data())
def test_slices_are_disjoint_not_empty_and_ordered(name, data):
    documents, options = data.draw(cases(name))
    slices = mask_slices(name, documents, options)
    assert areas_by_slice(slices).max() <= 1
    assert (slices.q_start < slices.q_end).all()
    assert (slices.k_start < slices.k_end).all()
    pairs = list(zip(slices.q_start.tolist(), slices.k_start.tolist(), strict=True))
    assert pairs == sorted(pairs)


@settings(deadline=None)
@given(st.data())
def test_uniform_blocks_see_the_same_number_of_whole_blocks(data):
    documents, options = data.draw(cases("block_sparse"))
    total, block = sum(documents), options["block"]
    slices = mask_slices("block_sparse", documents, options)
    dense, edges = dense_mask(slices, total), [*range(0, total, block), total]
    seen = [[dense[a:b, c:d] for c, d in pairwise(edges)] for a, b in pairwise(edges)]
    assert all(part.all() or not part.any() for row in seen for part in row)
    wanted = max(1, int(options["density"] * (len(edges) - 1)))
    assert {sum(part.all() for part in row) for row in seen} == {wanted}
    assert slices.areas().sum() == dense.sum()


@settings(deadline=None)
@given(st.integers(8, 200), st.integers(1, 4), st.integers(4, 30), st.sampled_from([1, 2, 4]), st.integers(0, 5))
def test_variable_blocks_keep_their_least_length_their_number_and_their_edges(total, min_block, block, align, seed):
    options = {"block": block, "min_block": min_block, "align": align, "density": 0.5, "seed": seed}
    slices = mask_slices("variable_block_sparse", [total], options)
    dense, cuts = dense_mask(slices, total), sorted({0, total, *slices.q_start.tolist()})
    lengths = np.diff(cuts)
    assert lengths.min() >= min(min_block, total)
    assert not any(cut % align for cut in cuts[:-1])
    assert len(lengths) == max(1, total // block)
    assert set(slices.k_start.tolist()) | set(slices.k_end.tolist()) <= set(cuts)
    assert slices.areas().sum() == dense.sum()
    assert {dense[a, cuts[:-1]].sum() for a in cuts[:-1]} == {max(1, int(0.5 * len(lengths)))}


@pytest.mark.parametrize("name", RANDOM)
def test_random_masks_repeat_with_their_seed(name):
    first, again, other = (mask_slices(name, [5000], {"seed": seed}) for seed in (1, 1, 2))
    assert np.array_equal(first.k_start, again.k_start)
    assert not np.array_equal(first.k_start, other.k_start)


def test_drawn_prefixes_and_windows_stay_in_the_paper_s_ranges():
    for seed in range(40):
        prefix = mask_slices("prefix_lm_causal", [30], {"seed": seed}).q_end[0]
        of_document = mask_slices("prefix_lm_document", [5, 40], {"seed": seed}).q_end[0]
        window = mask_slices("global_sliding", [30], {"seed": seed}).k_end[0]
        assert 1 <= prefix <= 30
        assert 1 <= of_document <= 5
        assert 1 <= window <= 30 // 3 - 1


def test_defaults_are_the_papers():
    told = {name: mask.describe() for name, mask in MASK_NAMES.items() if mask.options}
    assert told["lambda"] == "sink 64, window 4096"
    assert told["causal_blockwise"] == "block 256, local_blocks 2"
    assert told["shared_question"] == "question_share 0.2, answers 4"
    assert told["causal_sliding_window"] == told["full_sliding_window"] == "window 1024"
    assert told["block_causal_document"] == "block 1024"


@pytest.mark.parametrize(
    ("name", "density"), [("lambda", 0.0625), ("causal_blockwise", 0.0156), ("shared_question", 0.520)]
)
def test_densities_are_those_that_were_published_of_dcp_s_masks(name, density):
    """Relative to causal, at 131,072 tokens."""
    length = 131_072
    area = int(mask_slices(name, [length]).areas().sum())
    assert area / (length * (length + 1) // 2) == pytest.approx(density, abs=6e-4)


def test_the_types_of_longca_bench_s_global_sliding_are_kept():
    """Its first rows and columns are coded as bottom-right causal: the last w queries alone see the first w keys."""
    dense = dense_mask(mask_slices("global_sliding", [30], {"window": 4}), 30)
    assert dense[:, :4].any(axis=1).nonzero()[0].tolist() == [26, 27, 28, 29]


def test_a_million_blocks_take_seconds():
    slices = mask_slices("block_sparse", [131_072], {"block": 64})
    blocks = (slices.k_end - slices.k_start) // 64
    assert blocks.sum() == 2048 * int(0.2 * 2048)
    assert slices.areas().sum() == blocks.sum() * 64 * 64


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("casual", {}, "mask: 'casual' is unknown; did you mean 'causal'"),
        ("causal", {"window": 3}, "mask: 'causal' takes no parameters, got window; remove them"),
        ("lambda", {"windw": 3}, "mask: lambda has no option 'windw'; did you mean 'window'"),
        ("lambda", {"window": 0}, "mask: lambda: window: expected a whole number from 1 to 1000000000, got 0"),
        ("lambda", {"window": 2.5}, "expected a whole number from 1"),
        ("lambda", {"sink": True}, "sink: expected a whole number from 0"),
        ("block_sparse", {"density": 1.5}, "density: expected a number from 0 to 1, got 1.5"),
        ("block_sparse", {"density": float("nan")}, "density: expected a number from 0 to 1, got nan"),
        ("global_sliding", {"ends": "half"}, "ends: expected causal or full, got 'half'"),
        ("variable_block_sparse", {"block": 64}, "block: expected at least min_block = 128, got 64"),
    ],
)
def test_wrong_names_and_options_say_what_is_possible(name, options, message):
    with pytest.raises(ScenarioError) as caught:
        mask_slices(name, [1000], options)
    assert message in str(caught.value)


def test_chunked_draws_are_one_draw(monkeypatch):
    whole = mask_slices("block_sparse", [3000], {"block": 10, "seed": 3})
    monkeypatch.setattr("cpsim.masks.shapes.SCORES", 1000)
    mask_shapes._built.cache_clear()
    parts = mask_slices("block_sparse", [3000], {"block": 10, "seed": 3})
    assert all(np.array_equal(getattr(whole, c), getattr(parts, c)) for c in whole.__slots__)


def test_documents_are_what_names_say_they_are():
    """A mask that ignores documents is the same for any; one that keeps them apart has no pair between two."""
    documents = [300, 500, 700]
    ends = list(accumulate(documents, initial=0))
    for name, mask in MASK_NAMES.items():
        slices = mask_slices(name, documents)
        within = sum(dense_mask(slices, 1500)[a:b, a:b].sum() for a, b in pairwise(ends))
        assert (within == slices.areas().sum()) == (mask.documents == "apart"), name
        one = mask_slices(name, [1500])
        assert (one.areas().sum() == slices.areas().sum()) >= (mask.documents == "ignored"), name
