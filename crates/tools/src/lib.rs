//! The tool plane: the one gate between an agent and every tool, whatever its source.
//!
//! It knows no session and no HTTP. Callers and Oubliette's own tools are reached through the traits in
//! [`ports`], tool servers through [`upstream`], processes through `oubliette-sandbox`.
//!
//! In the order a call takes:
//!
//! - [`call`]: what is asked for ([`Wanted`]), by whom ([`Origin`]), and how to give it up ([`CallContext`]).
//! - [`plane`]: [`Plane`], one a session: name → rules → [`Permit`] → source → debugger.
//! - [`registry`]: every name a catalog tool has, what it means, and who wins when two want one name;
//!   [`name`] makes and bounds names, [`allow`] holds an agent's `allowed` and `denied`.
//! - [`permit`]: the value without which no source can be dispatched to.
//! - [`context`]: [`Context`], one running agent's servers and registry: built, followed, torn down.
//! - [`upstream`]: MCP servers over stdio, ws, tcp and http. [`builtin`]: `fs_read`, `fs_write`, `shell_exec`.
//! - [`thread`]: the threads that calls are made on.
//! - [`trust`]: what `oubliette.toml` opens of the host; [`secret`]: what may never be shown.
//! - [`mod@explain`]: why a tool is there, or not, in a sentence.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

pub mod allow;
pub mod builtin;
pub mod call;
pub mod context;
pub mod explain;
pub mod name;
pub mod permit;
pub mod plane;
pub mod ports;
pub mod registry;
pub mod secret;
pub mod thread;
pub mod trust;
pub mod upstream;

pub use call::{CallContext, Origin, Progress, Wanted};
pub use context::{BuildSpec, Context};
pub use explain::{explain, preview};
pub use permit::Permit;
pub use plane::{Plane, PlaneParts};
pub use ports::{Callers, DebugSink, OwnTools};
pub use secret::Secrets;
pub use thread::{CallThread, CallThreads};
pub use trust::{Environment, ProcessEnvironment, Trust, TrustTable};
