//! Webhooks: session events sent to other programs, from a durable outbox.
//!
//! What a webhook wants is put into its outbox in the transaction that appends the event (`store`, `writer/outbox.rs`), so it is
//! delivered at least once whatever happens after. In the order data flows:
//!
//! - [`subscription`]: `[[webhook]]`, validated: where events go, which, and the secret they are signed with.
//! - [`signature`]: the headers of Standard Webhooks.
//! - [`delivery`]: sends what is due, a session's events in order, and tries again what failed.

mod delivery;
mod signature;
mod subscription;

pub(crate) use delivery::{WebhookTasks, start};
pub(crate) use signature::WebhookSecret;
pub(crate) use subscription::Webhook;
