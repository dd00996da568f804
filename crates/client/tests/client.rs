//! `oubliette-client` as an agent and the server see it.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

#[path = "shared/handoff.rs"]
mod handoff;
#[path = "shared/relay_socket.rs"]
mod relay_socket;
mod support;

mod via_relay_socket {
    const STREAMS: super::support::Streams = super::support::Streams::KeptByClient;
    include!("shared/cases.rs");
}

mod via_handoff {
    const STREAMS: super::support::Streams = super::support::Streams::HandedOff;
    include!("shared/cases.rs");
}
