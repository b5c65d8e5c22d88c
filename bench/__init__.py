"""The sweep: every variant checked against float64, then timed. Run as ``python -m bench`` from the repository root."""

from __future__ import annotations

import os

# torch's profiler logs its own start and stop between the tables. Read when torch is imported, which is later.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
