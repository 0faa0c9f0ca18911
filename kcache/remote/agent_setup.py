"""Agent setup: the configuration of an agent. It comes through a pipe, never by arguments."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from kcache._version import __version__
from kcache.errors import ConfigError
from kcache.remote.address import Address
from kcache.remote.protocol import VERSION

__all__ = ["Setup"]


class Setup(NamedTuple):
    """The configuration of an agent. Programs with the same configuration share one agent.

    Attributes:
        addresses: the addresses of the remotes, in order; no layers.
        settings: settings of kcache that the agent follows, name -> value.
        environment: variables that clients of protocols read (credentials, proxies, certificates).
    """

    addresses: tuple[Address, ...]
    settings: Mapping[str, str]
    environment: Mapping[str, str]

    def pack(self) -> bytes:
        """Return it as bytes with credentials, which must not get into files, logs or arguments."""
        about = [self.addresses, dict(self.settings), dict(self.environment)]
        return json.dumps(about, sort_keys=True).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> Setup:
        """Return the setup that `pack` packed.

        Raises:
            ConfigError: the bytes are no setup.
        """
        try:
            addresses, settings, environment = json.loads(packed)
            return cls(tuple(map(_address, addresses)), settings, environment)
        except (ValueError, TypeError) as error:
            raise ConfigError("not the setup of an agent") from error

    def digest(self, *more: str) -> str:
        """Return 32 hexadecimal digits by which programs find the agent with this setup."""
        named = json.dumps([VERSION.decode(), __version__, *more]).encode()
        return hashlib.sha256(named + b"\0" + self.pack(), usedforsecurity=False).hexdigest()[:32]

    def __repr__(self) -> str:
        """Return the setup without credentials."""
        return f"Setup({list(self.addresses)!r})"


def _address(fields: list[Any]) -> Address:
    *most, options = fields
    return Address(*most, tuple((name, value) for name, value in options))  # type: ignore[call-arg]
