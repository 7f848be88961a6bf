"""Whom a key makes its caller."""

import hashlib

from pydantic import SecretStr

from app.keys import ApiKeys

ALIKE = ("tenant-39588", "tenant-67738")
"""Their digests begin with the same 32 bits."""


def test_keys_whose_digests_begin_alike_have_owners_of_their_own() -> None:
    first, second = (hashlib.sha256(key.encode()).hexdigest() for key in ALIKE)
    assert first[:8] == second[:8]
    keys = ApiKeys.load(SecretStr(",".join(ALIKE)), None)
    owners = [keys.owner(f"Bearer {key}") for key in ALIKE]
    assert owners == [first[:32], second[:32]]
    assert keys.owner("Bearer tenant-1") is None
