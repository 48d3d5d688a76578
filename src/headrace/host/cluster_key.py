"""The cluster's key: a file with a secret. Whoever has it is let in, and nobody else is.

Everything else follows from the secret: the CURVE keys of both sides of a connection, by BLAKE2b
keyed with it (RFC 7693) over a name that says what they are for. So no key is ever sent, none but
the file needs to be kept, and a key that is good for one purpose is good for no other.
"""

import hashlib
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from headrace.errors import UsageError

_HEADING = "headrace-cluster-key-1"
SECRET_BYTES = 32


@dataclass(frozen=True)
class KeyPair:
    """Of CURVE, each as 40 characters of Z85 (ZeroMQ RFC 32)."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class Secret:
    """32 random bytes, or what was derived from some."""

    value: bytes = field(repr=False)

    def derive(self, purpose: str) -> "Secret":
        """Another secret, from which this one cannot be told."""
        return Secret(
            hashlib.blake2b(
                purpose.encode(), key=self.value, digest_size=SECRET_BYTES, person=b"headrace"
            ).digest()
        )

    def key_pair(self, purpose: str) -> KeyPair:
        """The pair that everybody who has the secret derives for this purpose."""
        secret = z85.encode(self.derive(purpose).value)
        return KeyPair(zmq.curve_public(secret), secret)


def write_cluster_key(path: Path) -> None:
    """A new file with a new secret, which only its owner may read. Raises UsageError if there is
    one already, or it cannot be written."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise UsageError(f"{path} exists: remove it first if no host uses it any more") from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"{_HEADING} {secrets.token_hex(SECRET_BYTES)}\n")


def read_cluster_key(path: Path) -> Secret:
    """What the file holds. Raises UsageError if there is none, it is none, or others may read or
    change it."""
    try:
        # Of the file that is read, whatever has its name a moment later.
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(1024).decode("ascii", errors="replace")
    except OSError as error:
        raise UsageError(
            f"--cluster-key-file {path}: {error.strerror} (make one with: headrace key {path})"
        ) from error
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise UsageError(
            f"--cluster-key-file {path}: others than its owner may use it (mode "
            f"{stat.S_IMODE(status.st_mode):o}): chmod 600 it, and make a new one if they did"
        )
    match text.split():
        case [heading, digits] if heading == _HEADING and len(digits) == 2 * SECRET_BYTES:
            try:
                return Secret(bytes.fromhex(digits))
            except ValueError:
                pass
    raise UsageError(
        f"--cluster-key-file {path}: this is no cluster key (make one with: headrace key NEW_FILE, "
        "and copy it to every host)"
    )
