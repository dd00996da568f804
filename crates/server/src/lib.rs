//! Oubliette's server and command line.
//!
//! This crate is the doors, the actions behind them and the life of the process. What a session is, how a
//! sandbox is built, where data lies and which tool may be called is decided in the crates below it.
//!
//! In the order a request passes them:
//!
//! - [`config`]: `oubliette.toml`. [`logging`]: where it tells what it does.
//! - [`lifecycle`]: from start to stop. [`app`]: the parts, put together once.
//! - [`doors`]: the ways in: MCP, REST, event streams, files, console, control socket.
//! - [`auth`]: who asks; the only maker of a `Grant`.
//! - [`actions`]: everything that can be asked for, and the one place that performs it.
//! - [`workspace`]: files and git, with nothing in a workspace trusted.
//! - [`links`]: what sessions ask of the server.
//! - [`presence`]: what says that a caller is there. [`walls`]: the sandbox driver.
//! - [`metrics`], [`doctor`]: how it is doing. [`telemetry`]: turns and calls, told to a collector.
//! - [`first_run`]: what a new home holds. [`cli`]: the commands.

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
pub mod links;
pub mod logging;
pub mod metrics;
pub mod presence;
pub mod telemetry;
pub mod walls;
pub mod workspace;
