//! Tests of [`super`].

use super::super::handshake::{StageCredential, VERSION};
use super::*;

struct Fixture {
    _dir: tempfile::TempDir,
    socket: PathBuf,
    token: String,
    stage: StageLink,
    first: oneshot::Receiver<Option<ClosedPort>>,
}

fn open(grace: Duration) -> Fixture {
    let dir = tempfile::tempdir().unwrap();
    let user = StageUser {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
    };
    let door = StageDoor::open(dir.path().join("s"), "stage-1", user).unwrap();
    let token = std::fs::read_to_string(door.dir().join(TOKEN_NAME)).unwrap();
    let socket = door.dir().join(SOCKET_NAME);
    let (stage, first) = door.serve(Vec::new(), grace);
    Fixture {
        _dir: dir,
        socket,
        token,
        stage,
        first,
    }
}

impl Fixture {
    async fn hello(&self, stage: &str, credential: StageCredential) -> (UnixStream, ServerHello) {
        let mut connection = UnixStream::connect(&self.socket).await.unwrap();
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

    async fn welcome(&self, credential: StageCredential) -> (UnixStream, StageWelcome) {
        match self.hello("stage-1", credential).await {
            (connection, ServerHello::Welcome(welcome)) => (connection, welcome),
            (_, ServerHello::Refused(why)) => panic!("{why}"),
        }
    }

    async fn is_refused(&self, stage: &str, credential: StageCredential) -> bool {
        matches!(self.hello(stage, credential).await.1, ServerHello::Refused(_))
    }

    fn secret(&self) -> String {
        handshake::split_token(&self.token).unwrap().1.to_owned()
    }
}

#[tokio::test]
async fn a_token_is_good_once_and_for_its_own_stage() {
    let fixture = open(Duration::from_secs(30));
    let token = || StageCredential::Token(fixture.secret());
    assert!(fixture.is_refused("stage-2", token()).await, "of another sandbox");
    assert!(
        fixture
            .is_refused("stage-1", StageCredential::Token("guess".into()))
            .await
    );
    let resume = |secret: &str| StageCredential::Resume {
        secret: secret.into(),
        received: 0,
    };
    assert!(
        fixture.is_refused("stage-1", resume("")).await,
        "before there is a secret"
    );
    let (_connection, welcome) = fixture.welcome(token()).await;
    assert!(fixture.is_refused("stage-1", token()).await, "used");
    assert!(fixture.is_refused("stage-1", resume("guess")).await);
    assert_ne!(welcome.secret, fixture.secret());
    assert!(
        !fixture.socket.with_file_name(TOKEN_NAME).exists(),
        "it is not left where the program could read it"
    );
    assert_eq!(fixture.stage.cause(), None, "nothing of this ended the stage");
}

#[tokio::test]
async fn nobody_who_only_connects_keeps_the_stage_out() {
    let fixture = open(Duration::from_secs(30));
    // Connections that say nothing, or half a line, or rubbish.
    let mut held = Vec::new();
    for _ in 0..MAX_UNKNOWN - 1 {
        held.push(UnixStream::connect(&fixture.socket).await.unwrap());
    }
    let mut rubbish = UnixStream::connect(&fixture.socket).await.unwrap();
    let line = vec![b'x'; MAX_HELLO_BYTES + 10];
    tokio::io::AsyncWriteExt::write_all(&mut rubbish, &line)
        .await
        .unwrap();
    fixture.welcome(StageCredential::Token(fixture.secret())).await;
}

#[tokio::test]
async fn a_cut_connection_is_made_again_and_nothing_is_missing() {
    let mut fixture = open(Duration::from_secs(30));
    let pipes = StagePipes::connect(&fixture.stage).unwrap();
    let container = Link::new(LinkEnd::Container);
    let (connection, welcome) = fixture.welcome(StageCredential::Token(fixture.secret())).await;
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
    let connecting = container.clone();
    let connect = async {
        let mut connection = connection;
        loop {
            // Cut in the middle, again and again.
            let _ = tokio::time::timeout(Duration::from_millis(15), connecting.run(connection)).await;
            let credential = StageCredential::Resume {
                secret: welcome.secret.clone(),
                received: connecting.received(),
            };
            let (next, welcome) = fixture.welcome(credential).await;
            connecting.resume(welcome.received).unwrap();
            connection = next;
        }
    };
    let mut got = Vec::new();
    let mut stdout = pipes.stdout;
    tokio::select! {
        read = tokio::io::AsyncReadExt::read_to_end(&mut stdout, &mut got) => drop(read.unwrap()),
        () = connect => {}
    }
    writing.await.unwrap();
    assert!(got == sent, "{} bytes", got.len());
}

#[tokio::test]
async fn past_the_grace_time_the_stage_is_lost() {
    let fixture = open(Duration::from_millis(100));
    let (connection, _) = fixture.welcome(StageCredential::Token(fixture.secret())).await;
    drop(connection);
    assert_eq!(fixture.stage.ended().await, ExitCause::ConnectionLost);
}

#[tokio::test]
async fn a_stage_that_breaks_the_protocol_is_ended() {
    let fixture = open(Duration::from_secs(30));
    let (mut connection, _) = fixture.welcome(StageCredential::Token(fixture.secret())).await;
    tokio::io::AsyncWriteExt::write_all(&mut connection, &[9; 64])
        .await
        .unwrap();
    assert_eq!(fixture.stage.ended().await, ExitCause::ProtocolViolation);
}
