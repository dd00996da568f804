//! Git, used so that neither a URL nor a workspace's contents can make it run anything.
//!
//! - [`origin`]: where a workspace's first files come from, checked.
//! - [`run`]: git with nothing of this machine's configuration, bounded in time and output.
//! - [`fetch`]: an origin, cloned.
//! - [`mod@diff`]: what changed since.

mod diff;
mod fetch;
mod origin;
mod run;
#[cfg(test)]
mod tests;

pub use diff::{Diff, baseline, diff};
pub use fetch::clone;
pub use origin::{Origin, without_password};
