"""What can be wrong with a request: stable names, status codes, titles (RFC 9457).

The agent decides by the status code alone; people and programs read the name. Documented in
``docs/reference/problems.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

#: Prefix of the member ``type`` of a problem document.
TYPE_PREFIX: Final = "urn:smon:problem:"


class Problem(StrEnum):
    """Name of a problem; the last part of its ``type``."""

    BAD_REQUEST = "bad-request"
    MALFORMED_BODY = "malformed-body"
    DIGEST_MISMATCH = "digest-mismatch"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not-found"
    METHOD_NOT_ALLOWED = "method-not-allowed"
    TOO_SLOW = "too-slow"
    KEY_CONFLICT = "key-conflict"
    STALE_EPOCH = "stale-epoch"
    LAYOUT_CONFLICT = "layout-conflict"
    STATE_CONFLICT = "state-conflict"
    LENGTH_REQUIRED = "length-required"
    TOO_LARGE = "too-large"
    UNSUPPORTED_TYPE = "unsupported-type"
    UNSUPPORTED_ENCODING = "unsupported-encoding"
    INVALID = "invalid"
    WRONG_SCHEMA = "wrong-schema"
    WRONG_VALUES = "wrong-values"
    TOO_MANY_EVENTS = "too-many-events"
    UNDECODABLE = "undecodable"
    RATE_LIMITED = "rate-limited"
    INTERNAL = "internal"
    OVERLOADED = "overloaded"
    DECODER_DIED = "decoder-died"
    NOT_READY = "not-ready"
    STORE_UNAVAILABLE = "store-unavailable"
    DISK_FULL = "disk-full"


@dataclass(frozen=True, slots=True)
class Kind:
    """Status code and title of a problem."""

    status: int
    title: str


KINDS: Final = {
    Problem.BAD_REQUEST: Kind(400, "The request is malformed"),
    Problem.MALFORMED_BODY: Kind(400, "The body cannot be decoded"),
    Problem.DIGEST_MISMATCH: Kind(400, "The body is not what its digest says"),
    Problem.UNAUTHORIZED: Kind(401, "A valid token is needed"),
    Problem.FORBIDDEN: Kind(403, "The token does not allow this"),
    Problem.NOT_FOUND: Kind(404, "There is no such thing"),
    Problem.METHOD_NOT_ALLOWED: Kind(405, "The route does not know this method"),
    Problem.TOO_SLOW: Kind(408, "The request did not arrive in time"),
    Problem.KEY_CONFLICT: Kind(409, "This sequence number holds another batch"),
    Problem.STALE_EPOCH: Kind(409, "The stream is in a later epoch"),
    Problem.LAYOUT_CONFLICT: Kind(409, "The job attempt is known with another layout"),
    Problem.STATE_CONFLICT: Kind(409, "This cannot be done in the present state"),
    Problem.LENGTH_REQUIRED: Kind(411, "The header Content-Length is needed"),
    Problem.TOO_LARGE: Kind(413, "The body is too large"),
    Problem.UNSUPPORTED_TYPE: Kind(415, "The content type is not supported"),
    Problem.UNSUPPORTED_ENCODING: Kind(415, "The content encoding is not supported"),
    Problem.INVALID: Kind(422, "A parameter or field is invalid"),
    Problem.WRONG_SCHEMA: Kind(422, "The columns are not those of the schema"),
    Problem.WRONG_VALUES: Kind(422, "A value lies outside its range"),
    Problem.TOO_MANY_EVENTS: Kind(422, "The batch holds too many events"),
    Problem.UNDECODABLE: Kind(422, "Decoding the body ends the process that does it"),
    Problem.RATE_LIMITED: Kind(429, "The tenant's limit is reached"),
    Problem.INTERNAL: Kind(500, "The server failed"),
    Problem.OVERLOADED: Kind(503, "The server is busy"),
    Problem.DECODER_DIED: Kind(503, "The process that decoded the body died of it"),
    Problem.NOT_READY: Kind(503, "The result is not there yet"),
    Problem.STORE_UNAVAILABLE: Kind(503, "The database or object store cannot be reached"),
    Problem.DISK_FULL: Kind(507, "The server's disk is full"),
}
