from __future__ import annotations

import datetime as dt
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from smon.notify.address import Target, target_of
from smon.notify.post import MAX_RETRY_AFTER_S, Reply, Terms, post
from tests.notify.receiver import SECRET, Receiver, receiving

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
BODY = b'{"text": "x"}'


def terms(**given: object) -> Terms:
    """Long, for a slow machine, and allowed to talk to this one."""
    return Terms(**{"timeout_s": 20.0, "private": True, **given})  # type: ignore[arg-type]  # of Terms


def sent(target: Target, **given: object) -> Reply:
    """What becomes of a message."""
    return post(target, BODY, "id-1", terms(**given))


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A receiver that takes everything."""
    with receiving() as made:
        yield made


def _complete(said: bytes) -> bool:
    """Whether a request has its whole body; what is none, as a hello of TLS, has no more."""
    if said and not said.startswith(b"POST"):
        return True
    if b"\r\n\r\n" not in said:
        return False
    head, _, body = said.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: *(\d+)", head)
    return length is None or len(body) >= int(length[1])


@contextmanager
def raw_server(
    *chunks: bytes, pause_s: float = 0.0, tls: ssl.SSLContext | None = None
) -> Iterator[int]:
    """A server that sends these bytes to each caller whatever it says; its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def answer(connection: socket.socket) -> None:
        # All of it: closing with something unread resets the connection, answer or not.
        said = b""
        while not _complete(said) and (more := connection.recv(65_536)):
            said += more
        for chunk in chunks:
            connection.sendall(chunk)
            if over.wait(pause_s):
                return

    def serve() -> None:
        while not over.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            try:
                wrapped = tls.wrap_socket(connection, server_side=True) if tls else connection
                with wrapped:
                    answer(wrapped)
            except OSError:
                connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_a_message_arrives_with_its_id(receiver: Receiver) -> None:
    """The body as it is, the path with its secret, and an id to tell resends by."""
    assert sent(target_of(receiver.url)) == Reply(delivered=True)
    (one,) = receiver.received
    assert one.document == {"text": "x"}
    assert one.path == f"/hooks/{SECRET}"
    assert one.headers["X-SMon-Message"] == "id-1"
    assert one.headers["Content-Type"] == "application/json"
    assert one.headers["Host"] == f"127.0.0.1:{receiver.port}"


def test_the_connection_goes_to_the_address_that_was_checked(receiver: Receiver) -> None:
    """A name is asked for once: a second answer, to somewhere else, would not be looked at."""
    asked = []

    def look_up(host: str, port: int) -> Sequence[str]:
        asked.append((host, port))
        return ["127.0.0.1"]

    target = Target("hooks.invalid", receiver.port, "/x", secure=False)
    assert sent(target, look_up=look_up).delivered
    assert asked == [("hooks.invalid", receiver.port)]
    assert receiver.received[0].headers["Host"] == f"hooks.invalid:{receiver.port}"


def test_nothing_is_sent_to_an_address_that_is_not_allowed(receiver: Receiver) -> None:
    """The check comes before the connection."""
    reply = sent(target_of(receiver.url), private=False)
    assert not reply.delivered
    assert "private" in reply.reason or "https" in reply.reason
    assert not receiver.received


def test_a_redirect_is_not_followed(receiver: Receiver) -> None:
    """It could lead to where the check would not have let it."""
    receiver.status, receiver.headers = 307, {"Location": f"http://127.0.0.1:{receiver.port}/other"}
    reply = sent(target_of(receiver.url))
    assert reply == Reply(delivered=False, reason="status 307: redirects are not followed")
    assert not receiver.received


@pytest.mark.parametrize(
    "status, header, wait_s",
    [
        *((500, None, 0), (404, "9", 0), (429, None, 0), (429, "7", 7), (503, " 3 ", 3)),
        *((429, "99999", MAX_RETRY_AFTER_S), (429, "-5", 0), (429, "1e9", 0), (429, "soon", 0)),
    ],
)
def test_a_refusal_says_how_long_to_wait(
    receiver: Receiver, status: int, header: str | None, wait_s: float
) -> None:
    """In whole seconds, within a bound, and only where the status means it."""
    receiver.status = status
    receiver.headers = {"Retry-After": header} if header else {}
    reply = sent(target_of(receiver.url))
    assert reply == Reply(delivered=False, reason=f"status {status}", retry_after_s=wait_s)


