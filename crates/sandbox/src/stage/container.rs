//! The end in the container: the container's first process, `oubliette-client remote-stage DIRECTORY`.
//!
//! The directory has the one-time token, and the server's socket or where to dial ([`super::dial`]). The stage is one process with one thread beside the
//! inner stage, which it starts and whose control protocol it only carries. When the inner stage has ended and the server
//! has everything, the stage ends, and with it the container. It also ends, killing everything inside, when the server
//! refuses it or is not reached within the grace time.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::dial::ServerRoute;
use super::handshake::{
    self, ClosedPort, MAX_WELCOME_BYTES, ServerHello, StageCredential, StageHello, StageWelcome, VERSION,
};
use super::link::{Link, LinkClosed};
use super::link_state::LinkEnd;
use super::{StageConnection, TOKEN_NAME, stream_id};
use crate::control_protocol::{CONTROL_FD, INIT_COMMAND};

/// How long the first connection may take. The server gives up earlier.
const FIRST_CONNECTION: Duration = Duration::from_secs(30);
/// Time between two attempts to connect.
const RETRY: Duration = Duration::from_millis(200);
/// How long output is waited for when the inner stage was killed: what it started may still hold the pipes then, and ends
/// with the container. An inner stage that exits has ended all of it.
const DRAIN_AFTER_KILL: Duration = Duration::from_secs(1);
/// Exit code when the stage itself failed.
const EXIT_FAILED: i32 = 125;

/// Runs the stage. `args` are those after `remote-stage`: the directory.
// `process::exit` ends the container: this is its first process.
#[allow(clippy::disallowed_methods)]
pub fn main(mut args: impl Iterator<Item = OsString>) -> ! {
    let code = match (args.next(), args.next()) {
        (Some(dir), None) => start(Path::new(&dir)),
        _ => {
            eprintln!(
                "remote-stage is started in a container by the Oubliette server; there is no other use for it"
            );
            2
        }
    };
    std::process::exit(code)
}

fn start(dir: &Path) -> i32 {
    // First, while this process may still read its own /proc.
    let protected = std::env::current_exe().and_then(|program| forbid_inspection().map(|()| program));
    let program = match protected {
        Ok(program) => program,
        Err(error) => {
            eprintln!("oubliette-client: protecting the first process failed: {error}");
            return EXIT_FAILED;
        }
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("oubliette-client: cannot start: {error}");
            return EXIT_FAILED;
        }
    };
    let code = match runtime.block_on(run(dir, &program)) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("oubliette-client: {error}");
            EXIT_FAILED
        }
    };
    runtime.shutdown_background();
    code
}

