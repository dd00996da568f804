"""A page of another site, open in the browser of somebody who is logged in, neither reads nor changes anything."""

from __future__ import annotations

import json
import socket

import pytest

import harness
from browser import Browser, Site, chromium
from harness import DEADLINE, Server
from wire import Request, call_tool

STRANGE_HOSTS = [
    "evil.test", "evil.test:{port}", "127.0.0.1.evil.test", "localhost.evil.test:{port}", "[::1].evil.test", "evil.test@127.0.0.1",
    "127.0.0.1@evil.test", "0x7f.1.evil.test", "", " ", "127.0.0.1 evil.test", "localhost%00.evil.test", "10.0.0.1:{port}",
]
STRANGE_ORIGINS = [
    "http://evil.test", "https://evil.test:{port}", "null", "file://", "http://127.0.0.1.evil.test", "http://localhost.evil.test",
    "http://[::1].evil.test", "chrome-extension://abcdef", "http://127.0.0.1@evil.test", "data:", "http://127.0.0.1:{port}/",
]
ROUTES = [
    ("GET", "/"), ("POST", "/mcp"), ("GET", "/mcp"), ("POST", "/api/tools/project_list"), ("POST", "/api/tools/project_create"),
    ("POST", "/api/login"), ("POST", "/api/logout"), ("GET", "/api/openapi.json"), ("GET", "/api/debugger"), ("GET", "/metrics"),
    ("GET", "/api/workspaces/x/files"), ("PUT", "/api/workspaces/x/files/y"), ("GET", "/api/workspaces/x/archive"),
]


@pytest.fixture(scope="module")
def cookie(server, admin):
    return login(server, admin)


def login(server: Server, token: str) -> dict[str, str]:
    answer = harness.post(f"{server.url}/api/login", json={"token": token})
    return {"Cookie": answer.headers["Set-Cookie"].split(";")[0]}


def raw(server: Server, method: str, path: str, headers: dict[str, str], body: str = "") -> tuple[int, dict[str, str], str]:
    """One request with exactly these headers, as no library would send it."""
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    lines += [f"Content-Length: {len(body)}", "Connection: close", "", body]
    with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE) as connection:
        connection.sendall("\r\n".join(lines).encode())
        text = b""
        # A stream is not read beyond its head: it has no end.
        while b"text/event-stream" not in text and (piece := connection.recv(65536)):
            text += piece
    head, _, content = text.decode(errors="replace").partition("\r\n\r\n")
    status, *fields = head.split("\r\n")
    return int(status.split()[1]), {k.lower(): v.strip() for k, _, v in (f.partition(":") for f in fields)}, content


def own(server: Server) -> str:
    return f"127.0.0.1:{server.port}"


# -- requests as a browser would send them --------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), ROUTES, ids=[f"{m}_{p}" for m, p in ROUTES])
@pytest.mark.parametrize("host", STRANGE_HOSTS)
def test_a_name_that_leads_here_is_not_this_server(server, admin, cookie, method, path, host):
    """A site lets its name lead to this address (DNS rebinding); whatever it asks for under that name is refused."""
    headers = {"Host": host.format(port=server.port), "X-Oubliette": "1", "Authorization": f"Bearer {admin}", **cookie}
    status, answered, _ = raw(server, method, path, headers, "{}")
    assert status in (400, 403), status
    assert "set-cookie" not in answered


@pytest.mark.parametrize(("method", "path"), ROUTES, ids=[f"{m}_{p}" for m, p in ROUTES])
@pytest.mark.parametrize("origin", STRANGE_ORIGINS)
def test_a_page_of_another_site_is_refused(server, admin, cookie, method, path, origin):
    """A page of another site sends a request with everything it could have; its Origin alone refuses it."""
    origin = origin.format(port=server.port)
    headers = {"Host": own(server), "Origin": origin, "X-Oubliette": "1", "Authorization": f"Bearer {admin}", **cookie}
    status, answered, _ = raw(server, method, path, headers, "{}")
    assert status == 403, status
    assert "access-control-allow-origin" not in answered


def test_two_hosts_or_origins_are_refused(server, admin):
    """A request names two servers or two pages, so that two programs may each believe another; it is refused."""
    for extra in ("Host: evil.test", "Origin: http://evil.test\r\nOrigin: http://127.0.0.1"):
        headers = {"Host": f"{own(server)}\r\n{extra}", "Authorization": f"Bearer {admin}"}
        assert raw(server, "POST", "/api/tools/project_list", headers, "{}")[0] in (400, 403)


