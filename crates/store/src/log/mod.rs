//! The two logs: every session's events, and the debugger's.
//!
//! - `tail`: the live end of a log: how far it is committed, and a ring of what came last.
//! - [`follow`]: replay from the database, then live, with no gap and no repeat at the seam.
//! - [`events`], [`debugger`]: the logs themselves.
//!
//! Nothing is queued for a reader. The writer puts what it committed into the ring and moves a counter;
//! readers pull, from the ring if they keep up and from the database if they do not.

pub mod debugger;
pub mod events;
pub mod follow;
pub(crate) mod tail;
