//! The running server's URL. `--listen` overrides the configuration, so a server writes the URL it really has to a
//! file in the home.

use oubliette_home::HomeDir;
use oubliette_protocol::Result;

use crate::{config::ServerConfig, lifecycle::RunningServer, server_identity::local_url};

use super::client;

/// The file that holds the URL while a server runs.
fn url_file(home: &HomeDir) -> std::path::PathBuf {
    home.run_dir().join("url")
}

/// Writes the server's URL where [`lookup`] finds it.
pub(crate) fn publish(running: &RunningServer) {
    if let Err(error) =
        oubliette_home::safe_fs::write_atomic(&url_file(&running.app.home), running.url().as_bytes(), 0o600)
    {
        tracing::warn!(%error, "writing the server's URL file failed; commands will use the configured address");
    }
}

/// Removes the URL file, when the server stops.
pub(crate) fn remove(home: &HomeDir) {
    let _ = std::fs::remove_file(url_file(home));
}

/// The running server's URL; without a server, the URL its configuration gives.
pub(crate) async fn lookup(home: &HomeDir) -> Result<String> {
    if client::is_running(home).await
        && let Ok(url) = std::fs::read_to_string(url_file(home))
        && !url.trim().is_empty()
    {
        return Ok(url.trim().to_owned());
    }
    let config = ServerConfig::load(&home.config_path(), &|name| std::env::var(name).ok())?;
    Ok(local_url(config.listen, config.tls.is_some()))
}
