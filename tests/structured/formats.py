"""The formats of strings, as their RFCs have them, and `validator`: what judges whether an answer
follows its schema."""

from __future__ import annotations

import ipaddress
import re
from datetime import date
from typing import Any

import jsonschema

CHECKER = jsonschema.FormatChecker(formats=())
_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)", re.ASCII)
_TIME = re.compile(
    r"([01]\d|2[0-3]):([0-5]\d):([0-5]\d|60)(\.\d+)?([zZ]|([+-])([01]\d|2[0-3]):([0-5]\d))",
    re.ASCII,
)
_CLOCK = r"T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S)"
_DURATION = re.compile(
    rf"P((\d+D|\d+M(\d+D)?|\d+Y(\d+M(\d+D)?)?)({_CLOCK})?|{_CLOCK}|\d+W)", re.ASCII
)
_LABEL = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?")
_ATOMS = re.compile(
    r"[\w!#$%&'*+/=?^`{|}~-]+(\.[\w!#$%&'*+/=?^`{|}~-]+)*|\"([\x20\x21\x23-\x5b\x5d-\x7e]|\\[\x20-\x7e])*\"",
    re.ASCII,
)
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_URI_CHARACTER = r"([\w.~!$&'()*+,;=:@/?-]|%[0-9a-fA-F]{2})"
_URI = re.compile(
    rf"[a-zA-Z][a-zA-Z0-9+.-]*:(//([^/?#\[\]]*@)?(\[[0-9a-fA-Fv.:]+\])?(?=.*))?{_URI_CHARACTER}*(#{_URI_CHARACTER}*)?",
    re.ASCII,
)


def validator(schema: Any) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema, format_checker=CHECKER)


@CHECKER.checks("date", ValueError)
def _is_date(value: object) -> bool:
    if not isinstance(value, str):
        return True
    parts = _DATE.fullmatch(value)
    # the year 0 is one, and a leap year like 400
    return bool(parts and date(int(parts[1]) or 400, int(parts[2]), int(parts[3])))


@CHECKER.checks("time")
def _is_time(value: object) -> bool:
    """A second 60 is the last of a day in UTC."""
    if not isinstance(value, str):
        return True
    parts = _TIME.fullmatch(value)
    if not parts or parts[3] != "60":
        return bool(parts)
    ahead = (60 * int(parts[7]) + int(parts[8])) * (1 if parts[6] == "+" else -1) if parts[6] else 0
    return (60 * int(parts[1]) + int(parts[2]) - ahead) % 1440 == 1439


@CHECKER.checks("date-time", ValueError)
def _is_date_time(value: object) -> bool:
    return not isinstance(value, str) or (
        len(value) > 10 and value[10] in "tT" and _is_date(value[:10]) and _is_time(value[11:])
    )


@CHECKER.checks("duration")
def _is_duration(value: object) -> bool:
    return not isinstance(value, str) or _DURATION.fullmatch(value) is not None


@CHECKER.checks("hostname")
def _is_hostname(value: object) -> bool:
    return not isinstance(value, str) or (
        len(value) <= 253 and all(_LABEL.fullmatch(label) for label in value.split("."))
    )


@CHECKER.checks("email")
def _is_email(value: object) -> bool:
    if not isinstance(value, str):
        return True
    local, _, domain = value.rpartition("@")
    return _ATOMS.fullmatch(local) is not None and (
        _is_hostname(domain) or (domain[:1], domain[-1:]) == ("[", "]")
    )


@CHECKER.checks("ipv4", ValueError)
def _is_ipv4(value: object) -> bool:
    return not isinstance(value, str) or bool(ipaddress.IPv4Address(value))


@CHECKER.checks("ipv6", ValueError)
def _is_ipv6(value: object) -> bool:
    return not isinstance(value, str) or not ipaddress.IPv6Address(value).scope_id


@CHECKER.checks("uuid")
def _is_uuid(value: object) -> bool:
    return not isinstance(value, str) or _UUID.fullmatch(value) is not None


@CHECKER.checks("uri")
def _is_uri(value: object) -> bool:
    return not isinstance(value, str) or _URI.fullmatch(value) is not None
