//! One tool call: where its name leads, what the server is asked, what came of it.

use std::sync::Arc;

use oubliette_protocol::{CallerId, relay::method, tool::CallResult};
use oubliette_relay::{CallError, CallOptions};
use serde::Serialize;
use serde_json::value::RawValue;

use crate::{
    express::{Calling, Reach},
    link::Link,
    outcome::{Source, answered, away, failed},
    patience::Beat,
    registry::{Registry, Route},
};

/// Makes calls. Arguments pass through as the text they came as.
pub(crate) struct Calls {
    pub(crate) registry: Arc<Registry>,
    pub(crate) link: Arc<Link>,
    pub(crate) beat: Beat,
}

/// What came of a call.
pub(crate) enum Answer {
    /// The answer from there, not yet looked into.
    Given(Source, Box<RawValue>),
    /// There is none: a result that says why.
    None(CallResult),
}

impl Answer {
    pub(crate) fn result(self) -> CallResult {
        match self {
            Answer::Given(source, raw) => match serde_json::from_str(raw.get()) {
                Ok(value) => answered(source, value),
                Err(why) => failed(CallError::BadAnswer(why.to_string())),
            },
            Answer::None(result) => result,
        }
    }
}

/// What the server is asked. It has no `Debug`: it may carry the agent's key.
#[derive(Serialize)]
#[serde(untagged)]
enum Params<'a> {
    /// `caller_tool`.
    Caller {
        tool: &'a str,
        arguments: &'a RawValue,
        caller_id: &'a CallerId,
    },
    /// `agent_call_tool`.
    Agent { tool: &'a str, arguments: &'a RawValue },
    /// `oubliette_call_tool`.
    Own {
        tool: &'a str,
        arguments: &'a RawValue,
        api_key: &'a str,
    },
    /// A base tool's own method.
    Base(&'a RawValue),
}

impl Calls {
    /// Starts a call. Name and arguments are written down at once; dropping the future gives the call up
    /// and tells the server.
    pub(crate) fn start(
        &self,
        name: &str,
        arguments: &RawValue,
        options: CallOptions,
    ) -> impl Future<Output = Answer> + Send + 'static + use<> {
        let route = self.registry.route(name, self.link.key().is_some());
        let asked = match self.link.peer() {
            Some(peer) => {
                let (method, params) = self.request(&route, arguments);
                peer.ask(method, &params, options).map_err(failed)
            }
            None => Err(away(self.link.socket())),
        };
        let source = route.source();
        async move {
            match asked {
                Ok(asked) => match asked.answer().await {
                    Ok(raw) => Answer::Given(source, raw),
                    Err(why) => Answer::None(failed(why)),
                },
                Err(refused) => Answer::None(refused),
            }
        }
    }

    /// Method and params of a call by this route.
    fn request<'a>(&'a self, route: &'a Route, arguments: &'a RawValue) -> (&'a str, Params<'a>) {
        match route {
            Route::Caller { caller_id, tool } => {
                let params = Params::Caller {
                    tool,
                    arguments,
                    caller_id,
                };
                (method::CALLER_TOOL, params)
            }
            Route::Agent(tool) => (method::AGENT_CALL_TOOL, Params::Agent { tool, arguments }),
            Route::Base(tool) => (tool, Params::Base(arguments)),
            Route::Own(tool) => {
                let api_key = self.link.key().map(|key| key.expose()).unwrap_or_default();
                let params = Params::Own {
                    tool,
                    arguments,
                    api_key,
                };
                (method::OUBLIETTE_CALL_TOOL, params)
            }
        }
    }
}

impl Reach for Calls {
    fn call(
        &self,
        name: &str,
        arguments: &RawValue,
        options: CallOptions,
    ) -> Option<Calling<impl Future<Output = Answer> + Send + 'static + use<>>> {
        Some(Calling {
            answer: self.start(name, arguments, options),
            // Dropping it is enough.
            stop: None,
        })
    }

    fn beat(&self) -> &Beat {
        &self.beat
    }
}
