"""`python -m training`: the same as `moaserve train`."""

from training.command import app

app()
