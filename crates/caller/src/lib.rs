//! Lend functions of your program to an agent, in ten lines.
//!
//! ```no_run
//! # #[derive(serde::Deserialize, schemars::JsonSchema)] struct Note { message: String }
//! # async fn run() -> Result<(), oubliette_caller::Error> {
//! use oubliette_caller::Oubliette;
//!
//! let oubliette = Oubliette::connect("http://127.0.0.1:8080", std::env::var("OUBLIETTE_TOKEN").unwrap_or_default())?;
//! let session = oubliette
//!     .lend("myapp")
//!     .tool("notify", "Show a note to the user", async |note: Note| {
//!         println!("{}", note.message);
//!         Ok::<_, String>("shown")
//!     })
//!     .start("Tell me hello with your notify tool.")
//!     .await?;
//! println!("{}", session.turn(1).await?.text);
//! # Ok(()) }
//! ```
//!
//! The agent sees `myapp_notify` with a schema made from `Note`. The library reads the session's event
//! stream, runs your function for each request (many at once), and sends the answer. After a lost connection
//! it resumes at the last event it has seen, and it runs no request twice.
//!
//! It uses only the server's public REST and SSE interface. In the order data flows:
//!
//! - [`client`]: the server's address and the token; single calls.
//! - [`lend`]: which functions are lent, and how a session is started.
//! - `sse`: bytes → server-sent events; [`event`]: one event of a session.
//! - `follow`: reading the event stream, with reconnects; `request_handler`: running the lent function for each
//!   request and answering it once.
//! - [`session`]: the program's handle on the session.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

pub mod client;
mod error;
pub mod event;
mod follow;
pub mod lend;
mod request_handler;
pub mod session;
mod sse;

pub use client::Oubliette;
pub use error::Error;
pub use event::Event;
pub use lend::{Lend, Message};
pub use session::{Session, Turn};
