//! Sessions: lifecycle, the agent process, the caller relay, switching and recovery.
//!
//! A session is one agent working in one sandbox on one workspace. This crate knows no HTTP and no token:
//! the server's doors ask it, and it reaches back through the traits in [`ports`].
//!
//! In the order a message takes:
//!
//! - [`request`]: what is asked and answered; [`config`]: times and limits; [`ports`]: what it is made of.
//! - [`manager`]: [`Sessions`], which finds, starts and asks sessions; `message`, `events`, `children`,
//!   `recovery` and `reload` are its parts, a file a noun.
//! - `live`: a session in memory as others see it; `task`: the one task that runs it: turns, switches, ends.
//! - `blueprint`: an agent read and checked before anything is touched; `environment`: what it finds around it.
//! - `rig`: what runs: tools, ways out, agent; `agent_host`: the agent's process and ACP.
//! - `relay_socket`: the socket that is the session's identity.
//! - [`callers`]: the tools a caller lends.
//! - `debug`, `late`: small links to the debugger and to Oubliette's own tools.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod agent_host;
mod blueprint;
pub mod callers;
mod children;
pub mod config;
mod debug;
mod environment;
pub mod events;
mod late;
mod live;
pub mod manager;
mod message;
pub mod ports;
mod recovery;
mod relay_socket;
mod reload;
pub mod request;
mod rig;
mod task;

pub use callers::{CallerBook, Hold, Kind, Load, PresenceKey, Rules};
pub use config::SessionConfig;
pub use manager::Sessions;
pub use ports::{Deps, KeyMinter, Programs, RelayDoor, WorkspaceMaker};
pub use request::{
    Asker, Cancelled, ChildEvents, Children, EventsQuery, EventsReply, ListQuery, MessageReply,
    MessageRequest, SessionPage, SessionView, Switched, Wait, WorkspaceChoice,
};
