//! Caller tools: what the program that started a session lends to its agent.
//!
//! - [`book`]: the pure state machine; [`presence`] and [`finished`] are its parts.

pub mod book;
mod finished;
pub mod presence;

#[cfg(test)]
mod book_tests;
