//! Oubliette's server and command line.
//!
//! This crate holds the doors (the server's network entries), the actions behind them, and process start and stop.
//! It does not decide what a session is, how a sandbox is built, where data is stored or which tool may be called:
//! the crates below it do.
//!
//! In the order a request passes them:
//!
//! - [`config`]: reads `oubliette.toml`. [`logging`]: structured logs on stderr.
//! - [`lifecycle`]: starts and stops the server. [`app`]: the server's parts, built once and shared.
//! - [`doors`]: MCP, REST, event streams, files, console, control socket, relay sockets.
//! - [`auth`]: authenticates requests; the only maker of a `Grant`.
//! - [`actions`]: everything a client can ask for, and the one place that performs it.
//! - [`workspace`]: files and git, with nothing in a workspace trusted.
//! - [`session_services`]: implements the traits through which sessions call back into the server.
//! - [`visible`]: reads the rows that a grant may see.
//! - [`presence`]: guards that mark a caller as present. [`sandbox_status`]: the sandbox driver and its probe report.
//! - [`metrics`]: Prometheus counters. [`doctor`]: checks of the installation. [`telemetry`]: OTLP spans of turns and
//!   tool calls.
//! - [`first_run`]: the contents of a new home directory. [`cli`]: the commands.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod actions;
mod app;
mod auth;
mod cli;
mod config;
mod doctor;
mod doors;
mod first_run;
mod lifecycle;
mod logging;
mod metrics;
mod presence;
mod sandbox_status;
mod session_services;
mod telemetry;
mod visible;
mod workspace;

pub use cli::run;

/// What the tests under `tests/` need beside the network. Nothing else is public, so that the compiler sees what is
/// not used.
pub mod testing {
    pub use crate::{
        app::App,
        auth::{TokenSpec, expose},
        config::ServerConfig,
        first_run::{create_home, populate},
        lifecycle::{RunningServer, ServeOptions, start},
    };

    /// Every action, and the one way to perform it.
    pub mod actions {
        pub use crate::actions::{ActionOrigin, all, perform, visible};
    }
}
