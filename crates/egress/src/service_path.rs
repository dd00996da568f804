//! Which requests to a service pass: `allow` of `[upstreams.NAME]`.
//!
//! A path is compared as it stands and sent on as it was compared. Whatever a server might read differently is refused:
//! segments of dots, empty segments, parameters after a semicolon, backslashes, and escapes of characters that need none
//! or that separate paths. So no way of writing a path gets around the list.

use http::{StatusCode, Uri};

use crate::refusal::EgressRefusal;

/// An entry of `paths`: a path, or the beginning of one, which a `*` at its end marks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PathPattern {
    /// As written.
    text: String,
    /// Without the first slash and the `*`.
    start: String,
    is_prefix: bool,
}

impl PathPattern {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let path = text.strip_prefix('/').unwrap_or(text);
        let (start, is_prefix) = match path.strip_suffix('*') {
            Some(start) => (start, true),
            None => (path, false),
        };
        if start.contains('*') {
            return Err("a * stands only at the end".into());
        }
        if path.len() > 2000 {
            return Err("at most 2000 bytes".into());
        }
        check_path(start)?;
        Ok(Self {
            text: text.to_owned(),
            start: start.to_owned(),
            is_prefix,
        })
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether it stands for a path that [`ServicePath::parse`] accepted.
    pub(crate) fn matches(&self, path: &str) -> bool {
        match self.is_prefix {
            true => path.starts_with(&self.start),
            false => path == self.start,
        }
    }
}

/// The parsed path of a request: `/<service>/<rest>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ServicePath {
    /// What follows the service's name, without the slash between them.
    pub rest: String,
    /// Whether there was a slash after the service's name.
    has_slash: bool,
}

impl ServicePath {
    /// The first segment of a request's path, as it stands.
    pub(crate) fn service_name(uri: &Uri) -> &str {
        let path = uri.path();
        let path = path.strip_prefix('/').unwrap_or(path);
        path.split('/').next().unwrap_or_default()
    }

    /// Parses and checks the path of a request to a service.
    pub(crate) fn parse(uri: &Uri) -> Result<Self, EgressRefusal> {
        if uri.scheme().is_some() || uri.authority().is_some() {
            return Err(bad_request(
                "ask with a plain path, /<service>/…; this is not a proxy".into(),
            ));
        }
        let path = uri.path();
        let path = path.strip_prefix('/').unwrap_or(path);
        let (rest, has_slash) = match path.split_once('/') {
            Some((_, rest)) => (rest, true),
            None => ("", false),
        };
        check_path(rest).map_err(|why| bad_request(format!("the path {why}")))?;
        Ok(Self {
            rest: rest.to_owned(),
            has_slash,
        })
    }

    /// The path at a service whose base URL has the path `base`.
    pub(crate) fn full_path(&self, base: &str) -> String {
        let base = base.trim_end_matches('/');
        match self.has_slash {
            true => format!("{base}/{}", self.rest),
            false => base.to_owned(),
        }
    }
}

/// Checks a query: nothing in it may stand for another method or another credential.
pub(crate) fn check_query(query: &str) -> Result<(), EgressRefusal> {
    const REFUSED: [&str; 8] = [
        "_method",
        "x-http-method-override",
        "access_token",
        "private_token",
        "job_token",
        "oauth_token",
        "api_key",
        "api-key",
    ];
    for (name, _) in url::form_urlencoded::parse(query.as_bytes()) {
        let name = name.to_ascii_lowercase();
        if REFUSED.contains(&name.as_str()) {
            return Err(bad_request(format!(
                "the query has {name}: methods are not overridden, and the credential is added outside"
            )));
        }
    }
    Ok(())
}

/// Checks that a path means the same to every server. An empty last segment is a slash at the end, which is as good as
/// any other character.
fn check_path(path: &str) -> Result<(), String> {
    let mut segments = path.split('/').peekable();
    while let Some(segment) = segments.next() {
        if segment.is_empty() && segments.peek().is_some() {
            return Err("has an empty segment (//)".into());
        }
        check_segment(segment)?;
    }
    Ok(())
}

