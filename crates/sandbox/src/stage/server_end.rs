//! The server's end of a stage: its directory, the grace time, and the pipes that the rest of the server sees.
//!
//! What comes from a container is hostile. Whoever is inside can connect to the stage's socket, so a connection has
//! nothing until it has shown the credential, and few may try at once. A violation of the protocol ends that stage; the
//! link bounds what it can make the server keep.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use oubliette_os::{DescriptorWorker, PassedDescriptors, UntrustedListener, UntrustedStream};
use tokio::net::UnixStream;
use tokio::net::unix::pipe;
use tokio::process::{ChildStderr, ChildStdin, ChildStdout};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::time::Instant;

use super::admission::{AdmittedStage, StageAdmission};
use super::dial::DialAddress;
use super::handshake::{self, ClosedPort, MAX_HELLO_BYTES, ServerHello, StageHello, StageWelcome};
use super::link::{Link, LinkClosed};
use super::link_state::LinkEnd;
use super::tls_listener::{ExpectedStage, StageListener};
use super::{SERVER_NAME, SOCKET_NAME, StageConnection, TOKEN_NAME, stream_id};
use crate::driver::SandboxError;
use crate::handle::ExitCause;
use crate::spec::SocketMount;

/// Maximum number of connections that have not shown who they are. Further ones wait to be accepted.
const MAX_UNKNOWN: usize = 4;

/// A stage that a container is about to be started with: its directory, to be mounted read-only in the container.
pub(crate) struct StageDoor {
    files: StageFiles,
    /// Who may be let in.
    admission: Arc<StageAdmission>,
    entrance: StageEntrance,
}

/// Where a stage connects.
enum StageEntrance {
    /// A socket in its directory.
    Socket(UntrustedListener),
    /// The server's listener for all stages.
    Listener(ExpectedStage),
}

/// A user to whom the files of a stage belong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StageUser {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// A stage's directory. It is removed when this is dropped.
struct StageFiles {
    dir: PathBuf,
    user: StageUser,
}

impl StageFiles {
    fn create(dir: PathBuf, user: StageUser) -> io::Result<Self> {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)?;
        let files = Self { dir, user };
        files.give(&files.dir)?;
        Ok(files)
    }

    /// Gives a file to the container's user, who must be able to use it.
    fn give(&self, path: &Path) -> io::Result<()> {
        match rustix::process::geteuid().is_root() {
            true => std::os::unix::fs::lchown(path, Some(self.user.uid), Some(self.user.gid)),
            false => Ok(()),
        }
    }

    fn write(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let path = self.dir.join(name);
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)?;
        io::Write::write_all(&mut file, content)?;
        self.give(&path)
    }
}

impl StageDoor {
    /// Makes the directory, listens on the socket in it and writes the token.
    pub(crate) fn open(dir: PathBuf, stage: &str, user: StageUser) -> io::Result<Self> {
        let files = StageFiles::create(dir, user)?;
        let admission = Arc::new(StageAdmission::new(stage));
        let socket = files.dir.join(SOCKET_NAME);
        let listener =
            UntrustedListener::bind(&socket, PassedDescriptors::Refused, DescriptorWorker::default())?;
        files.give(&socket)?;
        files.write(TOKEN_NAME, admission.token().as_bytes())?;
        Ok(Self {
            files,
            admission,
            entrance: StageEntrance::Socket(listener),
        })
    }

    /// Makes the directory and writes the token and where to dial: the listener, which is reached at `address`. With
    /// `closed_port` the stage also tries whether it reaches that port of the same address.
    pub(crate) fn open_remote(
        dir: PathBuf,
        stage: &str,
        user: StageUser,
        listener: &StageListener,
        address: SocketAddr,
        closed_port: Option<u16>,
    ) -> io::Result<Self> {
        let files = StageFiles::create(dir, user)?;
        let admission = Arc::new(StageAdmission::new(stage));
        let server = DialAddress {
            address,
            sha256: listener.fingerprint().to_owned(),
            closed_port,
        };
        files.write(SERVER_NAME, &serde_json::to_vec(&server)?)?;
        files.write(TOKEN_NAME, admission.token().as_bytes())?;
        Ok(Self {
            files,
            entrance: StageEntrance::Listener(listener.expect(admission.clone())),
            admission,
        })
    }

    /// The directory on this host.
    pub(crate) fn dir(&self) -> &Path {
        &self.files.dir
    }

