//! What a model's answer says it used, read from the bytes as they pass.
//!
//! Nothing is held back and nothing of the stream is kept: a chunk is looked at and passed on. In the order data flows:
//!
//! - [`api`]: which model API a request speaks.
//! - [`request_reader`]: the model a request names, and its size.
//! - [`event_lines`]: the data of server-sent events, piece by piece.
//! - [`field_scanner`]: a few fields of a JSON text of any length, in bounded memory.
//! - [`token_counts`]: the counts of an answer, merged over its events, whatever the API.
//! - [`answer_reader`]: one answer from its first byte to its end, and what it used.

mod answer_reader;
mod api;
mod event_lines;
mod field_scanner;
mod request_reader;
mod token_counts;

pub(crate) use answer_reader::{AnswerReader, AnswerState};
pub use api::ModelApi;
pub(crate) use request_reader::RequestReader;

/// Bytes of text that are taken for one token where an answer does not say how many it has.
const BYTES_PER_TOKEN: u64 = 4;

/// Estimates how many tokens so many bytes of text are.
fn estimate_tokens(bytes: u64) -> u64 {
    bytes.div_ceil(BYTES_PER_TOKEN)
}

/// The first 128 characters of a model's name, without control characters: it comes from a sandbox or a provider.
fn bounded_model_name(name: &str) -> String {
    name.chars().filter(|c| !c.is_control()).take(128).collect()
}
