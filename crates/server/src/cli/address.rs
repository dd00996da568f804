//! Where the running server is found: it may listen elsewhere than its configuration says.

use std::net::SocketAddr;

use oubliette_home::Home;
use oubliette_protocol::Result;

use crate::{config::Config, lifecycle::Running};

use super::client;

/// The file a server keeps its URL in while it runs.
fn path(home: &Home) -> std::path::PathBuf {
    home.run_dir().join("url")
}

/// Tells commands where this server listens.
pub fn announce(running: &Running) {
    if let Err(error) =
        oubliette_home::disk::write_atomic(&path(&running.app.home), running.url().as_bytes(), 0o600)
    {
        tracing::warn!(%error, "commands will not know where this server listens");
    }
}

/// Takes it back.
pub fn withdraw(home: &Home) {
    let _ = std::fs::remove_file(path(home));
}

/// The running server's URL; without a server, the one it would have.
pub async fn of(home: &Home) -> Result<String> {
    if client::is_running(home).await
        && let Ok(url) = std::fs::read_to_string(path(home))
        && !url.trim().is_empty()
    {
        return Ok(url.trim().to_owned());
    }
    let config = Config::load(&home.config_path(), &|name| std::env::var(name).ok())?;
    Ok(url(config.listen, config.tls.is_some()))
}

fn url(listen: SocketAddr, tls: bool) -> String {
    let host = match listen.ip() {
        ip if ip.is_unspecified() => "localhost".to_owned(),
        ip if ip.is_ipv6() => format!("[{ip}]"),
        ip => ip.to_string(),
    };
    format!(
        "{}://{host}:{}",
        if tls { "https" } else { "http" },
        listen.port()
    )
}
