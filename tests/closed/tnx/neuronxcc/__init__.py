"""Stands in for the compiler; its version names the cache's folder."""

from neuron_double.compiler import compiler_version

__version__ = compiler_version()
