//! Reading the configuration and certificates again while the server runs (SIGHUP). What can change live changes for new
//! connections, requests and sessions, and the next run of its task; nothing that is open is touched. A broken file changes
//! nothing.

use std::sync::Arc;

use arc_swap::{ArcSwap, ArcSwapOption};
use oubliette_egress::{EgressAllowList, ProviderSet, ServiceSet};
use oubliette_protocol::Result;
use parking_lot::Mutex;
use tokio_rustls::TlsAcceptor;

use crate::{
    actions::run_blocking,
    app::App,
    config::ServerConfig,
    doors::{allowed_hosts::AllowedHosts, net},
    logging,
    webhooks::{self, WebhookTasks},
};

/// The settings that change while the server runs.
pub(crate) struct LiveSettings {
    /// Certificate and key for new connections; none: plain HTTP.
    pub(crate) tls: ArcSwapOption<TlsAcceptor>,
    /// What delivers to webhooks; none until the server has started.
    pub(crate) webhook_tasks: tokio::sync::Mutex<Option<WebhookTasks>>,
    /// The configuration in force.
    config: ArcSwap<ServerConfig>,
    /// The hosts that requests may be addressed to; none until the doors are open.
    hosts: ArcSwapOption<AllowedHosts>,
    /// Why the configuration could not be read again.
    error: Mutex<Option<String>>,
}

impl LiveSettings {
    /// The settings that the server starts with.
    pub(crate) fn new(config: &ServerConfig) -> Self {
        Self {
            tls: ArcSwapOption::empty(),
            webhook_tasks: tokio::sync::Mutex::default(),
            config: ArcSwap::from_pointee(config.clone()),
            hosts: ArcSwapOption::empty(),
            error: Mutex::default(),
        }
    }

    /// The configuration in force: that of the start, with what was changed since.
    pub(crate) fn config(&self) -> Arc<ServerConfig> {
        self.config.load_full()
    }

    /// Says which hosts the doors check, so that they change with the configuration.
    pub(crate) fn set_hosts(&self, hosts: Arc<AllowedHosts>) {
        self.hosts.store(Some(hosts));
    }

    /// Why the last attempt to read the configuration again failed; none if it did not.
    pub(crate) fn reload_error(&self) -> Option<String> {
        self.error.lock().clone()
    }
}

/// Reads `oubliette.toml` and certificates again. The outcome is in the log, and an error in `doctor` too.
pub(crate) async fn reload(app: &Arc<App>) {
    match read_again(app).await {
        Ok(waiting) if waiting.is_empty() => tracing::info!("configuration and certificates read again"),
        Ok(waiting) => tracing::warn!(
            sections = waiting.join(", "),
            "configuration and certificates read again; these changes take effect when the server is started again"
        ),
        Err(error) => {
            tracing::error!(error = %error.for_log(), "reading the configuration again failed; the old one stays in use");
            *app.live.error.lock() = Some(error.message);
        }
    }
}

/// What was read and checked, to be put into force.
struct ReadSettings {
    config: ServerConfig,
    tls: Option<TlsAcceptor>,
    providers: ProviderSet,
    services: ServiceSet,
    egress: EgressAllowList,
}

/// Returns the sections that have changed and cannot change live.
async fn read_again(app: &Arc<App>) -> Result<Vec<&'static str>> {
    let path = app.home.config_path();
    // Everything is read and checked before anything is changed.
    let read = run_blocking(move || {
        let config = ServerConfig::load(&path, &|name| std::env::var(name).ok())?;
        Ok(ReadSettings {
            tls: config.tls.as_ref().map(net::load_tls).transpose()?,
            providers: ProviderSet::check(config.providers.clone())?,
            services: ServiceSet::check(config.upstreams.clone())?,
            egress: EgressAllowList::parse(&config.egress_allow)?,
            config,
        })
    })
    .await?;
    let live = &app.live;
    let mut waiting = read.config.sections_changed(&app.config);
    let before = live.config();
    let config = before.with_live_sections_of(&read.config);
    // First, because it is the only step that can fail.
    if format!("{:?}", config.webhooks) != format!("{:?}", before.webhooks) {
        let mut tasks = live.webhook_tasks.lock().await;
        if let Some(tasks) = tasks.take() {
            tasks.stop().await;
        }
        let started = webhooks::start(&config.webhooks, &app.store, &app.stopping).await;
        *tasks = Some(match started {
            Ok(started) => started,
            Err(error) => {
                *tasks = webhooks::start(&before.webhooks, &app.store, &app.stopping)
                    .await
                    .ok();
                return Err(error);
            }
        });
    }
    if read.tls.is_some() != app.config.tls.is_some() {
        // Clients of a running server expect what it began with.
        waiting.push("[server] tls_cert");
    } else if let Some(tls) = read.tls {
        live.tls.store(Some(Arc::new(tls)));
    }
    app.gateway.set_providers(read.providers);
    app.services.set_services(read.services);
    app.proxy.set_allow(read.egress);
    app.rate_limit
        .set_rate(config.rate.per_second.into(), config.rate.burst.into());
    if let Some(hosts) = live.hosts.load().as_ref() {
        hosts.set_allowed(&config.allowed_hosts);
    }
    logging::set_level(&config.log);
    app.sessions.set_config(config.session_config());
    live.config.store(Arc::new(config));
    *live.error.lock() = None;
    Ok(waiting)
}