WRITES = [
    ("POST", "/api/tools/project_create", '{"name":"forged"}'), ("POST", "/api/tools/token_create", '{"name":"f","scope":"admin"}'),
    ("POST", "/api/tools/session_message", '{"message":"forged"}'), ("PUT", "/api/workspaces/{workspace}/files/forged", "x"),
    ("DELETE", "/api/workspaces/{workspace}/files/kept", ""),
]


@pytest.fixture(scope="module")
def workspace(server, admin):
    project = server.api("project_create", admin, name="pages")["project_id"]
    workspace = server.api("project_get", admin, project_id=project)["default_workspace_id"]
    url = f"{server.url}/api/workspaces/{workspace}/files"
    for name, content in (("kept", "kept"), ("page.html", "<script>document.title = 'ran'</script>")):
        assert harness.put(f"{url}/{name}", content=content, headers={"Authorization": f"Bearer {admin}"}).status_code == 200
    return workspace


@pytest.fixture(scope="module")
def untouched(server, admin, workspace):
    """Everything that a page could have changed, as it is before."""
    return state(server, admin, workspace)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/json"])
@pytest.mark.parametrize(("method", "path", "body"), WRITES, ids=[f"{m}_{p.split('/')[-1]}" for m, p, _ in WRITES])
@pytest.mark.parametrize("header", [None, "0", "true", "1, 1", ""], ids=["none", "zero", "true", "twice", "empty"])
def test_a_change_by_cookie_needs_the_header(
    server, admin, cookie, workspace, untouched, method, path, body, kind, header
):
    """A page sends what a form can send, with the cookie the browser adds; without `X-Oubliette: 1` nothing changes."""
    headers = {"Host": own(server), "Content-Type": kind, **cookie, **({"X-Oubliette": header} if header is not None else {})}
    status, _, _ = raw(server, method, path.format(workspace=workspace), headers, body)
    assert status == 403, status
    assert state(server, admin, workspace) == untouched


def state(server: Server, admin: str, workspace: str) -> str:
    with Request(server, "GET", f"/api/workspaces/{workspace}/files", admin) as request:
        files = request.json()["entries"]
    return json.dumps([files, *(call_tool(server, admin, tool, {}) for tool in ("project_list", "session_list", "token_list"))])


@pytest.mark.parametrize("path", ["/api/tools/project_create", "/api/login", "/api/workspaces/x/files/y", "/mcp", "/api/debugger"])
@pytest.mark.parametrize("origin", ["http://evil.test", "http://127.0.0.1:3000", "http://localhost:{port}"])
def test_no_other_origin_is_allowed_by_a_preflight(server, path, origin):
    """A browser asks before it sends a header of ours for another site; no answer allows it."""
    headers = {
        "Host": own(server), "Origin": origin.format(port=server.port), "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "x-oubliette, authorization, content-type",
    }
    _, answered, _ = raw(server, "OPTIONS", path, headers)
    assert not [name for name in answered if name.startswith("access-control")]


@pytest.mark.parametrize("path", ["/mcp", "/metrics"])
def test_the_cookie_opens_nothing_but_the_api(server, cookie, path):
    """The browser's cookie is sent elsewhere than to `/api`; it is worth nothing there."""
    status, _, _ = raw(server, "GET", path, {"Host": own(server), "Accept": "text/event-stream", **cookie})
    assert status == 401


def test_the_cookie_cannot_be_taken(server, admin):
    """The cookie is out of reach for scripts and for requests of other sites, and for `/api` only; logging out ends it."""
    answer = harness.post(f"{server.url}/api/login", json={"token": admin})
    flags = {flag.strip() for flag in answer.headers["Set-Cookie"].split(";")[1:]}
    assert {"HttpOnly", "SameSite=Strict", "Path=/api"} <= flags and not any(flag.startswith("Domain") for flag in flags)
    cookie = {"Cookie": answer.headers["Set-Cookie"].split(";")[0], "Host": own(server)}
    assert raw(server, "POST", "/api/tools/project_list", cookie, "{}")[0] == 200
    assert raw(server, "POST", "/api/logout", cookie)[0] == 200
    assert raw(server, "POST", "/api/tools/project_list", cookie, "{}")[0] == 401


@pytest.mark.parametrize("path", ["/api/login", "/api/logout"])
@pytest.mark.parametrize("origin", ["http://127.0.0.1:3000", "http://localhost:3000", "http://127.0.0.1", "https://127.0.0.1:{port}1"])
def test_nobody_is_logged_in_or_out_by_a_page_of_another_port(server, admin, path, origin):
    """A page of another program on this machine, for which a browser does send the cookie, logs somebody in as somebody else,
    or out; it is refused, and the login goes on."""
    cookie = login(server, admin)
    headers = {"Host": own(server), "Origin": origin.format(port=server.port), "Content-Type": "text/plain", **cookie}
    status, answered, _ = raw(server, "POST", path, headers, json.dumps({"token": admin}))
    assert status == 403 and "set-cookie" not in answered
    assert raw(server, "POST", "/api/tools/project_list", {"Host": own(server), **cookie}, "{}")[0] == 200


