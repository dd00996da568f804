//! A service outside that sandboxes use with the operator's credential: `[upstreams.NAME]` in oubliette.toml.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use oubliette_protocol::{Error, Result, egress::check_upstream_name};
use reqwest::Url;
use secrecy::{ExposeSecret, SecretString};

use crate::service_path::PathPattern;

/// The user name of `basic` for a credential without one: what hosts of git repositories expect with a token.
const TOKEN_USER: &str = "x-access-token";
/// Maximum number of entries of `allow`, and of methods or paths in one.
const MAX_ALLOW_ENTRIES: usize = 256;

/// How a service's credential is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServiceAuth {
    /// `Authorization: Bearer <credential>`.
    Bearer,
    /// `Authorization: Basic`: the credential is `user:password`, or a password alone.
    Basic,
    /// As the value of this header.
    Header(HeaderName),
}

impl ServiceAuth {
    /// Parses `bearer`, `basic` or `header:NAME`.
    pub fn parse(text: &str) -> std::result::Result<Self, String> {
        match (text, text.strip_prefix("header:")) {
            ("bearer", _) => Ok(Self::Bearer),
            ("basic", _) => Ok(Self::Basic),
            (_, Some(name)) => {
                let name: HeaderName = name
                    .parse()
                    .map_err(|_| format!("{name:?} is no name of an HTTP header"))?;
                let framing = [
                    header::HOST,
                    header::CONTENT_LENGTH,
                    header::TRANSFER_ENCODING,
                    header::CONNECTION,
                    header::UPGRADE,
                ];
                match framing.contains(&name) {
                    true => Err(format!("the header {name} cannot carry a credential")),
                    false => Ok(Self::Header(name)),
                }
            }
            _ => Err(format!("{text:?}: use \"bearer\", \"basic\" or \"header:NAME\"")),
        }
    }
}

/// An entry of `allow`: requests with one of these methods to one of these paths pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceRule {
    methods: Vec<Method>,
    paths: Vec<PathPattern>,
}

impl ServiceRule {
    /// Parses methods such as `GET`, and paths relative to `base_url`; a `*` at the end of a path stands for anything.
    pub fn parse(methods: &[String], paths: &[String]) -> std::result::Result<Self, String> {
        for (field, count) in [("methods", methods.len()), ("paths", paths.len())] {
            if count == 0 || count > MAX_ALLOW_ENTRIES {
                return Err(format!("{field}: must have 1 to {MAX_ALLOW_ENTRIES} entries"));
            }
        }
        let methods = methods.iter().map(|text| parse_method(text));
        let paths = paths
            .iter()
            .map(|text| PathPattern::parse(text).map_err(|why| format!("paths: {text:?}: {why}")));
        Ok(Self {
            methods: methods.collect::<std::result::Result<_, _>>()?,
            paths: paths.collect::<std::result::Result<_, _>>()?,
        })
    }

    /// The path entry that lets a request through. `HEAD` is allowed where `GET` is.
    pub(crate) fn allowing(&self, method: &Method, path: &str) -> Option<&PathPattern> {
        let asked = if *method == Method::HEAD {
            &Method::GET
        } else {
            method
        };
        if !self
            .methods
            .iter()
            .any(|allowed| allowed == asked || allowed == method)
        {
            return None;
        }
        self.paths.iter().find(|allowed| allowed.matches(path))
    }
}

fn parse_method(text: &str) -> std::result::Result<Method, String> {
    let upper = !text.is_empty() && text.bytes().all(|b| b.is_ascii_uppercase() || b == b'-');
    let method = Method::from_bytes(text.as_bytes()).ok().filter(|_| upper);
    match method {
        Some(method) if method != Method::CONNECT && method != Method::TRACE => Ok(method),
        _ => Err(format!(
            "methods: {text:?}: use methods in capitals, such as \"GET\"; CONNECT and TRACE never pass"
        )),
    }
}

