//! Which headers of a message are passed on.

use http::{HeaderMap, HeaderName, header};

/// Headers that belong to one connection, not to the message (RFC 9110, 7.6.1).
const HOP_BY_HOP: [&str; 9] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Headers of a sandbox's request that a provider must not see: credentials, which only the gateway adds, and
/// headers that reveal the client's address.
const CLIENT_PRIVATE: [&str; 9] = [
    "authorization",
    "x-api-key",
    "x-goog-api-key",
    "api-key",
    "cookie",
    "cookie2",
    "forwarded",
    "via",
    "x-real-ip",
];

/// The headers of a sandbox's request that go to the provider.
pub(crate) fn to_provider(headers: &HeaderMap) -> HeaderMap {
    let mut passed = without_hop_by_hop(headers);
    let doomed: Vec<HeaderName> = passed
        .keys()
        .filter(|name| {
            let name = name.as_str();
            CLIENT_PRIVATE.contains(&name)
                || name.starts_with("proxy-")
                || name.starts_with("x-forwarded-")
                // Many servers read it as the same name with hyphens, which would get a dropped one through.
                || name.contains('_')
        })
        .cloned()
        .collect();
    for name in doomed {
        passed.remove(name);
    }
    // The HTTP client sets host and length itself; `expect` was answered by this server.
    for name in [header::HOST, header::CONTENT_LENGTH, header::EXPECT] {
        passed.remove(name);
    }
    passed
}

/// The headers of a provider's response that go to the sandbox.
pub(crate) fn from_provider(headers: &HeaderMap) -> HeaderMap {
    let mut passed = without_hop_by_hop(headers);
    passed.remove(header::SET_COOKIE);
    passed.remove(header::LOCATION);
    passed
}

/// All headers except hop-by-hop ones: those in [`HOP_BY_HOP`] and those `connection` names.
pub(crate) fn without_hop_by_hop(headers: &HeaderMap) -> HeaderMap {
    let named: Vec<String> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|name| name.trim().to_ascii_lowercase())
        .collect();
    let mut passed = HeaderMap::with_capacity(headers.len());
    for (name, value) in headers {
        if !HOP_BY_HOP.contains(&name.as_str()) && !named.iter().any(|n| n == name.as_str()) {
            passed.append(name.clone(), value.clone());
        }
    }
    passed
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn credentials_and_hop_by_hop_headers_are_dropped() {
        let mut headers = HeaderMap::new();
        let given = [
            ("authorization", "Bearer mine"),
            ("x-api-key", "mine"),
            ("x-goog-api-key", "mine"),
            ("api-key", "mine"),
            ("cookie", "a=b"),
            ("proxy-authorization", "Basic x"),
            ("proxy-anything", "x"),
            ("x-forwarded-for", "10.0.0.1"),
            ("x_api_key", "mine"),
            ("connection", "keep-alive, X-Secret-Hop"),
            ("x-secret-hop", "x"),
            ("transfer-encoding", "chunked"),
            ("host", "127.0.0.1"),
            ("content-length", "5"),
            ("anthropic-version", "2023-06-01"),
            ("anthropic-beta", "a"),
            ("content-type", "application/json"),
        ];
        for (name, value) in given {
            headers.append(name, HeaderValue::from_static(value));
        }
        let mut passed: Vec<_> = to_provider(&headers).keys().map(|k| k.to_string()).collect();
        passed.sort();
        assert_eq!(passed, ["anthropic-beta", "anthropic-version", "content-type"]);
    }
}
