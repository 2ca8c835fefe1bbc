"""Eight fake CPU devices for every test, set before JAX starts; the data beside the repository, where it is."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# Eight device threads on few busy cores meet late; XLA would end the process after 40 seconds.
os.environ["XLA_FLAGS"] += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
# Tests compile the same programs again and again: keep them, across workers, child processes and calls of pytest.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, nothing about the code.
settings.register_profile("hacrl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hacrl")

SHARED = Path(os.environ.get("HACRL_SHARED", Path(__file__).parent.parent.parent / "shared"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with golden vectors, data sets and tokenizers (design, section 7)."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is absent: set HACRL_SHARED to the folder with golden vectors, data and tokenizers")
    return SHARED


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """A run of four steps with its agents (tests/small_run.py); takes a minute."""
    import small_run

    return small_run.finish(tmp_path_factory.mktemp("runs"))
