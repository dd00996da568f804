//! The HTTP proxy over real sockets, with servers on loopback that it may or may not reach.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::{Router, extract::Request};
use oubliette_egress::{EgressList, EgressProxy, EgressRecord, EgressSink, ProxyClient, ProxyLimits};
use oubliette_os::{DescriptorWorker, PassedDescriptors, UntrustedListener};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, UnixStream},
    sync::mpsc,
};
use tokio_util::sync::CancellationToken;

/// Upper bound of every wait.
const SOON: Duration = Duration::from_secs(30);

/// A proxy on a Unix socket.
struct ProxyFixture {
    _dir: tempfile::TempDir,
    socket: std::path::PathBuf,
    cancel: CancellationToken,
    serving: tokio::task::JoinHandle<()>,
}

/// Passes the records of connections on.
struct RecordSender(mpsc::UnboundedSender<EgressRecord>);

impl EgressSink for RecordSender {
    fn record(&self, record: EgressRecord) {
        let _ = self.0.send(record);
    }
}

async fn proxy_fixture(allow: &[String], limits: ProxyLimits) -> ProxyFixture {
    listed_fixture(allow, limits, None).await.0
}

/// A proxy whose client reaches only the hosts in a list, and the records of its connections.
async fn listed_fixture(
    allow: &[String],
    limits: ProxyLimits,
    hosts: Option<&[String]>,
) -> (ProxyFixture, mpsc::UnboundedReceiver<EgressRecord>) {
    let proxy = EgressProxy::new(allow.to_vec(), limits).unwrap();
    let (sender, records) = mpsc::unbounded_channel();
    let lists = hosts.map(|hosts| EgressList {
        hosts: hosts.iter().map(|host| host.parse().unwrap()).collect(),
        setting: "egress in tools/net/tool.json".into(),
    });
    let client = ProxyClient::new(lists.into_iter().collect(), Arc::new(RecordSender(sender)));
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("proxy.sock");
    let worker = DescriptorWorker::default();
    let listener = UntrustedListener::bind(&socket, PassedDescriptors::Refused, worker).unwrap();
    let cancel = CancellationToken::new();
    let serving = tokio::spawn(proxy.serve_client(listener, cancel.clone(), client));
    let fixture = ProxyFixture {
        _dir: dir,
        socket,
        cancel,
        serving,
    };
    (fixture, records)
}

async fn next_record(records: &mut mpsc::UnboundedReceiver<EgressRecord>) -> EgressRecord {
    tokio::time::timeout(SOON, records.recv())
        .await
        .expect("no record")
        .expect("no record")
}

/// An HTTP server that responds with the request it got: method, URI, headers, body.
async fn request_dump_server() -> SocketAddr {
    let app = Router::new().fallback(async |request: Request| {
        let (parts, body) = request.into_parts();
        let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
        format!(
            "{} {} {:?} {}",
            parts.method,
            parts.uri,
            parts.headers,
            String::from_utf8_lossy(&body)
        )
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    address
}

/// A TCP server that sends back what it receives.
async fn echo_server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let (mut read, mut write) = stream.split();
                let _gone = tokio::io::copy(&mut read, &mut write).await;
            });
        }
    });
    address
}

impl ProxyFixture {
    async fn ask(&self, request: &str) -> String {
        let mut stream = UnixStream::connect(&self.socket).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let _reset = tokio::time::timeout(SOON, stream.read_to_end(&mut answer))
            .await
            .expect("silence");
        String::from_utf8_lossy(&answer).into_owned()
    }

    async fn tunnel(&self, target: &str) -> UnixStream {
        let mut stream = UnixStream::connect(&self.socket).await.unwrap();
        stream
            .write_all(format!("CONNECT {target} HTTP/1.1\r\nhost: {target}\r\n\r\n").as_bytes())
            .await
            .unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(
                tokio::time::timeout(SOON, stream.read_u8())
                    .await
                    .expect("silence")
                    .unwrap(),
            );
        }
        assert!(
            head.starts_with(b"HTTP/1.1 200"),
            "{}",
            String::from_utf8_lossy(&head)
        );
        stream
    }
}

