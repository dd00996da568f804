//! Tests of [`super`], with the container's way to the server.

use std::path::{Path, PathBuf};

use tokio::io::AsyncReadExt;

use super::super::dial::{self, DialAddress, ServerRoute};
use super::super::handshake::{ClosedPort, StageCredential, StageWelcome, VERSION};
use super::super::link::Link;
use super::super::link_state::LinkEnd;
use super::super::server_end::{StageDoor, StageLink, StagePipes, StageUser};
use super::super::{SERVER_NAME, StageConnection, TOKEN_NAME, stream_id};
use super::*;

const GRACE: Duration = Duration::from_secs(30);

async fn listen() -> StageListener {
    StageListener::bind(SocketAddr::from(([127, 0, 0, 1], 0)))
        .await
        .unwrap()
}

/// A stage that is served: its directory as the container sees it.
struct Fixture {
    _temporary: tempfile::TempDir,
    dir: PathBuf,
    token: String,
    stage: StageLink,
    first: tokio::sync::oneshot::Receiver<Option<ClosedPort>>,
}

fn open(listener: &StageListener, stage: &str) -> Fixture {
    let temporary = tempfile::tempdir().unwrap();
    let user = StageUser {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
    };
    let dir = temporary.path().join("s");
    let door = StageDoor::open_remote(dir.clone(), stage, user, listener, listener.address(), None).unwrap();
    let token = std::fs::read_to_string(dir.join(TOKEN_NAME)).unwrap();
    let (stage, first) = door.serve(Vec::new(), GRACE);
    Fixture {
        _temporary: temporary,
        dir,
        token,
        stage,
        first,
    }
}

impl Fixture {
    fn token(&self) -> StageCredential {
        StageCredential::Token(handshake::split_token(&self.token).unwrap().1.to_owned())
    }
}

async fn hello(
    dir: &Path,
    stage: &str,
    credential: StageCredential,
) -> (Box<dyn StageConnection>, ServerHello) {
    let mut connection = ServerRoute::read(dir).unwrap().connect().await.unwrap();
    let hello = StageHello {
        version: VERSION,
        stage: stage.into(),
        credential,
        closed_port: None,
    };
    handshake::send(&mut connection, &hello).await.unwrap();
    let answer = handshake::receive(&mut connection, 64 * 1024).await.unwrap();
    (connection, answer)
}

async fn welcome(
    dir: &Path,
    stage: &str,
    credential: StageCredential,
) -> (Box<dyn StageConnection>, StageWelcome) {
    match hello(dir, stage, credential).await {
        (connection, ServerHello::Welcome(welcome)) => (connection, welcome),
        (_, ServerHello::Refused(why)) => panic!("{why}"),
    }
}

async fn is_refused(dir: &Path, stage: &str, credential: StageCredential) -> bool {
    matches!(hello(dir, stage, credential).await.1, ServerHello::Refused(_))
}

#[tokio::test]
async fn a_server_with_another_certificate_gets_no_token() {
    let (listener, other) = (listen().await, listen().await);
    assert_ne!(listener.fingerprint(), other.fingerprint());
    let fixture = open(&listener, "one");
    let file = fixture.dir.join(SERVER_NAME);
    let mut server: DialAddress = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    // Somebody else answers at the server's address.
    server.address = other.address();
    std::fs::write(&file, serde_json::to_vec(&server).unwrap()).unwrap();
    let route = ServerRoute::read(&fixture.dir).unwrap();
    let error = route
        .connect()
        .await
        .err()
        .expect("the certificate is not the server's");
    assert!(error.to_string().contains("not the server"), "{error}");
    assert!(!route.may_retry(&error), "and it is not asked again");
    for unreadable in ["", "00", &"g".repeat(64), &"0".repeat(63)] {
        assert!(dial::client_config(unreadable).is_err(), "{unreadable:?}");
    }
}

#[tokio::test]
async fn a_token_is_good_once_and_for_its_own_sandbox() {
    let listener = listen().await;
    let (one, two) = (open(&listener, "one"), open(&listener, "two"));
    assert!(
        is_refused(&two.dir, "two", one.token()).await,
        "of another sandbox"
    );
    assert!(
        is_refused(&one.dir, "three", one.token()).await,
        "of no sandbox at all"
    );
    let (_connection, given) = welcome(&one.dir, "one", one.token()).await;
    assert!(is_refused(&one.dir, "one", one.token()).await, "used");
    let resume = |secret: &str| StageCredential::Resume {
        secret: secret.into(),
        received: 0,
    };
    assert!(is_refused(&two.dir, "two", resume(&given.secret)).await);
    assert!(
        !one.dir.join(TOKEN_NAME).exists(),
        "it is not left where the program could read it"
    );
    let (_connection, _) = welcome(&two.dir, "two", two.token()).await;
    let (dir, token) = (one.dir.clone(), one.token());
    assert_eq!((one.stage.cause(), two.stage.cause()), (None, None));
    // A sandbox that has ended is known to nobody; its directory is gone, so the way is that of the other one.
    drop(one.stage);
    while dir.exists() {
        tokio::task::yield_now().await;
    }
    assert!(is_refused(&two.dir, "one", token).await);
}

