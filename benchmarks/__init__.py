"""Measurements: what `moaserve bench` and `moaserve eval` run. Results are kept with command, machine and commit."""