#[tokio::test]
async fn a_tunnel_carries_bytes_both_ways() {
    let server = echo_server().await;
    let fixture = proxy_fixture(&[server.to_string()], ProxyLimits::default()).await;
    let mut stream = fixture.tunnel(&server.to_string()).await;
    let sent = vec![7; 300_000];
    let (mut read, mut write) = stream.split();
    let (_, got) = tokio::join!(
        async {
            write.write_all(&sent).await.unwrap();
            write.shutdown().await.unwrap();
        },
        async {
            let mut got = Vec::new();
            read.read_to_end(&mut got).await.unwrap();
            got
        }
    );
    assert_eq!(got, sent);
}

#[tokio::test]
async fn plain_http_is_forwarded_without_proxy_headers() {
    let server = request_dump_server().await;
    let fixture = proxy_fixture(&["localhost".to_owned()], ProxyLimits::default()).await;
    let request = format!(
        "POST http://LOCALHOST:{}/a/b?c=d HTTP/1.1\r\nhost: elsewhere\r\nproxy-authorization: Basic x\r\n\
         proxy-connection: keep-alive\r\nx-mine: 1\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello",
        server.port()
    );
    let answer = fixture.ask(&request).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(
        answer.contains("POST /a/b?c=d") && answer.contains("\"x-mine\": \"1\"") && answer.contains("hello"),
        "{answer}"
    );
    assert!(
        !answer.contains("proxy-") && !answer.contains("elsewhere"),
        "{answer}"
    );
}

