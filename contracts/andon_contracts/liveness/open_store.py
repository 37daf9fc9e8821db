"""Warns if other machines can reach the store of a launcher whose ranks are all on this one (proc(5), Linux only)."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

_LISTENS = "0A"


def open_store(environ: Mapping[str, str] | None = None, net: Path = Path("/proc/net")) -> str:
    """A warning if the store of torch's launcher listens to other machines although all ranks are on this one.

    Empty without such a risk, on a machine without a network, and if the launcher does not set LOCAL_WORLD_SIZE.
    """
    variables = os.environ if environ is None else environ
    port = variables.get("MASTER_PORT", "")
    here = "WORLD_SIZE" in variables and variables["WORLD_SIZE"] == variables.get("LOCAL_WORLD_SIZE")
    interfaces = [line.split()[0] for line in _lines(net / "route")[1:]]
    interfaces += [line.split()[-1] for line in _lines(net / "if_inet6")]
    if not here or not port.isdecimal() or all(interface == "lo" for interface in interfaces):
        return ""
    open_at = [address for address in _listening(int(port), net) if not address.is_loopback]
    if not open_at:
        return ""
    where = "on all interfaces" if any(address.is_unspecified for address in open_at) else f"at {open_at[0]}"
    risk = "other machines can end this run and perhaps run code as you (docs/multi-node.md)"
    return f"torchrun listens {where} (port {port}): {risk}"


def _listening(port: int, net: Path) -> Iterator[IPv4Address | IPv6Address]:
    """The addresses that listen at this port. The kernel prints 32-bit words in the byte order of the machine."""
    for line in (*_lines(net / "tcp")[1:], *_lines(net / "tcp6")[1:]):
        fields = line.split()
        host, _, number = fields[1].partition(":")
        if fields[3] == _LISTENS and int(number, 16) == port:
            words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
            address = ip_address(struct.pack(f"={len(words)}I", *words))
            yield getattr(address, "ipv4_mapped", None) or address


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not Linux, or no address of this kind
        return []
