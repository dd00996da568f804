//! From start to stop.
//!
//! The order matters. The port is bound first: whoever waits for it need not wait for the rest, and a
//! port in use is said before anything is touched. The store comes next, because its lock makes this the
//! only server of its home; the control socket after it, because replacing one that was left behind needs
//! that lock. The sandbox is looked at in the background.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use oubliette_home::Home;
use oubliette_protocol::{Error, Result};
use tokio_util::task::TaskTracker;

use crate::{
    app::App,
    config::Config,
    doors::{control, http::Doors, net},
    telemetry::{Collector, Telemetry},
};

/// How long what is in flight may take once the server stops.
const FINISH: Duration = Duration::from_secs(8);
/// How long the last spans may take, and until when after the stop.
const TELL: Duration = Duration::from_secs(2);
const TOLD: Duration = Duration::from_millis(8_500);
/// How often debugger events past their time are looked for.
const FORGET: Duration = Duration::from_secs(600);

/// What to serve.
#[derive(Debug, Clone)]
pub struct Serve {
    /// The home.
    pub home: Home,
    /// The configuration.
    pub config: Config,
    /// Listen on another address than loopback without TLS.
    pub insecure: bool,
}

/// A server that is up.
pub struct Running {
    /// Its parts.
    pub app: Arc<App>,
    /// Where it listens.
    pub address: SocketAddr,
    /// Whether with TLS.
    pub tls: bool,
    open: TaskTracker,
    telemetry: Option<Telemetry>,
}

impl Running {
    /// Where people find it.
    pub fn url(&self) -> String {
        let scheme = if self.tls { "https" } else { "http" };
        let host = match self.address.ip().is_unspecified() {
            true => "localhost".to_owned(),
            false if self.address.is_ipv6() => format!("[{}]", self.address.ip()),
            false => self.address.ip().to_string(),
        };
        format!("{scheme}://{host}:{}", self.address.port())
    }

    /// Finishes what is in flight and lets go of the home.
    pub async fn stop(self) {
        let asked = Instant::now();
        self.app.stopping.cancel();
        self.open.close();
        let finished = async {
            tokio::join!(self.app.sessions.shutdown(), self.open.wait());
        };
        if tokio::time::timeout(FINISH, finished).await.is_err() {
            tracing::warn!("some requests did not end in time");
        }
        if let Some(telemetry) = self.telemetry {
            telemetry
                .finish(TELL.min(TOLD.saturating_sub(asked.elapsed())))
                .await;
        }
        let _ = tokio::time::timeout(Duration::from_secs(1), self.app.close()).await;
        let _ = std::fs::remove_file(self.app.home.control_socket());
    }
}

/// Brings a server up.
pub async fn start(serve: Serve) -> Result<Running> {
    let Serve {
        home,
        config,
        insecure,
    } = serve;
    let tls = config.tls.as_ref().map(net::tls).transpose()?;
    if !config.listen.ip().is_loopback() && tls.is_none() && !insecure {
        return Err(Error::invalid(format!(
            "{} can be reached from other machines, and without TLS so can every token sent to it: set tls_cert and \
             tls_key under [server] in {}, or give --insecure if something in front of it encrypts",
            config.listen,
            home.config_path().display()
        )));
    }
    let collector = config.otlp.as_deref().map(Collector::parse).transpose()?;
    raise_open_files();
    let listener = net::bind(config.listen).await?;
    let address = listener.local_addr().map_err(Error::internal)?;
    home.create()?;
    let app = App::open(home, config).await?;
    let telemetry = match collector {
        Some(collector) => Some(Telemetry::start(collector, app.store.clone(), app.sessions.clone()).await?),
        None => None,
    };
    app.sessions.recover().await?;
    let control = control::listen(&app.home.control_socket()).map_err(|e| {
        Error::unavailable(format!(
            "cannot listen on {}: {e}",
            app.home.control_socket().display()
        ))
    })?;
    let doors = Doors::new(app.clone(), address);
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
    tokio::spawn(doors.mcp.clone().reap());
    tokio::spawn({
        let app = app.clone();
        async move {
            let report = app.sandbox.look().await;
            match report.ok {
                true => tracing::info!(driver = report.driver, isolation = %report.level, "sandbox"),
                false => tracing::error!(
                    driver = report.driver,
                    "no sandbox can be started; `oubliette doctor` says why"
                ),
            }
        }
    });
    if let Some(keep) = app.config.debugger_keep {
        tokio::spawn(forget(app.clone(), keep));
    }
    tracing::info!(%address, tls = has_tls, home = %app.home.root().display(), "serving");
    Ok(Running {
        app,
        address,
        tls: has_tls,
        open,
        telemetry,
    })
}

/// Takes away debugger events past their time, now and then.
async fn forget(app: Arc<App>, keep: Duration) {
    loop {
        let gone = match jiff::Timestamp::now().checked_sub(keep) {
            Ok(before) => app.store.debugger_forget(before).await,
            // Longer ago than there is time.
            Err(_) => return,
        };
        match gone {
            Ok(0) => {}
            Ok(gone) => tracing::info!(gone, "debugger events past their time"),
            Err(error) => tracing::warn!(%error, "debugger events past their time stay for now"),
        }
        tokio::select! {
            () = tokio::time::sleep(FORGET) => {}
            () = app.stopping.cancelled() => return,
        }
    }
}

/// As many descriptors as the system gives: every client, session and tool server takes some.
fn raise_open_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let now = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: now.maximum,
            maximum: now.maximum,
        },
    ) {
        tracing::debug!(%error, "the limit of open files stays as it is");
    }
}
