"""Files of other servers, for hosts that the operator named: addresses are looked up once, and only public ones are asked."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Collection
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from urllib.parse import SplitResult, urljoin, urlsplit

from pyspec.errors import RequestError
from pyspec.ranges import shown

REDIRECTS = 3
CHUNK = 64 << 10
PORTS = {"http": 80, "https": 443}
MOVED = (301, 302, 303, 307, 308)
TRANSLATED = IPv6Network("64:ff9b::/96")  # NAT64: an IPv4 address stands in its last bits
Address = IPv4Address | IPv6Address


def is_public(address: Address) -> bool:
    """True for an address of the public network, not of this machine, a private net, a link or a group."""
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in TRANSLATED:
            inner = IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
    return address.is_global and not address.is_multicast and not address.is_reserved


def fetched(url: str, hosts: Collection[str], most: int, seconds: float) -> bytes:
    """The file at an address of http or https. Raises RequestError for any other answer.

    hosts  names that may be asked, also after redirects; "name:port" for another port than the usual ones
    most   bytes
    """
    until = time.monotonic() + seconds
    for _ in range(1 + REDIRECTS):
        at = _checked(url, hosts)
        try:
            answer = _asked(at, most, until)
        except (OSError, HTTPException, ValueError) as e:
            raise RequestError(f"{at.hostname} does not answer with it: {shown(str(e), 120)}") from None
        if isinstance(answer, bytes):
            return answer
        url = urljoin(url, answer)
    raise RequestError(f"{REDIRECTS} redirects and more")


def _checked(url: str, hosts: Collection[str]) -> SplitResult:
    try:
        at = urlsplit(url)
        port = at.port
    except ValueError:
        raise RequestError("it is no URL") from None
    if at.scheme not in PORTS or not at.hostname or at.username is not None:
        raise RequestError("want a URL such as https://host/file, without a name and a password")
    named = at.hostname if port in (None, PORTS[at.scheme]) else f"{at.hostname}:{port}"
    if named not in hosts:
        raise RequestError(f"{shown(named)} is not among the hosts of --media-hosts")
    return at


def _asked(at: SplitResult, most: int, until: float) -> bytes | str:
    """The content, or the address that it has moved to."""
    host, port = str(at.hostname), at.port or PORTS[at.scheme]
    found = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not found or not all(is_public(ip_address(address.partition("%")[0])) for address in found):
        raise RequestError(f"{shown(host)} has an address that is not public")
    connection = (_Secure if at.scheme == "https" else _Plain)(host, port, timeout=_left(until))
    connection.address = found[0]
    try:
        path = (at.path or "/") + (f"?{at.query}" if at.query else "")
        connection.request("GET", path, headers={"User-Agent": "pyspec", "Accept": "image/*"})
        answer = connection.getresponse()
        if answer.status in MOVED:
            return answer.headers.get("Location") or ""
        if answer.status != 200:
            raise RequestError(f"{shown(host)} answers with status {answer.status}")
        content = bytearray()
        while chunk := answer.read1(CHUNK):
            content += chunk
            if len(content) > most:
                raise RequestError(f"it has more than {most} bytes")
            left = _left(until)
            if connection.sock is not None:
                connection.sock.settimeout(left)
        return bytes(content)
    finally:
        connection.close()


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("it takes too long")
    return left


class _Plain(HTTPConnection):
    """A connection to an address that was looked up before, so that a name can not mean another one now."""

    address = ""

    def connect(self) -> None:
        self.sock = socket.create_connection((self.address, self.port), self.timeout)


class _Secure(HTTPSConnection):
    """The same over TLS: the certificate is the name's."""

    address = ""

    def connect(self) -> None:
        raw = socket.create_connection((self.address, self.port), self.timeout)
        context = ssl.create_default_context()
        try:
            self.sock = context.wrap_socket(raw, server_hostname=self.host)
        except BaseException:
            raw.close()
            raise