#[tokio::test]
async fn private_targets_are_refused_by_address_and_by_name() {
    let server = request_dump_server().await;
    let fixture = proxy_fixture(&[], ProxyLimits::default()).await;
    for target in [
        server.to_string(),
        format!("localhost:{}", server.port()),
        "127.1:80".to_owned(),
        "2130706433:80".to_owned(),
        "0x7f.1:443".to_owned(),
        "[::1]:443".to_owned(),
        "[::ffff:127.0.0.1]:80".to_owned(),
        "0.0.0.0:80".to_owned(),
        "169.254.169.254:80".to_owned(),
        "10.0.0.1:443".to_owned(),
        "localhost.:80".to_owned(),
    ] {
        let connect = fixture
            .ask(&format!(
                "CONNECT {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            ))
            .await;
        assert!(connect.starts_with("HTTP/1.1 403"), "{target}: {connect}");
        assert!(connect.contains("[egress] allow"), "{connect}");
        let plain = fixture
            .ask(&format!(
                "GET http://{target}/ HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            ))
            .await;
        assert!(plain.starts_with("HTTP/1.1 403"), "{target}: {plain}");
    }
}

#[tokio::test]
async fn invalid_requests_get_an_error_status() {
    let fixture = proxy_fixture(&["127.0.0.1:1".to_owned()], ProxyLimits::default()).await;
    for (line, status) in [
        ("GET /just/a/path HTTP/1.1", "400"),
        ("GET https://example.com/ HTTP/1.1", "400"),
        ("CONNECT example.com HTTP/1.1", "400"),
        ("CONNECT user@example.com:443 HTTP/1.1", "400"),
        ("GET http://user:pw@example.com/ HTTP/1.1", "400"),
        ("CONNECT no-such-host.invalid:443 HTTP/1.1", "502"),
        ("CONNECT 127.0.0.1:1 HTTP/1.1", "502"),
    ] {
        let answer = fixture
            .ask(&format!("{line}\r\nhost: x\r\nconnection: close\r\n\r\n"))
            .await;
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status}")),
            "{line}: {answer}"
        );
    }
    let long = format!(
        "GET http://example.com/ HTTP/1.1\r\nx: {}\r\n\r\n",
        "y".repeat(1_000_000)
    );
    let mut stream = UnixStream::connect(&fixture.socket).await.unwrap();
    let _refused = stream.write_all(long.as_bytes()).await;
    let mut answer = Vec::new();
    let _reset = stream.read_to_end(&mut answer).await;
    assert!(
        answer.is_empty() || answer.starts_with(b"HTTP/1.1 431"),
        "{}",
        String::from_utf8_lossy(&answer)
    );
}

#[tokio::test]
async fn idle_and_cancelled_tunnels_close() {
    let server = echo_server().await;
    let limits = ProxyLimits {
        idle: Duration::from_millis(50),
        ..ProxyLimits::default()
    };
    let allow = ["127.0.0.0/8".to_owned()];
    let quiet = proxy_fixture(&allow, limits).await;
    let mut stream = quiet.tunnel(&server.to_string()).await;
    let mut rest = Vec::new();
    tokio::time::timeout(SOON, stream.read_to_end(&mut rest))
        .await
        .expect("still open")
        .unwrap();

    let mut cancelled = proxy_fixture(&allow, ProxyLimits::default()).await;
    let mut stream = cancelled.tunnel(&server.to_string()).await;
    stream.write_all(b"x").await.unwrap();
    assert_eq!(stream.read_u8().await.unwrap(), b'x');
    cancelled.cancel.cancel();
    tokio::time::timeout(SOON, &mut cancelled.serving)
        .await
        .expect("it goes on")
        .unwrap();
    assert_eq!(
        tokio::time::timeout(SOON, stream.read(&mut [0; 8]))
            .await
            .expect("still open")
            .unwrap_or(0),
        0
    );
}

#[tokio::test]
async fn only_listed_hosts_are_reached_and_each_connection_is_recorded() {
    let server = request_dump_server().await;
    let allow = ["127.0.0.0/8".to_owned(), "localhost".to_owned()];
    let entry = format!("localhost:{}", server.port());
    let (fixture, mut records) =
        listed_fixture(&allow, ProxyLimits::default(), Some(std::slice::from_ref(&entry))).await;
    let get = |target: &str| format!("GET http://{target}/ HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    let answer = fixture.ask(&get(&entry)).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let record = next_record(&mut records).await;
    assert_eq!(
        (record.host.as_str(), record.port, record.allowed),
        ("localhost", server.port(), true)
    );
    assert_eq!(
        (record.rule.as_deref(), record.error),
        (Some(entry.as_str()), None)
    );
    assert!(record.bytes_in > 50 && record.bytes_out > 20);

    // The same server under a name that is not listed, another port, and a name that only ends like the entry.
    for target in [
        server.to_string(),
        "localhost:80".to_owned(),
        format!("xlocalhost:{}", server.port()),
    ] {
        let refused = fixture.ask(&get(&target)).await;
        assert!(refused.starts_with("HTTP/1.1 403"), "{refused}");
        assert!(
            refused.contains("tools/net/tool.json") && refused.contains(&target),
            "{refused}"
        );
        let record = next_record(&mut records).await;
        assert!(
            !record.allowed && record.rule.is_none() && record.bytes_in == 0,
            "{record:?}"
        );
        assert!(record.error.unwrap().contains("tool.json"));
    }
}

#[tokio::test]
async fn a_list_opens_nothing_that_the_configuration_keeps_closed() {
    let server = request_dump_server().await;
    let (fixture, mut records) = listed_fixture(
        &[],
        ProxyLimits::default(),
        Some(&[server.to_string(), "localhost".to_owned()]),
    )
    .await;
    for target in [server.to_string(), format!("localhost:{}", server.port())] {
        let refused = fixture
            .ask(&format!(
                "CONNECT {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            ))
            .await;
        assert!(
            refused.starts_with("HTTP/1.1 403") && refused.contains("[egress] allow"),
            "{refused}"
        );
        let record = next_record(&mut records).await;
        assert!(!record.allowed && record.rule.is_none(), "{record:?}");
    }
}

#[tokio::test]
async fn a_tunnels_bytes_are_recorded_when_it_ends() {
    let server = echo_server().await;
    let (fixture, mut records) = listed_fixture(&[server.to_string()], ProxyLimits::default(), None).await;
    let mut stream = fixture.tunnel(&server.to_string()).await;
    stream.write_all(&[7; 5000]).await.unwrap();
    let mut echoed = vec![0; 5000];
    stream.read_exact(&mut echoed).await.unwrap();
    assert!(records.try_recv().is_err(), "it is still open");
    drop(stream);
    let record = next_record(&mut records).await;
    assert_eq!(
        (record.bytes_in, record.bytes_out, record.allowed),
        (5000, 5000, true)
    );
    assert_eq!(record.rule, None);
}

#[tokio::test]
async fn a_connection_that_fails_was_allowed_all_the_same() {
    let (fixture, mut records) =
        listed_fixture(&["127.0.0.1:1".to_owned()], ProxyLimits::default(), None).await;
    for target in ["127.0.0.1:1", "no-such-host.invalid:443"] {
        let answer = fixture
            .ask(&format!(
                "CONNECT {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            ))
            .await;
        assert!(answer.starts_with("HTTP/1.1 502"), "{answer}");
        let record = next_record(&mut records).await;
        assert!(record.allowed && record.error.is_some(), "{record:?}");
    }
}
