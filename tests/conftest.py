"""Hypothesis profiles, and the one table of tolerances."""

import os

# Threads that spin while they wait slow each other down where cores are shared.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "dev", max_examples=25, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile(
    "ci", max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 5e-2}

# Toy tensors gain nothing from a second thread, and its barriers cost milliseconds where other
# processes run. Tests of real sizes set their own number.
torch.set_num_threads(1)
