"""Check a call, then time it: candidates, rounds, clocks, ceilings."""
