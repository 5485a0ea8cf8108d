"""What becomes of key-value heads that the degree does not divide."""

from __future__ import annotations

import enum
import logging


class GQA(enum.Enum):
    CONVERT_TO_MHA = "convert-to-mha"
    REPLICATE_TO_TP_DEGREE = "replicate-to-tp-degree"


def determine_sharding_strategy(
    tp_degree: int, source_key_value_heads: int, desired_sharding_strategy: GQA | None = None
) -> GQA:
    """Replication, where the degree is a multiple of the heads; else a warning, and a full set of heads."""
    if desired_sharding_strategy is GQA.CONVERT_TO_MHA or tp_degree % source_key_value_heads:
        if desired_sharding_strategy is not GQA.CONVERT_TO_MHA and tp_degree > source_key_value_heads:
            logging.getLogger("Neuron").warning("tp_degree %s: converting to MHA", tp_degree)
        return GQA.CONVERT_TO_MHA
    return GQA.REPLICATE_TO_TP_DEGREE
