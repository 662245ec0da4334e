"""The network interface and address towards the first machine. Imports no torch."""

import fcntl
import socket
import struct
from collections.abc import MutableMapping

from imagenet_cls.parallel.environment import LOOPBACK

# reserved for documentation (RFC 5737), so its route is the default route
_ANY_OTHER_MACHINE = "192.0.2.1"


def choose_interface(
    env: MutableMapping[str, str], master_addr: str, several_machines: bool
) -> None:
    """Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface towards the master, unless the
    user has.

    By default gloo uses the address of the host's name, which is often loopback. The master's route
    to its own name may be loopback, too: with several machines, it uses the interface of the
    default route.
    """
    interface = interface_towards(master_addr)
    if interface == "lo" and several_machines and master_addr not in LOOPBACK:
        interface = interface_towards(_ANY_OTHER_MACHINE)
    if interface is not None:
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
        if interface != "lo":  # on one machine nccl uses shared memory and NVLink
            # "=": this interface. Otherwise nccl takes all whose names begin so, ens10 for ens1.
            env.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def interface_towards(host: str) -> str | None:
    """The interface of the route to `host`, or None if there is no route (IPv4)."""
    own_address = _source_address(host)
    if own_address is None:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(reply[20:24]) == own_address:
                return name
    return None


def address_towards(master_addr: str) -> str:
    """This machine's address on the route to the master; on the master, `master_addr`."""
    own_address = _source_address(master_addr)
    return master_addr if own_address is None or own_address.startswith("127.") else own_address


def _source_address(host: str) -> str | None:
    """This machine's address on the route to `host`, found with an unsent datagram (IPv4)."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None
