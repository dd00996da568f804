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
//! - [`presence`]: guards that mark a caller as present. [`sandbox_status`]: the sandbox driver and its probe report.
//! - [`metrics`]: Prometheus counters. [`doctor`]: checks of the installation. [`telemetry`]: OTLP spans of turns and
//!   tool calls.
//! - [`first_run`]: the contents of a new home directory. [`cli`]: the commands.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

pub mod actions;
pub mod app;
pub mod auth;
pub mod cli;
pub mod config;
pub mod doctor;
pub mod doors;
pub mod first_run;
pub mod lifecycle;
pub mod logging;
pub mod metrics;
pub mod presence;
pub mod sandbox_status;
pub mod session_services;
pub mod telemetry;
pub mod workspace;