/// `[upstreams.NAME]`, its credential already read from the server's environment.
#[derive(Debug, Clone)]
pub struct ExternalService {
    /// The first segment of a request's path.
    pub name: String,
    /// What requests are relative to.
    pub base_url: Url,
    /// How the credential is sent.
    pub auth: ServiceAuth,
    /// The environment variable of the credential, if it needs one.
    pub api_key_env: Option<String>,
    /// The credential; none though it needs one: the variable is not set.
    pub api_key: Option<SecretString>,
    /// What passes. Without an entry, nothing does.
    pub allow: Vec<ServiceRule>,
    /// Whether git in a sandbox goes this way for `https://` URLs of the host.
    pub git: bool,
}

impl ExternalService {
    /// A service that needs no credential and lets nothing pass. Errors name the field.
    pub fn new(name: &str, base_url: &str) -> Result<Self> {
        let wrong = |field: &str, why: String| Error::invalid(format!("upstreams.{name}{field}: {why}"));
        check_upstream_name(name).map_err(|why| wrong("", why.to_owned()))?;
        let url = Url::parse(base_url).map_err(|e| wrong(".base_url", format!("{base_url:?}: {e}")))?;
        if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
            return Err(wrong(".base_url", "must be http:// or https://".into()));
        }
        if !url.username().is_empty()
            || url.password().is_some()
            || url.query().is_some()
            || url.fragment().is_some()
        {
            return Err(wrong(
                ".base_url",
                "no user, password, query or fragment; the credential belongs in the environment variable that \
                 api_key_env names"
                    .into(),
            ));
        }
        Ok(Self {
            name: name.to_owned(),
            base_url: url,
            auth: ServiceAuth::Bearer,
            api_key_env: None,
            api_key: None,
            allow: Vec::new(),
            git: false,
        })
    }

    /// Checks what is set after [`ExternalService::new`]: the length of `allow`, and that a header can carry the
    /// credential.
    pub fn check(&self) -> Result<()> {
        let name = &self.name;
        if self.allow.len() > MAX_ALLOW_ENTRIES {
            return Err(Error::invalid(format!(
                "upstreams.{name}.allow: at most {MAX_ALLOW_ENTRIES} entries"
            )));
        }
        match &self.api_key {
            Some(key) if HeaderValue::from_str(key.expose_secret()).is_err() => Err(Error::invalid(format!(
                "upstreams.{name}: the credential in {} has characters that no HTTP header can carry (a line break?)",
                self.api_key_env.as_deref().unwrap_or("the environment")
            ))),
            _ => Ok(()),
        }
    }

    /// Whether its credential is missing from the server's environment.
    pub fn lacks_key(&self) -> bool {
        self.api_key_env.is_some() && self.api_key.is_none()
    }

    /// The URLs that git in a sandbox is to ask at the service instead.
    pub fn git_urls(&self) -> Vec<String> {
        let url = &self.base_url;
        let (true, Some(host)) = (self.git, url.host_str()) else {
            return Vec::new();
        };
        let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
        let path = url.path().trim_end_matches('/');
        let schemes: &[&str] = match url.scheme() {
            "http" => &["https", "http"],
            _ => &["https"],
        };
        schemes
            .iter()
            .map(|scheme| format!("{scheme}://{host}{port}{path}/"))
            .collect()
    }

    /// Adds the credential to a request.
    pub(crate) fn authorise(&self, headers: &mut HeaderMap) {
        let Some(key) = &self.api_key else { return };
        let key = key.expose_secret();
        let (name, text) = match &self.auth {
            ServiceAuth::Bearer => (header::AUTHORIZATION, format!("Bearer {key}")),
            ServiceAuth::Basic => (header::AUTHORIZATION, format!("Basic {}", basic(key))),
            ServiceAuth::Header(name) => (name.clone(), key.to_owned()),
        };
        if let Ok(mut value) = HeaderValue::from_str(&text) {
            value.set_sensitive(true);
            headers.insert(name, value);
        }
    }

    /// The forms of the credential that no answer may bring into a sandbox.
    pub(crate) fn secret_forms(&self) -> Vec<Vec<u8>> {
        let Some(key) = &self.api_key else {
            return Vec::new();
        };
        let key = key.expose_secret();
        let mut forms = vec![key.as_bytes().to_vec()];
        if self.auth == ServiceAuth::Basic {
            forms.push(basic(key).into_bytes());
            forms.extend(
                key.split_once(':')
                    .map(|(_, password)| password.as_bytes().to_vec()),
            );
        }
        forms
    }
}

