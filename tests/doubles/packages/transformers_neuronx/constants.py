"""Layouts and the strategies of grouped-query attention."""

from __future__ import annotations

import enum

LAYOUT_BSH = "BSH"
LAYOUT_HSB = "HSB"
LAYOUT_SBH = "SBH"
TRN1_WORLD_SIZE = 32


class Layout(enum.Enum):
    HSB = LAYOUT_HSB
    BSH = LAYOUT_BSH
    SBH = LAYOUT_SBH

    def __eq__(self, other: object) -> bool:
        return super().__eq__(Layout(other) if isinstance(other, str) else other)

    def __hash__(self) -> int:
        return hash(self.value)


class GQA(enum.Enum):
    SHARD_OVER_HEADS = "shard-over-heads"
    SHARD_OVER_BATCH = "shard-over-batch"
    REPLICATED_HEADS = "replicated-heads"
    ALL_GATHER_HEADS = "all-gather-heads"