fn check_segment(raw: &str) -> Result<(), String> {
    let mut decoded = Vec::with_capacity(raw.len());
    let mut bytes = raw.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'%' => {
                let digit = |b: Option<u8>| b.and_then(|b| char::from(b).to_digit(16));
                let (Some(high), Some(low)) = (digit(bytes.next()), digit(bytes.next())) else {
                    return Err("has a % that begins no escape".into());
                };
                let Ok(value) = u8::try_from(high * 16 + low) else {
                    return Err("has a % that begins no escape".into());
                };
                if is_unreserved(value) || value.is_ascii_control() || b"/\\%;".contains(&value) {
                    return Err(format!(
                        "has the escape %{value:02X}, which can be read in more than one way"
                    ));
                }
                decoded.push(value);
            }
            b if is_unreserved(b) || b"!$&'()*+,=:@".contains(&b) => decoded.push(b),
            b';' => return Err("has a semicolon".into()),
            b'\\' => return Err("has a backslash".into()),
            _ => return Err("has characters that must be escaped".into()),
        }
    }
    // Overlong forms of a dot or a slash are no UTF-8.
    let Ok(text) = String::from_utf8(decoded) else {
        return Err("has escapes that are no UTF-8".into());
    };
    if !text.is_empty() && text.chars().all(|c| c == '.') {
        return Err("has a segment of dots".into());
    }
    // Some servers turn these into dots, slashes and percent signs.
    let lookalike = |c: char| {
        matches!(
            c,
            '\u{2024}'
                ..='\u{2026}'
                    | '\u{2044}'
                    | '\u{2215}'
                    | '\u{fe52}'
                    | '\u{fe68}'
                    | '\u{fe6a}'
                    | '\u{ff05}'
                    | '\u{ff0e}'
                    | '\u{ff0f}'
                    | '\u{ff1b}'
                    | '\u{ff3c}'
        ) || c.is_control()
    };
    match text.chars().find(|c| lookalike(*c)) {
        Some(c) => Err(format!(
            "has the character U+{:04X}, which can be read in more than one way",
            u32::from(c)
        )),
        None => Ok(()),
    }
}

/// Characters that never need an escape (RFC 3986, 2.3).
fn is_unreserved(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~".contains(&byte)
}

