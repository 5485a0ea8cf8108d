"""Fixtures that tests of several folders use."""

import atexit
import gc
import os
import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, settings

from tests import doubles
from tests.closed import real_tnx as real_tnx
from tests.closed.lane_record import pytest_runtest_call as pytest_runtest_call
from tests.closed.lane_record import pytest_terminal_summary as pytest_terminal_summary
from tests.doubles import neuron as neuron
from tests.open_files import closes_files as closes_files
from tests.s3 import s3_proxy as s3_proxy
from tests.s3 import s3_server as s3_server
from tests.searches import search

# Collecting imports and makes millions of objects that stay: the garbage collector would walk them again and again.
gc.disable()
# On all cores there is one process for each: more threads in each would only take turns.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test asks the hub or Amazon: specs may name what is there, and nobody's credentials are to be found.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HOME="/nonexistent/huggingface",
    AWS_EC2_METADATA_DISABLED="true",
    AWS_CONFIG_FILE=os.devnull,
    AWS_SHARED_CREDENTIALS_FILE=os.devnull,
)
# No server of the world is spoken to, so clients need not read the certificates of all of them (30 ms for each client).
os.environ["SSL_CERT_DIR"] = tempfile.mkdtemp(prefix="cw-certs-")
atexit.register(shutil.rmtree, os.environ["SSL_CERT_DIR"], ignore_errors=True)
os.environ.pop("SSL_CERT_FILE", None)
# Nor does one write into the compiler's cache of the machine that it runs on.
os.environ["NEURON_COMPILE_CACHE_URL"] = tempfile.mkdtemp(prefix="cw-neffs-")
atexit.register(shutil.rmtree, os.environ["NEURON_COMPILE_CACHE_URL"], ignore_errors=True)
for _name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "HF_TOKEN"):
    os.environ.pop(_name, None)

# Not by the time of a loaded machine.
settings.register_profile("untimed", search(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# Of the recorded versions of the Neuron packages: the newest of transformers-neuronx, and of NxD Inference the last for
# inf2. The others are slow tests.
EVERYDAY_VERSIONS = frozenset({"0.13-main", "0.8"})
VERSIONED = [
    doubles.FOLDER.parent / "workers" / "engines" / f"test_{name}.py"
    for name in ("transformers_neuronx", "tnx_traces", "nxd_inference", "nxd_precompiled")
]
assert all(path.exists() for path in VERSIONED)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of earlier versions are slow ones."""
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        version = parameters.get("version")
        if item.path in VERSIONED and version is not None and version not in EVERYDAY_VERSIONS:
            item.add_marker(pytest.mark.slow)
    items[:] = [item for item in items if not _repeats_a_real_run(item)]


def pytest_collection_finish() -> None:
    """Leaves what collecting has made out of all later garbage collections."""
    gc.freeze()
    gc.enable()


def _repeats_a_real_run(item: pytest.Item) -> bool:
    """Returns whether the package's own code runs, which has one version, and the test names another."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    is_real = any(isinstance(value, str) and value.startswith("real_") for value in parameters.values())
    return is_real and parameters.get("version", "0.13-main") not in EVERYDAY_VERSIONS
