"""The place of this class in earlier versions of the compiler."""

from neuronxcc.nki._pre_prod_kernels.collectives import CollectivesConfig

__all__ = ["CollectivesConfig"]
