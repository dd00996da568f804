//! Oubliette's server and command line.
//!
//! This crate holds the doors (the server's network entries), the actions behind them, and process start and stop.
//! It does not decide what a session is, how a sandbox is built, where data is stored or which tool may be called:
//! the crates below it do.
//!
//! In the order a request passes them:
//!
//! - [`config`]: reads `oubliette.toml`. [`logging`]: structured logs on stderr.
//! - [`lifecycle`]: starts and stops the server. [`service_manager`]: tells systemd about it. [`app`]: the server's parts, built once and shared.
//!   [`cluster`]: what it does as one of several on a database; [`restart`]: starting its program anew.
//! - [`doors`]: MCP, REST, event streams, files, console, control socket, relay sockets.
//! - [`auth`]: authenticates requests; the only maker of a `Grant`.
//! - [`actions`]: everything a client can ask for, and the one place that performs it.
//! - [`definitions`]: where agents and catalog entries are kept: files of the home, or the database.
//! - [`hop`]: what the server that runs a session has to do is passed on to it, from another server of its cluster.
//! - [`workspace`]: files and git, with nothing in a workspace trusted. [`open_folder`]: a folder of a walk over such files.
//! - [`import`]: reads how other clients start tool servers. [`trial`]: starts tools without a session. [`scratch_dir`]: temporary
//!   directories.
//! - [`session_services`]: implements the traits through which sessions call back into the server.
//! - [`visible`]: reads the rows that a grant may see. [`hidden_chars`]: characters of others' text that nobody would see.
//! - [`presence`]: guards that mark a caller as present. [`sandbox_drivers`]: opens the sandbox drivers;
//!   [`sandbox_status`]: the driver of sessions and its probe report.
//!   [`server_identity`]: what distinguishes this server from others.
//! - [`metrics`], [`histogram`], [`call_times`]: Prometheus counters and histograms. [`retention`], [`reload`]: what is deleted
//!   by age; configuration and certificates read again. [`doctor`]: checks of the installation. [`telemetry`]: OTLP spans of turns and
//!   tool calls.
//! - [`backup`]: a home and its database in one file, and back.
//! - [`first_run`]: the contents of a new home directory. [`presets`]: definitions of well-known agents. [`cli`]: the
//!   commands.
//! - [`schemas`]: JSON Schemas of the files that people write. [`mod@reference`]: the reference pages of the book, made from
//!   the code.
//! - [`fuzzing`]: the fuzz targets of what the server reads.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod actions;
mod app;
mod auth;
mod backup;
mod call_times;
mod cli;
mod cluster;
mod config;
mod definitions;
mod doctor;
mod doors;
mod first_run;
mod fuzzing;
mod hidden_chars;
mod histogram;
mod hop;
mod import;
mod lifecycle;
mod logging;
mod metrics;
mod open_folder;
mod presence;
mod presets;
mod reference;
mod reload;
mod restart;
mod retention;
mod sandbox_drivers;
mod sandbox_status;
mod schemas;
mod scratch_dir;
mod server_identity;
mod service_manager;
mod session_services;
mod telemetry;
mod trial;
mod visible;
mod webhooks;
mod workspace;

pub use cli::{answer_shell, run};

/// What the tests under `tests/` and the fuzz targets need beside the network. Nothing else is public, so that the compiler sees what is
/// not used.
pub mod testing {
    pub use crate::{
        app::App,
        auth::{TokenSpec, expose},
        config::{ServerConfig, TrustConfig},
        first_run::{create_home, populate},
        lifecycle::{RunningServer, ServeOptions, start},
    };

    /// The reference pages of the book, made from the code.
    pub mod reference {
        pub use crate::reference::{ReferencePage, command_tree, pages};
    }

    /// What reads arbitrary bytes.
    pub mod fuzzing {
        pub use crate::fuzzing::{
            McpFuzzer, fuzz_action, fuzz_archive, fuzz_config, fuzz_host_headers, fuzz_workspace_path,
        };
    }

    /// Git on workspaces.
    pub mod git {
        pub use crate::workspace::git::{GitDiff, GitRemote, GitSandboxes, MAX_DIFF_BYTES};
    }

    /// Every action, and the one way to perform it.
    pub mod actions {
        pub use crate::actions::{ClientContext, RequestHop, all, perform, visible};
    }
}
