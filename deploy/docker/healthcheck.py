"""The image's health check: exit 0 when the server in this container is ready for requests and its engine works.

It reads the settings that change how the server is reached, from the environment alone: MOASERVE_PORT, MOASERVE_SSL_CERTFILE and
MOASERVE_ALLOWED_HOSTS.
"""

import os
import sys
from http.client import HTTPConnection, HTTPException, HTTPSConnection


def connect() -> HTTPConnection:
    """To this container's own server, so there is no certificate to verify."""
    port = int(os.environ.get("MOASERVE_PORT") or 8000)
    if not os.environ.get("MOASERVE_SSL_CERTFILE"):
        return HTTPConnection("127.0.0.1", port, timeout=4)
    import ssl

    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return HTTPSConnection("127.0.0.1", port, timeout=4, context=context)


def main() -> int:
    """Ask both probes; the exit code."""
    host = os.environ.get("MOASERVE_ALLOWED_HOSTS", "").split(",")[0].strip().replace("*", "health") or "localhost"
    for path in ("/ready", "/health"):
        try:
            connection = connect()
            connection.request("GET", path, headers={"Host": host})
            status = connection.getresponse().status
        except (OSError, HTTPException) as error:
            print(f"{path}: {error}")
            return 1
        if status != 200:
            print(f"{path}: {status}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
