//! `[[webhook]]`: URLs that events are sent to.

use oubliette_protocol::Result;

use super::{EnvLookup, field_error, raw::RawWebhook};
use crate::webhooks::Webhook;

/// Resolves `[[webhook]]`: each of them has its own URL.
pub(super) fn resolve(raw: Vec<RawWebhook>, env: EnvLookup<'_>) -> Result<Vec<Webhook>> {
    let mut webhooks: Vec<Webhook> = Vec::with_capacity(raw.len());
    for (number, raw) in raw.into_iter().enumerate() {
        let field = format!("webhook {}", number + 1);
        let webhook = Webhook::new(&raw.url, raw.events, raw.secret_env, env)
            .map_err(|error| field_error(&field, error.message))?;
        if webhooks.iter().any(|before| before.url == webhook.url) {
            return Err(field_error(
                &field,
                "another webhook has the same url; name all events in one",
            ));
        }
        webhooks.push(webhook);
    }
    Ok(webhooks)
}
