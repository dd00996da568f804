//! Which model API a request speaks, and the error a client of that API understands.

use http::Method;
use serde_json::{Value, json};

use crate::paths::{ModelRequestPath, strip_prefixes};

/// The API of a request that asks a model for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelApi {
    /// OpenAI chat completions, and everything compatible.
    Chat,
    /// OpenAI Responses.
    Responses,
    /// Anthropic messages.
    Messages,
    /// Gemini `generateContent` and `streamGenerateContent`.
    Gemini,
    /// A path of `allow_paths`, such as embeddings. Its answer counts if it says what it used.
    Other,
}

impl ModelApi {
    /// The API of a request; `None` if it asks for no answer of a model: lists of models, counts of tokens.
    pub(crate) fn of_request(method: &Method, path: &ModelRequestPath) -> Option<Self> {
        if *method != Method::POST {
            return None;
        }
        let rest: Vec<&str> = path.rest.iter().map(String::as_str).collect();
        match strip_prefixes(&rest) {
            ["messages"] => Some(Self::Messages),
            ["chat", "completions"] => Some(Self::Chat),
            ["responses"] => Some(Self::Responses),
            ["messages", "count_tokens"] => None,
            ["models" | "tunedModels", model] => match model.split_once(':') {
                Some((_, "generateContent" | "streamGenerateContent")) => Some(Self::Gemini),
                _ => None,
            },
            _ => Some(Self::Other),
        }
    }

    /// The model that the path of a request names, as Gemini's and some deployments' do.
    pub(crate) fn model_in_path(path: &ModelRequestPath) -> Option<&str> {
        let mut segments = path.rest.iter();
        while let Some(segment) = segments.next() {
            if matches!(segment.as_str(), "models" | "tunedModels" | "deployments") {
                let named = segments.next()?;
                return Some(named.rsplit_once(':').map_or(named.as_str(), |(model, _)| model));
            }
        }
        None
    }

    /// The body of a 429 answer in this API's own form, worded so that its clients show it and do not ask again:
    /// a used up quota, not a rate that is too high.
    pub(crate) fn quota_error(self, message: &str) -> Value {
        match self {
            Self::Chat | Self::Responses | Self::Other => json!({ "error": {
                "message": message, "type": "insufficient_quota", "param": null, "code": "insufficient_quota",
            } }),
            Self::Messages => json!({
                "type": "error", "error": { "type": "rate_limit_error", "message": message },
            }),
            // Gemini's clients recognise a quota that opens again on another day by the end of its id.
            Self::Gemini => json!({ "error": {
                "code": 429, "message": message, "status": "RESOURCE_EXHAUSTED",
                "details": [{
                    "@type": "type.googleapis.com/google.rpc.QuotaFailure",
                    "violations": [{ "subject": "oubliette", "description": message, "quotaId": "BudgetPerDay" }],
                }],
            } }),
        }
    }

    /// The body of a 400 answer in this API's own form: the request would fail however often it is made.
    pub(crate) fn request_error(self, message: &str) -> Value {
        match self {
            Self::Chat | Self::Responses | Self::Other => json!({ "error": {
                "message": message, "type": "invalid_request_error", "param": null, "code": null,
            } }),
            Self::Messages => json!({
                "type": "error", "error": { "type": "invalid_request_error", "message": message },
            }),
            Self::Gemini => json!({ "error": {
                "code": 400, "message": message, "status": "FAILED_PRECONDITION",
            } }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> ModelRequestPath {
        ModelRequestPath::parse(&text.parse().unwrap()).unwrap()
    }

    #[test]
    fn each_path_has_its_api() {
        for (text, api, model) in [
            ("/openai/v1/chat/completions", Some(ModelApi::Chat), None),
            ("/openai/responses", Some(ModelApi::Responses), None),
            ("/anthropic/v1/messages", Some(ModelApi::Messages), None),
            ("/anthropic/v1/messages/count_tokens", None, None),
            (
                "/gemini/v1beta/models/g-3:streamGenerateContent",
                Some(ModelApi::Gemini),
                Some("g-3"),
            ),
            ("/gemini/v1beta/models/g-3:countTokens", None, Some("g-3")),
            (
                "/azure/openai/deployments/gpt-5/chat/completions",
                Some(ModelApi::Chat),
                Some("gpt-5"),
            ),
            ("/openai/v1/embeddings", Some(ModelApi::Other), None),
        ] {
            let path = path(text);
            assert_eq!(ModelApi::of_request(&Method::POST, &path), api, "{text}");
            assert_eq!(ModelApi::of_request(&Method::GET, &path), None, "{text}");
            assert_eq!(ModelApi::model_in_path(&path), model, "{text}");
        }
    }
}