@pytest.mark.parametrize("path", ["/", "/api/openapi.json", "/api/tools/none", "/nothing", "/health"])
def test_no_answer_can_be_framed_or_taken_for_something_else(server, path):
    """A page frames an answer, or has it run as a script of another kind; each answer forbids both."""
    _, answered, _ = raw(server, "GET", path, {"Host": own(server)})
    assert answered["x-frame-options"] == "DENY" and answered["x-content-type-options"] == "nosniff"
    assert answered["referrer-policy"] == "no-referrer"


def test_the_consoles_pages_run_no_foreign_script(server):
    """What an agent says reaches the console's page; its policy lets no inline, foreign or evaluated script run."""
    _, answered, _ = raw(server, "GET", "/", {"Host": own(server)})
    policy = answered["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and "*" not in policy and "base-uri 'none'" in policy


def test_a_file_of_a_workspace_is_no_page_of_this_server(server, admin, workspace):
    """An agent writes a page into its workspace; as the server sends it, no browser runs it with this server's rights."""
    headers = {"Host": own(server), "Authorization": f"Bearer {admin}"}
    status, answered, _ = raw(server, "GET", f"/api/workspaces/{workspace}/files/page.html", headers)
    assert status == 200 and answered["content-type"] == "application/octet-stream"
    assert "sandbox" in answered["content-security-policy"] and answered["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/mcp", "/api/debugger", "/api/tools/project_list", "/"])
def test_no_connection_becomes_a_websocket(server, cookie, path):
    """A page opens a WebSocket, which no origin rule of a browser bounds; there is none to open."""
    headers = {
        "Host": own(server), "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", **cookie,
    }
    assert raw(server, "GET", path, headers)[0] != 101


@pytest.mark.parametrize("path", ["//evil.test/", "/\\evil.test", "/%0d%0aLocation:%20http://evil.test", "/..;/mcp", "/<script>x</script>"])
def test_strange_paths_lead_nowhere(server, path):
    """A link to a strange path of this server leads to no other place, and shows nothing that runs."""
    status, answered, body = raw(server, "GET", path.replace(" ", "%20"), {"Host": own(server)})
    assert status in (400, 404) and "location" not in answered
    assert not body or answered.get("content-type", "").startswith("application/json") or status == 400


def test_a_request_id_carries_nothing(server):
    """What a page sends as a request id comes back only if it is a plain word."""
    for id in ("<script>", "a b", "x" * 65, "a\tb"):
        _, answered, _ = raw(server, "GET", "/health", {"Host": own(server), "X-Request-Id": id})
        assert answered["x-request-id"] != id


# -- a real browser -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pages(server, admin):
    """A browser in which somebody is logged in, and pages of others in it: by their origin."""
    if not chromium():
        pytest.skip("no Chromium here")
    site = Site()
    with Browser() as browser:
        console = browser.open(f"{server.url}/")
        body = json.dumps({"token": admin})
        asked = f"fetch('/api/login', {{method: 'POST', body: {json.dumps(body)}}}).then(r => r.status)"
        assert console.run(asked) == 200
        yield {
            "console": console,
            # The cookie is not sent for it, but its Host may lead here.
            "another_site": browser.open(f"http://evil.test:{site.port}/"),
            # The same site for a browser, which sends the cookie; another origin.
            "another_port": browser.open(f"http://127.0.0.1:{site.port}/"),
            "rebound": browser.open(f"http://evil.test:{server.port}/"),
        }
    site.close()


