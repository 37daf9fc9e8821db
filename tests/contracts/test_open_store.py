"""A store that others reach is named where no rank needs that, and nowhere else."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from andon_contracts.liveness.open_store import open_store

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
ROUTES = "Iface\tDestination\tGateway\n"
ETH = f"{ROUTES}eth0\t00000000\t010200C0\n"
LOOPBACK6 = f"{'0' * 31}1 01 80 10 80       lo\n"
PORT = "72D8"
NUMBER = int(PORT, 16)
HERE = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": str(NUMBER)}

pytestmark = pytest.mark.skipif(sys.byteorder != "little", reason="the lines are those of such a machine")


def net(folder: Path, address: str, state: str = "0A", routes: str = ETH) -> Path:
    table = "tcp" if len(address) == 8 else "tcp6"
    (folder / table).write_text(f"{HEAD}   0: {address}:{PORT} 00000000:0000 {state} 0 0 0 0 0 17\n")
    (folder / "route").write_text(routes)
    (folder / "if_inet6").write_text(LOOPBACK6)
    return folder


@pytest.mark.parametrize(
    ("address", "where"),
    [("00000000", "on all interfaces"), ("0" * 32, "on all interfaces"), ("0102000A", "at 10.0.2.1")],
)
def test_it_says_where_others_reach_the_store(tmp_path: Path, address: str, where: str) -> None:
    said = open_store(HERE, net(tmp_path, address))
    assert said.startswith(f"the ranks' store listens {where} (port {NUMBER}), though all ranks are on this machine: ")
    assert "\n" not in said
    assert "close that port by a firewall, or start the ranks by andon train --workers N" in said


@pytest.mark.parametrize("address", ["0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF0000" + "0100007F"])
def test_the_loopback_alone_is_no_alarm(tmp_path: Path, address: str) -> None:
    assert open_store(HERE, net(tmp_path, address)) == ""


@pytest.mark.parametrize(
    "variables",
    [
        {},
        HERE | {"WORLD_SIZE": "8"},
        HERE | {"MASTER_PORT": str(NUMBER + 1)},
        HERE | {"MASTER_PORT": "x"},
        {name: value for name, value in HERE.items() if name != "LOCAL_WORLD_SIZE"},
    ],
)
def test_several_machines_another_port_and_no_launcher_are_no_alarm(tmp_path: Path, variables: dict[str, str]) -> None:
    assert open_store(variables, net(tmp_path, "00000000")) == ""


def test_a_machine_without_a_network_is_no_alarm(tmp_path: Path) -> None:
    assert open_store(HERE, net(tmp_path, "00000000", routes=ROUTES)) == ""
    assert open_store(HERE, net(tmp_path, "00000000", state="01")) == ""
    assert open_store(HERE, tmp_path / "none") == ""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="proc(5)")
def test_it_reads_this_machine(tmp_path: Path) -> None:
    far = any(name != "lo" for _, name in socket.if_nameindex()) and len(Path("/proc/net/route").read_text()) > 150
    for host, alarms in (("127.0.0.1", False), ("0.0.0.0", far)):
        with socket.create_server((host, 0)) as server:
            found = open_store(HERE | {"MASTER_PORT": str(server.getsockname()[1])})
        assert bool(found) == alarms
