//! Sessions: lifecycle, the agent process, the caller relay, switching and recovery.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

pub mod callers;
