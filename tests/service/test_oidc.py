"""Tokens of an identity provider that runs on loopback with its own keys."""

import asyncio
import base64
import hashlib
import hmac
import json
import ssl
import time

import jwt
import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from jwt.algorithms import get_default_algorithms

from graphstash_schema import AccessKind, ErrorCode
from graphstash_server.claims import ClaimRule, TrustedIssuer
from graphstash_server.errors import ServerError, StartError
from graphstash_server.services.identity.authentication import AccessService, KnownTokens
from graphstash_server.services.identity.oidc import ALGORITHMS, IssuerKeys, OidcVerifier
from graphstash_server.services.identity.principals import Principal
from graphstash_server.settings import load_settings
from support.issuer import Issuer, new_key
from support.services import FakeClock

RULES = [
    {
        "claims": {"repository": "team/model", "ref": "refs/heads/main", "event_name": "push"},
        "grants": ["write:trusted"],
    },
    {"claims": {"repository": "team/*"}, "grants": ["write:ci", "read:trusted"]},
]

SECOND = {"name": "second", "issuer": "https://x.example", "audience": "graphstash", "rules": RULES}

pytestmark = pytest.mark.anyio


@pytest.fixture
def issuer():
    with Issuer() as issuer:
        issuer.add_key("first")
        yield issuer


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def oidc(issuer, clock):
    """A verifier that trusts the issuer and has not fetched its keys yet."""
    trusted = TrustedIssuer(issuer=issuer.url, audience="graphstash", rules=RULES)
    return OidcVerifier([trusted], seconds=clock.steady)


@pytest.fixture
def access(oidc, clock):
    tokens = KnownTokens(database=None, clock=clock)
    return AccessService(is_open=False, tokens=tokens, oidc=oidc, accounting=None, clock=clock)


@pytest.fixture
def verify(oidc):
    async def verify_all(tokens):
        return await asyncio.gather(*map(oidc.verify, tokens), return_exceptions=True)

    with asyncio.Runner() as runner:

        def verify(*tokens):
            found = runner.run(verify_all(tokens))
            return found[0] if len(tokens) == 1 else found

        yield verify


def test_job_gets_grants_of_all_matching_rules(verify, issuer):
    principal = verify(issuer.token("first"))

    assert (principal.kind, principal.name) == (AccessKind.OIDC, "oidc:repo:team/model")
    assert sorted(map(str, principal.grants)) == ["read:trusted", "write:ci", "write:trusted"]
    assert abs(principal.expires_at.timestamp() - time.time() - 330) < 60


def test_rule_matches_whole_claims_only(verify, issuer):
    for claims in (
        {"ref": "refs/heads/other"},
        {"repository": "team/"},
        {"repository": ["x", "team/other"]},
    ):
        principal = verify(issuer.token("first", **claims))
        assert sorted(map(str, principal.grants)) == ["read:trusted", "write:ci"], claims
    # The issuer also signs JWTs for strangers.
    for name in ("teams/model", "x/team/model", None, {"team/model": 1}, [["team/other"]]):
        assert verify(issuer.token("first", repository=name)) is None, name


def test_star_matches_ordinary_names_but_no_path_to_another_place():
    """GitLab's claim with a pipeline's file has two slashes."""
    rule = ClaimRule.model_validate(RULES[1])
    ordinary = "team/x", "team/.github", "team/x/y", "team/a.b", "team/x//y", "team/\u00e9"
    hostile = (
        *("team/x/../y", "team/..", "team/../other/x", "team/x/..", "team/...", "team/a..b"),
        *("team/./x", "team/.", "team/x/./y", "team\\x", "team/..\\y", "team/%2e%2e/y"),
        *("team/%2E%2E%2Fy", "team/x%00", "team/x\0", "team/x\n", "team/x\u200b", "team/x\u2028"),
        *("team/\uff0e\uff0e/y", "team/x\uff0fy", "team/\u2025/y", "team/\u2024\u2024/y"),
        *("team/e\u0301", "team/\u202ex", "team/\ufe52\ufe52/y", "team/\u2126"),
    )
    assert [name for name in ordinary if not rule.fits({"repository": name})] == []
    assert [name for name in hostile if rule.fits({"repository": name})] == []

    # A backtracking search would take hours.
    many = ClaimRule.model_validate(
        {"claims": {"ref": "*/model*/x*/y*/main"}, "grants": ["read:x"]}
    )
    assert not many.fits({"ref": "/model/x/y" * 1_000})
    assert many.fits({"ref": "/model/x/y" * 1_000 + "/main"})