    /// Serves the stage until its link has ended. `sockets` are those it listens on inside. The receiver is told when the
    /// stage has connected for the first time, with what it says of the port that should be closed.
    pub(crate) fn serve(
        self,
        sockets: Vec<SocketMount>,
        grace: Duration,
    ) -> (StageLink, oneshot::Receiver<Option<ClosedPort>>) {
        let link = Link::new(LinkEnd::Server);
        let (connections, connection) = watch::channel(ConnectionState::Connected);
        let (connected, first) = oneshot::channel();
        let hosts: Vec<PathBuf> = sockets.iter().map(|socket| socket.host.clone()).collect();
        let (admitted, accepting) = match self.entrance {
            StageEntrance::Socket(listener) => {
                let (admit, admitted) = mpsc::channel(1);
                let accepting = accept(listener, self.admission, admit);
                (admitted, tokio::spawn(accepting))
            }
            StageEntrance::Listener(mut expected) => {
                let admitted = expected.take_admitted();
                let waiting = async move {
                    let _expected = expected;
                    std::future::pending::<()>().await;
                };
                (admitted, tokio::spawn(waiting))
            }
        };
        let server = StageServer {
            files: self.files,
            link: link.clone(),
            inside: sockets
                .iter()
                .map(|socket| socket.inside.to_string_lossy().into_owned())
                .collect(),
            grace,
            connections,
        };
        tokio::spawn(async move {
            server.run(connected, admitted).await;
            accepting.abort();
        });
        tokio::spawn(connect_streams(link.clone(), hosts));
        (StageLink { link, connection }, first)
    }
}

impl Drop for StageFiles {
    fn drop(&mut self) {
        if let Err(error) = oubliette_os::remove_tree_blocking(&self.dir) {
            tracing::debug!(%error, dir = %self.dir.display(), "removing a stage's directory failed");
        }
    }
}

/// Whether a stage is connected now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConnectionState {
    Connected,
    Cut,
}

/// The server's hold on a stage. When it is dropped, the stage is not served any more.
pub(crate) struct StageLink {
    link: Link,
    connection: watch::Receiver<ConnectionState>,
}

impl StageLink {
    /// Ends the link. What was received can still be read.
    pub(crate) fn close(&self) {
        self.link.close(LinkClosed::Done);
    }

    /// Waits until nothing more comes over the current connection.
    pub(crate) async fn disconnected(&self) {
        let mut connection = self.connection.clone();
        // An error: it is not served any more.
        let _ = connection.wait_for(|state| *state == ConnectionState::Cut).await;
    }

    /// Waits until the link has ended by what the other end did, or did not.
    pub(crate) async fn ended(&self) -> ExitCause {
        cause_of(&self.link.closed().await)
    }

    /// Why the link has ended; none while it has not.
    pub(crate) fn cause(&self) -> Option<ExitCause> {
        self.link.why_closed().map(|why| cause_of(&why))
    }

    /// An error for a stage that was never let in.
    pub(crate) fn start_error(&self) -> SandboxError {
        let why = match self.link.why_closed() {
            Some(LinkClosed::Refused(why)) => why,
            Some(LinkClosed::Done | LinkClosed::Lost) | None => "its connection was cut".to_owned(),
        };
        SandboxError::Setup(format!("the container's first process could not be used: {why}"))
    }
}

impl Drop for StageLink {
    fn drop(&mut self) {
        self.close();
    }
}

fn cause_of(why: &LinkClosed) -> ExitCause {
    match why {
        LinkClosed::Done | LinkClosed::Lost => ExitCause::ConnectionLost,
        LinkClosed::Refused(violation) => {
            tracing::warn!(violation, "a stage broke the protocol");
            ExitCause::ProtocolViolation
        }
    }
}

/// Accepts a stage's connections, one after the other.
struct StageServer {
    files: StageFiles,
    link: Link,
    inside: Vec<String>,
    grace: Duration,
    connections: watch::Sender<ConnectionState>,
}

