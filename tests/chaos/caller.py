"""One thread of the load: its operations, and what their answers tell the model."""

import random
import threading
import time
from functools import partial
from typing import NamedTuple

import httpx

from chaos.cluster import KEEP, TIGHT
from chaos.damage import LOSSES, Damage, UnharmedError, damaged_body, lose, read_part
from chaos.model import ViolationError
from graphstash_schema import ArtifactMetadata, Digest
from support.guarded_server import DEVICE, fingerprint, keys

TIMEOUT_SECONDS = 40

_AFTER_A_CUT_SECONDS = 3.0
_AFTER_A_TIMEOUT_SECONDS = 30.0
"""How long an upload whose caller has gone may go on."""

_PAUSE_AFTER_A_FAILURE_SECONDS = 0.05
"""A closed port answers faster than anything else."""

_RACE_SECONDS = 0.03

_LONGEST_FILL_SECONDS = 10.0
"""Who reads a part may get bytes that another reader's request has brought, before all of them were
compared with their digest."""

_TIGHT_KEYS = 40
WINDOW = 16
"""Keys of the permanent namespace that are written at a time; the older ones are only read."""

_VARIANTS = (0, 1)
"""What a key may get: compilers are not reproducible."""

_DAMAGED_VARIANTS = (*_VARIANTS, 2)
"""Variants that damaged uploads announce. No other upload has the last one, so the server must
never serve it."""

_LOSS_SHARE = 0.5
"""Share of requests that meet one of `LOSSES`."""


def artifact_path(namespace, number, what="artifacts"):
    return f"/v1/{namespace}/{what}/jax/{DEVICE}/{fingerprint(number)}"


def key_of(number):
    return keys([number])[0]