def test_number_or_boolean_in_a_claim_is_compared_as_json_text():
    values = {"true": True, "false": False, "1": 1, "0": 0, "-7": -7}
    for text in values:
        rule = ClaimRule.model_validate({"claims": {"protected": text}, "grants": ["read:x"]})
        fitting = [each for each, value in values.items() if rule.fits({"protected": value})]
        in_list = [each for each, value in values.items() if rule.fits({"protected": [value]})]
        assert fitting == in_list == [text]


def test_rule_matches_fields_of_a_claim_that_is_an_object():
    patterns = {"namespace": "ci", "serviceaccount": {"name": "train*"}}
    rule = ClaimRule.model_validate({"claims": {"kubernetes.io": patterns}, "grants": ["read:x"]})
    trainer = {"name": "trainer", "uid": "7"}
    assert rule.fits({"kubernetes.io": {"namespace": "ci", "serviceaccount": trainer, "pod": {}}})
    for claim in (
        *({"namespace": namespace, "serviceaccount": trainer} for namespace in ("x", {"ci": "ci"})),
        *(
            {"namespace": "ci", "serviceaccount": account}
            for account in ({"name": "other"}, {"name": "train/../er"}, "trainer", [trainer])
        ),
        *({"namespace": "ci"}, [patterns], "ci", None),
    ):
        assert not rule.fits({"kubernetes.io": claim}), claim
        assert not rule.fits({"kubernetes": {"io": claim}, "kubernetes.io.namespace": "ci"})


def test_every_asymmetric_algorithm_is_accepted(verify, issuer):
    for algorithm in sorted(ALGORITHMS):
        issuer.add_key(algorithm, algorithm)
    tokens = [issuer.token(algorithm) for algorithm in sorted(ALGORITHMS)]
    assert [each for each in verify(*tokens) if not isinstance(each, Principal)] == []


def test_key_that_names_no_algorithm_verifies_all_of_its_type(verify, issuer):
    """Microsoft's keys name no algorithm."""
    issuer.add_key("rsa", "RS256")
    issuer.add_key("curve", "ES384")
    keys = [
        {name: value for name, value in issuer.jwk(key_id).items() if name != "alg"}
        for key_id in ("rsa", "curve")
    ]
    issuer.answer = (200, json.dumps({"keys": keys}).encode())
    signed = [
        issuer.token("rsa", algorithm=algorithm)
        for algorithm in ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
    ]
    assert None not in verify(*signed, issuer.token("curve"))


@pytest.mark.parametrize(
    ("algorithm", "named"),
    [("HS256", "HS256"), ("none", "none"), ("<b>\n", "an unknown algorithm"), ("PS256", "PS256")],
)
async def test_refusal_names_the_algorithms_of_token_and_key(access, issuer, algorithm, named):
    issuer.add_key("rsa", "RS256")
    header, body, signature = issuer.token("rsa").split(".")
    header = encoded({"alg": algorithm, "typ": "JWT", "kid": "rsa"})
    with pytest.raises(
        ServerError, match=f"signed with {named}, but its key verifies only RS256: "
    ) as refusal:
        await access.principal_of(f"Bearer {header}.{body}.{signature}")
    assert refusal.value.code is ErrorCode.UNAUTHENTICATED


