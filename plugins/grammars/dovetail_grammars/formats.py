"""Patterns for string formats that the libraries check too loosely; used by both backends."""

from __future__ import annotations

from collections.abc import Mapping

_LEAP_YEAR = r"(\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = rf"(\d{{4}}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))|{_LEAP_YEAR}-02-29)"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,60}[a-zA-Z0-9])?"
_HOST = rf"({_LABEL}\.){{0,3}}{_LABEL}"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_BYTE = r"(\d|[1-9]\d|1\d\d|2[0-4]\d|25[0-5])"

PATTERNS: Mapping[str, str] = {
    "date": f"^{_DATE}$",  # with the number of days of each month
    "time": f"^{_TIME}$",  # without second 60, allowed only in the last minute of a day
    "date-time": f"^{_DATE}T{_TIME}$",
    "hostname": f"^{_HOST}$",  # at most 253 characters, labels of at most 63
    "email": rf"^{_ATOM}(\.{_ATOM})*@{_HOST}$",  # with such a hostname
    "ipv4": rf"^({_BYTE}\.){{3}}{_BYTE}$",  # without leading zeros
}