fn basic(key: &str) -> String {
    match key.contains(':') {
        true => STANDARD.encode(key),
        false => STANDARD.encode(format!("{TOKEN_USER}:{key}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(auth: &str, key: &str) -> ExternalService {
        ExternalService {
            auth: ServiceAuth::parse(auth).unwrap(),
            api_key: Some(SecretString::from(key.to_owned())),
            ..ExternalService::new("s", "https://h.org/base").unwrap()
        }
    }

    #[test]
    fn the_credential_is_sent_as_configured() {
        for (auth, key, header, value) in [
            ("bearer", "k", "authorization", "Bearer k"),
            ("basic", "u:p", "authorization", "Basic dTpw"),
            ("basic", "p", "authorization", "Basic eC1hY2Nlc3MtdG9rZW46cA=="),
            ("header:X-Key", "k", "x-key", "k"),
        ] {
            let mut headers = HeaderMap::new();
            headers.append(HeaderName::from_static("x-key"), HeaderValue::from_static("mine"));
            let service = service(auth, key);
            service.authorise(&mut headers);
            assert_eq!(headers.get(header).unwrap(), value);
            assert_eq!(headers.get_all(header).iter().count(), 1);
            assert!(!format!("{service:?}").contains("\"k\""));
        }
        for auth in ["", "Bearer", "header:", "header:a b", "header:host", "digest"] {
            assert!(ServiceAuth::parse(auth).is_err(), "{auth}");
        }
    }

    #[test]
    fn git_is_rewritten_for_the_services_host_and_path() {
        let urls = |base: &str| {
            let service = ExternalService {
                git: true,
                ..ExternalService::new("s", base).unwrap()
            };
            service.git_urls()
        };
        assert_eq!(urls("https://github.com"), ["https://github.com/"]);
        assert_eq!(urls("https://github.com:443/"), ["https://github.com/"]);
        assert_eq!(urls("https://h.org:8443/git/"), ["https://h.org:8443/git/"]);
        assert_eq!(
            urls("http://127.0.0.1:3000"),
            ["https://127.0.0.1:3000/", "http://127.0.0.1:3000/"]
        );
        assert!(
            ExternalService::new("s", "https://h.org")
                .unwrap()
                .git_urls()
                .is_empty()
        );
    }

    #[test]
    fn a_wrong_service_is_refused_with_its_field() {
        for (name, url, field) in [
            ("a/b", "https://h.org", "upstreams.a/b"),
            ("", "https://h.org", "upstreams."),
            ("a", "ftp://h.org", "upstreams.a.base_url"),
            ("a", "h.org", "upstreams.a.base_url"),
            ("a", "https://u:p@h.org", "upstreams.a.base_url"),
            ("a", "https://h.org?x", "upstreams.a.base_url"),
        ] {
            let error = ExternalService::new(name, url).unwrap_err();
            assert!(error.message.contains(field), "{}", error.message);
        }
        let texts = |given: &[&str]| given.iter().map(|t| (*t).to_owned()).collect::<Vec<_>>();
        for (methods, paths, field) in [
            (&["get"][..], &["x"][..], "methods"),
            (&["CONNECT"], &["x"], "methods"),
            (&["*"], &["x"], "methods"),
            (&[], &["x"], "methods"),
            (&["GET"], &[], "paths"),
            (&["GET"], &["a/*/b"], "paths"),
            (&["GET"], &["a/../b"], "paths"),
        ] {
            let error = ServiceRule::parse(&texts(methods), &texts(paths)).unwrap_err();
            assert!(error.contains(field), "{error}");
        }
    }
}
