//! Sessions: lifecycle, the agent process, the caller relay, switching and recovery.
//!
//! A session is one agent working in one sandbox on one workspace. This crate knows no HTTP and checks no
//! token: the server's doors call it, and it calls the server through the traits in [`ports`].
//!
//! Files in the order a message takes:
//!
//! - [`request`]: requests and replies; [`config`]: timeouts and limits; [`ports`]: the crate's dependencies.
//! - [`manager`]: [`Sessions`], which finds and starts sessions and passes commands to them. Parts of it are in
//!   `message` (`session_message`), `message_queue` (messages that wait), `turn_wait` (a turn that was begun before),
//!   `session_view` (`session_get`, `session_list`), `events` (`session_events`), `children` (sessions started by agents),
//!   `delete` (`session_delete`), `recovery` (after a restart), `cluster` (which of several servers has a session), `reload` (edits of agents and catalog) and `tool_calls`
//!   (calls from outside).
//! - `live`: the handle of a session in memory; `task`: the one task that runs it: turns, switches, its end.
//! - `agent_plan`: an agent's definition and everything it needs, read and checked before anything is started;
//!   `environment`: the agent's environment variables; `home_seed`: the first files of its home; `start_hints`: why a start
//!   fails; `sandbox_image`: the image of its sandboxes.
//! - `processes`: starts and stops tool servers, egress sockets and the agent; `agent_process`: the agent's
//!   process and ACP; `egress_sockets`: the sockets of model requests and the proxy; `egress_recorder`: their
//!   connections in the debugger.
//! - `relay_socket`: the sockets by which a session's sandbox reaches the server; `shown_tools`: which tools its agent has
//!   been shown.
//! - [`callers`]: the tools a caller lends. [`approvals`]: calls that wait for a person to allow them.
//! - [`usage`]: what sessions use, what it costs, and their budgets.
//! - `debug`: sinks for debugger events; `deferred_own_tools`: Oubliette's own tools, set after construction;
//!   `fuzzing`: the fuzz target of what an agent writes.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod agent_plan;
mod agent_process;
mod approvals;
mod callers;
mod children;
mod cluster;
mod config;
mod debug;
mod deferred_own_tools;
mod delete;
mod disk_guard;
mod egress_recorder;
mod egress_sockets;
mod environment;
mod events;
mod fuzzing;
mod home_seed;
mod live;
mod manager;
mod message;
mod message_queue;
mod ports;
mod processes;
mod recovery;
mod relay_socket;
mod reload;
mod request;
mod sandbox_image;
mod session_view;
mod shown_tools;
mod start_hints;
mod task;
mod tool_calls;
mod turn_wait;
mod usage;

pub use approvals::{ApprovalChoice, ApprovalQuery, ApprovalVerdict};
pub use callers::{CallerLoad, CallerRelay, HoldKind, PresenceHold, PresenceKey, RelayLimits};
pub use config::{LiveConfig, SessionConfig};
pub use environment::needed_providers;
pub use events::check_events_bounds;
#[doc(hidden)]
pub use fuzzing::fuzz_agent_output;
pub use manager::Sessions;
pub use message_queue::WaitingMessage;
pub use ports::{KeyMinter, ProgramPaths, RelayDoor, SessionDeps, WorkspaceMaker};
pub use request::{
    CancelReply, ChildEvents, EventsQuery, EventsReply, IncludeChildren, MessageReply, MessageRequest,
    RequestOrigin, SessionCreator, SessionListQuery, SessionPage, SessionView, SwitchReply, WaitMode,
    WorkspaceChoice,
};
pub use start_hints::{check_package_runner, hidden_program};
pub use tool_calls::RunningToolServer;
pub use turn_wait::TurnToAwait;
pub use usage::{DayBudget, ModelPrice, PriceTable, ProviderUsage, ServerBudget, UsageLedger};
