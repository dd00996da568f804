//! How much of one tool server is put up with.

use std::time::Duration;

/// The largest message in either direction, in bytes.
pub(super) const MESSAGE_BYTES: usize = 16 * 1024 * 1024;
/// What may wait to be read by a server, in bytes and in messages.
pub(super) const QUEUED_BYTES: usize = 2 * MESSAGE_BYTES;
/// See [`QUEUED_BYTES`].
pub(super) const QUEUED_MESSAGES: usize = 4096;

/// The most tools a server may list.
pub(super) const TOOLS: usize = 20_000;
/// The most pages it may list them on.
pub(super) const PAGES: usize = 2_000;
/// The longest tool name, in characters.
pub(super) const NAME_CHARS: usize = 256;
/// The most of a description that is kept, in bytes.
pub(super) const DESCRIPTION_BYTES: usize = 64 * 1024;
/// The most a schema may weigh, in bytes of JSON, and nest.
pub(super) const SCHEMA_BYTES: usize = 256 * 1024;
/// See [`SCHEMA_BYTES`].
pub(super) const SCHEMA_DEPTH: usize = 64;

/// What is kept of a server's stderr, in bytes.
pub(super) const STDERR_BYTES: usize = 4 * 1024;
/// The longest error text taken over from a server, in bytes.
pub(super) const ERROR_BYTES: usize = 4 * 1024;

/// Messages nobody asked for (notifications, requests, noise) that are read in one window; past them
/// reading pauses, and the server's own pipe holds it back.
pub(super) const UNASKED_MESSAGES: u32 = 2_000;
/// The same in bytes.
pub(super) const UNASKED_BYTES: usize = 4 * 1024 * 1024;
/// The window they are counted in.
pub(super) const UNASKED_WINDOW: Duration = Duration::from_millis(50);

/// How long a process may still live after its output ended, or its output after it, before the reason is
/// given without waiting for the other.
pub(super) const LAST_WORDS: Duration = Duration::from_millis(100);
/// How long the exit of a process is waited for once its output has ended, and the end of its stderr once it
/// was killed: they come at once, unless the machine is busy.
pub(super) const EXIT: Duration = Duration::from_secs(2);
/// After its stdin was closed, and again after SIGTERM, before the next step is taken.
pub(super) const STOP_STEP: Duration = Duration::from_millis(500);
/// For the rest of closing a connection.
pub(super) const CLOSE: Duration = Duration::from_secs(1);

/// A server that stayed up this long has come back for good.
pub(super) const SETTLED_IN: Duration = Duration::from_secs(10);
/// The first pause between starts, which doubles.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The longest pause between starts.
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// The shortest time between two readings of a tool list that keeps changing.
pub(super) const LIST_PAUSE: Duration = Duration::from_millis(200);
