"""What every test gets: one torch thread where torch is used, so that tests run beside each other, and results don't depend on the machine."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
