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
use tokio_util::task::TaskTracker;

use crate::{
    app::App,
    config::ServerConfig,
    doors::{http::HttpDoors, net},
    telemetry::{OtlpCollector, Telemetry},
};

/// How long sessions and open requests may take to finish once the server stops.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(8);
/// How long sending the last spans may take.
const SPAN_FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// When sending spans ends at the latest, counted from the beginning of the stop.
const SPAN_FLUSH_DEADLINE: Duration = Duration::from_millis(8_500);
/// How often expired debugger events are deleted.
const DEBUGGER_PRUNE_INTERVAL: Duration = Duration::from_secs(600);

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
        let scheme = if self.tls { "https" } else { "http" };
        let host = match self.address.ip().is_unspecified() {
            true => "localhost".to_owned(),
            false if self.address.is_ipv6() => format!("[{}]", self.address.ip()),
            false => self.address.ip().to_string(),
        };
        format!("{scheme}://{host}:{}", self.address.port())
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
        let _ = std::fs::remove_file(self.app.home.control_socket());
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
    let listener = net::bind(config.listen).await?;
    let address = listener.local_addr().map_err(Error::internal)?;
    home.create()?;
    let app = App::open(home, config).await?;
    let telemetry = match collector {
        Some(collector) => Some(Telemetry::start(collector, app.store.clone(), app.sessions.clone()).await?),
        None => None,
    };
    app.sessions.recover().await?;
    // A control socket that is there was left by a killed server: this process holds the home's lock.
    let control = oubliette_os::bind_private_socket(&app.home.control_socket()).map_err(|e| {
        Error::unavailable(format!(
            "cannot listen on {}: {e}",
            app.home.control_socket().display()
        ))
    })?;
    let doors = HttpDoors::new(app.clone(), address);
    let router = doors.router();
    let open = TaskTracker::new();
    let has_tls = tls.is_some();
    tokio::spawn(net::serve_tcp(
        listener,
        tls,
        router.clone(),
        app.stopping.clone(),
        open.clone(),
    ));
    tokio::spawn(net::serve_control(
        control,
        router,
        app.stopping.clone(),
        open.clone(),
    ));
    tokio::spawn(doors.mcp.clone().close_idle_sessions());
    tokio::spawn({
        let app = app.clone();
        async move {
            let report = app.sandbox.probe().await;
            match report.ok {
                true => tracing::info!(driver = report.driver, isolation = %report.level, "sandbox probed"),
                false => tracing::error!(
                    driver = report.driver,
                    "no sandbox can be started; `oubliette doctor` says why"
                ),
            }
        }
    });
    if let Some(keep) = app.config.debugger_keep {
        tokio::spawn(prune_debugger(app.clone(), keep));
    }
    tracing::info!(%address, tls = has_tls, home = %app.home.root().display(), "serving");
    Ok(RunningServer {
        app,
        address,
        tls: has_tls,
        connections: open,
        telemetry,
    })
}

/// Deletes debugger events older than `keep`, every ten minutes until the server stops.
async fn prune_debugger(app: Arc<App>, keep: Duration) {
    loop {
        let deleted = match jiff::Timestamp::now().checked_sub(keep) {
            Ok(before) => app.store.debugger_delete_before(before).await,
            // `keep` is longer than the calendar reaches back: nothing ever expires.
            Err(_) => return,
        };
        match deleted {
            Ok(0) => {}
            Ok(deleted) => tracing::info!(deleted, "expired debugger events deleted"),
            Err(error) => {
                tracing::warn!(%error, "deleting expired debugger events failed; tried again later")
            }
        }
        tokio::select! {
            () = tokio::time::sleep(DEBUGGER_PRUNE_INTERVAL) => {}
            () = app.stopping.cancelled() => return,
        }
    }
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