def test_an_answer_that_never_ends_is_cut_off() -> None:
    """Each byte begins the timeout of a socket anew: the time limit is for all of them."""
    drip = [b"HTTP/1.1 200 OK\r\nX-A: ", *[b"a"] * 1_000]
    begin = time.monotonic()
    with raw_server(*drip, pause_s=0.05) as port:
        reply = sent(Target("127.0.0.1", port, "/x", secure=False), timeout_s=0.4)
    assert reply == Reply(delivered=False, reason="no answer within 0.4 s")
    # All of it would take 50 s.
    assert time.monotonic() - begin < 30


def test_an_answer_that_is_endless_takes_no_memory() -> None:
    """A line of a header has a bound, and the body is not read."""
    with raw_server(b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 200_000) as port:
        reply = sent(Target("127.0.0.1", port, "/x", secure=False))
    assert not reply.delivered
    with raw_server(b"HTTP/1.1 200 OK\r\n\r\n", *[b"a" * 65_536] * 4) as port:
        assert sent(Target("127.0.0.1", port, "/x", secure=False)).delivered


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 2x0 OK\r\n\r\n"])
def test_an_answer_that_is_none_is_a_failure(answer: bytes) -> None:
    """In words that repeat nothing of it."""
    with raw_server(answer) as port:
        reply = sent(Target("127.0.0.1", port, "/x", secure=False))
    assert not reply.delivered
    assert reply.reason
    assert "nonsense" not in reply.reason


def test_nobody_there_is_a_failure() -> None:
    """No connection, no name."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    assert sent(Target("127.0.0.1", port, "/x", secure=False)).reason == "Connection refused"

    def nobody(_host: str, _port: int) -> Sequence[str]:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    reply = sent(Target("h.invalid", 443, f"/{SECRET}", secure=True), look_up=nobody)
    assert reply.reason == "the name h.invalid cannot be resolved"


# --- TLS --------------------------------------------------------------------------------------


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate for a name that vouches for itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.2"))]
            ),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    paths = folder / f"{name}.pem", folder / f"{name}.key"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Certificate and key of hooks.example."""
    return certificate(tmp_path_factory.mktemp("tls"), "hooks.example")


@pytest.fixture
def tls_port(pair: tuple[Path, Path]) -> Iterator[int]:
    """Port of a server that has this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pair)
    with raw_server(OK, tls=context) as port:
        yield port


def over_tls(port: int, host: str, trusted: Path | None) -> Reply:
    """A message to a name that leads to this machine."""
    return sent(
        Target(host, port, f"/{SECRET}", secure=True),
        look_up=lambda _host, _port: ["127.0.0.1"],
        context=lambda: ssl.create_default_context(cafile=trusted),
    )


def test_the_certificate_is_that_of_the_name(tls_port: int, pair: tuple[Path, Path]) -> None:
    """The connection goes to an address, but the name is what must be proved."""
    assert over_tls(tls_port, "hooks.example", pair[0]) == Reply(delivered=True)
    reply = over_tls(tls_port, "other.example", pair[0])
    assert not reply.delivered
    assert "other.example" in reply.reason
    assert SECRET not in reply.reason


def test_a_certificate_that_nobody_vouches_for_is_refused(tls_port: int) -> None:
    """The system's certificates count by default."""
    reply = over_tls(tls_port, "hooks.example", None)
    assert not reply.delivered
    assert "not trusted" in reply.reason


def test_a_server_without_tls_is_a_failure() -> None:
    """It is not spoken to in clear text."""
    with raw_server(OK) as port:
        reply = over_tls(port, "hooks.example", None)
    assert not reply.delivered
    assert reply.reason.startswith(("TLS failed", "EOF", "Conn"))
