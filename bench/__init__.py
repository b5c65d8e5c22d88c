"""The sweep: every variant checked against float64, then timed. Run as ``python -m bench`` from the repository root."""
