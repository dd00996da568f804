//! Which requests are model calls, and their path at the provider.
//!
//! A path is checked as it stands and sent on as it was checked: nothing is normalised or collapsed in
//! between, and a path that would need it is refused. So the provider sees exactly what was allowed.

use http::{Method, StatusCode, Uri};

use crate::refusal::EgressRefusal;

/// The allowed model calls, as an error text lists them.
pub(crate) const ALLOWED_CALLS: &str = "POST messages, messages/count_tokens, chat/completions, responses, \
     models/<model>:generateContent, :streamGenerateContent, :countTokens; GET models, models/<model>";

/// The parsed path of a request to the gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ModelRequestPath {
    /// The provider's name.
    pub provider: String,
    /// The path after the provider: checked segments, none of them empty, `.` or `..`.
    pub rest: Vec<String>,
}

impl ModelRequestPath {
    /// Parses `/<provider>/<rest>`.
    pub(crate) fn parse(uri: &Uri) -> Result<Self, EgressRefusal> {
        if uri.scheme().is_some() || uri.authority().is_some() {
            return Err(bad_request(
                "ask with a plain path, /<provider>/…; this is not a proxy",
            ));
        }
        let path = uri
            .path()
            .strip_prefix('/')
            .ok_or_else(|| bad_request("the path must begin with a slash"))?;
        let mut segments = Vec::new();
        for raw in path.split('/') {
            segments.push(parse_segment(raw)?);
        }
        let mut segments = segments.into_iter();
        match segments.next() {
            Some(provider) if segments.len() > 0 => Ok(Self {
                provider,
                rest: segments.collect(),
            }),
            _ => Err(bad_request(
                "the path must be /<provider>/<path of the model call>",
            )),
        }
    }

    /// The path without the provider, as the debugger shows it.
    pub(crate) fn path(&self) -> String {
        format!("/{}", self.rest.join("/"))
    }

    /// Checks that this is a model call with the right method, or a path in `allow_paths`.
    pub(crate) fn check(&self, method: &Method, allow_paths: &[String]) -> Result<(), EgressRefusal> {
        let rest: Vec<&str> = self.rest.iter().map(String::as_str).collect();
        if allow_paths.iter().any(|allowed| matches_allowed(allowed, &rest)) {
            return Ok(());
        }
        let expected = match model_call_method(strip_prefixes(&rest)) {
            Some(expected) => expected,
            None => {
                return Err(EgressRefusal::new(
                    StatusCode::FORBIDDEN,
                    "not_allowed",
                    format!(
                        "{} is not a model call. Allowed: {ALLOWED_CALLS}; allow_paths of [providers.{}] adds more",
                        self.path(),
                        self.provider
                    ),
                ));
            }
        };
        if *method == expected || (*method == Method::HEAD && expected == Method::GET) {
            return Ok(());
        }
        Err(EgressRefusal::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "not_allowed",
            format!("{} takes {expected}, not {method}", self.path()),
        ))
    }

    /// The path at a provider whose base URL has the path `base`. If that names a version (it ends in
    /// `/v1`, or in `/v1beta/openai`), it replaces the version of the request.
    pub(crate) fn provider_path(&self, base: &str) -> String {
        let base = base.trim_end_matches('/');
        let mut backwards = base.rsplit('/');
        let decided = match (backwards.next(), backwards.next()) {
            (Some("openai"), Some(before)) => is_version(before),
            (Some(last), _) => is_version(last),
            (None, _) => false,
        };
        let rest = match self.rest.split_first() {
            Some((version, rest)) if decided && is_version(version) && !rest.is_empty() => rest,
            _ => &self.rest,
        };
        format!("{base}/{}", rest.join("/"))
    }
}

