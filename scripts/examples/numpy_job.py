"""Linear regression with momentum in plain numpy, checkpointed at every step.

    baftd start && python scripts/examples/numpy_job.py     kill it at any moment and start it again
"""

import sys

import numpy as np

import baft_client

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
data = np.random.default_rng(0)
x, target = data.normal(size=(4096, 512)), data.normal(size=512)
w, m, order = np.zeros(512), np.zeros(512), np.random.default_rng(1)


def load(extra: dict) -> None:
    order.bit_generator.state = extra["order"]


with baft_client.attach_arrays(
    "numpy-job", {"w": w, "m": m}, extra=lambda: {"order": order.bit_generator.state}, load_extra=load
) as ckpt:
    for step in range(ckpt.resume(), steps):
        rows = order.integers(0, len(x), 256)
        error = x[rows] @ (w - target)
        with ckpt.update():  # w and m change in here and nowhere else
            m[:] = 0.9 * m + x[rows].T @ error / len(rows)
            w -= 0.05 * m
        ckpt.step()
        print(f"step {step + 1} loss {float(error @ error / len(rows)):.17g}", flush=True)
