"""The models that share the cores."""

from __future__ import annotations

from benchmarks.scaling_parts.scenarios import sim_model
from orchestrator.simulate.scenario import SimModel

MOST = 16  # replicas of a model at most, whoever scales
TTFT_S = 5.0  # the objective of every model
MAX_WAIT_S = 60.0  # a request whose first token will not come in this time is refused

# The phases of a start, as `benchmarks.zero --only parked` prints them: the CPU engine with 2 GB of weights in the page
# cache, in fresh processes (`engines.cpu.warm: false`); medians of three starts. What grows with the weights is per GB.
# The models stand for those of Neuron engines: there warm processes are off by default, so that a start pays for its
# imports, and compiled graphs have to be loaded, too; no device was available to measure that.
FIXED_S = {"actor": 0.03, "process": 1.35, "imports": 4.46, "tokenizer": 0.01}
PER_GB_S = {"weights": 0.225, "warm_up": 0.17, "first_token": 0.26}

_KINDS = (
    # how many models, cores, slots, seconds of a step, GB of weights: 7, 13 and 27 billion parameters in bf16
    (20, 2, 4, 0.035, 13.5),
    (16, 4, 4, 0.045, 26.0),
    (12, 8, 8, 0.050, 54.0),
)


def load_s(gigabytes: float) -> float:
    """Returns the seconds of a start, which are the same for every policy: all do the same work."""
    return sum(FIXED_S.values()) + gigabytes * sum(PER_GB_S.values())


def models() -> tuple[SimModel, ...]:
    """48 models of three sizes: one replica of each takes 200 cores, 8 hosts have 192, and 12 have 288."""
    return tuple(
        sim_model(
            f"tp{cores}-{number}",
            slots=slots,
            step_s=step_s,
            prefill_base_s=0.02,
            prefill_token_s=0.0003,
            cores=cores,
            load_s=load_s(gigabytes),
            least=0,
            most=MOST,
            objectives={"ttft_ms": TTFT_S * 1000},
            max_queue=10_000,
            max_wait_s=MAX_WAIT_S,
            scaling={"hold_s": MAX_WAIT_S},
        )
        for count, cores, slots, step_s, gigabytes in _KINDS
        for number in range(count)
    )
