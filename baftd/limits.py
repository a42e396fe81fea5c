"""The largest whole number that is said or stored: 2**53 - 1, above which readers of JSON that keep numbers as doubles
round (RFC 8259, section 6)."""

from __future__ import annotations

__all__ = ["LARGEST"]

LARGEST = (1 << 53) - 1
