"""Replicas on a Ray cluster: the only package that imports Ray (extra ``ray``)."""

import os

# Ray reads these when it is imported, and hands them to what it starts. Calls then go by gRPC from event loop to event loop, not
# through threads of their own and Ray's store; requests still come in through Serve's proxies.
os.environ.setdefault("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1")
os.environ.setdefault("RAY_SERVE_ENABLE_DIRECT_INGRESS", "0")
os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.5")