FROM_A_PAGE = {
    "read_with_the_cookie": "fetch(`${BASE}/api/tools/project_list`, {method: 'POST', credentials: 'include', body: '{}'})"
    ".then(r => r.text())",
    "read_the_interface": "fetch(`${BASE}/api/openapi.json`).then(r => r.text())",
    "read_the_console": "fetch(`${BASE}/`, {credentials: 'include'}).then(r => r.text())",
    "send_our_header": "fetch(`${BASE}/api/tools/project_create`, {method: 'POST', credentials: 'include', body: '{\"name\":\"forged\"}',"
    " headers: {'X-Oubliette': '1'}}).then(r => r.text())",
    "put_a_file": "fetch(`${BASE}/api/workspaces/${WORKSPACE}/files/forged`, {method: 'PUT', credentials: 'include', body: 'x'})"
    ".then(r => r.text())",
    "delete_a_file": "fetch(`${BASE}/api/workspaces/${WORKSPACE}/files/kept`, {method: 'DELETE', credentials: 'include'})"
    ".then(r => r.text())",
    "post_blindly": "fetch(`${BASE}/api/tools/project_create`, {method: 'POST', mode: 'no-cors', credentials: 'include',"
    " body: '{\"name\":\"forged\"}'}).then(r => r.type === 'opaque' ? Promise.reject() : r.text())",
    "log_out_blindly": "fetch(`${BASE}/api/logout`, {method: 'POST', mode: 'no-cors', credentials: 'include'})"
    ".then(r => r.type === 'opaque' ? Promise.reject() : r.text())",
    "send_a_form": """new Promise((got, refused) => {
        const form = document.createElement('form');
        form.method = 'POST'; form.enctype = 'text/plain'; form.action = `${BASE}/api/tools/project_create`; form.target = 'framed';
        form.innerHTML = '<input name=\\'{"name":"forged","description":"\\' value=\\'"}\\'>';
        const frame = document.createElement('iframe');
        frame.name = 'framed';
        document.body.append(frame, form);
        frame.onload = () => { try { got(frame.contentDocument.body.innerText) } catch { refused() } };
        form.submit();
    })""",
    "frame_the_console": """new Promise((got, refused) => {
        const frame = document.createElement('iframe');
        frame.src = BASE;
        frame.onload = () => { try { got(frame.contentDocument.body.innerHTML) } catch { refused() } };
        document.body.append(frame);
    })""",
    "run_an_answer_as_a_script": """new Promise((got, refused) => {
        const script = document.createElement('script');
        script.src = `${BASE}/api/openapi.json`;
        script.onload = () => got('loaded as a script');
        script.onerror = refused;
        document.body.append(script);
    })""",
    "follow_events": """new Promise((got, refused) => {
        const stream = new EventSource(`${BASE}/api/debugger`, {withCredentials: true});
        stream.onopen = stream.onmessage = () => { stream.close(); got('opened') };
        stream.onerror = () => { stream.close(); refused() };
    })""",
    "open_a_websocket": """new Promise((got, refused) => {
        const connection = new WebSocket(BASE.replace('http', 'ws') + '/mcp');
        connection.onopen = () => got('opened');
        connection.onerror = refused;
    })""",
    "look_into_the_consoles_window": """new Promise((got, refused) => {
        const other = window.open(BASE);
        // Until its page is loaded the window is this page's own.
        const look = () => {
            try {
                if (other.location.href === 'about:blank') return setTimeout(look, 20);
                got(other.document.body.innerHTML);
            } catch {
                other.close();
                refused();
            }
        };
        look();
    })""",
}
"""What a page tries. A promise that is kept is an escape, with what it read; one that is broken is a refusal."""


@pytest.mark.parametrize("name", FROM_A_PAGE)
@pytest.mark.parametrize("origin", ["another_site", "another_port"])
def test_a_page_gets_nothing(server, admin, workspace, untouched, pages, origin, name):
    """A page in the browser of somebody logged in tries to read or to change something; the browser shows it nothing, and
    the server has changed nothing."""
    start = f"const BASE = {json.dumps(server.url)}, WORKSPACE = {json.dumps(workspace)};"
    outcome = pages[origin].run(f"(() => {{ {start} return {FROM_A_PAGE[name]} }})().then(v => 'read: ' + v, () => 'held')")
    assert outcome == "held"
    assert state(server, admin, workspace) == untouched
    asked = "fetch('/api/tools/project_list', {method: 'POST', body: '{}'}).then(r => r.status)"
    assert pages["console"].run(asked) == 200, "still logged in"


def test_a_rebound_name_shows_no_console(pages):
    """A site lets its name lead to this server and opens it under that name; there is no console, and nothing to ask."""
    assert pages["rebound"].run("document.querySelector('script') === null")
    asked = "fetch('/api/tools/project_list', {method: 'POST', body: '{}'}).then(r => r.status)"
    assert pages["rebound"].run(asked) == 403


def test_no_script_reads_the_cookie(pages):
    """A script that runs in the console's own page finds no cookie to take along."""
    assert pages["console"].run("document.cookie") == ""


def test_a_page_an_agent_wrote_does_not_run_as_the_console(server, pages, workspace):
    """Somebody logged in opens a page from a workspace in the browser; it is downloaded, and its script does not run."""
    refused = pages["console"].visit(f"{server.url}/api/workspaces/{workspace}/files/page.html")
    assert refused == "net::ERR_ABORTED", "a download is no page"
    assert pages["console"].run("document.title") != "ran"
