//! The remote stage: how a sandbox in a container is connected to the server.
//!
//! `oubliette-client remote-stage` is the container's first process. It dials the server, proves with a one-time token
//! which sandbox it is, and starts the inner stage ([`crate::inner`]) below it. One connection carries everything: the
//! messages of the inner stage, the program's stdin, stdout and stderr, and each connection to a socket inside. The
//! connection may be cut and made again within the grace time: both ends number what they send and keep it until the
//! other end has it.
//!
//! Nothing here knows what a container is made of: a driver gives the stage its token and a way to the server.
//!
//! - [`frame`]: the frames on the wire.
//! - [`link_state`]: the state of one end: what is sent and not acknowledged, streams, credit. It does no I/O, so that
//!   every order of frames and cuts can be played through.
//! - [`link`]: the same as tasks see it: streams to read and write, and running over one connection after another.
//! - [`handshake`]: the first lines on a connection: which sandbox it is, and from where to go on.
//! - [`dial`]: how a stage reaches the server: a mounted socket, or TCP with TLS.
//! - [`container`]: the end in the container.
//! - `server_end`: the server's end: the grace time, and the pipes that the rest of the server sees.
//! - `admission`: which credentials let a stage in; `tls_listener`: where stages that dial TCP are let in.

#[cfg(feature = "driver")]
mod admission;
pub mod container;
mod dial;
mod frame;
mod handshake;
mod link;
mod link_state;
#[cfg(feature = "driver")]
pub(crate) mod server_end;
#[cfg(feature = "driver")]
pub(crate) mod tls_listener;

use tokio::io::{AsyncRead, AsyncWrite};

#[cfg(feature = "driver")]
pub(crate) use handshake::ClosedPort;

/// The name of the stage's socket in its directory.
const SOCKET_NAME: &str = "stage.sock";
/// The name of the file with the one-time token. It is removed when the token has been used.
const TOKEN_NAME: &str = "token";
/// The name of the file that says where a stage dials, where there is no socket ([`dial::DialAddress`]).
const SERVER_NAME: &str = "server.json";

/// A connection between a stage and the server.
trait StageConnection: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> StageConnection for T {}

/// Streams that every link has from its beginning.
mod stream_id {
    /// The control protocol between the driver and the inner stage ([`crate::control_protocol`]).
    pub(super) const CONTROL: u32 = 0;
    /// The program's stdin.
    pub(super) const STDIN: u32 = 1;
    /// The program's stdout.
    pub(super) const STDOUT: u32 = 2;
    /// The program's stderr.
    pub(super) const STDERR: u32 = 3;
    /// The first stream that is opened for a connection to a socket inside.
    pub(super) const FIRST_SOCKET: u32 = 4;
}
