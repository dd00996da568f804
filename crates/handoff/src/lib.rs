//! The hand-off of an MCP server's stdin and stdout from `oubliette-client` to the server, and the handling of
//! MCP lines that both programs share.
//!
//! An agent speaks MCP to `oubliette-client` on two pipes. In a local sandbox the client passes both descriptors
//! to the server over a Unix socket. The server then reads what the agent writes, answers ordinary `tools/call`
//! requests itself and forwards every other line to the client, so that an ordinary call saves one process on its
//! way there and back. An agent sees no difference. Nothing in a local sandbox outlives the server: when the
//! server's end of the hand-off closes, the client ends.
//!
//! This crate is not the client (`oubliette-client` links it) and knows no tool (the server passes a
//! [`LocalTools`](interceptor::LocalTools)).
//!
//! The hand-off itself, in the order data flows:
//!
//! - [`handshake`]: both ends of the hand-off protocol: [`hand_off`](handshake::hand_off) in the client,
//!   [`accept`](handshake::accept) in the server.
//! - [`descriptors`]: checks the descriptors that came from a sandbox, and reads and writes them without blocking.
//! - [`interceptor`]: what the server runs between agent and client.
//!
//! Shared MCP line handling, which is not about the hand-off, but is needed by the interceptor and by a client that
//! kept its streams:
//!
//! - [`line_filter`]: reads the agent's lines; those the fast path takes do not come out of it.
//! - [`fast_path`]: one ordinary `tools/call` line, from request to response, without the MCP library.
//! - [`progress`]: progress notifications while a call is open.
//! - [`outcome`]: what a call came to, as an MCP result.
//! - [`agent_output`]: the lines to the agent, in as few writes as possible.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

pub mod agent_output;
pub mod descriptors;
pub mod fast_path;
pub mod handshake;
pub mod interceptor;
pub mod line_filter;
pub mod outcome;
pub mod progress;