fn bad_request(message: String) -> EgressRefusal {
    EgressRefusal::new(StatusCode::BAD_REQUEST, "invalid_argument", message)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rest(path: &str) -> Result<String, EgressRefusal> {
        ServicePath::parse(&path.parse::<Uri>().unwrap()).map(|path| path.rest)
    }

    fn allows(pattern: &str, path: &str) -> bool {
        PathPattern::parse(pattern).unwrap().matches(path)
    }

    #[test]
    fn a_pattern_matches_its_path_or_what_begins_with_it() {
        assert!(allows("repos/acme/app", "repos/acme/app") && allows("/repos/acme/app", "repos/acme/app"));
        assert!(
            !allows("repos/acme/app", "repos/acme/app/")
                && !allows("repos/acme/app", "repos/acme/app/issues")
        );
        assert!(allows("repos/acme/*", "repos/acme/app/issues") && allows("repos/acme/*", "repos/acme/"));
        assert!(!allows("repos/acme/*", "repos/acme") && !allows("repos/acme/*", "repos/acmeevil"));
        assert!(!allows("repos/acme/*", "Repos/acme/x") && !allows("repos/acme/*", "x/repos/acme/y"));
        assert!(allows("*", "") && allows("*", "anything/at/all") && allows("/*", "x"));
        assert!(allows("", "") && !allows("", "x"));
        for wrong in [
            "a*b",
            "a/*/b",
            "**",
            "a//b",
            "../a",
            "a/..",
            "a/%2e%2e/b",
            "a;b",
            "a b",
        ] {
            assert!(PathPattern::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_servers_read_in_more_than_one_way_is_refused() {
        for path in [
            "/s/a/../b",
            "/s/..",
            "/s/a/.",
            "/s/a/.../b",
            "/s//a",
            "/s/a//b",
            "/s/a//",
            "/s/%2e%2e/a",
            "/s/.%2E/a",
            "/s/%2e/a",
            "/s/a%2fb",
            "/s/a%2Fb",
            "/s/a%5cb",
            "/s/a\\b",
            "/s/a;x=1/b",
            "/s/..;/a",
            "/s/a%3Bb",
            "/s/a%252e%252e",
            "/s/a%00b",
            "/s/a%0d%0ab",
            "/s/%61dmin",
            "/s/a%",
            "/s/a%2",
            "/s/a%zz",
            "/s/%c0%ae%c0%ae/a",
            "/s/a%ff",
            "/s/%EF%BC%8E%EF%BC%8E/a",
            "/s/a%E2%88%95b",
            "/s/%C2%85",
            "http://elsewhere/s/a",
        ] {
            let Ok(uri) = path.parse::<Uri>() else { continue };
            let refusal = ServicePath::parse(&uri).expect_err(path);
            assert_eq!(refusal.status, StatusCode::BAD_REQUEST, "{path}");
        }
    }

    #[test]
    fn ordinary_paths_are_sent_as_they_stand() {
        for (path, expected) in [
            ("/s/a/b", "a/b"),
            ("/s/a/b/", "a/b/"),
            ("/s/a%20b/%C3%A4", "a%20b/%C3%A4"),
            ("/s/.github/a..b", ".github/a..b"),
            ("/s/a:b@c+d,e=f", "a:b@c+d,e=f"),
            ("/s/a%3Fb%23c", "a%3Fb%23c"),
            ("/s/", ""),
            ("/s", ""),
        ] {
            assert_eq!(rest(path).unwrap(), expected, "{path}");
        }
        let full = |path: &str, base: &str| {
            ServicePath::parse(&path.parse().unwrap())
                .unwrap()
                .full_path(base)
        };
        assert_eq!(full("/s/a", "/"), "/a");
        assert_eq!(full("/s/a/", "/base/"), "/base/a/");
        assert_eq!(full("/s", "/base"), "/base");
        assert_eq!(full("/s/", "/base"), "/base/");
    }

    #[test]
    fn a_query_overrides_neither_method_nor_credential() {
        assert!(check_query("service=git-upload-pack&page=2&key=x").is_ok());
        for query in [
            "_method=DELETE",
            "a=b&ACCESS_TOKEN=x",
            "%5Fmethod=DELETE",
            "private_token",
        ] {
            assert!(check_query(query).is_err(), "{query}");
        }
    }

    proptest! {
        /// However a path is written, a server that decodes and resolves it finds it beneath the allowed one.
        #[test]
        fn no_path_leaves_the_allowed_one(tail in "[a-z./%;\\\\2efcEFC0-9]{0,24}") {
            let Ok(uri) = format!("/s/ok/{tail}").parse::<Uri>() else { return Ok(()) };
            let Ok(path) = ServicePath::parse(&uri) else { return Ok(()) };
            prop_assert!(allows("ok/*", &path.rest));
            let url = reqwest::Url::parse(&format!("http://h{}", path.full_path("/base"))).unwrap();
            prop_assert_eq!(url.path(), path.full_path("/base"));
            prop_assert!(url.path().starts_with("/base/ok/"));
            for part in url.path().split('/') {
                let part = part.to_ascii_lowercase();
                prop_assert!(part != "." && part != "..");
                prop_assert!(["%2e", "%2f", "%5c", "%25", "%3b"].iter().all(|escape| !part.contains(escape)));
            }
        }
    }
}
