"""Where a server listens: on this machine alone."""

from __future__ import annotations

import errno
import ipaddress
import socket

from mofa.errors import SpecError


def loopback_address(text: str) -> str:
    """An address of this machine that others cannot reach.

    Raises
    ------
    SpecError
        If it is no such address.

    Examples
    --------
    >>> loopback_address("localhost"), loopback_address("::1")
    ('127.0.0.1', '::1')
    >>> loopback_address("0.0.0.0")
    Traceback (most recent call last):
    mofa.errors.SpecError: --address 0.0.0.0: other machines may reach it, and mofa serve listens for this one alone; \
use 127.0.0.1, and from elsewhere ssh -L 8421:127.0.0.1:8421 to this machine
    """
    if text == "localhost":
        return "127.0.0.1"
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise SpecError(f"--address {text[:60]}: is no address; use 127.0.0.1, ::1 or localhost") from None
    if not address.is_loopback or (address.version == 6 and str(address) != "::1"):
        raise SpecError(
            f"--address {text}: other machines may reach it, and mofa serve listens for this one alone; use "
            f"127.0.0.1, and from elsewhere ssh -L {PORT}:127.0.0.1:{PORT} to this machine"
        )
    return str(address)


PORT = 8421
"""Where a server listens by default; no service is registered there. [-]"""


def listening_socket(address: str, port: int) -> socket.socket:
    """A socket that listens on an address of this machine; port 0 takes a free one.

    Raises
    ------
    SpecError
        If the port is taken or may not be used.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ports of servers that ended are free
        listening.bind((address, port))
        listening.listen()
    except OSError as error:
        listening.close()
        why = {
            errno.EADDRINUSE: "is in use by another program", errno.EACCES: "may not be used by you",
        }.get(error.errno or 0, f"cannot be used ({error.strerror})")  # fmt: skip
        raise SpecError(f"--port {port}: {why} on {address}; choose another one, or 0 for any that is free") from None
    return listening


def server_url(address: str, port: int) -> str:
    """Where a browser finds the server.

    >>> server_url("127.0.0.1", 8421), server_url("::1", 8421)
    ('http://127.0.0.1:8421/', 'http://[::1]:8421/')
    """
    return f"http://[{address}]:{port}/" if ":" in address else f"http://{address}:{port}/"
