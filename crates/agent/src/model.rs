//! A model asked over HTTP.

use agent_client_protocol::{Error, ErrorCode};
use oubliette_protocol::Object;

use crate::{
    config::ModelConfig,
    memory::{Keeper, Memory},
    turn::{Ended, Turn},
};

/// What came of a turn.
pub(crate) struct Outcome {
    pub(crate) ended: Ended,
}

impl Outcome {
    pub(crate) fn meta(&self) -> Object {
        Object::new()
    }
}

/// Runs a turn.
pub(crate) async fn run<K: Keeper>(
    _turn: &Turn<'_>,
    wanted: &ModelConfig,
    _prompt: &str,
    _memory: &mut Memory<K>,
) -> Result<Outcome, Error> {
    Err(Error::new(
        ErrorCode::INTERNAL_ERROR.value(),
        format!("cannot ask {} yet", wanted.model),
    ))
}
