"""Webhooks: events from a durable outbox to receivers that are well, down, slow, failing, redirecting or lying about TLS."""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import ipaddress
import json
import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import harness
from harness import running, wait_until

KEY = b"0123456789abcdef0123456789abcdef"
SECRET = "whsec_" + base64.b64encode(KEY).decode()
EVENTS = ["turn_completed", "status", "error"]


class Receiver:
    """A real HTTP server. `answer`: its status for the nth request, counted from 0."""

    def __init__(self, answer=lambda n: 204, port: int = 0, certificate: tuple[str, str] | None = None):
        self.taken: list[tuple[dict[str, str], bytes]] = []
        self.statuses: list[int] = []
        self.paths: list[str] = []
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with lock:
                    status = answer(len(outer.statuses))
                    outer.statuses.append(status)
                    outer.paths.append(self.path)
                    if 200 <= status < 300:
                        outer.taken.append(({k.lower(): v for k, v in self.headers.items()}, body))
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.taken]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def config(*urls: str, events: list[str] = EVENTS) -> str:
    entry = '[[webhook]]\nurl = "{}"\nevents = {}\nsecret_env = "HOOK_SECRET"\n'
    return "".join(entry.format(url, json.dumps(events)) for url in urls)


def set_up(server):
    admin = server.token("admin")
    project = server.api("project_create", admin, name="p")["project_id"]
    server.put_agent("a", admin, [[{"say": "hello"}]])
    return admin, project


def talk(server, admin, project, turns: int = 1) -> str:
    session = server.api("session_message", admin, message="hi", project_id=project, agent="a", wait=True)["session_id"]
    for _ in range(turns - 1):
        server.api("session_message", admin, message="more", session_id=session, wait=True)
    return session


def wanted(server, admin, session) -> list[dict[str, Any]]:
    log = server.api("session_events", admin, session_id=session, max_events=1000)["events"]
    return [event for event in log if event["type"] in EVENTS]


def check_named(server, part: str) -> dict[str, Any]:
    return next(check for check in server.cli_json("doctor")["checks"] if check["name"].startswith("webhook ") and part in json.dumps(check))


def test_events_arrive_signed_in_order_and_exactly_as_in_the_log():
    receiver = Receiver()
    with running(config(f"http://127.0.0.1:{receiver.port}/hook?token=hidden-1"), {"HOOK_SECRET": SECRET}) as server:
        admin, project = set_up(server)
        sessions = [talk(server, admin, project, 2) for _ in range(3)]
        expected = [wanted(server, admin, session) for session in sessions]
        wait_until(lambda: len(receiver.taken) >= sum(map(len, expected)), "all events")
        got = receiver.events()
        for session, events in zip(sessions, expected):
            assert [event for event in got if event["session_id"] == session] == events
        for headers, body in receiver.taken:
            event = json.loads(body)
            signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
            signature = base64.b64encode(hmac.new(KEY, signed, hashlib.sha256).digest()).decode()
            assert headers["webhook-signature"] == f"v1,{signature}"
            assert headers["webhook-id"] == f"{event['session_id']}-{event['index']}"
            assert headers["content-type"] == "application/json"
        assert check_named(server, str(receiver.port))["ok"]
        everything = server.log() + json.dumps(server.cli_json("doctor"))
        assert SECRET not in everything and "hidden-1" not in everything
    receiver.close()


