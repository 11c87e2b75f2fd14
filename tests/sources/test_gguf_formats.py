"""The format that is chosen for a matrix of mixed types."""

import pytest

from core.importing.sources.gguf.format_choice import best_format


@pytest.mark.parametrize(
    ("weights", "format"),
    [
        ({"Q6_K": 9}, "q6_k"),
        ({"Q5_K": 5, "Q6_K": 1}, "q5_k"),
        ({"Q4_K": 5, "Q6_K": 1}, "q4_k"),
        ({"Q4_K": 3, "Q5_K": 3}, "q5_k"),
        ({"Q4_K": 3, "Q5_0": 3}, "int8-g32"),
        ({"Q3_K": 2, "Q4_K": 1}, "q4_k"),
        ({"Q3_K": 2, "Q5_K": 1}, "iq4_nl"),
        ({"Q2_K": 2, "Q3_K": 1}, "iq4_nl"),
        ({"Q2_K": 20, "Q4_K": 1}, "q2_k"),
        ({"Q3_K": 20, "Q5_K": 1}, "q3_k"),
        ({"IQ2_XS": 9, "IQ2_S": 9, "Q4_K": 1}, "iq2_s"),
        ({"IQ3_S": 5, "IQ2_S": 4}, "iq3_s"),
        ({"TQ1_0": 1}, "tq2_0"),
        ({"IQ4_XS": 7, "Q5_K": 1}, "iq4_xs"),
        ({"Q4_0": 1}, "int4-g32-sym"),
        ({"BF16": 4, "F32": 1}, "checkpoint"),
        ({"MXFP4": 1}, "mxfp4"),
    ],
)
def test_the_format_chosen_for_a_mix(weights: dict[str, int], format: str) -> None:
    assert best_format(weights) == format


@pytest.mark.parametrize(
    ("weights", "format"),
    [
        ({"Q4_K": 2, "Q5_0": 1}, "int4-g32"),
        ({"Q6_K": 2, "Q8_0": 1}, "int8-g32"),
        ({"IQ4_XS": 2, "IQ4_NL": 1}, "iq4_nl"),
        ({"Q2_K": 2, "Q4_0": 1}, "int4-g32-sym"),
        ({"Q3_K": 2, "IQ4_NL": 1}, "iq4_nl"),
        ({"IQ2_XXS": 1}, "iq4_nl"),
    ],
)
def test_the_format_chosen_where_some_inputs_are_no_blocks_of_256(weights: dict[str, int], format: str) -> None:
    assert best_format(weights, 704) == best_format(weights, 1408) == format
