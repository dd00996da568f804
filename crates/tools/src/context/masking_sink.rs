//! A [`DebugSink`] that masks secrets in what tool servers report.

use std::sync::Arc;

use oubliette_protocol::{Slug, debug::DebugBody};

use crate::{DebugSink, Secrets};

/// Masks `secrets` in the texts of events and passes them to `inner`.
pub(super) struct MaskingSink {
    inner: Arc<dyn DebugSink>,
    secrets: Arc<Secrets>,
}

impl MaskingSink {
    pub(super) fn new(inner: Arc<dyn DebugSink>, secrets: Arc<Secrets>) -> Self {
        Self { inner, secrets }
    }

    fn masked(&self, body: DebugBody) -> DebugBody {
        let text = |text: String| self.secrets.mask_text(&text);
        match body {
            DebugBody::ToolServerFailed {
                server,
                error,
                stderr,
            } => DebugBody::ToolServerFailed {
                server,
                error: text(error),
                stderr: stderr.map(text),
            },
            DebugBody::ToolServerStopped { server, reason } => DebugBody::ToolServerStopped {
                server,
                reason: text(reason),
            },
            DebugBody::HealthChanged {
                server,
                from,
                to,
                reason,
            } => DebugBody::HealthChanged {
                server,
                from,
                to,
                reason: reason.map(text),
            },
            DebugBody::ToolRegistered {
                tool,
                canonical,
                server,
                allowed,
                available,
                reason,
            } => DebugBody::ToolRegistered {
                tool,
                canonical,
                server,
                allowed,
                available,
                reason: reason.map(text),
            },
            // The other events hold names and numbers, or were masked where they were made.
            other => other,
        }
    }
}

impl DebugSink for MaskingSink {
    fn record(&self, agent: Option<&Slug>, body: DebugBody) {
        let body = if self.secrets.is_empty() {
            body
        } else {
            self.masked(body)
        };
        self.inner.record(agent, body);
    }
}
