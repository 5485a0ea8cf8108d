"""The peers of each rank in ring attention, which no test runs."""

from closed_layer import blank

__getattr__ = blank(__name__)


class CollectivesConfig:
    """Who sends to whom: nobody."""

    def __init__(self, replica_groups: list[list[int]]) -> None:
        self.rank_src_tgt_pairs: dict[int, list[int]] = {rank: [] for group in replica_groups for rank in group}