#[tokio::test]
async fn connections_that_only_wait_do_not_keep_a_stage_out() {
    let listener = listen().await;
    let fixture = open(&listener, "one");
    let mut idle = Vec::new();
    for _ in 0..MAX_UNKNOWN * 2 {
        idle.push(TcpStream::connect(listener.address()).await.unwrap());
    }
    let (_connection, _) = welcome(&fixture.dir, "one", fixture.token()).await;
    // The oldest were dropped to make room.
    let mut oldest = idle.swap_remove(0);
    assert_eq!(oldest.read(&mut [0; 16]).await.unwrap_or(0), 0);
    // Past the handshake, a line without an end is not kept either.
    let mut endless = ServerRoute::read(&fixture.dir).unwrap().connect().await.unwrap();
    let line = vec![b'x'; MAX_HELLO_BYTES + 10];
    tokio::io::AsyncWriteExt::write_all(&mut endless, &line)
        .await
        .unwrap();
    assert_eq!(endless.read(&mut [0; 16]).await.unwrap_or(0), 0);
    assert_eq!(fixture.stage.cause(), None);
}

#[tokio::test]
async fn a_connection_cut_in_the_middle_of_output_is_made_again_and_nothing_is_missing() {
    let listener = listen().await;
    let mut fixture = open(&listener, "one");
    let pipes = StagePipes::connect(&fixture.stage).unwrap();
    let container = Link::new(LinkEnd::Container);
    let (connection, given) = welcome(&fixture.dir, "one", fixture.token()).await;
    (&mut fixture.first).await.unwrap();
    let out = container.stream(stream_id::STDOUT);
    let sent: Vec<u8> = (0..1_000_000_u32).map(|n| (n % 253) as u8).collect();
    let writing = {
        let sent = sent.clone();
        tokio::spawn(async move {
            out.write_all(&sent).await.unwrap();
            out.finish();
        })
    };
    let (cut, mut cuts) = tokio::sync::watch::channel(0);
    let connecting = async {
        let mut connection = connection;
        loop {
            // Cut in the middle, again and again.
            let _ = tokio::time::timeout(Duration::from_millis(15), container.run(connection)).await;
            cut.send_modify(|cuts| *cuts += 1);
            let credential = StageCredential::Resume {
                secret: given.secret.clone(),
                received: container.received(),
            };
            let (next, welcome) = welcome(&fixture.dir, "one", credential).await;
            container.resume(welcome.received).unwrap();
            connection = next;
        }
    };
    let mut got = Vec::new();
    let mut stdout = pipes.stdout;
    let reading = async {
        // More is sent than fits under way, so the first cuts are in the middle of it.
        cuts.wait_for(|cuts| *cuts >= 3).await.unwrap();
        stdout.read_to_end(&mut got).await.unwrap();
    };
    tokio::select! {
        () = reading => {}
        () = connecting => {}
    }
    writing.await.unwrap();
    assert!(got == sent, "{} bytes", got.len());
}

#[tokio::test]
async fn a_stage_says_whether_its_network_is_restricted() {
    let listener = listen().await;
    let fixture = open(&listener, "one");
    let file = fixture.dir.join(SERVER_NAME);
    let mut server: DialAddress = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let route = |server: &DialAddress| {
        std::fs::write(&file, serde_json::to_vec(server).unwrap()).unwrap();
        ServerRoute::read(&fixture.dir).unwrap()
    };
    assert_eq!(route(&server).try_closed_port().await, None);
    server.closed_port = Some(listener.closed_port());
    assert_eq!(route(&server).try_closed_port().await, Some(ClosedPort::Reached));
    // Nobody listens there, which is what a policy looks like.
    let unused = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    server.closed_port = Some(unused.local_addr().unwrap().port());
    drop(unused);
    assert_eq!(
        route(&server).try_closed_port().await,
        Some(ClosedPort::Unreached)
    );
}