def test_token_with_wrong_or_missing_claim_is_refused(verify, issuer):
    wrong = (
        *({"aud": "another"}, {"aud": []}, {"iss": "https://elsewhere"}, {"sub": 7}),
        *({"exp": 10**30}, {"exp": "soon"}),
        {"headers": {"crit": ["b64"], "b64": True}},
        {"headers": {"kid": "unknown"}},
        *({"without": [name]} for name in ("exp", "aud", "iss", "sub", "iat")),
    )
    assert verify(issuer.token("first")) is not None
    for changed in wrong:
        assert verify(issuer.token("first", **changed)) is None, changed


def test_clocks_may_differ_by_at_most_half_a_minute(verify, issuer):
    now = int(time.time())
    for claim, sign in (("exp", -1), ("nbf", 1), ("iat", 1)):
        assert verify(issuer.token("first", **{claim: now + sign * 20})) is not None, claim
        assert verify(issuer.token("first", **{claim: now + sign * 60})) is None, claim


def is_refused(found):
    """Return whether the verifier refused a JWT permanently, in contrast to a 503."""
    return found is None or getattr(found, "code", None) is ErrorCode.UNAUTHENTICATED


def encoded(value):
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def test_token_without_a_signature_of_the_private_key_is_refused(verify, issuer):
    """Covers a missing signature, HS256 with the public key, and wrong algorithms and keys."""
    issuer.add_key("rsa", "RS256")
    issuer.add_key("short", "RS256", bits=1024)
    good = issuer.token("rsa")
    _, body, signature = good.split(".")
    public = issuer.keys["rsa"][0].public_key()
    subject = serialization.PublicFormat.SubjectPublicKeyInfo
    forms = (
        *(
            (encoding, subject)
            for encoding in (serialization.Encoding.PEM, serialization.Encoding.DER)
        ),
        (serialization.Encoding.PEM, serialization.PublicFormat.PKCS1),
    )

    for algorithm in ("none", "None", "NONE", "", None):
        head = encoded({"alg": algorithm, "typ": "JWT", "kid": "rsa"})
        tokens = f"{head}.{body}.", f"{head}.{body}.{signature}"
        assert list(map(is_refused, verify(*tokens))) == [True, True]
    for form in forms:
        signed = f"{encoded({'alg': 'HS256', 'typ': 'JWT', 'kid': 'rsa'})}.{body}"
        forged = hmac.new(public.public_bytes(*form), signed.encode(), hashlib.sha256).digest()
        assert is_refused(verify(f"{signed}.{encoded(forged)}"))
    assert is_refused(verify(issuer.token("rsa", algorithm="PS256")))
    for algorithm in ("ES256", "RS256"):
        forged = issuer.token("rsa", key=new_key(algorithm), algorithm=algorithm)
        assert is_refused(verify(forged))
    with pytest.warns(jwt.InsecureKeyLengthWarning):
        short = issuer.token("short")
    assert verify(short) is None
    assert verify(good) is not None


def test_malformed_token_is_refused(verify):
    malformed = (
        *("", ".", "..", "a.b.c", "a" * 17_000, "é.é.é", "eyJ.eyJ.x"),
        f"{encoded(b'[' * 12_000)}.e30.x",
        f"{encoded(b'{' + b'}' * 9_000)}.e30.x",
        f"{encoded({'alg': 'ES256', 'kid': ['first']})}.e30.x",
        f"{encoded({'alg': ['ES256'], 'kid': 'first'})}.e30.x",
        f"{encoded({'alg': 'ES256', 'kid': 'first'})}.{encoded(b'[' * 12_000)}.x",
    )
    assert verify(*malformed) == [None] * len(malformed)


def test_keys_are_fetched_once_and_unknown_key_ids_cause_no_request(verify, issuer, clock):
    assert all(verify(*[issuer.token("first")] * 50))
    assert len(issuer.jwks_fetches) == 1

    made_up = [issuer.token("first", headers={"kid": f"key-{n}"}) for n in range(200)]
    assert not any(verify(*made_up, *made_up))
    assert len(issuer.jwks_fetches) == 1
    clock.turn(15)
    assert not any(verify(*made_up))
    assert len(issuer.jwks_fetches) == 2


