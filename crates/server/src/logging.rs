//! Structured logs on stderr, filtered by `RUST_LOG` or else by `[log]` in the configuration.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

use crate::config::{LogConfig, LogFormat};

/// Starts logging. A second call changes nothing.
pub(crate) fn start(config: &LogConfig) {
    let filter = std::env::var("RUST_LOG").ok().filter(|v| !v.is_empty());
    let filter = filter.unwrap_or_else(|| {
        // rmcp logs every client that disconnects, which is normal; hyper and sqlx are verbose below `warn`.
        format!("{},rmcp=off,hyper=warn,sqlx=warn", config.level)
    });
    let filter = EnvFilter::try_new(&filter).unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    let started = match config.format {
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
        LogFormat::Text => builder
            .with_ansi(std::io::stderr().is_terminal())
            .with_target(false)
            .try_init(),
    };
    // Fails if a subscriber is installed already: only tests start twice in one process.
    let _ = started;
}
