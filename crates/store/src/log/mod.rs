//! The two logs: the event log of every session, and the debugger's log.
//!
//! - `tail`: the live end of a log: the last committed index, and a ring of the latest entries.
//! - `size`: how large a session's log is and may be; `debug_size`: the same for its part of the debugger's.
//! - [`follow`]: replay from the database, then live, without a gap or a repeat in between.
//! - [`events`], [`debugger`]: the logs themselves.
//!
//! Readers have no queues. The writer puts committed entries into the ring and advances the last index;
//! readers pull, from the ring if they keep up and from the database if they do not.

pub mod debug_size;
pub mod debugger;
pub mod events;
pub mod follow;
pub(crate) mod size;
pub(crate) mod tail;