def test_new_key_is_found_after_the_pause_and_old_key_dropped(verify, issuer, clock):
    old = issuer.token("first")
    assert verify(old) is not None
    issuer.keys.clear()
    clock.turn(299)
    assert verify(old) is not None
    clock.turn(1)
    assert verify(old) is None, "a key that the issuer removed expires after five minutes"

    issuer.add_key("second", "RS256")
    new = issuer.token("second")
    assert verify(new) is None, "the last fetch is too recent"
    clock.turn(15)
    assert verify(new) is not None


async def test_decision_about_jwt_lasts_until_keys_are_fetched_again(
    issuer, clock, oidc, access, monkeypatch
):
    verified = []
    verify = oidc.verify

    async def counted(token):
        verified.append(token)
        return await verify(token)

    monkeypatch.setattr(oidc, "verify", counted)
    shown = f"Bearer {issuer.token('first')}"
    caller = await access.principal_of(shown)
    for seconds in (1.5, 100, 198):
        clock.turn(seconds)
        assert access.principal_now(shown) is caller
        assert await access.principal_of(shown) is caller
    assert len(verified) == 1

    clock.turn(0.5)
    assert access.principal_now(shown) is None
    assert await access.principal_of(shown) == caller
    assert access.principal_now(shown) == caller
    assert len(verified) == 2

    issuer.keys.clear()
    clock.turn(300)
    assert access.principal_now(shown) is None
    with pytest.raises(ServerError, match="token"):
        await access.principal_of(shown)


async def test_decision_about_jwt_of_failing_provider_lasts_two_seconds(issuer, clock, access):
    shown = f"Bearer {issuer.token('first')}"
    await access.principal_of(shown)
    issuer.answer = (500, b"")
    clock.turn(300)
    assert access.principal_now(shown) is None
    assert await access.principal_of(shown) is not None, "the cached key stays valid"
    clock.turn(1.5)
    assert access.principal_now(shown) is not None
    clock.turn(0.5)
    assert access.principal_now(shown) is None


def test_failing_provider_gives_503_and_known_keys_still_work(verify, issuer, clock):
    for answer in (
        *((500, b"{}"), (302, b"")),
        *((200, body) for body in (b"no json", b"[" * 100_000, b"[]", b"{}", b'{"keys": {}}')),
        (200, b'{"keys": [' + b" " * 1024**2 + b"]}"),
    ):
        clock.turn(3600)
        issuer.answer = answer
        refused = verify(issuer.token("first"))
        assert isinstance(refused, ServerError), answer[:2]
        assert (refused.status, refused.retry_after_seconds) == (503, 15)

        issuer.answer = None
        clock.turn(15)
        assert verify(issuer.token("first")) is not None
        issuer.answer = answer
        clock.turn(600)
        assert verify(issuer.token("first")) is not None
        assert isinstance(verify(issuer.token("other", key=new_key())), ServerError)


def test_unusable_key_in_the_key_set_is_skipped(verify, issuer):
    """Anyone can sign with a shared secret or with a published private key."""
    issuer.add_key("rsa", "RS256")
    secret = b"x" * 32
    private, algorithm = issuer.keys["rsa"]
    published = [
        *(None, 7, [], {}, {"kty": "EC"}, {"kty": "RSA", "n": 7}),
        {"kty": "oct", "k": encoded(secret), "kid": "shared", "alg": "HS256"},
        get_default_algorithms()[algorithm].to_jwk(private, as_dict=True) | {"kid": "rsa"},
        issuer.jwk("first"),
        {**issuer.jwk("first"), "use": "enc"},
    ]
    issuer.answer = (200, json.dumps({"keys": published}).encode())

    shared = issuer.token("shared", key=secret, algorithm="HS256")
    assert list(map(is_refused, verify(shared, issuer.token("rsa")))) == [True, True]
    assert verify(issuer.token("first")) is not None


