"""`moaserve bench serving`: an open-loop load on a server's HTTP API, with speculation asked for in several ways."""
