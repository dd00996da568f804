//! Starts and stops the server.
//!
//! The order of starting matters. The port is bound first: clients can connect at once, and a port in use is
//! reported before any file is touched. The database is opened next, because its lock makes this the only server of
//! its home; the control socket follows, because replacing one left by a killed server needs that lock. The
//! sandbox is probed in the background.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use oubliette_home::HomeDir;
use oubliette_protocol::{Error, Result};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_util::task::TaskTracker;

use crate::{
    app::App,
    call_times, cluster,
    config::ServerConfig,
    definitions,
    doors::{connection_limit::ConnectionLimit, control, http::HttpDoors, net},
    retention,
    server_identity::local_url,
    telemetry::{OtlpCollector, Telemetry},
    webhooks,
    workspace::upload::remove_unfinished_uploads,
};

/// How long sessions and open requests may take to finish once the server stops.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(8);
/// A file in an upload directory that other servers use too is not being uploaded any more when it is this old.
const SHARED_UPLOAD_AGE: Duration = Duration::from_secs(3_600);
/// How long sending the last spans may take.
const SPAN_FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// When sending spans ends at the latest, counted from the beginning of the stop.
const SPAN_FLUSH_DEADLINE: Duration = Duration::from_millis(8_500);

/// What a server is started with.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// The home directory.
    pub home: HomeDir,
    /// The configuration.
    pub config: ServerConfig,
    /// Whether to listen without TLS on an address other than loopback.
    pub insecure: bool,
}

/// A started server.
pub struct RunningServer {
    /// Its parts.
    pub app: Arc<App>,
    /// The address it listens on.
    pub address: SocketAddr,
    /// Whether it serves TLS.
    pub tls: bool,
    connections: TaskTracker,
    telemetry: Option<Telemetry>,
}

impl RunningServer {
    /// The base URL for clients on this machine.
    pub fn url(&self) -> String {
        local_url(self.address, self.tls)
    }

    /// Ends sessions, finishes open requests, sends the last spans and releases the home.
    pub async fn stop(self) {
        let stop_began = Instant::now();
        self.app.stopping.cancel();
        self.connections.close();
        let finished = async {
            tokio::join!(self.app.sessions.shutdown(), self.connections.wait());
        };
        if tokio::time::timeout(DRAIN_TIMEOUT, finished).await.is_err() {
            tracing::warn!("sessions or requests did not finish in time; the server stops without them");
        }
        if let Some(telemetry) = self.telemetry {
            telemetry
                .finish(SPAN_FLUSH_TIMEOUT.min(SPAN_FLUSH_DEADLINE.saturating_sub(stop_began.elapsed())))
                .await;
        }
        let _ = tokio::time::timeout(Duration::from_secs(1), self.app.close()).await;
        control::remove(&self.app.home);
    }
}

/// Starts a server.
pub async fn start(options: ServeOptions) -> Result<RunningServer> {
    let ServeOptions {
        home,
        config,
        insecure,
    } = options;
    let tls = config.tls.as_ref().map(net::load_tls).transpose()?;
    if !config.listen.ip().is_loopback() && tls.is_none() && !insecure {
        return Err(Error::invalid(format!(
            "{} can be reached from other machines, and without TLS so can every token sent to it: set tls_cert and \
             tls_key under [server] in {}, or give --insecure if something in front of it encrypts",
            config.listen,
            home.config_path().display()
        )));
    }
    let collector = config.otlp.as_deref().map(OtlpCollector::parse).transpose()?;
    raise_open_file_limit();
    let listener = net::bind(config.listen, &home).await?;
    let home = home.with_projects_dir(config.workspaces_dir.clone());
    home.create()?;
    let app = App::open(home, config).await?;
    let started = start_parts(app.clone(), listener, tls, collector).await;
    if started.is_err() {
        // Whoever tries again in this process finds the home's lock free, and this server is none of its cluster.
        app.close().await;
    }
    started
}

/// Starts everything that an opened server consists of.
async fn start_parts(
    app: Arc<App>,
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    collector: Option<OtlpCollector>,
) -> Result<RunningServer> {
    let address = listener.local_addr().map_err(Error::internal)?;
    let telemetry = match collector {
        Some(collector) => Some(Telemetry::start(collector, app.store.clone(), app.sessions.clone()).await?),
        None => None,
    };
    let projects = app.home.projects_dir();
    // Before the first request, so that no upload of this server is taken for one.
    let shared = app.hop.is_some();
    let removed = tokio::task::spawn_blocking(move || {
        let left_for = if shared { SHARED_UPLOAD_AGE } else { Duration::ZERO };
        remove_unfinished_uploads(&projects, left_for);
    });
    removed.await.map_err(Error::internal)?;
    // Before anything is appended, so that no event misses its outbox.
    let tasks = webhooks::start(&app.config.webhooks, &app.store, &app.stopping).await?;
    *app.live.webhook_tasks.lock().await = Some(tasks);
    app.sessions.recover().await?;
    app.identity.set_address(local_url(address, tls.is_some()));
    if let Some(hop) = &app.hop {
        tokio::spawn(hop.clone().follow_servers(app.stopping.clone()));
    }
    let control = control::listen(&app.home)?;
    let doors = HttpDoors::new(app.clone(), address);
    let router = doors.router();
    let open = TaskTracker::new();
    let has_tls = tls.is_some();
    app.live.tls.store(tls.map(Arc::new));
    tokio::spawn(net::serve_tcp(
        listener,
        app.clone(),
        ConnectionLimit::new(&app.config.clients),
        router.clone(),
        app.stopping.clone(),
        open.clone(),
    ));
    tokio::spawn(net::serve_control(
        control,
        app.clone(),
        router,
        app.stopping.clone(),
        open.clone(),
    ));
    tokio::spawn(doors.mcp.clone().close_idle_sessions());
    tokio::spawn({
        let app = app.clone();
        async move { app.sandbox.watch().await }
    });
    tokio::spawn(definitions::follow_database(app.clone()));
    cluster::start(&app);
    tokio::spawn(retention::run(app.clone()));
    tokio::spawn(call_times::run(app.clone()));
    tracing::info!(%address, tls = has_tls, home = %app.home.root().display(), "serving");
    Ok(RunningServer {
        app,
        address,
        tls: has_tls,
        connections: open,
        telemetry,
    })
}

/// Raises the soft limit of open files to the hard limit: every client, session and tool server takes descriptors.
fn raise_open_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let now = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: now.maximum,
            maximum: now.maximum,
        },
    ) {
        tracing::debug!(%error, "setrlimit(RLIMIT_NOFILE) failed; the limit of open files is unchanged");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_start_that_failed_halfway_leaves_the_home_to_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let home = HomeDir::at(dir.path().join("h")).unwrap();
        // Its tasks, which are started before the control socket, use the database.
        let config = "[server]\nlisten = \"127.0.0.1:0\"\n\
                      [[webhook]]\nurl = \"http://127.0.0.1:1/\"\nevents = [\"error\"]\nsecret_env = \"SECRET\"";
        let secret =
            |name: &str| (name == "SECRET").then(|| "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".to_owned());
        let options = ServeOptions {
            config: ServerConfig::parse(config, "oubliette.toml", &secret).unwrap(),
            home: home.clone(),
            insecure: false,
        };
        let in_the_way = home.control_secret_path();
        std::fs::create_dir_all(&in_the_way).unwrap();
        assert!(start(options.clone()).await.is_err());
        std::fs::remove_dir(in_the_way).unwrap();
        start(options).await.unwrap().stop().await;
    }
}