async def test_callers_with_known_keys_do_not_wait_for_a_hanging_provider(
    issuer, clock, monkeypatch
):
    keys = IssuerKeys(issuer.url, jwks_url=None, seconds=clock.steady)

    assert await keys.find("first") is not None
    issuer.answer = (500, b"")
    clock.turn(300)
    assert await keys.find("first") is not None, "the fetch failed, and the cached key stays valid"
    clock.turn(15)
    is_trying, may_end = asyncio.Event(), asyncio.Event()

    async def hang():
        is_trying.set()
        await may_end.wait()
        raise OSError

    monkeypatch.setattr(keys, "_fetch", hang)
    trying = asyncio.create_task(keys.find("first"))
    await is_trying.wait()
    async with asyncio.timeout(30):
        assert await keys.find("first") is not None
    assert not trying.done()
    may_end.set()
    assert await trying is not None


async def test_keys_are_not_fetched_over_plain_http_from_other_hosts(issuer):
    keys = IssuerKeys(issuer.url, jwks_url="http://keys.example/jwks")

    with pytest.raises(ServerError, match="identity provider"):
        await keys.find("first")


def test_keys_are_fetched_from_an_issuer_with_its_own_authority(tmp_path, caplog):
    """As for a cluster. The authority is trusted for this issuer only."""
    authority, stranger = trustme.CA(), trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    for name, each in (("its", authority), ("other", stranger)):
        each.cert_pem.write_to_path(tmp_path / name)
    (tmp_path / "none").write_text("no certificate")

    with Issuer(context=context) as issuer:
        issuer.add_key("first")
        terms = {"issuer": issuer.url, "audience": "graphstash", "rules": RULES}

        def verified(ca_file):
            verifier = OidcVerifier([TrustedIssuer(ca_file=ca_file, **terms)])
            return asyncio.run(verifier.verify(issuer.token("first")))

        assert verified(tmp_path / "its") is not None
        assert caplog.text == ""
        for ca_file in (None, *(tmp_path / name for name in ("other", "none", "absent"))):
            with pytest.raises(ServerError, match="does not answer"):
                verified(ca_file)
        assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
        assert all(
            f"the CAs in {tmp_path / name} cannot" in caplog.text for name in ("none", "absent")
        )


def test_settings_that_match_every_token_or_none_are_refused():
    good = {
        "auth": "tokens",
        "oidc_issuer": "https://ci.example",
        "oidc_audience": "graphstash",
        "oidc_rules": RULES,
    }
    assert len(load_settings(**good).oidc_rules) == 2
    good["oidc_issuers"] = [SECOND]
    assert [each.name for each in load_settings(**good).trusted_issuers] == ["", "second"]
    one = {"claims": {"repository": "a"}, "grants": ["read:*"]}
    rules = (
        one | {"claims": {}},
        one | {"claims": {"repository": "*"}},
        one | {"claims": {"a": {"b": {}, "c": "**"}}},
        one | {"claims": {"a": ["b"]}},
        one | {"grants": []},
        one | {"grants": ["own:*"]},
        one | {"or": 1},
    )
    issuers = (
        *({"issuer": "https://ci.example"}, {"issuer": "http://ci2.example"}),
        *({"name": ""}, {"name": "a:b"}, {"audience": ""}, {"rules": []}, {"also": 1}),
    )
    for changed in (
        {"auth": "none"},
        {"auth": "none", "oidc_issuer": None, "oidc_audience": None, "oidc_rules": []},
        {"oidc_audience": None},
        {"oidc_issuer": None},
        {"oidc_issuer": "http://ci.example"},
        {"oidc_rules": []},
        {"oidc_issuers": [SECOND, SECOND | {"issuer": "https://third.example"}]},
        *({"oidc_rules": [rule]} for rule in rules),
        *({"oidc_issuers": [SECOND | each]} for each in issuers),
    ):
        with pytest.raises(StartError):
            load_settings(**good | changed)
