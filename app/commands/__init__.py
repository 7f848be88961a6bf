"""The sub-commands of `moaserve`, one a file."""
