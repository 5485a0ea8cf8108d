"""Stands in for the compiler's front end: the HLO is compiled to itself, through the persistent cache."""

from neuron_double.compiler import cached_compile, compiler_version

__version__ = compiler_version()


def neuron_xla_compile(
    module_bytes, compiler_flags, input_format="hlo", platform_target="trn1", cache_key=None, **cache_options
):
    """Returns a NEFF that carries the module. Raises CompilerFailed for a planned fault.

    The package gives no number of cores: the real compiler takes it from the replica groups of the module.
    """
    return cached_compile(str(cache_key), compiler_flags, program=module_bytes)
