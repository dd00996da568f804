//! Which sections take effect while the server runs, and which only at a start.

use super::{LogConfig, ServerConfig};

impl ServerConfig {
    /// This configuration with what takes effect while the server runs taken from another.
    pub(crate) fn with_live_sections_of(&self, new: &Self) -> Self {
        Self {
            allowed_hosts: new.allowed_hosts.clone(),
            rate: new.rate,
            relay: new.relay,
            approval_timeout: new.approval_timeout,
            drain_timeout: new.drain_timeout,
            providers: new.providers.clone(),
            egress_allow: new.egress_allow.clone(),
            upstreams: new.upstreams.clone(),
            session: new.session,
            prices: new.prices.clone(),
            budget: new.budget,
            webhooks: new.webhooks.clone(),
            retention: new.retention,
            log: LogConfig {
                level: new.log.level.clone(),
                format: self.log.format,
            },
            ..self.clone()
        }
    }

    /// The sections in which this configuration differs from another and that take effect only at a start. Secrets, which
    /// come from the environment, are not compared.
    pub(crate) fn sections_changed(&self, other: &Self) -> Vec<&'static str> {
        let shown = |config: &Self| {
            [
                ("[server] listen", format!("{:?}", config.configured_listen)),
                (
                    "[server]",
                    format!("{:?} {:?}", config.clients, config.mcp_session_idle),
                ),
                ("[store]", format!("{:?}", config.store_url)),
                ("[cluster]", format!("{:?}", config.cluster)),
                ("[workspaces]", format!("{:?}", config.workspaces_dir)),
                ("[trust]", format!("{:?}", config.trust)),
                ("[sandbox]", format!("{:?}", config.sandbox)),
                ("[git]", format!("{:?}", config.git)),
                ("[programs]", format!("{:?}", config.programs)),
                ("[limits]", format!("{:?}", config.limits)),
                ("[log] format", format!("{:?}", config.log.format)),
                ("[otlp]", format!("{:?}", config.otlp)),
            ]
        };
        let (mine, others) = (shown(self), shown(other));
        let changed = mine.iter().zip(&others).filter(|((_, a), (_, b))| a != b);
        changed.map(|((name, _), _)| *name).collect()
    }
}