/// Checks one segment: letters, digits and the punctuation of model names. `%3A` and `%40` are the
/// only escapes decoded; clients need no others.
fn parse_segment(raw: &str) -> Result<String, EgressRefusal> {
    let text = raw.replace("%3A", ":").replace("%3a", ":").replace("%40", "@");
    let plain =
        |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_' | b'~' | b':' | b'@' | b'+');
    if text.is_empty() {
        return Err(bad_request(
            "the path has an empty segment (// or a slash at its end)",
        ));
    }
    if text.bytes().all(|b| b == b'.') {
        return Err(bad_request("the path has a segment of dots"));
    }
    if !text.bytes().all(plain) {
        return Err(bad_request(
            "the path has characters that no model call needs (escapes, backslashes, …)",
        ));
    }
    Ok(text)
}

/// Strips what may precede a model call: versions, and the prefixes of providers and gateways.
pub(crate) fn strip_prefixes<'a>(mut rest: &'a [&'a str]) -> &'a [&'a str] {
    loop {
        rest = match rest {
            ["deployments", _, tail @ ..] => tail,
            [first, tail @ ..] if is_version(first) || matches!(*first, "api" | "openai" | "anthropic") => {
                tail
            }
            _ => return rest,
        };
    }
}

/// The HTTP method of a model call; `None` if the path is no model call.
fn model_call_method(rest: &[&str]) -> Option<Method> {
    match rest {
        ["messages"] | ["messages", "count_tokens"] | ["chat", "completions"] | ["responses"] => {
            Some(Method::POST)
        }
        ["models"] => Some(Method::GET),
        ["models" | "tunedModels", model] => match model.split_once(':') {
            Some((name, "generateContent" | "streamGenerateContent" | "countTokens")) if !name.is_empty() => {
                Some(Method::POST)
            }
            // After the colon stands a tag, as in `llama3:8b`, or an unknown verb, which has capitals.
            Some((_, verb)) if verb.bytes().any(|b| b.is_ascii_uppercase()) => None,
            _ => Some(Method::GET),
        },
        // Model names with an owner: models/meta-llama/llama-4.
        ["models", _, model] if !model.contains(':') => Some(Method::GET),
        _ => None,
    }
}

/// Whether an entry of `allow_paths` matches this path, with or without its version; a `*` at the end
/// matches anything but nothing.
fn matches_allowed(allowed: &str, rest: &[&str]) -> bool {
    let allowed = allowed.trim_matches('/');
    if allowed.is_empty() {
        return false;
    }
    let unversioned = match rest {
        [version, tail @ ..] if is_version(version) => tail,
        _ => rest,
    };
    [rest, unversioned].iter().any(|path| {
        let path = path.join("/");
        match allowed.strip_suffix('*') {
            Some(start) => path.starts_with(start) && path.len() > start.len(),
            None => path == allowed,
        }
    })
}

/// `v1`, `v1beta`, `v2alpha1`.
fn is_version(segment: &str) -> bool {
    let mut bytes = segment.bytes();
    bytes.next() == Some(b'v')
        && bytes.next().is_some_and(|b| b.is_ascii_digit())
        && segment.len() <= 12
        && bytes.all(|b| b.is_ascii_digit() || b.is_ascii_lowercase())
}

fn bad_request(message: &str) -> EgressRefusal {
    EgressRefusal::new(StatusCode::BAD_REQUEST, "invalid_argument", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(path: &str) -> Result<ModelRequestPath, EgressRefusal> {
        ModelRequestPath::parse(&path.parse::<Uri>().unwrap())
    }

    fn status(method: &Method, path: &str, allow: &[&str]) -> u16 {
        let allow: Vec<String> = allow.iter().map(|a| (*a).to_owned()).collect();
        match parse(path).and_then(|path| path.check(method, &allow)) {
            Ok(()) => 200,
            Err(refusal) => refusal.status.as_u16(),
        }
    }

    #[test]
    fn model_calls_pass() {
        for path in [
            "/anthropic/v1/messages",
            "/anthropic/v1/messages/count_tokens",
            "/openai/v1/chat/completions",
            "/openai/chat/completions",
            "/openai/v1/responses",
            "/azure/openai/deployments/gpt-5/chat/completions",
            "/gemini/v1beta/models/gemini-3-pro:streamGenerateContent",
            "/gemini/v1beta/models/gemini-3-pro%3AgenerateContent",
            "/gemini/v1beta/models/gemini-3-pro:countTokens",
        ] {
            assert_eq!(status(&Method::POST, path, &[]), 200, "{path}");
            assert_ne!(status(&Method::DELETE, path, &[]), 200, "{path}");
        }
        for path in [
            "/openai/v1/models",
            "/openai/v1/models/gpt-5",
            "/vllm/v1/models/meta-llama/llama-4",
            "/ollama/v1/models/llama3:8b",
        ] {
            assert_eq!(status(&Method::GET, path, &[]), 200, "{path}");
            assert_eq!(status(&Method::POST, path, &[]), 405, "{path}");
        }
    }

    #[test]
    fn everything_else_is_refused() {
        for path in [
            "/openai/v1/files",
            "/openai/v1/threads/t1/messages",
            "/openai/v1/fine_tuning/jobs",
            "/openai/v1/organization/api_keys",
            "/openai/v1/responses/resp_1",
            "/anthropic/v1/messages/batches",
            "/gemini/v1beta/models/gemini-3-pro:batchGenerateContent",
            "/gemini/v1beta/models/:generateContent",
            "/gemini/v1beta/corpora/x:query",
            "/openai/v1/completions",
            "/openai/messages/x",
        ] {
            assert_eq!(status(&Method::POST, path, &[]), 403, "{path}");
        }
    }

    #[test]
    fn paths_that_would_need_normalising_are_refused() {
        for path in [
            "/openai//v1/messages",
            "/openai/v1/messages/",
            "/openai/v1/../v1/messages",
            "/openai/./messages",
            "/openai/v1/.../messages",
            "/openai/%2e%2e/messages",
            "/openai/v1%2fmessages",
            "/openai/v1%2Fadmin%2F..%2Fmessages",
            "/openai/v1/%6dessages",
            "/openai/v1\\messages",
            "/openai/v1/messages;x=1",
            "/openai/v1/chat%00/completions",
            "/openai",
            "/openai/",
            "/",
            "//messages",
            "http://elsewhere/openai/v1/messages",
        ] {
            let Ok(uri) = path.parse::<Uri>() else { continue };
            let refusal = ModelRequestPath::parse(&uri).expect_err(path);
            assert_eq!(refusal.status, StatusCode::BAD_REQUEST, "{path}");
        }
    }

    #[test]
    fn allow_paths_allows_additional_paths() {
        let allow = ["embeddings", "/v1/files/*"];
        assert_eq!(status(&Method::POST, "/openai/v1/embeddings", &allow), 200);
        assert_eq!(status(&Method::POST, "/openai/embeddings", &allow), 200);
        assert_eq!(status(&Method::GET, "/openai/v1/files/f1", &allow), 200);
        assert_eq!(status(&Method::GET, "/openai/v1/files", &allow), 403);
        assert_eq!(status(&Method::GET, "/openai/v1/filesystem", &allow), 403);
        assert_eq!(status(&Method::GET, "/openai/v1/x", &["", "/"]), 403);
    }

    #[test]
    fn a_version_in_the_base_url_replaces_the_requests() {
        for (base, path, expected) in [
            ("/", "/p/v1/messages", "/v1/messages"),
            ("", "/p/chat/completions", "/chat/completions"),
            ("/v1", "/p/v1/chat/completions", "/v1/chat/completions"),
            ("/v1/", "/p/chat/completions", "/v1/chat/completions"),
            (
                "/api/paas/v4",
                "/p/v1/chat/completions",
                "/api/paas/v4/chat/completions",
            ),
            ("/openai/v1", "/p/v1/models", "/openai/v1/models"),
            (
                "/v1beta/openai",
                "/p/v1/chat/completions",
                "/v1beta/openai/chat/completions",
            ),
            (
                "/v1/account/gateway/anthropic",
                "/p/v1/messages",
                "/v1/account/gateway/anthropic/v1/messages",
            ),
            (
                "/v1beta",
                "/p/v1beta/models/m:countTokens",
                "/v1beta/models/m:countTokens",
            ),
        ] {
            assert_eq!(
                parse(path).unwrap().provider_path(base),
                expected,
                "{base} + {path}"
            );
        }
    }
}
