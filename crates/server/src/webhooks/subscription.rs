//! `[[webhook]]`: where events are sent.

use std::collections::HashSet;

use oubliette_protocol::{Error, Result, event};
use oubliette_store::WebhookSubscription;
use reqwest::Url;
use sha2::{Digest, Sha256};

use super::WebhookSecret;

/// One webhook.
#[derive(Debug, Clone)]
pub(crate) struct Webhook {
    /// Where events are posted.
    pub(crate) url: Url,
    /// The types of events it gets.
    pub(crate) events: HashSet<String>,
    /// The variable of the server's environment that holds the secret.
    pub(crate) secret_env: String,
    /// The secret; none if the variable is not set. Nothing is sent unsigned.
    pub(crate) secret: Option<WebhookSecret>,
}

impl Webhook {
    /// Validates the settings; errors name the setting.
    pub(crate) fn new(
        url: &str,
        events: Vec<String>,
        secret_env: String,
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<Self> {
        let parsed = Url::parse(url).map_err(|error| Error::invalid(format!("url: {error}")))?;
        if !matches!(parsed.scheme(), "http" | "https") || parsed.host_str().is_none() {
            return Err(Error::invalid("url: must be http:// or https://"));
        }
        if !parsed.username().is_empty() || parsed.password().is_some() || parsed.fragment().is_some() {
            return Err(Error::invalid("url: no user, password or fragment"));
        }
        if events.is_empty() {
            return Err(Error::invalid(format!(
                "events: name at least one of {}",
                event::EVENT_TYPES.join(", ")
            )));
        }
        if let Some(unknown) = events
            .iter()
            .find(|name| !event::EVENT_TYPES.contains(&name.as_str()))
        {
            return Err(Error::invalid(format!(
                "events: {unknown:?} is none of {}",
                event::EVENT_TYPES.join(", ")
            )));
        }
        let secret = env(&secret_env).filter(|text| !text.is_empty());
        let secret = secret.map(|text| WebhookSecret::parse(&text)).transpose();
        Ok(Self {
            url: parsed,
            events: events.into_iter().collect(),
            secret: secret.map_err(|why| Error::invalid(format!("secret_env: {secret_env} {why}")))?,
            secret_env,
        })
    }

    /// Identifies it in the database: as long as its URL stays, what waits for it is kept.
    pub(crate) fn id(&self) -> String {
        hex::encode(&Sha256::digest(self.url.as_str().as_bytes())[..16])
    }

    /// Where it is, as logs and the doctor show it: paths and queries may hold secrets.
    pub(crate) fn shown(&self) -> String {
        self.url.origin().ascii_serialization()
    }

    pub(super) fn subscription(&self) -> WebhookSubscription {
        WebhookSubscription {
            webhook: self.id(),
            events: self.events.clone(),
        }
    }
}
