//! Bounds on one tool server: sizes, counts and times.

use std::time::Duration;

/// The largest message in either direction, in bytes.
pub(super) const MAX_MESSAGE_BYTES: usize = 16 * 1024 * 1024;
/// The largest buffer of a connection, in bytes, that is not charged to the session's budget.
pub(super) const UNCHARGED_BUFFER_BYTES: usize = 64 * 1024;
/// Most bytes queued for a server that does not read; beyond them messages are refused.
pub(super) const MAX_QUEUED_BYTES: usize = 2 * MAX_MESSAGE_BYTES;
/// Most messages queued for a server that does not read.
pub(super) const MAX_QUEUED_MESSAGES: usize = 4096;

/// The most tools a server may list.
pub(super) const MAX_TOOLS: usize = 20_000;
/// The most pages it may list them on.
pub(super) const MAX_PAGES: usize = 2_000;
/// The longest tool name kept, in characters; longer ones are cut.
pub(super) const MAX_NAME_CHARS: usize = 256;
/// The most of a description that is kept, in bytes.
pub(super) const MAX_DESCRIPTION_BYTES: usize = 64 * 1024;
/// The largest schema, in approximate bytes of JSON.
pub(super) const MAX_SCHEMA_BYTES: usize = 256 * 1024;
/// The deepest nesting of a schema.
pub(super) const MAX_SCHEMA_DEPTH: usize = 64;

/// The most of a page of tools, in bytes, that is parsed on the thread that serves calls.
pub(super) const MAX_PARSED_INLINE: usize = 64 * 1024;

/// The longest error text taken over from a server, in bytes.
pub(super) const MAX_ERROR_BYTES: usize = 4 * 1024;

/// Unsolicited messages (notifications, requests, invalid lines) read in one window. Beyond them reading pauses,
/// and the full pipe or socket throttles the server.
pub(super) const MAX_UNSOLICITED_MESSAGES: u32 = 2_000;
/// Bytes of unsolicited messages read in one window.
pub(super) const MAX_UNSOLICITED_BYTES: usize = 4 * 1024 * 1024;
/// Length of the window unsolicited messages are counted in.
pub(super) const UNSOLICITED_WINDOW: Duration = Duration::from_millis(50);

/// How long what a closing connection still has to say is waited for: its last response, the end of its output
/// after its exit, its death after a kill.
pub(super) const DRAIN_TIMEOUT: Duration = Duration::from_millis(100);
/// How long the exit of a process is waited for once its output has ended, and the end of its stderr once it was
/// killed. Both come at once unless the machine is busy.
pub(super) const EXIT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a process has to exit after its stdin was closed, and again after SIGTERM.
pub(super) const STOP_STEP_TIMEOUT: Duration = Duration::from_millis(500);
/// How long closing the MCP client, or sending a cancellation, may take.
pub(super) const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// A server that stayed up this long counts as stable: its restart count begins anew.
pub(super) const STABLE_UPTIME: Duration = Duration::from_secs(10);
/// The first pause between starts; it doubles with each.
pub(super) const MIN_BACKOFF: Duration = Duration::from_millis(500);
/// The longest pause between starts.
pub(super) const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// The shortest time between two reads of a tool list that keeps changing.
pub(super) const RELIST_INTERVAL: Duration = Duration::from_millis(200);