class Caller:
    """One thread."""

    def __init__(self, load, http, pick, *, name):
        self._load = load
        self._http = http
        self._pick = pick
        self._name = name
        self._leases = []
        self._acts = {
            self._put: 30,
            self._put_damaged: 20,
            self._get: 30,
            self._abandon: 10,
            self._get_range: 8,
            self._head: 6,
            self._lookup: 6,
            self._delete: 6,
            self._race: 10,
            self._acquire: 8,
            self._renew: 3,
            self._release: 3,
            self._merge: 3,
        }

    def act(self):
        act = self._pick.choices(list(self._acts), list(self._acts.values()))[0]
        namespace = self._pick.choices((KEEP, TIGHT), (5, 4))[0]
        number = self._number(namespace, is_new=act in {self._put, self._acquire})
        act(namespace, number)

    def _number(self, namespace, *, is_new):
        if namespace == TIGHT:
            return self._pick.randrange(_TIGHT_KEYS)
        newest = self._load.newest
        return self._pick.randrange(newest - WINDOW if is_new else 0, newest)

    def _send(self, call, method, path, *, allowed, losses=LOSSES, **request):
        """Send a request whose answer may get lost. Return the answer, or `_Silent`."""
        if self._pick.random() < _LOSS_SHARE:
            loss = self._pick.choice(losses)
            silent = self._lose(call, method, path, loss, **request)
            if loss is not Damage.TWICE or silent.goes_on_seconds:
                return silent
        return self._ask(call, method, path, allowed=allowed, **request)

    def _lose(self, call, method, path, damage, **request):
        """Send a request that meets a damage and gets no answer."""
        send = partial(lose, damage=damage, pick=self._pick, timeout=TIMEOUT_SECONDS)
        silent = self._try(call, method, path, send, **request)
        if silent is None:
            self._load.struck[damage] += 1
            silent = _Silent(_AFTER_A_TIMEOUT_SECONDS if damage is Damage.GONE else 0)
        return silent

    def _try(self, call, method, path, send, **request):
        """Return what `send` returns for a request, or `_Silent`."""
        url = self._load.url(self._pick.randrange(2)) + path
        try:
            return send(self._http.build_request(method, url, **request))
        except (httpx.TransportError, UnharmedError, OSError) as error:
            self._load.counts[f"{call} {type(error).__name__}"] += 1
            time.sleep(_PAUSE_AFTER_A_FAILURE_SECONDS)
            is_timeout = isinstance(error, httpx.TimeoutException | TimeoutError)
            return _Silent(_AFTER_A_TIMEOUT_SECONDS if is_timeout else _AFTER_A_CUT_SECONDS)

    def _ask(self, call, method, path, *, allowed, **request):
        """Send a request. Return the answer, or `_Silent`."""
        answer = self._try(call, method, path, self._http.send, **request)
        if isinstance(answer, _Silent):
            return answer
        self._load.counts[f"{call} {answer.status_code}"] += 1
        if answer.status_code not in {503, *allowed}:
            raise ViolationError(
                f"{method} {path} was answered {answer.status_code}: {answer.text}"
            )
        if answer.status_code >= 400 and method != "HEAD":
            problem = answer.json()
            if answer.headers["content-type"] != "application/problem+json" or (
                problem["status"] != answer.status_code
            ):
                raise ViolationError(f"{method} {path} was answered without a problem: {problem}")
        return answer

    def _put(self, namespace, number):
        load, model = self._load, self._load.model(namespace)
        variant = self._pick.choices(_VARIANTS, (9, 1))[0]
        content = load.content(namespace, number, variant)
        blob, digest = load.blob(content)
        began = time.monotonic()
        put = model.begin_put(number, str(digest), len(blob), now=began)
        load.grants.uploading((namespace, number), put)
        allowed = {200, 201, 409} | ({507} if namespace == TIGHT else set())
        answer = self._send(
            "PUT",
            "PUT",
            artifact_path(namespace, number),
            allowed=allowed,
            # An upload without an end reserves room in the model, which would loosen its limit.
            losses=LOSSES if namespace == KEEP else (Damage.LOST, Damage.TWICE),
            content=blob,
            headers=_put_headers(number, blob, digest),
        )
        ended = time.monotonic()
        if isinstance(answer, _Silent):
            model.end_put(put, now=ended + answer.goes_on_seconds, is_possible=True)
            return
        status = answer.status_code
        model.end_put(put, now=ended, is_possible=status in {200, 201, 503})
        if status == 201:
            model.saw_created(number, str(digest), began=began, ended=ended)
            if namespace == KEEP:
                load.newest += 1
        elif status == 200:
            model.saw(number, str(digest), began=began, ended=ended, how="PUT")
        elif status == 409:
            stays = answer.json()["digest"]
            if stays == str(digest):
                raise ViolationError(f"a conflict of {stays} with itself")
            model.saw(number, stays, began=began, ended=ended, how="PUT")

    def _put_damaged(self, namespace, number):
        """Send an upload that loses or changes bytes on the way. The server must refuse it, so the
        model does not record it. Most keys are new, because the server reads no body for others.
        """
        if namespace == KEEP:
            number = self._load.newest + self._pick.randrange(-4, 4)
        content = self._load.content(namespace, number, self._pick.choice(_DAMAGED_VARIANTS))
        blob, digest = self._load.blob(content)
        if not blob:
            return
        damage = self._pick.choice((Damage.BROKEN_OFF, Damage.SHORT, Damage.FLIPPED))
        headers = _put_headers(number, blob, digest)
        put = ("damaged PUT", "PUT", artifact_path(namespace, number))
        if damage is Damage.BROKEN_OFF:
            self._lose(*put, damage, content=blob, headers=headers)
            return
        allowed = {200, 400, 409} | ({507} if namespace == TIGHT else set())
        body = damaged_body(blob, damage, self._pick)
        began = time.monotonic()
        answer = self._ask(*put, allowed=allowed, content=body, headers=headers)
        ended = time.monotonic()
        if isinstance(answer, _Silent) or answer.status_code in {503, 507}:
            return
        if answer.status_code == 400:
            self._load.struck[damage] += 1
            return
        stays = str(digest) if answer.status_code == 200 else answer.json()["digest"]
        self._load.model(namespace).saw(number, stays, began=began, ended=ended, how="PUT")

    def _get(self, namespace, number):
        self._read(namespace, number, None)

    def _abandon(self, namespace, _number):
        """Read the beginning of a long artifact, and leave."""
        numbers = (self._number(namespace, is_new=False) for _ in range(20))
        number = next((n for n in numbers if self._load.is_long(namespace, n)), None)
        if number is None:
            return
        began = time.monotonic()
        send = partial(read_part, pick=self._pick, timeout=TIMEOUT_SECONDS)
        answer = self._try("abandoned GET", "GET", artifact_path(namespace, number), send)
        if isinstance(answer, _Silent):
            return
        self._load.struck[Damage.ABANDONED] += 1
        ended = time.monotonic()
        digest = _announced(answer)
        self._load.model(namespace).saw(number, digest, began=began, ended=ended, how="GET")
        if not self._load.made(digest).startswith(answer.content):
            self._refuse(f"the first of {digest}", namespace, number, began)

    def _get_range(self, namespace, number):
        start = self._pick.choice((0, 1, 1000, 100_000, 2_000_000))
        self._read(namespace, number, (start, start + self._pick.choice((0, 100, 400_000))))

    def _read(self, namespace, number, span):
        headers = {} if span is None else {"Range": f"bytes={span[0]}-{span[1]}"}
        allowed = {200, 404} if span is None else {200, 206, 404, 416}
        path = artifact_path(namespace, number)
        model = self._load.model(namespace)
        began = time.monotonic()
        answer = self._send("GET", "GET", path, allowed=allowed, headers=headers)
        ended = time.monotonic()
        if isinstance(answer, _Silent) or answer.status_code in {416, 503}:
            return
        if answer.status_code == 404:
            model.saw_absent(number, began=began, how="GET")
            return
        digest = _announced(answer)
        model.saw(number, digest, began=began, ended=ended, how="GET")
        if answer.status_code == 200:
            if str(Digest.of(answer.content)) != digest:
                self._refuse(f"not those of {digest}", namespace, number, began)
        elif answer.content != self._load.made(digest)[span[0] : span[1] + 1]:
            self._refuse(f"{span} of {digest}", namespace, number, began)

    def _refuse(self, said, namespace, number, began):
        """Wrong bytes, which a job would not use. It asks the server to look at the artifact: when
        only its way was at fault, the artifact stays.
        """
        if not self._load.flipped_since(began - _LONGEST_FILL_SECONDS):
            raise ViolationError(f"wrong bytes of key {number} in {namespace}: {said}")
        path = f"/v1/{namespace}/artifacts:verify"
        answer = self._send("verify", "POST", path, allowed={200}, json=key_of(number))
        is_known = isinstance(answer, httpx.Response) and answer.status_code == 200
        if is_known and answer.json()["healed"] and namespace == KEEP:
            raise ViolationError(f"key {number} was dropped for bits that were flipped on the way")

    def _head(self, namespace, number):
        model = self._load.model(namespace)
        began = time.monotonic()
        answer = self._send("HEAD", "HEAD", artifact_path(namespace, number), allowed={200, 404})
        ended = time.monotonic()
        if isinstance(answer, _Silent) or answer.status_code == 503:
            return
        if answer.status_code == 404:
            model.saw_absent(number, began=began, how="HEAD")
        else:
            model.saw(number, _announced(answer), began=began, ended=ended, how="HEAD")

    def _lookup(self, namespace, _number):
        if namespace == TIGHT:
            # What was looked up is pinned for ten minutes: the limit would soon hold nothing else.
            numbers = {self._pick.randrange(4)}
        else:
            numbers = {self._number(namespace, is_new=False) for _ in range(20)}
        model = self._load.model(namespace)
        by_fingerprint = {fingerprint(number): number for number in numbers}
        request = {"keys": [key_of(number) for number in numbers]}
        began = time.monotonic()
        answer = self._send(
            "lookup", "POST", f"/v1/{namespace}/artifacts:lookup", allowed={200}, json=request
        )
        ended = time.monotonic()
        if isinstance(answer, _Silent) or answer.status_code == 503:
            return
        reply = answer.json()
        for found in reply["found"]:
            number = by_fingerprint.pop(found["key"]["fingerprint"])
            digest = str(Digest(found["digest"].rpartition(":")[2], found["size_bytes"]))
            model.saw(number, digest, began=began, ended=ended, how="lookup")
        for missing in reply["missing"]:
            number = by_fingerprint.pop(missing["fingerprint"])
            model.saw_absent(number, began=began, how="lookup")
        if by_fingerprint:
            raise ViolationError(f"the lookup said nothing of {by_fingerprint}")

    def _delete(self, _namespace, number):
        number %= _TIGHT_KEYS
        began = time.monotonic()
        answer = self._send("DELETE", "DELETE", artifact_path(TIGHT, number), allowed={204, 404})
        if not isinstance(answer, _Silent) and answer.status_code == 204:
            self._load.budgeted.saw_deleted(number, began=began, ended=time.monotonic())

    def _race(self, _namespace, _number):
        """The last artifact of a blob is deleted while another one with the same bytes is stored,
        which may then never go.
        """
        tight = self._pick.randrange(0, WINDOW - 3, 3)
        keep = (self._load.newest - WINDOW) // 3 * 3 + tight
        self._put(TIGHT, tight)
        pause = self._pick.random() * _RACE_SECONDS
        seed = self._pick.random()
        deleting = threading.Thread(target=self._delete_after, args=(pause, tight, seed))
        deleting.start()
        self._put(KEEP, keep)
        deleting.join()

    def _delete_after(self, seconds, number, seed):
        time.sleep(seconds)
        try:
            with httpx.Client(timeout=TIMEOUT_SECONDS, trust_env=False) as http:
                other = Caller(self._load, http, random.Random(seed), name=self._name)
                other._delete(TIGHT, number)
        except BaseException as error:
            self._load.failures.append(error)

    def _acquire(self, namespace, number):
        ttl_seconds = self._pick.choice((1.0, 2.0, 5.0))
        wait = self._pick.choice(({}, {}, {"Prefer": "wait=1"}))
        model = self._load.model(namespace)
        began = time.monotonic()
        answer = self._send(
            "acquire",
            "POST",
            artifact_path(namespace, number, "leases"),
            allowed={200, 201, 202},
            headers=wait,
            json={"holder": self._name, "ttl_seconds": ttl_seconds},
        )
        ended = time.monotonic()
        if isinstance(answer, _Silent) or answer.status_code == 503:
            return
        reply = answer.json()
        if answer.status_code == 200:
            digest = str(Digest(reply["digest"].rpartition(":")[2], reply["size_bytes"]))
            model.saw(number, digest, began=began, ended=ended, how="acquire")
        elif answer.status_code == 201:
            model.saw_absent(number, began=began, how="acquire")
            lease = ((namespace, number), reply["token"])
            self._load.grants.granted(
                *lease, reply["fencing"], ttl_seconds=ttl_seconds, began=began, ended=ended
            )
            self._leases.append(lease)

    def _renew(self, _namespace, _number):
        if not self._leases:
            return
        (namespace, number), token = self._pick.choice(self._leases[-4:])
        began = time.monotonic()
        answer = self._send(
            "renew",
            "PUT",
            artifact_path(namespace, number, "leases"),
            allowed={200, 410},
            headers={"Graphstash-Lease": token},
            json={"holder": self._name, "ttl_seconds": 2.0},
        )
        if not isinstance(answer, _Silent) and answer.status_code == 200:
            self._load.grants.renewed((namespace, number), token, ttl_seconds=2.0, began=began)

    def _release(self, _namespace, _number):
        if not self._leases:
            return
        (namespace, number), token = self._leases.pop()
        self._load.grants.releasing((namespace, number), token, now=time.monotonic())
        self._send(
            "release",
            "DELETE",
            artifact_path(namespace, number, "leases") + "?outcome=failed",
            allowed={204, 410},
            headers={"Graphstash-Lease": token},
        )

    def _merge(self, namespace, number):
        name = f"job-{self._pick.randrange(4)}"
        if self._pick.random() < 0.5:
            self._send("manifest", "GET", f"/v1/{namespace}/manifests/{name}", allowed={200, 404})
            return
        answer = self._send(
            "manifest",
            "PUT",
            f"/v1/{namespace}/manifests/{name}",
            allowed={200, 201} | ({507} if namespace == TIGHT else set()),
            json={"keys": [key_of(number)]},
        )
        if not isinstance(answer, _Silent) and answer.status_code < 300:
            named = {entry["key"]["fingerprint"] for entry in answer.json()["entries"]}
            if fingerprint(number) not in named:
                raise ViolationError(f"the manifest {name} was merged without key {number}")


class _Silent(NamedTuple):
    """No answer. The server may continue the request for `goes_on_seconds`."""

    goes_on_seconds: float


def _put_headers(number, blob, digest):
    metadata = ArtifactMetadata(
        compile_seconds=1 + number % 7, raw_size_bytes=len(blob), toolchain="chaos"
    )
    return {"Repr-Digest": digest.repr_digest, "Graphstash-Metadata": metadata.to_header()}


def _announced(answer):
    size_bytes = answer.headers.get("content-range", "").rpartition("/")[2]
    size_bytes = int(size_bytes or answer.headers["content-length"])
    return str(Digest.parse_repr_digest(answer.headers["repr-digest"], size_bytes=size_bytes))
