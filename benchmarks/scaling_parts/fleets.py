"""The models that share the cores."""

from __future__ import annotations

from orchestrator.simulate.simulated_model import SimModel

MOST = 16  # replicas of a model at most, whoever scales
TTFT_S = 5.0  # the objective of every model
MAX_WAIT_S = 60.0  # a request whose first token will not come in this time is refused

_KINDS = (
    # how many models, cores, slots, seconds of a step, seconds to load
    (20, 2, 4, 0.035, 20.0),
    (16, 4, 4, 0.045, 35.0),
    (12, 8, 8, 0.050, 60.0),
)


def models() -> tuple[SimModel, ...]:
    """48 models of three sizes: one replica of each takes 200 cores, 8 hosts have 192, and 12 have 288."""
    return tuple(
        SimModel(
            name=f"tp{cores}-{number}",
            slots=slots,
            step_s=step_s,
            prefill_base_s=0.02,
            prefill_token_s=0.0003,
            cores=cores,
            load_s=load_s,
            min=0,
            max=MOST,
            ttft_s=TTFT_S,
            max_queue=10_000,
            max_wait_s=MAX_WAIT_S,
            hold_s=MAX_WAIT_S,
        )
        for count, cores, slots, step_s, load_s in _KINDS
        for number in range(count)
    )