impl StageServer {
    async fn run(
        self,
        connected: oneshot::Sender<Option<ClosedPort>>,
        mut admitted: mpsc::Receiver<AdmittedStage>,
    ) {
        let mut connected = Some(connected);
        let mut running: Option<tokio::task::JoinHandle<()>> = None;
        // Before the first connection whoever starts the container watches the time.
        let mut deadline: Option<Instant> = None;
        loop {
            let lost = async {
                match deadline {
                    Some(deadline) => tokio::time::sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            let broken = async {
                match &mut running {
                    Some(task) => drop(task.await),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                Some(stage) = admitted.recv() => {
                    // The old connection ends first: only then is it known what was received over it.
                    if let Some(task) = running.take() {
                        task.abort();
                        let _ = task.await;
                    }
                    let closed_port = stage.closed_port;
                    match self.resume(stage).await {
                        Ok(connection) => {
                            deadline = None;
                            self.connections.send_replace(ConnectionState::Connected);
                            let link = self.link.clone();
                            running = Some(tokio::spawn(async move { drop(link.run(connection).await) }));
                            if let Some(connected) = connected.take() {
                                let _ = std::fs::remove_file(self.files.dir.join(TOKEN_NAME));
                                let _ = connected.send(closed_port);
                            }
                        }
                        Err(error) => {
                            tracing::debug!(%error, "a stage's connection broke during its handshake");
                            deadline = Some(deadline.unwrap_or_else(|| Instant::now() + self.grace));
                        }
                    }
                }
                () = broken => {
                    running = None;
                    self.connections.send_replace(ConnectionState::Cut);
                    deadline = Some(Instant::now() + self.grace);
                }
                () = lost => self.link.close(LinkClosed::Lost),
                _ = self.link.closed() => break,
            }
        }
        if let Some(task) = running {
            task.abort();
        }
    }

    /// Welcomes a stage and prepares the link for its connection.
    async fn resume(&self, stage: AdmittedStage) -> io::Result<Box<dyn StageConnection>> {
        let AdmittedStage {
            mut connection,
            peer_received,
            secret,
            closed_port: _,
        } = stage;
        if let Some(received) = peer_received {
            self.link.resume(received)?;
        }
        let welcome = ServerHello::Welcome(StageWelcome {
            secret,
            received: self.link.received(),
            grace_ms: u64::try_from(self.grace.as_millis()).unwrap_or(u64::MAX),
            sockets: self.inside.clone(),
        });
        handshake::send(&mut connection, &welcome).await?;
        Ok(connection)
    }
}

/// Accepts connections and asks each who it is.
async fn accept(
    listener: UntrustedListener,
    admission: Arc<StageAdmission>,
    admit: mpsc::Sender<AdmittedStage>,
) {
    let places = Arc::new(Semaphore::new(MAX_UNKNOWN));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else {
            return;
        };
        let socket = match listener.accept().await {
            Ok(socket) => socket,
            Err(error) => {
                tracing::warn!(%error, "accepting a stage's connection failed");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (admission, admit) = (admission.clone(), admit.clone());
        tokio::spawn(async move {
            let _place = place;
            let Ok(mut connection) = UntrustedStream::new(socket) else {
                return;
            };
            let Ok(hello) = handshake::receive::<StageHello>(&mut connection, MAX_HELLO_BYTES).await else {
                return;
            };
            let closed_port = hello.closed_port;
            match admission.check(hello).await {
                Ok((peer_received, secret)) => {
                    let _ = admit
                        .send(AdmittedStage {
                            connection: Box::new(connection),
                            peer_received,
                            secret,
                            closed_port,
                        })
                        .await;
                }
                Err(why) => {
                    tracing::warn!(stage = admission.stage(), why, "a stage was refused");
                    let _ = handshake::send(&mut connection, &ServerHello::Refused(why.into())).await;
                }
            }
        });
    }
}

/// Connects each stream that the stage opens to the socket on this host it is for.
async fn connect_streams(link: Link, hosts: Vec<PathBuf>) {
    while let Some((stream, number)) = link.accept().await {
        // A number that is not in the list: the stream is dropped, and so reset.
        let Some(host) = hosts.get(usize::from(number)).cloned() else {
            continue;
        };
        tokio::spawn(async move {
            match UnixStream::connect(&host).await {
                Ok(connection) => stream.join(connection).await,
                Err(error) => {
                    tracing::debug!(%error, socket = %host.display(), "connecting a sandbox's stream failed")
                }
            }
        });
    }
}

/// The program's pipes and the inner stage's control socket, as the rest of the server knows them from local sandboxes.
pub(crate) struct StagePipes {
    pub(crate) stdin: ChildStdin,
    pub(crate) stdout: ChildStdout,
    pub(crate) stderr: ChildStderr,
    pub(crate) control: UnixStream,
}

impl StagePipes {
    /// Connects pipes to the link's streams. The tasks that copy end with the streams, or when nobody reads.
    pub(crate) fn connect(stage: &StageLink) -> io::Result<Self> {
        let link = &stage.link;
        let (stdin_read, stdin) = new_pipe()?;
        let (stdout, stdout_write) = new_pipe()?;
        let (stderr, stderr_write) = new_pipe()?;
        let (control, far) = UnixStream::pair()?;

        let mut stdin_read = pipe::Receiver::from_owned_fd(stdin_read)?;
        let stream = link.stream(stream_id::STDIN);
        tokio::spawn(async move {
            // A program that has closed its stdin is noticed at once, and not at the next write: whoever writes expects that.
            let reset = async { while let Ok(Some(_)) = stream.read().await {} };
            tokio::select! {
                _ = stream.copy_from(&mut stdin_read) => {
                    // The stream ends when the program has ended; what was written arrives until then.
                    while let Ok(Some(_)) = stream.read().await {}
                }
                () = reset => {}
            }
        });
        for (id, write) in [
            (stream_id::STDOUT, stdout_write),
            (stream_id::STDERR, stderr_write),
        ] {
            let mut write = pipe::Sender::from_owned_fd(write)?;
            let stream = link.stream(id);
            tokio::spawn(async move { drop(stream.copy_to(&mut write).await) });
        }
        tokio::spawn(link.stream(stream_id::CONTROL).join(far));
        Ok(Self {
            stdin: ChildStdin::from_std(stdin.into())?,
            stdout: ChildStdout::from_std(stdout.into())?,
            stderr: ChildStderr::from_std(stderr.into())?,
            control,
        })
    }
}

/// A pipe's reading and writing end. Both are made non-blocking by whoever registers them.
fn new_pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    use rustix::pipe::PipeFlags;
    Ok(rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?)
}

#[cfg(test)]
mod tests;