/// The program has the same uid as this process: it may not read its memory or use its descriptors.
#[allow(unsafe_code)]
fn forbid_inspection() -> io::Result<()> {
    // SAFETY: prctl with integer arguments only.
    match unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The server, and which stage this is.
struct ServerAddress {
    route: ServerRoute,
    stage: String,
    closed_port: Option<ClosedPort>,
}

/// A connection that was let in, or the refusal, after which it is no use to come again.
type Admission = Result<(Box<dyn StageConnection>, StageWelcome), String>;

impl ServerAddress {
    /// Connects and says who this is.
    async fn connect(&self, credential: StageCredential) -> io::Result<Admission> {
        let mut connection = self.route.connect().await?;
        let hello = StageHello {
            version: VERSION,
            stage: self.stage.clone(),
            credential,
            closed_port: self.closed_port,
        };
        handshake::send(&mut connection, &hello).await?;
        Ok(
            match handshake::receive(&mut connection, MAX_WELCOME_BYTES).await? {
                ServerHello::Welcome(welcome) => Ok((connection, welcome)),
                ServerHello::Refused(why) => Err(why),
            },
        )
    }

    /// Connects for the first time, with the token. If that was used by an attempt without an answer, the next is refused.
    async fn first_connection(&self, token: &str) -> io::Result<Admission> {
        let attempts = async {
            let mut told = false;
            loop {
                match self.connect(StageCredential::Token(token.to_owned())).await {
                    Err(error) if self.route.may_retry(&error) => {
                        // Whoever looks for the reason finds it in the container's own output.
                        if !told {
                            eprintln!("oubliette-client: {error}; trying again");
                            told = true;
                        }
                        tokio::time::sleep(RETRY).await;
                    }
                    done => return done,
                }
            }
        };
        tokio::time::timeout(FIRST_CONNECTION, attempts)
            .await
            .map_err(|_| io::ErrorKind::TimedOut)?
    }
}

async fn run(dir: &Path, program: &Path) -> io::Result<i32> {
    let token = std::fs::read_to_string(dir.join(TOKEN_NAME))?;
    let Some((stage, secret)) = handshake::split_token(&token) else {
        return Err(io::Error::other("the token is unreadable"));
    };
    let route = ServerRoute::read(dir)?;
    let server = ServerAddress {
        // Before anything of others runs here.
        closed_port: route.try_closed_port().await,
        route,
        stage: stage.to_owned(),
    };
    let admitted = server.first_connection(secret).await?;
    let (connection, welcome) = admitted.map_err(io::Error::other)?;
    let link = Link::new(LinkEnd::Container);
    link.resume(welcome.received)?;
    let listeners = listen(&welcome.sockets)?;
    let inner = start_inner_stage(&link, program)?;
    for (number, listener) in listeners.into_iter().enumerate() {
        tokio::spawn(serve_socket(
            link.clone(),
            listener,
            u16::try_from(number).unwrap_or(u16::MAX),
        ));
    }
    let staying = keep_connected(&link, server, connection, welcome);
    tokio::select! {
        code = inner.finish(&link) => Ok(code),
        why = staying => Err(io::Error::other(why)),
    }
}

/// Runs the link, over a new connection whenever one breaks. Returns why it cannot go on.
async fn keep_connected(
    link: &Link,
    server: ServerAddress,
    mut connection: Box<dyn StageConnection>,
    mut welcome: StageWelcome,
) -> String {
    loop {
        link.run(connection).await;
        if let Some(LinkClosed::Refused(why)) = link.why_closed() {
            return why;
        }
        let deadline = Instant::now() + Duration::from_millis(welcome.grace_ms);
        (connection, welcome) = loop {
            let credential = StageCredential::Resume {
                secret: welcome.secret.clone(),
                received: link.received(),
            };
            match tokio::time::timeout_at(deadline, server.connect(credential)).await {
                Ok(Ok(Ok((connection, next)))) => match link.resume(next.received) {
                    Ok(()) => break (connection, next),
                    Err(error) => return error.to_string(),
                },
                Ok(Ok(Err(refusal))) => return refusal,
                Ok(Err(_)) => tokio::time::sleep(RETRY).await,
                Err(_) => {}
            }
            if Instant::now() >= deadline {
                return "the server was not reached within the grace time".to_owned();
            }
        };
    }
}

/// Listens on the sockets inside. Their directories are temporary file systems of the container.
fn listen(paths: &[String]) -> io::Result<Vec<UnixListener>> {
    let listen = |path: &String| {
        let path = Path::new(path);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        UnixListener::bind(path)
            .map_err(|error| io::Error::other(format!("listening on {}: {error}", path.display())))
    };
    paths.iter().map(listen).collect()
}

/// Carries each connection to a socket over a stream of its own.
async fn serve_socket(link: Link, listener: UnixListener, number: u16) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                // One beyond the limit is dropped, and so closed.
                if let Ok((connection, _)) = accepted
                    && let Ok(Some(stream)) = link.open(number)
                {
                    connections.spawn(stream.join(connection));
                }
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

/// The inner stage and the tasks that carry its streams.
struct InnerStage {
    child: Child,
    /// The control protocol towards the server, and stdout and stderr: what must arrive before the container ends.
    outward: JoinSet<()>,
}

/// Starts the inner stage with pipes, and its control socket as descriptor 3.
#[allow(unsafe_code)]
fn start_inner_stage(link: &Link, program: &Path) -> io::Result<InnerStage> {
    let (control, inside) = std::os::unix::net::UnixStream::pair()?;
    control.set_nonblocking(true)?;
    let inside = OwnedFd::from(inside);
    let mut command = Command::new(program);
    command
        // With this environment, the image's: the program gets of it what the order says.
        .arg(INIT_COMMAND)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let descriptor = inside.as_raw_fd();
    // SAFETY: only dup2 and fcntl are called between fork and exec.
    unsafe {
        command.pre_exec(move || {
            // Where it is descriptor 3 already, dup2 would leave it close-on-exec.
            let done = match descriptor == CONTROL_FD {
                true => libc::fcntl(descriptor, libc::F_SETFD, 0),
                false => libc::dup2(descriptor, CONTROL_FD),
            };
            match done {
                -1 => Err(io::Error::last_os_error()),
                _ => Ok(()),
            }
        });
    }
    let mut child = command.spawn()?;
    drop(inside);
    let missing = || io::Error::other("a pipe is missing");
    let mut stdin = child.stdin.take().ok_or_else(missing)?;
    let mut stdout = child.stdout.take().ok_or_else(missing)?;
    let mut stderr = child.stderr.take().ok_or_else(missing)?;
    let (mut from_inner, mut to_inner) = UnixStream::from_std(control)?.into_split();

    let stream = link.stream(stream_id::STDIN);
    tokio::spawn(async move {
        // Until its end, or until the program has closed its stdin; then further input has no reader.
        let _ = stream.copy_to(&mut stdin).await;
    });
    let mut outward = JoinSet::new();
    let stream = link.stream(stream_id::STDOUT);
    outward.spawn(async move { drop(stream.copy_from(&mut stdout).await) });
    let stream = link.stream(stream_id::STDERR);
    outward.spawn(async move { drop(stream.copy_from(&mut stderr).await) });
    let stream = link.stream(stream_id::CONTROL);
    outward.spawn(async move {
        let inward = async {
            let _ = stream.copy_to(&mut to_inner).await;
            // The server has closed it: the inner stage ends then, and kills what it started.
            drop(to_inner);
            std::future::pending::<()>().await;
        };
        tokio::select! {
            _ = stream.copy_from(&mut from_inner) => {}
            () = inward => {}
        }
    });
    Ok(InnerStage { child, outward })
}

impl InnerStage {
    /// Waits until the inner stage has ended and the server has everything; returns the exit code.
    async fn finish(mut self, link: &Link) -> i32 {
        let status = self.child.wait().await;
        let code = status.ok().and_then(|status| status.code());
        let drained = async { while self.outward.join_next().await.is_some() {} };
        match code {
            // As long as the server takes to read it: it bounds the time, and ends the container.
            Some(_) => drained.await,
            None => drop(tokio::time::timeout(DRAIN_AFTER_KILL, drained).await),
        }
        // Bounded by whoever keeps the link connected, which ends the process when the server is gone.
        link.flushed().await;
        code.unwrap_or(EXIT_FAILED)
    }
}
