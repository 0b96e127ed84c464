"""Names and numbers of hosts."""

from __future__ import annotations

import ipaddress


def is_address(name: str) -> bool:
    """Whether it is an IP address, and not a name that somebody may have point anywhere."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
