//! Sessions: lifecycle, the agent process, the caller relay, switching and recovery.
//!
//! A session is one agent working in one sandbox on one workspace. This crate knows no HTTP and checks no
//! token: the server's doors call it, and it calls the server through the traits in [`ports`].
//!
//! Files in the order a message takes:
//!
//! - [`request`]: requests and replies; [`config`]: timeouts and limits; [`ports`]: the crate's dependencies.
//! - [`manager`]: [`Sessions`], which finds and starts sessions and passes commands to them. Parts of it are in
//!   `message` (`session_message`), `events` (`session_events`), `children` (sessions started by agents),
//!   `recovery` (after a restart) and `reload` (edits of agents and catalog).
//! - `live`: the handle of a session in memory; `task`: the one task that runs it: turns, switches, its end.
//! - `agent_plan`: an agent's definition and everything it needs, read and checked before anything is started;
//!   `environment`: the agent's environment variables.
//! - `processes`: starts and stops tool servers, egress sockets and the agent; `agent_process`: the agent's
//!   process and ACP.
//! - `relay_socket`: the sockets by which a session's sandbox reaches the server.
//! - [`callers`]: the tools a caller lends.
//! - `debug`: sinks for debugger events; `deferred_own_tools`: Oubliette's own tools, set after construction.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod agent_plan;
mod agent_process;
mod callers;
mod children;
mod config;
mod debug;
mod deferred_own_tools;
mod environment;
mod events;
mod live;
mod manager;
mod message;
mod ports;
mod processes;
mod recovery;
mod relay_socket;
mod reload;
mod request;
mod task;

pub use callers::{CallerLoad, CallerRelay, HoldKind, PresenceHold, PresenceKey, RelayLimits};
pub use config::SessionConfig;
pub use events::check_events_bounds;
pub use manager::Sessions;
pub use ports::{KeyMinter, ProgramPaths, RelayDoor, SessionDeps, WorkspaceMaker};
pub use request::{
    CancelReply, ChildEvents, EventsQuery, EventsReply, IncludeChildren, MessageReply, MessageRequest,
    RequestOrigin, SessionListQuery, SessionPage, SessionView, SwitchReply, WaitMode, WorkspaceChoice,
};
