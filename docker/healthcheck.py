"""Health check of the images: exit status 0 if the server of this container answers ``/health`` with 200."""

import http.client
import os
import sys

connection = http.client.HTTPConnection("127.0.0.1", int(os.environ.get("PORT") or 8000), timeout=4)
try:
    connection.request("GET", "/health")
    status = connection.getresponse().status
except (OSError, http.client.HTTPException) as error:
    sys.exit(f"no answer: {error}")
sys.exit(0 if status == 200 else f"HTTP {status}")
