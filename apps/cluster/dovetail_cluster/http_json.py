"""Short HTTP requests to processes of the cluster: without proxies, with a timeout."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
MAX_BYTES = 16 * 2**20


def ask(url: str, *, key: str | None = None, method: str = "GET", body: Mapping[str, Any] | None = None, timeout_s: float = 2.0) -> tuple[int, str]:
    """Return the status and text of a response; status 0: none."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers, method=method)
    try:
        with _OPENER.open(request, timeout=timeout_s) as answer:
            return answer.status, answer.read(MAX_BYTES).decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""
    except (OSError, ValueError):
        return 0, ""
    except Exception as error:  # of http.client: a truncated response
        return 0, str(error)