def test_what_a_receiver_did_not_take_is_sent_again_in_order_also_after_a_kill():
    """It is down, then it fails; the server is killed in between. Nothing is lost, and nothing overtakes."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        with running(config(f"http://127.0.0.1:{port}/"), {"HOOK_SECRET": SECRET}) as server:
            admin, project = set_up(server)
            session = talk(server, admin, project)
            failing = wait_until(lambda: next((c for c in server.cli_json("doctor")["checks"] if c["name"] == f"webhook http://127.0.0.1:{port}" and not c["ok"]), None), "doctor to name it")
            assert "cannot be reached" in failing["detail"] and failing["remedy"]
            server.kill()
            reserved.close()
            # The first request it gets fails too.
            receiver = Receiver(lambda n: 500 if n == 0 else 200, port)
            server.start()
            wait_until(lambda: len(receiver.taken) >= len(wanted(server, admin, session)), "all events")
            assert receiver.events() == wanted(server, admin, session)
            assert receiver.statuses[0] == 500
            wait_until(lambda: check_named(server, str(port))["ok"], "doctor to call it well")
            receiver.close()


def test_a_receiver_that_hangs_redirects_or_lies_holds_up_nobody_else(tmp_path):
    """None of them gets an event as delivered; the good one gets all. A project that is deleted still is delivered."""
    certificate = _self_signed(tmp_path)
    release = threading.Event()
    good, moved = Receiver(), Receiver(lambda n: 307)
    hanging = Receiver(lambda n: 200 if release.wait(harness.DEADLINE) else 500)
    liar = Receiver(certificate=certificate)
    urls = [f"http://127.0.0.1:{r.port}/" for r in (moved, hanging)] + [f"https://127.0.0.1:{liar.port}/", "https://nowhere.invalid:4433/", f"http://127.0.0.1:{good.port}/"]
    with running(config(*urls), {"HOOK_SECRET": SECRET}) as server:
        admin, project = set_up(server)
        session = talk(server, admin, project, 2)
        server.api("session_end", admin, session_id=session)
        expected = wanted(server, admin, session)
        wait_until(lambda: len(good.taken) >= len(expected), "the good one to have all")
        assert good.events() == expected
        assert "redirect" in wait_until(lambda: _failing(server, moved.port), "doctor to name the one that redirects")["detail"]
        assert "certificate" in wait_until(lambda: _failing(server, liar.port), "doctor to name the one without a true certificate")["detail"].lower()
        assert "cannot be reached" in wait_until(lambda: _failing(server, 4433), "doctor to name the one that is nowhere")["detail"]
        assert set(moved.paths) == {"/"} and liar.taken == []
        server.api("project_delete", admin, project_id=project)
        release.set()
        # It took what it was too slow to say it had taken, so it hears that again.
        wait_until(lambda: len(_once(hanging.events())) >= len(expected), "the one that hung to have all, though the project is gone")
        assert _once(hanging.events()) == expected
    for receiver in (good, moved, hanging, liar):
        receiver.close()


def test_a_certificate_is_taken_for_its_own_name_alone(tmp_path):
    """The receiver's certificate is trusted, for `localhost`; as 127.0.0.1 it gets nothing."""
    certificate = _self_signed(tmp_path, x509.DNSName("localhost"))
    receiver = Receiver(certificate=certificate)
    urls = [f"https://localhost:{receiver.port}/named", f"https://127.0.0.1:{receiver.port}/other"]
    with running(config(*urls), {"HOOK_SECRET": SECRET, "SSL_CERT_FILE": certificate[0]}) as server:
        admin, project = set_up(server)
        session = talk(server, admin, project)
        wait_until(lambda: len(receiver.taken) >= len(wanted(server, admin, session)), "the named one to have all")
        name = f"webhook https://127.0.0.1:{receiver.port}"
        failing = wait_until(lambda: next((c for c in server.cli_json("doctor")["checks"] if c["name"] == name and not c["ok"]), None), "doctor to name the other")
        assert "certificate" in failing["detail"].lower(), failing
        assert set(receiver.paths) == {"/named"}
    receiver.close()


def _self_signed(folder, subject: x509.GeneralName = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))) -> tuple[str, str]:
    """A certificate for this host that nobody else has vouched for, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([subject]), critical=False)
        .sign(key, hashes.SHA256())
    )
    files = (folder / "cert.pem", folder / "key.pem")
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    plain = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    files[1].write_bytes(key.private_bytes(*plain))
    return str(files[0]), str(files[1])


def _once(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for n, event in enumerate(events) if event not in events[:n]]


def _failing(server, port: int):
    checks = server.cli_json("doctor")["checks"]
    return next((check for check in checks if check["name"].endswith(f":{port}") and not check["ok"]), None)


def test_without_its_secret_nothing_is_sent_and_a_bad_section_is_refused():
    receiver = Receiver()
    with running(config(f"http://127.0.0.1:{receiver.port}/")) as server:
        admin, project = set_up(server)
        talk(server, admin, project)
        assert "HOOK_SECRET is not set" in _failing(server, receiver.port)["detail"]
        assert receiver.taken == []
        # Once it is set, what was kept is sent.
        server.stop()
        server.env["HOOK_SECRET"] = SECRET
        server.start()
        wait_until(lambda: receiver.taken, "what was kept")
        server.stop()
        (server.home / "oubliette.toml").write_text(config("nowhere", events=["error"]))
        refused = server.cli("serve", check=False)
        assert refused.returncode != 0 and "webhook 1" in refused.stderr and "url" in refused.stderr
    receiver.close()


def test_a_person_elsewhere_hears_of_approvals_by_webhook():
    receiver = Receiver()
    asks = ["approval_requested", "approval_decided"]
    with running(config(f"http://127.0.0.1:{receiver.port}/", events=asks), {"HOOK_SECRET": SECRET}) as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        steps = [{"call": {"tool": "project_list", "arguments": {}}}, {"say": "done"}]
        server.put_agent("a", admin, [steps], tools={"ask": ["project_list"]})
        session = server.api("session_message", admin, message="hi", project_id=project, agent="a")["session_id"]
        wait_until(lambda: receiver.taken, "the request")
        asked = receiver.events()[0]
        assert asked["type"] == "approval_requested" and asked["tool"] == "project_list"
        server.api("approval_decide", admin, approval_id=asked["approval_id"], decision="deny", reason="no")
        wait_until(lambda: len(receiver.taken) >= 2, "the decision")
        log = server.api("session_events", admin, session_id=session, max_events=1000)["events"]
        assert receiver.events() == [event for event in log if event["type"] in asks]
    receiver.close()
