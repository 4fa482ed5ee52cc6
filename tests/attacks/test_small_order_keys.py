"""A public key of small order, for which anyone can sign, is never trusted."""

import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from graphstash import ClientConfig, ConfigError, Stash
from graphstash._trust.signing_keys import is_safe
from support.processes import graphstash_here
from support.signing import trust_json

_P = 2**255 - 19
_Y_OF_ORDER_8 = 2707385501144840649318225287225658788936804267575313519463743609750303402022
_YS = (0, 1, _P - 1, _Y_OF_ORDER_8, _P - _Y_OF_ORDER_8)
SMALL = {
    f"{y}-{sign}": (y | sign << 255).to_bytes(32, "little")
    for y in (*_YS, _P, _P + 1)  # the last two are other spellings of the first two
    for sign in (0, 1)
}


def text_of(raw):
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def test_keys_trust_refuses_a_key_of_small_order(tmp_path):
    assert [name for name, raw in SMALL.items() if is_safe(raw)] == []
    file = tmp_path / "trusted.json"
    ran = graphstash_here("keys", "trust", text_of(SMALL["1-0"]), "--file", str(file))
    assert ran.returncode == 2
    assert "small order" in ran.stderr
    assert not file.exists()


def test_file_of_trusted_keys_with_a_key_of_small_order_is_refused(fort, space, tmp_path):
    file = tmp_path / "trusted.json"
    file.write_text(trust_json(keys=[{"public": text_of(SMALL["1-0"])}]))
    with pytest.raises(ConfigError, match="small order"):
        Stash(ClientConfig.load({}, url=fort.url, namespace=space, trusted_keys=file))


def test_point_off_the_curve_is_not_a_safe_key():
    assert not is_safe((2).to_bytes(32, "little"))
    for _ in range(50):
        assert is_safe(Ed25519PrivateKey.generate().public_key().public_bytes_raw())
